"""Acknowledgements of tasks that commit at the same time: one message for many, an answer for each; without Ray.

A host reports the keys after a commit only once it has applied the changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from backends import fault_points
from backends.exceptions import StorageError
from backends.storage.locations import FileRef
from coordinator_actor.exceptions import LineageError, StaleOwnerError
from coordinator_actor.messages import Acknowledge, Acknowledged, Refused
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.host.commits import Acknowledgements
from tests.coordinator_actor.coordinator_world import World
from tests.patience import PATIENCE
from tests.spark_bridge.host.host_steps import Threads, make_host, plan_spark, reg, run_task, wait_until

WAIT = PATIENCE
"""Seconds; only a test that fails waits so long."""


def message(p: int, run: str = "run1", version: int = 1) -> Acknowledge:
    return Acknowledge(run, "op", p, version, "try", "h0", "a", FileRef(f"{p}.changelog", 1, "d"), None)


def accepted(_run: str, messages: Sequence[Acknowledge]) -> list[Acknowledged | Refused]:
    """Return the reply of a coordinator. The manifest id is the partition, so that replies differ."""
    return [Acknowledged(m.version, m.partition) for m in messages]


class Coordinator:
    """Replies when the test says so. ``calls`` lists the partitions of each received message."""

    def __init__(self, answer: Callable[[str, Sequence[Acknowledge]], Any] = accepted) -> None:
        self.answer = answer
        self.calls: list[tuple[str, list[int]]] = []
        self.go = {run: threading.Event() for run in ("run1", "run2")}
        self.come = threading.Condition()

    def __call__(self, run: str, messages: tuple[Acknowledge, ...]) -> Any:
        with self.come:
            self.calls.append((run, [m.partition for m in messages]))
            self.come.notify_all()
        assert self.go[run].wait(WAIT)
        return self.answer(run, messages)

    def wait_for(self, calls: int) -> None:
        with self.come:
            assert self.come.wait_for(lambda: len(self.calls) >= calls, WAIT), self.calls


class Host:
    """Tasks, each in its own thread, that commit through one ``Acknowledgements``."""

    def __init__(self, coordinator: Callable[..., Any], pool: Threads) -> None:
        self.acknowledgements = Acknowledgements(coordinator)
        self.pool = pool

    def commit(self, p: int, run: str = "run1") -> Future[Acknowledged]:
        return self.pool.submit(self.acknowledgements.acknowledge, message(p, run))

    def wait_for_waiting(self, n: int) -> None:
        """Until so many tasks of run1 wait behind the message that is under way."""
        wait_until(lambda: self.waiting("run1") >= n, f"there are not {n} tasks that wait")

    def waiting(self, run: str) -> int:
        """How many tasks of a run wait for the next message."""
        return len(self.acknowledgements._waiting.get(run, ()))


@pytest.fixture
def pool():
    return Threads()


def begin(pool: Threads, answer: Callable[..., Any] = accepted) -> tuple[Coordinator, Host]:
    """A host whose first message is under way."""
    coordinator = Coordinator(answer)
    return coordinator, Host(coordinator, pool)


def test_single_acknowledgement_is_sent_at_once(pool):
    coordinator, host = begin(pool)
    coordinator.go["run1"].set()
    assert host.acknowledgements.acknowledge(message(3)) == Acknowledged(1, 3)
    assert host.acknowledgements.acknowledge(message(4)) == Acknowledged(1, 4)
    assert coordinator.calls == [("run1", [3]), ("run1", [4])]


def queue(coordinator: Coordinator, host: Host, partitions: range) -> list[Future[Acknowledged]]:
    """Have one message under way, that of partition 0, and others wait behind it, in this order."""
    futures = [host.commit(0)]
    coordinator.wait_for(1)
    for n, p in enumerate(partitions, 1):
        futures.append(host.commit(p))
        host.wait_for_waiting(n)
    return futures


def test_those_that_come_while_a_message_is_under_way_go_together(pool):
    coordinator, host = begin(pool)
    futures = queue(coordinator, host, range(1, 9))
    assert coordinator.calls == [("run1", [0])], "one message at a time"
    coordinator.go["run1"].set()
    assert [f.result(WAIT) for f in futures] == [Acknowledged(1, p) for p in range(9)]
    assert coordinator.calls == [("run1", [0]), ("run1", list(range(1, 9)))]
    assert host.acknowledgements._waiting == {} and host.acknowledgements._sending == set()


@pytest.mark.parametrize("error", [StorageError("disk full"), HostUnavailableError("gone"), KeyboardInterrupt()])
def test_error_reaches_only_the_waiters_of_its_message(pool, error):
    def answer(run: str, messages: Sequence[Acknowledge]) -> Any:
        if messages[0].partition == 1:
            raise error
        return accepted(run, messages)

    coordinator, host = begin(pool, answer)
    futures = queue(coordinator, host, range(1, 4))
    coordinator.go["run1"].set()
    assert futures[0].result(WAIT) == Acknowledged(1, 0)
    assert [f.exception(WAIT) for f in futures[1:]] == [error] * 3
    assert host.acknowledgements.acknowledge(message(7)) == Acknowledged(1, 7), "the next ones are sent"


def test_a_refusal_reaches_the_one_that_it_belongs_to(pool):
    refused = {2: Refused("LineageError", "applies to another"), 3: Refused("StaleOwnerError", "h1 does")}

    def answer(run: str, messages: Sequence[Acknowledge]) -> Any:
        return [refused.get(m.partition, a) for m, a in zip(messages, accepted(run, messages), strict=True)]

    coordinator, host = begin(pool, answer)
    futures = queue(coordinator, host, range(1, 5))
    coordinator.go["run1"].set()
    assert [futures[p].result(WAIT) for p in (0, 1, 4)] == [Acknowledged(1, p) for p in (0, 1, 4)]
    for p, kind, words in ((2, LineageError, "applies to another"), (3, StaleOwnerError, "h1 does")):
        with pytest.raises(kind, match=words):
            futures[p].result(WAIT)


def test_a_slow_run_does_not_hold_up_another(pool):
    coordinator, host = begin(pool)
    slow = host.commit(0)
    coordinator.wait_for(1)
    coordinator.go["run2"].set()
    for p in (5, 6):
        other = pool.submit(host.acknowledgements.acknowledge, message(p, "run2"))
        assert other.result(WAIT) == Acknowledged(1, p)
    assert not slow.done()
    coordinator.go["run1"].set()
    assert slow.result(WAIT) == Acknowledged(1, 0)
    assert coordinator.calls == [("run1", [0]), ("run2", [5]), ("run2", [6])]


def test_a_slow_message_is_waited_for_by_its_own_tasks_only(pool):
    """Behind a message that hangs, the next one of the same run is not begun: the coordinator would wait as well."""
    coordinator, host = begin(pool)
    futures = queue(coordinator, host, range(1, 3))
    assert [f.done() for f in futures] == [False] * 3 and len(coordinator.calls) == 1
    coordinator.go["run1"].set()
    assert [f.result(WAIT).manifest_id for f in futures] == [0, 1, 2]


def test_many_threads_get_their_answers_in_few_messages(pool):
    """Each message blocks until all other tasks of its run wait. Every task that it lacks is in the next one."""
    lock = threading.Lock()
    under_way: list[str] = []
    sent: list[tuple[str, int, int]] = []
    at_work = {f"run{n}": 16 for n in range(3)}

    def send(run: str, messages: tuple[Acknowledge, ...]) -> Any:
        with lock:
            assert run not in under_way, "two messages of one run at once"
            under_way.append(run)
            sent.extend((run, m.partition, m.version) for m in messages)
            calls.append(len(messages))
        wait_until(lambda: host.waiting(run) + len(messages) >= at_work[run], "tasks neither wait nor are answered")
        with lock:
            under_way.remove(run)
        return [
            Refused("LineageError", f"{m.partition}:{m.version}")
            if m.partition % 7 == 0
            else Acknowledged(m.version, m.partition)
            for m in messages
        ]

    calls: list[int] = []
    start = threading.Barrier(48)
    host = Host(send, pool)

    def task(i: int) -> None:
        run = f"run{i % 3}"
        start.wait(WAIT)
        try:
            for version in range(1, 9):
                try:
                    answer = host.acknowledgements.acknowledge(message(i, run, version))
                    assert (answer.version, answer.manifest_id) == (version, i) and i % 7
                except LineageError as error:
                    assert str(error) == f"{i}:{version}" and i % 7 == 0
        finally:
            with lock:
                at_work[run] -= 1

    for future in [pool.submit(task, i) for i in range(48)]:
        future.result(WAIT)
    assert sorted(sent) == sorted((f"run{i % 3}", i, v) for i in range(48) for v in range(1, 9)), "each once"
    assert len(calls) <= 3 * 2 * 8


def test_a_version_that_is_shown_has_its_keys_only_when_it_is_applied(tmp_path: Path) -> None:
    world = World(tmp_path)
    c = world.coordinator(0)
    host = make_host(world, c, 0, tmp_path)
    assert c.register_query(reg(world, n=1)).refusal is None
    plan_spark(world, 0)
    run_task([host], 0)
    (instance,) = host.cache.all()
    during: list[dict[str, Any]] = []

    def reached(point: str) -> None:
        if point == "apply":
            during.append(instance.describe())

    world.commit_spark(0)
    c.batch_committed("run1", 0)
    fault_points.set_hook(reached)
    try:
        host.heartbeat()
    finally:
        fault_points.set_hook(None)
    (seen,) = during
    assert (seen["version"], seen["keys"]) == (1, 0) and "keys" not in seen["commits"][1]
    assert instance.describe()["commits"][1]["keys"] == instance.describe()["keys"] == 1
