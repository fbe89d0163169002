"""Keys are sorted in Arrow's order, whatever prefix they share and however long they are."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from backends.encoding import sorted_pairs as module
from backends.encoding.sorted_pairs import key_order
from tests.effort import effort


@pytest.fixture(autouse=True)
def few_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEYS_BY_COMPARISON", 2)
    monkeypatch.setattr(module, "COMPARED_BYTES", 12)


KEYS = {
    "of one length": lambda rng: rng.randbytes(11),
    "with few bytes that differ": lambda rng: b"user:" + bytes([rng.randrange(3), 7, rng.randrange(3)]) + b"x" * 20,
    "that differ behind what is looked at": lambda rng: b"a prefix of many bytes " + rng.randbytes(2),
    "of any length": lambda rng: rng.randbytes(rng.randint(0, 20)),
    "of zeros": lambda rng: b"\0" * rng.randint(0, 15),
    "that are others' beginnings": lambda rng: b"abcdefghijklm"[: rng.randint(0, 13)] + b"\0" * rng.randint(0, 2),
    "of little": lambda rng: bytes(rng.choices(b"\0\1\xff", k=rng.randint(0, 4))),
    "that are equal": lambda rng: b"the same key",
}


@pytest.mark.parametrize("kind", KEYS)
def test_the_order_is_that_of_bytes_and_stable(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(effort(20, 300)):
        values = [KEYS[kind](rng) for _ in range(rng.choice([3, 10, 200]))]
        keys = pa.array([b"before", *values, b"behind"], pa.binary())[1:-1]
        for given in (keys, keys.take(pc.sort_indices(keys))):
            assert np.asarray(key_order(given)).tolist() == np.asarray(pc.sort_indices(given)).tolist()


def test_no_keys_and_one() -> None:
    assert key_order(pa.array([], pa.binary())).to_pylist() == []
    assert key_order(pa.array([b"a"])).to_pylist() == [0]
