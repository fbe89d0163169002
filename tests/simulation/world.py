"""One run: a world made from a seed, its faults, and the rules that must hold afterwards."""

from __future__ import annotations

import json
import logging
import random
import shutil
import tempfile
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats.changelog import GROUPS_DIRECTORY
from backends.formats.manifest import unseal
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.durable.fencing import FENCE
from coordinator_actor.durable.manifests import REWRITTEN, RewrittenFiles
from coordinator_actor.durable.spark_commits import METADATA
from coordinator_actor.exceptions import IncompleteBatchError, InvalidRequestError
from coordinator_actor.forgetting import HOLD_SECONDS, ForgetRequest
from coordinator_actor.messages import Acknowledged
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.run.holds import BUSY_SECONDS, TOLD_SECONDS
from spark_bridge.exceptions import PartitionMismatchError
from spark_bridge.host.commits import COMMIT_GROUP_BYTES, LARGE_BYTES
from spark_bridge.host.hand_overs import WANTED_SECONDS
from spark_bridge.host.maintenance import INLINE_FILES_BYTES, TOGETHER_SECONDS
from spark_bridge.host.partition_loader import ABANDONED_SECONDS, SHARED_LOAD_SECONDS, TASK_ANSWER_SECONDS
from spark_bridge.host.prepared_versions import QUICK_SECONDS
from spark_bridge.host.registration import GRANT_SECONDS
from spark_bridge.queryable.reads.answer_version import ASK_COORDINATOR_SECONDS, MAX_WAIT_SECONDS
from spark_bridge.queryable.reads.operator_plan import DIRECTORY_SECONDS
from spark_bridge.state_data.checkpoint_client import StoredReads
from tests.simulation import engine, threads
from tests.simulation import scheduler as scheduling
from tests.simulation.cluster import Cluster, LocalLocks, Session, assign_owners_observed
from tests.simulation.driver import HostClient, PerProcess, Query, QueryFailedError
from tests.simulation.model import SCHEMA, Model, Stream
from tests.simulation.network import Network
from tests.simulation.outsiders import Follower, Forgetter, Outsider, Saver, StorageReader
from tests.simulation.readers import LookingUpJobs, LookingUpQuery, QueryClient
from tests.simulation.scheduler import Process, Scheduler, Violation
from tests.simulation.sometimes import sometimes
from tests.simulation.storage import Disk, Faults
from tests.simulation.troubles import Troubles

