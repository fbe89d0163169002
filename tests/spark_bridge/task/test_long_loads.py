"""A load that takes longer than any limit, over real Flight servers, and storage whose files come one by one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.exceptions import StorageError
from backends.load_watch import LoadProgress
from coordinator_actor.coordinator import Coordinator
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.flight_server import HostFlightServer
from spark_bridge.host.instances import InstanceKey
from spark_bridge.host.partition_cache import KEPT_FILES_SECONDS
from spark_bridge.host.partition_loader import ABANDONED_SECONDS
from spark_bridge.task import task_store as task_client
from spark_bridge.task.executor import Endpoints
from spark_bridge.task.task_store import TaskStore
from tests.patience import PATIENCE
from tests.spark_bridge.host.host_steps import GatedWorld, make_host, plan_spark, reg, run_task, task

VERSIONS = 8
TIMEOUT = 60.0


class Clock:
    """The time of hosts and tasks, which only a test turns. ``on_sleep`` happens when a task sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.on_sleep: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now

    monotonic = __call__

    def sleep(self, seconds: float) -> None:
        self.on_sleep()
        time.sleep(0.01)


class Loads:
    """A query of two partitions, of whose state nothing is at the one host, which serves tasks over Flight."""

    def __init__(self, tmp_path: Path, clock: Clock) -> None:
        self.tmp_path, self.clock = tmp_path, clock
        self.world = GatedWorld(tmp_path)
        self.coordinator: Coordinator = self.world.coordinator(0)
        first = make_host(self.world, self.coordinator, 0, tmp_path)
        assert self.coordinator.register_query(reg(self.world)).refusal is None
        for batch in range(VERSIONS):
            plan_spark(self.world, batch)
            for p in (0, 1):
                run_task([first], batch, p, value=b"%d" % batch)
            self.world.commit_spark(batch)
        plan_spark(self.world, VERSIONS)
        self.server = HostFlightServer(lambda: self.host, "127.0.0.1", "token", lambda method, args: None)
        self.host: Any = make_host(self.world, self.coordinator, 0, tmp_path, "b", load_threads=1)
        self.host.loads._clock = self.host.cache._clock = self.host.loader._clock = clock
        self.world.is_gated = True

    @property
    def address(self) -> str:
        return f"grpc://127.0.0.1:{self.server.port}"

    def task_store(self, p: int = 0, run: str = "run1") -> TaskStore:
        return TaskStore(task(VERSIONS, p, run), 2, 1024, Endpoints((self.address,), "token", "", TIMEOUT))

    def opened(self, p: int = 0, run: str = "run1") -> TaskStore:
        made = self.task_store(p, run)
        made.open()
        return made

    @property
    def key(self) -> InstanceKey:
        return str(self.world.root / "ck/statestore"), "op", 0

    def progress(self) -> LoadProgress:
        return self.host.loads.progress(self.key)

    def let_through(self, files: int) -> None:
        """Let so many files through, and wait until the load has used them."""
        until = self.progress().files + files
        self.world.gate.release(files)
        wait_for(lambda: self.progress().files >= until or not self.progress().load)

    def end_with_next_file(self) -> None:
        """Let the load notice its cancellation. It also waits for the two files that it reads ahead."""
        self.world.gate.release(3)

    def is_at_rest(self) -> bool:
        return not self.host.loads._watched and all(x.result.done() for x in self.host.loads._loads.values())


