"""``ChangeFeed``: the changes of each version, read from the changelogs of every layout.

The feed also returns the earlier values of changed keys. A host knows these of its own partitions as long as the
version is in memory. So a client that watches a running query costs no more than reading the changelogs. Otherwise the
values come from a copy that is loaded from storage and advances from version to version (``Kind.FOLLOWER``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import DEFAULT_FAMILY
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import TIMERS, StateVariable
from backends.exceptions import MissingFileError, StoreClosedError, VersionNotFoundError
from backends.formats.changelog import read_changelog
from backends.formats.manifest import ChangelogRef
from backends.partition.partition_state import PartitionState
from backends.partition.version_reads import VersionReads
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.manifests import ManifestLog
from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.reading import stored_files
from coordinator_actor.reading.stored_files import ChangedPairs
from coordinator_actor.reading.stored_versions import LOOKS, Piece, StateVersions
from spark_bridge.exceptions import RequestError, StateVersionError
from spark_bridge.host.host import Host
from spark_bridge.queryable.protocol import StateAnswer
from spark_bridge.queryable.reads.operator_plan import OperatorPlan, without_prefix
from spark_bridge.queryable.reads.scans import RowStream
from spark_bridge.state_format.layouts import LIST, window_place
from spark_bridge.state_format.stored_changes import EMIT_ROWS, VariableChanges
from spark_bridge.state_format.stored_rows import VariableRows, list_keys

# The filter of changes by grouping keys.


@dataclass(frozen=True)
class GroupingKeyFilter:
    """Passes rows of some grouping keys.

    ``keys`` are the keys without their key groups, because the key groups of windowed keys come from the window too.
    ``columns`` are the positions of the grouping key's columns, without a window.
    """

    rows: VariableRows
    columns: tuple[int, ...]
    keys: pa.BinaryArray

    @classmethod
    def of(cls, rows: VariableRows, keys: pa.BinaryArray) -> GroupingKeyFilter:
        window = window_place(rows.variable)
        columns = tuple(i for i in range(len(rows.key)) if i != window)
        return cls(rows, columns, without_prefix(keys))

    def of_pairs(self, family: str, keys: pa.BinaryArray) -> pa.BooleanArray | None:
        """Return which stored keys pass (boolean); None if the bytes of stored keys do not decide it."""
        rows = self.rows
        if not len(keys) or rows.kind == TIMERS or len(self.columns) < len(rows.key):
            return None
        if rows.kind == LIST:
            keys = list_keys(rows, family, keys)
        elif family != rows.main:
            return None
        return pc.is_in(without_prefix(keys), self.keys)

    def of_changes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self.columns:
            return batch
        # After version and type of change come the columns of the key, in the user's order.
        columns = [batch.column(2 + self.rows.key_order.index(i)) for i in self.columns]
        keys = pa.RecordBatch.from_arrays(columns, names=[str(i) for i in self.columns])
        ids = without_prefix(encode_keys(keys, np.zeros(batch.num_rows, np.uint16)))
        return batch.filter(pc.is_in(ids, self.keys))


# The values that keys had before a version: from the partition in memory if it has them, else from a copy.


class PreviousValues:
    """The values of one partition at ascending versions. A copy that it pins is released when ``keep`` is closed."""

    def __init__(self, host: Host, plan: OperatorPlan, piece: Piece, keep: ExitStack) -> None:
        self._host = host
        self._plan = plan
        self._piece = piece
        self._keep = keep
        self._follower: PartitionState | None = None
        self._heads = {ref.version: ref.file.path for ref in piece.lineage.changelogs}
        if piece.lineage.rescaled is not None:
            self._heads[piece.lineage.rescaled.version] = piece.lineage.rescaled.head

    def at(self, version: int, family: str, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Return the values that stored keys have at a version, null if there is none."""
        if version == 0 and 0 not in self._heads and not self._piece.lineage.snapshots:
            return pa.nulls(len(keys), pa.binary())
        head = self._heads.get(version)
        instance = self._host.cache.instance(self._plan.run_id, self._plan.operator, self._piece.partition)
        if head is not None and instance is not None and self._follower is None:
            # A partition in memory does not know the heads of earlier layouts, and old versions are gone.
            with suppress(VersionNotFoundError, StoreClosedError):
                return _values(instance.state.reads, version, head, family, keys)
        return _values(self._copy_at(version).reads, None, None, family, keys)

    def _copy_at(self, version: int) -> PartitionState:
        if self._follower is None:
            piece, pinned = self._piece, self._host.loader.pinned_follower
            of_piece = (piece.directory, piece.backend, piece.partition)
            self._follower = self._keep.enter_context(pinned(self._plan.registration, *of_piece, version))
        state = self._follower
        try:
            stored_files.load(self._plan.place, state, self._piece, version, open_storage=self._host.files.open_storage)
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        return state


