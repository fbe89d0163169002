"""The real memory of the partitions of a process, by the counts of Arrow, RocksDB and numpy."""

from __future__ import annotations

import gc
import random

import psutil
import pyarrow as pa
import pytest

from backends import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.rocksdb_files import DATABASE_BYTES, FAMILY_BYTES
from backends.exceptions import HostMemoryError, VersionNotFoundError
from backends.formats.changelog import Changes
from backends.host_memory import (
    BEFORE_IMAGES,
    BLOCK_CACHE,
    CHANGELOGS,
    COPIES,
    DATABASES,
    DELTAS,
    LAST_READS,
    NEEDED,
    PASSING,
    SCANS,
    SPARED,
    STAGED,
    WRITE_BUFFERS,
    host_memory,
)
from backends.partition.partition_state import open_partition
from backends.storage.checkpoint_storage import CheckpointStorage
from tests.backends.partition.partition_steps import meta

FAMILIES = ("default", "timers", "lists")
MIB = 1 << 20
VALUE_BYTES = 92
KEY_BYTES = 8
NOTHING = dict.fromkeys((*NEEDED, *PASSING, *SPARED), 0)


@pytest.fixture
def opened(tmp_path):
    states = []

    def open_all(number, conf):
        storage = CheckpointStorage.open(str(tmp_path / "ck"), {}, fsync=False)
        for i in range(number):
            states.append(open_partition(tmp_path / "local" / str(i), storage, f"op/{i}", conf))
        return states

    yield open_all
    for state in states:
        state.destroy()


def keys_of(some):
    return pa.array([b"%08d" % i for i in sorted(some)], pa.binary())


def read(state, keys):
    for family in FAMILIES if state.version else ():
        state.reads.get_many(keys, state.version, family)


def staged(state, keys, attempt="a", families=FAMILIES):
    """Write other values to each family, as a task does; return the version's changelog."""
    values = pa.array([random.randbytes(VALUE_BYTES) for _ in range(len(keys))], pa.binary())
    changes = Changes({family: SortedPairs(keys, values.take(pa.array(range(len(values))))) for family in families})
    ref = state.attempts.store_alone(meta(state.version + 1, state.head, attempt), changes)
    state.attempts.accept(state.version + 1, attempt)
    return ref


def commit(state, keys):
    ref = staged(state, keys)
    state.complete(state.version + 1, ref.path)


def counted(memory):
    held = memory.held()
    return {kind: held[kind] for kind in NOTHING}


def taken_by_commits(memory, before):
    """Bytes of changes that are staged or accepted, beyond those of ``before``."""
    held = counted(memory)
    return sum(held[kind] - before[kind] for kind in (STAGED, DELTAS))


def arrow_bytes():
    gc.collect()
    return pa.total_allocated_bytes()