def wait_for(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(task_client, "time", made)
    return made


@pytest.fixture
def loads(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    monkeypatch.setattr("spark_bridge.host.partition_loader.TASK_ANSWER_SECONDS", 0.05)
    made = Loads(tmp_path, clock)
    yield made
    made.world.fails = False
    made.world.open_gate()
    clock.on_sleep = lambda: None
    made.server.shutdown()
    made.host.close()
    task_client._owners.clear()


def value(store: TaskStore) -> Any:
    return store.get_many(pa.array([b"k"], pa.binary())).to_pylist()


LAST = [b"%d" % (VERSIONS - 1)]


def slowly(loads: Loads, seconds: float) -> Callable[[], None]:
    """While a task sleeps twice, so many seconds pass and one file comes."""
    sleeps = count(1)

    def sleep() -> None:
        loads.clock.now += seconds / 2
        if next(sleeps) % 2 == 0:
            loads.let_through(1)

    return sleep


@pytest.mark.parametrize("knows_owner", [False, True])
def test_a_load_that_advances_completes_however_long_it_takes(loads: Loads, knows_owner: bool) -> None:
    begun = loads.clock.now
    loads.clock.on_sleep = slowly(loads, 0.9 * TIMEOUT)
    if knows_owner:
        task_client._owners["run1", "op", 0] = (loads.address, "token")
    store = loads.task_store()
    if not knows_owner:
        store.open()
    assert value(store) == LAST
    assert loads.clock.now - begun > 6 * TIMEOUT
    assert len(loads.world.read) == VERSIONS and set(loads.world.read.values()) == {1}


def test_scan_after_a_long_load_has_its_full_timeout(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scan fails once when the load is over: the seconds of the load do not count."""
    loads.clock.on_sleep = slowly(loads, 0.9 * TIMEOUT)
    scan, failed = loads.host.reads.scan, list[object]()

    def failing_once(command: Any, ranges: Any) -> Iterator[pa.RecordBatch]:
        if not failed:
            failed.append(command)
            raise HostUnavailableError("gone for a moment")
        yield from scan(command, ranges)

    monkeypatch.setattr(loads.host.reads, "scan", failing_once)
    begun = loads.clock.now
    pairs = [pair for batch in loads.task_store().scan([(b"", None)]) for pair in batch.to_pylist()]
    assert failed and [pair["value"] for pair in pairs] == LAST
    assert loads.clock.now - begun > 6 * TIMEOUT


def test_stalled_load_ends_and_the_next_attempt_reuses_its_files(loads: Loads) -> None:
    def sleep() -> None:
        loads.clock.now += 0.4 * TIMEOUT
        if loads.progress().files < 3:
            loads.let_through(1)

    loads.clock.on_sleep = sleep
    with pytest.raises(HostUnavailableError) as raised:
        loads.opened()
    said = str(raised.value)
    assert "made no progress for 60 s (spark.statestore.recoveryTimeout). Progress: 3 of 8 files" in said, said
    assert loads.address in said
    loads.clock.on_sleep = slowly(loads, 1.0)
    assert value(loads.opened()) == LAST
    assert len(loads.world.read) == VERSIONS and set(loads.world.read.values()) == {1}


def test_failed_load_is_reported_once_and_resumed(loads: Loads) -> None:
    def sleep() -> None:
        if loads.progress().files < 4:
            loads.let_through(1)
        else:
            loads.world.fails = True
            loads.world.gate.release(2)  # also for the files that are read ahead

    loads.clock.on_sleep = sleep
    with pytest.raises(StorageError, match="throttled"):
        loads.opened()
    wait_for(loads.is_at_rest)
    loads.world.fails = False
    while loads.world.gate.acquire(blocking=False):
        pass
    before = Counter(loads.world.read)
    assert sum(before.values()) in (4, 5)  # one more may be read ahead
    loads.clock.on_sleep = slowly(loads, 1.0)
    assert value(loads.opened()) == LAST
    assert max(before.values()) == 1 and sum((loads.world.read - before).values()) == VERSIONS - 4


def test_abandoned_load_ends_and_its_files_are_removed_later(loads: Loads) -> None:
    assert loads.host.open(task(VERSIONS)).loading is not None  # and the task dies
    loads.let_through(3)
    loads.clock.now += ABANDONED_SECONDS + 1
    loads.end_with_next_file()
    wait_for(loads.is_at_rest)
    assert not loads.host.cache.all() and len(loads.host.cache._kept) == 1
    loads.host.maintenance.do_maintenance()
    assert len(loads.host.cache._kept) == 1
    loads.clock.now += KEPT_FILES_SECONDS + 1
    loads.host.maintenance.do_maintenance()
    assert not loads.host.cache._kept
    assert not [path for path in loads.tmp_path.glob("local0b/*/run1/operators/*/2/0") if any(path.rglob("engine"))]
    loads.world.open_gate()
    assert value(loads.opened()) == LAST


def test_new_attempt_resumes_an_abandoned_load(loads: Loads) -> None:
    assert loads.host.open(task(VERSIONS)).loading is not None
    loads.let_through(3)
    loads.clock.now += ABANDONED_SECONDS + 1
    loads.end_with_next_file()
    wait_for(loads.is_at_rest)
    kept = next(iter(loads.host.cache._kept.values())).state.version
    assert kept >= 3
    before = sum(loads.world.read.values())
    loads.clock.on_sleep = slowly(loads, 1.0)
    assert value(loads.opened()) == LAST
    assert sum(loads.world.read.values()) - before == VERSIONS - kept


def test_a_load_of_a_run_that_is_replaced_ends(loads: Loads) -> None:
    assert loads.host.open(task(VERSIONS)).loading is not None
    loads.let_through(2)
    assert loads.coordinator.register_query(reg(loads.world, "run2")).refusal is None
    newer = task(VERSIONS, run="run2")
    assert loads.host.open(newer).loading is not None
    loads.end_with_next_file()
    wait_for(lambda: loads.host.open(newer).loading is not None and of_run(loads) == "run2")
    loads.world.open_gate()
    assert value(loads.opened(run="run2")) == LAST
    assert {i.registration.run_id for i in loads.host.cache.all()} == {"run2"} and not loads.host.cache._kept


def of_run(loads: Loads) -> str | None:
    return next((load.lease.run_id for load in loads.host.loads._watched.values() if load.key == loads.key), None)


def test_a_load_of_a_run_that_is_over_ends_and_leaves_nothing(loads: Loads) -> None:
    assert loads.host.open(task(VERSIONS)).loading is not None
    loads.let_through(2)
    loads.coordinator.deactivate_instances("run1")
    loads.host.heartbeat()
    wait_for(lambda: all(load.watch.is_over for load in loads.host.loads._watched.values()))
    loads.end_with_next_file()
    wait_for(loads.is_at_rest)
    assert not loads.host.cache.all() and not loads.host.cache._kept
    assert not list(loads.tmp_path.glob("local0b/*/run1/**/engine"))


def test_hanging_partition_does_not_block_others(loads: Loads) -> None:
    assert loads.host.open(task(VERSIONS)).loading is not None
    assert loads.world.arrived.acquire(timeout=PATIENCE)
    done: list[str] = []

    def everything_else() -> None:
        assert value(loads.opened(1)) == LAST
        loads.host.heartbeat()
        loads.host.maintenance.do_maintenance()
        done.extend(loads.host.describe()["loading"])

    other = threading.Thread(target=everything_else)
    other.start()
    other.join(PATIENCE)
    assert len(done) == 1 and done[0].startswith("version 8 of operator 'op', partition 0 (run run1): 0 of 8 files"), (
        done
    )
