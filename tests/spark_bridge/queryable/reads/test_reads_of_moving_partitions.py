"""Reads of partitions that move between hosts, load, or close during the read."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from backends import fault_points
from backends.engines import engine, rocksdb_files
from backends.exceptions import StoreClosedError
from coordinator_actor.exceptions import RetiredRunError, UnknownRunError
from coordinator_actor.messages import Completed
from spark_bridge.exceptions import NotOwnerError, StateVersionError
from spark_bridge.queryable.protocol import At
from spark_bridge.queryable.reads import answer_version, host_reads
from tests.patience import HANG
from tests.spark_bridge.queryable.host_world import KEYS, exactly, filled, partitions_of


def test_partition_unopened_since_a_restart_is_loaded(make):
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


def test_partition_is_loaded_at_a_newer_version_than_noted_for_the_others(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    w.complete(tell=False)
    w.hosts[0].cache.unload(w.instance(0))
    assert w.hosts[0].completed.newest(w.run).version == 1
    assert w.lookup(KEYS) == (2, [2] * len(KEYS)), "one can only be loaded at 2, so all are read there"
    assert w.lookup(KEYS) == (2, [2] * len(KEYS))
    w.hosts[0].heartbeat()
    assert [w.instance(p).state.version for p in (0, 1)] == [2, 2]


def test_a_partition_of_another_host_is_refused_also_once_it_has_moved(make, monkeypatch):
    monkeypatch.setattr(answer_version, "REFUSED_SECONDS", HANG)
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
    assert w.port.calls["open_for_read"] <= calls + 2, "the answer is cached for a moment"
    assert w.scan()[1].keys() == set(mine), "a scan without partitions is of what the host owns"
    with pytest.raises(NotOwnerError):
        w.scan(partitions=[0, 1, 2, 3])
    # Host 1 dies: its partitions are host 0's now, before any batch.
    w.world.now += 60
    w.hosts[0].heartbeat()
    w.c.expire()
    # The moment is over.
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + HANG, sleep=time.sleep)
    monkeypatch.setattr(answer_version, "time", later)
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
    run.assignment.current = type(current).of(99, current.generation, current.hosts, owners)
    for read in (lambda: w.one(key), lambda: w.lookup([key])):
        with pytest.raises(NotOwnerError, match="belongs to host h1"):
            read()


def test_partition_without_the_completed_version_is_reloaded(make):
    w = make()
    w.batch(filled(1))
    w.write(filled(2))
    w.complete(tell=False)
    state = w.instance(0).state
    ((meta, _, _),) = state.attempts.pending()
    state.attempts.discard(2, meta.attempt)
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


def test_replaced_coordinator_learns_of_the_run_from_a_reader(make, monkeypatch):
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


def test_a_state_that_is_closed_while_it_is_read_is_read_again(make, monkeypatch):
    w = make()
    w.batch(filled(1))
    instance, calls = w.instance(0), []
    real = instance.state.reads.get_many

    def closed(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            w.hosts[0].cache.unload(instance)
            raise StoreClosedError("closed")
        return real(*args, **kwargs)

    instance.state.reads.get_many = closed
    assert w.lookup(KEYS) == (1, [1] * len(KEYS))
    assert len(calls) == 1


def test_partition_with_an_interrupted_write_is_reloaded(make, monkeypatch):
    world = make(backend="rocksdb")
    monkeypatch.setattr(rocksdb_files, "WRITE_ROWS", 2)
    monkeypatch.setattr(engine, "UNWRITTEN_BYTES", 0)
    monkeypatch.setattr(engine, "GATHERED_BYTES", 0)
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
