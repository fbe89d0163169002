"""The faults of a simulated world, until all of them end at once."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation.last_checks import finish
from tests.simulation.sometimes import sometimes

if TYPE_CHECKING:
    from tests.simulation.world import World


class Troubles:
    """Chooses by the seed what goes wrong, and when."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.only: list[Callable[[], None]] = []
        """If not empty, the only faults of the world."""
        self.cut_off_at = -math.inf
        """When a process was cut off last. A replaced host answers from its old state for a while."""
        self.last_at = 0.0
        """When something went wrong last."""
        self._ambush: tuple[str, Callable[[], None]] | None = None

    def run(self) -> None:
        """Let one thing after the other go wrong, until all is well again."""
        s = self._world.scheduler
        r = s.random
        kinds = [
            self.kill_host, self.kill_coordinator, self.kill_driver, self.kill_executor, self.kill_all,
            self.kill_state, self.pause, self.cut_off, self.turn_clock, self.second_driver, self.ask_to_go_back,
            self.unload_all, self.lie_in_wait, self.scale, self.sever,
        ]  # fmt: skip
        if len(self._world.streams) > 1:
            kinds += [self.hang_storage, self.refuse_storage]
        if self._world.is_calm:
            kinds = [self.hang_storage]
        kinds = self.only or kinds
        chosen = [k for k in kinds if r.random() < 0.6] or kinds
        while s.now < self._world.troubled_for:
            s.sleep(r.expovariate(1.0 / self._world.restless))
            self.last_at = s.now
            r.choice(chosen)()
        s.sleep(r.random() * 5)
        self._world.faults.heal()
        self._world.disk.hangs_until.clear()
        self._world.disk.refuses_until.clear()
        self._ambush = None
        self._world.pace = 1.0
        self._world.healed_at = s.now
        s.log("HEALED")
        for session in self._world.sessions[:-1]:
            s.kill(session.driver)
        s.spawn(self._world.outside, lambda: finish(self._world), "finish")

    def _hosts(self) -> list[Any]:
        return [h for x in self._world.sessions for h in x.hosts if h.process is not None and h.process.is_alive]

    def kill_with_a_copy(self) -> None:
        """Kill an owner together with a host that keeps copies of its partitions."""
        by_id = {host.host_id: host for host in self._hosts()}
        pairs = [
            (by_id[owner], by_id[copy])
            for run in self._runs(by_id)
            for owner, copies in run.assignment.current.standbys.items()
            for copy in copies
            if owner in by_id and copy in by_id and run.assignment.current.of_host[owner]
        ]
        if pairs:
            sometimes("the owner and a copy of a partition are lost at once")
            for host in self._world.scheduler.random.choice(pairs):
                self._world.scheduler.kill(host.process)

    def kill_for_long(self) -> None:
        """Kill a host whose partitions have copies, and its machine with it: others must go on."""
        by_id = {host.host_id: host for host in self._hosts()}
        owners = [
            (run, by_id[owner])
            for run in self._runs(by_id)
            for owner, copies in run.assignment.current.standbys.items()
            if owner in by_id and copies and run.assignment.current.of_host[owner]
        ]
        if not owners:
            return
        s = self._world.scheduler
        run, host = s.random.choice(owners)
        copies, tasks = run.assignment.current.standbys[host.host_id], run.assignment.current.of_host[host.host_id]
        process = host.process
        process.on_death.clear()
        s.at(self._world.constants.host_timeout * 2, host._restart)
        s.kill(process)

        def look() -> None:
            current = run.assignment.current
            if any((owner := current.find(*task)) is not None and owner.host_id in copies for task in tasks):
                sometimes("a copy takes over from a lost owner")

        s.at(self._world.constants.host_timeout * 1.5, look)

    @staticmethod
    def _runs(by_id: dict[str, Any]) -> list[Any]:
        """Return the runs that have owners, of the coordinators of these hosts."""
        clusters = {id(host.session.cluster): host.session.cluster for host in by_id.values()}
        return [run for cluster in clusters.values() for run in cluster.runs() if run.assignment.current is not None]

    def kill_host(self) -> None:
        """Kill a host; one that partitions are to move to, if there is such a host."""
        hosts = self._hosts()
        targets = [host for host in hosts if self._is_target(host)]
        if targets:
            sometimes("a host dies while partitions are to move to it")
        if hosts:
            self._world.scheduler.kill(self._world.scheduler.random.choice(targets or hosts).process)

    @staticmethod
    def _is_target(host: Any) -> bool:
        return any(host.host_id in run.assignment.planned.values() for run in host.session.cluster.runs())

    def clean_local_files(self) -> None:
        """Remove the local files of a host's partitions under it, as a job that cleans temporary files does."""
        r, hosts = self._world.scheduler.random, self._hosts()
        engines = sorted(path for host in hosts for path in host.local_dir.rglob("CURRENT"))
        if engines:
            engine = r.choice(engines).parent
            self._world.scheduler.log("CLEANED", engine.relative_to(self._world.root))
            shutil.rmtree(engine)

    def scale(self) -> None:
        """Executors come or go, and hosts with them."""
        session = self._world.sessions[-1]
        if session.is_alive:
            out = len(session.hosts) < 2 or (len(session.hosts) < 5 and self._world.scheduler.random.random() < 0.5)
            session.scale_out() if out else session.scale_in()

    def stay(self) -> None:
        """A host stays that was to go."""
        session = self._world.sessions[-1]
        if session.is_alive:
            session.stay()

    def rebalance(self) -> None:
        """The user has the partitions spread now, perhaps as a host is to go."""
        session = self._world.sessions[-1]
        if session.is_alive:
            if self._world.scheduler.random.random() < 0.5:
                session.scale_in()
            self._world.scheduler.spawn(session.driver, session.rebalance, "rebalance")

    def kill_coordinator(self) -> None:
        cluster = self._world.scheduler.random.choice(self._world.clusters)
        if cluster.coordinator is not None:
            self._world.scheduler.kill(cluster.coordinator)

    def lie_in_wait(self) -> None:
        """Whatever keeps state dies just after the next file of some kind has been written, perhaps with all else."""
        r = self._world.scheduler.random
        kind = r.choice(
            (".changelog", ".changelogs", ".snapshots", "manifests/", "commits/", "offsets/", "epochs/", ".snapshot")
        )
        self._ambush = (kind, r.choice((self.kill_state, self.kill_state, self.kill_all, self.ask_to_go_back)))

    def kill_driver(self) -> None:
        self._world.scheduler.kill(self._world.sessions[-1].driver)

    def kill_executor(self) -> None:
        self._world.scheduler.kill(self._world.sessions[-1].executor())

    def kill_state(self) -> None:
        """Coordinator and hosts, together."""
        for host in self._hosts():
            self._world.scheduler.kill(host.process)
        for cluster in self._world.clusters:
            if cluster.coordinator is not None:
                self._world.scheduler.kill(cluster.coordinator)

    def kill_all(self) -> None:
        self.kill_state()
        for session in self._world.sessions:
            for executor in session.executors:
                self._world.scheduler.kill(executor)
            self._world.scheduler.kill(session.driver)

    def pause(self) -> None:
        s = self._world.scheduler
        processes = [h.process for h in self._hosts()]
        processes += [
            c.coordinator for c in self._world.clusters if c.coordinator is not None and c.coordinator.is_alive
        ]
        processes += [x.driver for x in self._world.sessions if x.is_alive]
        s.pause(s.random.choice(processes), s.random.choice((0.5, 3.0, 15.0, 40.0))) if processes else None

    def hang_storage(self) -> None:
        """All storage of the second query stands still."""
        s, place = self._world.scheduler, self._world.streams[1].checkpoint
        self._world.disk.hangs_until[place] = s.now + s.random.choice((5.0, 30.0, 90.0))
        s.log("STORAGE of", self._world.streams[1].name, "hangs until", self._world.disk.hangs_until[place])

    def refuse_storage(self) -> None:
        """All storage of the second query refuses, while a new coordinator begins: hosts report it again and again."""
        s, place = self._world.scheduler, self._world.streams[1].checkpoint
        self._world.disk.refuses_until[place] = s.now + s.random.choice((5.0, 30.0))
        s.log("STORAGE of", self._world.streams[1].name, "refuses until", self._world.disk.refuses_until[place])
        self.kill_coordinator()

    def cut_off(self) -> None:
        self.cut_off_at = self._world.scheduler.now
        r = self._world.scheduler.random
        if r.random() < 0.5 or not self._hosts():
            r.choice(self._world.clusters).replace_coordinator()
        else:
            r.choice(self._hosts()).replace()

    def sever(self) -> None:
        """No message of a host arrives for a while, though clients still reach the host, and in some cases tasks."""
        hosts = self._hosts()
        if hosts:
            s, host = self._world.scheduler, self._world.scheduler.random.choice(hosts)
            self.cut_off_at = s.now  # no message names the forgotten keys to it
            host.process.severed_until = s.now + s.random.choice((3.0, 6.0, 15.0))
            if s.random.random() < 0.7:
                host.process.memory["hidden_until"] = host.process.severed_until
            s.log("SEVERED until", host.process.severed_until, host.process.name)

    def turn_clock(self) -> None:
        s = self._world.scheduler
        process = s.random.choice(self._world.clusters).coordinator
        if process is not None:
            # Leases go by the wall clock: turned back by more, they would last longer by as much.
            process.clock_offset += s.random.choice((-5.0, 5.0, 100.0))
            s.log("CLOCK of", process.name, "turned to", process.clock_offset)

    def second_driver(self) -> None:
        if sum(x.is_alive for x in self._world.sessions) < 3:
            self._world.start_session()

    def ask_to_go_back(self) -> None:
        self._world.going_back = self._world.has_gone_back = True
        for session in self._world.sessions:
            self._world.scheduler.kill(session.driver)

    def unload_all(self) -> None:
        """The user stops the query, and starts it again."""
        self._world.sessions[-1].is_wanted = False
        session = self._world.sessions[-1]

        def again() -> None:
            if self._world.is_over:
                return
            session.is_wanted = True
            if session is self._world.sessions[-1] and session.is_alive:
                session.start()

        self._world.scheduler.at(20.0, again)

    def file_written(self, path: str) -> None:
        """Spring the ambush that waits for a file of this kind."""
        if self._ambush is not None and self._ambush[0] in path:
            self._world.scheduler.at(self._world.scheduler.random.random() * 0.02, self._ambush[1])
            self._ambush = None
