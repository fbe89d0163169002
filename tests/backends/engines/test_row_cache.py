"""The cache in front of RocksDB: never another value than the one below, and mostly no read below."""

import random

import pyarrow as pa
import pytest

from backends import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines import rocksdb, row_cache, row_cache_table
from backends.engines.rocksdb import LocalRocksDB
from backends.engines.row_cache import RowCache
from backends.engines.row_cache_table import hash_keys
from backends.exceptions import LocalStateDamagedError, StoreClosedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from tests.backends.engines.cache_over_dict import (
    MIB,
    Below,
    are_unique,
    binary,
    check_while_read,
    forced_hashes,
    key_sets,
    row_memory,
    used,
)
from tests.effort import effort, only_thorough

pytestmark = pytest.mark.usefixtures("same_hashes_each_time", "few_rows_are_kept")


@pytest.mark.parametrize("name", key_sets())
def test_a_hash_depends_on_the_key_alone(name):
    keys = key_sets()[name]
    together = hash_keys(binary(keys)).tolist()
    assert together == [int(hash_keys(binary([key]))[0]) for key in keys]
    mixed = pa.concat_arrays([binary([b"", b"another width", b"1"]), binary(keys)])
    assert hash_keys(mixed)[3:].tolist() == together
    assert hash_keys(mixed.slice(3)).tolist() == together
    if name != "long":
        assert len(set(together)) == len(set(keys))


def test_read_and_absent_keys_are_not_read_again():
    below = Below()
    below.put({b"key%d" % i: b"value%d" % i for i in range(1000)})
    asked = [b"key%d" % i for i in range(0, 1500, 3)] + [b"key3", b"none"]
    expected = [below.pairs.get(key) for key in asked]
    assert below.get(asked) == expected and below.num_read == len(asked)
    assert below.get(asked) == expected and below.num_read == len(asked)
    assert below.get(asked[::-1]) == expected[::-1] and below.num_read == len(asked)
    assert below.get([b"key1", *asked[:5], b"key2"]) == [b"value1", *expected[:5], b"value2"]
    assert below.num_read == len(asked) + 2
    assert below.get([]) == []
    assert below.memory.row_cache_counts() == {"asked": 3 * len(asked) + 7, "hits": 2 * len(asked) + 5}


def test_rows_read_without_keep_are_not_cached():
    below = Below()
    below.pairs = {b"%d" % i: b"v" for i in range(30)}
    keys = binary(list(below.pairs))
    for _ in range(2):
        assert below.cache.get_many(keys, below.read, keep=False).to_pylist() == [b"v"] * 30
    assert below.num_read == 60 and used(below.memory) == 0
    below.get([b"3", b"4"])
    assert below.cache.get_many(keys, below.read, keep=False).to_pylist() == [b"v"] * 30
    assert below.cache.get_many(keys, below.read, keep=False).to_pylist() == [b"v"] * 30
    assert below.num_read == 62 + 28 + 28


def test_few_rows_are_kept_once_many_were_read(monkeypatch):
    monkeypatch.setattr(row_cache, "MIN_KEPT", 6)
    below = Below()
    below.put({b"%02d" % i: b"v%02d" % i for i in range(100)})
    below.get([b"00", b"01", b"02"])
    assert below.cache.rows.count == 0  # three of six
    below.get([b"03", b"04"])
    assert below.cache.rows.count == 0  # five of six
    below.get([b"05"])
    assert below.cache.rows.count == 1  # the sixth, with which the reads make up for an addition
    below.get([b"05", *(b"%02d" % i for i in range(10, 16))])
    assert below.cache.rows.count == 7  # six at once
    num_read = below.num_read
    for _ in range(3):  # one of thirty-three counts as two: nothing else is read below in the meantime
        below.get([*[b"05"] * 32, b"99"])
    assert below.cache.rows.count == 8 and below.num_read == num_read + 3
    below.get([b"99"])
    assert below.num_read == num_read + 3


