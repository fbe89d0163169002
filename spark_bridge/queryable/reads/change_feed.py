"""What versions have changed: read from the changelogs, in whichever layout they are.

What the changed keys had before, a host knows of its own partitions as long as the version is in memory: who watches a running query
costs no more than reading the changelogs. Else a copy from storage says it, which goes on from version to version and is kept for a
while, for who watches comes back for the next version.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import pyarrow as pa

from backends.encoding.operator_schema import StateVariable
from backends.exceptions import MissingFileError, StoreClosedError, VersionNotFoundError
from backends.formats.changelog import read_changelog
from backends.formats.manifest import ChangelogRef
from backends.ids import DEFAULT_FAMILY
from backends.partition.partition_state import PartitionState
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.manifests import ManifestLog
from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.reading import partition_reader
from coordinator_actor.reading.partition_reader import ChangedPairs
from coordinator_actor.reading.stored_versions import LOOKS, Piece, StatePlace, StateVersions
from spark_bridge.exceptions import RequestError, StateVersionError
from spark_bridge.host.host import Host
from spark_bridge.queryable.protocol.state_reads import StateAnswer
from spark_bridge.queryable.reads.key_filter import GroupingKeyFilter
from spark_bridge.queryable.reads.operator_plan import OperatorPlan
from spark_bridge.queryable.reads.row_stream import RowStream
from spark_bridge.state_format.stored_changes import EMIT_ROWS, VariableChanges
from spark_bridge.state_format.stored_rows import VariableRows

KEPT_FOLLOWERS = 16
"""So many copies of partitions are kept that nobody reads now."""
IDLE_SECONDS = 60.0
PieceKey = tuple[str, str, str]
"""Run id, directory, backend."""
Changed = tuple[int, dict[str, ChangedPairs]]


@dataclass(eq=False)
class _Follower:
    """A copy of a partition that is brought from version to version; for one reader at a time."""

    state: PartitionState
    used: float


@dataclass(eq=False)
class _Manifests:
    """The manifests of a run's state as they were seen last."""

    log: ManifestLog
    used: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class ChangeFeed:
    """Thread-safe."""

    def __init__(self, host: Host, wait_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._wait = wait_seconds
        self._clock = clock
        self._lock = threading.RLock()  # a stream that nobody has any more may be released by any allocation
        self._manifests: dict[str, _Manifests] = {}
        self._followers: dict[PieceKey, list[_Follower]] = {}
        host.held.on_run_ended(self._drop)
        host.maintenance.on_maintenance(self.release_idle)

    def read(
        self,
        plan: OperatorPlan,
        variable: StateVariable,
        after: int,
        until: int,
        keys: pa.BinaryArray | None,
        previous_run: str = "",
    ) -> StateAnswer:
        """What the versions behind ``after`` up to ``until`` changed, of the rows of some grouping keys or of all.

        ``previous_run``: the earlier run that gave what is before. Raises ``StateVersionError`` if they are not all there or do
        not follow from what that run gave, ``RequestError`` if they are none, ``RetiredRunError`` if a newer run has begun.
        """
        if after > until:
            raise RequestError(f"Changes behind version {after} up to version {until}: there can be none.")
        noted = self._host.version_requests.completed_version(plan.run_id, until, self._wait)
        if noted is None or noted.version < until:
            there = "none is known" if noted is None else f"version {noted.version} is the last one that is"
            raise StateVersionError(f"Version {until} of operator {plan.operator!r} is not completed; {there}.")
        rows = VariableRows(plan.schema, variable)
        made = VariableChanges(rows)
        try:
            versions = self._versions(plan, noted.version)
            if previous_run not in ("", plan.run_id):
                _require_same_history(plan, versions, after, previous_run)
            pieces = versions.reading_of_changes(plan.operator, after, until).pieces
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        chosen = None if keys is None else GroupingKeyFilter.of(rows, keys)
        keep = ExitStack()
        streams = [(piece, self._piece(plan, rows, piece, chosen, keep)) for piece in pieces]
        batches = self._in_order(made, streams, after, until, chosen)
        return StateAnswer(until, made.output, RowStream(batches, keep.close))

    def require_same_history(self, plan: OperatorPlan, completed: int, version: int, previous_run: str) -> None:
        """Raise ``StateVersionError`` unless ``version``, which is ``completed`` or before, is the one that an earlier run has given rows of."""
        versions = self._versions(plan, completed)
        try:
            versions.resolve(version)
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        _require_same_history(plan, versions, version, previous_run)

    def _place(self, plan: OperatorPlan) -> StatePlace:
        of = plan.registration
        return StatePlace(of.checkpoint_location, of.state_location, of.storage_options)

    def _versions(self, plan: OperatorPlan, completed: int) -> StateVersions:
        """The manifests as they are now: what was completed before has its own. Raises ``RetiredRunError``."""
        place = self._place(plan)
        with self._lock:
            held = self._manifests.get(plan.run_id)
            if held is None:
                log = ManifestLog(self._host.files.open_storage(place.state_location, place.options), "reader")
                held = self._manifests[plan.run_id] = _Manifests(log, self._clock())
            held.used = self._clock()
        with held.lock:
            for look in range(LOOKS):
                held.log.refresh()
                try:
                    chain = held.log.chain()
                    break
                except MissingFileError:
                    # Removed since it was listed; the manifest for whose sake that was done is there by now.
                    if look + 1 == LOOKS:
                        raise
            held.log.forget({m.id for m in chain.values()})
            newest = held.log.epochs.newest()
        # A run claims its epoch before it writes manifests: without a later claim, none of those are another run's.
        if newest is not None and newest.run_id != plan.run_id:
            self._drop(plan.run_id)
            raise RetiredRunError(
                f"Run {plan.run_id} of operator {plan.operator!r} has been replaced by run {newest.run_id}: locate it again."
            )
        return StateVersions(place, held.log, chain, completed, plan.registration.key_groups)

    @staticmethod
    def _in_order(
        made: VariableChanges,
        streams: list[tuple[Piece, Iterator[Changed]]],
        after: int,
        until: int,
        chosen: GroupingKeyFilter | None,
    ) -> Iterator[pa.RecordBatch]:
        """All partitions' changes of a version together, version by version."""
        pending = [next(stream, None) for _, stream in streams]
        for version in range(after + 1, until + 1):
            for i, (piece, stream) in enumerate(streams):
                changed = pending[i]
                if changed is None or changed[0] != version:
                    continue
                for batch in made.of_version(version, changed[1], piece.partition):
                    rows = batch if chosen is None else chosen.of_changes(batch)
                    for at in range(0, rows.num_rows, EMIT_ROWS):
                        yield rows.slice(at, EMIT_ROWS)
                pending[i] = next(stream, None)

    # -- one partition -------------------------------------------------------------------------

    def _piece(
        self, plan: OperatorPlan, rows: VariableRows, piece: Piece, chosen: GroupingKeyFilter | None, keep: ExitStack
    ) -> Iterator[Changed]:
        """What each version has written to the variable's families, ascending."""
        place = self._place(plan)
        storage = self._host.files.open_storage(place.state_location, place.options)
        since = piece.since if piece.since is not None else piece.lineage.version
        before = _Before(self._host, self, plan, piece, keep)
        for ref in piece.lineage.changelogs:
            if ref.version <= since:
                continue
            written = self._written(storage, ref)
            found: dict[str, ChangedPairs] = {}
            for family in rows.families:
                if family not in written:
                    continue
                keys, values = written[family]
                if chosen is not None:
                    is_chosen = chosen.of_pairs(family, keys)
                    keys, values = (
                        (keys, values) if is_chosen is None else (keys.filter(is_chosen), values.filter(is_chosen))
                    )
                if len(keys):
                    found[family] = ChangedPairs(keys, before.values(ref.version - 1, family, keys), values)
            if found:
                yield ref.version, found

    @staticmethod
    def _written(storage: CheckpointStorage, ref: ChangelogRef) -> dict[str, tuple[pa.BinaryArray, pa.BinaryArray]]:
        try:
            data = storage.read(ref.file)
        except MissingFileError as error:
            raise StateVersionError(f"The changes of version {ref.version} are no longer kept: {error}") from error
        _, changes = read_changelog(data, storage.full_location(ref.file.path))
        return {family: (pairs.keys, pairs.values) for family, pairs in changes.families.items()}

    # -- copies --------------------------------------------------------------------------------

    def take_follower(self, plan: OperatorPlan, piece: Piece, version: int) -> _Follower:
        """A copy of a partition at a version at most, or a new one; it is the caller's until it is given back."""
        self.release_idle()
        key = (plan.run_id, piece.directory, piece.backend)
        with self._lock:
            held = self._followers.get(key, [])
            fitting = [f for f in held if f.state.version <= version]
            if fitting:
                chosen = max(fitting, key=lambda f: f.state.version)
                held.remove(chosen)
                return chosen
        local = self._host.files.copies / uuid.uuid4().hex
        state = self._host.files.open_copy(plan.registration, piece.directory, piece.backend, local)
        return _Follower(state, self._clock())

    def give_back(self, plan: OperatorPlan, piece: Piece, follower: _Follower) -> None:
        """Keep a copy for who comes next."""
        follower.used = self._clock()
        with self._lock:
            is_over = plan.run_id not in self._manifests
            if not is_over:
                self._followers.setdefault((plan.run_id, piece.directory, piece.backend), []).append(follower)
        if is_over:
            follower.state.destroy()
        self.release_idle()

    def release_idle(self) -> None:
        """Remove copies that nobody has used for a while, and those that are too many.

        So too what is known of runs of whose end nobody would tell this host.
        """
        until = self._clock() - IDLE_SECONDS
        with self._lock:
            held = [(f, k) for k, fs in list(self._followers.items()) for f in fs]
            held.sort(key=lambda one: one[0].used)
            gone = [one for i, one in enumerate(held) if one[0].used <= until or i < len(held) - KEPT_FOLLOWERS]
            for follower, key in gone:
                self._followers[key].remove(follower)
            for run in [r for r, m in self._manifests.items() if m.used <= until]:
                if self._host.held.registration(run) is None:
                    del self._manifests[run]
        for follower, _ in gone:
            follower.state.destroy()

    def _drop(self, run_id: str | None) -> None:
        with self._lock:
            gone = [key for key in self._followers if run_id in (None, key[0])]
            followers = [f for key in gone for f in self._followers.pop(key)]
            for run in [r for r in self._manifests if run_id in (None, r)]:
                del self._manifests[run]
        for follower in followers:
            follower.state.destroy()


def _require_same_history(plan: OperatorPlan, versions: StateVersions, after: int, previous_run: str) -> None:
    """Raise ``StateVersionError`` if a run behind ``previous_run`` has made the version ``after``, or may have."""
    made = versions.chain.get(after)
    if made is None or made.run_id == previous_run:
        return  # the empty version is every run's, and one that is not kept is refused anyway
    runs = list(versions.log.epochs.runs())  # the last one first
    if previous_run in runs and made.run_id in runs and runs.index(made.run_id) > runs.index(previous_run):
        return
    raise StateVersionError(
        f"The query was rolled back: version {after} of operator {plan.operator!r} was made anew by run {made.run_id}, but what "
        f"run {previous_run} has given of it already no longer holds. Read the state anew, and watch it from there."
    )


class _Before:
    """What keys had in one partition before a version; asked for ascending versions."""

    def __init__(self, host: Host, changes: ChangeFeed, plan: OperatorPlan, piece: Piece, keep: ExitStack) -> None:
        self._host = host
        self._changes = changes
        self._plan = plan
        self._piece = piece
        self._keep = keep
        self._follower: _Follower | None = None
        self._heads = {ref.version: ref.file.path for ref in piece.lineage.changelogs}
        if piece.lineage.rescaled is not None:
            self._heads[piece.lineage.rescaled.version] = piece.lineage.rescaled.head

    def values(self, version: int, family: str, keys: pa.BinaryArray) -> pa.BinaryArray:
        """The values that a version has, null where there is none."""
        if version == 0 and 0 not in self._heads and not self._piece.lineage.snapshots:
            return pa.nulls(len(keys), pa.binary())
        head = self._heads.get(version)
        instance = self._host.held.instance(self._plan.run_id, self._plan.operator, self._piece.partition)
        if head is not None and instance is not None and self._follower is None:
            # Of an earlier layout it knows no head.
            with suppress(VersionNotFoundError, StoreClosedError):
                return _values(instance.state, version, head, family, keys)
        return _values(self._copy(version), None, None, family, keys)

    def _copy(self, version: int) -> PartitionState:
        if self._follower is None:
            follower = self._follower = self._changes.take_follower(self._plan, self._piece, version)
            self._keep.callback(self._changes.give_back, self._plan, self._piece, follower)
        state = self._follower.state
        of = self._plan.registration
        place = StatePlace(of.checkpoint_location, of.state_location, of.storage_options)
        try:
            partition_reader.load(place, state, self._piece, version, open_storage=self._host.files.open_storage)
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        return state


def _values(
    state: PartitionState, version: int | None, head: str | None, family: str, keys: pa.BinaryArray
) -> pa.BinaryArray:
    if family != DEFAULT_FAMILY and family not in state.column_families(version, head=head):
        return pa.nulls(len(keys), pa.binary())
    return state.get_many(keys, version, family, head=head, remember=False)
