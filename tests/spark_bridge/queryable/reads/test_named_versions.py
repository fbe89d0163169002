"""Reads of versions by their number: retained ones, and those that are kept no more."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from spark_bridge import exceptions
from spark_bridge.exceptions import StateVersionError
from spark_bridge.host import partition_cache
from spark_bridge.queryable.protocol import ScanRequest
from tests.effort import only_thorough
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.host_world import KEYS, changes_of, exactly, filled, partitions_of


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


def test_named_version_comes_from_its_manifest_not_from_local_state(make):
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
    run.assignment.current = moves
    w.hosts[1].grants.forget(w.run)  # as on a restarted host
    task = w.task(moved)
    assert w.hosts[1].open(task).redirect is None
    w.hosts[1].commit(task, changes_of(filled(3), moved, 4), {})
    w.complete(tell=False)
    held = w.instance(moved).state
    assert [(meta.version, is_accepted) for meta, _, is_accepted in held.attempts.pending()] == [(2, True)]
    assert w.lookup([key], exactly(2)) == (2, [3])
    assert w.one(key, exactly(2)) == (2, 3)
    with pytest.raises(StateVersionError, match=f"Version 2 of partition {moved} .*not held here; version 1 is"):
        w.lookup([key], exactly(2, held_only=True))


def versions_of(cache: Any) -> set[int]:
    return {key.of[1] for key, _ in cache._copies}


def test_copies_of_old_versions_are_shared_and_let_go(make, monkeypatch):
    w = make()
    for value in range(1, 10):
        w.batch(filled(value))
    cache, loader = w.hosts[0].cache, w.hosts[0].loader
    loaded: list[int] = []
    begun, go_on = threading.Event(), threading.Event()
    load = loader.load_copy

    def filled_late(*args: Any) -> Any:
        loaded.append(args[1].version)
        begun.set()
        assert go_on.wait(HANG)
        return load(*args)

    monkeypatch.setattr(loader, "load_copy", filled_late)
    threads = [threading.Thread(target=lambda: w.lookup(KEYS, exactly(2))) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert begun.wait(PATIENCE)
    assert w.lookup(KEYS) == (9, [9] * len(KEYS)), "the latest version can be read during the load"
    go_on.set()
    for thread in threads:
        thread.join()
    assert loaded == [2, 2], "each partition once"
    answer = w.reads[0].scan(ScanRequest(w.run, "op", at=exactly(3)))
    for version in (1, 2, 4, 5, 6):
        assert w.lookup(KEYS, exactly(version)) == (version, [version] * len(KEYS))
    assert len(versions_of(cache)) == partition_cache.MAX_VERSIONS
    assert 3 in versions_of(cache), "one that is read stays"
    assert sum(b.num_rows for b in answer.batches) == len(KEYS)
    unfinished = [w.reads[0].scan(ScanRequest(w.run, "op", at=exactly(v))) for v in (1, 2, 3, 4)]
    with pytest.raises(exceptions.TooManyRequestsError, match="4 older versions from storage"):
        w.lookup(KEYS, exactly(5))
    for answer in unfinished[:2]:
        answer.batches.close()
    assert w.lookup(KEYS, exactly(5)) == (5, [5] * len(KEYS))
    cache._clock = lambda: time.monotonic() + partition_cache.COPY_IDLE_SECONDS + 1
    w.hosts[0].maintenance.do_maintenance()
    assert versions_of(cache) == {3, 4}
    w.c.deactivate_instances(w.run)
    w.hosts[0].heartbeat()
    assert cache._copies == {}
    assert sum(b.num_rows for b in unfinished[2].batches) == len(KEYS), "a scan that has begun reads all its rows"
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