def _values(
    reads: VersionReads, version: int | None, head: str | None, family: str, keys: pa.BinaryArray
) -> pa.BinaryArray:
    if family != DEFAULT_FAMILY and family not in reads.column_families(version, head=head):
        return pa.nulls(len(keys), pa.binary())
    return reads.get_many(keys, version, family, head=head, remember=False)


# The manifests of the runs whose changes are read: they name the run and the files of each version.


MANIFESTS_IDLE_SECONDS = 60.0


@dataclass(eq=False)
class _Manifests:
    """The manifests of one run's state, as they were read last; ``lock`` guards the log."""

    log: ManifestLog
    used_at: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class RunManifests:
    """Manifests by run. Thread-safe; the lock guards which runs are known."""

    def __init__(self, host: Host, clock: Callable[[], float]) -> None:
        self._host = host
        self._clock = clock
        self._lock = threading.RLock()
        self._runs: dict[str, _Manifests] = {}

    def runs(self) -> list[str]:
        return list(self._runs)

    def versions(self, plan: OperatorPlan, completed: int) -> StateVersions:
        """Read the new manifests, and return the versions up to ``completed``, all of which have manifests.

        Raises ``RetiredRunError`` if a newer run has begun.
        """
        place = plan.place
        with self._lock:
            manifests = self._runs.get(plan.run_id)
            if manifests is None:
                log = ManifestLog(self._host.files.open_storage(place.state_location, place.options), "reader")
                manifests = self._runs[plan.run_id] = _Manifests(log, self._clock())
            manifests.used_at = self._clock()
        with manifests.lock:
            for look in range(LOOKS):
                manifests.log.refresh()
                try:
                    chain = manifests.log.chain()
                    break
                except MissingFileError:
                    # The manifest was removed after the listing. A newer one made it superfluous: the next look has it.
                    if look + 1 == LOOKS:
                        raise
            manifests.log.forget({m.id for m in chain.values()})
            newest = manifests.log.epochs.newest()
        # A run claims its epoch before it writes manifests: without a later claim, no manifest is another run's.
        if newest is not None and newest.run_id != plan.run_id:
            self.drop(plan.run_id)
            self._host.cache.drop_copies(plan.run_id)
            raise RetiredRunError(
                f"Run {plan.run_id} of operator {plan.operator!r} has been replaced by run {newest.run_id}: locate "
                "it again."
            )
        return StateVersions(place, manifests.log, chain, completed, plan.registration.key_groups)

    def release_idle(self) -> None:
        """Forget runs not read for a while and not registered here: this host gets no message when they end."""
        until = self._clock() - MANIFESTS_IDLE_SECONDS
        with self._lock:
            for run in [r for r, m in self._runs.items() if m.used_at <= until]:
                if self._host.cache.registration(run) is None:
                    del self._runs[run]

    def drop(self, run_id: str | None) -> None:
        with self._lock:
            for run in [r for r in self._runs if run_id in (None, r)]:
                del self._runs[run]


def require_same_history(operator: str, versions: StateVersions, after: int, previous_run: str) -> None:
    """Raise ``StateVersionError`` unless version ``after`` was made by ``previous_run`` or by an earlier run."""
    manifest = versions.chain.get(after)
    if manifest is None or manifest.run_id == previous_run:
        return  # all runs share the empty version; the caller refuses a version that is not kept
    runs = list(versions.log.epochs.runs())  # the newest run first
    if previous_run in runs and manifest.run_id in runs and runs.index(manifest.run_id) > runs.index(previous_run):
        return
    raise StateVersionError(
        f"The query was rolled back: version {after} of operator {operator!r} was remade by run "
        f"{manifest.run_id}, so the rows that run {previous_run} returned of it are invalid. Read the state again, "
        "and watch it from there."
    )


VersionChanges = tuple[int, dict[str, ChangedPairs]]
"""A version, and the pairs that it has changed, by family."""