def test_writes_are_visible_without_a_read():
    below = Below()
    keys = [b"%04d" % i for i in range(100)]
    below.put(dict.fromkeys(keys[:50], b"old"))
    below.get(keys)
    below.put({keys[0]: b"longer than before", keys[1]: None, keys[60]: b"", keys[61]: b"new", b"not held": b"x"})
    assert below.get(keys) == [below.pairs.get(key) for key in keys]
    assert below.num_read == len(keys)
    assert below.get([b"not held"]) == [b"x"] and below.num_read == len(keys) + 1


def test_a_value_read_before_a_write_is_not_kept_after_it():
    below = Below()
    below.pairs[b"k"] = b"old"

    def read_while_written(keys):
        found = below.read(keys)
        below.put({b"k": b"new"})
        return found

    below.cache.get_many(binary([b"k"]), read_while_written)
    assert below.get([b"k"]) == [b"new"]

    below.pairs[b"j"] = b"old"

    def read_while_cleared(keys):
        found = below.read(keys)
        below.pairs.clear()
        below.cache.clear()
        return found

    below.cache.get_many(binary([b"j"]), read_while_cleared)
    assert below.get([b"k", b"j"]) == [None, None]


@pytest.mark.parametrize("collisions", [None, only_thorough(1), 3, only_thorough(50)])
@pytest.mark.parametrize("limit", [3000, only_thorough(20_000), MIB])
def test_reads_are_those_of_a_dict(monkeypatch, limit, collisions):
    if collisions is not None:
        monkeypatch.setattr(row_cache_table, "hash_keys", forced_hashes(collisions))
    for seed in range(2):
        rng = random.Random(f"{limit} {collisions} {seed}")
        below = Below(limit)
        keys = [key for keys in key_sets().values() for key in rng.sample(keys, 60)]
        for step in range(100):
            some = rng.choices(keys, k=rng.choice((1, 5, 40, 200)))
            if rng.random() < 0.4:
                below.put({k: None if rng.random() < 0.3 else b"%d " % step * rng.choice((0, 1, 30)) for k in some})
            elif rng.random() < 0.02:
                below.cache.clear()
            else:
                assert below.get(some) == [below.pairs.get(key) for key in some]
            assert used(below.memory) <= limit
            assert are_unique(below.cache)
        if limit == MIB and collisions is None:
            asked = below.num_read
            below.get(keys)
            assert below.num_read <= asked + len(keys) // 2


def test_keys_of_one_hash_are_distinguished(monkeypatch):
    monkeypatch.setattr(row_cache_table, "hash_keys", forced_hashes(1))
    below = Below()
    below.put({b"key one": b"1", b"key two": b"2"})
    for _ in range(3):
        assert below.get([b"key one"]) == [b"1"]
        assert below.get([b"key two"]) == [b"2"]
        assert below.get([b"key one", b"key two", b"key one", b"neither"]) == [b"1", b"2", b"1", None]


@pytest.mark.parametrize("limit", [30_000, only_thorough(MIB)])
def test_readers_in_threads_never_see_less_than_what_was_written_before(limit):
    keys = [b"key %05d" % i for i in range(400)]
    check_while_read(Below(limit), keys, random.Random(limit), effort(80, 250), lambda step: b"%d" % step)


# -- in the engine -------------------------------------------------------------------------------


@pytest.fixture
def all_rows(monkeypatch):
    """Few keys take the way of many."""
    monkeypatch.setattr(rocksdb, "KEYS_ONE_BY_ONE", 0)


def conf(**kwargs):
    return StateStoreConf(fsync=False, **kwargs)


def write(engine, pairs, family="default"):
    state = LocalState(engine.state.version + 1, "head", None)
    engine.prepare(Changes({family: SortedPairs.from_dict(pairs)}))(state)


