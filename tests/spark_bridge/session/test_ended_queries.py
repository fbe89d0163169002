"""A driver keeps its ended queries registered with the coordinator for the configured time.

Why a query cannot be stopped with a savepoint is said, and what to do; without Spark.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.exceptions import (
    HostUnavailableError,
    InvalidRequestError,
    QueryEndedError,
    SavepointFailedError,
    UnknownOperatorError,
)
from coordinator_actor.handlers.registries import LONGEST_FAILURE
from coordinator_actor.messages import HostReport, QueryRegistration, Refused, SavepointStatus
from spark_bridge.session import savepoints
from spark_bridge.session.ended_queries import EndedQueries, failure_text
from spark_bridge.session.savepoints import trigger_savepoint
from spark_bridge.session.settings import Shutdown
from tests.coordinator_actor.coordinator_world import HangingStorage, World, acknowledge
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.memory_reads import eventually


class Port(CoordinatorPort):
    """A way to a coordinator that another one may replace; or to none, and messages fail."""

    def __init__(self, world: World, storage: HangingStorage) -> None:
        self._world = world
        self._storage = storage
        self.replace()

    def replace(self) -> None:
        conf = CoordinatorConf(report_timeout=0.0, driver_timeout=60.0)
        self.c: Coordinator | None = Coordinator(lambda: self._world.now, self._storage.open, conf)
        self.c.register_host(self._world.host(0), HostReport())

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        if self.c is None:
            raise HostUnavailableError("The coordinator does not answer.")
        return self.c.call(method, *args, **kwargs)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def storage(world: World) -> HangingStorage:
    return HangingStorage(world.storage)


@pytest.fixture
def port(world: World, storage: HangingStorage) -> Port:
    return Port(world, storage)


@pytest.fixture
def queries(world: World, port: Port) -> Iterator[Callable[..., EndedQueries]]:
    made: list[EndedQueries] = []

    def make(keep_serving: float | None = None, **arguments: Any) -> EndedQueries:
        # The test renews the leases itself.
        made.append(
            EndedQueries(port, port, keep_serving, Shutdown(), interval=1e6, clock=lambda: world.now, **arguments)
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def run_of(world: World, port: Port, number: int) -> QueryRegistration:
    """A query that has committed one batch."""
    root = world.root / f"ck{number}"
    registration = world.registration(
        f"run{number}",
        query_id=f"q{number}",
        name=f"name{number}",
        checkpoint_location=str(root),
        state_location=f"{root}/statestore",
    )
    assert port.c is not None
    assert port.c.register_query(registration).refusal is None
    run = registration.run_id
    for partition in (0, 1):
        acknowledge(port.c, world.stage(world.open(port.c, 0, partition, run), partition, 0, "a", run))
    world.commit_spark(0, f"ck{number}")
    port.batch_committed(run, 0)
    return registration


def is_read(port: Port, number: int) -> bool:
    try:
        return port.locate("op", f"name{number}").run_id == f"run{number}"
    except (QueryEndedError, UnknownOperatorError):
        return False


def test_ended_query_is_kept_for_the_session_by_default(
    world: World, port: Port, queries: Callable[..., EndedQueries]
) -> None:
    ended = queries()
    ended.ended(run_of(world, port, 1))
    for _ in range(10):
        world.now += 50
        ended.renew()
        assert port.c is not None
        port.c.register_host(world.host(0), HostReport())
        port.c.expire()
        assert is_read(port, 1)
    world.now += 100
    port.c.expire()
    assert not is_read(port, 1), "its driver sent no more heartbeats"


def test_ended_query_keeps_its_error(world: World, port: Port, queries: Callable[..., EndedQueries]) -> None:
    def failures() -> dict[str, str]:
        assert port.c is not None
        return {q["run_id"]: q["failure"] for q in port.c.describe()["queries"]}

    ended = queries()
    first = run_of(world, port, 1)
    assert failures() == {"run1": ""}
    ended.ended(first, "ValueError: no " + "x" * 1000)
    ended.ended(run_of(world, port, 2))
    assert failures() == {"run1": ("ValueError: no " + "x" * 1000)[:LONGEST_FAILURE], "run2": ""}
    port.replace()  # the driver reports it again to a restarted coordinator
    assert failures() == {}
    ended.renew()
    eventually(lambda: failures().keys() == {"run1", "run2"})
    assert failures()["run1"].startswith("ValueError: no")


@pytest.mark.parametrize(
    ("exception", "read"),
    [
        (None, ""),
        ("", ""),
        (
            "org.apache.spark.SparkException: Job aborted.\n\tat a.b.c\n",
            "org.apache.spark.SparkException: Job aborted.",
        ),
        (
            "org.apache.spark.sql.streaming.StreamingQueryException: Job aborted due to stage failure: Task 0 failed.\n"
            "Traceback (most recent call last):\n"
            '  File "worker.py", line 1, in main\n'
            "backends.exceptions.StorageError: Could not write s3://b/c: 403\n\n"
            "The above exception was the direct cause of the following exception:\n"
            "Traceback (most recent call last):\n"
            "spark_bridge.exceptions.CommitError: Partition 1 of 'totals' was not committed: 403\n\n"
            "\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handle(PythonRunner.scala:572)\n"
            "Caused by: java.io.IOException: gone\n",
            "spark_bridge.exceptions.CommitError: Partition 1 of 'totals' was not committed: 403",
        ),
    ],
)
def test_sparks_error_is_reduced_to_its_relevant_part(exception: str | None, read: str) -> None:
    assert failure_text(exception) == read


def test_ended_query_is_kept_for_the_configured_seconds(
    world: World, port: Port, queries: Callable[..., EndedQueries]
) -> None:
    ended = queries(keep_serving=50.0)
    ended.ended(run_of(world, port, 1))
    world.now += 49
    ended.renew()
    assert is_read(port, 1)
    world.now += 1
    ended.renew()
    assert not is_read(port, 1)


def test_ended_query_is_not_kept_with_zero_seconds(
    world: World, port: Port, queries: Callable[..., EndedQueries]
) -> None:
    queries(keep_serving=0).ended(run_of(world, port, 1))
    assert not is_read(port, 1)


def test_only_the_last_ended_queries_are_kept(world: World, port: Port, queries: Callable[..., EndedQueries]) -> None:
    ended = queries(max_ended=2)
    for number in (1, 2, 3):
        ended.ended(run_of(world, port, number))
    ended.renew()
    assert [is_read(port, number) for number in (1, 2, 3)] == [False, True, True]


def test_restarted_query_is_no_longer_ended(world: World, port: Port, queries: Callable[..., EndedQueries]) -> None:
    ended = queries(keep_serving=50.0)
    registration = run_of(world, port, 1)
    ended.ended(registration)
    ended.started(registration)
    world.now += 50
    ended.renew()
    assert is_read(port, 1), "it is not ended by the time of its earlier run"


def test_restarted_coordinator_learns_of_ended_queries(
    world: World, port: Port, queries: Callable[..., EndedQueries]
) -> None:
    ended = queries()
    for number in (1, 2):
        ended.ended(run_of(world, port, number))
    port.replace()
    assert not is_read(port, 1)
    ended.renew()
    eventually(lambda: is_read(port, 1) and is_read(port, 2), PATIENCE)


def test_unreachable_coordinator_learns_of_the_end_later(
    world: World, port: Port, queries: Callable[..., EndedQueries]
) -> None:
    ended = queries()
    registration = run_of(world, port, 1)
    port.c, c = None, port.c
    with pytest.raises(HostUnavailableError):
        ended.ended(registration)
    with pytest.raises(HostUnavailableError):
        ended.renew()
    port.c = c
    ended.renew()
    assert c is not None
    eventually(lambda: not c.running(), PATIENCE)
    assert is_read(port, 1)


def test_failed_end_of_a_query_is_retried(world: World, port: Port, queries: Callable[..., EndedQueries]) -> None:
    ended = queries(keep_serving=50.0)
    for number in (1, 2):
        ended.ended(run_of(world, port, number))
    world.now += 50
    port.c, c = None, port.c
    ended.renew()
    port.c = c
    assert is_read(port, 1)
    ended.renew()
    assert not is_read(port, 1) and not is_read(port, 2)


def test_a_query_whose_storage_hangs_does_not_hold_up_the_others(
    world: World, storage: HangingStorage, port: Port, queries: Callable[..., EndedQueries]
) -> None:
    ended = queries()
    for number in (1, 2):
        ended.ended(run_of(world, port, number))
    port.replace()
    with storage.hangs(f"{world.root}/ck1"):
        ended.renew()
        eventually(lambda: is_read(port, 2), PATIENCE)
        ended.renew()
        assert not is_read(port, 1)
    eventually(lambda: is_read(port, 1), PATIENCE)


def test_leases_are_renewed_after_any_error(
    world: World, port: Port, queries: Callable[..., EndedQueries], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, renewed = [KeyError("a"), RuntimeError("a bug"), HostUnavailableError("gone")], threading.Semaphore(0)

    class Leases(Port):
        def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
            if method == "renew_leases":
                if errors:
                    raise errors.pop()
                renewed.release()
            return port.call(method, *args, **kwargs)

    ended = EndedQueries(Leases(world, HangingStorage(world.storage)), port, None, Shutdown(), interval=0.001)
    try:
        ended.ended(run_of(world, port, 1))
        assert renewed.acquire(timeout=PATIENCE), "the loop has ended"
    finally:
        ended.close()


def query(run: str, query_id: str = "q1", name: str | None = "clicks") -> Any:
    return SimpleNamespace(id=query_id, runId=run, name=name)


def refused(asked: Any, *active: Any) -> str:
    with pytest.MonkeyPatch.context() as session:
        session.setattr(savepoints, "current_cluster", lambda: None)
        session.setattr(savepoints, "current_spark", lambda: SimpleNamespace(streams=SimpleNamespace(active=active)))
        with pytest.raises(SavepointFailedError) as raised:
            trigger_savepoint(asked, stop=True)
    return str(raised.value)


def test_a_query_object_that_a_restart_has_replaced_names_the_run_that_replaced_it() -> None:
    said = refused(query("run1"), query("run2"), query("run9", "q9", "orders"))
    assert "Run run1 of query 'clicks' has ended, and run run2 of this process has replaced it" in said
    assert "trigger_savepoint('clicks', stop=True)" in said
    assert "trigger_savepoint('q1', stop=True)" in refused(query("run1", name=None), query("run2", name=None))


def test_query_that_ended_here_is_reported_as_ended() -> None:
    said = refused(query("run1"))
    assert "has ended, and no other run of it is in this process" in said and "start the query again" in said


def test_unknown_name_error_lists_the_known_names() -> None:
    said = refused("click", query("run1"), query("run2", "q2", None))
    assert "No query 'click' runs in this process" in said and "'clicks', 'q2'" in said
    assert "there run: none" in refused("click")


class StoppedQuery:
    """A running query that can be stopped, and a coordinator that has been asked to make savepoints of it."""

    def __init__(self) -> None:
        self.id, self.runId, self.name = "q1", "run1", "clicks"
        self.stopped = threading.Event()
        self.may_be_done = threading.Event()
        self.asked: list[str] = []

    def stop(self) -> None:
        self.stopped.set()

    def trigger_savepoint(self, request_id: str, *_: Any, **__: Any) -> SavepointStatus:
        self.asked.append(request_id)
        if len(self.asked) > 1:
            refusal = Refused("InvalidRequestError", "Run run1 is already being stopped with a savepoint.")
            return SavepointStatus(known=True, failure=refusal)
        return SavepointStatus(known=True)

    def savepoint_status(self, request_id: str) -> SavepointStatus:
        return SavepointStatus(known=True, path="/savepoint-1" if self.may_be_done.is_set() else None)


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> tuple[StoppedQuery, Any]:
    """A query, and the runs that the driver says it is stopping."""
    running = StoppedQuery()
    cluster = SimpleNamespace(coordinator=running, stopping=[])
    monkeypatch.setattr(savepoints, "current_cluster", lambda: cluster)
    monkeypatch.setattr(savepoints, "current_spark", lambda: SimpleNamespace(streams=SimpleNamespace(active=[running])))
    monkeypatch.setattr(savepoints, "SAVEPOINT_POLL_SECONDS", 0.01)
    return running, cluster


def test_a_savepoint_that_is_being_made_cannot_be_cancelled(stopping: tuple[StoppedQuery, Any]) -> None:
    running, _ = stopping
    savepoint = trigger_savepoint("clicks", stop=True)
    assert not savepoint.cancel(), "the query is stopped all the same"
    running.may_be_done.set()
    assert savepoint.result(PATIENCE) == "/savepoint-1"
    assert running.stopped.is_set()


def test_a_second_request_to_stop_leaves_the_first_one_as_it_is(stopping: tuple[StoppedQuery, Any]) -> None:
    """The driver's heartbeat says so: otherwise a restarted coordinator lets the query go on."""
    running, cluster = stopping
    first = trigger_savepoint("clicks", stop=True)
    eventually(lambda: running.asked)
    with pytest.raises(InvalidRequestError, match="already being stopped"):
        trigger_savepoint("clicks", stop=True).result(PATIENCE)
    eventually(lambda: [t.name for t in threading.enumerate()].count("statestore-savepoint") == 1)
    assert "run1" in cluster.stopping
    running.may_be_done.set()
    assert first.result(PATIENCE) == "/savepoint-1"
    eventually(lambda: not cluster.stopping)
