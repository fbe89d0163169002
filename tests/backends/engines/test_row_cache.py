"""The cache in front of RocksDB: never another value than the one below, and mostly no read below."""

import random
import threading

import numpy as np
import pyarrow as pa
import pytest

from backends import StateStoreConf
from backends.encoding.columns import even_rows
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines import cached_rows, key_hashes, rocksdb, row_cache
from backends.engines.cached_rows import EvenRows, VaryingRows
from backends.engines.key_hashes import hash_keys
from backends.engines.rocksdb import LocalRocksDB
from backends.engines.row_cache import CacheBudget, RowCache
from backends.exceptions import LocalStateDamagedError, StoreClosedError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from tests.effort import effort, only_thorough
from tests.patience import PATIENCE

MIB = 1 << 20


@pytest.fixture(autouse=True)
def same_hashes_each_time(monkeypatch):
    """A few of many rows find no place, other ones in each process."""
    rng = random.Random(7)
    monkeypatch.setattr(key_hashes, "_FACTORS", [np.uint64(rng.getrandbits(64) | 1) for _ in key_hashes._FACTORS])
    monkeypatch.setattr(key_hashes, "_SEED", np.uint64(7))


def binary(values):
    return pa.array(values, pa.binary())


class Below:
    """A dict, and the cache over it."""

    def __init__(self, limit=MIB):
        self.pairs = {}
        self.cache = RowCache(limit if isinstance(limit, CacheBudget) else CacheBudget(limit))
        self.num_read = 0

    def read(self, keys):
        self.num_read += len(keys)
        return binary([self.pairs.get(key) for key in keys.to_pylist()])

    def get(self, keys):
        return self.cache.get_many(binary(keys), self.read).to_pylist()

    def put(self, changes):
        for key, value in changes.items():
            if value is None:
                self.pairs.pop(key, None)
            else:
                self.pairs[key] = value
        keys = binary(list(changes))
        self.cache.update(keys, row_cache.hash_keys(keys), binary(list(changes.values())))


def key_sets():
    """Keys of one width as they mostly are, of many widths, and long ones that differ at the end or in the middle."""
    return {
        "one width": [b"\x00\x07\x01" + i.to_bytes(8, "big") for i in range(300)],
        "narrow": [i.to_bytes(2, "big") for i in range(300)],
        "one word": [i.to_bytes(8, "big") for i in range(300)],
        "many widths": [b"ab" * (i % 23) + str(i).encode() * (i % 3) for i in range(300)],
        "long": [b"x" * 400 + str(i).encode() + b"y" * (i % 500) for i in range(300)],
    }


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


def test_what_was_read_or_found_absent_is_not_read_again():
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
    assert below.cache._budget.counts == {"asked": 3 * len(asked) + 7, "hits": 2 * len(asked) + 5}


def test_what_need_not_be_kept_is_not():
    below = Below()
    below.pairs = {b"%d" % i: b"v" for i in range(30)}
    keys = binary(list(below.pairs))
    for _ in range(2):
        assert below.cache.get_many(keys, below.read, keep=False).to_pylist() == [b"v"] * 30
    assert below.num_read == 60 and below.cache._budget.used == 0
    below.get([b"3", b"4"])
    assert below.cache.get_many(keys, below.read, keep=False).to_pylist() == [b"v"] * 30
    assert below.cache.get_many(keys, below.read, keep=False).to_pylist() == [b"v"] * 30
    assert below.num_read == 62 + 28 + 28


def test_what_is_written_is_seen_and_still_not_read():
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


def forced_hashes(number, seed=0):
    """Hashes of which there are only a few: keys of another hash than their own, which many others have as well."""
    return lambda keys, even=None: (
        np.array([hash((seed, key)) % number for key in keys.to_pylist()], np.uint64) << np.uint64(60)
    )


@pytest.mark.parametrize("collisions", [None, only_thorough(1), 3, only_thorough(50)])
@pytest.mark.parametrize("limit", [3000, only_thorough(20_000), MIB])
def test_reads_are_those_of_a_dict(monkeypatch, limit, collisions):
    if collisions is not None:
        monkeypatch.setattr(row_cache, "hash_keys", forced_hashes(collisions))
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
            assert below.cache._budget.used <= limit
            assert are_unique(below.cache)
        if limit == MIB and collisions is None:
            asked = below.num_read
            below.get(keys)
            assert below.num_read <= asked + len(keys) // 2


def are_unique(cache):
    """Whether no two entries are of one bucket and one tag."""
    held = cache.rows.buckets
    buckets, _ = np.nonzero(held >= 0)
    tags = held[held >= 0] >> cached_rows.TAG_SHIFT
    return len(set(zip(buckets.tolist(), tags.tolist(), strict=True))) == len(tags)


