"""A Ray cluster: its coordinator, which is started again when it dies, and sessions of drivers with their hosts."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.conf import StateStoreConf
from backends.exceptions import ConcurrentCommitError
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.handlers.locations import assign_owners
from coordinator_actor.handlers.registries import HostLease, Loss, Registries
from coordinator_actor.handlers.suspicions import Probed
from coordinator_actor.messages import HostInfo
from coordinator_actor.run.owners import Assignment
from coordinator_actor.run.query_state import QueryState
from coordinator_actor.threads import QueryThreads
from spark_bridge.host.host import Host
from spark_bridge.host.instances import Instance
from spark_bridge.queryable.reads.host_reads import HostReads
from tests.simulation import engine
from tests.simulation import scheduler as scheduling
from tests.simulation.network import STATESTORE_ERRORS, SimulatedPort, UnreachableError
from tests.simulation.readers import query_address
from tests.simulation.scheduler import Process, Task, Violation
from tests.simulation.sometimes import sometimes

if TYPE_CHECKING:
    from tests.simulation.world import World

NEARLY_FULL = 50
"""A look at the free room finds a disk nearly full so many times as often as an engine finds it full."""


def _seen_open(look: Callable[[Any], bool], prepared: Any) -> bool:
    is_open = look(prepared)
    if is_open:
        sometimes("a reader itself sees that Spark has not committed a batch")
    return is_open


class Cluster:
    """One Ray cluster (or namespace) with its coordinator."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.dead_nodes: set[str] = set()
        self.coordinator: Process | None = None
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """Start a new coordinator process, as Ray restarts the actor."""
        s = self.world.scheduler
        process = self.coordinator = s.process(f"coordinator of {self.name} at {s.now:.1f}")
        process.clock_offset = self.world.clock_offset
        clock = self.world.clock_of(process)
        held = self.world.constants
        conf = CoordinatorConf(
            host_timeout=held.host_timeout,
            silent_timeout=held.silent_timeout,
            driver_timeout=held.driver_timeout,
            report_timeout=held.report_timeout,
        )
        queries = QueryThreads()
        # Nothing is called before the constructor has ended.
        made = process.memory["coordinator"] = Coordinator(
            clock,
            self.world.disk.open,
            conf,
            apart=lambda query, work: queries.submit(query, partial(self._do, work)),
            dead_nodes=lambda: self.dead_nodes,
            probe=lambda address, seconds: self._probe(process, address, seconds),
        )
        hosts = made.registries.hosts
        hosts.lose = partial(self._lose, hosts.lose)  # type: ignore[method-assign]
        process.on_death.append(lambda: s.at(0.2 + s.random.random() * 3, self._restart))
        s.spawn(process, lambda: self._every(1.0, "expire"), "leases")
        s.spawn(process, lambda: self._every(1.0, "maintain"), "maintenance")

    def _probe(self, coordinator: Process, address: str, seconds: float) -> Probed:
        """Connect to a host as ``probe_address`` does: its kernel answers, unless its machine is gone or cut off.

        A suspended process takes connections all the same. Now and then the answer is wrong: a living host seems
        silent, or a dead one seems to listen. A living host never seems to refuse.
        """
        s, target = self.world.scheduler, self.world.addresses[address]
        is_silent = target.is_cut_off or target.severed_until > s.now or coordinator.is_cut_off
        if target.is_alive:
            shown = Probed.SILENT if is_silent else Probed.CONNECTED
        else:  # of each third host the machine has died
            shown = Probed.SILENT if is_silent or zlib.crc32(address.encode()) % 3 == 0 else Probed.REFUSED
        if self.world.faults.wrong_probe and s.random.random() < self.world.faults.wrong_probe:
            shown = Probed.SILENT if target.is_alive else Probed.CONNECTED
        s.sleep(seconds if shown is Probed.SILENT else self.world.network.delay())
        return shown

    def _lose(self, lose: Callable[[HostLease, Loss, float], None], lease: HostLease, why: Loss, age: float) -> None:
        """Check why a host is given up. One that lives is then like one that was cut off: it has yet to hear of it."""
        process = self.world.addresses[lease.info.address]
        if process.is_alive:
            self.world.troubles.cut_off_at = self.world.scheduler.now
        if why is Loss.REFUSED:
            sometimes("a dead host is given up as soon as it refuses a connection")
            if process.is_alive:
                raise Violation(f"{process.name} is given up as a dead process, and is alive.")
        if why is Loss.SILENT:
            sometimes("a host is given up as its machine is silent")
            if process.is_alive and not process.is_cut_off and process.severed_until < self.world.scheduler.now:
                sometimes("a living host is given up for probes that are wrong")
        lose(lease, why, age)

    def _do(self, work: Callable[[], Any]) -> Any:
        """Do work that no caller waits for; fail the run if its error is not excused."""
        try:
            return work()
        except Exception as error:
            if not isinstance(error, STATESTORE_ERRORS):
                self.world.scheduler.fail(error)
            raise

    def _restart(self) -> None:
        if self.coordinator is not None and not self.coordinator.is_alive:
            self.start_coordinator()

    def replace_coordinator(self) -> None:
        """Cut off its node: Ray starts another one while the old one still finishes the calls that it has begun."""
        s, old = self.world.scheduler, self.coordinator
        if old is None or not old.is_alive:
            return
        s.log("CUT OFF", old.name)
        old.is_cut_off = True
        old.on_death.clear()
        s.at(5.0 + s.random.random() * self.world.outlives, lambda: s.kill(old))
        self.start_coordinator()

    def _every(self, seconds: float, method: str) -> None:
        s = self.world.scheduler
        coordinator = s.current.process.memory["coordinator"]
        while True:
            s.sleep(seconds * self.world.slowness * (0.8 + 0.4 * s.random.random()))
            try:
                getattr(coordinator, method)()
            except STATESTORE_ERRORS as error:
                s.log(method, "failed:", type(error).__name__, str(error))
            if method == "maintain":
                self.world.after_maintenance()

    def runs(self) -> list[QueryState]:
        """Return the runs that the coordinator knows."""
        made = None if self.coordinator is None else self.coordinator.memory.get("coordinator")
        return [] if made is None else list(made.registries.runs.by_id.values())

    def port(self, *, is_direct: bool = False) -> SimulatedPort:
        """A way to the coordinator; those of hosts are direct."""
        timeout = self.world.constants.recovery_timeout
        return SimulatedPort(self.world.network, lambda: self.coordinator, timeout, is_direct=is_direct)


