"""One run: a world made from a seed, what goes wrong in it, and what must hold afterwards."""

from __future__ import annotations

import logging
import shutil
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from backends.conf import StateStoreConf
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats.changelog_group import GROUPS_DIRECTORY
from backends.formats.file_names import partition_directory, version_in
from backends.formats.sealed import unseal
from backends.partition.partition_state import open_partition
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.durable.fencing import FENCE
from coordinator_actor.durable.rewritten_files import REWRITTEN, RewrittenFiles
from coordinator_actor.exceptions import IncompleteBatchError, InvalidRequestError
from coordinator_actor.messages import Acknowledged, HostInfo, HostReport
from coordinator_actor.query.files.files_in_use import BUSY_SECONDS
from spark_bridge.exceptions import PartitionMismatchError
from spark_bridge.host.maintenance import INLINE_FILES_BYTES
from tests.simulation import engine, model, threads
from tests.simulation import scheduler as scheduling
from tests.simulation.cluster import Cluster, LocalLocks, Session
from tests.simulation.driver import ANSWERED_ON, KEEP, HostClient, PerProcess, Query, QueryFailedError
from tests.simulation.forgetting import Forgetful
from tests.simulation.model import Model
from tests.simulation.network import Network
from tests.simulation.readers import LookingUpQuery, QueryClient
from tests.simulation.scheduler import Process, Scheduler, Violation
from tests.simulation.storage import Disk, Faults
from tests.simulation.stream import Stream

NEVER = (MissingFileError, DamagedFileError, IncompleteBatchError, InvalidRequestError, PartitionMismatchError)
"""Errors that nothing which goes wrong here excuses, for the run that is the newest."""
BATCHES_AFTER = 10
PATIENCE = 400.0
"""Virtual seconds within which a healthy world must have done ``BATCHES_AFTER`` batches."""
CALM_BATCH = 0.5
"""Virtual seconds that a batch may take where nothing ails its own query: three times what was seen."""
SETTLED_BATCHES = 3
"""In a calm world each partition has been opened by its owner after so many batches."""
SETTLED_AFTER = 90.0
"""Virtual seconds of health after which no task fails any more."""


def is_calm(seed: int) -> bool:
    """Return whether all that goes wrong in this seed's world is that the storage of one of two queries hangs."""
    return seed % 10 == 9


@dataclass(frozen=True)
class Result:
    """What came of a run. ``trace`` is a digest of its events, if it was asked for."""

    seed: int
    steps: int
    batches: int
    seconds: float
    failure: BaseException | None
    last_events: list[str]
    trace: int

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.steps} steps, {self.batches} batches, {self.seconds:.0f} virtual seconds"
        if self.failure is None:
            return head
        trace = [] if isinstance(self.failure, Violation) else traceback.format_exception(self.failure)
        return "\n".join(
            (
                *self.last_events,
                *trace,
                f"{head}\nFAILED at step {self.steps}: {type(self.failure).__name__}: {self.failure}",
                f"Run it again with: python -m tests.simulation --seed {self.seed}",
            )
        )


