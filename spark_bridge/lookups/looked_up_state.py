"""The state in which a batch looks up its rows: one operator at one version, read from hosts or from storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pyarrow as pa

from backends.decoders import convert
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.lookup_records import LookupRecord, LookupRecords
from coordinator_actor.messages import LookedUp, OperatorLocation
from coordinator_actor.query.versions.looked_up_versions import LookedUpVersions
from coordinator_actor.reading.stored_versions import StatePlace, StateVersions
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.queryable.client.answers.state_views import StateView
from spark_bridge.queryable.client.calls.key_lookups import KeyLookups
from spark_bridge.queryable.client.cluster.known_operators import KnownOperator
from spark_bridge.queryable.protocol.connections import KvConnections
from spark_bridge.queryable.protocol.messages import At
from spark_bridge.queryable.routing.retries import Attempts, retrying
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.state_data.stored_reads import ADDRESS, StoredReads
from spark_bridge.task.endpoints import Endpoints
from spark_bridge.transport.flight_client import client_for, forget_client
from spark_bridge.transport.tls import TlsConf

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
    """One operator at one version. ``values`` gives the stored values of distinct stored keys, null for those without.

    Rows that had expired at ``at_ms`` are not there.
    """

    view: StateView
    at_ms: int
    values: Callable[[pa.BinaryArray], pa.BinaryArray]


def state_in_cluster(
    endpoints: Endpoints, operator: str, query: str, state: str | None, batch: Batch | None, fixed: LookupRecord | None
) -> LookedUpState:
    """Return the state of a query that hosts answer for: at the version ``fixed``, else at the one of ``batch``.

    Raises what the coordinator and hosts raise; whatever may pass is tried again until the recovery timeout is over.
    """

    def locate() -> LookedUp:
        if fixed is None:
            assert batch is not None, "a stream has batches, and all else has a fixed version"
            args = {"operator": operator, "query": query, "by": batch.by, "batch_id": batch.batch_id}
            return convert(_ask_coordinator(endpoints, "look_up", args), LookedUp)
        answer = _ask_coordinator(endpoints, "locate", {"operator": operator, "query": query})
        return LookedUp(convert(answer, OperatorLocation), fixed.version, fixed.at_ms)

    def attempts() -> Attempts:
        return Attempts(f"lookup in {operator!r}", time.monotonic() + endpoints.timeout, had_answer=True)

    found = retrying(locate, attempts())
    router, known = _router(endpoints), [KnownOperator.of(found.location, 0.0, None)]

    def values(keys: pa.BinaryArray) -> pa.BinaryArray:
        trying = attempts()

        def ask() -> pa.BinaryArray:
            of = known[0]
            return _values(KeyLookups(router, of, of.view(state), At("version", found.version), trying.deadline), keys)

        def relocate(error: Exception) -> None:
            known[0] = KnownOperator.of(locate().location, 0.0, known[0])

        return retrying(ask, trying, relocate=relocate)

    return LookedUpState(known[0].view(state), found.at_ms, values)


def in_storage(
    place: StatePlace, operator: str, state: str | None, batch: Batch | None, fixed: LookupRecord | None
) -> LookedUpState:
    """Return the state at a place in storage: at the version ``fixed``, else at the one of ``batch``.

    Each call of ``values`` loads the partitions that it needs. Raises ``VersionNotFoundError``, ``StorageError``.
    """
    record = fixed if fixed is not None else recorded_in_storage(place, batch)
    reads = StoredReads(place, now_ms=lambda: record.at_ms)
    known = KnownOperator.of(reads.locate(operator, None), 0.0, None)
    router = StateRouter(KvConnections("", timeout=0.0), local=(ADDRESS, reads))
    lookups = KeyLookups(router, known, known.view(state), At("version", record.version), float("inf"))
    return LookedUpState(known.view(state), record.at_ms, lambda keys: _values(lookups, keys))


def recorded_in_storage(place: StatePlace, batch: Batch | None) -> LookupRecord:
    """Return the version of a batch, or the completed one as of now for what is no batch of a stream."""
    versions = StateVersions.look(place)
    completed = versions.resolve(None)
    if batch is None:
        return LookupRecord(completed, "", int(time.time() * 1000))
    records = LookupRecords(CheckpointStorage.open(place.state_location, place.options))
    return LookedUpVersions(records, _StoredVersions(versions, completed)).resolve(
        batch.by, batch.batch_id, time.time(), nullcontext()
    )


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


def _values(lookups: KeyLookups, keys: pa.BinaryArray) -> pa.BinaryArray:
    parts = [values for _, values in lookups.values(keys)]
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _router(endpoints: Endpoints) -> StateRouter:
    key = (endpoints.token, endpoints.tls)
    with _lock:
        router = _routers.get(key)
        if router is None:
            context = None if endpoints.tls is None else endpoints.tls.client_context()
            router = _routers[key] = StateRouter(KvConnections(endpoints.token, context, endpoints.timeout))
    return router


def _ask_coordinator(endpoints: Endpoints, method: str, args: dict[str, object]) -> object:
    """Send a message through any host."""
    failure: Exception | None = None
    for address, token in endpoints.candidates():
        try:
            return client_for(address, token, endpoints.tls).call_coordinator(method, args)
        except HostUnavailableError as error:
            forget_client(address, token)
            failure = error
    raise HostUnavailableError(f"No state store host passed on {method}; last failure: {failure}")
