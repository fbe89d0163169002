"""Spark's state store messages through the reference: first to no coordinator at all, then to the real actor from
the driver, from plain Ray tasks and actors, and from inside a PySpark task."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import ray
from pyspark.sql import SparkSession

from backends import StateStoreId, StateStoreProviderId
from coordinator_actor import StateStoreCoordinatorRef, reference
from coordinator_actor.exceptions import CoordinatorStoppedError
from tests.patience import HANG, PATIENCE

needs_spark = pytest.mark.spark


def provider(partition: int, run: str = "run-ref") -> StateStoreProviderId:
    return StateStoreProviderId(StateStoreId("/ck", "op", partition), run)


def converse(ref: StateStoreCoordinatorRef, run: str) -> list[Any]:
    """Every message but ``stop``, one by one; the answers."""
    one, two = provider(1, run), provider(2, run)
    answers: list[Any] = [ref.get_location(one), ref.verify_if_instance_active(one, "e1")]
    answers.append(ref.report_active_instance(one, "hostA", "e1").result(PATIENCE))
    answers += [ref.get_location(one), ref.verify_if_instance_active(one, "e1")]
    answers.append(ref.report_active_instance(one, "hostB", "e2").result(PATIENCE))
    answers += [ref.get_location(one), ref.verify_if_instance_active(one, "e1")]
    # Executor e1 still has the first one, which is now active elsewhere, and an unknown one.
    others = (one, provider(3, run))
    answers.append(ref.report_active_instance(two, "hostA", "e1", others).result(PATIENCE))
    answers.append(ref.get_locations([two, provider(4, run), one]))
    answers += [ref.deactivate_instances(run), ref.get_location(one), ref.verify_if_instance_active(two, "e1")]
    return answers


def conversation(run: str) -> list[Any]:
    """Return the expected answers."""
    before = [None, False]
    reported = [[], "executor_hostA_e1", True]
    moved = [[], "executor_hostB_e2", False]
    located = ["executor_hostA_e1", None, "executor_hostB_e2"]
    return [*before, *reported, *moved, [provider(1, run)], located, True, None, False]


# -- without a coordinator ---------------------------------------------------------------------


class Recorded:
    """A transport that replies when the test says so."""

    def __init__(self, answer: Any = None) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.has_come = threading.Event()
        self.may_answer = threading.Event()
        self.answer = answer

    def __call__(self, method: str, args: dict[str, Any]) -> Any:
        self.sent.append((method, args))
        self.has_come.set()
        assert self.may_answer.wait(HANG)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def ref_over(transport: Recorded) -> StateStoreCoordinatorRef:
    return StateStoreCoordinatorRef(transport, lambda: None)


def test_a_report_returns_before_it_is_answered() -> None:
    transport = Recorded([provider(5)])
    answer = ref_over(transport).report_active_instance(provider(0), "hostA", "e1", (provider(5), provider(6)))
    assert isinstance(answer, Future) and not answer.done()
    transport.may_answer.set()
    assert answer.result(PATIENCE) == [provider(5)]
    args = {
        "provider_id": provider(0),
        "host": "hostA",
        "executor_id": "e1",
        "other_provider_ids": (provider(5), provider(6)),
    }
    assert transport.sent == [("report_active_instance", args)]


def test_failed_report_raises_in_its_waiter() -> None:
    transport = Recorded(CoordinatorStoppedError("gone"))
    transport.may_answer.set()
    answer = ref_over(transport).report_active_instance(provider(0), "hostA", "e1")
    with pytest.raises(CoordinatorStoppedError, match="gone"):
        answer.result(PATIENCE)


def test_a_deactivation_does_not_overtake_a_report() -> None:
    transport = Recorded([])
    ref = ref_over(transport)
    with ThreadPoolExecutor(1) as pool:
        ref.report_active_instance(provider(0), "hostA", "e1")
        assert transport.has_come.wait(PATIENCE)
        ended = pool.submit(ref.deactivate_instances, "run-ref")
        assert not wait([ended], timeout=0.3).done
        assert [method for method, _ in transport.sent] == ["report_active_instance"]
        transport.may_answer.set()
        ended.result(PATIENCE)
    assert [method for method, _ in transport.sent] == ["report_active_instance", "deactivate_instances"]


@pytest.mark.parametrize(
    ("ask", "sent"),
    [
        (
            lambda ref: ref.verify_if_instance_active(provider(0), "e1"),
            ("verify_if_instance_active", {"provider_id": provider(0), "executor_id": "e1"}),
        ),
        (lambda ref: ref.get_location(provider(0)), ("get_location", {"provider_id": provider(0)})),
        (lambda ref: ref.deactivate_instances("run"), ("deactivate_instances", {"run_id": "run"})),
    ],
)
def test_the_other_messages_wait_for_their_answer(
    ask: Callable[[StateStoreCoordinatorRef], Any], sent: tuple[str, dict[str, Any]]
) -> None:
    transport = Recorded(True)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, ref_over(transport))
        while not transport.sent:
            assert not asked.done()
        assert not asked.done()
        transport.may_answer.set()
        assert asked.result(PATIENCE) is True
    assert transport.sent == [sent]


def test_a_task_goes_through_its_host_and_may_not_stop_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport = Recorded("executor_hostA_e1")
    transport.may_answer.set()
    monkeypatch.setattr(reference, "executor_transport", lambda: transport)
    with caplog.at_level(logging.DEBUG, "coordinator_actor"):
        ref = StateStoreCoordinatorRef.for_executor()
    assert "Getting StateStoreCoordinatorRef" in caplog.messages
    assert ref.get_location(provider(0)) == "executor_hostA_e1"
    with pytest.raises(CoordinatorStoppedError, match="may not stop"):
        ref.stop()
    assert [method for method, _ in transport.sent] == ["get_location"]


# -- with a real one ---------------------------------------------------------------------------


@needs_spark
def test_every_message_from_the_driver(spark: SparkSession) -> None:
    assert converse(StateStoreCoordinatorRef.for_driver(), "run-driver") == conversation("run-driver")
    assert converse(StateStoreCoordinatorRef.for_executor(), "run-driver") == conversation("run-driver")


@needs_spark
def test_every_message_from_a_plain_ray_task_and_actor(spark: SparkSession) -> None:
    @ray.remote(num_cpus=0)
    def in_ray_task(run: str) -> list[Any]:
        return converse(StateStoreCoordinatorRef.for_executor(), run)

    @ray.remote(num_cpus=0)
    class InRayActor:
        def __init__(self) -> None:
            self.ref = StateStoreCoordinatorRef.for_executor()

        def talk(self, run: str) -> list[Any]:
            return converse(self.ref, run)

    assert ray.get(in_ray_task.remote("run-ray-task"), timeout=PATIENCE) == conversation("run-ray-task")
    talker = InRayActor.remote()
    assert ray.get(talker.talk.remote("run-ray-actor"), timeout=PATIENCE) == conversation("run-ray-actor")


@needs_spark
def test_every_message_from_inside_a_pyspark_task(spark: SparkSession) -> None:
    def in_task(rows: Iterator[Any]) -> Iterator[Any]:
        import sys

        ref = StateStoreCoordinatorRef.for_executor()
        for row in rows:
            run = f"run-spark-{row}"
            answers = converse(ref, run)
            try:
                ref.stop()
            except CoordinatorStoppedError as error:
                answers.append("may not stop" in str(error))
            joined_ray = "ray" in sys.modules and sys.modules["ray"].is_initialized()
            yield run, answers, joined_ray

    for run, answers, joined_ray in spark.sparkContext.parallelize(range(4), 2).mapPartitions(in_task).collect():
        assert answers == [*conversation(run), True], run
        assert not joined_ray, "a task must not become a Ray driver to send its messages"


@needs_spark
def test_references_made_anywhere_reach_the_same_coordinator(spark: SparkSession) -> None:
    driver, again = StateStoreCoordinatorRef.for_driver(), StateStoreCoordinatorRef.for_driver()
    driver.report_active_instance(provider(7), "hostA", "e1").result(PATIENCE)

    @ray.remote(num_cpus=0)
    def in_ray() -> str | None:
        ref = StateStoreCoordinatorRef.for_executor()
        ref.report_active_instance(provider(9), "hostR", "e7").result(PATIENCE)
        return ref.get_location(provider(7))

    def in_task(rows: Iterator[Any]) -> Iterator[Any]:
        ref = StateStoreCoordinatorRef.for_executor()
        ref.report_active_instance(provider(8), "hostT", "e9", (provider(7),)).result(PATIENCE)
        yield ref.get_location(provider(7)), ref.get_location(provider(9))

    assert ray.get(in_ray.remote(), timeout=PATIENCE) == "executor_hostA_e1"
    seen = spark.sparkContext.parallelize([0], 1).mapPartitions(in_task).collect()
    assert seen == [("executor_hostA_e1", "executor_hostR_e7")]
    for ref in (driver, again, StateStoreCoordinatorRef.for_executor()):
        assert [ref.get_location(provider(p)) for p in (8, 9)] == ["executor_hostT_e9", "executor_hostR_e7"]
    again.deactivate_instances("run-ref")
    assert driver.get_location(provider(8)) is None


@needs_spark
def test_a_report_does_not_wait_for_a_coordinator_that_hangs(spark: SparkSession) -> None:
    ref = StateStoreCoordinatorRef.for_driver(name="paused")
    assert ref.get_location(provider(0)) is None
    pid = ray.get(ray.get_actor("paused", namespace="statestore").describe.remote(), timeout=PATIENCE)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = ref.report_active_instance(provider(0), "hostA", "e1")
        assert not answer.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.result(PATIENCE) == []
    assert ref.get_location(provider(0)) == "executor_hostA_e1"
    ref.stop()


@needs_spark
def test_messages_wait_for_a_coordinator_that_is_restarted(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "RESTART_SECONDS", HANG)
    ref = StateStoreCoordinatorRef.for_driver(name="killed")
    # Heartbeats would push the user's own tasks out of Ray's list of tasks.
    assert not ray.get_actor("killed", namespace="statestore")._ray_enable_task_events
    for _ in range(3):
        pid = ray.get(ray.get_actor("killed", namespace="statestore").describe.remote(), timeout=PATIENCE)["pid"]
        os.kill(pid, signal.SIGKILL)
        assert converse(ref, "run-killed") == conversation("run-killed")
    ref.stop()


@needs_spark
def test_missing_coordinator_is_reported(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CoordinatorStoppedError, match=r"'nobody'.*init_spark"):
        StateStoreCoordinatorRef.for_executor(name="nobody")
    with caplog.at_level(logging.DEBUG, "coordinator_actor"):
        ref = StateStoreCoordinatorRef.for_driver(name="short-lived")
        assert "Getting StateStoreCoordinatorRef" in caplog.messages
        elsewhere = StateStoreCoordinatorRef.for_executor(name="short-lived")
        assert ref.get_location(provider(0)) is None
        ref.stop()
    assert "StateStoreCoordinator stopped" in caplog.messages
    for stopped in (ref, elsewhere):
        asked: list[Callable[[], Any]] = [
            lambda r=stopped: r.get_location(provider(0)),
            lambda r=stopped: r.verify_if_instance_active(provider(0), "e1"),
            lambda r=stopped: r.report_active_instance(provider(0), "hostA", "e1").result(PATIENCE),
            lambda r=stopped: r.deactivate_instances("run-ref"),
            lambda r=stopped: r.stop(),
        ]
        for ask in asked:
            with pytest.raises(CoordinatorStoppedError, match="short-lived"):
                ask()
    # Another one may be started under the name; it knows nothing of the old one's instances.
    again = StateStoreCoordinatorRef.for_driver(name="short-lived")
    assert again.get_location(provider(0)) is None
    assert elsewhere.get_location(provider(0)) is None
    again.stop()