def test_keys_of_one_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr(row_cache, "hash_keys", forced_hashes(1))
    below = Below()
    below.put({b"key one": b"1", b"key two": b"2"})
    for _ in range(3):
        assert below.get([b"key one"]) == [b"1"]
        assert below.get([b"key two"]) == [b"2"]
        assert below.get([b"key one", b"key two", b"key one", b"neither"]) == [b"1", b"2", b"1", None]


def test_the_oldest_go_first_and_dead_rows_before_them():
    below = Below(200_000)
    hot = [b"hot %06d" % i for i in range(200)]
    below.put(dict.fromkeys(hot, b"x" * 50))
    below.get(hot)
    for i in range(300):  # each write makes a new row of each key, and the old ones dead
        below.put(dict.fromkeys(hot, b"%d" % i + b"x" * 50))
    below.num_read = 0
    assert below.get(hot) == [below.pairs[key] for key in hot] and below.num_read == 0
    cold = [b"cold %06d" % i for i in range(10_000)]
    for at in range(0, len(cold), 100):
        below.get(cold[at : at + 100])
    below.num_read = 0
    below.get(cold[-300:])
    assert below.num_read == 0
    below.get(hot)
    assert below.num_read == len(hot)


def test_more_than_fits_is_read_all_the_same():
    below = Below(50_000)
    below.pairs = {b"%08d" % i: b"v%d" % i for i in range(20_000)}
    keys = list(below.pairs)
    for _ in range(3):
        assert below.get(keys) == list(below.pairs.values())
    below.put(dict.fromkeys(keys, b"other"))
    assert below.get(keys) == list(below.pairs.values())
    below.pairs[b"large"] = b"x" * 100_000
    assert below.get([b"large"]) == [b"x" * 100_000]
    assert below.cache._budget.used <= 50_000


def test_bulk_loads_find_room_in_the_table():
    below = Below(64 * MIB)
    below.pairs = {b"%08d" % i: b"v" for i in range(50_000)}
    keys = list(below.pairs)
    below.get(keys)
    below.num_read = 0
    below.get(keys)
    assert below.num_read < 0.001 * len(keys)


def test_caches_share_a_budget():
    budget = CacheBudget(400_000)
    first, second, third = (Below(budget) for _ in range(3))
    for below in (first, second, third):
        below.pairs = {b"%08d" % i: b"v" * 20 for i in range(20_000)}
    keys = list(first.pairs)

    def fill(below, number):
        for at in range(0, number, 500):
            below.get(keys[at : at + 500])
        return below.cache.nbytes

    alone = fill(first, 20_000)
    assert alone > 200_000
    assert fill(second, 20_000) > 100_000  # first has more than its share, and makes room
    fill(first, 20_000)
    fill(third, 20_000)
    assert fill(third, 20_000) > 60_000
    assert budget.used <= budget.limit
    assert first.get(keys) == second.get(keys) == third.get(keys) == list(first.pairs.values())
    for below in (first, second, third):
        below.cache.clear()
    assert budget.used == 0
    assert fill(first, 20_000) == alone
    del first, below
    assert budget.used == 0


def test_caches_give_back_what_the_process_needs():
    room = [400_000]
    budget = CacheBudget(300_000, lambda: room[0])
    first, second = Below(budget), Below(budget)
    for below in (first, second):
        below.pairs = {b"%08d" % i: b"v" * 20 for i in range(20_000)}
    keys = list(first.pairs)

    def fill(below, number):
        for at in range(0, number, 500):
            below.get(keys[at : at + 500])
        return below.cache.nbytes

    assert fill(first, 1_000) < fill(second, 2_000) < 300_000
    budget.shrink()
    assert first.cache.rows.count and second.cache.rows.count
    room[0] = 100_000
    budget.shrink()
    assert first.cache.rows.count and not second.cache.rows.count
    fill(second, 20_000)
    assert 0 < budget.used <= 100_000
    room[0] = 0
    budget.shrink()
    assert budget.used == 0
    fill(first, 1_000)
    assert budget.used == 0 and first.get(keys) == list(first.pairs.values())


