"""A real host whose tasks are played by threads, without Spark and Ray: in this process, or in a separate one.

Tasks run in the process of the host, as Spark's tasks run on the machines of their hosts. A host in a separate process
calls the coordinator, which is in the process that has started it, through a socket.
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from backends.conf import StateStoreConf
from backends.decoders import keep_pandas_out
from backends.formats.changelog import Changes
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.messages import HostInfo
from spark_bridge.host.host import Host
from spark_bridge.transport.protocol import TaskIdentity

Redirects = Mapping[tuple[str, int], str]
"""The addresses of the hosts that tasks were redirected to, by operator and partition."""
AUTHENTICATION = uuid.uuid4().bytes
MAX_KEYS = 100_000
"""Keys are drawn from so many in each partition."""
SWITCH_SECONDS = 0.0005
"""How long a thread of a host keeps the interpreter while others wait, in seconds."""


@dataclass(frozen=True)
class TasksOf:
    """The tasks of a batch that ask one host first; each task changes ``keys`` keys, and ``slots`` run at once."""

    run_id: str
    batch: int
    keys: int
    slots: int
    tasks: Sequence[tuple[str, int]]


class Player(Protocol):
    """A host and its tasks."""

    info: HostInfo

    def register(self) -> None:
        """Register the host at the coordinator."""

    def run(self, given: TasksOf) -> Redirects:
        """Run tasks until all have committed; return those that belong to another host."""

    def heartbeat(self) -> None:
        """Send a heartbeat, and learn the completed versions."""

    def maintain(self) -> None:
        """Take the snapshots that are due."""

    def describe(self) -> dict[str, object]:
        """Return the description of the host."""

    def close(self) -> None:
        """End the host."""


class HostHere(Player):
    """A host in this process."""

    def __init__(self, info: HostInfo, coordinator: CoordinatorPort, directory: Path, conf: StateStoreConf) -> None:
        self.info = info
        self.host = Host(info, coordinator, directory, conf=conf)
        self._threads: dict[int, ThreadPoolExecutor] = {}

    def register(self) -> None:
        self.host.register()

    def run(self, given: TasksOf) -> Redirects:
        if given.slots not in self._threads:
            self._threads[given.slots] = ThreadPoolExecutor(given.slots, thread_name_prefix="task")
        threads = self._threads[given.slots]
        begun = {task: threads.submit(self._task, given, *task) for task in given.tasks}
        sent_on = {task: done.result() for task, done in begun.items()}
        return {task: address for task, address in sent_on.items() if address is not None}

    def _task(self, given: TasksOf, operator: str, partition: int) -> str | None:
        attempt, batch = f"{partition}.{given.batch}", given.batch
        task = TaskIdentity(given.run_id, operator, partition, batch, attempt, uuid.uuid4().hex, batch)
        opened = self.host.open(task)
        while opened.loading is not None:
            opened = self.host.open(task)
        if opened.redirect is not None:
            return opened.redirect
        self.host.commit(task, changes(partition, batch, given.keys), {})
        return None

    def heartbeat(self) -> None:
        self.host.heartbeat()

    def maintain(self) -> None:
        for begun in self.host.maintenance.do_maintenance():
            begun.result()

    def describe(self) -> dict[str, object]:
        return self.host.describe()

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown()
        self.host.close()


def changes(partition: int, batch: int, keys: int) -> Changes:
    """Return changes of so many keys of a partition, the same ones for the same batch."""
    rng = np.random.default_rng((partition, batch))
    drawn = np.sort(rng.choice(MAX_KEYS, keys, replace=False, shuffle=False)).astype(">i8")
    return Changes.of(_binary(drawn.tobytes(), 8), _binary(rng.bytes(16 * keys), 16))


def _binary(data: bytes, width: int) -> pa.BinaryArray:
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(data) // width, [None, pa.py_buffer(data)]).cast(
        pa.binary()
    )


# -- a host in a separate process ----------------------------------------------------------------


class HostApart(Player):
    """A host in a separate process, which ends with this one. It learns of versions while it runs tasks."""

    def __init__(self, info: HostInfo, door: str, directory: Path, conf: StateStoreConf) -> None:
        self.info = info
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        (self._tasks, tasks), (self._orders, orders) = context.Pipe(), context.Pipe()
        given = (tasks, orders, info, door, AUTHENTICATION, directory, conf)
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        tasks.close()
        orders.close()

    def register(self) -> None:
        self._ask(self._orders, "register")

    def run(self, given: TasksOf) -> Redirects:
        answer: Redirects = self._ask(self._tasks, "run", given)
        return answer

    def heartbeat(self) -> None:
        self._ask(self._orders, "heartbeat")

    def maintain(self) -> None:
        self._ask(self._orders, "maintain")

    def describe(self) -> dict[str, object]:
        answer: dict[str, object] = self._ask(self._orders, "describe")
        return answer

    def close(self) -> None:
        self._tasks.close()
        with suppress(EOFError, BrokenPipeError):
            self._ask(self._orders, "close")
        self._process.join(30)

    @staticmethod
    def _ask(way: Connection, what: str, *given: Any) -> Any:
        way.send((what, given))
        return _answer(way)


def _serve(
    tasks: Connection,
    orders: Connection,
    info: HostInfo,
    door: str,
    key: bytes,
    directory: Path,
    conf: StateStoreConf,
) -> None:
    # As a host's actor does (``spark_bridge/host_actor.py``).
    keep_pandas_out()
    sys.setswitchinterval(SWITCH_SECONDS)
    host = HostHere(info, PortThroughDoor(door, key), directory, conf)
    at_work = threading.Thread(target=_obey, args=(tasks, host), name="tasks", daemon=True)
    at_work.start()
    _obey(orders, host)


def _obey(way: Connection, host: HostHere) -> None:
    """Run one order after the other, until the host is closed or the caller has ended."""
    with suppress(EOFError):
        while True:
            what, given = way.recv()
            _reply(way, lambda what=what, given=given: getattr(host, what)(*given))
            if what == "close":
                return


def _reply(to: Connection, work: Any) -> None:
    try:
        answer = (True, work())
    except Exception as error:  # noqa: BLE001 - the caller raises it
        answer = (False, error)
    to.send(answer)


def _answer(of: Connection) -> Any:
    is_done, answer = of.recv()
    if not is_done:
        raise answer
    return answer


class PortThroughDoor(CoordinatorPort):
    """Sends messages to a coordinator in another process. Each thread has its own connection."""

    def __init__(self, door: str, key: bytes) -> None:
        self._door = door
        self._key = key
        self._here = threading.local()

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Send one message and return the answer, or raise what the coordinator raises."""
        if not hasattr(self._here, "connection"):
            self._here.connection = Client(self._door, "AF_UNIX", self._key)
        self._here.connection.send((method, args, kwargs))
        return _answer(self._here.connection)


@contextmanager
def door_to(coordinator: CoordinatorPort, address: Path) -> Iterator[str]:
    """Let hosts in other processes call a coordinator within the block; yield the address for it."""
    with Listener(str(address), "AF_UNIX", backlog=128, authkey=AUTHENTICATION) as listener:
        threading.Thread(target=_admit, args=(listener, coordinator), name="door", daemon=True).start()
        yield str(address)


def _admit(listener: Listener, coordinator: CoordinatorPort) -> None:
    with suppress(OSError):  # the listener was closed
        while True:
            connection = listener.accept()
            threading.Thread(target=_pass_on, args=(connection, coordinator), daemon=True).start()


def _pass_on(connection: Connection, coordinator: CoordinatorPort) -> None:
    with suppress(EOFError, ConnectionError):
        while True:
            method, args, kwargs = connection.recv()
            _reply(connection, lambda m=method, a=args, k=kwargs: coordinator.call(m, *a, **k))
