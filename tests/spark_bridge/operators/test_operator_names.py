"""Which names operators can have: the driver takes those that the store takes, and no others."""

from __future__ import annotations

from typing import Any, cast

import pytest

from backends import StateStoreId
from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.map_in_arrow import check_operator_name

NO_PLAN = cast(Any, None)


@pytest.mark.parametrize("name", ["größe", "-x", "x" * 201, "", ".x", "a/b", "a b", "x\n", None])
def test_driver_rejects_names_that_the_store_rejects(name: Any) -> None:
    with pytest.raises(InvalidStateStoreArgument):
        StateStoreId("ck", name, 0)
    with pytest.raises(InvalidOperatorError, match=r"operator=.*: use 1 to 200 letters"):
        check_operator_name(name, NO_PLAN)


@pytest.mark.parametrize("name", ["user_totals", "A.b-c", "_x", "0", "x" * 200])
def test_driver_accepts_names_that_the_store_accepts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_bridge.operators.map_in_arrow.declared_in", lambda df: [])
    check_operator_name(name, NO_PLAN)
    assert StateStoreId("ck", name, 0).operator_id == name
