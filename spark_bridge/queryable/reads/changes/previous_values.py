"""The values that keys had before a version: from the partition in memory where it has them, else from a copy."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pyarrow as pa

from backends.exceptions import StoreClosedError, VersionNotFoundError
from backends.ids import DEFAULT_FAMILY
from backends.partition.partition_state import PartitionState
from backends.partition.version_reads import VersionReads
from coordinator_actor.reading import partition_reader
from coordinator_actor.reading.stored_versions import Piece
from spark_bridge.exceptions import StateVersionError
from spark_bridge.host.host import Host
from spark_bridge.queryable.reads.changes.follower_copies import Follower, FollowerCopies
from spark_bridge.queryable.reads.operators.operator_plan import OperatorPlan


class PreviousValues:
    """The values of one partition at ascending versions.

    Copies that it takes are given back when ``keep`` is closed.
    """

    def __init__(self, host: Host, copies: FollowerCopies, plan: OperatorPlan, piece: Piece, keep: ExitStack) -> None:
        self._host = host
        self._copies = copies
        self._plan = plan
        self._piece = piece
        self._keep = keep
        self._follower: Follower | None = None
        self._heads = {ref.version: ref.file.path for ref in piece.lineage.changelogs}
        if piece.lineage.rescaled is not None:
            self._heads[piece.lineage.rescaled.version] = piece.lineage.rescaled.head

    def at(self, version: int, family: str, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Return the values that stored keys have at a version, null where there is none."""
        if version == 0 and 0 not in self._heads and not self._piece.lineage.snapshots:
            return pa.nulls(len(keys), pa.binary())
        head = self._heads.get(version)
        instance = self._host.held.instance(self._plan.run_id, self._plan.operator, self._piece.partition)
        if head is not None and instance is not None and self._follower is None:
            # A partition in memory does not know the heads of earlier layouts, and old versions are gone.
            with suppress(VersionNotFoundError, StoreClosedError):
                return _values(instance.state.reads, version, head, family, keys)
        return _values(self._copy_at(version).reads, None, None, family, keys)

    def _copy_at(self, version: int) -> PartitionState:
        if self._follower is None:
            follower = self._follower = self._copies.take(self._plan, self._piece, version)
            self._keep.callback(self._copies.give_back, self._plan, self._piece, follower)
        state = self._follower.state
        try:
            partition_reader.load(
                self._plan.place, state, self._piece, version, open_storage=self._host.files.open_storage
            )
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        return state


def _values(
    reads: VersionReads, version: int | None, head: str | None, family: str, keys: pa.BinaryArray
) -> pa.BinaryArray:
    if family != DEFAULT_FAMILY and family not in reads.column_families(version, head=head):
        return pa.nulls(len(keys), pa.binary())
    return reads.get_many(keys, version, family, head=head, remember=False)