class ChangeFeed:
    """Reads changes for any number of threads."""

    def __init__(self, host: Host, wait_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._wait_seconds = wait_seconds
        self._manifests = RunManifests(host, clock)
        host.cache.on_run_ended(self._manifests.drop)
        host.maintenance.on_maintenance(self._manifests.release_idle)

    def read(
        self,
        plan: OperatorPlan,
        variable: StateVariable,
        after: int,
        until: int,
        keys: pa.BinaryArray | None,
        previous_run: str = "",
    ) -> StateAnswer:
        """Return the rows that the versions after ``after`` up to ``until`` changed, of some or all grouping keys.

        ``previous_run`` is the run that returned the changes up to ``after``. Raises ``StateVersionError`` if versions
        are missing, or if that run's version ``after`` was rolled back, ``RequestError`` if ``until`` is below
        ``after``, ``RetiredRunError`` if a newer run has begun.
        """
        if after > until:
            raise RequestError(f"Changes after version {after} up to version {until}: there can be none.")
        completed = self._host.version_requests.completed_version(plan.run_id, until, self._wait_seconds)
        if completed is None or completed.version < until:
            newest = "none is known" if completed is None else f"version {completed.version} is the last one that is"
            raise StateVersionError(f"Version {until} of operator {plan.operator!r} is not completed; {newest}.")
        rows = VariableRows(plan.schema, variable)
        changes = VariableChanges(rows)
        try:
            versions = self._manifests.versions(plan, completed.version)
            if previous_run not in ("", plan.run_id):
                require_same_history(plan.operator, versions, after, previous_run)
            pieces = versions.reading_of_changes(plan.operator, after, until).pieces
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        wanted = None if keys is None else GroupingKeyFilter.of(rows, keys)
        keep = ExitStack()
        streams = [(piece, self._piece(plan, rows, piece, wanted, keep)) for piece in pieces]
        batches = _in_order(changes, streams, after, until, wanted)
        return StateAnswer(until, changes.output, RowStream(batches, keep.close))

    def require_same_history(self, plan: OperatorPlan, completed: int, version: int, previous_run: str) -> None:
        """Raise ``StateVersionError`` unless ``previous_run`` gave rows of ``version`` (``completed`` or before)."""
        versions = self._manifests.versions(plan, completed)
        try:
            versions.resolve(version)
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        require_same_history(plan.operator, versions, version, previous_run)

    def _piece(
        self, plan: OperatorPlan, rows: VariableRows, piece: Piece, wanted: GroupingKeyFilter | None, keep: ExitStack
    ) -> Iterator[VersionChanges]:
        """Yield the changes of each version to the variable's families in one partition, versions ascending."""
        place = plan.place
        storage = self._host.files.open_storage(place.state_location, place.options)
        since = piece.since if piece.since is not None else piece.lineage.version
        before = PreviousValues(self._host, plan, piece, keep)
        for ref in piece.lineage.changelogs:
            if ref.version <= since:
                continue
            written = _written(storage, ref)
            changed: dict[str, ChangedPairs] = {}
            for family in rows.families:
                if family not in written:
                    continue
                keys, values = written[family]
                if wanted is not None:
                    passing = wanted.of_pairs(family, keys)
                    if passing is not None:
                        keys, values = keys.filter(passing), values.filter(passing)
                if len(keys):
                    changed[family] = ChangedPairs(keys, before.at(ref.version - 1, family, keys), values)
            if changed:
                yield ref.version, changed


def _in_order(
    changes: VariableChanges,
    streams: list[tuple[Piece, Iterator[VersionChanges]]],
    after: int,
    until: int,
    wanted: GroupingKeyFilter | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the changes of all partitions together, version by version."""
    pending = [next(stream, None) for _, stream in streams]
    for version in range(after + 1, until + 1):
        for i, (piece, stream) in enumerate(streams):
            changed = pending[i]
            if changed is None or changed[0] != version:
                continue
            for batch in changes.of_version(version, changed[1], piece.partition):
                rows = batch if wanted is None else wanted.of_changes(batch)
                for at in range(0, rows.num_rows, EMIT_ROWS):
                    yield rows.slice(at, EMIT_ROWS)
            pending[i] = next(stream, None)


def _written(storage: CheckpointStorage, ref: ChangelogRef) -> dict[str, tuple[pa.BinaryArray, pa.BinaryArray]]:
    """Return the keys and values that a changelog has, by family."""
    try:
        data = storage.read(ref.file)
    except MissingFileError as error:
        raise StateVersionError(f"The changes of version {ref.version} are no longer kept: {error}") from error
    _, changes = read_changelog(data, storage.full_location(ref.file.path))
    return {family: (pairs.keys, pairs.values) for family, pairs in changes.families.items()}
