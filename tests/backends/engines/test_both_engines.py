"""What ``StateEngine`` asks of every engine: reads of many keys in any order, of one key, and of ranges."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from backends import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines import rocksdb_files
from backends.engines.engine import BufferedEngine, DeferredEngine, StateEngine
from backends.engines.rocksdb import LocalRocksDB
from backends.engines.sorted_map_engine import SortedMapEngine
from backends.exceptions import LocalDiskFullError, StoreClosedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState

MADE: dict[str, Callable[[Path, StateStoreConf], StateEngine]] = {
    "rocksdb": LocalRocksDB,
    "file": SortedMapEngine,
    "buffered": BufferedEngine,
    "deferred": DeferredEngine,
}
PAIRS = {b"%04d" % n: b"value %d" % n for n in range(0, 1000, 2)}


@pytest.fixture(params=MADE)
def engine(request, tmp_path):
    """Every second number below a thousand in two families; a few are removed from one, and written again."""
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


def random_ranges(seed):
    """Ascending ranges that do not overlap, some without pairs, some one behind the other, the last without an end."""
    draw = random.Random(seed)
    cuts = sorted(draw.sample(range(1100), 2 * draw.randint(1, 60)))
    ranges = [(b"%04d" % a, b"%04d" % b) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    if draw.random() < 0.5:
        ranges = [
            (start, ranges[i + 1][0] if draw.random() < 0.5 else end) for i, (start, end) in enumerate(ranges[:-1])
        ]
        ranges.append((b"%04d" % cuts[-2], None))
    return ranges


@pytest.mark.parametrize("family", ["default", "other"])
def test_ascending_ranges_follow_one_another(engine, family, monkeypatch):
    pairs = sorted(expected(family).items())
    for seed in range(60):
        monkeypatch.setattr(rocksdb_files, "_SCAN_STEP", random.Random(seed).choice([1, 3, 512]))
        monkeypatch.setattr(rocksdb_files, "ROCKSDB_SCAN_ROWS", random.Random(seed).choice([4, 1 << 14]))
        ranges = random_ranges(seed)
        rows = [(r["key"], r["value"]) for b in engine.scan_ranges(ranges, family) for r in b.to_pylist()]
        inside = [(k, v) for s, e in ranges for k, v in pairs if k >= s and (not e or k < e)]
        assert rows == inside, ranges
    assert list(engine.scan_ranges([], family)) == list(engine.scan_ranges([(b"", None)], "absent")) == []


def test_ranges_show_the_pairs_of_the_call(engine):
    scan = engine.scan_ranges([(b"0000", b"0500"), (b"0500", None)], "default")
    engine.prepare(Changes({"default": SortedPairs.from_dict({b"0900": None, b"0901": b"new"})}))(LocalState(3))
    assert [k for b in scan for k in b.column(0).to_pylist()] == list(PAIRS)
    engine.close()
    with pytest.raises(StoreClosedError):
        engine.scan_ranges([(b"", None)], "default")


def test_a_family_that_is_not_there_is_empty(engine):
    assert engine.get_many(pa.array([b"0002"] * 100, pa.binary()), "absent").null_count == 100
    assert engine.get_one(b"0002", "absent") is None and list(engine.scan(None, None, "absent")) == []


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("file_bytes", [1, 1 << 30])
def test_sorted_pairs_are_taken_in_bulk(made, tmp_path, monkeypatch, file_bytes):
    """Includes parts that do not follow the last one of their family, and families without pairs."""
    monkeypatch.setattr(rocksdb_files, "FILE_BYTES", file_bytes)
    pairs = SortedPairs.from_dict(PAIRS)
    parts = [
        ("default", pairs.slice(300, 100)),
        ("other", pairs.slice(0, 0)),
        ("other", pairs.slice(0, 1)),
        ("default", pairs.slice(400)),
        ("default", pairs.slice(0, 300)),
        ("other", pairs.slice(1, 9)),
    ]
    engine = made(tmp_path / "engine", StateStoreConf(fsync=False))
    engine.load_sorted(iter(parts), LocalState.unfinished("head"))
    assert engine.state == LocalState.unfinished("head")
    engine.prepare(Changes({"default": SortedPairs.from_dict({b"0004": None, b"0005": b"new"})}))(
        LocalState(2, "head", 10)
    )

    def held(of: StateEngine) -> dict[str, dict[bytes, bytes]]:
        return {
            family: {row["key"]: row["value"] for batch in of.scan(None, None, family) for row in batch.to_pylist()}
            for family in ("default", "other")
        }

    expected_pairs = {
        "default": {**{k: v for k, v in PAIRS.items() if k != b"0004"}, b"0005": b"new"},
        "other": dict(sorted(PAIRS.items())[:10]),
    }
    assert held(engine) == expected_pairs
    assert engine.get_one(b"0006", "default") == PAIRS[b"0006"]
    (captured := tmp_path / "captured").mkdir()
    engine.capture(captured)()
    engine.close()
    restored = made(tmp_path / "restored", StateStoreConf(fsync=False))
    restored.restore(captured)
    assert held(restored) == expected_pairs and restored.state.version == 2
    restored.close()


def test_pairs_that_cannot_be_read_leave_an_empty_engine(tmp_path):
    def parts():
        yield "default", SortedPairs.from_dict(PAIRS)
        raise OSError("the source is gone")

    engine = LocalRocksDB(tmp_path / "engine", StateStoreConf(fsync=False))
    with pytest.raises(OSError, match="the source is gone"):  # a user's function may be among those who give
        engine.load_sorted(parts(), LocalState.unfinished("head"))
    assert list(engine.scan(None, None)) == [] and not (tmp_path / "engine" / "bulk").exists()
    engine.close()


def test_a_load_that_finds_a_full_disk_has_ended_its_source(tmp_path, monkeypatch):
    """The files of a source, as a partition of an earlier layout, take the room that the next attempt needs."""
    ends = []

    def parts():
        try:
            yield "default", SortedPairs.from_dict(PAIRS)
        finally:
            ends.append("ended")

    def add(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rocksdb_files._SortedFile, "add", add)
    engine = LocalRocksDB(tmp_path / "engine", StateStoreConf(fsync=False))
    with pytest.raises(LocalDiskFullError) as info:
        engine.load_sorted(parts(), LocalState.unfinished("head"))
    assert ends == ["ended"] and info.value.__cause__ is not None
    engine.close()


DYING = """
import os, sys
from pathlib import Path
from backends import StateStoreConf, fault_points
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.rocksdb import LocalRocksDB
from backends.formats.local_state import LocalState

seen = []
def hook(point):
    seen.append(point)
    if len(seen) == 2:
        os._exit(9)
fault_points.set_hook(hook)
pairs = SortedPairs.from_dict({b"a": b"1"})
engine = LocalRocksDB(Path(sys.argv[1]), StateStoreConf())
engine.load_sorted([("default", pairs), ("other", pairs)], LocalState.unfinished("head"))
"""


@pytest.mark.long
def test_a_process_that_dies_in_a_bulk_load_leaves_no_version(tmp_path):
    done = subprocess.run([sys.executable, "-c", DYING, str(tmp_path / "engine")], check=False)
    assert done.returncode == 9 and (tmp_path / "engine" / "bulk").exists()
    engine = LocalRocksDB(tmp_path / "engine", StateStoreConf())
    assert engine.state == LocalState.unfinished("head"), "not version 0, though pairs are there"
    assert not (tmp_path / "engine" / "bulk").exists()
    engine.close()
