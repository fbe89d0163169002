"""Runs that hosts hold, for the rules between hosts and coordinator."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pyarrow as pa

from spark_bridge.transport.protocol import GetCommand, TaskIdentity
from tests.coordinator_actor.coordinator_world import World
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.host.host_steps import make_host, plan_spark, reg, run_task


def get(host: Any, run: str = "run1", p: int = 0, version: int | None = None) -> Any:
    return host.reads.get_many(GetCommand(run, "op", p, version), pa.array([b"k"])).to_pylist()[0]


def start(tmp_path, hosts=1):
    w = World(tmp_path)
    c = w.coordinator(0)
    hs = [make_host(w, c, i, tmp_path) for i in range(hosts)]
    c.register_query(reg(w))
    plan_spark(w, 0)
    for p in (0, 1):
        run_task(hs, 0, p)
    w.commit_spark(0)
    c.batch_committed("run1", 0)
    return w, c, hs


def held(h):
    return len(h.cache.instances)


def one(tmp_path, n=1):
    w = World(tmp_path)
    c = w.coordinator(0)
    h = make_host(w, c, 0, tmp_path)
    c.register_query(reg(w, n=n))
    return w, c, h


def beat_through_a_lease(w, c, h):
    """Send a heartbeat each second for longer than a lease. The lease expires if one of them hangs."""
    due, done = threading.Semaphore(0), threading.Semaphore(0)

    def beats():
        for _ in range(12):
            due.acquire()
            h.heartbeat()
            done.release()

    threading.Thread(target=beats, daemon=True).start()
    for _ in range(12):
        due.release()
        is_done = done.acquire(timeout=PATIENCE)
        w.now += 1 if is_done else 12
        c.expire()
        if not is_done:
            return


def two_queries(tmp_path):
    w, c, h = one(tmp_path, 1)
    r2 = msgspec.structs.replace(
        reg(w, "runX", 1),
        query_id="q2",
        checkpoint_location=str(w.root / "ck2"),
        state_location=str(w.root / "ck2/statestore"),
    )
    plan_spark(w, 0)
    c.register_query(r2)
    tA, tX = TaskIdentity("run1", "op", 0, 0, "a", "i"), TaskIdentity("runX", "op", 0, 0, "b", "j")
    h.open(tA)
    h.open(tX)
    c2 = w.coordinator(0)  # restarted; the storage of the first query hangs
    go, at = threading.Event(), threading.Event()
    orig = w.storage

    def storage(loc, o):
        if "/ck2" not in loc:
            at.set()
            go.wait(HANG)
        return orig(loc, o)

    c2._queries._open_storage = storage
    c2.register_query(r2)  # by its driver
    h.port.c = c2
    return w, c2, h, tX, go, at