class World:
    """Everything there is in a run."""

    def __init__(self, seed: int, root: Path, *, traced: bool = False) -> None:
        self.scheduler = s = Scheduler(seed, traced=traced)
        scheduling.active = s
        r = s.random
        self.root = root
        self.faults = Faults(
            storage_error=r.choice((0.0, 0.002, 0.02)),
            storage_slow=r.choice((0.0, 0.01)),
            message_lost=r.choice((0.0, 0.002, 0.01)),
            message_late=r.choice((0.0, 0.005, 0.02)),
            message_twice=r.choice((0.0, 0.02)),
            registration_slow=r.choice((0.0, 0.5)),
        )
        self.num_hosts = r.randint(1, 3)
        self.rescaled = r.choice((0.0, 0.3))
        self.streams = [
            Stream("q", Model(("a", "b")[: r.choice((1, 1, 2))]), r.randint(1, 3), engine.FirstProvider.backend)
        ]
        self.is_calm = is_calm(seed)
        if self.is_calm or r.random() < 0.3:
            self.streams.append(Stream("neighbour", Model(("a",)), r.randint(1, 3), engine.FirstProvider.backend))
        if self.is_calm:
            self.faults.heal()
            self.streams[0].most_seconds = CALM_BATCH
        self.pace = r.choice((0.05, 0.5, 2.0))
        self.slowness = 1.0  # times as long between heartbeats, maintenance and queries
        self.repeated = r.choice((0.0, 0.15, 0.6))
        self.speculated = r.choice((0.0, 0.2))
        self.restless = 3.0 if self.is_calm else r.choice((1.0, 3.0, 10.0))
        self.troubled_for = r.choice((20.0, 40.0, 80.0))
        self.parted = 0.15  # the probability that a driver which starts again does so in a second cluster
        rows = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())]))
        self.schema = OperatorSchema.of_rows(rows).to_json()
        self.clock_offset = 1000.0
        self.disk = Disk(self.faults, watch=self._watch)
        self.network = Network(self.faults, self._acknowledged)
        self.addresses: dict[str, Process] = {}
        self.attempts = 0
        self.healed_at: float | None = None
        self.clusters: list[Cluster] = []
        self.sessions: list[Session] = []
        self.num_clients = 1
        self.forgetful = Forgetful(self) if seed % 4 == 3 and not self.is_calm else None
        self.only: list[Callable[[], None]] = []
        """What goes wrong, if it is this alone."""
        self._going_back = False
        self.has_gone_back = False
        self._is_over = False
        self._ambush: tuple[str, Callable[[], None]] | None = None
        self.outside = s.process("world")

    def clock_of(self, process: Process) -> Callable[[], float]:
        """The clock of a process, which may be wrong."""
        s = self.scheduler
        return lambda: s.now + process.clock_offset

    # -- what happens --------------------------------------------------------------------------

    def begin(self) -> None:
        """The first cluster and driver, and whatever troubles them."""
        s = self.scheduler
        self.clusters.append(Cluster(self, "cluster0"))
        self.start_session()
        for _ in range(self.num_clients):
            s.spawn(self.outside, QueryClient(self).run, "query client")
        if not self.is_calm:  # a version that a batch looks up again may have to be loaded
            s.spawn(self.outside, LookingUpQuery(self).run, "a query that looks up")
        if self.forgetful is not None:
            s.spawn(self.outside, self.forgetful.run, "somebody forgetful")
        s.spawn(self.outside, self._trouble, "trouble")

    def start_session(self) -> Session:
        """A driver, in one of the clusters; it runs the query from now on."""
        s = self.scheduler
        if len(self.clusters) < 2 and s.random.random() < self.parted and self.sessions:
            self.clusters.append(Cluster(self, "cluster1"))
        session = Session(self, s.random.choice(self.clusters), len(self.sessions))
        self.sessions.append(session)
        s.log("STARTED", session.driver.name, "on", session.cluster.name)
        session.driver.on_death.append(lambda: s.at(0.5 + s.random.random() * 5, self._start_again))
        session.start()
        return session

    def _start_again(self) -> None:
        if self.sessions[-1].is_alive:
            return
        if self._going_back and not any(x.is_alive for x in self.sessions):
            self._go_back()
        self.start_session()

    def drive(self, session: Session, stream: Stream) -> None:
        """One run of a query after the other."""
        s = self.scheduler
        while session is self.sessions[-1] and session.is_wanted:
            query = Query(session, stream, self._new_run(stream))
            s.log("QUERY starts", query.run_id)
            try:
                query.run()
            except QueryFailedError as error:
                s.log("QUERY", query.run_id, "failed:", str(error))
            s.sleep(0.1 + s.random.random() * 2)

    def _new_run(self, stream: Stream) -> str:
        """Now and then with another number of partitions, or another backend."""
        r = self.scheduler.random
        if self.rescaled and r.random() < self.rescaled:
            stream.num_partitions = r.randint(1, 5)
            stream.backend = r.choice((engine.FirstProvider.backend, engine.SecondProvider.backend))
        stream.num_runs += 1
        run_id = f"run{stream.num_runs}-{stream.name}"
        stream.layout_of_run[run_id] = (stream.num_partitions, stream.backend)
        return run_id

    def _stream_of(self, run_id: str) -> Stream:
        return next(stream for stream in self.streams if run_id in stream.layout_of_run)

    def _go_back(self) -> None:
        """The user removes Spark's last batches of one query, as far as is retained."""
        self._going_back = False
        stream = self.scheduler.random.choice(self.streams)
        offsets = self.disk.directory(stream.checkpoint, "offsets")
        commits = self.disk.directory(stream.checkpoint, "commits")
        begun = sorted(int(p.split("/")[1]) for p in offsets)
        if len(begun) < 3:
            return
        done = max((int(p.split("/")[1]) for p in commits), default=-1)
        lowest = max(begun[0] + 1, done + 1 - KEEP + 1)
        candidates = [n for n in begun if n >= lowest]
        if not candidates:
            return
        first = self.scheduler.random.choice(candidates)
        for n in [n for n in begun if n >= first]:
            offsets.pop(f"offsets/{n}", None)
        for path in [p for p in commits if int(p.split("/")[1]) >= first]:
            del commits[path]
        # Who looks for these commits of a run that is over finds none of them.
        stream.committed = {run_id: min(version, first) for run_id, version in stream.committed.items()}
        self.scheduler.log("USER goes back to batch", first, "of", stream.name)

    def _trouble(self) -> None:
        s = self.scheduler
        r = s.random
        kinds = [
            self._kill_host, self._kill_coordinator, self._kill_driver, self._kill_executor, self._kill_all,
            self._kill_state, self._pause, self._cut_off, self._turn_clock, self._second_driver, self._ask_to_go_back,
            self._unload_all, self._lie_in_wait, self._scale,
        ]  # fmt: skip
        if len(self.streams) > 1:
            kinds.append(self._hang_storage)
        if self.is_calm:
            kinds = [self._hang_storage]
        kinds = self.only or kinds
        chosen = [k for k in kinds if r.random() < 0.6] or kinds
        while s.now < self.troubled_for:
            s.sleep(r.expovariate(1.0 / self.restless))
            r.choice(chosen)()
        s.sleep(r.random() * 5)
        self.faults.heal()
        self.disk.hangs_until.clear()
        self._ambush = None
        self.pace = 1.0
        self.healed_at = s.now
        s.log("HEALED")
        for session in self.sessions[:-1]:
            s.kill(session.driver)
        s.spawn(self.outside, self._finish, "finish")

    def _hosts(self) -> list[Any]:
        return [h for x in self.sessions for h in x.hosts if h.process is not None and h.process.is_alive]

    def _kill_host(self) -> None:
        if hosts := self._hosts():
            self.scheduler.kill(self.scheduler.random.choice(hosts).process)

    def _scale(self) -> None:
        """Executors come or go, and hosts with them."""
        session = self.sessions[-1]
        if session.is_alive:
            out = len(session.hosts) < 2 or (len(session.hosts) < 5 and self.scheduler.random.random() < 0.5)
            session.scale_out() if out else session.scale_in()

    def _kill_coordinator(self) -> None:
        cluster = self.scheduler.random.choice(self.clusters)
        if cluster.coordinator is not None:
            self.scheduler.kill(cluster.coordinator)

    def _lie_in_wait(self) -> None:
        """Whatever keeps state dies just after the next file of some kind has been written, perhaps with all else."""
        r = self.scheduler.random
        kind = r.choice(
            (".changelog", ".changelogs", ".snapshots", "manifests/", "commits/", "offsets/", "epochs/", ".snapshot")
        )
        self._ambush = (kind, r.choice((self._kill_state, self._kill_state, self._kill_all, self._ask_to_go_back)))

    def _kill_driver(self) -> None:
        self.scheduler.kill(self.sessions[-1].driver)

    def _kill_executor(self) -> None:
        self.scheduler.kill(self.sessions[-1].executor())

    def _kill_state(self) -> None:
        """Coordinator and hosts, together."""
        for host in self._hosts():
            self.scheduler.kill(host.process)
        for cluster in self.clusters:
            if cluster.coordinator is not None:
                self.scheduler.kill(cluster.coordinator)

    def _kill_all(self) -> None:
        self._kill_state()
        for session in self.sessions:
            for executor in session.executors:
                self.scheduler.kill(executor)
            self.scheduler.kill(session.driver)

    def _pause(self) -> None:
        s = self.scheduler
        processes = [h.process for h in self._hosts()]
        processes += [c.coordinator for c in self.clusters if c.coordinator is not None and c.coordinator.is_alive]
        processes += [x.driver for x in self.sessions if x.is_alive]
        s.pause(s.random.choice(processes), s.random.choice((0.5, 3.0, 15.0, 40.0))) if processes else None

    def _hang_storage(self) -> None:
        """All storage of the second query stands still."""
        s, place = self.scheduler, self.streams[1].checkpoint
        self.disk.hangs_until[place] = s.now + s.random.choice((5.0, 30.0, 90.0))
        s.log("STORAGE of", self.streams[1].name, "hangs until", self.disk.hangs_until[place])

    def _cut_off(self) -> None:
        r = self.scheduler.random
        if r.random() < 0.5 or not self._hosts():
            r.choice(self.clusters).replace_coordinator()
        else:
            r.choice(self._hosts()).replace()

    def _turn_clock(self) -> None:
        s = self.scheduler
        process = s.random.choice(self.clusters).coordinator
        if process is not None:
            # Leases go by the wall clock: turned back by more, they would last longer by as much.
            process.clock_offset += s.random.choice((-5.0, 5.0, 100.0))
            s.log("CLOCK of", process.name, "turned to", process.clock_offset)

    def _second_driver(self) -> None:
        if sum(x.is_alive for x in self.sessions) < 3:
            self.start_session()

    def _ask_to_go_back(self) -> None:
        self._going_back = self.has_gone_back = True
        for session in self.sessions:
            self.scheduler.kill(session.driver)

    def _unload_all(self) -> None:
        """The user stops the query, and starts it again."""
        self.sessions[-1].is_wanted = False
        session = self.sessions[-1]

        def again() -> None:
            if self._is_over:
                return
            session.is_wanted = True
            if session is self.sessions[-1] and session.is_alive:
                session.start()

        self.scheduler.at(20.0, again)

    # -- what must hold ------------------------------------------------------------------------

    def _watch(self, verb: str, location: str, path: str) -> None:
        """A file has come or gone, or is read; called at that moment."""
        if verb == "read" and self.is_calm and not self._is_over:
            self._check_calm_read(location, path)
        if verb == "put" and self._ambush is not None and self._ambush[0] in path:
            self.scheduler.at(self.scheduler.random.random() * 0.02, self._ambush[1])
            self._ambush = None
        if verb != "put":
            return
        stream = next(x for x in self.streams if location in (x.checkpoint, x.state))
        if location == stream.state:
            if path.startswith("manifests/"):
                data = self.disk.directory(location, path)[path]
                if data == FENCE:
                    stream.model.closed.add(int(path.split("/")[1].split("-", maxsplit=1)[0]))
                    return
                files = {
                    **self.disk.directory(location, "operators"),
                    **self.disk.directory(location, GROUPS_DIRECTORY),
                }
                stream.model.manifest_written(data, files)
            elif path.startswith(f"{REWRITTEN}/"):
                record = unseal(self.disk.directory(location, path)[path], RewrittenFiles, path)
                stream.model.records[path] = record
            elif path.startswith("epochs/"):
                stream.model.epoch = max(stream.model.epoch, int(path.split("/")[1].split(".", maxsplit=1)[0]))
        elif path.startswith("commits/"):
            run_id, token = self.disk.directory(location, path)[path].decode().split()
            plan = stream.model.plans[token]
            files = self.disk.all_files(stream.state)
            stream.model.check_durable(plan, run_id, files, *stream.layout_of_run[run_id])
            stream.model.spark_commits(plan)
            stream.committed[run_id] = plan.batch + 1

    def _check_calm_read(self, location: str, path: str) -> None:
        """Check that hosts which go on holding a query read no state of it: each read is a request that is paid for."""
        stream = self.streams[0]
        is_state = location == stream.state and path.endswith((".changelog", ".changelogs", ".sst"))
        # Of a request that fails nobody knows what it has done, so the state is loaded.
        if is_state and stream.batches >= SETTLED_BATCHES and not self.faults.storage_error:
            raise Violation(f"{path} of {stream.name} is read behind batch {stream.batches}, though nothing has moved.")

    def _acknowledged(self, coordinator: str, messages: Any, answers: Any) -> None:
        """A coordinator answers acknowledgements."""
        for message, answer in zip(messages, answers, strict=True):
            if isinstance(answer, Acknowledged):
                stream = self._stream_of(message.run_id)
                num_tasks = stream.layout_of_run[message.run_id][0] * len(stream.model.operators)
                stream.model.check_acknowledged(coordinator, message, answer.manifest_id, num_tasks)

    def after_maintenance(self) -> None:
        """Files may have been removed."""
        for stream in self.streams:
            stream.model.check_openable(self.disk.all_files(stream.state))

    def judge(self, error: BaseException, run_id: str, what: str) -> None:
        """Something failed: may it?"""
        s = self.scheduler
        s.log(what, "of", run_id, "failed:", type(error).__name__, str(error))
        if isinstance(error, NEVER) and run_id == self._stream_of(run_id).newest_run:
            raise Violation(f"{what} of {run_id} failed, which must not happen: {type(error).__name__}: {error}")
        settled = self.healed_at is not None and s.now > self.healed_at + SETTLED_AFTER
        if settled and self.sessions[-1].is_wanted:
            raise Violation(f"{what} of {run_id} failed in a healthy world: {type(error).__name__}: {error}")

    def judge_refusal(self, refusal: str, run_id: str) -> None:
        """A run was refused: may it be?"""
        if "replaced by a newer one" not in refusal:
            raise Violation(f"{run_id} was refused: {refusal}")

    def _finish(self) -> None:
        """Nothing goes wrong any more: all queries must go on; then they are stopped and all is looked through."""
        s = self.scheduler
        deadline = s.now + PATIENCE
        for stream, goal in [(stream, stream.batches + BATCHES_AFTER) for stream in self.streams]:
            while stream.batches < goal:
                if s.now > deadline:
                    raise Violation(
                        f"In {PATIENCE:.0f} s without faults only {BATCHES_AFTER - goal + stream.batches} of "
                        f"{BATCHES_AFTER} batches of {stream.name} were done."
                    )
                s.sleep(1.0)
        s.sleep(5.0)
        session = self.sessions[-1]
        # A coordinator that was restarted removes nothing before loads of its predecessor's time are surely over.
        patience = s.now + BUSY_SECONDS + PATIENCE
        for stream in self.streams:
            while (litter := self._litter(stream)) is not None:
                # What is waited for is that time passes: steps cost, virtual seconds do not.
                self.pace, self.slowness = 60.0, 4.0
                if s.now > patience:
                    raise Violation(f"After {BUSY_SECONDS + PATIENCE:.0f} s without faults: {litter}")
                s.sleep(5.0)
        patience = s.now + PATIENCE
        while session.leaving:
            self.pace, self.slowness = 60.0, 4.0
            if s.now > patience:
                raise Violation(f"{[slot.host_id for slot in session.leaving]} still own partitions.")
            s.sleep(1.0)
        self._is_over = True
        session.is_wanted = False
        s.sleep(60.0 + ANSWERED_ON)  # a query ends behind its batch, and may be answered on
        for slot in session.hosts:
            assert slot.process is not None
            host = slot.process.memory["host"]
            for replaced in slot.replaced:
                if replaced.is_alive:
                    raise Violation(f"{replaced.name} still runs, though {slot.process.name} has taken its place.")
            if host.held.instances:
                raise Violation(f"{slot.host_id} still holds {sorted(host.held.instances)} after the query has ended.")
        for stream in self.streams:
            verifier = s.spawn(s.process("verifier"), lambda stream=stream: self._verify(stream), "verify")  # type: ignore[misc]
            s.join(verifier)
        self.after_maintenance()
        s.stop()

    def _litter(self, stream: Stream) -> str | None:
        """What is still there of a query though it is not kept; None if that is within bounds."""
        head = stream.model.head()
        assert head is not None
        files = self.disk.all_files(stream.state)
        if head.version - head.oldest > 4 * KEEP + 8:
            return f"Version {head.version} still keeps version {head.oldest}."
        num_manifests = sum(p.startswith("manifests/") and data != FENCE for p, data in files.items())
        # Snapshots share their .sst files with later ones.
        logs = [p for p in files if p.startswith(("operators/", f"{GROUPS_DIRECTORY}/")) and not p.endswith(".sst")]
        old = [p for p in logs if version_in(p) < head.oldest - 4 * KEEP]
        if len(old) > 3 * stream.num_partitions * len(stream.model.operators) or num_manifests > 6 * KEEP + 40:
            return f"{num_manifests} manifests, and {len(old)} files of versions long not kept: {old[:5]}."
        return None

    def _verify(self, stream: Stream) -> None:
        """Open every version of a query that is kept, from storage alone."""
        s = self.scheduler
        process = s.current.process
        coordinator = Coordinator(self.clock_of(process), self.disk.open)
        session = self.sessions[-1]
        coordinator.register_host(HostInfo("v", "v", "grpc://v", "node", session.session_id), HostReport())
        stream.layout_of_run["verify"] = (stream.num_partitions, stream.backend)
        registration = Query(session, stream, "verify").registration
        answer = coordinator.register_query(registration)
        if answer.refusal is not None:
            raise Violation(f"The query cannot be started again: {answer.refusal}")
        run = coordinator.registries.runs.by_id["verify"]
        commits = self.disk.directory(stream.checkpoint, "commits")
        last = max(int(p.split("/")[1]) for p in commits)
        if run.versions.completed != last + 1:
            raise Violation(
                f"Spark has committed batch {last}, and version {run.versions.completed} is the last completed."
            )
        token = self.disk.directory(stream.checkpoint, "offsets")[f"offsets/{last}"].decode()
        plan = stream.model.plans[token]
        for version in range(run.versions.completed, max(run.versions.oldest, 1) - 1, -1):
            for operator in stream.model.operators:
                for partition in range(stream.num_partitions):
                    self._verify_one(stream, run, plan, version, operator, partition)
            assert plan is not None
            plan = plan.parent  # type: ignore[assignment]

    def _verify_one(
        self, stream: Stream, run: Any, plan: model.Plan, version: int, operator: str, partition: int
    ) -> None:
        n = stream.num_partitions
        conf = StateStoreConf(provider=stream.backend, compression="none")
        layout = partition_directory(operator, n, partition)
        local = self.root / "verify" / f"{stream.name}-{version}-{operator}-{partition}"
        state = open_partition(local, self.disk.open(stream.state), layout, conf)  # type: ignore[arg-type]
        state.load(run.versions.lineage(operator, partition, version))
        keys = [k for k in model.KEYS if model.partition_of(k, n) == partition]
        contents = state.reads.get_many(model.to_array(keys)).to_pylist()
        stream.model.check_attempts(run.versions.chain[version].id, operator, keys, contents)
        values = [model.value_in(c) for c in contents]
        expected = [plan.values.get((operator, k)) for k in keys]
        if values != expected:
            raise Violation(f"Version {version} of {operator}/{partition} holds {values}, and should hold {expected}.")
        state.destroy()


