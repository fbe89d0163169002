"""A copy that is read is what a dict would be, whether its changes are in memory or in the engine below."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from backends import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines import engine as buffered_engine
from backends.engines import sorted_map_engine
from backends.engines.engine import BufferedEngine, DeferredEngine
from backends.exceptions import StoreClosedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from backends.host_memory import host_memory
from tests.effort import effort, only_thorough

FAMILIES = ("default", "other", "later")
KEYS = [b"%02d" % n for n in range(60)]
ROOM = 400
"""Bytes of ``host_memory`` for changes: few fit."""


def with_room(room: int, backend: str = "file") -> StateStoreConf:
    """Leave this much memory for all but the caches and open databases."""
    caches = 8 << 20
    return StateStoreConf(
        provider=backend,
        fsync=False,
        host_memory=2 * caches + room,
        rocksdb_row_cache_bytes=0,
        rocksdb_block_cache_bytes=caches,
        rocksdb_write_buffer_bytes=caches,
    )


class Model:
    """An engine, and dicts of its expected content."""

    def __init__(self, engine: BufferedEngine, backend: str, rng: random.Random) -> None:
        self.engine, self.backend, self.rng = engine, backend, rng
        self.held: dict[str, dict[bytes, bytes]] = {}
        self.last: dict[str, list[bytes]] = {}
        self.version = 0

    def change(self) -> None:
        if not self.version or self.rng.random() < 0.7:  # a partition that takes over keys is at one state all the time
            self.version += 1
        changes: dict[str, SortedPairs] = {}
        for family in self.rng.sample(FAMILIES, self.rng.randint(1, 3)):
            keys = self.rng.sample(KEYS, self.rng.randint(0, 20))
            if self.rng.random() < 0.6:  # a partition gathers changes of the same keys
                keys = self.last.get(family, keys)
            self.last[family] = keys
            of = {k: self.rng.choice([None, self.rng.randbytes(5)]) for k in keys}
            changes[family] = SortedPairs.from_dict(of)
            held = {**self.held.get(family, {}), **of}
            self.held[family] = {k: v for k, v in held.items() if v is not None}
        self.engine.prepare(Changes(changes))(LocalState(self.version, f"head {self.version}", None))

    def check(self) -> None:
        assert self.engine.column_families == {"default", *self.held}
        assert self.engine.state.version == self.version
        for family in FAMILIES:
            held = self.held.get(family, {})
            for asked in (sorted(KEYS), self.rng.choices(KEYS, k=80)):
                found = self.engine.get_many(pa.array(asked, pa.binary()), family)
                assert found.to_pylist() == [held.get(key) for key in asked]
            key = self.rng.choice(KEYS)
            assert self.engine.get_one(key, family) == held.get(key)
            bounds = self.rng.sample([None, *KEYS], 2)
            cuts = sorted(self.rng.sample(KEYS, 6))
            ranges = list(zip(cuts[::2], cuts[1::2], strict=True))
            rows = [tuple(r.values()) for b in self.engine.scan_ranges(ranges, family) for r in b.to_pylist()]
            assert rows == [(k, v) for k, v in sorted(held.items()) if any(start <= k < end for start, end in ranges)]
            for start, end in ((None, None), bounds):
                rows = [tuple(r.values()) for b in self.engine.scan(start, end, family) for r in b.to_pylist()]
                assert rows == [
                    (k, v)
                    for k, v in sorted(held.items())
                    if (start is None or k >= start) and (end is None or k < end)
                ]
        if self.backend == "file":  # RocksDB's estimate may be 0 where absent keys were removed
            assert self.engine.num_keys() >= (sum(map(len, self.held.values())) > 0)


@pytest.mark.parametrize("backend", ["rocksdb", "file"])
@pytest.mark.parametrize("made", [BufferedEngine, DeferredEngine])
@pytest.mark.parametrize("seed", [0, 1, 2, *map(only_thorough, range(3, 40))])
def test_reads_are_those_of_a_dict(
    seed: int, made: type[BufferedEngine], backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    for limit in ("BUFFERED_CHANGES_BYTES", "UNWRITTEN_BYTES", "GATHERED_BYTES"):
        monkeypatch.setattr(buffered_engine, limit, rng.choice([300, 1 << 20]))
    monkeypatch.setattr(sorted_map_engine, "MAP_CHUNK_ROWS", 8)
    monkeypatch.setattr(sorted_map_engine, "MAP_SCAN_ROWS", 3)
    conf = with_room(ROOM if backend == "file" and rng.random() < 0.5 else 4 << 20, backend)
    model = Model(made(tmp_path / "engine", conf), backend, rng)
    for step in range(effort(40, 100)):
        what = rng.random()
        if what < 0.5:
            model.change()
        elif what < 0.8:
            model.check()
        elif what < 0.97 and model.version:
            (captured := tmp_path / f"captured {step}").mkdir()
            model.engine.capture(captured)()
            version, held = model.version, dict(model.held)
            model.change()
            model.engine.restore(captured)
            model.version, model.held = version, held
        else:
            model.engine.clear()
            model.version, model.held = 0, {}
    model.check()
    model.engine.close()


@pytest.mark.parametrize("room", [ROOM, 1 << 20])
def test_of_changes_only_a_range_is_held(room: int, tmp_path: Path) -> None:
    conf = with_room(room)
    engine = BufferedEngine(tmp_path / "engine", conf, b"20", b"40")
    before = pa.total_allocated_bytes()
    changes = SortedPairs.from_dict(dict.fromkeys(KEYS, b"x" * 100))
    engine.prepare(Changes({"default": changes, "other": changes.slice(0, 3)}))(LocalState(1, "head", None))
    del changes
    assert pa.total_allocated_bytes() - before < 30 * 100, "nothing keeps the other keys"
    memory = host_memory(conf).held()["copies"]
    assert memory == 0 if room == ROOM else 3 * 20 * 100 < memory < 3 * 20 * 200
    assert [row["key"] for batch in engine.scan(b"20", b"40") for row in batch.to_pylist()] == KEYS[20:40]
    assert engine.column_families == {"default", "other"}
    engine.close()
    assert host_memory(conf).held()["copies"] == 0


def test_a_scan_shows_the_pairs_of_its_start_and_ends_with_the_engine(tmp_path: Path) -> None:
    engine = BufferedEngine(tmp_path / "engine", StateStoreConf(fsync=False))
    engine.prepare(Changes({"default": SortedPairs.from_dict({b"a": b"1"})}))(LocalState(1, "head", None))
    scan, later = engine.scan(None, None), engine.scan(None, None)
    engine.prepare(Changes({"default": SortedPairs.from_dict({b"a": b"2"})}))(LocalState(2, "next", None))
    assert [batch.to_pylist() for batch in scan] == [[{"key": b"a", "value": b"1"}]]
    engine.close()
    with pytest.raises(StoreClosedError):
        next(later)
    with pytest.raises(StoreClosedError):
        engine.get_one(b"a")


def test_a_load_that_begins_with_changes_needs_no_database(tmp_path: Path) -> None:
    """To open one takes longer than to read a small state."""
    engine = BufferedEngine(tmp_path / "engine", StateStoreConf(fsync=False))
    engine.prepare(Changes({"default": SortedPairs.from_dict({b"a": b"1", b"b": None})}))(LocalState(1, "head", None))
    assert [batch.to_pylist() for batch in engine.scan(None, None)] == [[{"key": b"a", "value": b"1"}]]
    assert not (tmp_path / "engine").exists()
    engine.close()