def assign_owners_observed(registries: Registries, run: QueryState, **how: Any) -> Assignment:
    """See ``assign_owners``: what happens as the user asks for a rebalance is recorded."""
    before, after = run.assignment.current, assign_owners(registries, run, **how)
    if how.get("rebalance") and before is not None:
        if any(before.find(*task) != after.find(*task) for task in run.tasks()):
            sometimes("partitions move at once, as the user asks")
        if run.assignment.planned:
            sometimes("a host that would lose its last partitions keeps them")
    return after


class HostSlot:
    """One host of a session over all its incarnations."""

    def __init__(self, session: Session, index: int) -> None:
        self.session = session
        self.host_id = f"host-{session.session_id}-{index}"
        self.local_dir = session.world.root / session.session_id / self.host_id
        self.process: Process | None = None
        self.replaced: list[Process] = []
        """Processes that were replaced but not killed: they must end themselves."""
        self._moves = 0
        self._starts = 0
        self._has_gone = False
        self.start()

    def end(self) -> None:
        """It owns nothing any more, and is not started again (``spark_bridge.session.state_cluster``)."""
        self._has_gone = True
        for process in (self.process, *self.replaced):
            if process is not None:
                self.session.world.scheduler.kill(process)

    def start(self) -> None:
        """A new incarnation, on the same node, or with an empty disk on another one."""
        if not self.session.is_alive or self._has_gone:
            return
        s = self.session.world.scheduler
        if s.random.random() < 0.3:
            shutil.rmtree(self.local_dir, ignore_errors=True)
        if self.local_dir.exists():
            sometimes("a host begins with the files of its predecessor")
        incarnation = f"{s.random.getrandbits(32):08x}"
        process = self.process = s.process(f"{self.host_id}/{incarnation}")
        process.on_death.append(lambda: s.at(0.3 + s.random.random() * 2, self._restart))
        process.memory["slot"] = self
        restart, self._starts = self._starts, self._starts + 1
        node = f"node{self._moves} of {self.host_id}"
        s.spawn(process, lambda: self._run(process, incarnation, node, restart), "start")

    def _restart(self) -> None:
        if self.process is not None and (not self.process.is_alive or not self.process.on_death):
            self.start()

    def replace(self) -> None:
        """Cut off its node from Ray; the old incarnation keeps running, and tasks may reach it.

        The old one is killed some time later, or its cable is put in again. Ray may have declared its node dead, also
        before there is another incarnation.
        """
        s, old = self.session.world.scheduler, self.process
        if old is None or not old.is_alive:
            return
        s.log("CUT OFF", old.name)
        old.is_cut_off = True
        old.on_death.clear()

        def put_in_again() -> None:
            s.log("CABLE of", old.name, "is in again")
            old.is_cut_off = False

        comes_back = s.random.random() < 0.5
        s.at(2.0 + s.random.random() * 15, put_in_again if comes_back else lambda: s.kill(old))
        if comes_back:
            self.replaced.append(old)
        if s.random.random() < 0.5:
            self.session.cluster.dead_nodes.add(f"node{self._moves} of {self.host_id}")
        self._moves += 1
        self.local_dir = self.local_dir.with_name(f"{self.host_id}-moved{self._moves}")
        s.at(s.random.choice((0.0, 0.0, 20.0)) * s.random.random(), self._restart)

    def _run(self, process: Process, incarnation: str, node: str, restart: int) -> None:
        """What ``spark_bridge.host_actor.StateStoreHost`` does when it is made."""
        world = self.session.world
        s = world.scheduler
        session_id, asked_at = self.session.session_id, query_address(process.name)
        info = HostInfo(self.host_id, incarnation, f"grpc://{process.name}", node, session_id, asked_at, restart)
        conf = StateStoreConf(
            provider=engine.FirstProvider.backend,
            compression="none",
            deltas_per_snapshot=world.constants.deltas_per_snapshot,
            load_threads=world.constants.threads,
            upload_threads=world.constants.threads,
            commit_linger=world.constants.commit_linger,
        )
        made = Host(
            info,
            self.session.cluster.port(is_direct=True),  # type: ignore[arg-type]
            self.local_dir,
            conf=conf,
            open_storage=world.disk.open,  # type: ignore[arg-type]
            clock=world.clock_of(process),
        )
        made.disk.is_nearly_full = self._is_disk_nearly_full  # type: ignore[method-assign]
        made.prepared._is_open = partial(_seen_open, made.prepared._is_open)  # type: ignore[method-assign]
        made.cache.evict = partial(self._evict, made.cache.evict)  # type: ignore[method-assign]
        process.memory["host"] = made
        process.memory["reads"] = HostReads(made, wait_seconds=world.constants.answer_wait_seconds)
        world.addresses[info.address] = world.addresses[info.query_address] = process
        try:
            made.register()
        except STATESTORE_ERRORS as error:
            s.log(self.host_id, "could not register:", str(error))
            s.kill(process)
        process.memory["is_ready"] = True
        s.spawn(process, lambda: self._every(process, 1.0, made.maintenance.do_maintenance), "maintenance")
        self._every(process, world.constants.heartbeat_seconds, lambda: self._beat(process, made))

    def _is_disk_nearly_full(self) -> bool:
        world = self.session.world
        return bool(world.faults.disk_full) and world.scheduler.random.random() < NEARLY_FULL * world.faults.disk_full

    def _evict(self, evict: Callable[..., bool], instance: Instance, **how: bool) -> bool:
        has_changes = bool(instance.acknowledged)
        is_evicted = evict(instance, **how)
        if is_evicted:
            sometimes(f"a partition is evicted, {'after a commit of a running batch' if has_changes else 'unchanged'}")
        return is_evicted

    def _beat(self, process: Process, host: Host) -> None:
        try:
            host.heartbeat()
        finally:
            if host.replaced is not None:
                self.session.world.scheduler.log(process.name, "ends itself:", host.replaced)
                self.session.world.scheduler.kill(process)

    def _every(self, process: Process, seconds: float, call: Callable[[], Any]) -> None:
        s = self.session.world.scheduler
        while True:
            s.sleep(seconds * self.session.world.slowness)
            try:
                call()
            except STATESTORE_ERRORS as error:
                s.log(process.name, "failed:", type(error).__name__, str(error))


