"""Hosts on real storage, and the steps of a task on them, without Ray and Spark."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from backends.conf import StateStoreConf
from backends.formats.changelog import Changes
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import OperatorSpec, QueryRegistration
from spark_bridge.host.host import Host
from spark_bridge.transport.protocol import OpenReply, TaskIdentity
from tests.coordinator_actor.coordinator_world import SCHEMA, World


class Port:
    """A coordinator within reach; ``before[method]`` and ``after[method]`` happen around a call."""

    def __init__(self, c: Coordinator) -> None:
        self.c = c
        self.before: dict[str, Callable[..., Any]] = {}
        self.after: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name in self.before:
                self.before[name](*args, **kwargs)
            answer = getattr(self.c, name)(*args, **kwargs)
            if name in self.after:
                self.after[name](answer, *args, **kwargs)
            return answer

        return call


def make_host(
    world: World,
    c: Coordinator,
    i: int,
    tmp: Path,
    inc: str = "a",
    clock: Callable[[], float] = time.monotonic,
    **conf: Any,
) -> Any:
    given = StateStoreConf(provider="file", fsync=False, **conf)
    port: Any = Port(c)
    local = tmp / f"local{i}{inc}"
    host: Any = Host(world.host(i, inc), port, local, conf=given, open_storage=world.storage, clock=clock)
    host.port = port
    host.register()
    return host


def reg(world: World, run: str = "run1", n: int = 2, **changes: Any) -> QueryRegistration:
    return world.registration(run, n, operators=(OperatorSpec("op", n, SCHEMA, backend="file"),), **changes)


def task(batch: int, p: int = 0, run: str = "run1", attempt: str | None = None) -> TaskIdentity:
    return TaskIdentity(
        run_id=run,
        operator="op",
        partition=p,
        batch_id=batch,
        attempt=attempt or uuid.uuid4().hex[:6],
        invocation=uuid.uuid4().hex,
    )


def ch(value: bytes, key: bytes = b"k") -> Changes:
    return Changes.of(pa.array([key]), pa.array([value]))


def opened(host: Any, task: TaskIdentity) -> OpenReply:
    """Open a task's partition, and return the answer once the partition is loaded."""
    while (reply := host.open(task)).loading is not None:
        pass  # the host has waited a moment before it answered
    return reply  # type: ignore[no-any-return]


def run_task(
    hosts: list[Any], batch: int, p: int = 0, run: str = "run1", value: bytes = b"v", attempt: str | None = None
) -> Any:
    given = task(batch, p, run, attempt)
    for host in hosts:
        if opened(host, given).redirect is None:
            return host, host.commit(given, ch(value), {})
    raise AssertionError("no host owns the partition")


def plan_spark(world: World, batch: int) -> None:
    path = world.root / "ck" / "offsets" / str(batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("v1\n{}\n{}")
