"""``ChangeFeed``: the changes of each version, read from the changelogs of every layout.

The feed also tells the values that changed keys had before. A host knows these of its own partitions as long as the
version is in memory. So a client that watches a running query costs no more than reading the changelogs. Else a copy
from storage has them, which goes on from version to version (``FollowerCopies``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pyarrow as pa

from backends.encoding.operator_schema import StateVariable
from backends.exceptions import MissingFileError, VersionNotFoundError
from backends.formats.changelog import read_changelog
from backends.formats.manifest import ChangelogRef
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.reading.partition_reader import ChangedPairs
from coordinator_actor.reading.stored_versions import Piece, StateVersions
from spark_bridge.exceptions import RequestError, StateVersionError
from spark_bridge.host.host import Host
from spark_bridge.queryable.protocol.state_reads import StateAnswer
from spark_bridge.queryable.reads.changes.follower_copies import FollowerCopies
from spark_bridge.queryable.reads.changes.key_filter import GroupingKeyFilter
from spark_bridge.queryable.reads.changes.previous_values import PreviousValues
from spark_bridge.queryable.reads.changes.run_manifests import RunManifests, require_same_history
from spark_bridge.queryable.reads.operators.operator_plan import OperatorPlan
from spark_bridge.queryable.reads.rows.row_stream import RowStream
from spark_bridge.state_format.stored_changes import EMIT_ROWS, VariableChanges
from spark_bridge.state_format.stored_rows import VariableRows

VersionChanges = tuple[int, dict[str, ChangedPairs]]
"""A version, and the pairs that it has changed, by family."""


class ChangeFeed:
    """Reads changes for any number of threads."""

    def __init__(self, host: Host, wait_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._wait_seconds = wait_seconds
        self._manifests = RunManifests(host, clock)
        self._copies = FollowerCopies(host, clock, self._manifests.is_known)
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
        """Return the rows that the versions after ``after`` up to ``until`` changed, of some grouping keys or of
        all.

        ``previous_run`` is the earlier run that gave the changes before. Raises ``StateVersionError`` if versions are
        missing, or do not follow from what that run gave, ``RequestError`` if there can be none, ``RetiredRunError`` if
        a newer run has begun.
        """
        if after > until:
            raise RequestError(f"Changes after version {after} up to version {until}: there can be none.")
        completed = self._host.version_requests.completed_version(plan.run_id, until, self._wait_seconds)
        if completed is None or completed.version < until:
            there = "none is known" if completed is None else f"version {completed.version} is the last one that is"
            raise StateVersionError(f"Version {until} of operator {plan.operator!r} is not completed; {there}.")
        rows = VariableRows(plan.schema, variable)
        changes = VariableChanges(rows)
        try:
            versions = self._versions(plan, completed.version)
            if previous_run not in ("", plan.run_id):
                require_same_history(plan, versions, after, previous_run)
            pieces = versions.reading_of_changes(plan.operator, after, until).pieces
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        wanted = None if keys is None else GroupingKeyFilter.of(rows, keys)
        keep = ExitStack()
        streams = [(piece, self._piece(plan, rows, piece, wanted, keep)) for piece in pieces]
        batches = _in_order(changes, streams, after, until, wanted)
        return StateAnswer(until, changes.output, RowStream(batches, keep.close))

    def require_same_history(self, plan: OperatorPlan, completed: int, version: int, previous_run: str) -> None:
        """Raise ``StateVersionError`` unless ``version`` is the one that ``previous_run`` has given rows of.

        ``version`` is ``completed`` or before.
        """
        versions = self._versions(plan, completed)
        try:
            versions.resolve(version)
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        require_same_history(plan, versions, version, previous_run)

    def _versions(self, plan: OperatorPlan, completed: int) -> StateVersions:
        try:
            return self._manifests.versions(plan, completed)
        except RetiredRunError:
            self._copies.drop(plan.run_id)
            raise

    def _piece(
        self,
        plan: OperatorPlan,
        rows: VariableRows,
        piece: Piece,
        wanted: GroupingKeyFilter | None,
        keep: ExitStack,
    ) -> Iterator[VersionChanges]:
        """Yield what each version has written to the variable's families in one partition, versions ascending."""
        place = plan.place
        storage = self._host.files.open_storage(place.state_location, place.options)
        since = piece.since if piece.since is not None else piece.lineage.version
        before = PreviousValues(self._host, self._copies, plan, piece, keep)
        for ref in piece.lineage.changelogs:
            if ref.version <= since:
                continue
            written = _written(storage, ref)
            found: dict[str, ChangedPairs] = {}
            for family in rows.families:
                if family not in written:
                    continue
                keys, values = written[family]
                if wanted is not None:
                    passing = wanted.of_pairs(family, keys)
                    if passing is not None:
                        keys, values = keys.filter(passing), values.filter(passing)
                if len(keys):
                    found[family] = ChangedPairs(keys, before.at(ref.version - 1, family, keys), values)
            if found:
                yield ref.version, found

    def release_idle(self) -> None:
        """Release copies and manifests that were not used for a while."""
        self._copies.release_idle()
        self._manifests.release_idle()

    def _drop(self, run_id: str | None) -> None:
        # The manifests first: a copy that is given back meanwhile is not kept then (``is_known``).
        self._manifests.drop(run_id)
        self._copies.drop(run_id)


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
