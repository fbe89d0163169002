"""What a host answers: all partitions of an answer at one version, whatever is committed, moved and restarted
meanwhile.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from backends import fault_points
from backends.engines import rocksdb
from backends.exceptions import StoreClosedError
from coordinator_actor.exceptions import QueryEndedError, RetiredRunError, UnknownOperatorError, UnknownRunError
from coordinator_actor.messages import Completed
from spark_bridge import exceptions
from spark_bridge.exceptions import (
    HostUnavailableError,
    NotOwnerError,
    RequestError,
    StateVersionError,
    UnknownKvStateIdError,
)
from spark_bridge.queryable.protocol.messages import At, Comparison, LookupRequest, ScanRequest
from spark_bridge.queryable.reads import completion_wait, host_reads, partition_loading, partition_scans, version_copies
from tests.effort import effort, only_thorough
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.host_world import COMPLETED, HostWorld, changes_of, partitions_of, stored
from tests.spark_bridge.queryable.memory_reads import eventually

KEYS = range(40)
LATEST = At("latest")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., HostWorld]]:
    made: list[HostWorld] = []

    def build(*args: Any, **kwargs: Any) -> HostWorld:
        made.append(HostWorld(tmp_path, *args, **kwargs))
        return made[-1]

    yield build
    for one in made:
        one.close()


def exactly(version: int, *, held_only: bool = False) -> At:
    return At("version", version, held_only)


def filled(value: int) -> dict[int, int]:
    return dict.fromkeys(KEYS, value)


# -- one version ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
def test_partitions_are_read_at_one_version_while_a_commit_holds_one_of_them(make, backend):
    w = make(backend=backend)
    w.batch(filled(1))
    w.batch(filled(2))
    with w.instance(0).commit_lock:
        w.hosts[0].loading.complete(Completed(w.run, 2, {}))
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
        assert w.lookup(KEYS, held) == (2, [2] * len(KEYS)), "base of the one, what the other keeps of the past"
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


def test_what_is_completed_is_read_before_anything_of_it_is_applied(make):
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


def test_a_version_that_others_know_of_is_asked_for_at_once_and_once_for_all(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    w.complete(tell=False)
    asked: list[int] = []

    def slow(*args: str) -> Any:
        asked.append(1)
        time.sleep(0.05)
        return w.c.completed(*args)

    w.port.completed = slow
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


def test_the_latest_is_what_was_acknowledged_last_partition_by_partition(make):
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
    accept = instance.state.accept

    def accepted(version: int, attempt: str) -> None:
        # Acknowledged, and Spark goes on: the first attempt of this task had an answer.
        w.complete()
        seen.append((w.lookup(KEYS), w.scan(), instance.state.version))
        accept(version, attempt)

    instance.state.accept = accepted
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
    assert not writer.is_alive(), "a scan that nobody goes on with holds up nobody"
    w.world.put_hook = None
    w.complete()
    assert w.lookup(KEYS) == (3, [3] * len(KEYS))
    assert sum(b.num_rows for b in answer.batches) == len(KEYS)


# -- partitions that move ------------------------------------------------------------------------


def test_a_partition_that_nobody_has_opened_since_a_restart_is_loaded(make):
    w = make()
    for value in (1, 2, 3):
        w.batch(filled(value))
    again = w.host(0, "b")
    w.hosts, w.reads = [again], [host_reads.HostReads(again, wait_seconds=20.0)]
    assert w.instance(0) is None
    assert w.lookup(KEYS) == (3, [3] * len(KEYS))
    assert [w.instance(p).state.version for p in (0, 1)] == [3, 3]
    assert w.scan(exactly(2)) == (2, filled(2)), "from storage"
    loads = again.describe()["loads"]
    w.batch(filled(4))
    assert w.scan() == (4, filled(4))
    assert again.describe()["loads"] == loads


def test_one_partition_is_loaded_behind_what_is_noted_for_the_others(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    w.complete(tell=False)
    w.hosts[0].loading.unload(w.instance(0))
    assert w.hosts[0].completed.newest(w.run).version == 1
    assert w.lookup(KEYS) == (2, [2] * len(KEYS)), "one can only be loaded at 2, so all are read there"
    assert w.lookup(KEYS) == (2, [2] * len(KEYS))
    w.hosts[0].heartbeat()
    assert [w.instance(p).state.version for p in (0, 1)] == [2, 2]


def test_a_partition_of_another_host_is_refused_also_once_it_has_moved(make, monkeypatch):
    monkeypatch.setattr(partition_loading, "REFUSED_SECONDS", HANG)
    w = make(hosts=2, n=4)
    w.batch(filled(1))
    owners = [o.host_id for o in w.reads[0].locate("op", None).owners]
    assert set(owners) == {"h0", "h1"}
    of = partitions_of(KEYS, 4)
    mine = [k for k, p in zip(KEYS, of, strict=True) if owners[p] == "h0"]
    theirs = [k for k, p in zip(KEYS, of, strict=True) if owners[p] == "h1"]
    assert w.lookup(mine) == (1, [1] * len(mine))
    assert w.lookup(theirs, i=1) == (1, [1] * len(theirs))
    calls = w.port.calls.get("open_for_read", 0)
    for _ in range(5):
        with pytest.raises(NotOwnerError, match="belongs to host h1"):
            w.lookup(KEYS)
    assert w.port.calls["open_for_read"] <= calls + 2, "it is believed for a moment"
    assert w.scan()[1].keys() == set(mine), "a scan without partitions is of what the host owns"
    with pytest.raises(NotOwnerError):
        w.scan(partitions=[0, 1, 2, 3])
    # Host 1 dies: its partitions are host 0's now, before any batch.
    w.world.now += 60
    w.hosts[0].heartbeat()
    w.c.expire()
    # The moment is over.
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + HANG, sleep=time.sleep)
    monkeypatch.setattr(partition_loading, "time", later)
    assert w.lookup(KEYS) == (1, [1] * len(KEYS))
    assert w.scan() == (1, filled(1))
    w.hosts, w.reads = w.hosts[:1], w.reads[:1]
    w.batch(filled(2))
    assert w.lookup(KEYS) == (2, [2] * len(KEYS))


def test_a_version_without_a_head_of_a_loaded_partition_is_another_hosts(make):
    w = make(hosts=2, n=4)
    w.batch(filled(1))
    owners = [o.host_id for o in w.reads[0].locate("op", None).owners]
    gone = owners.index("h0")
    key = next(k for k, p in zip(KEYS, partitions_of(KEYS, 4), strict=True) if p == gone)
    assert w.one(key) == (1, 1)
    heads = w.c.completed(w.run, "h0").heads["op"]
    w.write(filled(2))  # what this host has made of version 2 is not what counts
    # Version 2 is another host's; this one still has version 1 loaded.
    w.hosts[0].completed.note(Completed(w.run, 2, {"op": {p: h for p, h in heads.items() if p != gone}}))
    run = w.c.registries.runs.by_id[w.run]
    current = run.assignment.current
    owners = dict.fromkeys(run.tasks(), "h1")
    run.assignment.change(type(current).of(99, current.generation, current.hosts, owners), {})
    for read in (lambda: w.one(key), lambda: w.lookup([key])):
        with pytest.raises(NotOwnerError, match="belongs to host h1"):
            read()


def test_a_partition_that_lacks_what_was_completed_is_loaded_anew(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    w.complete(tell=False)
    state = w.instance(0).state
    ((meta, _, _),) = state.pending()
    state.discard(2, meta.attempt)
    w.hosts[0].completed.note(w.c.completed(w.run, "h0"))
    loads = w.hosts[0].describe()["loads"]
    assert w.lookup(KEYS) == (2, [2] * len(KEYS))
    assert w.hosts[0].describe()["loads"] == loads + 1
    assert [w.instance(p).state.version for p in (0, 1)] == [2, 1]


def test_a_newer_run_that_begins_below_shows_its_own_state_and_the_older_one_none(make, monkeypatch):
    w = make()
    for value in (1, 2, 3):
        w.batch(filled(value))
    old = w.run
    assert w.lookup(KEYS) == (3, [3] * len(KEYS))
    for batch in (1, 2):
        (w.world.root / "ck/commits" / str(batch)).unlink()
        (w.world.root / "ck/offsets" / str(batch)).unlink()
    w.register("run2")
    assert w.version == 1
    assert w.lookup(KEYS) == (1, [1] * len(KEYS))
    assert w.scan() == (1, filled(1))
    with monkeypatch.context() as brief, pytest.raises(StateVersionError, match="version 1 is the last"):
        brief.setattr(w.reads[0]._reader, "wait_seconds", 0.1)
        w.lookup(KEYS, At("completed", 3))
    w.hosts[0].heartbeat()
    with pytest.raises((RetiredRunError, UnknownRunError)):
        w.lookup(KEYS, run=old)
    w.batch(filled(20))
    assert w.lookup(KEYS) == (2, [20] * len(KEYS))
    assert w.lookup(KEYS, exactly(1)) == (1, [1] * len(KEYS))
    with pytest.raises((RetiredRunError, UnknownRunError)):
        w.reads[0].await_completed(old, 3, 0.2)


def test_a_coordinator_that_was_replaced_is_told_of_the_run_by_who_reads(make, monkeypatch):
    w = make()
    w.batch(filled(1))
    w.port.c = w.c = w.world.coordinator(0)
    with monkeypatch.context() as brief, pytest.raises(StateVersionError):
        brief.setattr(w.reads[0]._reader, "wait_seconds", 0.1)
        w.lookup(KEYS, At("completed", 2))  # has to ask, and is not answered by UnknownRunError
    assert w.lookup(KEYS) == (1, [1] * len(KEYS))
    registered = w.port.calls.get("register_host", 0)
    with pytest.raises(UnknownRunError):
        w.lookup(KEYS, run="nobody's")
    assert w.port.calls["register_host"] == registered, "who makes up runs causes no registrations"


# -- named versions ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["file", only_thorough("rocksdb")])
def test_every_retained_version_can_be_read_from_memory_or_storage(make, backend):
    w = make(backend=backend)
    for value in range(1, 7):
        w.batch({**filled(value), value: None})
    w.scan()
    for version in range(7):
        expected = {k: version for k in KEYS if k != version} if version else {}
        assert w.scan(exactly(version)) == (version, expected)
        assert w.lookup(KEYS, exactly(version)) == (version, [expected.get(k) for k in KEYS])
        assert w.one(9, exactly(version)) == (version, expected.get(9))
        assert w.reads[0].count(ScanRequest(w.run, "op", at=exactly(version))) == (version, len(expected))
    assert w.scan(exactly(5, held_only=True))[0] == 5
    with pytest.raises(StateVersionError, match=r"Version 1 .*not held here; held: 4, 5, 6"):
        w.scan(exactly(1, held_only=True))


def test_a_named_version_is_what_its_manifest_names_and_not_what_this_host_has_made_of_it(make):
    w = make(hosts=2, n=4)
    w.batch(filled(1))
    owners = [o.host_id for o in w.reads[0].locate("op", None).owners]
    moved = owners.index("h0")
    key = next(k for k, p in zip(KEYS, partitions_of(KEYS, 4), strict=True) if p == moved)
    w.write(filled(2))
    # The task of the partition runs again, at the host that owns the partition by now. The manifest names its changes.
    run = w.c.registries.runs.by_id[w.run]
    current = run.assignment.current
    moves = type(current).of(99, current.generation, current.hosts, dict.fromkeys(run.tasks(), "h1"))
    run.assignment.change(moves, {})
    w.hosts[1].grants.forget(w.run)  # as a host that begins anew
    task = w.task(moved)
    assert w.hosts[1].open(task).redirect is None
    w.hosts[1].commit(task, changes_of(filled(3), moved, 4), {})
    w.complete(tell=False)
    held = w.instance(moved).state
    assert [(meta.version, is_accepted) for meta, _, is_accepted in held.pending()] == [(2, True)]
    assert w.lookup([key], exactly(2)) == (2, [3])
    assert w.one(key, exactly(2)) == (2, 3)
    with pytest.raises(StateVersionError, match=f"Version 2 of partition {moved} .*not held here; version 1 is"):
        w.lookup([key], exactly(2, held_only=True))


def test_copies_of_old_versions_are_shared_and_let_go(make, monkeypatch):
    w = make()
    for value in range(1, 10):
        w.batch(filled(value))
    copies = w.reads[0]._reader._copies
    loaded: list[int] = []
    begun, go_on = threading.Event(), threading.Event()
    fill = copies._filled

    def filled_late(*args: Any) -> Any:
        loaded.append(args[-1])
        begun.set()
        assert go_on.wait(HANG)
        return fill(*args)

    monkeypatch.setattr(copies, "_filled", filled_late)
    threads = [threading.Thread(target=lambda: w.lookup(KEYS, exactly(2))) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert begun.wait(PATIENCE)
    assert w.lookup(KEYS) == (9, [9] * len(KEYS)), "the latest is there meanwhile"
    go_on.set()
    for thread in threads:
        thread.join()
    assert loaded == [2, 2], "each partition once"
    answer = w.reads[0].scan(ScanRequest(w.run, "op", at=exactly(3)))
    for version in (1, 2, 4, 5, 6):
        assert w.lookup(KEYS, exactly(version)) == (version, [version] * len(KEYS))
    assert len(copies._held) == version_copies.MAX_VERSIONS
    assert (w.run, "op", 3) in copies._held, "one that is read stays"
    assert sum(b.num_rows for b in answer.batches) == len(KEYS)
    unfinished = [w.reads[0].scan(ScanRequest(w.run, "op", at=exactly(v))) for v in (1, 2, 3, 4)]
    with pytest.raises(exceptions.TooManyRequestsError, match="4 older versions from storage"):
        w.lookup(KEYS, exactly(5))
    for answer in unfinished[:2]:
        answer.batches.close()
    assert w.lookup(KEYS, exactly(5)) == (5, [5] * len(KEYS))
    copies._clock = lambda: time.monotonic() + version_copies.COPY_IDLE_SECONDS + 1
    w.hosts[0].maintenance.do_maintenance()
    assert {key[2] for key in copies._held} == {3, 4}
    w.c.deactivate_instances(w.run)
    w.hosts[0].heartbeat()
    assert copies._held == {}
    assert sum(b.num_rows for b in unfinished[2].batches) == len(KEYS), "what was begun is read to its end"
    unfinished[3].batches.close()
    assert not any(w.hosts[0].files.copies.glob("*"))


def test_versions_that_are_no_longer_kept_are_refused_by_name(make):
    w = make(deltas_per_snapshot=1)
    w.c.deactivate_instances(w.run)
    w.register("run2", min_versions_to_retain=2, maintenance_interval=1.0)
    for value in range(1, 9):
        w.batch(filled(value))
        for upload in w.hosts[0].maintenance.do_maintenance():
            upload.result()
        w.world.now += 2
        w.c.maintain()
    (running,) = w.c.operators()
    assert 1 < running.oldest_version < 7 and running.completed_version == 8
    oldest = running.oldest_version
    assert w.lookup(KEYS, exactly(oldest)) == (oldest, [oldest] * len(KEYS))
    with pytest.raises(StateVersionError, match=rf"Version 1 .*no longer kept; there are the versions {oldest} to 8"):
        w.lookup(KEYS, exactly(1))


# -- scans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
def test_a_scan_shows_its_version_however_long_it_takes(make, monkeypatch, backend):
    monkeypatch.setattr("spark_bridge.state_format.partition_rows.STEP_ROWS", 3)
    monkeypatch.setattr("spark_bridge.queryable.reads.row_stream.BATCH_ROWS", 3)
    w = make(backend=backend, n=3)
    w.batch(filled(1))
    w.batch({**filled(2), 5: None})
    w.write({**filled(3), 6: None, 100: 3})
    w.complete(tell=False)
    w.hosts[0].completed.note(w.c.completed(w.run, "h0"))  # base and delta
    at_three = {**{k: 3 for k in KEYS if k != 6}, 100: 3}
    answers = [w.reads[0].scan(ScanRequest(w.run, "op", at=at)) for at in (COMPLETED, exactly(2, held_only=True))]
    rows: list[dict[int, int]] = [{}, {}]
    for value in range(4, 9):
        w.batch({**filled(value), 7: None, 200 + value: 1})
        for answer, found in zip(answers, rows, strict=True):
            batch = next(answer.batches)
            found.update(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))
    for answer, found, expected in zip(answers, rows, (at_three, {k: 2 for k in KEYS if k != 5}), strict=True):
        for batch in answer.batches:
            found.update(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))
        assert found == expected
    assert [a.version for a in answers] == [3, 2]


def test_a_scan_of_a_partition_that_leaves_ends_with_an_error_that_says_so(make, monkeypatch):
    monkeypatch.setattr("spark_bridge.queryable.reads.row_stream.BATCH_ROWS", 1)
    w = make()
    w.batch(filled(1))
    answer = w.reads[0].scan(ScanRequest(w.run, "op"))
    for p in (0, 1):
        w.hosts[0].loading.unload(w.instance(p))
    with pytest.raises(NotOwnerError, match="left this host while it was read"):
        list(answer.batches)
    with pytest.raises(StopIteration):
        next(answer.batches)
    assert w.scan() == (1, filled(1)), "it is loaded again"


def table(w: HostWorld, **asked: Any) -> pa.Table:
    answer = w.reads[0].scan(ScanRequest(w.run, "op", **asked))
    return pa.Table.from_batches(list(answer.batches), answer.schema)


def key_bytes(key: int) -> bytes:
    return stored([key])[0].as_py()[2:]  # type: ignore[no-any-return]


@pytest.mark.parametrize("most", [4096, 2])
def test_bounds_of_keys_within_every_key_group(make, monkeypatch, most):
    monkeypatch.setattr(partition_scans, "MAX_RANGES", most)
    w = make(n=3)
    values = {k: k for k in range(-20, 200)}
    w.batch(values)
    w.write({**{k: k + 1000 for k in range(30, 60)}, 42: None})
    w.complete(tell=False)
    w.hosts[0].completed.note(w.c.completed(w.run, "h0"))
    values.update({k: k + 1000 for k in range(30, 60)})
    del values[42]
    for low, high in ((-5, 50), (40, None), (None, 3), (7, 7), (300, 400), (None, None)):
        bounds = {
            "start": None if low is None else key_bytes(low),
            "end": None if high is None else key_bytes(high),
        }
        expected = {k: v for k, v in values.items() if (low is None or k >= low) and (high is None or k < high)}
        assert w.scan(**bounds) == (2, expected), (low, high)
        assert w.reads[0].count(ScanRequest(w.run, "op", **bounds)) == (2, len(expected))
    with pytest.raises(RequestError, match="is below its start"):
        w.scan(start=key_bytes(5), end=key_bytes(4))


def test_comparisons_limits_and_columns(make):
    w = make()
    w.batch({k: k * 10 for k in KEYS})
    assert table(w).column_names == ["k", "n", "w"]
    for where, expected in (
        ([Comparison("n", ">=", [100]), Comparison("k", "<", [13])], range(10, 13)),
        ([Comparison("n", "in", [50, 60, 70, 5])], range(5, 8)),
        ([Comparison("w", "=", ["70"])], [7]),
        ([Comparison("k", "!=", [0]), Comparison("n", "<=", [20])], [1, 2]),
        ([Comparison("n", "is null")], []),
        ([Comparison("n", "is not null"), Comparison("k", ">", [37])], [38, 39]),
        ([Comparison("partition_id", "=", [5])], []),
    ):
        assert sorted(table(w, where=where).column("k").to_pylist()) == list(expected), where
        assert w.reads[0].count(ScanRequest(w.run, "op", where=where)) == (1, len(expected))
    assert table(w, limit=7).num_rows == 7
    assert table(w, limit=0).num_rows == 0
    assert w.reads[0].count(ScanRequest(w.run, "op", limit=7)) == (1, 7)
    chosen = table(w, columns=["w", "partition_id", "k"], where=[Comparison("n", "<", [20])])
    assert chosen.column_names == ["w", "partition_id", "k"]
    assert sorted(chosen.to_pylist(), key=lambda r: r["k"]) == [
        {"w": 10 * k, "partition_id": partitions_of([k], 2)[0], "k": k} for k in (0, 1)
    ]
    assert set(table(w, columns=["key_group"]).column(0).to_pylist()) <= set(range(16))
    for wrong, message in (
        ({"columns": ["x"]}, r"no column 'x'; there are 'k', 'n', 'w', 'key_group', 'partition_id'"),
        ({"columns": []}, "asks for no columns"),
        ({"where": [Comparison("x", "=", [1])]}, "no column 'x'"),
        ({"where": [Comparison("n", "=", ["many"])]}, "'many' cannot be compared with column 'n', which is int64"),
        ({"where": [Comparison("n", "=", [1.5])]}, "1.5 cannot be compared"),
        ({"where": [Comparison("n", "=", [True])]}, "True cannot be compared"),
        ({"where": [Comparison("n", "=", [2**70])]}, "cannot be compared"),
        ({"where": [Comparison("n", "<", [])]}, "takes one value, not 0"),
        ({"where": [Comparison("n", "is null", [1])]}, "takes no values"),
        ({"partitions": [0, 2]}, "has the partitions 0 to 1"),
        ({"partitions": [0, 0]}, "each once"),
    ):
        with pytest.raises(RequestError, match=message):
            table(w, **wrong)


def test_counting_takes_no_scan_where_the_number_of_keys_is_at_hand(make, monkeypatch):
    w = make()
    w.batch(filled(1))
    w.batch({100: 1, 3: None})
    opened: list[int] = []
    real = host_reads.pairs_of
    monkeypatch.setattr(host_reads, "pairs_of", lambda *a: (opened.append(1), real(*a))[1])
    w.hosts[0].heartbeat()
    assert w.reads[0].count(ScanRequest(w.run, "op")) == (2, len(KEYS))
    assert w.reads[0].count(ScanRequest(w.run, "op", at=exactly(1))) == (1, len(KEYS))
    assert opened == []
    w.write({200: 1, 4: None, 5: None})
    w.complete(tell=False)
    w.hosts[0].completed.note(w.c.completed(w.run, "h0"))
    assert w.reads[0].count(ScanRequest(w.run, "op")) == (3, len(KEYS) - 1)
    assert opened


# -- lookups -------------------------------------------------------------------------------------


def test_values_come_in_the_order_asked_whatever_is_asked(make):
    w = make(n=3)
    w.batch({k: k for k in range(0, 1000, 2)})
    rng = random.Random(1)
    keys = [rng.randrange(-5, 1005) for _ in range(2000)]
    assert w.lookup(keys) == (1, [k if k % 2 == 0 and 0 <= k < 1000 else None for k in keys])
    assert w.lookup([]) == (1, [])
    in_order = sorted(range(500), key=lambda k: stored([k])[0].as_py())
    assert w.lookup(in_order) == (1, [k if k % 2 == 0 else None for k in in_order])


def test_what_is_no_key_is_refused(make):
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


# -- waiting, and what there is ------------------------------------------------------------------


def test_who_waits_for_a_version_is_woken_by_it(make, monkeypatch):
    monkeypatch.setattr(completion_wait, "ASK_COORDINATOR_SECONDS", HANG)
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


def test_a_host_without_any_partition_hears_of_versions_too(make, monkeypatch):
    monkeypatch.setattr(completion_wait, "ASK_COORDINATOR_SECONDS", 0.1)
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


def test_one_of_those_who_wait_asks_for_all_and_all_hear_of_the_end(make, monkeypatch):
    monkeypatch.setattr(completion_wait, "ASK_COORDINATOR_SECONDS", 0.1)
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


def test_a_host_whose_partitions_have_left_hears_of_versions_by_its_heartbeat(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    w.complete(tell=False)
    for p in (0, 1):
        w.hosts[0].loading.unload(w.instance(p))
    w.hosts[0].heartbeat()
    assert w.hosts[0].completed.newest(w.run).version == 2


def test_operators_and_what_a_host_holds_of_them(make):
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


def test_an_operator_of_a_query_that_has_ended_is_said_to_have_ended(make):
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


# -- a checker -----------------------------------------------------------------------------------


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
            w.hosts[0].loading.unload(one)
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures, failures[:3]
    assert answers[0] > 20
    assert w.lookup(accounts, At("completed", w.version))[1] == list(held.values())


def test_a_state_that_is_closed_while_it_is_read_is_read_again(make, monkeypatch):
    w = make()
    w.batch(filled(1))
    instance, calls = w.instance(0), []
    real = instance.state.get_many

    def closed(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            w.hosts[0].loading.unload(instance)
            raise StoreClosedError("closed")
        return real(*args, **kwargs)

    instance.state.get_many = closed
    assert w.lookup(KEYS) == (1, [1] * len(KEYS))
    assert len(calls) == 1


def test_a_partition_whose_write_ended_midway_is_loaded_anew(make, monkeypatch):
    world = make(backend="rocksdb")
    monkeypatch.setattr(rocksdb, "WRITE_ROWS", 2)
    keys = range(40)
    world.batch(dict.fromkeys(keys, 1))
    world.batch(dict.fromkeys(keys, 2))
    world.write(dict.fromkeys(keys, 3))
    failed = []

    def fail_once(point: str) -> None:
        if point == "apply:batch" and not failed:
            failed.append(point)
            raise OSError("no space left on device")

    fault_points.set_hook(fail_once)
    try:
        world.complete()
        world.hosts[0].heartbeat()
    finally:
        fault_points.set_hook(None)
    assert failed
    version, values = world.lookup(keys)
    assert (version, set(values)) == (3, {3})
    world.batch(dict.fromkeys(keys, 4))
    assert set(world.lookup(keys)[1]) == {4}
