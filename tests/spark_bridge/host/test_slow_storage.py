"""Storage that is slow or hangs costs no host its lease, and no query waits for that of another; without Ray."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial

import msgspec
import pytest

from backends.exceptions import StorageError
from coordinator_actor.exceptions import UnknownRunError
from spark_bridge.host import maintenance
from spark_bridge.transport.protocol import TaskIdentity
from tests.coordinator_actor.coordinator_world import World
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.host.held_runs import beat_through_a_lease, one, two_queries
from tests.spark_bridge.host.host_steps import ch, make_host, plan_spark, reg, run_task, task, wait_until


@contextmanager
def slow_manifest(tmp_path):
    """A host, two partitions, and the manifest of the second batch, which is being written for as long as the block."""
    w, c, h = one(tmp_path, 2)
    plan_spark(w, 0)
    for p in (0, 1):
        run_task([h], 0, p)
    w.commit_spark(0)
    plan_spark(w, 1)
    h.heartbeat()
    for p in (0, 1):
        h.open(task(1, p))  # batch 1 begins: version 1 completes, not told yet
    go, at = threading.Event(), threading.Event()
    run_task([h], 1, 0)

    def slow(path):
        if path.startswith("manifests/"):
            at.set()
            go.wait(HANG)

    w.put_hook = slow
    t = threading.Thread(target=lambda: run_task([h], 1, 1))
    t.start()
    try:
        assert at.wait(PATIENCE)
        yield w, c, h
    finally:
        go.set()
        t.join()


def test_a_slow_manifest_does_not_hold_up_heartbeats(tmp_path):
    """While one manifest is written, the heartbeats of hosts wait for run.lock, or for commit_lock."""
    with slow_manifest(tmp_path) as (_w, _c, h):
        beat = threading.Thread(target=h.heartbeat)
        beat.start()
        beat.join(PATIENCE)
        stuck = beat.is_alive()
    beat.join()
    assert not stuck


def test_a_slow_manifest_does_not_cost_a_host_its_lease(tmp_path):
    with slow_manifest(tmp_path) as (w, c, h):
        beat_through_a_lease(w, c, h)
        assert c.registries.hosts.leases


@contextmanager
def one_query_refuses(tmp_path):
    """A restarted coordinator whose storage refuses the state of run1, for as long as the block; it has no runX yet."""
    w, c, h = one(tmp_path, 2)
    plan_spark(w, 0)
    r2 = msgspec.structs.replace(
        reg(w, "runX", 1),
        query_id="q2",
        checkpoint_location=str(w.root / "ck2"),
        state_location=str(w.root / "ck2/statestore"),
    )
    run_task([h], 0)
    c.register_query(r2)
    c2 = w.coordinator(0)
    is_refused = True
    orig = w.storage

    def storage(loc, o):
        if is_refused and "/ck2" not in loc:
            raise StorageError("bucket of the first query: 403")
        return orig(loc, o)

    c2._queries._open_storage = storage

    def recover():
        nonlocal is_refused
        is_refused = False

    yield w, h, c2, r2, recover


def test_storage_of_one_query_does_not_block_reports_of_another(tmp_path):
    with one_query_refuses(tmp_path) as (_w, h, c2, r2, _recover):
        h.open(TaskIdentity("runX", "op", 0, 0, "a", "i"))
        h.commit(TaskIdentity("runX", "op", 0, 0, "a", "i"), ch(b"z"), {})
        h.port.c = c2
        for _ in range(3):
            h.heartbeat()
        c2.register_query(r2)
        assert c2.registries.runs.by_id["runX"].machine.acknowledged(1), (
            "the acknowledgement of the healthy query was not taken up"
        )


def test_a_query_whose_storage_refuses_costs_another_no_lease_and_no_looks(tmp_path):
    """The host reports that query alone again, until its storage answers; the first one stays in doubt."""
    with one_query_refuses(tmp_path) as (w, h, c2, r2, recover):
        h.port.c = c2
        c2.register_query(r2)
        for _ in range(2):
            h.heartbeat()
        w.plan_spark(0, "ck2")
        run_task([h], 0, 0, "runX")
        w.commit_spark(0, "ck2")
        c2.batch_committed("runX", 0)
        number = h.registration.number_of("runX")
        for _ in range(3):
            h.heartbeat()
            with pytest.raises(UnknownRunError):
                h.open(task(1, 1))  # Spark repeats the tasks of the other query
            assert h.registration.is_leased and h.knows_newest("runX") and not h.knows_newest("run1")
        assert h.registration.number_of("runX") == number, "the healthy query was not reported again"
        assert h.prepared.is_settled("runX"), "and its reads look at no log of Spark"
        assert not h.prepared.is_settled("run1"), "others may have made its next version"
        recover()
        h.heartbeat()
        h.heartbeat()
        assert h.knows_newest("run1") and c2.registries.runs.by_id["run1"].machine.acknowledged(1)


def test_a_report_that_was_refused_is_processed_although_the_driver_registers_the_query_first(tmp_path):
    with one_query_refuses(tmp_path) as (w, h, c2, _r2, recover):
        h.port.c = c2
        h.heartbeat()
        recover()
        c2.register_query(reg(w, n=2))
        assert not c2.registries.runs.by_id["run1"].machine.acknowledged(1)
        h.heartbeat()
        assert c2.registries.runs.by_id["run1"].machine.acknowledged(1)


def test_a_host_that_reports_a_run_again_doubts_its_versions_until_it_takes_part_in_one(tmp_path):
    """The coordinator may have given its partitions to others while it did not know the run from this host."""
    w, c, h = one(tmp_path, 1)
    h.register()
    plan_spark(w, 0)
    run_task([h], 0)
    w.commit_spark(0)
    c.batch_committed("run1", 0)
    h.heartbeat()
    assert h.prepared.is_settled("run1")
    c.registries.runs.remove("run1")
    h.heartbeat()
    h.heartbeat()
    assert h.knows_newest("run1") and not h.prepared.is_settled("run1")


def test_a_commit_does_not_wait_for_the_report_of_another_query(tmp_path):
    _w, _c2, h, tX, go, at = two_queries(tmp_path)
    t = threading.Thread(target=h.register)
    t.start()
    at.wait()
    try:
        h.commit(tX, ch(b"z"), {})  # opened before the restart
        assert t.is_alive()
    finally:
        go.set()
        t.join()


def test_a_hanging_storage_of_one_query_does_not_cost_a_host_its_lease(tmp_path):
    w, c2, h, _tX, go, at = two_queries(tmp_path)
    beat_through_a_lease(w, c2, h)
    assert at.wait(PATIENCE)
    dropped = "h0" not in c2.registries.hosts.leases
    go.set()
    assert not dropped


@pytest.mark.parametrize(("hanging", "threads"), [(1, 2), (1, 1), (3, 2)])
def test_queries_whose_storage_hangs_do_not_stop_the_snapshots_of_another(tmp_path, monkeypatch, hanging, threads):
    monkeypatch.setattr(maintenance, "WAIT_SECONDS", 0.1)
    w = World(tmp_path)
    c = w.coordinator(0)
    h = make_host(w, c, 0, tmp_path, deltas_per_snapshot=1, maintenance_threads=threads)
    go = threading.Event()

    def hang(put_new, path, data):
        if not path.endswith(".changelog"):
            assert go.wait(HANG)
        return put_new(path, data)

    runs = [f"run{i}" for i in range(hanging + 1)]
    for run in runs:
        registration = msgspec.structs.replace(
            reg(w, run, 4),
            query_id=f"q-{run}",
            checkpoint_location=str(w.root / run),
            state_location=str(w.root / run / "statestore"),
        )
        c.register_query(registration)
        if run != runs[-1]:
            storage = h.files.storage_of(registration)
            storage.put_new = partial(hang, storage.put_new)
    begun = []
    try:
        for batch in range(3):
            for run in runs:
                w.plan_spark(batch, run)
                for p in range(4):
                    run_task([h], batch, p, run)
                w.commit_spark(batch, run)
                c.batch_committed(run, batch)
            h.heartbeat()
            begun += h.maintenance.do_maintenance()
            others = [h.cache.instance(runs[-1], "op", p) for p in range(4)]
            wait_until(
                lambda batch=batch, others=others: all(o.snapshot_version == batch + 1 for o in others),
                "they wait for the others",
            )
    finally:
        go.set()
    for upload in begun:
        upload.result(PATIENCE)
    assert all(h.cache.instance(run, "op", p).snapshot_version for run in runs for p in range(4))
    assert not h.maintenance._slots._in_use


def test_a_host_that_closes_uploads_nothing_of_the_queries_that_wait(tmp_path):
    slots = maintenance._Slots(1)
    answers = []

    def wait():
        with slots.hold("one") as is_open:
            answers.append(is_open)

    with slots.hold("one"):
        waiting = threading.Thread(target=wait)
        waiting.start()
        slots.close()
        waiting.join(PATIENCE)
    assert answers == [False]
