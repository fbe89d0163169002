"""The facts about an operator that a host needs to read its state: layout, state variables, and the owner of a key."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import binary_array, binary_content, even_rows, gather_fixed, gather_ranges
from backends.encoding.key_groups import partition_range
from backends.encoding.keys import KEY_GROUP_BYTES
from backends.encoding.operator_schema import ROLLING_KIND, OperatorSchema, StateVariable
from backends.host_memory import BoundedDict
from coordinator_actor.exceptions import listed_names
from coordinator_actor.messages import OperatorLocation, OperatorSpec, QueryRegistration, RunningOperator
from coordinator_actor.reading.stored_versions import StatePlace
from spark_bridge.aggregates.rolling import Horizon
from spark_bridge.exceptions import RequestError, UnknownKvStateIdError, UnknownOperatorError
from spark_bridge.host.host import Host
from spark_bridge.queryable.routing.scatter_gather import chosen_variables
from spark_bridge.state_format.layouts import ROLLED_FAMILY, TILES_FAMILY, window_place
from spark_bridge.state_format.stored_rows import VariableRows

MAX_FIRST_MOMENTS = 1 << 14


def without_prefix(keys: pa.BinaryArray, skipped: int = KEY_GROUP_BYTES) -> pa.BinaryArray:
    """Return each key without its first ``skipped`` bytes, by default the key group. No key is shorter."""
    content, offsets = binary_content(keys)
    return binary_array(*gather_ranges(content, offsets[:-1] + skipped, offsets[1:]))


@dataclass(frozen=True)
class OperatorPlan:
    """One operator of one run: its layout and its state variables. Make one with ``of``."""

    registration: QueryRegistration
    spec: OperatorSpec
    schema: OperatorSchema

    @classmethod
    def of(cls, registration: QueryRegistration, operator: str) -> OperatorPlan:
        """Return the plan of an operator. Raises ``UnknownOperatorError`` naming the operators that the run has."""
        spec = next((o for o in registration.operators if o.name == operator), None)
        if spec is None:
            raise UnknownOperatorError(
                f"Run {registration.run_id} has no operator {operator!r}; operators that exist: "
                f"{listed_names(operator, (o.name for o in registration.operators))}"
            )
        return cls(registration, spec, OperatorSchema.from_json(spec.schema))

    @property
    def run_id(self) -> str:
        return self.registration.run_id

    @property
    def operator(self) -> str:
        return self.spec.name

    @property
    def place(self) -> StatePlace:
        of = self.registration
        return StatePlace(of.checkpoint_location, of.state_location, of.storage_options)

    @cached_property
    def variables(self) -> tuple[StateVariable, ...]:
        """The state variables that are in use, without deleted ones."""
        return self.schema.in_use

    @cached_property
    def families(self) -> frozenset[str]:
        return frozenset(name for v in self.variables for name in v.families)

    def variable(self, name: str | None) -> StateVariable:
        """Return the state variable of a name.

        None means the operator's own rows, or the only variable apart from timers. Raises ``UnknownKvStateIdError``
        naming the state variables that there are.
        """
        candidates = chosen_variables(self.variables, name)
        if len(candidates) == 1:
            return candidates[0]
        if name is None:
            raise UnknownKvStateIdError(
                f"Operator {self.operator!r} needs state=, one of its state variables: {self._variable_names()}."
            )
        raise UnknownKvStateIdError(
            f"Operator {self.operator!r} has no state variable {name!r}; there are {self._variable_names()}."
        )

    def rows(
        self, variable: StateVariable, alive_at: int, moment: int | None, *, collect: bool = False
    ) -> VariableRows:
        """Return how rows of a variable are made, without rows that have expired at ``alive_at`` (ms since 1970).

        Rolling aggregates are as of ``moment``, in microseconds; None means ``alive_at``.
        """
        cached = self._rows.get((variable.name, collect))
        if cached is None:
            cached = VariableRows(self.schema, variable, collect, alive_at=alive_at)
            self._rows[variable.name, collect] = cached
        return cached.as_of(alive_at, moment)

    @cached_property
    def _rows(self) -> dict[tuple[str, bool], VariableRows]:
        return {}

    @cached_property
    def first_moments(self) -> BoundedDict[tuple[int, int, str | None], int]:
        """The first moments that rolling aggregates can be as of: of partitions at a version with its head."""
        return BoundedDict(MAX_FIRST_MOMENTS)

    def require_family(self, family: str) -> None:
        """Raise ``UnknownKvStateIdError`` unless the column family is that of a variable in use."""
        if family not in self.families and (family != ROLLED_FAMILY or TILES_FAMILY not in self.families):
            raise UnknownKvStateIdError(
                f"Operator {self.operator!r} keeps no column family {family!r}; its state variables: "
                f"{self._variable_names()}."
            )

    def _variable_names(self) -> str:
        return ", ".join(f"{v.name!r} ({v.kind})" for v in self.variables) or "none"

    def partitions(self, named: list[int] | None) -> list[int]:
        """Return the partitions that a request names, or all. Raises ``RequestError`` for others than there are."""
        n = self.spec.num_partitions
        if named is None:
            return list(range(n))
        wrong = [p for p in named if not 0 <= p < n]
        if wrong or len(set(named)) != len(named):
            raise RequestError(
                f"partitions={named} must be among 0 to {n - 1}, those of operator {self.operator!r}, each once."
            )
        return named

    def groups_of(self, keys: pa.BinaryArray) -> npt.NDArray[np.int64]:
        """Return the key groups of stored keys. Raises ``RequestError`` for other bytes than keys of this operator."""
        if keys.null_count:
            raise RequestError(f"{keys.null_count} of {len(keys)} keys are null; a key cannot be null.")
        even = even_rows(keys)
        stored: npt.NDArray[np.uint16]
        if even is not None and even.dtype.itemsize >= KEY_GROUP_BYTES:
            stored = np.ndarray((len(even),), ">u2", even, 0, even.strides)
        else:
            content, offsets = binary_content(keys)
            if len(keys) and int(np.diff(offsets).min()) < KEY_GROUP_BYTES:
                raise RequestError(
                    f"A stored key begins with its key group, {KEY_GROUP_BYTES} bytes; one of {len(keys)} is shorter."
                )
            stored = gather_fixed(content, offsets[:-1], np.dtype(">u2"))
        groups: npt.NDArray[np.int64] = stored.astype(np.int64)
        if len(groups) and int(groups.max()) >= self.registration.key_groups:
            raise RequestError(
                f"A key is of key group {int(groups.max())}, but query {self.registration.query_id} has "
                f"{self.registration.key_groups}."
            )
        return groups

    def partition_of(self, key: bytes) -> int:
        """Return the partition of one stored key. Raises as ``groups_of`` does."""
        group = int.from_bytes(key[:KEY_GROUP_BYTES], "big")
        if len(key) < KEY_GROUP_BYTES or group >= self.registration.key_groups:
            raise RequestError(
                f"{key[:16].hex()} is not a stored key: it begins with none of the {self.registration.key_groups} key "
                "groups."
            )
        return group * self.spec.num_partitions // self.registration.key_groups

    def partitions_of_keys(self, keys: pa.BinaryArray) -> npt.NDArray[np.uint16]:
        """Return the partitions of stored keys. Raises as ``groups_of`` does."""
        return self._partitions_of_groups.take(self.groups_of(keys))

    @cached_property
    def _partitions_of_groups(self) -> npt.NDArray[np.uint16]:
        return self.partitions_of(np.arange(self.registration.key_groups)).astype(np.uint16)

    def partitions_of(self, groups: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        partitions: npt.NDArray[np.int64] = groups * self.spec.num_partitions // self.registration.key_groups
        return partitions

    def key_groups_of(self, partition: int) -> range:
        return range(*partition_range(partition, self.spec.num_partitions, self.registration.key_groups))


# Summaries of operators, ready for JSON: the state variables that can be queried, and their columns.


def operator_summary(running: RunningOperator) -> dict[str, Any]:
    """Return the summary of one operator: its query, its versions, its state variables with their columns."""
    schema = OperatorSchema.from_json(running.operator.schema)
    return {
        "operator": running.operator.name,
        "kind": running.operator.kind,
        "query_name": running.query_name,
        "query_id": running.query_id,
        "run_id": running.run_id,
        "partitions": running.operator.num_partitions,
        "key_groups": running.key_groups,
        "backend": running.operator.backend,
        "oldest_version": running.oldest_version,
        "completed_version": running.completed_version,
        "ended": running.ended,
        "state": variables_summary(schema),
    }


def variables_summary(schema: OperatorSchema) -> list[dict[str, Any]]:
    """Return the summary of each state variable that is in use."""
    return [_described(VariableRows(schema, v)) for v in schema.in_use]


def _described(rows: VariableRows) -> dict[str, Any]:
    window = window_place(rows.variable)
    described: dict[str, Any] = {
        "name": rows.variable.name,
        "kind": rows.kind,
        "key": _columns([rows.key.field(i) for i in rows.key_order]),
        "value": _columns(rows.value),
    }
    if len(rows.inner):
        described["inner"] = _columns(rows.inner)
    if window is not None:
        described["window"] = rows.key.field(window).name
    if rows.variable.indexes:
        described["index"] = list(rows.variable.indexes)
    if rows.rolling is not None:
        described["horizons"] = {output: {h.name: _horizon(h) for h in hs} for output, hs in rows.rolling.outputs}
    if rows.variable.ttl_ms is not None:
        described["ttl_ms"] = rows.variable.ttl_ms
    return described


def _horizon(horizon: Horizon) -> dict[str, Any]:
    """Return length and hop of a horizon in seconds, and since when a longer one is complete."""
    since = None if not horizon.since else f"{np.datetime64(horizon.since, 'us')}+00:00"
    return {"seconds": horizon.us / 1e6, "hop_seconds": horizon.hop / 1e6, "since": since}


def _columns(fields: pa.Schema | list[pa.Field]) -> dict[str, str]:
    return {field.name: str(field.type) for field in fields}


# The coordinator's answers about operators, kept for a moment, because the coordinator has commits to take.


DIRECTORY_SECONDS = 0.5
"""TTL of a cached answer of the coordinator about operators, in seconds."""
MAX_LOCATIONS = 1000


class OperatorDirectory:
    """Locations of operators, and their partitions here. Thread-safe; the lock guards changes of the kept locations."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._locations = BoundedDict[tuple[str, str | None], tuple[float, OperatorLocation]](MAX_LOCATIONS)
        self._operators: tuple[float, tuple[RunningOperator, ...]] = (-math.inf, ())
        self._lock = threading.Lock()

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        """See ``StateReads``.

        The answer may be ``DIRECTORY_SECONDS`` old. That of an operator whose watermark clients read is not older than
        the last version that this host knows.
        """
        key, now = (operator, query), time.monotonic()
        until, location = self._locations.get(key, (-math.inf, None))
        if location is None or now >= until or self._has_later(location):
            location = self._host.coordinator.locate(operator, query)
            with self._lock:
                self._locations[key] = (now + DIRECTORY_SECONDS, location)
        return location

    def _has_later(self, location: OperatorLocation) -> bool:
        if location.operator.kind != ROLLING_KIND:
            return False
        completed = self._host.completed.newest(location.run_id)
        return completed is not None and completed.version > location.completed_version

    def operators(self) -> list[dict[str, Any]]:
        return [operator_summary(running) for running in self._running()]

    def _running(self) -> tuple[RunningOperator, ...]:
        until, operators = self._operators
        now = time.monotonic()
        if now >= until:
            operators = self._host.coordinator.operators()
            self._operators = (now + DIRECTORY_SECONDS, operators)
        return operators

    def describe(self, operator: str | None, query: str | None) -> dict[str, Any]:
        """See ``StateReads``. ``held`` are the partitions that are loaded here, by operator."""
        info = self._host.info
        wanted = [
            o
            for o in self._running()
            if operator in (None, o.operator.name) and query in (None, o.query_name, o.query_id, o.run_id)
        ]
        if operator is not None and not wanted:
            # Raises an error with the existing operators, or the end of the query.
            self._host.coordinator.locate(operator, query)
        described = []
        for running in wanted:
            completed = self._host.completed.newest(running.run_id)
            version = None if completed is None else completed.version
            held = self._host.reads.partitions(running.run_id, running.operator.name)
            described.append({**operator_summary(running), "completed_version_here": version, "held": held})
        names = ("host_id", "incarnation", "address", "query_address", "node_id")
        return {**{name: getattr(info, name) for name in names}, "operators": described}

    def forget(self, run_id: str | None) -> None:
        """Forget a run that is over (None: all runs): clients must learn of its end, or of the next run, at once."""
        with self._lock:
            for key, (_, location) in list(self._locations.items()):
                if run_id in (None, location.run_id):
                    del self._locations[key]
        self._operators = (-math.inf, ())
