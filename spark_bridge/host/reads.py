"""Reading a host's partitions: bulk reads for tasks, and loading for queries (``spark_bridge.queryable.reads``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.encoding.keys import KeyRange
from backends.exceptions import StoreClosedError, VersionNotFoundError
from coordinator_actor.messages import Completed, OpenGrant
from spark_bridge.exceptions import NotOwnerError, not_open
from spark_bridge.host.held_partitions import Counters, HeldPartitions, Instance
from spark_bridge.host.loading import PartitionLoading
from spark_bridge.host.registration import CompletedVersions, Grants, HostRegistration
from spark_bridge.host.versions import PreparedVersions
from spark_bridge.transport.protocol import ScanCommand

LOOK_WAIT_SECONDS = 10.0
"""A partition that is loaded for a query waits at most this many seconds for the answer whether Spark has committed a
prepared version.
"""


class PartitionReads:
    """Thread-safe without a lock: a partition's state guards itself."""

    def __init__(
        self,
        registration: HostRegistration,
        held: HeldPartitions,
        loading: PartitionLoading,
        grants: Grants,
        completed: CompletedVersions,
        prepared: PreparedVersions,
        counters: Counters,
    ) -> None:
        self._registration = registration
        self._held = held
        self._loading = loading
        self._grants = grants
        self._completed = completed
        self._prepared = prepared
        self._counters = counters

    # -- tasks ---------------------------------------------------------------------------------

    def get_many(
        self,
        run_id: str,
        operator: str,
        partition: int,
        version: int | None,
        keys: pa.BinaryArray,
        column_family: str = DEFAULT_FAMILY,
    ) -> pa.BinaryArray:
        """Return the values of keys at a version (None: the last completed one); null for keys without a value.

        A column family that was never written to is empty.
        Raises ``NotOwnerError`` if the partition is not this host's, or not open here at that version.
        """
        instance = self._held.instance(run_id, operator, partition)
        if version is None:
            instance = instance if instance is not None else self.load(run_id, operator, partition)
        elif instance is None or instance.state.version != version:
            raise self._not_open(run_id, operator, partition, version)
        try:
            if column_family != DEFAULT_FAMILY and column_family not in instance.state.reads.column_families(version):
                return pa.nulls(len(keys), pa.binary())
            values = instance.state.reads.get_many(keys, version, column_family)
        except (VersionNotFoundError, StoreClosedError) as error:
            raise self._not_open(run_id, operator, partition, version) from error
        self._counters.add("keys_read", len(keys))
        return values

    def scan(self, command: ScanCommand, ranges: Sequence[KeyRange]) -> Iterator[pa.RecordBatch]:
        """Yield the pairs (``key``, ``value``) of ranges of keys, one range after the other. Raises as ``get_many``."""
        run_id, operator, partition, version = command.run_id, command.operator, command.partition, command.version
        instance = self._held.instance(run_id, operator, partition)
        if instance is None or instance.state.version != version:
            raise self._not_open(run_id, operator, partition, version)
        left = command.limit
        try:
            is_there = command.column_family in instance.state.reads.column_families(version)
            if not is_there:
                return
            for batch in instance.state.reads.scan_in_turn(ranges, version, command.column_family):
                pairs = batch if left is None else batch.slice(0, left)
                if left is not None:
                    left -= pairs.num_rows
                if pairs.num_rows:
                    yield pairs
                if left == 0:
                    return
        except (VersionNotFoundError, StoreClosedError) as error:
            raise self._not_open(run_id, operator, partition, version) from error

    def _not_open(self, run_id: str, operator: str, partition: int, version: int | None) -> NotOwnerError:
        return not_open(self._registration.info.host_id, run_id, operator, partition, version)

    # -- queries -------------------------------------------------------------------------------

    def load(self, run_id: str, operator: str, partition: int, *, again: bool = False) -> Instance:
        """Record the coordinator's last completed version of a partition, and return the partition loaded at it.

        With ``again``, ask even if the partition is loaded, because it lacks that version. Raises ``NotOwnerError`` if
        another host owns the partition, and the errors of the coordinator.
        """
        grant = self._own_grant(run_id, operator, partition)
        if grant.is_begun:
            # An earlier incarnation of this host, or another host, may have accepted changes of the batch: this one
            # must not begin behind Spark.
            self._prepared.accepted(grant.registration, grant.version + 1)
            self._prepared.settle(run_id, LOOK_WAIT_SECONDS)
            grant = self._own_grant(run_id, operator, partition)
        heads = {} if grant.head is None else {operator: {partition: grant.head}}
        self._completed.note(Completed(run_id, grant.version, heads))
        held = None if again else self._held.instance(run_id, operator, partition)
        return self._loading.load(grant, operator, partition, for_read=True) if held is None else held

    def _own_grant(self, run_id: str, operator: str, partition: int) -> OpenGrant:
        grant = self._grants.for_read(run_id, operator, partition)
        if not self._registration.owns(grant.owner):
            raise NotOwnerError(
                f"Partition {partition} of operator {operator!r} belongs to host {grant.owner.host_id} "
                f"at {grant.owner.address}, not to {self._registration.info.host_id}; locate it again."
            )
        return grant

    def partitions(self, run_id: str, operator: str) -> list[dict[str, int]]:
        """Return the partitions of an operator that are loaded here, ascending, with their versions and sizes."""
        sized = []
        for instance in self._held.of_run(run_id, operator):
            if instance.state.is_loading:
                continue
            with suppress(StoreClosedError):  # it is being unloaded
                sized.append({"partition": instance.partition, "version": instance.state.version, **instance.size()})
        return sorted(sized, key=lambda one: one["partition"])
