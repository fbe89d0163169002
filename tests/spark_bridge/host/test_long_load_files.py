"""Retention meets a load that takes long: no file that the load reads goes before the load is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.exceptions import LoadEndedError
from backends.partition import loading as changelog_reads
from coordinator_actor.run.holds import BUSY_SECONDS, FILES_RENEW_SECONDS
from spark_bridge.host.partition_cache import Kind
from spark_bridge.host.partition_loader import StoredPartition
from tests.patience import PATIENCE
from tests.spark_bridge.host.host_steps import GatedWorld, make_host, plan_spark, reg, run_task, task

KEEP = 3
STEP = FILES_RENEW_SECONDS + 100
"""Seconds from one file of a load to the next."""


class Retained:
    """A query of two partitions that retains few versions, over storage that delivers files one by one."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.world = GatedWorld(tmp_path)
        self.coordinator = self.world.coordinator(0)
        self.host = self.new_host("a")
        self.registration = reg(self.world, min_versions_to_retain=KEEP, maintenance_interval=10.0)
        assert self.coordinator.register_query(self.registration).refusal is None
        self.batches = 0
        self.over = threading.Event()
        self.pool = ThreadPoolExecutor(1)

    def new_host(self, incarnation: str) -> Any:
        clock = lambda: self.world.now  # noqa: E731 - the time of the world
        return make_host(self.world, self.coordinator, 0, self.tmp_path, incarnation, clock, load_threads=1)

    def batch(self) -> None:
        """One more version, with a snapshot of every third one."""
        plan_spark(self.world, self.batches)
        for p in (0, 1):
            run_task([self.host], self.batches, p, value=b"%d" % self.batches)
        self.world.commit_spark(self.batches)
        self.coordinator.batch_committed("run1", self.batches)
        self.batches += 1
        self.host.heartbeat()
        if self.batches % 3 == 0:
            for instance in self.host.cache.all():
                self.host.maintenance.upload_snapshots([instance])

    def time_passes(self, seconds: float) -> None:
        """Advance the clock; retention runs as well."""
        self.world.now += seconds
        self.coordinator.maintain()

    def load_copy(self, version: int) -> Future[Any]:
        (spec,) = self.registration.operators
        stored, load = StoredPartition(self.registration, spec, 0, version), self.host.loader.load_copy
        return self.pool.submit(load, stored.key(Kind.VERSION), stored, self.host.files.copies, self.over.is_set)

    def let_through(self, said: Callable[[], list[str]], files: int, of: int) -> None:
        """Let one file through, and wait until the load says so."""
        self.world.gate.release()
        wait_for(lambda: not said() or f": {files} of {of} files" in said()[0])

    def changelogs(self) -> list[int]:
        below = self.tmp_path / "ck/statestore/operators/op/2/0/default"
        return sorted(int(f.name.partition("-")[0]) for f in below.glob("*.changelog"))

    def close(self) -> None:
        self.over.set()
        self.world.open_gate()
        self.pool.shutdown()
        self.host.close()


