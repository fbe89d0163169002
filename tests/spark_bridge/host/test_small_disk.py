"""A host whose local disk is smaller than its state: partitions take turns, and nothing is lost."""

from __future__ import annotations

import errno
import itertools
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from backends.encoding.key_groups import key_groups, partition_of
from backends.encoding.keys import encode_keys
from backends.encoding.schema import StateSchema
from backends.engines import engine
from backends.exceptions import LocalDiskFullError, StoreClosedError
from backends.formats.changelog import Changes
from backends.load_watch import LoadProgress, LoadWatch
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import OperatorSpec
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.host import local_disk
from spark_bridge.host.local_disk import EMPTY_SECONDS, IN_USE_SECONDS, ROOM_SECONDS, WARNING_SECONDS
from spark_bridge.host.partition_loader import READ_SECONDS
from spark_bridge.queryable.protocol import At, LookupRequest
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.transport.protocol import GetCommand
from tests.coordinator_actor.coordinator_world import SCHEMA, World
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.host.host_steps import Threads, make_host, task, wait_until

MIB = 1 << 20
PARTITIONS = 4
NOTHING = LoadProgress()
KEYS, VALUE_BYTES = 60, 20_000
"""Of each partition: 1.2 MB, which do not compress."""


class Stream:
    """A stream over a host with a small disk, and a model of its state."""

    def __init__(self, root: Path, local: Path, backend: str, seed: int, **conf: Any) -> None:
        self.world = World(root)
        self.local = local
        small: dict[str, Any] = {"deltas_per_snapshot": 2, "rocksdb_memtable_bytes": MIB // 4}
        self.conf = {"rocksdb_compression": "none", "compression": "none", **small, **conf}
        self.random = Random(seed)
        self.coordinator: Coordinator = self.world.coordinator(0)
        self.now = 0.0
        self.clock: Any = time.monotonic
        self.registration = self.world.registration(
            "run1", PARTITIONS, operators=(OperatorSpec("op", PARTITIONS, SCHEMA, backend=backend),)
        )
        self.host = self.started("a")
        assert self.coordinator.register_query(self.registration).refusal is None
        self.batch = 0
        self.model: list[dict[bytes, bytes]] = [{} for _ in range(PARTITIONS)]
        self.reads = 0

    def started(self, incarnation: str) -> Any:
        return make_host(self.world, self.coordinator, 0, self.local, incarnation, self.clock, **self.conf)

    def run_batch(self, partitions: list[int], changes: int, at_once: int = 1) -> None:
        """Run the tasks of a batch, so many at once, and complete it."""
        self.world.plan_spark(self.batch)
        for first in range(0, len(partitions), at_once):
            begun = [(p, self.task(p, changes)) for p in partitions[first : first + at_once]]
            for _, future in begun:
                future.result(HANG)
        self.complete()

    def complete(self) -> None:
        self.world.commit_spark(self.batch)
        self.coordinator.batch_committed("run1", self.batch)
        self.host.heartbeat()
        self.batch += 1

    def task(self, p: int, changes: int) -> Future[None]:
        keys = sorted(self.random.sample([b"%03d" % i for i in range(KEYS)], changes))
        values = [self.random.randbytes(VALUE_BYTES) if self.random.random() < 0.9 else None for _ in keys]
        before = dict(self.model[p])
        for key, value in zip(keys, values, strict=True):
            if value is None:
                self.model[p].pop(key, None)
            else:
                self.model[p][key] = value
        return Threads.submit(self._run_task, p, self.batch, keys, values, before)

    def _run_task(
        self, p: int, batch: int, keys: list[bytes], values: list[bytes | None], before: dict[bytes, bytes]
    ) -> None:
        of = task(batch, p)
        while self.host.open(of).loading is not None:
            pass  # the host has waited a moment before it answered
        read = self.host.reads.get_many(GetCommand("run1", "op", p, batch), pa.array(keys, pa.binary()))
        assert read.to_pylist() == [before.get(key) for key in keys]
        self.host.commit(of, Changes.of(pa.array(keys, pa.binary()), pa.array(values, pa.binary())), {})

    def check_read(self, p: int) -> None:
        """Read a partition at the completed version, as a query does."""
        self.now += READ_SECONDS  # the one that was read before may go
        reads = self.host.reads.load("run1", "op", p).state.reads
        pairs = {
            k: v
            for batch in reads.scan(self.batch)  # a partition that found the disk full is still at the version before
            for k, v in zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True)
        }
        assert pairs == self.model[p]
        self.reads += 1

    def snapshots(self) -> None:
        for begun in self.host.maintenance.do_maintenance():
            begun.result(HANG)

    def disk(self) -> dict[str, Any]:
        described: dict[str, Any] = self.host.describe()["disk"]
        return described


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "small"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system takes a right that this user has not got")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def random_work(stream: Stream, batches: int) -> None:
    everything = list(range(PARTITIONS))
    stream.run_batch(everything, KEYS)
    for _ in range(batches):
        stream.random.shuffle(everything)
        stream.run_batch(everything, stream.random.randrange(1, KEYS // 4), stream.random.choice([1, 2, PARTITIONS]))
        if stream.random.random() < 0.5:
            stream.check_read(stream.random.randrange(PARTITIONS))
        if stream.random.random() < 0.6:
            stream.snapshots()
    for p in range(PARTITIONS):
        stream.check_read(p)


@pytest.mark.parametrize("backend", ["rocksdb", "file"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_work_on_a_small_file_system_equals_the_model(
    tmp_path: Path, tmpfs: Path, backend: str, seed: int
) -> None:
    stream = Stream(tmp_path, tmpfs, backend, seed)
    random_work(stream, 8)
    if backend == "rocksdb":
        assert stream.disk()["evictions"] > 0 and stream.disk()["reread_bytes"] > 0
    stream.host.close()


def test_a_partition_whose_snapshot_finds_the_disk_full_is_read_again(tmp_path: Path, tmpfs: Path) -> None:
    """The first open of its database for writing leaves a partition at no version, and no task may come for it."""
    stream = Stream(tmp_path, tmpfs, "rocksdb", 1)
    for _ in range(3):
        stream.run_batch(list(range(PARTITIONS)), 5)
    others = tmpfs / "of others"
    with pytest.raises(OSError, match="No space left"):
        others.write_bytes(bytes(8 * MIB))
    stream.host.maintenance._hooks.clear()  # the first one evicts a partition, since the disk is nearly full
    stream.snapshots()
    assert len(loaded(stream)) < PARTITIONS
    others.unlink()
    for p in range(PARTITIONS):
        stream.check_read(p)
    stream.host.close()


def test_random_work_within_a_budget_equals_the_model(tmp_path: Path) -> None:
    stream = Stream(tmp_path, tmp_path, "rocksdb", 7, local_disk_bytes=5 * MIB)
    random_work(stream, 8)
    assert stream.disk()["evictions"] > 0 and stream.disk()["budget"] == 5 * MIB
    stream.host.close()


def test_readers_and_tasks_at_once_get_their_turns(tmp_path: Path) -> None:
    stream = Stream(tmp_path, tmp_path, "rocksdb", 3)
    stream.run_batch(list(range(PARTITIONS)), KEYS)
    stream.run_batch(list(range(PARTITIONS)), 1)
    stream.snapshots()
    stream.run_batch(list(range(PARTITIONS)), 1)
    stream.host.close()
    stream.conf["local_disk_bytes"] = 3 * MIB
    stream.host = stream.started("b")
    for _ in range(4):
        stream.world.plan_spark(stream.batch)
        before = [dict(pairs) for pairs in stream.model]
        version = stream.batch
        tasks = [stream.task(p, 5) for p in range(PARTITIONS)]
        reads = [Threads.submit(read_version, stream, p, version, before[p]) for p in range(PARTITIONS)]
        for future in (*tasks, *reads):
            future.result(HANG)
        stream.complete()
    assert stream.disk()["evictions"] > 0
    stream.host.close()


def read_version(stream: Stream, p: int, version: int, expected: dict[bytes, bytes]) -> None:
    """Read a key as a client does that asks again while the partition is loaded, or was evicted for another one."""
    key, value = next(iter(expected.items()))
    while True:
        try:
            instance = stream.host.reads.load("run1", "op", p)
            assert instance.state.reads.get_one(key, version) == value
            return
        except (HostUnavailableError, StoreClosedError):
            continue


# One partition has room at a time.


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Stream]:
    """Partitions 0 and 1 have snapshots of 1.2 MB each, and there is room for one of them; nothing is loaded."""
    stream = Stream(tmp_path, tmp_path, "rocksdb", 1)
    stream.run_batch(list(range(PARTITIONS)), KEYS)
    stream.run_batch(list(range(PARTITIONS)), 1)
    stream.snapshots()
    stream.run_batch(list(range(PARTITIONS)), 1)
    stream.host.close()
    stream.conf["local_disk_bytes"] = 2 * MIB
    stream.clock = lambda: stream.now
    stream.host = stream.started("b")
    stream.world.plan_spark(stream.batch)
    yield stream
    stream.host.close()


def begun_load(stream: Stream, p: int) -> Any:
    """Ask for a partition until its load waits for room; return the task."""
    of = task(stream.batch, p)
    wait_until(lambda: (stream.host.open(of).loading or NOTHING).steps > 0, "the load waits for no room")
    return of


def opened(stream: Stream, of: Any) -> None:
    wait_until(lambda: stream.host.open(of).loading is None, "the partition was not loaded")


def commit(stream: Stream, of: Any) -> None:
    stream.host.commit(of, Changes.of(pa.array([b"000"]), pa.array([b"new"])), {})
    stream.model[of.partition][b"000"] = b"new"


def loaded(stream: Stream) -> set[int]:
    return {i.partition for i in stream.host.cache.all()}


def test_a_partition_stays_until_its_task_has_committed(narrow: Stream) -> None:
    first = task(narrow.batch, 0)
    opened(narrow, first)
    second = begun_load(narrow, 1)
    assert loaded(narrow) == {0} and narrow.disk()["evictions"] == 0
    commit(narrow, first)
    opened(narrow, second)
    assert loaded(narrow) == {1} and narrow.disk()["evictions"] == 1


def test_a_partition_is_not_evicted_before_the_task_that_waits_for_it_has_used_it(narrow: Stream) -> None:
    first = task(narrow.batch, 0)
    narrow.host.loader.load(narrow.host.grants.for_task(first), "op", 0)
    begun_load(narrow, 1)
    assert loaded(narrow) == {0}
    opened(narrow, first)
    commit(narrow, first)


def test_a_partition_of_a_task_that_has_died_is_evicted_in_the_end(narrow: Stream) -> None:
    opened(narrow, task(narrow.batch, 0))
    second = begun_load(narrow, 1)
    assert loaded(narrow) == {0}
    narrow.now += IN_USE_SECONDS + 1
    opened(narrow, second)
    assert loaded(narrow) == {1}


def test_a_commit_to_an_evicted_partition_counts_also_for_a_restarted_coordinator(narrow: Stream) -> None:
    for p in range(PARTITIONS):
        of = task(narrow.batch, p)
        opened(narrow, of)
        commit(narrow, of)
    assert len(loaded(narrow)) == 1
    pending = narrow.host.cache.report().pending
    assert sorted(a.partition for a in pending) == list(range(PARTITIONS))
    narrow.coordinator = narrow.host.port.c = narrow.world.coordinator(0)
    narrow.host.register()
    narrow.complete()
    for p in range(PARTITIONS):
        narrow.check_read(p)
    narrow.host.heartbeat()
    assert {a.partition for a in narrow.host.cache.report().pending} <= {3}, "the last one was evicted afterwards"


def test_a_repeated_task_replaces_the_commit_to_an_evicted_partition(narrow: Stream) -> None:
    for p in (0, 1, 0):
        of = task(narrow.batch, p)
        opened(narrow, of)
        commit(narrow, of)
    pending = [(a.partition, a.attempt) for a in narrow.host.cache.report().pending]
    assert sorted(p for p, _ in pending) == [0, 1] and (0, of.attempt) in pending


def test_a_partition_larger_than_the_disk_is_refused_with_sizes_and_remedy(narrow: Stream) -> None:
    narrow.host.close()
    narrow.conf["local_disk_bytes"] = MIB
    narrow.host = narrow.started("c")
    of = task(narrow.batch, 0)
    with pytest.raises(LocalDiskFullError) as raised:
        opened(narrow, of)
    said = str(raised.value)
    assert re.search(r"partition=0\] needs 1\.\d MiB", said) and " of 1.0 MiB are free" in said, said
    assert "local_disk_bytes" in said, said


def test_a_load_waits_for_files_that_others_release_however_often_it_is_woken(narrow: Stream) -> None:
    """Each load and each eviction wakes all that wait: a few busy loads use up any number of attempts at once."""
    released = narrow.host.loader._files.local_dir / "released"
    released.parent.mkdir(parents=True, exist_ok=True)
    released.write_bytes(bytes(MIB))
    waiting = begun_load(narrow, 0)
    attempts = 0
    reserve = narrow.host.disk._reserve

    def counted(*args: Any) -> None:
        nonlocal attempts
        attempts += 1
        reserve(*args)

    narrow.host.disk._reserve = counted

    def woken() -> bool:
        narrow.host.disk.notify()
        return attempts > 200

    wait_until(woken, "the load does not try again")
    released.unlink()
    opened(narrow, waiting)


def test_a_load_that_has_waited_alone_waits_for_one_that_begins(narrow: Stream) -> None:
    """Its time is nearly over when another load takes the room: that one ends, and the room may be enough again."""
    disk, attempts, other = narrow.host.disk, 0, LoadWatch("another load")
    reserve = disk._reserve

    def refuse(*_: Any) -> None:
        nonlocal attempts
        attempts += 1
        if attempts * ROOM_SECONDS / 5 > EMPTY_SECONDS:
            disk._reserved[other] = 0
        raise LocalDiskFullError("The disk is full.")

    disk._reserve = refuse
    waiting = begun_load(narrow, 0)
    wait_until(lambda: attempts > 5, "the load does not try again")
    disk._reserve = reserve
    del disk._reserved[other]
    disk.notify()
    opened(narrow, waiting)


@pytest.mark.parametrize("enough", [True, False], ids=["for-one", "for-none"])
def test_loads_that_take_each_others_room_repeat_one_after_the_other(
    narrow: Stream, monkeypatch: pytest.MonkeyPatch, enough: bool
) -> None:
    """Both find room to reserve, and their writes find the disk full. If that does not help, they fail."""
    monkeypatch.setattr(local_disk, "RELEASE_SECONDS", 1.0)
    loader = narrow.host.loader
    foreign = loader._files.local_dir / "foreign"
    foreign.parent.mkdir(parents=True, exist_ok=True)
    foreign.write_bytes(bytes(MIB))  # else they are alone on an empty disk, and give up at once
    changed, both, over = threading.Condition(), threading.Barrier(2), threading.Event()
    running, disturbed = set[LoadWatch](), set[LoadWatch]()

    def load(watch: LoadWatch) -> bool:
        attempts = itertools.count()

        def write() -> bool:
            assert not over.is_set(), "the loads repeat without end"
            with narrow.host.disk.reserving(watch, watch.what, foreign.parent / watch.what):
                watch.expect(1, 1)
                if next(attempts) == 0:
                    both.wait(PATIENCE)
                with changed:
                    running.add(watch)
                    disturbed.update(running if len(running) > 1 else ())
                    changed.notify_all()
                    is_disturbed = changed.wait_for(lambda: watch in disturbed, 1.5 * ROOM_SECONDS if enough else 0.1)
                    running.discard(watch)
                    disturbed.discard(watch)
            if is_disturbed or not enough:
                raise LocalDiskFullError("The disk is full.")
            return True

        return loader._room.make(write, None, watch)

    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(load, LoadWatch(name)) for name in ("one", "other")]
        try:
            for one in loads:
                with nullcontext() if enough else pytest.raises(LocalDiskFullError):
                    assert one.result(HANG)
        finally:
            over.set()


def test_the_latest_version_is_not_read_of_files_that_were_dropped_for_want_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB finds the disk full, so a partition that serves is loaded again, and the load waits for room."""
    monkeypatch.setattr(engine, "UNWRITTEN_BYTES", 0)
    monkeypatch.setattr(engine, "GATHERED_BYTES", 0)
    stream = Stream(tmp_path / "world", tmp_path / "local", "rocksdb", 1)
    host = stream.host
    numbers = pa.record_batch({"k": pa.array(range(100), pa.int64())})
    groups = key_groups(numbers, stream.registration.key_groups)
    row = [partition_of(int(g), stream.registration.key_groups, PARTITIONS) for g in groups].index(0)
    key = encode_keys(numbers, groups)[row].as_py()
    value = StateSchema.from_json(SCHEMA).encode_values(pa.record_batch({"n": pa.array([7], pa.int64())}))[0].as_py()
    monkeypatch.setattr(stream, "random", SimpleNamespace(sample=lambda of, n: [key, *of], random=lambda: 0.0))
    monkeypatch.setattr(stream.random, "randbytes", lambda n: value, raising=False)
    for _ in range(2):
        stream.run_batch(list(range(PARTITIONS)), KEYS)
    reads = HostReads(host)
    request = LookupRequest("run1", "op", column_family="default", at=At("latest"))
    assert reads.lookup_one(request, key) == (2, value)

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device: RocksDB has stopped writes")

    served = host.cache.instance("run1", "op", 0)
    monkeypatch.setattr(served.state._engine._below, "_wait_for_flushes", full)
    stream.world.plan_spark(stream.batch)
    for p in range(PARTITIONS):
        stream.task(p, KEYS).result(HANG)
    stream.world.commit_spark(stream.batch)
    stream.coordinator.batch_committed("run1", stream.batch)
    stream.batch += 1
    total = host.disk._room()[1]
    monkeypatch.setattr(host.disk, "_room", lambda: (0, total))
    stream.world.plan_spark(stream.batch)
    opened(stream, task(stream.batch, 1))  # so that no other partition can make room
    begun, over = threading.Event(), threading.Event()

    def wait(seconds: float) -> float:
        begun.set()
        over.wait(HANG)
        return 0.0

    monkeypatch.setattr(host.disk, "wait", wait)
    waiting = Threads.submit(host.open, task(stream.batch, 0))
    assert begun.wait(HANG) and served.state.version == 0 and not served.state.is_loading
    with pytest.raises(HostUnavailableError, match=r"Partition 0 .* is being loaded"):
        reads.lookup_one(request, key)
    reported = {(a.partition, a.version) for a in host.cache.report().pending}
    assert {version for partition, version in reported if partition == 0} == set(served.acknowledged) != set()
    monkeypatch.undo()
    over.set()
    waiting.result(HANG)
    opened(stream, task(stream.batch, 0))
    assert reads.lookup_one(request, key) == (3, value)


def test_a_load_that_repeats_a_write_is_not_waited_for(narrow: Stream) -> None:
    watch, disk = LoadWatch("repeating"), narrow.host.disk
    fetched = narrow.host.loader._files.local_dir / "fetched"
    with disk.turn(watch), disk.reserving(watch, watch.what, fetched):
        watch.expect(1, 1)
        assert not disk.is_loading
    with disk.reserving(watch, watch.what, fetched):
        watch.expect(1, 1)
        assert disk.is_loading


def test_evictions_are_counted_and_warned_of_once_in_a_while(narrow: Stream, caplog: pytest.LogCaptureFixture) -> None:
    for p in (0, 1, 2, 3):
        of = task(narrow.batch, p)
        opened(narrow, of)
        commit(narrow, of)
    warnings = [r.getMessage() for r in caplog.records if "smaller than the state" in r.getMessage()]
    assert len(warnings) == 1 and warnings[0].startswith("The local disk is smaller than the state of this host: 1 ")
    narrow.complete()
    narrow.now += WARNING_SECONDS
    narrow.check_read(0)
    warnings = [r.getMessage() for r in caplog.records if "smaller than the state" in r.getMessage()]
    assert len(warnings) == 2 and ": 3 partitions with" in warnings[1]
    disk = narrow.disk()
    assert disk["evictions"] == 4 and disk["evicted_seconds"] == 0.0
    assert MIB < disk["reread_bytes"] < 3 * MIB < disk["evicted_bytes"]


def test_memory_does_not_grow_with_the_evictions_of_ended_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_disk, "MAX_EVICTED", 3)
    disk = local_disk.LocalDisk(tmp_path, None)
    for query in range(10):
        disk.note_eviction((f"ck/{query}", "op", 0), MIB)
    disk.note_loaded(("ck/0", "op", 0), MIB)
    disk.note_loaded(("ck/9", "op", 0), MIB)
    assert (disk.describe()["evictions"], disk.describe()["reread_bytes"]) == (10, MIB)


def test_maintenance_evicts_an_unused_partition_of_a_disk_that_is_nearly_full(
    narrow: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = task(narrow.batch, 0)
    opened(narrow, first)
    monkeypatch.setattr(narrow.host.disk, "_room", lambda: (0, 2 * MIB))
    narrow.host.maintenance.do_maintenance()
    assert loaded(narrow) == {0}, "its task runs"
    commit(narrow, first)
    narrow.host.maintenance.do_maintenance()
    assert not loaded(narrow)