@contextmanager
def _quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run(
    seed: int,
    *,
    max_steps: int | None = None,
    traced: bool = False,
    prepare: Callable[[World], None] = lambda world: None,
) -> Result:
    """Run one seed to its end, or for so many steps. ``prepare`` changes the world before anything happens in it."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="simulation-", dir=memory if memory.is_dir() else None))
    locks = LocalLocks()
    replacements = {
        ("coordinator_actor.durable.manifest_folds", "FOLDED"): 3,
        ("coordinator_actor.durable.manifests", "FEW"): 0,
        ("coordinator_actor.query.files.known_files", "LISTED_EVERY"): 1 + seed % 3,
        ("backends.partition.local_directory", "lock"): locks.lock,
        ("backends.partition.local_directory", "os"): types.SimpleNamespace(close=locks.close),
        ("backends.partition.background", "_pool"): threads.Background(),
        ("spark_bridge.task.task_store", "_owners"): PerProcess(),
        # In half of the worlds, snapshots share files with earlier ones.
        ("spark_bridge.host.maintenance", "INLINE_FILES_BYTES"): seed % 2 * INLINE_FILES_BYTES,
        ("spark_bridge.task.task_store", "forget_client"): lambda address, token: None,
    }
    try:
        with _quiet(), threads.installed(replacements):
            world = World(seed, root, traced=traced)
            prepare(world)
            from spark_bridge.task import endpoints
            from spark_bridge.task import task_store as task_client

            real_client, real_files = task_client.client_for, endpoints.read_host_files
            task_client.client_for = lambda address, token, tls=None: HostClient(world, address)  # type: ignore[assignment,return-value]
            endpoints.read_host_files = lambda directory: _host_files(world, str(directory))
            try:
                world.scheduler.spawn(world.outside, world.begin, "begin")
                world.scheduler.run(max_steps)
                failure, steps = world.scheduler.failure, world.scheduler.steps
                now = world.scheduler.now
                events = [_in_words(e) for e in list(world.scheduler.events)[-50:]]
                world.scheduler.close()
            finally:
                task_client.client_for, endpoints.read_host_files = real_client, real_files
    finally:
        engine.forget_all()
        shutil.rmtree(root, ignore_errors=True)
    return Result(seed, steps, sum(x.batches for x in world.streams), now, failure, events, world.scheduler.trace)


def _host_files(world: World, session_id: str) -> list[Any]:
    session = next(x for x in world.sessions if x.session_id == session_id)
    return [types.SimpleNamespace(address=a, token="token") for a in session.addresses()]


def _in_words(event: tuple[Any, ...]) -> str:
    step, now, *words = event
    return f"{step:>7} {now:9.3f}s  {' '.join(f'{w:.1f}' if isinstance(w, float) else str(w) for w in words)}"
