"""A query client: the real router and the real reads of hosts, over the simulated network.

The client looks at each answer as its user would. ``model.py`` says what an answer may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backends.exceptions import VersionNotFoundError
from coordinator_actor.durable.records import LookupRecord
from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import ConnectionClosedError
from spark_bridge.queryable.protocol import At, LookupReply, LookupRequest, pack_bytes, unpack_bytes
from spark_bridge.queryable.routing.router import StateRouter
from tests.simulation import model
from tests.simulation.model import Stream
from tests.simulation.network import STATESTORE_ERRORS, UnreachableError
from tests.simulation.scheduler import Task, Violation
from tests.simulation.sometimes import sometimes

if TYPE_CHECKING:
    from tests.simulation.world import World

ANSWER_SECONDS = 20.0
"""A client waits so long for an answer."""
EXACT = 0.3
"""How often a client asks for one of the last versions, and not for the last completed one."""
STALE = 0.5
"""How often a client takes the answer of a copy, where there are copies."""
KEPT = 0.7
"""How often a client uses the owners that it knows, and does not ask for them again."""
NEXT_BATCH = 0.3
"""How often a lookup query begins its next batch before it looks up."""
CUT_OFF_SECONDS = 60.0
"""Within this many seconds a host that was cut off has heard that another one has taken its place, or is dead."""
JOB_TASKS = 5
"""So many tasks of a job look up, one after the other."""
OLDER = 3
"""So many versions before the last one that it has seen a client asks for at most."""


def query_address(process_name: str) -> str:
    """Return where the host that runs in this process answers query clients."""
    return f"kv://{process_name}"


class _Exchange:
    """A request that is under way: a task of the client's process waits for the answer."""

    def __init__(self, world: World, address: str, task: Task) -> None:
        self.address = address
        self._world = world
        self._task = task
        task.on_end = lambda task: None

    def finish(self) -> tuple[LookupReply, bytes]:
        """See ``KvExchange``."""
        self._world.scheduler.join(self._task)
        if isinstance(self._task.error, UnreachableError):
            raise ConnectionClosedError(f"{self.address}: {self._task.error}") from self._task.error
        if self._task.error is not None:
            raise self._task.error
        answer: tuple[LookupReply, bytes] = self._task.result
        return answer

    def close(self) -> None:
        """See ``KvExchange``. The answer is thrown away when it comes."""

    def abandon(self) -> None:
        """See ``KvExchange``. The answer is thrown away when it comes."""

    def has_answer(self) -> bool:
        """Return whether ``finish`` need not wait."""
        return self._task.is_done


class SimulatedConnections:
    """``spark_bridge.queryable.connections.KvConnections`` for look-ups, over the simulated network."""

    timeout = ANSWER_SECONDS

    def __init__(self, world: World) -> None:
        self._world = world

    def begin(
        self, address: str, header: LookupRequest, body: bytes, deadline: float, connect_seconds: float = math.inf
    ) -> _Exchange:
        """See ``KvConnections``. The network has its own limit of connecting."""
        world = self._world
        process = world.addresses[address]

        def answer() -> tuple[LookupReply, bytes]:
            version, values = process.memory["reads"].lookup(header, unpack_bytes(body))
            if header.at.staleness and not process.memory["host"].cache.of_run(header.run_id, header.operator):
                sometimes("a copy answers a client")
            return LookupReply(version), pack_bytes(values)

        def ask() -> Any:
            seconds = max(0.0, deadline - world.scheduler.now)
            return world.network.call(process, "lookup", answer, seconds, through_ray=False)

        return _Exchange(world, address, world.scheduler.spawn(world.outside, ask, "look-up"))


def wait_for_any(world: World) -> Callable[[Sequence[Any], float], Sequence[Any]]:
    """Return ``hedged.wait_for_any`` over the simulated network."""

    def wait(exchanges: Sequence[Any], seconds: float) -> Sequence[Any]:
        until = world.scheduler.now + seconds
        while not (ready := [exchange for exchange in exchanges if exchange.has_answer()]):
            left = until - world.scheduler.now
            if left <= 0:
                break
            world.scheduler.sleep(min(left, 0.005))
        return ready

    return wait


class QueryClient:
    """Asks for all keys of some operator again and again. ``seen`` is the newest version that it saw of each run."""

    def __init__(self, world: World) -> None:
        self._world = world
        clock: Callable[[], float] = lambda: world.scheduler.now  # noqa: E731
        connections: Any = SimulatedConnections(world)
        wait = wait_for_any(world)
        self._router = StateRouter(connections, clock=clock, sleep=world.scheduler.sleep, wait=wait)
        self._seen: dict[str, int] = {}
        self._located: dict[tuple[str, str], OperatorLocation] = {}

    def run(self) -> None:
        """Ask until the world ends."""
        s = self._world.scheduler
        while True:
            s.sleep(s.random.random() * 3 * self._world.slowness)
            stream = s.random.choice(self._world.streams)
            operator = s.random.choice(stream.model.operators)
            known = self._located.pop((stream.name, operator), None)
            try:
                if known is None or s.random.random() >= KEPT:
                    known = self._world.sessions[-1].cluster.port().locate(operator, stream.name)
                self._ask(stream, known, self._version(known.run_id))
                self._located[stream.name, operator] = known
            except (UnreachableError, *STATESTORE_ERRORS) as error:
                s.log("a query was not answered:", type(error).__name__, str(error))

    def _version(self, run_id: str) -> At:
        r = self._world.scheduler.random
        seen = self._seen.get(run_id, 0)
        if self._world.standby_replicas and r.random() < STALE:
            return At(staleness=r.randint(1, 3))
        if not seen or r.random() >= EXACT:
            return At()
        # A host loads from storage a version that it no longer holds; in a calm world no version is loaded again.
        return At("version", max(0, seen - r.randint(0, OLDER)), held_only=self._world.is_calm)

    def _ask(self, stream: Stream, location: OperatorLocation, at: At) -> None:
        run_id, operator, now = location.run_id, location.operator.name, self._world.scheduler.now
        seen, committed = self._seen.get(run_id, 0), stream.committed.get(run_id, 0)
        was_newest = stream.is_newest(run_id)
        keys = pa.array(model.KEYS, pa.binary())
        version, values = self._router.lookup(location, "default", keys, at, now + ANSWER_SECONDS)
        if at.isolation == "version" and version != at.version:
            raise Violation(f"Version {at.version} of {run_id} was asked for, and version {version} answered.")
        if at.isolation == "completed":
            if version < seen - at.staleness:
                raise Violation(f"A client that has seen version {seen} of {run_id} was answered version {version}.")
            if version < committed and was_newest and not at.staleness:
                raise Violation(f"Spark has committed version {committed} of {run_id}, and {version} was answered.")
            self._seen[run_id] = max(seen, version)
        is_newest = was_newest and stream.is_newest(run_id)
        is_told = now > self._world.troubles.cut_off_at + CUT_OFF_SECONDS
        stream.model.check_answer(
            version, operator, list(model.KEYS), values.to_pylist(), is_newest, now if is_told else 0.0
        )


