"""Hosts on real storage, and the steps of a task on them, without Ray and Spark.

``Threads`` play tasks. The changelogs of a ``GatedWorld`` come one by one, as a test lets them through. ``spec`` and
``reg_of`` give queries of operators with several column families, in the form that hosts receive.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa

from backends.conf import StateStoreConf
from backends.encoding.operator_schema import OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from backends.exceptions import StorageError
from backends.formats.changelog import Changes
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import OperatorSpec, QueryRegistration
from spark_bridge.host.host import Host
from spark_bridge.transport.protocol import OpenReply, TaskIdentity
from tests.coordinator_actor.coordinator_world import SCHEMA, World
from tests.patience import HANG, PATIENCE


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


def wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.001)


class Threads:
    """A daemon thread for each task: one that waits forever fails its test, and holds up nothing else."""

    @staticmethod
    def submit(call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args))
            except BaseException as error:  # noqa: BLE001 - the caller of result() gets it
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


class GatedWorld(World):
    """Changelogs of partition 0 can be read when they are let through, one by one; ``read`` counts them."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_gated = False
        self.gate = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)
        self.fails = False
        self.read: Counter[str] = Counter()

    def storage(self, location: str, options: Mapping[str, str]) -> CheckpointStorage:
        storage = super().storage(location, options)
        read = storage.read

        def gated(ref: FileRef) -> bytes:
            if self.is_gated and "/2/0/" in ref.path and ref.path.endswith(".changelog"):
                self.arrived.release()
                assert self.gate.acquire(timeout=HANG)
                if self.fails:
                    raise StorageError(f"{ref.path}: throttled")
                self.read[ref.path] += 1
            return read(ref)

        storage.read = gated  # type: ignore[method-assign]
        return storage

    def open_gate(self) -> None:
        self.is_gated = False
        self.gate.release(1000)


FAMILIES_SCHEMA = OperatorSchema(
    (
        StateVariable("a", "value", {"a": StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("v", pa.int64())]))}),
        StateVariable("b", "value", {"b": StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("v", pa.int64())]))}),
    )
).to_json()


def binary(*values: bytes | None) -> pa.BinaryArray:
    return pa.array(values, pa.binary())


def spec(n: int = 2, backend: str = "file", **changes: Any) -> OperatorSpec:
    return OperatorSpec("op", n, FAMILIES_SCHEMA, backend=backend, kind="transform_with_state", **changes)


def reg_of(w: World, *specs: OperatorSpec, run: str = "run1") -> Any:
    return w.registration(run, 2, operators=specs)


def write_offsets(w: World, batch: int, watermark: int, timestamp: int) -> None:
    plan_spark(w, batch)
    path = w.root / "ck" / "offsets" / str(batch)
    path.write_text(f'v1\n{{"batchWatermarkMs":{watermark},"batchTimestampMs":{timestamp},"conf":{{}}}}\n{{}}')
