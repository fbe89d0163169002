"""What requests cost, and prices that a user gives."""

from __future__ import annotations

import pytest

from backends.exceptions import InvalidStateStoreArgument
from backends.storage.requests import Prices


def test_each_kind_has_its_price() -> None:
    used = {"put": 1000, "get": 2000, "head": 1000, "list": 3000, "delete": 9000}
    assert Prices().dollars(used) == pytest.approx(0.005 + 0.0008 + 0.0004 + 0.015)
    moved = {"sent_bytes": 1 << 30, "received_bytes": 2 << 30}
    assert Prices().dollars(moved) == 0 == Prices().dollars({})
    assert Prices(sent_gib=0.01, received_gib=0.09).dollars(moved) == pytest.approx(0.19)


def test_missing_prices_are_defaults_and_the_string_says_all() -> None:
    given = Prices.parse(" put=0.0054, received_gib = 0.09 ")
    assert given == Prices(put=0.0054, received_gib=0.09) == Prices.parse(str(given)) and Prices.parse("") == Prices()


@pytest.mark.parametrize("text", ["putt=1", "put", "put=", "put=x", "put=-1", "put=nan", "put=inf", "put=1,get"])
def test_an_unknown_price_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(InvalidStateStoreArgument, match=r"is not a price: give put=, get=, .* dollars"):
        Prices.parse(text)
