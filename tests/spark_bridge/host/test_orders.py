"""The orders of the coordinator about runs: none is lost, and none is carried out on a newer run; without Ray."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from backends.exceptions import StateStoreError
from backends.partition.partition_state import PartitionState
from coordinator_actor.exceptions import CoordinatorError
from spark_bridge.exceptions import HostUnavailableError
from tests.spark_bridge.host.held_runs import held, one, start
from tests.spark_bridge.host.host_steps import make_host, plan_spark, reg, run_task, task


def test_a_run_that_ends_is_unloaded(tmp_path):
    _w, c, (h,) = start(tmp_path)
    c.deactivate_instances("run1")
    h.heartbeat()
    assert held(h) == 0


def test_orders_survive_a_registration(tmp_path):
    _w, c, (h,) = start(tmp_path)
    c.deactivate_instances("run1")
    h.register()  # as _with_registration does for UnknownRun, UnknownHost, StaleOwner of any query
    for _ in range(5):
        h.heartbeat()
    assert held(h) == 0


def test_orders_survive_a_lost_answer(tmp_path):
    _w, c, (h,) = start(tmp_path)
    c.deactivate_instances("run1")

    def lose(*_):
        raise HostUnavailableError("answer lost")

    h.port.after["heartbeat_host"] = lose
    with pytest.raises(HostUnavailableError):
        h.heartbeat()
    h.port.after.clear()
    for _ in range(5):
        h.heartbeat()
    assert held(h) == 0


def test_orders_reach_a_host_that_was_away(tmp_path):
    w, c, (h,) = start(tmp_path)
    w.now += 11
    c.expire()
    c.driver_heartbeat("run1")
    c.deactivate_instances("run1")
    for _ in range(5):
        h.heartbeat()
    assert held(h) == 0


def test_orders_survive_a_restarted_coordinator(tmp_path):
    w, c, hs = start(tmp_path, 2)
    c.register_query(reg(w, "run2"))
    c2 = w.coordinator(0)  # restarted
    c2.register_query(reg(w, "run2"))
    for h in hs:
        h.port.c = c2
    for _ in range(5):
        for h in hs:
            h.heartbeat()
            time.sleep(0.05)
    assert sum(map(held, hs)) == 0


def test_partition_opening_while_its_run_ends_is_unloaded(tmp_path):
    w, c, (_h,) = start(tmp_path)
    h2 = make_host(w, c, 1, tmp_path, inc="z")
    w.now += 5
    h2.heartbeat()
    w.now += 6
    c.expire()  # h0 is lost, its partitions move
    plan_spark(w, 1)
    c.driver_heartbeat("run1")

    def stop_query(*_):
        h2.port.before.clear()
        c.deactivate_instances("run1")
        h2.heartbeat()  # query.stop() while the state is fetched

    h2.port.before["lineage"] = stop_query
    with contextlib.suppress(CoordinatorError):
        h2.open(task(1, 0))
    for _ in range(5):
        h2.heartbeat()
    assert held(h2) == 0


def test_partition_loading_while_its_run_ends_is_unloaded(tmp_path):
    w, c, (_h,) = start(tmp_path)
    h2 = make_host(w, c, 1, tmp_path, inc="z")
    w.now += 5
    h2.heartbeat()
    w.now += 6
    c.expire()
    plan_spark(w, 1)
    c.driver_heartbeat("run1")

    orig = PartitionState.load

    def load(self, lineage, watch=None):
        orig(self, lineage)
        c.deactivate_instances("run1")
        h2.heartbeat()

    PartitionState.load = load
    try:
        h2.open(task(1, 0))
    except CoordinatorError:
        pass
    finally:
        PartitionState.load = orig
    for _ in range(5):
        h2.heartbeat()
    assert held(h2) == 0


def test_unloaded_partition_does_not_stop_other_orders(tmp_path):
    """on_completed raises StoreClosedError if the instance is destroyed while it waits for the commit_lock."""
    _w, c, (h,) = start(tmp_path)
    inst = next(iter(h.cache.instances.values()))
    done = c.registries.runs.by_id["run1"].announcement_to("h0")
    err = []

    def go():
        try:
            h.loader.complete(done)
        except (CoordinatorError, StateStoreError) as e:
            err.append(e)

    inst.commit_lock.acquire()
    t = threading.Thread(target=go)
    t.start()
    time.sleep(0.2)
    with h.cache.lock:
        del h.cache.instances[inst.key]
    inst.state.destroy()
    inst.commit_lock.release()
    t.join()
    assert err == []


def test_a_run_without_partitions_here_is_forgotten_when_it_ends(tmp_path):
    import shutil

    w, c, h = one(tmp_path, 1)
    plan_spark(w, 0)
    run_task([h], 0)
    h.cache.unload(next(iter(h.cache.instances.values())))  # its partition has moved: on_completed does this
    c.deactivate_instances("run1")
    for _ in range(3):
        h.heartbeat()
    left = dict(h.cache.registrations)
    shutil.rmtree(tmp_path / "ck")  # the user removes the stopped query's checkpoint
    c2 = w.coordinator(0)
    h.port.c = c2  # the coordinator is restarted
    for _ in range(3):
        h.heartbeat()
    assert not left and "run1" not in c2.registries.runs.by_id and not (tmp_path / "ck").exists()