@pytest.mark.parametrize(
    ("number", "limit", "rows", "batches"),
    [
        pytest.param(10, 20 * MIB, 1000, 4, id="10 partitions"),
        # The case above replaces this one in other runs.
        pytest.param(500, 512 * MIB, 100, 3, id="500 partitions", marks=pytest.mark.thorough),
    ],
)
def test_a_host_of_many_partitions_stays_within_its_memory(opened, number, limit, rows, batches):
    conf = StateStoreConf(fsync=False, host_memory=limit)
    memory = host_memory(conf)
    states = opened(number, conf)
    for i, state in enumerate(states):
        commit(state, keys_of(range(2)))
        if i % 2:
            state.write_out()  # the others hold their changes in memory, over a database without a write
    others, resident = arrow_bytes(), psutil.Process().memory_info().rss
    least = number * rows * len(FAMILIES) * (KEY_BYTES + VALUE_BYTES)
    peaks = []

    def look():
        held = memory.held()
        # RocksDB may exceed both shares while it writes files.
        for kind, share in ((WRITE_BUFFERS, conf.write_buffer_bytes), (BLOCK_CACHE, conf.block_cache_bytes)):
            assert held[kind] <= 3 * share
            held[kind] = min(held[kind], share)
        in_arrow = arrow_bytes() - others
        really = in_arrow + held[DATABASES] + sum(held[kind] for kind in held if kind not in NOTHING)
        assert in_arrow <= sum(held[kind] for kind in NOTHING if kind != DATABASES) + 0.02 * limit
        assert sum(held.values()) <= limit and really <= limit
        peaks.append(in_arrow)

    for batch in range(batches):
        # One key in ten is a new one.
        keys = keys_of(range(batch * rows // 10, batch * rows // 10 + rows))
        for state in states:
            read(state, keys)
        look()
        refs = [staged(state, keys) for state in states]
        for state in states:
            state._versions.pending.accepted_above(state.version, state.head)[0].before.result()
        look()
        for state, ref in zip(states, refs, strict=True):
            state.complete(batch + 2, ref.path)
        look()
    # The changes of one batch alone reach this size: older ones have made room.
    assert max(peaks) > least
    # Threads and allocators also take memory: up to 16 MiB above half of the limit were seen.
    assert psutil.Process().memory_info().rss - resident <= 1.5 * limit + 32 * MIB
    assert memory.held()["row_cache"] > 0


def test_read_rows_are_counted_until_their_task_commits(opened):
    conf = StateStoreConf(fsync=False, host_memory=201 * MIB)
    memory = host_memory(conf)
    (state,) = opened(1, conf)
    keys = keys_of(range(20_000))
    commit(state, keys)
    commit(state, keys_of(range(1)))
    before, in_arrow, in_metrics = counted(memory), arrow_bytes(), state.metrics().memory_bytes
    parts = [keys.slice(at, 5_000) for at in range(0, len(keys), 5_000)]
    for family in FAMILIES:
        for part in parts:
            state.reads.get_many(part, 2, family)
    del part, parts
    added = arrow_bytes() - in_arrow
    assert added > 3 * 20_000 * VALUE_BYTES
    # The keys of all three families are one array, counted three times.
    assert added <= counted(memory)[LAST_READS] <= 1.3 * added
    assert state.metrics().memory_bytes - in_metrics == counted(memory)[LAST_READS]

    staged(state, keys)
    state._versions.pending.accepted_above(2, state.head)[0].before.result()
    now = counted(memory)
    assert now[LAST_READS] == 0 and now[DELTAS] > 0
    assert now[BEFORE_IMAGES] - before[BEFORE_IMAGES] >= 3 * 20_000 * VALUE_BYTES


def test_rows_read_at_an_older_version_are_dropped(opened):
    conf = StateStoreConf(fsync=False, host_memory=202 * MIB)
    memory = host_memory(conf)
    (state,) = opened(1, conf)
    commit(state, keys_of(range(100)))
    read(state, keys_of(range(50)))
    ref = staged(state, keys_of(range(5)), families=("default",))
    assert counted(memory)[LAST_READS] > 0
    state.complete(2, ref.path)
    assert counted(memory)[LAST_READS] == 0


def test_a_commit_that_does_not_fit_is_refused_and_changes_nothing(opened):
    conf = StateStoreConf(fsync=False, host_memory=16 * MIB)
    memory = host_memory(conf)
    first, second = opened(2, conf)
    commit(first, keys_of(range(100)))
    accepted = staged(first, keys_of(range(20_000)), families=("default",))
    with pytest.raises(HostMemoryError, match=r"The commit of version 1 of op/1 needs .* host_memory=16,777,216"):
        staged(second, keys_of(range(60_000)), families=("default",))
    assert second.attempts.pending() == [] and second.version == 0
    first.complete(2, accepted.path)
    commit(second, keys_of(range(100)))
    assert first.reads.num_keys(2) == 20_000 + 2 * 100 and second.reads.num_keys() == 300
    first.destroy()
    second.destroy()
    gc.collect()
    assert counted(memory) == NOTHING


def test_a_repeated_commit_is_not_refused_because_of_the_one_that_it_replaces(opened):
    conf = StateStoreConf(fsync=False, host_memory=18 * MIB)
    memory = host_memory(conf)
    (state,) = opened(1, conf)
    commit(state, keys_of(range(100)))
    before = counted(memory)
    keys = keys_of(range(45_000))
    staged(state, keys, "first", families=("default",))
    once = taken_by_commits(memory, before)
    assert once >= len(keys) * (KEY_BYTES + VALUE_BYTES)
    with pytest.raises(HostMemoryError):
        memory.claim(STAGED, 2 * len(keys) * (KEY_BYTES + VALUE_BYTES), "Another commit")
    for attempt in ("first", "second"):
        ref = staged(state, keys, attempt, families=("default",))
        assert taken_by_commits(memory, before) == once, "it takes the place of the one before, and as much"
    state.complete(2, ref.path)
    assert state.reads.num_keys(2) == len(keys) + 2 * 100


def test_older_versions_make_room_and_the_newest_is_read_on(opened):
    conf = StateStoreConf(fsync=False, host_memory=17 * MIB)
    states = opened(8, conf)
    keys = keys_of(range(3_000))
    for _ in range(3):
        for state in states:
            commit(state, keys)
    held = []
    for state in states:
        try:
            assert state.reads.get_many(keys, 2).null_count == 0
            held.append(True)
        except VersionNotFoundError:
            held.append(False)
        assert state.reads.get_many(keys, 3).null_count == 0
    assert held[-1] and not held[0]


def test_a_scan_is_counted_while_it_lives(opened):
    conf = StateStoreConf(fsync=False, host_memory=203 * MIB)
    memory = host_memory(conf)
    (state,) = opened(1, conf)
    keys = keys_of(range(20_000))
    commit(state, keys)
    ref = staged(state, keys, families=("default",))
    scan = state.reads.scan(2, head=ref.path)
    assert counted(memory)[SCANS] >= 20_000 * (KEY_BYTES + VALUE_BYTES)
    over = counted(memory)[SCANS]
    next(scan)
    assert counted(memory)[SCANS] > over
    del scan
    gc.collect()
    assert counted(memory)[SCANS] == 0 and counted(memory)[STAGED] == 0


def test_open_databases_are_counted_and_leave_less_for_commits(opened):
    conf = StateStoreConf(fsync=False, host_memory=19 * MIB)
    memory = host_memory(conf)
    states = opened(20, conf)
    for state in states:
        state.complete(1, staged(state, keys_of(range(1)), families=("default",)).path)
    assert counted(memory)[DATABASES] == 0 < counted(memory)[COPIES], "small changes are not written at once"
    for state in states:
        state.write_out()
    assert counted(memory)[COPIES] == 0
    assert counted(memory)[DATABASES] == 20 * (DATABASE_BYTES + 2 * FAMILY_BYTES)
    commit(states[0], keys_of(range(100)))
    taken = counted(memory)[DATABASES]
    assert taken == 20 * (DATABASE_BYTES + 2 * FAMILY_BYTES) + (len(FAMILIES) - 1) * FAMILY_BYTES
    keys = keys_of(range(60_000))
    with pytest.raises(HostMemoryError, match=rf"{taken:,} by the open RocksDB databases.* more hosts"):
        staged(states[0], keys, families=("default",))
    for state in states[1:]:
        state.destroy()
    assert counted(memory)[DATABASES] == DATABASE_BYTES + (len(FAMILIES) + 1) * FAMILY_BYTES
    states[0].complete(3, staged(states[0], keys, families=("default",)).path)


def test_a_changelog_is_counted_while_it_is_written(opened, monkeypatch):
    conf = StateStoreConf(fsync=False, host_memory=204 * MIB)
    memory = host_memory(conf)
    (state,) = opened(1, conf)
    written, put_new = [], CheckpointStorage.put_new

    def put(storage, path, data):
        written.append((len(data), counted(memory)[CHANGELOGS]))
        return put_new(storage, path, data)

    monkeypatch.setattr(CheckpointStorage, "put_new", put)
    commit(state, keys_of(range(1000)))
    ((nbytes, held),) = written
    assert held == nbytes > 3 * 1000 * VALUE_BYTES
    assert counted(memory)[CHANGELOGS] == 0