@pytest.mark.parametrize("limit", [0, 10_000, MIB])
def test_the_engine_reads_what_it_holds(tmp_path, all_rows, limit):
    rng = random.Random(limit)
    engine = LocalRocksDB(tmp_path / "db", conf(rocksdb_row_cache_bytes=limit))
    keys = [b"%d" % i for i in range(200)]
    model = {"default": {}, "other": {}}
    for step in range(effort(80, 200)):
        family = rng.choice(list(model))
        some = rng.sample(keys, rng.choice((1, 20, 100)))
        action = rng.random()
        if action < 0.4:
            pairs = {key: None if rng.random() < 0.3 else b"%d" % step for key in some}
            write(engine, pairs, family)
            model[family] = {k: v for k, v in (model[family] | pairs).items() if v is not None}
        elif action < 0.43:
            (tmp_path / "taken").mkdir()
            engine.capture(tmp_path / "taken")()
            write(engine, dict.fromkeys(keys, b"after the capture"))
            engine.get_many(binary(keys))
            engine.restore(tmp_path / "taken")
        elif action < 0.45:
            engine.clear()
            model = {"default": {}, "other": {}}
        elif action < 0.47:
            engine.close()
            engine = LocalRocksDB(tmp_path / "db", conf(rocksdb_row_cache_bytes=limit))
        else:
            assert engine.get_many(binary(some), family).to_pylist() == [model[family].get(k) for k in some]
            assert engine.get_one(some[0], family) == model[family].get(some[0])
    caches = [family.cache for family in engine._families.values() if family.cache is not None]
    engine.close()
    assert not any(cache.nbytes > row_cache._NOTHING.nbytes for cache in caches) and bool(caches) == bool(limit)
    with pytest.raises(StoreClosedError):
        engine.get_many(binary(keys))
    with pytest.raises(StoreClosedError):
        engine.get_one(keys[0])


def test_nothing_is_held_behind_a_write_that_failed(tmp_path, all_rows):
    engine = LocalRocksDB(tmp_path / "db", conf())
    write(engine, {b"a": b"1"})
    assert engine.get_many(binary([b"a"])).to_pylist() == [b"1"]
    db = engine._db

    class Failing:
        """Has written before it says that it could not."""

        def write(self, *given):
            db.write(*given)
            raise Exception("Input/output error")

        def property_int_value(self, name):
            return db.property_int_value(name)

    engine._db = Failing()
    with pytest.raises(LocalStateDamagedError, match="Input/output error"):
        write(engine, {b"a": b"2"})
    engine._db = db
    assert engine.get_many(binary([b"a"])).to_pylist() == [b"2"]
    engine.close()


def test_a_cache_that_fails_does_not_fail_the_write(tmp_path, all_rows, monkeypatch, caplog):
    engine = LocalRocksDB(tmp_path / "db", conf())
    write(engine, {b"a": b"1"})
    assert engine.get_many(binary([b"a"])).to_pylist() == [b"1"]

    def update(*given):
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(RowCache, "update", update)
        write(engine, {b"a": b"2"})
    assert "were dropped" in caplog.text
    assert engine.get_many(binary([b"a"])).to_pylist() == [b"2"]
    engine.close()


@pytest.mark.parametrize("width", [8, 100, 900])
def test_keys_without_a_value_take_no_room_for_one(width: int) -> None:
    cache, num_keys = RowCache(row_memory(4 << 20)), 15_000
    keys = [b"key%09d" % i for i in range(num_keys)]
    num_read = 0

    def read(asked: pa.BinaryArray) -> pa.BinaryArray:
        nonlocal num_read
        num_read += len(asked)
        return pa.array([b"x" * width if int(k[3:]) % 50 == 0 else None for k in asked.to_pylist()], pa.binary())

    for _ in range(2):
        num_read = 0
        for at in range(0, num_keys, 1000):
            some = pa.array(keys[at : at + 1000], pa.binary())
            values = cache.get_many(some, read)
            assert values.null_count == len(some) - len(some) // 50
    assert num_read < num_keys / 20
