"""What ``StateEngine`` asks of every engine: reads of many keys in any order, of one key, and of ranges."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from backends import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.buffered_engine import BufferedEngine
from backends.engines.engine import StateEngine
from backends.engines.file import SortedMapEngine
from backends.engines.rocksdb import LocalRocksDB
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState

MADE: dict[str, Callable[[Path, StateStoreConf], StateEngine]] = {
    "rocksdb": LocalRocksDB,
    "file": SortedMapEngine,
    "buffered": BufferedEngine,
}
PAIRS = {b"%04d" % n: b"value %d" % n for n in range(0, 1000, 2)}


@pytest.fixture(params=MADE)
def engine(request, tmp_path):
    """Every second number below a thousand in two families; a few of them are removed from one, and written anew."""
    (tmp_path / "engine").mkdir()
    made = MADE[request.param](tmp_path / "engine", StateStoreConf(fsync=False))
    pairs = SortedPairs.from_dict(PAIRS)
    made.prepare(Changes({"default": pairs, "other": pairs}))(LocalState(1))
    made.prepare(Changes({"other": SortedPairs.from_dict({b"0004": None, b"0006": b"new"})}))(LocalState(2))
    yield made
    made.close()


def expected(family: str) -> dict[bytes, bytes]:
    if family == "default":
        return PAIRS
    return {**{k: v for k, v in PAIRS.items() if k != b"0004"}, b"0006": b"new"}


@pytest.mark.parametrize("family", ["default", "other"])
@pytest.mark.parametrize("n", [1, 20, 700])
def test_many_keys_are_read_in_any_order(engine, family, n):
    keys = random.Random(n).choices([b"%04d" % i for i in range(1000)] + [b"", b"absent"], k=n)
    for asked in (keys, sorted(set(keys))):
        found = engine.get_many(pa.array(asked, pa.binary()), family).to_pylist()
        assert found == [expected(family).get(key) for key in asked]
        assert [engine.get_one(key, family) for key in asked[:50]] == found[:50]


@pytest.mark.parametrize("family", ["default", "other"])
@pytest.mark.parametrize(("start", "end"), [(None, None), (b"0003", b"0007"), (b"0004", b"0006"), (b"09", None)])
def test_ranges_come_in_order(engine, family, start, end):
    rows = [row for batch in engine.scan(start, end, family) for row in batch.to_pylist()]
    assert [(row["key"], row["value"]) for row in rows] == [
        (k, v)
        for k, v in sorted(expected(family).items())
        if (start is None or k >= start) and (end is None or k < end)
    ]


def test_a_family_that_is_not_there_is_empty(engine):
    assert engine.get_many(pa.array([b"0002"] * 100, pa.binary()), "absent").null_count == 100
    assert engine.get_one(b"0002", "absent") is None and list(engine.scan(None, None, "absent")) == []
