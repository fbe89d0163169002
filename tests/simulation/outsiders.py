"""Those who work on a query from outside of it, with the real code: they stand still, are cut off and die, as all do.

Each piece of work runs in its own process. Its errors need an excuse: a fault that was injected during the work.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from msgspec.structs import replace

from backends.conf import DEFAULT_FAMILY
from backends.exceptions import (
    InvalidStateStoreArgument,
    LocalDiskFullError,
    MissingFileError,
    StorageError,
    VersionNotFoundError,
)
from backends.storage.checkpoint_storage import OpenStorage
from coordinator_actor import forgetting
from coordinator_actor.durable.manifests import ManifestLog
from coordinator_actor.durable.moved_checkpoints import fork_checkpoint
from coordinator_actor.durable.records import LookupRecords
from coordinator_actor.durable.spark_commits import METADATA, SparkCommits
from coordinator_actor.exceptions import (
    CheckpointPlaceError,
    FencedError,
    HostUnavailableError,
    InvalidRequestError,
    LapsedHoldError,
    QueryBusyError,
    RetiredRunError,
    SavepointError,
    SavepointFailedError,
    UnknownHostError,
    UnknownQueryError,
    UnknownRunError,
)
from coordinator_actor.messages import QueryRegistration
from coordinator_actor.reading.stored_versions import StatePlace, StateVersions
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from spark_bridge.exceptions import StateVersionError
from spark_bridge.queryable.protocol import At
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.serving import FollowedQuery
from spark_bridge.state_data.checkpoint_client import query_in_storage
from spark_bridge.state_data.looked_up_state import Batch, in_storage, recorded_in_storage
from spark_bridge.state_surgery.forget_keys import forget_keys
from spark_bridge.state_surgery.rewrite_state import rewrite_state
from tests.simulation import model
from tests.simulation.cluster import Cluster, Session
from tests.simulation.last_checks import check_kept, check_restored, refusal_of_start
from tests.simulation.model import Stream
from tests.simulation.network import STATESTORE_ERRORS, UnreachableError
from tests.simulation.readers import ANSWER_SECONDS, SimulatedConnections, is_other
from tests.simulation.scheduler import Killed, Process, Task, Violation
from tests.simulation.sometimes import sometimes
from tests.spark_bridge.state_surgery.surgery_steps import OwnWorkers

if TYPE_CHECKING:
    from tests.simulation.world import World

OTHERS = (
    FencedError,
    InvalidRequestError,
    LapsedHoldError,
    QueryBusyError,
    RetiredRunError,
    UnknownQueryError,
    UnknownRunError,
)
"""Another run has begun, another coordinator does not know the query yet, or another one holds it."""
LONG = 40.0
"""The longest time, in virtual seconds, for which an outsider stalls or is cut off."""


class Outsider:
    """A client that repeats a piece of work, in a new process each time. A subclass defines ``work``."""

    name = "an outsider"

    def __init__(self, world: World) -> None:
        self._world = world
        self._task: Task | None = None
        self._is_last = False
        self.always_stalls = False
        """Nothing happens to the process but that it stands still in the middle of its work."""

    def begin(self) -> None:
        """Run until all faults have ended."""
        self._task = self._world.scheduler.spawn(self._world.outside, self._run, self.name)

    def _run(self) -> None:
        s = self._world.scheduler
        while self._world.healed_at is None:
            s.sleep(s.random.random() * 10 * self._world.slowness)
            self.once(is_troubled=True)

    def finish(self) -> None:
        """In a healthy world, all goes well at the first attempt."""
        assert self._task is not None
        self._world.scheduler.join(self._task)
        # The last attempt may have claimed the state in storage: the query starts again.
        self._world.scheduler.sleep(LONG)
        self._is_last = True
        self.once(is_troubled=False)

    def once(self, *, is_troubled: bool) -> None:
        """Do one piece of work; ``is_troubled``: something may happen to the process that does it."""
        s = self._world.scheduler
        process = s.process(self.name)
        task = s.spawn(process, lambda: self._judged(process), self.name)
        task.on_end = lambda ended: None
        if is_troubled:
            self._trouble(process)
        s.join(task)
        s.kill(process)
        if isinstance(task.error, Killed):
            self.died()
        elif task.error is not None:
            s.fail(task.error)

    def go_on(self) -> None:
        """Do what there is to do for as long as the query runs, in a healthy world."""

    def work(self, process: Process) -> None:
        """Do the work."""
        raise NotImplementedError

    def died(self) -> None:
        """Record that the process has died."""

    def is_excused(self, error: BaseException, process: Process) -> bool:
        """Return whether what goes wrong in this world explains an error."""
        return isinstance(error, UnreachableError | HostUnavailableError) or (
            isinstance(error, StorageError | LocalDiskFullError) and "simulated" in str(error)
        )

    def _trouble(self, process: Process) -> None:
        s = self._world.scheduler
        r = s.random
        when, what = r.random() * r.choice((0.5, 5.0)), r.random()
        if self.always_stalls:
            return
        if what < 0.15:
            s.at(when, lambda: s.kill(process))
        elif what < 0.4:
            seconds = r.choice((3.0, LONG / 2, LONG))
            s.at(when, lambda: self._stall(process, seconds))
        elif what < 0.5:

            def sever() -> None:
                process.severed_until = s.now + r.random() * LONG
                process.memory["is_troubled"] = True

            s.at(when, sever)

    def _stall(self, process: Process, seconds: float) -> None:
        if process.is_alive:
            process.memory["is_troubled"] = True
            self.stalls(process, seconds)
            self._world.scheduler.pause(process, seconds)

    def stalls(self, process: Process, seconds: float) -> None:
        """Record that the process stands still."""

    def _judged(self, process: Process) -> None:
        begun = process.memory["begun"] = self._world.scheduler.now
        try:
            self.work(process)
        except (UnreachableError, *STATESTORE_ERRORS) as error:
            self._world.scheduler.log(self.name, "failed:", type(error).__name__, str(error))
            if not self.is_excused(error, process):
                raise Violation(
                    f"{self.name}, begun at {begun:.1f} s, failed, and nothing excuses that: "
                    f"{type(error).__name__}: {error}"
                ) from error


class Forgetter(Outsider):
    """Has keys of a stream forgotten: of the one that runs, or in storage while its user has stopped it."""

    name = "a forgetter"

    def work(self, process: Process) -> None:
        """Have some keys forgotten, and look whether they are."""
        world = self._world
        r, stream = world.scheduler.random, world.streams[0]
        operator = r.choice(stream.model.operators)
        keys = sorted(r.sample(model.KEYS, r.randint(1, 3)))
        process.memory["forgets"] = frozenset((operator, key) for key in keys)
        in_storage = world.healed_at is None and r.random() < 0.25
        if in_storage:
            self._stop_query()
        forget_keys(
            stream.checkpoint if in_storage else stream.name,
            operator,
            [model.ID_OF[key] for key in keys],
            progress=self._say,
            coordinator=world.sessions[-1].cluster.port(),
        )
        if in_storage:
            sometimes("keys of a stopped query are forgotten")
        self._check(stream, process)

    def _stop_query(self) -> None:
        """Stop the query, or kill its driver; its user may start it again before its keys are forgotten."""
        s = self._world.scheduler
        self._world.troubles.unload_all()
        if s.random.random() < 0.5:
            s.kill(self._world.sessions[-1].driver)
        s.sleep(s.random.random() * 10)

    def _say(self, step: str) -> None:
        self._world.scheduler.log("FORGET", step)
        process = self._world.scheduler.current.process
        # Most files are written, and the hold of the batches begins.
        if self.always_stalls and not self._is_last and step.startswith("waits for batch"):
            self._stall(process, 0.0 if "is_troubled" in process.memory else LONG)
        if step.startswith("starts again"):
            sometimes("a forgetter begins again, for the query has gone on")

    def _check(self, stream: Stream, process: Process) -> None:
        """Check the report to the caller that nothing is left of the keys."""
        world, held = self._world, stream.model
        counting = [path for path in process.memory.get("records", ()) if path in held.exchanges]
        if not counting:
            raise Violation("Keys are reported as forgotten, and no manifest that counts names the exchange.")
        files = world.disk.all_files(stream.state)
        # The listing that follows the record misses a file that a late write brings back. No version names it.
        born = partial(world.disk.listed_since, stream.state, recorded=counting[-1])
        held.reported(counting[-1], world.scheduler.now, born, files)
        held.check_openable(files)
        check_kept(world, stream)

    def finish(self) -> None:
        """In a healthy world, once the hold of one that has died is over, keys are forgotten at the first attempt."""
        self._world.scheduler.sleep(forgetting.HOLD_SECONDS)
        super().finish()

    def died(self) -> None:
        """A forgetter has died."""
        sometimes("a forgetter dies")

    def stalls(self, process: Process, seconds: float) -> None:
        """A forgetter stands still."""
        if seconds == LONG:
            sometimes("a forgetter stands still for longer than its hold lasts")

    def is_excused(self, error: BaseException, process: Process) -> bool:
        """Return whether what goes wrong in this world explains an error."""
        if super().is_excused(error, process):
            return True
        if self._is_last:
            return False
        if isinstance(error, OTHERS):
            return True
        if isinstance(error, VersionNotFoundError):
            return True
        return isinstance(error, MissingFileError) and self._is_troubled(process)

    def _is_troubled(self, process: Process) -> bool:
        return bool(process.memory.get("is_troubled")) or self._world.troubles.last_at >= process.memory["begun"] - LONG


class Saver(Outsider):
    """Takes a savepoint of a stream, restores it to a new checkpoint, and checks the result."""

    name = "a saver"

    def work(self, process: Process) -> None:
        """Take a savepoint, and restore it."""
        world = self._world
        s, stream = world.scheduler, world.streams[0]
        port = world.sessions[-1].cluster.port()
        request = f"savepoint {s.random.getrandbits(32):08x}"
        status = port.trigger_savepoint(request, stream.name, "sim://saved")
        while status.path is None and status.failure is None:
            s.sleep(0.2)
            status = port.savepoint_status(request)
            if not status.known:
                raise SavepointFailedError("The coordinator does not know of the savepoint any more.")
        if status.path is None:
            raise SavepointFailedError(f"The savepoint failed: {status.failure}")
        sometimes("a savepoint is taken")
        location = f"sim://restored-{s.random.getrandbits(32):08x}"
        try:
            restored = restore_into_checkpoint(
                status.path,
                location,
                num_partitions=s.random.choice((None, 1, 2)),
                scratch=world.root / "restored",
                clock=lambda: s.now,
                new_query_id=lambda: f"restored-{s.random.getrandbits(32):08x}",
                open_storage=world.disk.open,  # type: ignore[arg-type]
            )
            check_restored(world, stream, location, restored.version)
            sometimes("a savepoint is restored")
        finally:
            for place in (status.path, location, f"{location}/statestore"):
                world.disk.files.pop(place, None)

    def died(self) -> None:
        """A saver has died."""
        sometimes("a saver dies")

    def is_excused(self, error: BaseException, process: Process) -> bool:
        """Return whether what goes wrong in this world explains an error."""
        if super().is_excused(error, process):
            return True
        # A savepoint does not outlive its coordinator, nor the owner of a partition: the user asks again.
        return not self._is_last and isinstance(error, (*OTHERS, SavepointFailedError))


class Forker(Outsider):
    """Copies the checkpoint of a stream while its query is stopped, and gives the copy its own state.

    The state is in the checkpoint here, and is forked as if it were elsewhere. An attempt resumes where one has died.
    """

    name = "a forker"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._copy: str | None = None
        self._version, self._is_named = 0, False
        self._copied_at: set[str] = set()

    def work(self, process: Process) -> None:
        """Copy Spark's files as a user does, and fork."""
        world = self._world
        s, stream, base = world.scheduler, world.streams[0], "sim://forked"

        def open_storage(location: str, options: Any = None) -> Any:
            return world.disk.open(stream.state if location == f"{base}/{stream.name}" else location, options)

        if self._copy is None:
            self._copied_at = self._state_files()
            self._copy = f"sim://copy-{s.random.getrandbits(32):08x}"
            for top, files in world.disk.copy(stream.checkpoint).files.get(stream.checkpoint, {}).items():
                if top in (METADATA, "offsets", "commits"):
                    world.disk.files.setdefault(self._copy, {})[top] = dict(files)
            open_copy = world.disk.copy(self._copy, stream.state).open
            self._version = SparkCommits(open_copy(self._copy)).next_batch()  # type: ignore[arg-type]
            log = ManifestLog(open_copy(stream.state), "reader")  # type: ignore[arg-type]
            log.refresh()
            # A version without a manifest is recovered when the query of the fork starts.
            self._is_named = self._version in log.chain()
        else:
            sometimes("a fork goes on where one has died")
        copy = self._copy
        try:
            forked = fork_checkpoint(copy, base, open_storage=open_storage)
        except (CheckpointPlaceError, MissingFileError):
            self._copy = None  # the error says that the checkpoint is to be copied again
            raise
        if self._is_named:
            check_restored(world, stream, copy, self._version, forked.state_location)
            sometimes("a checkpoint is forked")
        self._copy = None
        for place in (copy, forked.state_location):
            world.disk.files.pop(place, None)

    def finish(self) -> None:
        """In a healthy world a query that makes few batches is forked."""
        self._copy, pace, self._world.pace = None, self._world.pace, 60.0
        super().finish()
        self._world.pace = pace

    def is_excused(self, error: BaseException, process: Process) -> bool:
        """Return whether what goes wrong in this world explains an error."""
        if super().is_excused(error, process):
            return True
        if isinstance(error, MissingFileError):
            return "there is no state" in str(error)
        if not isinstance(error, CheckpointPlaceError):
            return False
        # Its first batch is not committed, or the query has progressed since the copy was made.
        return self._version == 0 or self._copied_at != self._state_files()

    def _state_files(self) -> set[str]:
        return set(self._world.disk.all_files(self._world.streams[0].state))