NEVER = (MissingFileError, DamagedFileError, IncompleteBatchError, InvalidRequestError, PartitionMismatchError)
"""Errors that nothing which goes wrong here excuses, for the run that is the newest."""
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
class Constants:
    """Settings and limits of the product that a world may draw at random."""

    hold_seconds: float = HOLD_SECONDS
    driver_timeout: float = 30.0
    commit_linger: float = 0.4
    deltas_per_snapshot: int = 3
    group_bytes: int = COMMIT_GROUP_BYTES
    large_bytes: int = LARGE_BYTES
    heartbeat_seconds: float = 0.5
    host_timeout: float = 10.0
    silent_timeout: float = CoordinatorConf.silent_timeout
    report_timeout: float = CoordinatorConf.report_timeout
    recovery_timeout: float = 20.0
    maintenance_interval: float = 2.0
    threads: int = 2
    """Of loads, and of uploads."""
    busy_seconds: float = BUSY_SECONDS
    """The lease of a load or an upload."""
    told_seconds: float = TOLD_SECONDS
    grant_seconds: float = GRANT_SECONDS
    directory_seconds: float = DIRECTORY_SECONDS
    """The age up to which a host answers where a partition is: its answer may be wrong by then."""
    shared_load_seconds: float = SHARED_LOAD_SECONDS
    task_answer_seconds: float = TASK_ANSWER_SECONDS
    abandoned_seconds: float = ABANDONED_SECONDS
    wanted_seconds: float = WANTED_SECONDS
    answer_wait_seconds: float = MAX_WAIT_SECONDS
    ask_coordinator_seconds: float = ASK_COORDINATOR_SECONDS
    together_seconds: float = TOGETHER_SECONDS
    quick_seconds: float = QUICK_SECONDS

    @staticmethod
    def drawn(draw: random.Random) -> Constants:
        """Draw each of them; a changelog of the simulation has some hundred bytes.

        A lease lasts for three renewals at least, and hosts learn of an exchange for longer than one of their leases.
        """
        first = Constants(
            hold_seconds=draw.choice((5.0, 10.0, HOLD_SECONDS)),
            driver_timeout=draw.choice((12.0, 30.0, 60.0)),
            commit_linger=draw.choice((0.0, 0.05, 0.4, 1.0)),
            deltas_per_snapshot=draw.choice((1, 2, 3, 8)),
            group_bytes=draw.choice((1, 1000, COMMIT_GROUP_BYTES)),
            large_bytes=draw.choice((300, LARGE_BYTES)),
        )
        host_timeout = draw.choice((3.0, 10.0, 25.0))
        return replace(
            first,
            host_timeout=host_timeout,
            silent_timeout=draw.choice((2.5, 4.0, 12.0)),
            heartbeat_seconds=draw.choice((0.2, 0.5, host_timeout / 4)),
            report_timeout=draw.choice((2.0, 5.0, 10.0)),
            recovery_timeout=draw.choice((10.0, 20.0, 60.0)),
            maintenance_interval=draw.choice((0.5, 2.0, 10.0)),
            threads=draw.choice((1, 2, 4)),
            busy_seconds=draw.choice((30.0, 120.0, BUSY_SECONDS)),
            told_seconds=draw.choice((1.5 * host_timeout, TOLD_SECONDS)),
            grant_seconds=draw.choice((0.0, 1.0, 5.0)),
            directory_seconds=draw.choice((0.0, 0.5, 5.0)),
            shared_load_seconds=draw.choice((0.5, 10.0)),
            task_answer_seconds=draw.choice((0.1, 2.0, 10.0)),
            abandoned_seconds=draw.choice((15.0, 60.0)),
            wanted_seconds=draw.choice((2.0, 10.0)),
            answer_wait_seconds=draw.choice((0.2, 2.0, 10.0)),
            ask_coordinator_seconds=draw.choice((0.1, 1.0, 5.0)),
            together_seconds=draw.choice((0.5, 10.0)),
            quick_seconds=draw.choice((0.0, 0.003, 1.0)),
        )

    def replacements(self) -> dict[tuple[str, str], Any]:
        """Return those that no argument sets, by module and name."""
        return {
            ("coordinator_actor.forgetting", "HOLD_SECONDS"): self.hold_seconds,
            ("coordinator_actor.forgetting", "HOLD_RENEW_SECONDS"): self.hold_seconds / 4,
            ("coordinator_actor.run.holds", "BUSY_SECONDS"): self.busy_seconds,
            ("spark_bridge.host.running_loads", "FILES_RENEW_SECONDS"): self.busy_seconds / 3,
            ("coordinator_actor.run.holds", "TOLD_SECONDS"): self.told_seconds,
            ("spark_bridge.host.registration", "GRANT_SECONDS"): self.grant_seconds,
            ("spark_bridge.host.prepared_versions", "GRANT_SECONDS"): self.grant_seconds,
            ("spark_bridge.host.prepared_versions", "QUICK_SECONDS"): self.quick_seconds,
            ("spark_bridge.queryable.reads.operator_plan", "DIRECTORY_SECONDS"): self.directory_seconds,
            ("spark_bridge.queryable.reads.answer_version", "ASK_COORDINATOR_SECONDS"): (self.ask_coordinator_seconds),
            ("spark_bridge.host.partition_loader", "SHARED_LOAD_SECONDS"): self.shared_load_seconds,
            ("spark_bridge.host.hand_overs", "WANTED_SECONDS"): self.wanted_seconds,
            ("spark_bridge.host.maintenance", "TOGETHER_SECONDS"): self.together_seconds,
            ("spark_bridge.host.partition_loader", "TASK_ANSWER_SECONDS"): self.task_answer_seconds,
            ("spark_bridge.host.partition_loader", "ABANDONED_SECONDS"): self.abandoned_seconds,
            ("spark_bridge.host.commits", "COMMIT_GROUP_BYTES"): self.group_bytes,
            ("spark_bridge.host.commits", "LARGE_BYTES"): self.large_bytes,
        }