def test_a_cache_may_be_emptied_while_another_one_is_given_room(monkeypatch):
    """As by the garbage collector, which may let go of any stream, and the copy that it read, at any allocation."""
    budget = CacheBudget(MIB)
    first, second = Below(budget), Below(budget)
    keys = [b"%08d" % i for i in range(500)]
    first.get(keys)
    assert budget.used > 0
    settle, emptied = budget._settle, []

    def collecting():
        settle()
        if not emptied:
            emptied.append(first.cache.nbytes)
            first.cache.clear()

    monkeypatch.setattr(budget, "_settle", collecting)
    thread = threading.Thread(target=second.get, args=(keys,), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive() and emptied and budget.used == second.cache.nbytes


def test_the_work_of_a_cache_does_not_grow_with_the_number_of_the_others(monkeypatch):
    """Whoever asked each cache for its size would do so here."""
    looks, nbytes = [], EvenRows.nbytes.fget
    monkeypatch.setattr(EvenRows, "nbytes", property(lambda rows: looks.append(rows) or nbytes(rows)))
    room = [MIB]
    budget = CacheBudget(MIB, lambda: room[0])
    caches = [Below(budget) for _ in range(200)]
    keys = [b"%08d" % i for i in range(50)]
    for below in caches:
        below.pairs = dict.fromkeys(keys, b"value")
    num_looks = []
    for _ in range(6):
        room[0] = MIB
        for below in caches:
            looks.clear()
            below.get(keys)
            num_looks.append(len(looks))
        room[0] = 300_000
        looks.clear()
        budget.shrink()
        num_looks.append(len(looks))
    assert 0 < max(num_looks) <= 5
    # Caches have been emptied for others, and no trace is left of them.
    held = [below.cache.nbytes for below in caches if below.cache.rows.count]
    assert 0 < len(held) < len(caches) and budget.used == sum(held)
    assert len(budget._shares) == len(held) and len(budget._largest) <= 2 * len(held) + 17


def check_while_read(below, keys, rng, steps, value_of, before_step=lambda step: None):
    """Write ascending values while threads read: a reader must see the value of the moment it asked, or a later one."""
    written = {key: int(below.pairs.get(key) or 0) for key in keys}
    failures, done = [], threading.Event()

    def keep_reading(seed):
        own = random.Random(seed)
        while not done.is_set():
            asked = own.sample(keys, 50)
            before = [written[key] for key in asked]
            found = below.get(asked)
            if not all(int(value or 0) >= least for value, least in zip(found, before, strict=True)):
                failures.append((asked, before, found))
                return

    threads = [threading.Thread(target=keep_reading, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for step in range(1, steps):
        before_step(step)
        changes = dict.fromkeys(rng.sample(keys, rng.choice((3, 100))), value_of(step))
        below.put(changes)
        written.update(dict.fromkeys(changes, step))
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert below.get(keys) == [below.pairs.get(key) for key in keys]


@pytest.mark.parametrize("limit", [30_000, only_thorough(MIB)])
def test_readers_in_threads_never_see_less_than_what_was_written_before(limit):
    keys = [b"key %05d" % i for i in range(400)]
    check_while_read(Below(limit), keys, random.Random(limit), effort(80, 250), lambda step: b"%d" % step)


# -- rows of one width -----------------------------------------------------------------------------


def user(i):
    """A key of 11 bytes, as those of one long column are."""
    return b"\x00\x07\x01" + i.to_bytes(8, "big")


@pytest.mark.parametrize("collisions", [None, only_thorough(1), 3, only_thorough(50)])
@pytest.mark.parametrize("limit", [3000, only_thorough(20_000), MIB])
@pytest.mark.parametrize("seed", range(effort(1, 3)))
def test_rows_of_one_width_are_read_as_those_of_a_dict(monkeypatch, limit, collisions, seed):
    """Also absent ones, keys of several widths in one request, and where rows of other widths come later."""
    if collisions is not None:
        monkeypatch.setattr(row_cache, "hash_keys", forced_hashes(collisions))
    rng = random.Random(f"{limit} {collisions} {seed}")
    below = Below(limit)
    keys = [user(i) for i in range(120)]
    others = [b"shorter %d" % i for i in range(20)]
    for step in range(effort(90, 150)):
        some = rng.choices(keys, k=rng.choice((1, 5, 40, 200)))
        if step == 30 and seed:  # values of one key in another width, or keys
            below.put({keys[0]: b"a longer value of another schema"})
            below.get(keys[:1] if seed == 1 else others)
        if rng.random() < 0.4:
            below.put({k: None if rng.random() < 0.3 else b"%04d" % step for k in some})
        else:
            asked = rng.choice((some, [*some, *others], others))
            assert below.get(asked) == [below.pairs.get(key) for key in asked]
        assert below.cache._budget.used <= limit
        assert are_unique(below.cache)


def test_rows_of_one_width_are_records_until_others_come():
    below = Below()
    keys = [user(i) for i in range(100)]
    below.get(keys[:10])
    assert below.cache.rows.widths == (11, None)
    below.put({key: b"%04d" % i for i, key in enumerate(keys[10:90])})
    below.get(keys[:50])
    below.put({keys[3]: b"here", keys[20]: None})
    assert isinstance(below.cache.rows, EvenRows) and below.cache.rows.widths == (11, 4)
    below.num_read = 0
    for asked in (keys[:50], keys[20:40], keys[3:4], keys[20:21], [keys[3], b"other", keys[30], keys[30]]):
        assert below.get(asked) == [below.pairs.get(key) for key in asked]
    assert below.num_read == 1
    assert isinstance(below.cache.rows, VaryingRows)  # because of the other key
    below.num_read = 0
    assert below.get(keys[:50]) == [below.pairs.get(key) for key in keys[:50]] and below.num_read == 0


@pytest.mark.parametrize("width", [32, only_thorough(200)])
def test_keys_that_are_looked_for_before_they_are_written_become_records(width):
    """Reads and writes as a stream's: a batch reads its keys, most of them new, and writes more than one step."""
    below, n = Below(limit=32 * MIB), 3 * cached_rows.CACHE_STEP_ROWS
    for batch in range(3):
        keys = [b"key%09d" % i for i in range(n * batch, n * (batch + 1))]
        assert below.get(keys) == [None] * len(keys)
        below.put(dict.fromkeys(keys, b"x" * width))
        assert below.cache.rows.widths == (12, width)


def test_rows_are_records_again_when_the_others_are_gone():
    below = Below(limit=1 << 16)
    below.pairs = {user(i): b"%04d" % i for i in range(3000)}
    below.get([b"other"])
    for i in range(0, 3000, 50):
        asked = [user(j) for j in range(i, i + 50)]
        assert below.get(asked) == [below.pairs[key] for key in asked]
    assert below.cache.rows.widths == (11, 4)


@pytest.mark.parametrize(
    ("keys", "values", "widths"),
    [
        ([b"k"], [b"v"], (1, 1)),
        ([b"k", b"l"], [None, b"vw"], (1, 2)),
        ([b"k", b"l"], [None, None], (1, None)),
        ([b"k", b"lm"], [b"v", b"w"], None),
        ([b"k", b"l"], [b"v", b"ww"], None),
        ([b"k", b"l"], [b"v", b""], None),
        ([b"k"], [b""], None),
        ([b""], [b"v"], None),
        ([b"k" * cached_rows.EVEN_BYTES], [None], (cached_rows.EVEN_BYTES, None)),
        ([b"k" * cached_rows.EVEN_BYTES], [b"v"], None),
        ([b"k" * (cached_rows.EVEN_BYTES + 1)], [None], None),
    ],
)
def test_what_can_be_records(keys, values, widths):
    assert cached_rows.widths_of(binary(keys), binary(values)) == widths
    below = Below()
    below.pairs = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
    for _ in range(2):
        assert below.get(keys) == values
    assert below.num_read == len(keys) and below.cache.rows.widths == widths


def test_a_row_that_is_not_complete_is_not_read():
    """As a reader sees the table that began before rows were added to it."""
    below = Below()
    keys = [user(i) for i in range(40)]
    below.pairs = {key: b"%04d" % i for i, key in enumerate(keys)}
    below.get(keys)
    asked = binary(keys)
    rows = below.cache.rows
    rows.count = 25
    values, missing = rows.get(asked, even_rows(asked), hash_keys(asked))
    assert missing.tolist() == list(range(25, 40))
    assert values.to_pylist() == [*below.pairs.values()][:25] + [None] * 15
    values.validate(full=True)


def test_a_tag_that_is_seen_at_two_places_counts_once():
    """See a bucket as a reader may whose copy begins before an entry moves within the bucket, and ends after that."""
    below = Below()
    keys = [user(i) for i in range(60)]
    below.pairs = {key: b"%04d" % i for i, key in enumerate(keys)}
    below.get(keys[:50])
    buckets = below.cache.rows.buckets
    at, ways = (buckets >= 0).nonzero()
    buckets[at, (ways + 1) % buckets.shape[1]] = buckets[at, ways]
    for asked in (keys[:50], keys, keys[40:], [keys[55], keys[3]], [keys[3], keys[3]]):
        assert below.cache.get_many(binary(asked), below.read, keep=False).to_pylist() == [
            below.pairs[k] for k in asked
        ]


@pytest.mark.parametrize("limit", [10_000, only_thorough(MIB)])
def test_readers_in_threads_while_rows_come_to_be_of_many_widths(limit):
    below, rng = Below(limit), random.Random(limit)
    keys = [user(i) for i in range(300)]
    below.put(dict.fromkeys(keys, b"%06d" % 0))

    def value_of(step):
        return b"%0*d" % (6 if step % 40 < 30 else rng.choice((6, 9)), step)

    def begin_anew(step):
        if step % 40 == 0:
            below.cache.clear()

    check_while_read(below, keys, rng, effort(90, 200), value_of, begin_anew)


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
            (tmp_path / "taken").rmdir()
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
    assert "are forgotten" in caplog.text
    assert engine.get_many(binary([b"a"])).to_pylist() == [b"2"]
    engine.close()


@pytest.mark.parametrize("width", [8, 100, 900])
def test_keys_without_a_value_take_no_room_for_one(width: int) -> None:
    cache, num_keys = RowCache(CacheBudget(4 << 20)), 15_000
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