class Rewriter(Outsider):
    """Rewrites the state of a stream into a new checkpoint while the query runs.

    After a failure or a death, the next attempt takes the same location. If that attempt is refused, the user removes
    what is there, as the error says.
    """

    name = "a rewriter"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._location: str | None = None
        self._version = 0
        self._is_again = False

    def work(self, process: Process) -> None:
        """Rewrite some operators, and compare the new checkpoint with the version that it was made of."""
        world, stream = self._world, self._world.streams[0]
        s, r, self._is_again = world.scheduler, world.scheduler.random, self._location is not None
        if self._location is None:
            self._location = f"sim://rewritten-{r.getrandbits(32):08x}"
        location = self._location
        was_left = bool(self._files())
        operators = stream.model.operators
        names = list(operators) if r.random() < 0.5 else [r.choice(operators)]
        report = rewrite_state(
            stream.checkpoint,
            names,
            lambda rows: rows,
            location,
            num_partitions=r.choice((None, 1, 2)),
            dry_run=r.random() < 0.1,
            progress=self._say,
            workers=OwnWorkers(),
            clock=lambda: s.now,
            open_storage=cast(OpenStorage, world.disk.open),
        )
        if report.dry_run:
            if not self._is_again and self._files():
                raise Violation(f"A dry run has written {self._files()[:5]}.")
            return
        if was_left:
            raise Violation(f"A rewrite was written to {location}, where files of an earlier one were.")
        self._check()
        sometimes("a rewrite is finished")
        self._remove()

    def _say(self, step: str) -> None:
        s = self._world.scheduler
        s.log("REWRITE", step)
        if step.startswith("rewriting"):
            self._version = s.current.process.memory["version"] = int(step.rsplit(" ", 1)[-1])
        if self.always_stalls and not self._is_last and s.random.random() < 0.3:
            self._stall(s.current.process, LONG)

    def _files(self) -> list[str]:
        assert self._location is not None
        places = (self._location, f"{self._location}/statestore")
        return [path for place in places for path in self._world.disk.all_files(place)]

    def _check(self) -> None:
        """A checkpoint that is finished has the rows of one completed version, and a query starts from it."""
        assert self._location is not None
        check_restored(self._world, self._world.streams[0], self._location, self._version)
        if (refusal := refusal_of_start(self._world, self._world.streams[0], self._location)) is not None:
            raise Violation(f"No query starts from the rewritten checkpoint: {refusal}")

    def _check_left(self) -> None:
        """Check that an attempt that was cut short has left a whole checkpoint, or one that every start refuses."""
        assert self._location is not None
        if METADATA in self._world.disk.directory(self._location, METADATA):
            self._check()  # only the answer was lost
        # A late write may bring back a file that no manifest names: a new query ignores it and begins with no state.
        elif any(not path.startswith(("operators/", "groups/", "schemas/", "audit/")) for path in self._files()) and (
            refusal_of_start(self._world, self._world.streams[0], self._location) is None
        ):
            raise Violation(f"A query starts from the remains of a rewrite at {self._location}: {self._files()}.")

    def _remove(self) -> None:
        """Remove the checkpoint, as its user does: late writes may follow, so its name is not used again."""
        for place in (self._location, f"{self._location}/statestore"):
            self._world.disk.files.pop(cast(str, place), None)
        self._location = None

    def died(self) -> None:
        """A rewriter has died: the next attempt comes upon what it has left."""
        sometimes("a rewriter dies")
        if self._location is not None:
            self._check_left()

    def finish(self) -> None:
        """In a healthy world a query that makes few batches is rewritten, at a new location."""
        assert self._task is not None
        self._world.scheduler.join(self._task)
        if self._location is not None:
            self._remove()
        pace, self._world.pace = self._world.pace, 60.0
        super().finish()
        self._world.pace = pace

    def is_excused(self, error: BaseException, process: Process) -> bool:
        """Return whether what goes wrong in this world explains an error."""
        self._check_left()
        faults, is_spark = self._world.faults, "No query can continue" in str(error)
        may_fail = faults.storage_error or faults.late_write or self._world.healed_at is not None
        if self._files() and not self._is_again and not may_fail:
            raise Violation(f"A rewrite has failed without a fault of storage, and has left {self._files()[:5]}.")
        if isinstance(error, SavepointError) and not is_spark and self._is_again:
            sometimes("a rewrite is refused where one was cut short")
            self._remove()
            return True
        if super().is_excused(error, process):
            return True
        stream, version = self._world.streams[0], process.memory.get("version")
        if isinstance(error, MissingFileError) and "there is no state" in str(error):
            return True
        if isinstance(error, InvalidStateStoreArgument) and "No batch of" in str(error):
            return True
        if self._is_last:
            return False
        if isinstance(error, SavepointError) and is_spark:
            # Spark has removed the offsets of its batch since, or its user has removed the batch.
            needed = () if version is None else (f"offsets/{max(version - 2, 0)}", f"commits/{version - 1}")
            is_gone = any(path not in self._world.disk.directory(stream.checkpoint, path) for path in needed)
            return is_gone and self._note_gone(process)
        if isinstance(error, VersionNotFoundError | MissingFileError):
            head = stream.model.head()
            is_gone = head is None or version is None or head.oldest > version or self._world.has_gone_back
            return is_gone and self._note_gone(process)
        return False

    def _note_gone(self, process: Process) -> bool:
        """Record that the version was removed while the process stood still, if it did. Return True: an excuse."""
        if process.memory.get("version") is not None and process.memory.get("is_troubled"):
            sometimes("a rewriter stands still until its version is gone")
        return True


