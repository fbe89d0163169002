"""The rows of a partition at the version of a savepoint: as the host holds the partition, or read back from storage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from backends.exceptions import StoreClosedError, VersionNotFoundError
from backends.partition.partition_state import PartitionState
from coordinator_actor.messages import SavepointOrder
from coordinator_actor.savepoints.run_savepoints import savepoint_families
from spark_bridge.host.held.held_partitions import HeldPartitions
from spark_bridge.host.held.instance import spec_of
from spark_bridge.host.loading.copy_loading import CopyLoading
from spark_bridge.host.loading.partition_files import PartitionFiles
from spark_bridge.host.savepoints.savepoint_exports import Scans

log = logging.getLogger(__name__)


class SavepointPartitions:
    """Opens partitions for ``SavepointExports``."""

    def __init__(self, held: HeldPartitions, files: PartitionFiles, copies: CopyLoading) -> None:
        self._held = held
        self._files = files
        self._copies = copies

    def held(self, order: SavepointOrder, operator: str, partition: int) -> Scans | None:
        """Return a partition at the savepoint's version, as it is held here; None if it is not held, or no longer."""
        instance = self._held.instance(order.run_id, operator, partition)
        # The changes that are accepted for a version not completed here yet need not be those that the manifest names.
        if instance is None or instance.state.version < order.version:
            return None
        spec = spec_of(order.registration, operator)
        try:
            return _scans(instance.state, savepoint_families(spec.schema), order.version)
        except (VersionNotFoundError, StoreClosedError):
            log.debug("Version %d of %s is not held", order.version, instance)
            return None

    def read_back(
        self, order: SavepointOrder, operator: str, partition: int, is_given_up: Callable[[], bool]
    ) -> tuple[Scans, Callable[[], None]]:
        """Return a copy of a partition from storage at the savepoint's version, and what removes the copy.

        Raises ``LoadEndedError`` if the export ``is_given_up`` meanwhile.
        """
        spec = spec_of(order.registration, operator)
        below = self._files.savepoints
        copy = self._copies.load(order.registration, spec, partition, order.version, below, is_abandoned=is_given_up)
        try:
            return _scans(copy, savepoint_families(spec.schema)), copy.destroy
        except BaseException:
            copy.destroy()
            raise


def _scans(state: PartitionState, variables: Iterable[str], version: int | None = None) -> Scans:
    """Return the pairs of all state variables; a variable that was never written to is empty."""
    there = state.reads.column_families(version)
    return {v: state.reads.scan(version, column_family=v) if v in there else iter(()) for v in variables}