class LookingUpQuery:
    """Another query, whose batches look up a stream's state, each of them several times, as if it was run again.

    All attempts of a batch must be given one version, and the same values.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        clock: Callable[[], float] = lambda: world.scheduler.now  # noqa: E731
        connections: Any = SimulatedConnections(world)
        self._router = StateRouter(connections, clock=clock, sleep=world.scheduler.sleep)
        self._batch = 0
        self._first: tuple[int, list[bytes | None]] | None = None

    def run(self) -> None:
        """Look up until the world ends."""
        s = self._world.scheduler
        stream = self._world.streams[0]
        operator = stream.model.operators[0]
        while True:
            s.sleep(s.random.random() * 3 * self._world.slowness)
            if s.random.random() < NEXT_BATCH:
                self._batch, self._first = self._batch + 1, None
            try:
                self._look_up(stream, operator)
            except VersionNotFoundError as error:
                # Only a query that goes back repeats a version, or loses it.
                if not self._world.has_gone_back:
                    raise Violation(f"Batch {self._batch} cannot look up again: {error}") from error
                self._batch, self._first = self._batch + 1, None
            except (UnreachableError, *STATESTORE_ERRORS) as error:
                s.log("a lookup was not answered:", type(error).__name__, str(error))

    def _look_up(self, stream: Stream, operator: str) -> None:
        s = self._world.scheduler
        port = self._world.sessions[-1].cluster.port()
        found = port.look_up(operator, stream.name, "looking-up", self._batch)
        if self._first is not None and found.version != self._first[0]:
            raise Violation(f"Batch {self._batch} has looked up version {self._first[0]}, and then {found.version}.")
        at, keys = At("version", found.version), pa.array(model.KEYS, pa.binary())
        _, values = self._router.lookup(found.location, "default", keys, at, s.now + ANSWER_SECONDS)
        given = values.to_pylist()
        if self._first is None:
            self._first = found.version, given
        elif is_other(stream, operator, self._first[1], given):
            raise Violation(f"Version {found.version} was looked up as {self._first[1]}, and then as {given}.")


def is_other(stream: Stream, operator: str, before: list[bytes | None], now: list[bytes | None]) -> bool:
    """Return whether the values of the keys differ, apart from keys that were forgotten since."""
    pairs = zip(model.KEYS, before, now, strict=True)
    return any(new != old and not (new is None and stream.model.is_forgotten(operator, key)) for key, old, new in pairs)


class LookingUpJobs:
    """Jobs of batch DataFrames that look up a stream's state: each task locates the hosts itself, as in ``lookups``.

    All tasks of a job must get the same values of one version, or an error.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        clock: Callable[[], float] = lambda: world.scheduler.now  # noqa: E731
        connections: Any = SimulatedConnections(world)
        self._router = StateRouter(connections, clock=clock, sleep=world.scheduler.sleep)

    def run(self) -> None:
        """Run one job after the other until the world ends."""
        s = self._world.scheduler
        stream = self._world.streams[0]
        while True:
            s.sleep(s.random.random() * 3)
            try:
                self._job(stream, stream.model.operators[0])
            except VersionNotFoundError as error:
                if "has replaced the version" in str(error):
                    sometimes("a job ends because its version was made again")
                s.log("a job of lookups failed:", str(error))
            except (UnreachableError, *STATESTORE_ERRORS) as error:
                s.log("a job of lookups failed:", type(error).__name__, str(error))

    def _job(self, stream: Stream, operator: str) -> None:
        s = self._world.scheduler
        record, first = None, None
        for _ in range(JOB_TASKS):
            port = self._world.sessions[-1].cluster.port()
            location = port.locate(operator, stream.name, None if record is None else record.version)
            if record is None:
                record = LookupRecord(location.completed_version, location.made_by, 0)
            record.require_made_by(location.made_by)
            s.sleep(s.random.random() * 2)
            at, keys = At("version", record.version), pa.array(model.KEYS, pa.binary())
            _, answer = self._router.lookup(location, "default", keys, at, s.now + ANSWER_SECONDS)
            values = answer.to_pylist()
            if first is not None and is_other(stream, operator, first, values):
                raise Violation(f"Tasks of a job looked up version {record.version} as {first}, and then as {values}.")
            first = values
            s.sleep(s.random.random() * 5)