class StorageReader(Outsider):
    """A batch of another query, which looks the stream up in storage, several times as if it was run again.

    All attempts of a batch must be given one version, and the same values.
    """

    name = "a reader of storage"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._batch = 0
        self._is_troubled = False
        self._first: tuple[int, list[bytes | None]] | None = None

    def work(self, process: Process) -> None:
        """Look up in one attempt of a batch."""
        world = self._world
        s, stream = world.scheduler, world.streams[0]
        if self._is_last or s.random.random() < 0.4:
            self._batch, self._first, self._is_troubled = self._batch + 1, None, False
        batch, operator = self._batch, stream.model.operators[0]
        place = StatePlace(stream.checkpoint, stream.state)
        record = recorded_in_storage(place, Batch("reading", batch))
        if self._first is None:
            sometimes("a version is recorded by a reader of storage")
        elif record.version != self._first[0]:
            raise Violation(f"Batch {batch} has looked up version {self._first[0]}, and then {record.version}.")
        found = in_storage(place, operator, None, None, record)
        given = found.values(pa.array(model.KEYS, pa.binary()), DEFAULT_FAMILY).to_pylist()
        if self._first is None:
            self._first = record.version, given
        elif is_other(stream, operator, self._first[1], given):
            raise Violation(f"Version {record.version} was looked up as {self._first[1]}, and then as {given}.")
        else:
            sometimes("a version is looked up again in storage")

    def go_on(self) -> None:
        """Begin the next batch: the lookups of the last batches are kept."""
        self.once(is_troubled=False)

    def stalls(self, process: Process, seconds: float) -> None:
        """Between its look and its record, a batch may stand still for so long that the version is gone."""
        self._is_troubled = True

    def is_excused(self, error: BaseException, process: Process) -> bool:
        """Return whether what goes wrong in this world explains an error."""
        if super().is_excused(error, process):
            return True
        if isinstance(error, MissingFileError):
            return "there is no state" in str(error)
        if not isinstance(error, VersionNotFoundError | StateVersionError):
            return False
        world = self._world
        path = LookupRecords.path("reading", self._batch)
        record = world.disk.directory(world.streams[0].state, path)
        if path in record and (self._is_troubled or world.has_gone_back or self._first is None):
            # Follow the remedy in the error: the batch looks up again.
            if path in str(error):
                sometimes("the record of a version that is gone is removed, as its error says")
            del record[path]
            self._first = None
            return True
        return path not in record  # no version exists yet, or none that Spark's commits name