class Session:
    """One driver process that has called ``init_spark``: its hosts, its executors, and the queries that it runs."""

    def __init__(self, world: World, cluster: Cluster, session_id: str) -> None:
        self.world = world
        self.cluster = cluster
        self.session_id = session_id
        self.is_wanted = True
        self._queries: dict[str, Task] = {}
        s = world.scheduler
        self.driver = s.process(f"driver-{self.session_id}")
        self.hosts: list[HostSlot] = []
        self.executors = [s.process(f"executor-{self.session_id}-{i}") for i in range(2)]
        self.hosts = [HostSlot(self, i) for i in range(world.num_hosts)]
        self._num_started = world.num_hosts
        self.leaving: list[HostSlot] = []
        self.driver.on_death.append(self._died)
        s.spawn(self.driver, self._place, "placement")

    @property
    def is_alive(self) -> bool:
        """Whether its driver lives."""
        return self.driver.is_alive

    def start(self) -> None:
        """Start all queries, or those again that have ended."""
        for stream in self.world.streams:
            running = self._queries.get(stream.name)
            if running is None or running.is_done:
                self._queries[stream.name] = self.world.scheduler.spawn(
                    self.driver,
                    lambda stream=stream: self.world.drive(self, stream),  # type: ignore[misc]
                    stream.name,
                )

    def scale_out(self) -> None:
        """Executors have come: one more host is started."""
        self.hosts.append(HostSlot(self, self._num_started))
        self._num_started += 1

    def scale_in(self) -> None:
        """A host is to go, unless it is the last one that stays."""
        staying = [slot for slot in self.hosts if slot not in self.leaving]
        if len(staying) > 1:
            slot = self.world.scheduler.random.choice(staying)
            self.world.scheduler.log("LEAVING", slot.host_id)
            self.leaving.append(slot)

    def stay(self) -> None:
        """A host that was to go stays, if there is one."""
        if self.leaving:
            slot = self.leaving.pop(self.world.scheduler.random.randrange(len(self.leaving)))
            self.world.scheduler.log("STAYING", slot.host_id)
            sometimes("a host that was to go stays")

    def rebalance(self) -> None:
        """Have all planned moves made, as ``spark_bridge.rebalance`` does: again and again, as hosts learn."""
        s, port = self.world.scheduler, self.cluster.port()
        for _ in range(15):
            try:
                port.rebalance()
            except STATESTORE_ERRORS as error:
                s.log("rebalancing was not taken:", str(error))
            s.sleep(0.3 * s.random.random())

    def _place(self) -> None:
        """Do what ``spark_bridge.session.state_cluster`` does: tell which hosts are to go, end the idle ones."""
        s, port = self.world.scheduler, self.cluster.port()
        while True:
            s.sleep(self.world.slowness)
            leaving = [slot.host_id for slot in self.leaving]
            try:
                answer = port.place_session(self.session_id, (), leaving)
            except STATESTORE_ERRORS as error:
                s.log("placement of", self.session_id, "was not taken:", str(error))
                continue
            for slot in [slot for slot in self.leaving if slot.host_id in answer]:
                s.log("RELEASED", slot.host_id)
                sometimes("a host that was to go is released")
                self.leaving.remove(slot)
                self.hosts.remove(slot)
                slot.end()

    def _died(self) -> None:
        """Ray ends the actors of a driver that is gone; Spark's executors notice as well."""
        s = self.world.scheduler
        for process in [*self.executors, *(p for h in self.hosts for p in (h.process, *h.replaced))]:
            if process is not None:
                s.at(s.random.random() * 6, lambda process=process: s.kill(process))  # type: ignore[misc]

    def executor(self) -> Process:
        """One that lives; lost ones are replaced."""
        i = self.world.scheduler.random.randrange(len(self.executors))
        if not self.executors[i].is_alive:
            self.executors[i] = self.world.scheduler.process(f"executor-{self.session_id}-{i}")
        return self.executors[i]

    def addresses(self) -> list[str]:
        """Those of the hosts that answer."""
        return [
            f"grpc://{h.process.name}" for h in self.hosts if h.process is not None and h.process.memory.get("is_ready")
        ]

    def tell_hosts(self) -> None:
        """``StateCluster.batch_committed``: the hosts need not wait for their next heartbeat."""
        s = self.world.scheduler
        for slot in self.hosts:
            process = slot.process
            if process is not None and process.memory.get("is_ready"):

                def tell(process: Process = process) -> None:
                    try:
                        self.world.network.call(
                            process,
                            "on_progress",
                            process.memory["host"].heartbeat,
                            10.0,
                            through_ray=True,
                        )
                    except (UnreachableError, *STATESTORE_ERRORS) as error:
                        s.log("on_progress was not taken:", str(error))

                s.spawn(s.current.process, tell, "tell hosts")


class LocalLocks:
    """``flock`` on local directories: held until released, or until the process ends."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[Process, int]] = {}
        self._last = 100

    def lock(self, local_dir: Path) -> int:
        """See ``backends.partition.loading.lock``."""
        local_dir.mkdir(parents=True, exist_ok=True)
        holder = self._held.get(str(local_dir))
        if holder is not None and holder[0].is_alive:
            raise ConcurrentCommitError(f"{local_dir} is open in another provider.")
        self._last += 1
        self._held[str(local_dir)] = (scheduling.active.current.process, self._last)
        return self._last

    def close(self, descriptor: int) -> None:
        """Release it."""
        for path, (_, held) in list(self._held.items()):
            if held == descriptor:
                del self._held[path]
