"""``QueryableStateClient``: what is the value for key 42 now? (Flink's client of the same name.)"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from backends.key_groups import key_groups
from backends.keys import encode_keys
from backends.operator_schema import OperatorSchema
from backends.schema import StateSchema
from coordinator_actor.exceptions import (
    CoordinatorError,
    RetiredRunError,
    StaleOwnerError,
    UnknownHostError,
    UnknownRunError,
)
from coordinator_actor.messages import HostInfo, OperatorLocation
from spark_bridge.aggregation import result_fields, results
from spark_bridge.exceptions import (
    HostUnavailableError,
    NotOwnerError,
    QueryableStateError,
    RequestError,
    UnknownOperatorError,
)
from spark_bridge.flight_client import HostClient
from spark_bridge.protocol import GetCommand

T = TypeVar("T")
LOCATION_SECONDS = 2.0
"""How long a location is used before it is looked up again; a wrong one is dropped at once."""


class QueryableStateClient:
    """Reads the last completed state of running queries, from any process.

    Make one with ``connect``. Values come from completed checkpoints only: what Spark has
    committed. Keys are given in the order of the operator's ``by``: a plain value for one column, a
    tuple for several. ``timeout`` (seconds) is how long a call waits for a host that is being
    restarted or moved. Safe to use from several threads.
    """

    def __init__(self, locate: Callable[[str, str | None], OperatorLocation], token: str, timeout: float) -> None:
        self._locate_remote = locate
        self._token = token
        self._timeout = timeout
        self._locations: dict[tuple[str, str | None], tuple[float, OperatorLocation, OperatorSchema]] = {}
        self._hosts: dict[str, HostClient] = {}
        self._pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="statestore-client")

    @classmethod
    def connect(
        cls,
        *,
        namespace: str = "statestore",
        coordinator_name: str = "StateStoreCoordinator",
        address: str | None = None,
        token: str | None = None,
        timeout: float = 30.0,
    ) -> QueryableStateClient:
        """Connect to the state store.

        Without ``address`` from a process in the Ray cluster, which finds everything by itself (Ray
        is joined if it is not yet); with the ``address`` (``grpc://ip:port``) of any host and a
        ``token`` from a process that has neither Ray nor Spark.
        """
        if address is not None:
            if token is None:
                raise QueryableStateError("address= needs a token= as well; hosts answer no call without one.")
            entry = HostClient(address, token, timeout)
            return cls(entry.locate, token, timeout)
        import ray

        from spark_bridge.host_actor import RayCoordinatorPort

        if not ray.is_initialized():
            ray.init(address="auto", namespace=namespace, log_to_driver=False, logging_level="WARNING")
        port = RayCoordinatorPort(namespace, coordinator_name, timeout)
        return cls(port.locate, port.call("token"), timeout)

    def get(self, operator: str, key: Any, query: str | None = None, state: str | None = None) -> dict[str, Any] | None:
        """The value of one key as a dict of its columns, or None if it has none.

        ``state`` names the state variable, a value state, of an operator that has several.
        """
        found = self._get_many(operator, [key], query, state)[1]
        row: dict[str, Any] = found.slice(0, 1).to_pylist()[0]
        present = row.pop(PRESENT)
        return row if present else None

    def get_many(
        self, operator: str, keys: Sequence[Any], query: str | None = None, state: str | None = None
    ) -> pa.Table:
        """One row per key asked, in that order: key columns, then value columns (nulls where a key has no value)."""
        key_columns, values = self._get_many(operator, keys, query, state)
        values = values.drop_columns([PRESENT])
        return pa.Table.from_arrays(
            [*key_columns.columns, *values.columns], schema=pa.schema([*key_columns.schema, *values.schema])
        )

    def _get_many(
        self, operator: str, keys: Sequence[Any], query: str | None, state: str | None
    ) -> tuple[pa.RecordBatch, pa.Table]:
        # As a whole: a query that was restarted may have another number of partitions.
        return self._retrying(operator, query, lambda: self._get_many_once(operator, keys, query, state))

    def _get_many_once(
        self, operator: str, keys: Sequence[Any], query: str | None, state: str | None
    ) -> tuple[pa.RecordBatch, pa.Table]:
        variables, location = self._locate(operator, query)
        family, schema, is_rows = asked_family(operator, variables, state)
        key_batch = key_columns(schema.key, keys)
        groups = key_groups(key_batch, location.key_groups)
        encoded = encode_keys(key_batch, groups)
        partitions = (groups.astype(np.int64) * location.operator.num_partitions) // location.key_groups
        asked = [(int(p), np.flatnonzero(partitions == p)) for p in np.unique(partitions)]
        answers = list(
            self._pool.map(lambda part: self._ask(location, part[0], encoded.take(pa.array(part[1])), family), asked)
        )
        order = np.concatenate([rows for _, rows in asked]) if asked else np.zeros(0, np.int64)
        values = pa.concat_arrays(answers) if answers else pa.array([], pa.binary())
        values = values.take(pa.array(np.argsort(order, kind="stable")))
        states = schema.decode_values(values)
        columns = [*(results(states) if is_rows else states.columns), values.is_valid()]
        fields = [*(result_fields(schema.value) if is_rows else states.schema), pa.field(PRESENT, pa.bool_())]
        return key_batch, pa.Table.from_arrays(columns, schema=pa.schema(fields))

    def _ask(self, location: OperatorLocation, partition: int, keys: pa.BinaryArray, family: str) -> pa.BinaryArray:
        command = GetCommand(location.run_id, location.operator.name, partition, column_family=family)
        return self._host(location.owners[partition]).get_many(command, keys)

    def _locate(self, operator: str, query: str | None) -> tuple[OperatorSchema, OperatorLocation]:
        cached = self._locations.get((operator, query))
        if cached is None or time.monotonic() > cached[0]:

            def look_up() -> tuple[float, OperatorLocation, OperatorSchema]:
                location = self._locate_remote(operator, query)
                return (
                    time.monotonic() + LOCATION_SECONDS,
                    location,
                    OperatorSchema.from_json(location.operator.schema),
                )

            cached = self._locations[(operator, query)] = self._retrying(operator, query, look_up)
        return cached[2], cached[1]

    def _retrying(self, operator: str, query: str | None, call: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return call()
            except MOVED as error:
                self._locations.pop((operator, query), None)
                if time.monotonic() > deadline:
                    raise QueryableStateError(
                        f"Operator {operator!r} did not answer within {self._timeout:.0f} s; last failure: {error}"
                    ) from error
                time.sleep(0.05 + random.random() * 0.1)
            except CoordinatorError as error:
                raise UnknownOperatorError(str(error)) from error

    def _host(self, owner: HostInfo) -> HostClient:
        client = self._hosts.get(owner.address)
        if client is None:
            client = self._hosts[owner.address] = HostClient(owner.address, self._token, self._timeout)
        return client

    def close(self) -> None:
        """Close all connections."""
        self._pool.shutdown(wait=False)
        for client in self._hosts.values():
            client.close()
        self._hosts.clear()

    def __enter__(self) -> QueryableStateClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


MOVED = (
    HostUnavailableError,
    NotOwnerError,
    RetiredRunError,
    StaleOwnerError,
    UnknownHostError,
    UnknownRunError,
)
"""Looking it up again may help: a host moved, or the query was restarted since the last look-up."""
PRESENT = "__statestore_present"


def asked_family(operator: str, variables: OperatorSchema, state: str | None) -> tuple[str, StateSchema, bool]:
    """The column family to be read, its schema, and whether it has an aggregate's states.

    Raises ``RequestError`` for what single keys cannot be looked up in.
    """
    known = [v for v in variables.variables if not v.deleted]
    named = [v for v in known if v.name == state or (state is None and len(known) == 1)]
    names = ", ".join(f"{v.name!r} ({v.kind})" for v in known)
    if not named:
        wanted = "needs state=" if state is None else f"has no state variable {state!r}; name"
        raise RequestError(f"Operator {operator!r} {wanted} one of its state variables: {names}.")
    (variable,) = named
    is_rows = variable.kind == "rows" and len(variable.families) == 1 and not variables.key_columns
    if not is_rows and variable.kind != "value":
        raise RequestError(
            f"Single keys of operator {operator!r}, state variable {variable.name!r} ({variable.kind}), cannot be looked up; "
            "read_state gives its rows. Value states and aggregates without windows can be looked up."
        )
    family = variable.family(variable.name)
    return family, variable.families[family], is_rows


def key_columns(schema: pa.Schema, keys: Sequence[Any]) -> pa.RecordBatch:
    """Keys as columns of the operator's key schema. Raises ``RequestError`` naming the key that does not fit."""
    width = len(schema)
    if width == 1:
        rows = [k if isinstance(k, tuple) and len(k) == 1 else (k,) for k in keys]
    else:
        rows = list(keys)
        wrong = next((k for k in rows if not isinstance(k, tuple) or len(k) != width), None)
        if wrong is not None or None in rows:
            raise RequestError(f"Key {wrong!r} is no tuple of the {width} key columns {', '.join(schema.names)}.")
    try:
        columns = [pa.array([row[i] for row in rows], type=field.type) for i, field in enumerate(schema)]
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        wanted = ", ".join(f"{f.name}: {f.type}" for f in schema)
        raise RequestError(f"The keys do not fit the key columns ({wanted}): {error}") from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)
