"""A host answers all partitions of a request at one version, whatever is committed, moved or restarted during the
request.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from coordinator_actor.exceptions import QueryEndedError, RetiredRunError, UnknownOperatorError
from coordinator_actor.messages import Completed
from spark_bridge import exceptions
from spark_bridge.exceptions import (
    HostUnavailableError,
    NotOwnerError,
    RequestError,
    StateVersionError,
    UnknownKvStateIdError,
)
from spark_bridge.queryable.protocol import At, LookupRequest, ScanRequest
from spark_bridge.queryable.reads import answer_version
from tests.effort import effort, only_thorough
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.host_world import KEYS, changes_of, exactly, filled, partitions_of, stored, table
from tests.spark_bridge.queryable.memory_reads import eventually

LATEST = At("latest")


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
def test_partitions_are_read_at_one_version_while_a_commit_holds_one_of_them(make, backend):
    w = make(backend=backend)
    w.batch(filled(1))
    w.batch(filled(2))
    with w.instance(0).commit_lock:
        w.hosts[0].loader.complete(Completed(w.run, 2, {}))
        assert [w.instance(p).state.version for p in (0, 1)] == [2, 2]
    w.write(filled(3))
    with w.instance(0).commit_lock:
        w.complete()
        assert [w.instance(p).state.version for p in (0, 1)] == [2, 3], "one has applied it, one has not"
        assert w.lookup(KEYS) == (3, [3] * len(KEYS))
        assert w.scan() == (3, filled(3))
        assert w.one(7) == (3, 3)
        assert {w.one(k)[1] for k in KEYS} == {3}
        held = exactly(2, held_only=True)
        assert w.lookup(KEYS, held) == (2, [2] * len(KEYS)), "the base of one, a retained version of the other"
        assert w.scan(held) == (2, filled(2))
        assert w.reads[0].count(ScanRequest(w.run, "op")) == (3, len(KEYS))
    w.hosts[0].heartbeat()
    assert [w.instance(p).state.version for p in (0, 1)] == [3, 3]
    assert w.lookup(KEYS) == (3, [3] * len(KEYS))


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
def test_keys_of_several_partitions_come_in_any_order(make, backend):
    w = make(backend=backend, n=4)
    w.batch({key: key for key in KEYS})
    by_partition = [[key for key in KEYS if partitions_of([key], w.n)[0] == p] for p in range(w.n)]
    assert all(by_partition)
    rng = random.Random(3)
    in_turns = [key for keys in zip(*by_partition, strict=False) for key in keys]
    for asked in (
        [],
        by_partition[1],
        [*by_partition[1], *by_partition[0]],
        [*by_partition[0], *by_partition[1], by_partition[0][0]],
        in_turns,
        rng.choices(range(60), k=200),
    ):
        for _ in range(2):
            assert w.lookup(asked) == (1, [key if key in KEYS else None for key in asked])


def test_completed_version_is_read_before_it_is_applied(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    w.complete(tell=False)
    heads = w.c.completed(w.run, "h0")
    w.hosts[0].completed.note(heads)
    assert [w.instance(p).state.version for p in (0, 1)] == [1, 1]
    assert w.lookup(KEYS) == (2, [2] * len(KEYS))
    assert w.scan() == (2, filled(2))
    assert w.one(3) == (2, 2)


def test_version_known_to_others_is_requested_at_once_and_once(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    w.complete(tell=False)
    asked: list[int] = []

    def slow(*args: str) -> Any:
        asked.append(1)
        time.sleep(0.05)
        return w.c.see_commit(*args)

    w.port.see_commit = slow
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(w.lookup([1], At("completed", 2)))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [(2, [2])] * 12
    assert len(asked) == 1
    assert w.one(1, At("completed", 2)) == (2, 2)
    assert w.lookup([1], exactly(2)) == (2, [2])


def test_a_version_is_not_refused_while_the_coordinator_does_not_answer(make):
    w = make()
    w.batch(filled(1))
    w.lookup(KEYS)
    w.reads[0]._reader.wait_seconds = 0.1
    asked, go_on = threading.Event(), threading.Event()

    def silent(*args: str) -> Any:
        asked.set()
        assert go_on.wait(HANG)
        return w.c.completed(*args)

    w.port.completed = silent
    w.port.see_commit = lambda run_id, _, host_id: silent(run_id, host_id)
    first = threading.Thread(target=lambda: w.hosts[0].version_requests.completed_version(w.run, 2, HANG))
    first.start()
    try:
        assert asked.wait(PATIENCE)
        for at in (At("completed", 2), exactly(2), exactly(2, held_only=True)):
            with pytest.raises(HostUnavailableError, match=r"whether version 2 .* is completed; version 1 is the last"):
                w.lookup([1], at)
        w.hosts[0].completed.forget(w.run)
        with pytest.raises(HostUnavailableError, match=r"Spark has committed batch 0 of .*no answer within"):
            w.lookup([1])
        w.write(filled(2))
        w.complete(tell=False)
    finally:
        go_on.set()
        first.join(PATIENCE)
    assert w.lookup([1], At("completed", 2)) == (2, [2])


def test_a_version_that_is_not_completed_is_waited_for_a_little_and_then_refused(make):
    w = make(wait_seconds=0.1)
    w.batch(filled(1))
    w.write(filled(2))
    begun = time.monotonic()
    with pytest.raises(StateVersionError, match=r"Version 2 .* is not completed; version 1 is the last one that is"):
        w.lookup([1], At("completed", 2))
    waited = time.monotonic() - begun
    assert 0.08 < waited < PATIENCE
    assert w.port.calls["completed"] < 10 + waited / 0.02, "not more often than every 20 ms"
    with pytest.raises(StateVersionError, match="version 1 is the last"):
        w.lookup([1], exactly(9, held_only=True))
    w.reads[0]._reader.wait_seconds = HANG
    later = threading.Timer(0.1, lambda: w.complete(tell=False))
    later.start()
    assert w.lookup([1], At("completed", 2)) == (2, [2]), "completed while it waits"
    later.join()


def test_latest_read_returns_the_last_acknowledged_version_per_partition(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2), partitions=[1])
    expected = [2 if p == 1 else 1 for p in partitions_of(KEYS, 2)]
    assert w.lookup(KEYS, LATEST) == (1, expected)
    assert w.lookup(KEYS) == (1, [1] * len(KEYS))
    of_one = [k for k, p in zip(KEYS, partitions_of(KEYS, 2), strict=True) if p == 1]
    assert w.lookup(of_one, LATEST) == (2, [2] * len(of_one))
    assert w.one(of_one[0], LATEST) == (2, 2)
    assert w.scan(LATEST)[1] == dict(zip(KEYS, expected, strict=True))
    w.write(filled(3), partitions=[1])
    assert w.one(of_one[0], LATEST) == (2, 3), "a repeated attempt takes the place of the first"


def test_the_attempt_that_the_coordinator_took_is_read_while_its_answer_is_on_its_way(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    task = w.task(0, "again")
    assert w.hosts[0].open(task).redirect is None
    instance, seen = w.instance(0), []
    accept = instance.state.attempts.accept

    def accepted(version: int, attempt: str) -> None:
        # Acknowledged, and Spark continues: the first attempt of this task had an answer.
        w.complete()
        seen.append((w.lookup(KEYS), w.scan(), instance.state.version))
        accept(version, attempt)

    instance.state.attempts.accept = accepted
    w.hosts[0].commit(task, changes_of(filled(3), 0, 2), {})
    expected = [3 if p == 0 else 2 for p in partitions_of(KEYS, 2)]
    assert seen == [((2, expected), (2, dict(zip(KEYS, expected, strict=True))), 1)]
    assert w.lookup(KEYS) == (2, expected)


def test_reads_wait_for_no_commit_and_no_commit_for_them(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    release, reading = threading.Event(), threading.Event()

    def slow(path: str) -> None:
        if path.endswith(".changelog"):
            reading.set()
            release.wait(HANG)

    w.complete()
    w.world.put_hook = slow
    writer = threading.Thread(target=lambda: w.write(filled(3)))
    writer.start()
    assert reading.wait(PATIENCE)
    assert w.lookup(KEYS) == (2, [2] * len(KEYS))
    assert w.scan() == (2, filled(2))
    answer = w.reads[0].scan(ScanRequest(w.run, "op"))
    assert writer.is_alive(), "no read has waited for it"
    release.set()
    writer.join(PATIENCE)
    assert not writer.is_alive(), "an abandoned scan does not block a commit"
    w.world.put_hook = None
    w.complete()
    assert w.lookup(KEYS) == (3, [3] * len(KEYS))
    assert sum(b.num_rows for b in answer.batches) == len(KEYS)


def test_values_come_in_the_order_asked_whatever_is_asked(make):
    w = make(n=3)
    w.batch({k: k for k in range(0, 1000, 2)})
    rng = random.Random(1)
    keys = [rng.randrange(-5, 1005) for _ in range(2000)]
    assert w.lookup(keys) == (1, [k if k % 2 == 0 and 0 <= k < 1000 else None for k in keys])
    assert w.lookup([]) == (1, [])
    in_order = sorted(range(500), key=lambda k: stored([k])[0].as_py())
    assert w.lookup(in_order) == (1, [k if k % 2 == 0 else None for k in in_order])


def test_invalid_key_bytes_are_rejected(make):
    w = make()
    w.batch(filled(1))
    read = w.reads[0]
    request = LookupRequest(w.run, "op")
    for key in (b"", b"\x00", b"\x00\x10x", b"\xff\xff"):
        with pytest.raises(RequestError):
            read.lookup_one(request, key)
        with pytest.raises(RequestError):
            read.lookup(request, pa.array([b"\x00\x01a", key], pa.binary()))
    with pytest.raises(RequestError, match="null"):
        read.lookup(request, pa.array([None], pa.binary()))
    assert read.lookup_one(request, b"\x00\x00") == (1, None), "it is not there, that is all"
    with pytest.raises(UnknownKvStateIdError, match=r"no column family 'x'.*'default' \(rows\)"):
        read.lookup_one(LookupRequest(w.run, "op", column_family="x"), stored([1])[0].as_py())
    with pytest.raises(UnknownKvStateIdError, match=r"no state variable 'x'; there are 'default' \(rows\)"):
        table(w, state="x")
    with pytest.raises(exceptions.UnknownOperatorError, match="no operator 'x'; operators that exist: 'op'"):
        read.lookup(LookupRequest(w.run, "x"), stored([1]))


def test_waiter_is_woken_by_its_version(make, monkeypatch):
    monkeypatch.setattr(answer_version, "ASK_COORDINATOR_SECONDS", HANG)
    w = make()
    read = w.reads[0]
    assert read.await_completed(w.run, -1, 0.0) == 0
    w.batch(filled(1))
    assert read.await_completed(w.run, 0, 5.0) == 1
    begun = time.monotonic()
    assert read.await_completed(w.run, 1, 0.1) == 1
    assert time.monotonic() - begun < PATIENCE
    w.write(filled(2))
    found: list[int] = []
    waiter = threading.Thread(target=lambda: found.append(read.await_completed(w.run, 1, HANG)))
    waiter.start()
    w.complete()
    waiter.join(PATIENCE)
    assert found == [2]


def test_host_without_partitions_learns_of_versions(make, monkeypatch):
    monkeypatch.setattr(answer_version, "ASK_COORDINATOR_SECONDS", 0.1)
    w = make(hosts=2, n=1)
    w.batch(filled(1))
    (read,) = [r for i, r in enumerate(w.reads) if w.instance(0, i) is None]
    assert read.await_completed(w.run, 0, 1.0) == 1
    w.write(filled(2))
    w.complete(tell=False)
    assert read.await_completed(w.run, 1, PATIENCE) == 2
    with pytest.raises(NotOwnerError):
        read.lookup(LookupRequest(w.run, "op"), stored(KEYS))
    assert read.describe("op", None)["operators"][0]["held"] == []


def test_a_short_wait_ends_with_a_question_of_its_own(make):
    w = make(hosts=2, n=1)
    w.batch(filled(1))
    (read,) = [r for i, r in enumerate(w.reads) if w.instance(0, i) is None]
    w.write(filled(2))
    asked: list[int] = []

    def completed(*args: str) -> Any:
        answer = w.c.completed(*args)
        asked.append(answer.version)
        if len(asked) == 1:
            w.complete(tell=False)
        return answer

    w.port.completed = completed
    assert read.await_completed(w.run, 1, 0.1) == 2
    assert asked == [1, 2]


def test_failed_questions_of_other_readers_do_not_hide_the_end_of_a_run(make, monkeypatch):
    monkeypatch.setattr(answer_version, "ASK_COORDINATOR_SECONDS", 0.2)
    w = make()
    w.batch(filled(1))

    def completed(*args: str) -> Any:
        raise RetiredRunError("the run is over")

    w.port.completed = completed
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(0.02):
            with suppress(RetiredRunError):
                w.reads[0]._host.version_requests.completed_version(w.run, 2, 0.001)

    other = threading.Thread(target=ask)
    other.start()
    try:
        with pytest.raises(RetiredRunError):
            w.reads[0].await_completed(w.run, 1, PATIENCE)
    finally:
        is_over.set()
        other.join(PATIENCE)


def test_one_waiter_asks_for_all_and_all_learn_of_the_end(make, monkeypatch):
    monkeypatch.setattr(answer_version, "ASK_COORDINATOR_SECONDS", 0.1)
    w = make()
    w.batch(filled(1))
    asked: list[float] = []

    def completed(*args: str) -> Any:
        asked.append(time.monotonic())
        return w.c.completed(*args)

    w.port.completed = completed
    ends: list[Any] = []

    def wait() -> None:
        try:
            ends.append(w.reads[0].await_completed(w.run, 1, HANG))
        except RetiredRunError as error:
            ends.append(type(error))

    waiters = [threading.Thread(target=wait) for _ in range(10)]
    begun = time.monotonic()
    for waiter in waiters:
        waiter.start()
    eventually(lambda: asked)
    time.sleep(0.3)  # the others might ask as well
    assert len(asked) <= 2 + (time.monotonic() - begun) / 0.05
    w.c.deactivate_instances(w.run)
    for waiter in waiters:
        waiter.join(PATIENCE)
    assert ends == [RetiredRunError] * 10
    assert time.monotonic() - begun < PATIENCE


def test_host_whose_partitions_moved_learns_of_versions_by_heartbeat(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    w.complete(tell=False)
    for p in (0, 1):
        w.hosts[0].cache.unload(w.instance(p))
    w.hosts[0].heartbeat()
    assert w.hosts[0].completed.newest(w.run).version == 2


def test_operators_and_their_partitions_on_a_host(make):
    w = make()
    w.batch(filled(1))
    (of,) = w.reads[0].operators()
    assert (of["operator"], of["query_name"], of["query_id"], of["run_id"]) == ("op", "name", "q", "run1")
    assert (of["oldest_version"], of["completed_version"], of["partitions"], of["key_groups"]) == (0, 1, 2, 16)
    assert of["state"] == [
        {"name": "default", "kind": "rows", "key": {"k": "int64"}, "value": {"n": "int64", "w": "int64"}}
    ]
    described = w.reads[0].describe("op", None)
    assert described["host_id"] == "h0"
    held = described["operators"][0]["held"]
    assert [(h["partition"], h["version"]) for h in held] == [(0, 1), (1, 1)]
    assert sum(h["keys"] for h in held) == len(KEYS)
    assert w.reads[0].describe(None, None)["operators"] == described["operators"]
    with pytest.raises(UnknownOperatorError, match="operators that exist: 'op'"):
        w.reads[0].describe("x", None)


def test_operator_of_an_ended_query_is_reported_as_ended(make):
    w = make()
    w.batch(filled(1))
    w.c.deactivate_instances(w.run)
    with pytest.raises(QueryEndedError, match=r"Query name \(q, run run1\).*'op', ended at 1970-01-01 00:16:40"):
        w.reads[0].locate("op", None)
    with pytest.raises(QueryEndedError):
        w.reads[0].describe("op", "name")
    with pytest.raises(UnknownOperatorError):
        w.reads[0].locate("other", None)
    with pytest.raises(UnknownOperatorError):
        w.reads[0].locate("op", "another")
    w.register("run2")
    assert w.reads[0].locate("op", None).run_id == "run2"
    assert w.reads[0].locate("op", "name").run_id == "run2"
    with pytest.raises(QueryEndedError, match="its query ended"):
        w.reads[0].locate("op", "run1")
    with pytest.raises(UnknownOperatorError):
        w.reads[0].locate("gone", None)


@pytest.mark.parametrize("backend", [only_thorough("file"), "rocksdb"])
def test_sums_hold_while_batches_partitions_and_readers_race(make, backend):
    """Transfers between accounts in all partitions leave their sum as it is; answers must show nothing else."""
    w = make(n=3, backend=backend)
    accounts = list(range(30))
    held = dict.fromkeys(accounts, 100)
    w.batch(held)
    rng = random.Random(3)
    stop, failures, answers = threading.Event(), [], [0]

    def read(seed: int) -> None:
        own = random.Random(seed)
        seen = 0
        while not stop.is_set():
            try:
                how = own.randrange(4)
                if how == 0:
                    version, values = w.lookup(accounts)
                elif how == 1:
                    version, found = w.scan()
                    values = list(found.values())
                elif how == 2:
                    version, values = w.lookup(accounts, At("completed", seen))
                else:
                    version, values = w.lookup(accounts, exactly(max(1, seen - own.randrange(3))))
                if sum(values) != 3000 or len(values) != 30 or (how != 3 and version < seen):
                    failures.append((how, seen, version, values))
                seen = max(seen, version)
                answers[0] += 1
            except NotOwnerError:
                pass
            except Exception as error:  # noqa: BLE001 - all of them are failures
                failures.append(error)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    begun = time.monotonic()
    # On a slow machine until there is something to judge by.
    least = effort(0.2, 1.0)
    while (took := time.monotonic() - begun) < least or (answers[0] <= 20 and not failures and took < PATIENCE):
        changed = {}
        for _ in range(5):
            a, b = rng.sample(accounts, 2)
            amount = rng.randrange(50)
            held[a], held[b] = held[a] - amount, held[b] + amount
            changed.update({a: held[a], b: held[b]})
        w.write(changed)
        blocked = w.instance(rng.randrange(3))
        if blocked is not None and rng.random() < 0.5:
            with blocked.commit_lock:
                w.complete()
                time.sleep(0.002)
        else:
            w.complete(tell=rng.random() < 0.7)
        if rng.random() < 0.1 and (one := w.instance(rng.randrange(3))) is not None:
            w.hosts[0].cache.unload(one)
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures, failures[:3]
    assert answers[0] > 20
    assert w.lookup(accounts, At("completed", w.version))[1] == list(held.values())
