"""A restarted query reuses the local files of its hosts if they are valid."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.engines.engine import UNWRITTEN_BYTES
from backends.exceptions import LocalStateDamagedError
from backends.formats.changelog import Changes
from backends.formats.manifest import version_in
from coordinator_actor.messages import Completed, OperatorSpec
from spark_bridge.host.partition_cache import KEPT_FILES_SECONDS
from spark_bridge.transport.protocol import GetCommand
from tests.coordinator_actor.coordinator_world import SCHEMA, World
from tests.spark_bridge.host.host_steps import make_host, plan_spark, task

KEY = pa.array([b"\0\0k"])
"""A key of the first key group, and so of partition 0 in every layout."""
BATCHES = 3
LARGE = os.urandom(2 * UNWRITTEN_BYTES)
"""A value that is written to the local files at once: less may stay in the memory of a host."""


def changes_of(value: bytes) -> Changes:
    """Return changes of ``KEY``, and of another key with a large value."""
    return Changes.of(pa.array([KEY[0].as_py(), b"\0\0l"]), pa.array([value, LARGE]))


@dataclass
class Restarts:
    """A query of one partition on one host, which is started again and again."""

    tmp: Path
    run: str = ""
    runs: int = 0
    batches: int = 0
    now: float = 0.0
    world: World = field(init=False)

    def __post_init__(self) -> None:
        self.world = World(self.tmp)
        self.c = self.world.coordinator(0)
        self.host = make_host(self.world, self.c, 0, self.tmp, clock=lambda: self.now)
        self.restart()
        for _ in range(BATCHES):
            self.batch()

    def restart(self, n: int = 1, backend: str = "rocksdb") -> int:
        """Register a new run, which replaces the one before; return the version that it begins with."""
        self.runs += 1
        self.run = f"run{self.runs}"
        spec = OperatorSpec("op", n, SCHEMA, backend=backend)
        answer = self.c.register_query(self.world.registration(self.run, n, operators=(spec,)))
        assert answer.refusal is None, answer.refusal
        return answer.completed_version

    def open(self, batch: int, partition: int = 0) -> Any:
        """Open a partition as a task of a batch does; return the task."""
        given = task(batch, partition, self.run)
        while (opened := self.host.open(given)).loading is not None:
            pass  # the host has waited a moment before it answered
        assert opened.redirect is None
        return given

    def batch(self, *, is_committed: bool = True) -> None:
        """Run a batch, whose value is its number."""
        plan_spark(self.world, self.batches)
        given = self.open(self.batches)
        self.host.commit(given, changes_of(b"%d" % self.batches), {})
        if is_committed:
            self.world.commit_spark(self.batches)
            self.batches += 1

    def complete(self) -> None:
        self.c.batch_committed(self.run, self.batches - 1)
        self.host.heartbeat()

    def value(self) -> bytes | None:
        """Return the value at the version that the partition has now."""
        self.open(self.batches)
        instance = self.host.cache.instance(self.run, "op", 0)
        assert instance.state.version == self.batches
        found: bytes | None = instance.state.reads.get_many(KEY).to_pylist()[0]
        return found

    def remove_files_up_to(self, version: int) -> None:
        """Remove the state of these versions from storage, so that loading one of these files fails."""
        removed = [p for p in self.tmp.glob("ck/statestore/operators/**/*.changelog") if version_in(p.name) <= version]
        assert len(removed) == version
        for path in removed:
            path.unlink()

    def directories(self) -> list[str]:
        """Return the runs that have local files."""
        return sorted({p.relative_to(self.tmp).parts[2] for p in self.tmp.glob("local0a/q/*/**/LOCK")})


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Restarts]:
    made = Restarts(tmp_path)
    try:
        yield made
    finally:
        made.host.close()
        assert not made.directories()


def heard(query: Restarts) -> None:
    """The host hears that the run is over before a task of the next run comes."""
    query.host.heartbeat()
    assert not query.host.cache.all()


def not_heard(query: Restarts) -> None:
    """A task of the next run comes first."""


@pytest.mark.parametrize("when", [heard, not_heard])
def test_a_restarted_query_loads_nothing_where_its_partition_was(
    query: Restarts, when: Callable[[Restarts], None]
) -> None:
    query.complete()
    query.remove_files_up_to(BATCHES)
    for _ in range(2):
        assert query.restart() == query.batches
        when(query)
        assert query.value() == b"%d" % (query.batches - 1)
        assert query.directories() == [query.run]
        query.batch()
        query.complete()
        assert [path.name for path in (query.tmp / "local0a" / "q").iterdir()] == [query.run]


@pytest.mark.parametrize("when", [heard, not_heard])
def test_version_that_the_last_run_did_not_complete_is_loaded(
    query: Restarts, when: Callable[[Restarts], None]
) -> None:
    query.complete()
    query.batch()  # Spark has committed, and the host does not know yet
    query.remove_files_up_to(BATCHES)
    assert query.restart() == query.batches == BATCHES + 1
    when(query)
    assert query.value() == b"%d" % BATCHES


@pytest.mark.parametrize("when", [heard, not_heard])
def test_changes_that_spark_has_not_committed_are_discarded(query: Restarts, when: Callable[[Restarts], None]) -> None:
    query.complete()
    query.batch(is_committed=False)
    assert query.restart() == query.batches
    when(query)
    assert query.value() == b"%d" % (query.batches - 1)
    instance = query.host.cache.instance(query.run, "op", 0)
    assert instance.state.newest() == (instance.state.version, instance.state.head)


def test_files_of_a_rolled_back_version_are_not_reused(query: Restarts) -> None:
    query.complete()
    (query.tmp / "ck/offsets/2").unlink()
    (query.tmp / "ck/commits/2").unlink()
    query.batches -= 1
    assert query.restart() == query.batches
    assert query.value() == b"1"


@pytest.mark.parametrize(("n", "backend"), [(2, "rocksdb"), (1, "file")])
def test_files_of_another_layout_are_removed(query: Restarts, n: int, backend: str) -> None:
    query.complete()
    query.restart(n, backend)
    assert query.value() == b"2"
    assert query.directories() == [query.run]
    assert backend == "rocksdb" or not [*query.tmp.glob("local0a/**/CURRENT")]


def test_a_host_that_closes_leaves_no_files_that_were_laid_aside(query: Restarts) -> None:
    query.complete()
    query.c.deactivate_instances(query.run)
    query.host.heartbeat()
    assert query.directories() == [query.run]  # the fixture sees that they go


def test_files_that_are_laid_aside_go_after_a_while(query: Restarts) -> None:
    query.complete()
    of_run = query.tmp / "local0a" / "q" / query.run
    (of_run / "left by an incarnation that was killed").mkdir()
    query.c.deactivate_instances(query.run)
    query.host.heartbeat()
    assert not query.host.cache.all() and query.directories() == [query.run]
    query.now += KEPT_FILES_SECONDS
    query.host.maintenance.do_maintenance()
    assert query.directories() == [query.run]
    query.now += 1
    query.host.maintenance.do_maintenance()
    assert not of_run.exists()
    query.restart()
    assert query.value() == b"2"


def test_unread_partitions_of_an_ended_query_are_parked_and_reopened(query: Restarts) -> None:
    query.complete()
    query.host.cache.note_ended((query.run,))
    for _ in range(2):
        query.host.maintenance.do_maintenance()
    assert not query.host.cache.all()
    query.remove_files_up_to(BATCHES)
    assert query.host.reads.get_many(GetCommand(query.run, "op", 0), KEY).to_pylist() == [b"2"]


def test_files_from_before_an_exchange_are_not_laid_aside_any_longer(query: Restarts) -> None:
    query.complete()
    old = query.run
    query.c.deactivate_instances(old)
    query.host.heartbeat()
    query.restart()
    with query.host.cache.lock:
        query.host.cache.registrations[query.run] = query.world.registration(query.run, 1)
    query.host.loader.complete(Completed(query.run, query.batches, {"op": {}}, rewritten="an exchange"))
    assert not query.directories()


def test_a_late_task_of_the_run_before_does_not_commit_into_the_next_run(query: Restarts) -> None:
    query.complete()
    plan_spark(query.world, query.batches)
    late = query.open(query.batches)
    old = query.host.cache.instance(query.run, "op", 0)
    query.restart()
    query.open(query.batches)
    with pytest.raises(Exception, match="open"):
        query.host.commit(late, changes_of(b"late"), {})
    assert old.state.is_closed
    assert query.value() == b"2"


def test_files_of_an_ended_query_stay_when_its_run_is_replaced(query: Restarts) -> None:
    query.complete()
    query.host.cache.note_ended((query.run,))
    for _ in range(2):
        query.host.maintenance.do_maintenance()
    assert not query.host.cache.all()
    query.remove_files_up_to(BATCHES)
    over = query.run
    query.restart()
    query.host.cache.unload_run(over)
    assert query.value() == b"2"
    assert query.directories() == [query.run]


def test_files_stay_while_they_are_laid_aside_and_another_partition_is_opened(query: Restarts) -> None:
    query.complete()
    old = query.host.cache.instance(query.run, "op", 0).state
    closing, may_close, close = threading.Event(), threading.Event(), old.close

    def slowly() -> None:
        closing.set()
        assert may_close.wait(30)
        close()

    old.close = slowly
    run = query.run
    query.restart(2)
    unloading = threading.Thread(target=query.host.cache.unload_run, args=(run,))
    unloading.start()
    try:
        assert closing.wait(30)
        query.open(query.batches, 1)
        assert (old.local_dir / "engine" / "CURRENT").exists()
    finally:
        may_close.set()
        unloading.join()


@pytest.mark.parametrize("when", [heard, not_heard])
def test_files_that_cannot_be_moved_are_removed(
    query: Restarts, when: Callable[[Restarts], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    query.complete()
    query.restart()
    when(query)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "planted")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        assert query.value() == b"2"
    assert query.directories() == [query.run]


def test_files_that_are_being_opened_count_in_an_exchange(query: Restarts) -> None:
    query.complete()
    query.restart()
    open_own, told = query.host.files.open_own, []

    def opened(*args: Any) -> Any:
        state = open_own(*args)
        exchanged = Completed(query.run, query.batches, {"op": {}}, rewritten="an exchange")
        query.host.loader.complete(exchanged)
        told.append(query.host.cache.last_exchange(query.run))
        return state

    query.host.files.open_own = opened
    query.open(query.batches)
    assert told == [""]


def test_open_partitions_of_an_earlier_run_count_in_an_exchange(query: Restarts) -> None:
    query.complete()
    old = query.run
    query.restart(2)
    query.open(query.batches, 1)
    exchanged = Completed(query.run, query.batches, {"op": {}}, rewritten="an exchange")
    query.host.loader.complete(exchanged)
    assert query.host.cache.last_exchange(query.run) == ""
    query.host.cache.unload_run(old)
    query.host.loader.complete(exchanged)
    assert query.host.cache.last_exchange(query.run) == "an exchange"
    assert old not in query.directories()


def test_partition_opened_while_a_host_closes_leaves_no_files(query: Restarts) -> None:
    query.complete()
    query.restart()
    all_held = query.host.cache.all

    def then_opened() -> list[Any]:
        held: list[Any] = all_held()
        query.host.cache.all = all_held
        query.open(query.batches)
        return held

    query.host.cache.all = then_opened
    query.host.close()
    assert not query.directories()


def test_partition_with_damage_found_at_the_first_write_is_reloaded(query: Restarts) -> None:
    query.complete()
    query.restart()
    assert query.value() == b"2"
    state = query.host.cache.instance(query.run, "op", 0).state
    for file in state.local_dir.glob("engine/MANIFEST-*"):
        file.unlink()
    with pytest.raises(LocalStateDamagedError):
        state.write_out()
    assert query.value() == b"2"


def test_the_directory_of_a_run_stays_while_a_partition_of_it_waits_to_be_laid_aside(query: Restarts) -> None:
    query.complete()
    query.restart(2)
    for partition in range(2):
        query.open(query.batches, partition)
    first, second = (query.host.cache.instance(query.run, "op", partition) for partition in range(2))
    query.host.cache.forget_run(query.run)  # as the first step of an order to unload the run
    query.host.cache.lay_aside(second)
    query.now += KEPT_FILES_SECONDS + 1
    query.host.cache.drop_unused()
    assert first.state.local_dir.exists() and not second.state.local_dir.exists()
    query.host.cache.unload(first)


def test_the_directory_of_a_run_that_begins_while_another_one_looks_for_old_ones_stays(query: Restarts) -> None:
    query.complete()
    query.restart()
    runs_in_use, began = query.host.cache.runs_in_use, query.tmp / "local0a" / "q" / "run3"

    def then_begun() -> set[str]:
        query.host.cache.runs_in_use = runs_in_use
        used: set[str] = runs_in_use()
        began.mkdir()
        return used

    query.host.cache.runs_in_use = then_begun
    query.open(query.batches)
    assert began.exists()
    began.rmdir()
