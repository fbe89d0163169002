"""The state that a lookup reads: one operator at one version, from hosts or from storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.decoders import convert
from backends.encoding.keys import encode_keys
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.records import LookupRecord, LookupRecords
from coordinator_actor.messages import LookedUp, OperatorLocation
from coordinator_actor.reading.stored_versions import StatePlace, StateVersions
from coordinator_actor.run.versions import LookedUpVersions
from spark_bridge.aggregates.rolling import Moment
from spark_bridge.queryable.client.arguments import comparisons
from spark_bridge.queryable.client.discovery import KnownOperator
from spark_bridge.queryable.client.lookups import KeyLookups
from spark_bridge.queryable.client.state_views import StateView
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.protocol import At, ScanRequest
from spark_bridge.queryable.reads.scans import MAX_RANGES
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.queryable.routing.scatter_gather import Attempts, retrying
from spark_bridge.state_data.checkpoint_client import ADDRESS, StoredReads
from spark_bridge.state_format.layouts import LOST_FAMILY, LOST_GROUP, ROLLING, TILES_FAMILY
from spark_bridge.state_format.stored_rows import VariableRows, key_groups_of
from spark_bridge.task.executor import Endpoints
from spark_bridge.transport.tls import TlsConf

T = TypeVar("T")
_routers: dict[tuple[str, TlsConf | None], StateRouter] = {}
_lock = threading.Lock()
"""Guards ``_routers``: a worker process keeps its connections to hosts from task to task."""


@dataclass(frozen=True)
class Batch:
    """A batch of a streaming query that looks up: the id of the query, and the number of the batch."""

    by: str
    batch_id: int


@dataclass(frozen=True)
class LookedUpState:
    """One operator at one version. ``values`` returns the stored values that distinct stored keys have in a column
    family, null for those without. ``matching`` returns some columns of the rows whose indexed column has one of some
    values.

    Rows that had expired at ``at_ms`` are left out, and rolling aggregates are as of that time.
    """

    view: StateView
    at_ms: int
    values: Callable[[pa.BinaryArray, str], pa.BinaryArray]
    matching: Callable[[str, pa.Array, Sequence[str]], pa.Table]

    def columns(
        self, keys: pa.BinaryArray, places: pa.Array, moments: pa.Array | None
    ) -> tuple[list[pa.Array], pa.BooleanArray]:
        """Return the columns of ``view.stored_values`` of rows, and whether their keys have state.

        ``places`` are the places of the rows' keys, null for a row without a key. ``moments`` are the times of the rows
        in microseconds: their rolling aggregates are as of these.
        """
        view = self.view
        if view.kind != ROLLING:
            values = view.stored_values.unexpired(self.values(keys, view.family), self.at_ms)
            columns = [column.take(places) for column in view.stored_values.columns(values, self.at_ms)]
            return columns, values.is_valid().take(places).fill_null(False)
        if len(keys):
            groups = np.unique(key_groups_of(keys))
            lost = self.values(encode_keys(pa.record_batch([groups], names=[LOST_GROUP]), groups), LOST_FAMILY)
            known = self._as_of(moments, places.is_valid())
            known.require_retained(known.first_moment([lost]))
        recent = self.values(keys, DEFAULT_FAMILY).take(places)
        is_there = recent.is_valid()
        of_rows = places.filter(is_there)
        rows = self._as_of(moments, is_there)
        answers = rows.rolled(recent.filter(is_there), self.values(keys, TILES_FAMILY).take(of_rows))
        back = np.where(is_there, np.cumsum(is_there) - 1, -1)
        return [column.take(pa.array(back, mask=back < 0)) for column in answers], is_there

    def _as_of(self, moments: pa.Array | None, chosen: pa.BooleanArray) -> VariableRows:
        """Return the variable as of the moments of the chosen rows."""
        moment: Moment = self.at_ms * 1000 if moments is None else np.asarray(moments.filter(chosen))
        return VariableRows(self.view.operator_schema, self.view.variable, moment=moment)


def state_in_cluster(
    endpoints: Endpoints, operator: str, query: str, state: str | None, batch: Batch | None, fixed: LookupRecord | None
) -> LookedUpState:
    """Return the state of a query that hosts answer for: at the version ``fixed``, else at the one of ``batch``.

    Raises the errors of the coordinator and hosts; transient ones are retried until the recovery timeout is over.
    """

    def locate() -> LookedUp:
        if fixed is None:
            assert batch is not None, "a stream has batches, and all else has a fixed version"
            args = {"operator": operator, "query": query, "by": batch.by, "batch_id": batch.batch_id}
            return convert(endpoints.call_coordinator("look_up", args), LookedUp)
        args = {"operator": operator, "query": query, "version": fixed.version}
        location = convert(endpoints.call_coordinator("locate", args), OperatorLocation)
        fixed.require_made_by(location.made_by)
        return LookedUp(location, fixed.version, fixed.at_ms)

    def attempts() -> Attempts:
        return Attempts(f"lookup in {operator!r}", time.monotonic() + endpoints.timeout, had_answer=True)

    looked_up = retrying(locate, attempts())
    router, targets = _router(endpoints), [KnownOperator.of(looked_up.location)]

    def retried(read: Callable[[KeyLookups], T]) -> T:
        trying = attempts()

        def ask() -> T:
            of = targets[0]
            at = At("version", looked_up.version)
            return read(KeyLookups(router, of, of.view(state), at, trying.deadline))

        def relocate(error: Exception) -> None:
            targets[0] = KnownOperator.of(locate().location, targets[0])

        return retrying(ask, trying, relocate=relocate)

    return LookedUpState(
        targets[0].view(state),
        looked_up.at_ms,
        lambda *asked: retried(lambda lookups: _values(lookups, *asked)),
        lambda *asked: retried(lambda lookups: _matching(lookups, *asked)),
    )


def in_storage(
    place: StatePlace, operator: str, state: str | None, batch: Batch | None, fixed: LookupRecord | None
) -> LookedUpState:
    """Return the state at a place in storage: at the version ``fixed``, else at the one of ``batch``.

    Each call of ``values`` loads the partitions that it needs. Raises ``VersionNotFoundError``, ``StorageError``.
    """
    record = fixed if fixed is not None else recorded_in_storage(place, batch)
    reads = StoredReads(place, now_ms=lambda: record.at_ms, looked_up=record)
    target = KnownOperator.of(reads.locate(operator, None))
    router = StateRouter(KvConnections("", timeout=0.0), local=(ADDRESS, reads))
    lookups = KeyLookups(router, target, target.view(state), At("version", record.version), float("inf"))
    values, matching = partial(_values, lookups), partial(_matching, lookups)
    return LookedUpState(target.view(state), record.at_ms, values, matching)


def recorded_in_storage(place: StatePlace, batch: Batch | None, version: int | None = None) -> LookupRecord:
    """Return the version of a batch; without a batch a version, or the one that is completed now.

    Raises ``VersionNotFoundError``.
    """
    versions = StateVersions.look(place)
    number = versions.resolve(version)
    if batch is None:
        made_by = versions.chain[number].run_id if number else ""
        return LookupRecord(number, made_by, int(time.time() * 1000))
    records = LookupRecords(CheckpointStorage.open(place.state_location, place.options))
    looked_up = LookedUpVersions(records, _StoredVersions(versions, number))
    return looked_up.resolve(batch.by, batch.batch_id, time.time(), nullcontext())


class _StoredVersions:
    """The ``Versions`` that storage shows. The coordinator of the query that is looked up takes up the records."""

    def __init__(self, versions: StateVersions, completed: int) -> None:
        self.completed = completed
        self.chain = versions.chain
        self.readable = versions.readable

    def pin(self, holder: int | str, version: int) -> None:
        """Do nothing."""

    def unpin(self, holder: int | str) -> None:
        """Do nothing."""


def _values(lookups: KeyLookups, keys: pa.BinaryArray, family: str) -> pa.BinaryArray:
    parts = [values for _, values in lookups.values(keys, family)]
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _matching(lookups: KeyLookups, column: str, values: pa.Array, columns: Sequence[str]) -> pa.Table:
    location, types = lookups.target.location, lookups.view.types
    tables: list[pa.Table] = []
    step = max(1, MAX_RANGES * location.operator.num_partitions // location.key_groups)
    for at in range(0, len(values), step):
        where = comparisons([(column, "in", values[at : at + step].to_pylist())], types)
        request = ScanRequest(
            location.run_id, location.operator.name, at=lookups.at, columns=list(columns), where=where
        )
        answer = lookups.router.scan(location, request, lookups.deadline)
        tables.append(pa.Table.from_batches(list(answer.batches), answer.schema))
    nothing = pa.schema([pa.field(name, types[name]) for name in columns]).empty_table()
    return pa.concat_tables(tables) if tables else nothing


def _router(endpoints: Endpoints) -> StateRouter:
    key = (endpoints.token, endpoints.tls)
    with _lock:
        if (router := _routers.get(key)) is None:
            context = None if endpoints.tls is None else endpoints.tls.client_context()
            router = _routers[key] = StateRouter(KvConnections(endpoints.token, context, endpoints.timeout))
    return router
