"""The owner of each partition and key of an operator: an ``OperatorLocation`` in the form that routing needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import Records, binary_content, even_array, even_rows
from backends.encoding.keys import KEY_GROUP_BYTES
from backends.encoding.operator_schema import TIMERS, OperatorSchema, StateVariable
from backends.ids import DEFAULT_FAMILY
from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import UnknownKeyOrNamespaceError, UnknownKvStateKeyGroupLocationError
from spark_bridge.state_format.windowed_keys import window_place

KeyPositions: TypeAlias = npt.NDArray[np.int64]
"""Positions of keys among all keys of a request."""


@dataclass(frozen=True)
class KeyShare:
    """The keys that one host is asked for.

    ``positions`` are those of its keys among all keys; None if the host is asked for all keys, in order. ``partitions``
    are the partitions to look in; None means the partitions of the keys.
    """

    address: str
    keys: pa.BinaryArray
    positions: KeyPositions | None
    partitions: list[int] | None = None


class RoutingTable:
    """The owners of one operator's partitions in one run.

    Every method raises ``UnknownKvStateKeyGroupLocationError`` where a partition has no owner.
    """

    def __init__(self, location: OperatorLocation) -> None:
        self.location = location
        self.num_partitions = len(location.owners)
        self.key_groups = location.key_groups
        self.addresses: list[str] = list(dict.fromkeys(owner.query_address for owner in location.owners))
        places = {address: i for i, address in enumerate(self.addresses)}
        self._hosts = np.array([places[owner.query_address] for owner in location.owners], np.uint16)

    @cached_property
    def _hosts_of_groups(self) -> npt.NDArray[np.uint16]:
        groups = np.arange(self.key_groups, dtype=np.int64)
        return self._hosts[groups * self.num_partitions // self.key_groups]

    @cached_property
    def _ranks_of_groups(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the rank of each key group's partition in an order that keeps the partitions of one owner together.

        The ranks take few bytes each, because few bytes are sorted faster.
        """
        ranks = np.empty(self.num_partitions, np.uint8 if self.num_partitions <= 1 << 8 else np.uint16)
        ranks[np.argsort(self._hosts, kind="stable")] = np.arange(self.num_partitions)
        groups = np.arange(self.key_groups, dtype=np.int64)
        return ranks[groups * self.num_partitions // self.key_groups]

    @cached_property
    def _addresses_of_groups(self) -> list[str]:
        return [self.addresses[host] for host in self._hosts_of_groups.tolist()]

    def address_of(self, key: bytes) -> str:
        """Return the query address of a stored key's owner."""
        try:
            address = self._addresses_of_groups[(key[0] << 8) | key[1]]
        except IndexError:
            raise self._no_key(key) from None
        return address or self._no_owner()

    def shares_of(self, keys: pa.BinaryArray) -> list[KeyShare]:
        """Return stored keys by owner.

        Keys of one partition come together, so that the owner need not order them again.
        """
        if len(self.addresses) == 1 or not len(keys):
            return [KeyShare(self.addresses[0] or self._no_owner(), keys, None)]
        even = even_rows(keys)
        groups = self._groups_of(keys, even)
        counts = np.bincount(self._hosts_of_groups.take(groups), minlength=len(self.addresses)).tolist()
        order, ordered = None, keys
        if max(counts) < len(keys):
            order = np.argsort(self._ranks_of_groups.take(groups), kind="stable")
            ordered = keys.take(pa.array(order)) if even is None else even_array(even.take(order))
        shares, begin = [], 0
        for host, count in enumerate(counts):
            if count:
                address = self.addresses[host] or self._no_owner()
                if order is None:
                    return [KeyShare(address, keys, None)]
                shares.append(KeyShare(address, ordered.slice(begin, count), order[begin : begin + count]))
                begin += count
        return shares

    def _groups_of(self, keys: pa.BinaryArray, even: Records | None) -> npt.NDArray[np.intp]:
        groups: npt.NDArray[np.intp]
        if even is not None and even.dtype.itemsize >= KEY_GROUP_BYTES:
            groups = np.ndarray((len(even),), ">u2", even, 0, even.strides).astype(np.intp)
        else:
            content, offsets = binary_content(keys)
            if int(np.diff(offsets).min()) < KEY_GROUP_BYTES:
                raise self._no_key(keys[int(np.diff(offsets).argmin())].as_py())
            begins = offsets[:-1]
            groups = (content[begins].astype(np.intp) << 8) | content[begins + 1]
        if int(groups.max()) >= self.key_groups:
            raise self._no_key(keys[int(groups.argmax())].as_py())
        return groups

    def shares_everywhere(self, keys: pa.BinaryArray) -> list[KeyShare]:
        """Return all keys for every owner, with the owner's partitions: so each partition is read once."""
        return [KeyShare(address, keys, None, owned) for address, owned in self.partitions_by_owner(None)]

    def partitions_by_owner(
        self, partitions: Iterable[int] | None, *, in_order: bool = False
    ) -> list[tuple[str, list[int]]]:
        """Return the partitions (None: all) by owner, in the order given.

        With ``in_order`` that order is kept strictly, so an owner may come more than once.
        """
        shares: list[tuple[str, list[int]]] = []
        for partition in range(self.num_partitions) if partitions is None else partitions:
            if not 0 <= partition < self.num_partitions:
                raise UnknownKvStateKeyGroupLocationError(
                    f"Operator {self.location.operator.name!r} (run {self.location.run_id}) has no partition "
                    f"{partition}; "
                    f"it has {self.num_partitions}."
                )
            address = self.addresses[self._hosts[partition]] or self._no_owner()
            known = shares[-1:] if in_order else [share for share in shares if share[0] == address]
            if known and known[0][0] == address:
                known[0][1].append(partition)
            else:
                shares.append((address, [partition]))
        return shares

    def is_windowed(self, state: str | None) -> bool:
        """Return whether the rows of one key may be in all partitions, because the window is a part of the stored
        key.
        """
        return is_windowed(self.location.operator.schema, state)

    def is_stable(self, state: str | None) -> bool:
        """Return whether a version has the same rows at any time: no row expires."""
        return is_stable(self.location.operator.schema, state)

    def _no_key(self, key: bytes) -> UnknownKeyOrNamespaceError:
        return UnknownKeyOrNamespaceError(
            f"{key!r} is no stored key of operator {self.location.operator.name!r}: it begins with none of the "
            f"{self.key_groups} "
            "key groups."
        )

    def _no_owner(self) -> Any:
        location = self.location
        silent = sorted({owner.host_id for owner in location.owners if not owner.query_address})
        raise UnknownKvStateKeyGroupLocationError(
            f"Some partitions of operator {location.operator.name!r} (run {location.run_id}) have no owner that "
            "answers queries; "
            f"hosts without a query address: {', '.join(silent)}."
        )


@lru_cache(256)
def is_windowed(schema: str, state: str | None) -> bool:
    """Return whether the state variable ``state`` of an operator with that schema (JSON) is an aggregate by windows."""
    return any(window_place(v) is not None for v in _variables(schema, state))


@lru_cache(256)
def is_stable(schema: str, state: str | None) -> bool:
    """Return whether the state variable ``state`` of an operator with that schema (JSON) is known to have no TTL."""
    chosen = _variables(schema, state)
    return bool(chosen) and all(v.ttl_ms is None for v in chosen)


def _variables(schema: str, state: str | None) -> list[StateVariable]:
    """Return the state variables among which a host chooses the one to read (``OperatorPlan.variable``).

    Empty if the schema is not known.
    """
    known = list(OperatorSchema.from_json(schema).in_use) if schema else []
    if state is None:
        own = [v for v in known if v.name == DEFAULT_FAMILY]
        return own or [v for v in known if v.kind != TIMERS] or known
    return [v for v in known if v.name == state]