class Follower(Outsider):
    """Serves the stream from its storage, in its own cluster, and follows it (``serve_state(follow=True)``)."""

    name = "a follower"

    def __init__(self, world: World) -> None:
        super().__init__(world)
        connections: Any = SimulatedConnections(world)
        self._router = StateRouter(connections, clock=lambda: world.scheduler.now, sleep=world.scheduler.sleep)
        self._seen: dict[str, int] = {}

    def begin(self) -> None:
        """Start a coordinator and hosts."""
        self._cluster = Cluster(self._world, "followers")
        self._session = Session(self._world, self._cluster, "followers")
        super().begin()

    def finish(self) -> None:
        """Begin when the whole cluster is healthy again."""
        self._world.scheduler.sleep(2 * LONG)
        super().finish()

    def work(self, process: Process) -> None:
        """Serve and follow for a while, and read what is served."""
        world = self._world
        s, stream, port = world.scheduler, world.streams[0], self._cluster.port()
        place, open_storage = StatePlace(stream.checkpoint, stream.state), cast(OpenStorage, world.disk.open)

        def look_up() -> QueryRegistration:
            versions = StateVersions.look(place, open_storage=open_storage)
            found = query_in_storage(
                versions,
                versions.resolve(None),
                "served",
                self._session.session_id,
                is_followed=True,
                open_storage=open_storage,
            )
            return replace(found, operators=tuple(replace(o, kind="aggregate") for o in found.operators))

        def serve(registration: QueryRegistration) -> None:
            refusal = port.serve_ended(registration).refusal
            if refusal is not None:
                raise RetiredRunError(refusal)

        registration = look_up()
        serve(registration)
        followed = FollowedQuery(registration, port, look_up, serve, 1.0)
        followed.start()
        until, since, answers = s.now + (60.0 if self._is_last else 20.0), stream.committed.get(stream.newest_run, 0), 0
        while s.now < until:
            s.sleep(0.5)
            run_id = followed.registration.run_id
            try:
                if run_id in port.renew_leases([run_id]):
                    serve(followed.registration)
                answers += self._read(stream, run_id, since if self._is_last and s.now > until - 10.0 else 0)
            except (UnreachableError, *STATESTORE_ERRORS) as error:
                s.log("the follower did not answer:", type(error).__name__, str(error))
            if not self._is_last and s.random.random() < 0.02:
                self._trouble_cluster()
        followed.close()
        if self._is_last and not answers:
            raise Violation("A follower of a healthy query has answered nothing for 60 s.")

    def _read(self, stream: Stream, run_id: str, least: int) -> int:
        s, operator = self._world.scheduler, stream.model.operators[0]
        was_newest, now = stream.is_newest(run_id), s.now
        location = self._cluster.port().locate(operator, run_id)
        keys = pa.array(model.KEYS, pa.binary())
        version, values = self._router.lookup(location, "default", keys, At(), now + ANSWER_SECONDS)
        if version < self._seen.get(run_id, 0):
            raise Violation(f"The follower has answered version {self._seen[run_id]} of {run_id}, and now {version}.")
        if version < least and was_newest:
            raise Violation(f"The follower answers version {version}, and {least} was completed 10 s ago.")
        self._seen[run_id] = version
        is_newest = was_newest and stream.is_newest(run_id)
        # Keys may be shown that were forgotten until the follower has taken that up.
        contents = values.to_pylist()
        stream.model.check_answer(version, operator, list(model.KEYS), contents, is_newest, 0.0, by_follower=True)
        sometimes("a follower answers")
        if len(self._seen) > 1:
            sometimes("a follower goes on to another run")
        return 1

    def _trouble_cluster(self) -> None:
        s = self._world.scheduler
        processes = [h.process for h in self._session.hosts if h.process is not None and h.process.is_alive]
        processes += [self._cluster.coordinator] if self._cluster.coordinator is not None else []
        if processes:
            sometimes("a process of a follower dies or stands still")
            process = s.random.choice(processes)
            s.kill(process) if s.random.random() < 0.5 else s.pause(process, LONG)

    def is_excused(self, error: BaseException, process: Process) -> bool:
        """Return whether what goes wrong in this world explains an error."""
        if super().is_excused(error, process):
            return True
        # No state exists yet, or retention has removed a version, because it does not know of the follower.
        return not self._is_last and isinstance(
            error, (*OTHERS, VersionNotFoundError, MissingFileError, UnknownHostError)
        )


ALL_OUTSIDERS: tuple[type[Outsider], ...] = (Forgetter, Saver, StorageReader, Follower)