@dataclass(frozen=True)
class Result:
    """The result of a run. ``trace`` is a digest of its events, if it was asked for."""

    seed: int
    steps: int
    batches: int
    seconds: float
    failure: BaseException | None
    last_events: list[str]
    trace: int
    reached: Counter[str]
    """How often the run reached each situation of ``sometimes.MUST_BE_REACHED``."""

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
        self.seed, self.root = seed, root
        self.constants = Constants()
        self.faults = Faults(
            storage_error=r.choice((0.0, 0.002, 0.02)),
            storage_slow=r.choice((0.0, 0.01)),
            late_write=r.choice((0.0, 0.0, 0.02)),
            paged_listing=r.choice((0.0, 0.1)),
            disk_full=r.choice((0.0, 0.0, 0.003)),
            message_lost=r.choice((0.0, 0.002, 0.01)),
            message_late=r.choice((0.0, 0.005, 0.02)),
            message_twice=r.choice((0.0, 0.02)),
            wrong_probe=(0.0, 0.05, 0.5)[seed // 2 % 3],
            registration_slow=r.choice((0.0, 0.5)),
        )
        engine.faults, s.on_death_of_any = self.faults, engine.process_died
        self.num_hosts = r.randint(1, 3)
        self.standby_replicas = 0
        self.rescaled = r.choice((0.0, 0.3))
        # In one of three worlds, the first engine is RocksDB.
        self.backends = engine.backends(is_rocksdb=seed % 3 == 0)
        self.streams = [Stream("q", Model(("a", "b")[: r.choice((1, 1, 2))]), r.randint(1, 3), self.backends[0])]
        self.streams[0].keep = r.choice((1, 2, 3, 4, 4, 4))
        self.streams[0].keep_seconds = 20 if seed % 4 == 1 else 0
        self.is_calm = is_calm(seed)
        if self.is_calm or r.random() < 0.3:
            self.streams.append(Stream("neighbour", Model(("a",)), r.randint(1, 3), self.backends[0]))
        if self.is_calm:
            self.faults.heal()
            self.streams[0].most_seconds = CALM_BATCH
        self.pace = r.choice((0.05, 0.5, 2.0))
        self.slowness = 1.0  # times as long between heartbeats, maintenance and queries
        self.repeated = r.choice((0.0, 0.15, 0.6))
        self.speculated = r.choice((0.0, 0.2))
        self.restless = 3.0 if self.is_calm else r.choice((1.0, 3.0, 10.0))
        self.troubled_for = r.choice((20.0, 40.0, 80.0))
        self.outlives = 20.0  # a coordinator that was replaced lives on for 5 seconds and at most so many more
        self.parted = 0.15  # the probability that a driver which starts again does so in a second cluster
        self.schema = OperatorSchema.of_rows(SCHEMA).to_json()
        self.clock_offset = 1000.0
        self.disk = Disk(self.faults, watch=self._watch)
        for stream in self.streams:
            metadata = json.dumps({"id": stream.name}).encode()
            self.disk.directory(stream.checkpoint, METADATA)[METADATA] = metadata
        self.network = Network(self.faults, self._acknowledged)
        self.addresses: dict[str, Process] = {}
        self.attempts = 0
        self.healed_at: float | None = None
        self.clusters: list[Cluster] = []
        self.sessions: list[Session] = []
        self.num_clients = 1
        self.num_jobs = 0
        kinds: dict[int, tuple[type[Outsider], ...]] = {1: (Saver, StorageReader), 2: (Follower,), 3: (Forgetter,)}
        self.outsiders = [] if self.is_calm else [outsider(self) for outsider in kinds.get(seed % 4, ())]
        self.troubles = Troubles(self)
        self.going_back = False
        self.has_gone_back = False
        self.is_over = False
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
        for _ in range(self.num_jobs):
            s.spawn(self.outside, LookingUpJobs(self).run, "jobs that look up")
        for outsider in self.outsiders:
            outsider.begin()
        s.spawn(self.outside, self.troubles.run, "trouble")

    def start_session(self) -> Session:
        """A driver, in one of the clusters; it runs the query from now on."""
        s = self.scheduler
        if len(self.clusters) < 2 and s.random.random() < self.parted and self.sessions:
            self.clusters.append(Cluster(self, "cluster1"))
        session = Session(self, s.random.choice(self.clusters), f"s{len(self.sessions)}")
        self.sessions.append(session)
        s.log("STARTED", session.driver.name, "on", session.cluster.name)
        session.driver.on_death.append(lambda: s.at(0.5 + s.random.random() * 5, self._start_again))
        session.start()
        return session

    def _start_again(self) -> None:
        if self.sessions[-1].is_alive:
            return
        if self.going_back and not any(x.is_alive for x in self.sessions):
            self._go_back()
        self.start_session()

    def _look_for_followers(self) -> None:
        """Record whether a copy of some host has followed its owner."""
        hosts = [slot.process.memory.get("host") for x in self.sessions for slot in x.hosts if slot.process is not None]
        if any(host.counters.read()["followed"] for host in hosts if host is not None):
            sometimes("a copy follows its owner")

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
            stream.backend = r.choice(self.backends)
        stream.num_runs += 1
        run_id = f"run{stream.num_runs}-{stream.name}"
        stream.layout_of_run[run_id] = (stream.num_partitions, stream.backend)
        return run_id

    def _stream_of(self, run_id: str) -> Stream:
        return next(stream for stream in self.streams if run_id in stream.layout_of_run)

    def _go_back(self) -> None:
        """The user removes Spark's last batches of one query, as far as is retained."""
        self.going_back = False
        stream = self.scheduler.random.choice(self.streams)
        offsets = self.disk.directory(stream.checkpoint, "offsets")
        commits = self.disk.directory(stream.checkpoint, "commits")
        begun = sorted(int(p.split("/")[1]) for p in offsets)
        if len(begun) < 3:
            return
        done = max((int(p.split("/")[1]) for p in commits), default=-1)
        lowest = max(begun[0] + 1, done + 1 - stream.keep + 1)
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

    # -- what must hold ------------------------------------------------------------------------

    def _watch(self, verb: str, location: str, path: str) -> None:
        """A file has come or gone, or is read; called at that moment."""
        if verb == "read" and self.is_calm and not self.is_over:
            self._check_calm_read(location, path)
        if verb == "delete" and self.scheduler.current.process.name.startswith("coordinator"):
            for stream in self.streams:
                if location == stream.state and not path.startswith("manifests/"):
                    stream.model.has_lost_files = True
        if verb != "put":
            return
        self.troubles.file_written(path)
        stream = next((x for x in self.streams if location in (x.checkpoint, x.state)), None)
        if stream is None:
            return  # somewhere else, as a savepoint
        if location == stream.state:
            is_state = path.startswith(("operators/", f"{GROUPS_DIRECTORY}/"))
            if is_state and stream.model.has_forgotten_rows(self.disk.directory(location, path)[path]):
                sometimes("a late write brings rows of forgotten keys back, which count for nothing")
            if path.startswith("manifests/"):
                data = self.disk.directory(location, path)[path]
                if data == FENCE:
                    stream.model.closed.add(int(path.split("/")[1].split("-", maxsplit=1)[0]))
                    return
                files = {
                    **self.disk.directory(location, "operators"),
                    **self.disk.directory(location, GROUPS_DIRECTORY),
                }
                stream.model.manifest_written(data, files, self.scheduler.now)
            elif path.startswith(f"{REWRITTEN}/"):
                record = unseal(self.disk.directory(location, path)[path], RewrittenFiles, path)
                stream.model.records[path] = record
                assert self.disk.writer is not None
                forgetter = self.disk.writer.memory
                stream.model.to_forget[path] = forgetter["forgets"]
                forgetter.setdefault("records", []).append(path)
            elif path.startswith("epochs/"):
                if self.disk.writer is not None and self.disk.writer.name == Forgetter.name:
                    stream.superseded.add(stream.newest_run)
                stream.model.epoch = max(stream.model.epoch, int(path.split("/")[1].split(".", maxsplit=1)[0]))
        elif path.startswith("commits/"):
            run_id, token = self.disk.directory(location, path)[path].decode().split()
            plan = stream.model.plans[token]
            files = self.disk.all_files(stream.state)
            stream.model.check_durable(plan, run_id, files, *stream.layout_of_run[run_id])
            stream.model.spark_commits(plan)
            stream.committed[run_id] = plan.batch + 1

    def _check_calm_read(self, location: str, path: str) -> None:
        """Check that hosts which keep holding a query read no state of it: each read is a request that is paid for."""
        stream = self.streams[0]
        is_state = location == stream.state and path.endswith((".changelog", ".changelogs", ".sst"))
        # A request that fails may have been carried out or not, so the state is loaded.
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
        self._look_for_followers()
        for stream in self.streams:
            stream.model.check_openable(self.disk.all_files(stream.state))

    def judge(self, error: BaseException, run_id: str, what: str) -> None:
        """Something failed: may it?"""
        s = self.scheduler
        s.log(what, "of", run_id, "failed:", type(error).__name__, str(error))
        if isinstance(error, NEVER) and self._stream_of(run_id).is_newest(run_id):
            raise Violation(f"{what} of {run_id} failed, which must not happen: {type(error).__name__}: {error}")
        settled = self.healed_at is not None and s.now > self.healed_at + SETTLED_AFTER
        if settled and self.sessions[-1].is_wanted:
            raise Violation(f"{what} of {run_id} failed in a healthy world: {type(error).__name__}: {error}")

    def judge_refusal(self, refusal: str, run_id: str) -> None:
        """A run was refused: may it be?"""
        if "replaced by a newer one" not in refusal:
            raise Violation(f"{run_id} was refused: {refusal}")


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
    worlds: list[World] = []

    def open_storage(location: str, options: Any = None) -> Any:
        return worlds[0].disk.open(location, options)

    replacements: dict[tuple[str, str], Any] = {
        ("coordinator_actor.durable.manifests", "FOLDED"): 3,
        ("coordinator_actor.handlers.batches", "assign_owners"): assign_owners_observed,
        ("coordinator_actor.durable.manifests", "FEW"): 0,
        ("coordinator_actor.run.holds", "LISTED_EVERY"): 1 + seed % 3,
        ("backends.partition.loading", "lock"): locks.lock,
        ("backends.partition.loading", "os"): types.SimpleNamespace(close=locks.close),
        ("backends.partition.partition_state", "_pool"): threads.Background(),
        ("backends.spans", "Pool"): threads.Pool,
        ("spark_bridge.task.task_store", "_owners"): PerProcess(),
        # In half of the worlds, snapshots share files with earlier ones.
        ("spark_bridge.host.maintenance", "INLINE_FILES_BYTES"): seed % 2 * INLINE_FILES_BYTES,
        ("spark_bridge.task.task_store", "forget_client"): lambda address, token: None,
        ("spark_bridge.state_data.looked_up_state", "CheckpointStorage"): types.SimpleNamespace(open=open_storage),
        ("spark_bridge.state_data.looked_up_state", "StateVersions"): types.SimpleNamespace(
            look=partial(StateVersions.look, open_storage=open_storage)
        ),
        ("spark_bridge.state_data.looked_up_state", "StoredReads"): partial(
            StoredReads, open_storage=open_storage, clock=lambda: scheduling.active.now
        ),
        ("spark_bridge.state_surgery.forget_keys", "CheckpointStorage"): types.SimpleNamespace(open=open_storage),
        ("spark_bridge.state_surgery.forget_keys", "find_state"): partial(find_state, open_storage=open_storage),
        ("coordinator_actor.forgetting", "ForgetRequest"): partial(
            ForgetRequest, clock=lambda: scheduling.active.now, open_storage=open_storage
        ),
    }
    try:
        with _quiet(), threads.installed(replacements) as install:
            world = World(seed, root, traced=traced)
            worlds.append(world)
            prepare(world)
            install(world.constants.replacements())
            from spark_bridge.task import executor as endpoints
            from spark_bridge.task import task_store as task_client

            real_client, real_files = task_client.client_for, endpoints.read_host_files
            task_client.client_for = lambda address, token, tls=None: HostClient(world, address)  # type: ignore[assignment,return-value]
            endpoints.read_host_files = lambda directory: _host_files(world, str(directory))
            try:
                world.scheduler.spawn(world.outside, world.begin, "begin")
                world.scheduler.run(max_steps)
                failure, steps = world.scheduler.failure, world.scheduler.steps
                now = world.scheduler.now
                events = [_in_words(e) for e in world.scheduler.events]
                world.scheduler.close()
            finally:
                task_client.client_for, endpoints.read_host_files = real_client, real_files
    finally:
        engine.forget_all()
        shutil.rmtree(root, ignore_errors=True)
    s = world.scheduler
    return Result(seed, steps, sum(x.batches for x in world.streams), now, failure, events, s.trace, s.reached)


def _host_files(world: World, session_id: str) -> list[Any]:
    session = next(x for x in world.sessions if x.session_id == session_id)
    return [types.SimpleNamespace(address=a, token="token") for a in session.addresses()]


def _in_words(event: tuple[Any, ...]) -> str:
    step, now, *words = event
    return f"{step:>7} {now:9.3f}s  {' '.join(f'{w:.1f}' if isinstance(w, float) else str(w) for w in words)}"
