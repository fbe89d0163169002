"""``KvStateLocationOracle``: which host owns which key groups of which operator of one run of a query.

After Flink's ``KvStateLocation``: a client gets it once, and then finds owners without asking again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from coordinator_actor.exceptions import InvalidRequestError, UnknownOperatorError
from coordinator_actor.messages import HostInfo


class OperatorOwners(Struct, frozen=True):
    """The owners of one operator: the index of each partition's host in ``KvStateLocationOracle.hosts``."""

    name: str
    owners: tuple[int, ...]

    @property
    def num_partitions(self) -> int:
        """Return the number of partitions of the operator."""
        return len(self.owners)


class KvStateLocationOracle(Struct, frozen=True):
    """An immutable view of one run at one moment. Make one with ``of``.

    It is small to send, since each host is listed once. ``key_groups`` is the query's fixed number of key groups.
    Partition p of n owns the groups g with ``g * n // key_groups == p``. ``state_location`` tells the query from a copy
    of its checkpoint, which has the same ``query_id``.
    """

    query_id: str
    run_id: str
    name: str | None
    key_groups: int
    completed_version: int
    hosts: tuple[HostInfo, ...]
    operators: tuple[OperatorOwners, ...]
    state_location: str = ""

    def __post_init__(self) -> None:
        for operator in self.operators:
            if not 1 <= operator.num_partitions <= self.key_groups:
                raise InvalidRequestError(
                    f"Operator {operator.name!r} has {operator.num_partitions} partitions; there must be at least 1 "
                    "and at most "
                    f"as many as key groups ({self.key_groups})."
                )
            if min(operator.owners) < 0 or max(operator.owners) >= len(self.hosts):
                raise InvalidRequestError(
                    f"Operator {operator.name!r} names hosts {min(operator.owners)} to {max(operator.owners)}, but "
                    f"{len(self.hosts)} are listed: the message is damaged; ask for the locations again."
                )

    @classmethod
    def of(
        cls,
        query_id: str,
        run_id: str,
        name: str | None,
        key_groups: int,
        completed_version: int,
        owners: Mapping[str, Sequence[HostInfo]],
        state_location: str = "",
    ) -> KvStateLocationOracle:
        """Make the view of a run. ``owners`` has, per operator, the host of each partition, in order.

        Raises ``InvalidRequestError`` if an operator has no partition, or more partitions than there are key groups.
        """
        indices: dict[HostInfo, int] = {}
        operators = tuple(
            OperatorOwners(operator, tuple(indices.setdefault(h, len(indices)) for h in own))
            for operator, own in owners.items()
        )
        hosts = tuple(indices)
        return cls(query_id, run_id, name, key_groups, completed_version, hosts, operators, state_location)

    def partition_of(self, operator: str, key_group: int) -> int:
        """Return the partition that owns a key group.

        Raises ``UnknownOperatorError``, or ``InvalidRequestError`` if there is no such key group.
        """
        n = self._operator(operator).num_partitions
        if not 0 <= key_group < self.key_groups:
            raise InvalidRequestError(
                f"There is no key group {key_group} of operator {operator!r}: query {self.query_id} has "
                f"{self.key_groups}, "
                f"numbered from 0."
            )
        return key_group * n // self.key_groups

    def location_of(self, operator: str, key_group: int) -> HostInfo:
        """Return the host that owns a key group. Raises the errors of ``partition_of``."""
        return self.hosts[self._operator(operator).owners[self.partition_of(operator, key_group)]]

    def owners(self, operator: str) -> tuple[HostInfo, ...]:
        """Return the host of each partition, in order. Raises ``UnknownOperatorError``."""
        return tuple(self.hosts[i] for i in self._operator(operator).owners)

    def num_partitions(self, operator: str) -> int:
        """Return the number of partitions of an operator. Raises ``UnknownOperatorError``."""
        return self._operator(operator).num_partitions

    def _operator(self, name: str) -> OperatorOwners:
        for operator in self.operators:
            if operator.name == name:
                return operator
        exist = ", ".join(repr(o.name) for o in self.operators) or "none"
        raise UnknownOperatorError(
            f"Query {self.name or 'unnamed'} ({self.query_id}, run {self.run_id}) has no operator {name!r}; operators "
            "that "
            f"exist: {exist}."
        )
