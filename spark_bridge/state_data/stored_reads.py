"""Answers the requests of query clients from a checkpoint in storage, as a host answers them from its partitions.

Nothing is written, locked or kept back, also while the query runs. A request copies the partitions that it reads to a
temporary directory, one after the other, and removes each copy before the next. So a lookup takes as long as loading
the key's partition, and a scan as long as loading all of them; memory grows with one batch of rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa
from msgspec import structs

from backends.exceptions import InvalidStateStoreArgument, VersionNotFoundError
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.durable.spark_commits import query_id_of
from coordinator_actor.messages import HostInfo, OperatorLocation, OperatorSpec, QueryRegistration, RunningOperator
from coordinator_actor.reading.stored_files import opened_partition
from coordinator_actor.reading.stored_versions import Piece, StatePlace, StateVersions
from spark_bridge.exceptions import RequestError, StateVersionError, UnknownOperatorError
from spark_bridge.queryable.protocol import At, ChangesRequest, StateAnswer
from spark_bridge.queryable.reads.answer_version import PartitionView
from spark_bridge.queryable.reads.change_feed import GroupingKeyFilter
from spark_bridge.queryable.reads.operator_plan import OperatorPlan, operator_summary
from spark_bridge.queryable.reads.partitioned_reads import OperatorReading, PartitionedReads
from spark_bridge.state_data.frames import operator_kind
from spark_bridge.state_data.state_sources import changes_by_version
from spark_bridge.state_format.stored_rows import VariableRows

T = TypeVar("T")

# The query whose state is in storage, as coordinators, hosts and clients describe queries.


def query_in_storage(
    versions: StateVersions,
    version: int,
    name: str | None = None,
    session_id: str = "",
    *,
    is_followed: bool = False,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> QueryRegistration:
    """Return the query with its operators as they are at a version. Its run is the one that has claimed the state last.

    Storage has neither the query's ``name`` nor a session. With ``is_followed``, later versions of the run are read,
    too. Then raises ``VersionNotFoundError`` while the run has made no version with its own partitions and backends:
    hosts keep the layout with which they begin a run.
    """
    place = versions.place
    specs = []
    for operator, entry in sorted(versions.operators(version).items()):
        schema = versions.schema(entry)
        specs.append(
            OperatorSpec(operator, entry.num_partitions, schema.to_json(), entry.backend, operator_kind(schema))
        )
    query_id = query_id_of(open_storage(place.checkpoint_location, place.options))
    epoch = versions.log.epochs.newest()
    if is_followed and epoch is not None:
        made = {(spec.name, spec.num_partitions, spec.backend) for spec in specs}
        declared = {(x.operator, x.num_partitions, x.backend) for x in epoch.layouts}
        if declared and {one for one in made if one[0] in {name for name, *_ in declared}} - declared:
            raise VersionNotFoundError(
                f"Run {epoch.run_id} has claimed the state at {place.state_location} with other partitions or "
                "backends, and has completed no version yet: wait for its first batch."
            )
    return QueryRegistration(
        query_id,
        query_id if epoch is None else epoch.run_id,
        name,
        session_id,
        place.checkpoint_location,
        place.state_location,
        tuple(specs),
        versions.key_groups,
        dict(place.options),
        ended=True,
    )


ADDRESS = "storage"
"""The address under which a router finds these reads in its own process."""
MANIFEST_LOOK_SECONDS = 1.0
"""TTL of the last manifests that were read, in seconds."""


class StoredReads(PartitionedReads):
    """``StateReads`` of one checkpoint. Thread-safe; ``_lock`` guards the choice of the newest manifests only.

    ``query_name`` is the name of the query, which storage does not have.
    """

    def __init__(
        self,
        place: StatePlace,
        query_name: str | None = None,
        *,
        damaged: Callable[[str], None] | None = None,
        open_storage: OpenStorage = CheckpointStorage.open,
        clock: Callable[[], float] = time.monotonic,
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
    ) -> None:
        super().__init__(now_ms)
        self.place = place
        self._query_name = query_name
        self._damaged = damaged
        self._told: set[str] = set()
        self._open = open_storage
        self._clock = clock
        self._query_id = query_id_of(open_storage(place.checkpoint_location, place.options))
        self._lock = threading.Lock()
        self._looked: tuple[float, StateVersions] | None = None

    # -- operators and versions ----------------------------------------------------------------

    def versions(self) -> StateVersions:
        """Return the versions that there are now, or were ``MANIFEST_LOOK_SECONDS`` ago."""
        looked = self._looked
        if looked is not None and self._clock() - looked[0] < MANIFEST_LOOK_SECONDS:
            return looked[1]
        begun = self._clock()
        passes = self._damaged is not None
        found = StateVersions.look(self.place, passes_over_damage=passes, open_storage=self._open)
        with self._lock:
            untold = [what for what in found.damages.values() if what not in self._told]
            self._told.update(untold)
            if self._damaged is not None:
                for what in untold:
                    self._damaged(what)
            # If two threads looked at once, the one that saw more counts.
            if self._looked is None or self._looked[1].completed <= found.completed:
                self._looked = begun, found
            return self._looked[1]

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        versions = self.versions()
        newest = versions.newest_completed()
        registration = self._registration(versions, newest)
        names = (registration.name, registration.query_id, registration.run_id)
        spec = next((o for o in registration.operators if o.name == operator), None)
        if spec is None or (query is not None and query not in names):
            of = "" if query is None else f" of a query {query!r}"
            raise UnknownOperatorError(
                f"The checkpoint at {self.place.checkpoint_location} (query {self._query_id}) has no operator "
                f"{operator!r}{of}; its operators: {', '.join(repr(o.name) for o in registration.operators)}."
            )
        owner = HostInfo(ADDRESS, "", "", "", "", ADDRESS)
        return OperatorLocation(
            registration.query_id,
            registration.run_id,
            registration.name,
            spec,
            registration.key_groups,
            newest,
            (owner,) * spec.num_partitions,
        )

    def operators(self) -> list[dict[str, Any]]:
        """Return the operators of the last completed version, ready for JSON."""
        versions = self.versions()
        newest = versions.newest_completed()
        oldest = versions.readable[0] if versions.readable else newest
        of = self._registration(versions, newest)
        return [
            operator_summary(RunningOperator(of.query_id, of.run_id, of.name, spec, of.key_groups, oldest, newest))
            for spec in of.operators
        ]

    def describe(self, operator: str | None, query: str | None) -> dict[str, Any]:
        """See ``StateReads``: nothing is held."""
        found = [o for o in self.operators() if operator in (None, o["operator"])]
        return {"host_id": ADDRESS, "operators": found}

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        """Return the newest completed version; storage sends no notice of the next one."""
        return self.versions().newest_completed()

    def lag_ms(self, run_id: str) -> int:
        """Return 0: each read looks at storage."""
        return 0

    def _registration(self, versions: StateVersions, version: int) -> QueryRegistration:
        return query_in_storage(versions, version, self._query_name, open_storage=self._open)

    # -- rows ----------------------------------------------------------------------------------

    def changes(self, request: ChangesRequest, keys: pa.BinaryArray | None) -> StateAnswer:
        if request.after > request.until:
            raise RequestError(f"Changes after version {request.after} up to version {request.until}: there are none.")
        versions = self.versions()
        try:
            newest = versions.resolve(request.until)
            plan = OperatorPlan.of(self._registration(versions, newest), request.operator)
            readings = [
                versions.reading_of_changes(request.operator, v - 1, v) for v in range(request.after + 1, newest + 1)
            ]
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        rows = VariableRows(plan.schema, plan.variable(request.state))
        wanted = None if keys is None else GroupingKeyFilter.of(rows, keys)
        schema, batches = changes_by_version(rows, readings, wanted, self._open)
        return StateAnswer(newest, schema, batches)

    def _reading(self, run_id: str, operator: str, at: At) -> OperatorReading:
        """Return the reading of an operator. Raises ``StateVersionError`` and ``UnknownOperatorError``.

        Versions that are prepared only are not read, so that "latest" is the last completed one.
        """
        versions = self.versions()
        try:
            newest = versions.newest_completed()
            version = versions.resolve(at.version if at.isolation == "version" else None)
            plan = OperatorPlan.of(self._registration(versions, newest), operator)
            pieces = versions.reading(operator, version).pieces
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        except InvalidStateStoreArgument as error:
            raise UnknownOperatorError(str(error)) from error
        named_layout = plan.spec.num_partitions
        if len(pieces) != named_layout:
            # The last schema reads the rows of older versions too; the layout is that of the version.
            plan = replace(plan, spec=structs.replace(plan.spec, num_partitions=len(pieces)))
        return _StoredReading(plan, version, {piece.partition: piece for piece in pieces}, named_layout, self._opened)

    @contextmanager
    def _opened(self, piece: Piece, version: int) -> Iterator[PartitionView]:
        try:
            with opened_partition(self.place, piece, open_storage=self._open) as state:
                yield PartitionView(piece.partition, state.reads, version, None)
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error


@dataclass(frozen=True)
class _StoredReading(OperatorReading):
    """Partitions of a version in storage. Each is a group: its copy is removed before the next one is made.

    ``named_layout`` is the number of partitions that clients know, which may differ from that of the version.
    """

    plan: OperatorPlan
    version: int
    pieces: dict[int, Piece]
    named_layout: int
    opened: Callable[[Piece, int], AbstractContextManager[PartitionView]]

    def partitions(self, named: list[int] | None) -> Sequence[int]:
        # A router names all partitions of the last layout to ask for all that there is, also in another layout.
        if named is None or len(named) == self.named_layout:
            return list(self.pieces)
        return [partition for partition in self.pieces if partition in named]

    def read(
        self, partitions: Sequence[int], read: Callable[[PartitionView], T], keep: ExitStack
    ) -> tuple[int, Iterator[Sequence[T]]]:
        def groups() -> Generator[Sequence[T], None, None]:
            for partition in partitions:
                with self.opened(self.pieces[partition], self.version) as view:
                    yield (read(view),)

        results = groups()
        keep.callback(results.close)
        return self.version, results