def wait_for(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def q(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Retained]:
    monkeypatch.setattr(changelog_reads, "AHEAD_BYTES", 0)  # one file after the other
    made = Retained(tmp_path)
    yield made
    made.close()


def value(state: Any) -> Any:
    return state.reads.get_many(pa.array([b"k"], pa.binary())).to_pylist()


def test_files_of_a_copy_are_kept_until_it_is_loaded(q: Retained) -> None:
    while q.batches < 4:
        q.batch()
    q.world.is_gated = True
    loading = q.load_copy(2)
    assert q.world.arrived.acquire(timeout=PATIENCE)
    while q.batches < 20:  # the partition changes and is uploaded during the load
        q.batch()
        q.time_passes(10.0)
    assert q.changelogs() == list(range(1, 21))
    said = q.host.loads.describe
    assert said() == q.host.describe()["loading"]
    assert said()[0].startswith("a copy of version 2 of operator 'op', partition 0 (run run1): 0 of 2 files"), said()
    q.time_passes(STEP)
    q.let_through(said, 1, 2)
    for _ in range(2):
        q.time_passes(STEP)  # more than BUSY_SECONDS since it began
    assert 2 * STEP < BUSY_SECONDS < 3 * STEP
    q.let_through(said, 2, 2)
    copy = loading.result(PATIENCE)
    assert (copy.version, value(copy)) == (2, [b"1"]) and not said()
    copy.destroy()
    q.time_passes(10.0)
    assert q.changelogs()[0] > 9


def test_files_of_a_partition_are_kept_until_it_is_loaded(q: Retained) -> None:
    """The newer snapshots are damaged, so that the load takes many steps."""
    while q.batches < 12:
        q.batch()
    q.time_passes(10.0)
    q.batch()
    for path in (q.tmp_path / "ck/statestore/operators/op/2/0/default").glob("*.snapshot"):
        if int(path.name.partition("-")[0]) > 6:
            path.write_bytes(b"x" * path.stat().st_size)
    q.host = q.new_host("b")
    q.world.is_gated = True
    plan_spark(q.world, 13)
    grant = q.host.grants.for_task(task(13))
    loading = q.pool.submit(q.host.loader.load, grant, "op", 0)
    assert q.world.arrived.acquire(timeout=PATIENCE)
    for done in range(7):
        q.time_passes(STEP)
        assert q.changelogs() == list(range(1, 14))
        q.let_through(q.host.loads.describe, done + 1, 7)
    assert value(loading.result(PATIENCE).state) == [b"12"]
    q.world.open_gate()
    q.batch()
    q.time_passes(10.0)
    assert q.changelogs()[0] > 6


@pytest.mark.parametrize("of", ["a copy", "a partition"])
def test_files_stay_while_one_step_of_a_load_takes_longer_than_the_lease(q: Retained, of: str) -> None:
    """No file comes for that long, and the host sends its heartbeats."""
    while q.batches < 4:
        q.batch()
    if of == "a partition":
        q.host = q.new_host("b")
    q.world.is_gated = True
    if of == "a partition":
        plan_spark(q.world, 4)
        loading = q.pool.submit(q.host.loader.load, q.host.grants.for_task(task(4)), "op", 0)
    else:
        loading = q.load_copy(2)
    assert q.world.arrived.acquire(timeout=PATIENCE)
    for _ in range(6):
        q.world.now += FILES_RENEW_SECONDS
        q.host.heartbeat()
        q.coordinator.driver_heartbeat("run1")
        run = q.coordinator.registries.runs.get("run1")
        used = run.files_in_use.directories(run.versions.layouts, q.world.now)
        assert used, "retention may remove what is being loaded"
    assert 6 * FILES_RENEW_SECONDS > BUSY_SECONDS
    q.world.open_gate()
    assert value(getattr(loading.result(PATIENCE), "state", loading.result())) == [b"1" if of == "a copy" else b"3"]
    if of == "a copy":
        loading.result().destroy()


@pytest.mark.parametrize("of", ["a copy", "a partition"])
def test_files_of_an_abandoned_hanging_load_are_released(q: Retained, of: str) -> None:
    """Storage never answers, and the host lives on and sends its heartbeats."""
    while q.batches < 4:
        q.batch()
    abandoned = threading.Event()
    if of == "a partition":
        q.host = q.new_host("b")
        plan_spark(q.world, 4)
        grant = q.host.grants.for_task(task(4))
        q.world.is_gated = True
        loading = q.pool.submit(q.host.loader.load, grant, "op", 0, is_abandoned=abandoned.is_set)
    else:
        q.world.is_gated = True
        loading = q.load_copy(2)
        abandoned = q.over
    assert q.world.arrived.acquire(timeout=PATIENCE)
    run = q.coordinator.registries.runs.get("run1")

    def is_used() -> bool:
        for _ in range(4):
            q.world.now += FILES_RENEW_SECONDS
            q.host.heartbeat()
            q.coordinator.driver_heartbeat("run1")
        # The other partition is loaded ahead, for a host that was started again.
        layout = run.versions.layouts["op"]
        return f"{layout.directory(0)}/" in run.files_in_use.directories(run.versions.layouts, q.world.now)

    assert 4 * FILES_RENEW_SECONDS > BUSY_SECONDS
    assert is_used(), "a task waits"
    abandoned.set()
    assert not is_used()
    q.world.open_gate()
    with pytest.raises(LoadEndedError):
        loading.result(PATIENCE)


def test_unwanted_copy_is_cancelled_and_leaves_nothing(q: Retained) -> None:
    while q.batches < 4:
        q.batch()
    q.world.is_gated = True
    loading = q.load_copy(2)
    assert q.world.arrived.acquire(timeout=PATIENCE)
    q.over.set()
    q.world.gate.release(3)
    with pytest.raises(LoadEndedError, match="a copy of version 2"):
        loading.result(PATIENCE)
    assert not any(q.host.files.copies.iterdir()) and not q.host.loads.describe()
