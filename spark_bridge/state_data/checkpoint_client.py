"""``CheckpointClient``: the query client on a checkpoint in storage, without a cluster, Ray or Spark.

Nothing is written, locked or kept back, also while the query runs. A request copies the partitions that it reads to a
temporary directory, one after the other, and removes each copy before the next. So a lookup takes as long as loading
the key's partition, and a scan as long as loading all of them; memory grows with one batch of rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pyarrow as pa
from msgspec import structs

from backends.encoding.operator_schema import ROLLING_KIND
from backends.exceptions import InvalidStateStoreArgument, VersionNotFoundError
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.durable.records import LookupRecord, read_feature_views
from coordinator_actor.durable.spark_commits import SparkCommits, query_id_of
from coordinator_actor.exceptions import listed_names
from coordinator_actor.messages import (
    HostInfo,
    LocatedView,
    OperatorLocation,
    OperatorSpec,
    QueryRegistration,
    RunningOperator,
    RunningView,
)
from coordinator_actor.reading.stored_files import opened_partition
from coordinator_actor.reading.stored_versions import Piece, StatePlace, StateVersions, find_state
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from coordinator_actor.savepoints.savepoint_format import METADATA_FILE
from spark_bridge.exceptions import RequestError, StateVersionError, UnknownFeatureViewError, UnknownOperatorError
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.discovery import KnownOperator, KnownView
from spark_bridge.queryable.client.lookups import operator_description
from spark_bridge.queryable.client.watch import StateChange, without_last_columns
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.protocol import At, ChangesRequest, FeatureAnswer, FeaturesRequest, StateAnswer, StoredKeys
from spark_bridge.queryable.reads.answer_version import PartitionView
from spark_bridge.queryable.reads.change_feed import GroupingKeyFilter, require_same_history
from spark_bridge.queryable.reads.operator_plan import OperatorPlan, operator_summary
from spark_bridge.queryable.reads.partitioned_reads import OperatorReading, PartitionedReads
from spark_bridge.queryable.routing.feature_reads import FeatureReads
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.state_data.frames import operator_kind
from spark_bridge.state_data.state_sources import changes_by_version
from spark_bridge.state_format.stored_rows import VariableRows

T = TypeVar("T")
log = logging.getLogger(__name__)


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
        kind = operator_kind(schema)
        specs.append(OperatorSpec(operator, entry.num_partitions, schema.to_json(), entry.backend, kind))
    query_id = query_id_of(open_storage(place.checkpoint_location, place.options))
    epoch = versions.log.epochs.newest()
    if is_followed and epoch is not None:
        in_version = {(spec.name, spec.num_partitions, spec.backend) for spec in specs}
        declared = {(x.operator, x.num_partitions, x.backend) for x in epoch.layouts}
        if declared and {one for one in in_version if one[0] in {name for name, *_ in declared}} - declared:
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


@dataclass(frozen=True)
class _Look:
    """The versions that a look at storage has found, and when the look began and ended."""

    begun: float
    ended: float
    versions: StateVersions


class StoredReads(PartitionedReads):
    """``StateReads`` of one checkpoint. Thread-safe; ``_lock`` guards the choice of the newest manifests only.

    ``query_name`` is the name of the query, which storage does not have. Reads of the version of ``looked_up`` fail
    once another run than that of the record has made the version.
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
        looked_up: LookupRecord | None = None,
    ) -> None:
        super().__init__(now_ms)
        self._looked_up = looked_up
        self.place = place
        self._query_name = query_name
        self._damaged = damaged
        self._told: set[str] = set()
        self._open = open_storage
        self._clock = clock
        self._query_id = query_id_of(open_storage(place.checkpoint_location, place.options))
        self._lock = threading.Lock()
        self._looked: _Look | None = None

    # -- operators and versions ----------------------------------------------------------------

    def versions(self) -> StateVersions:
        """Return the versions that there are now, or were ``MANIFEST_LOOK_SECONDS`` ago."""
        looked = self._looked
        if looked is not None and self._clock() - looked.begun < MANIFEST_LOOK_SECONDS:
            return looked.versions
        begun = self._clock()
        passes = self._damaged is not None
        versions = StateVersions.look(self.place, passes_over_damage=passes, open_storage=self._open)
        with self._lock:
            untold = [what for what in versions.damages.values() if what not in self._told]
            self._told.update(untold)
            if self._damaged is not None:
                for what in untold:
                    self._damaged(what)
            # If two threads looked at once, the one that saw more counts. A look that began after the other one had
            # ended always counts: if it saw less, the query was rolled back.
            before = self._looked
            if before is None or before.ended <= begun or before.versions.completed <= versions.completed:
                self._looked = _Look(begun, self._clock(), versions)
                return versions
            return before.versions

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
            self._watermark_of(newest) if spec.kind == ROLLING_KIND else None,
        )

    def _watermark_of(self, version: int) -> int | None:
        """Return the watermark of the batch that made a version, which is in Spark's offset log."""
        spark = SparkCommits(self._open(self.place.checkpoint_location, self.place.options))
        return spark.watermark_ms(version - 1) if version else None

    def operators(self) -> list[dict[str, Any]]:
        versions = self.versions()
        newest = versions.newest_completed()
        oldest = versions.readable[0] if versions.readable else newest
        of = self._registration(versions, newest)
        return [
            operator_summary(RunningOperator(of.query_id, of.run_id, of.name, spec, of.key_groups, oldest, newest))
            for spec in of.operators
        ]

    def describe(self, operator: str | None, query: str | None) -> dict[str, Any]:
        operators = [o for o in self.operators() if operator in (None, o["operator"])]
        return {"host_id": ADDRESS, "operators": operators}

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        """Return the newest completed version; storage sends no notice of the next one."""
        return self.versions().newest_completed()

    def lag_ms(self, run_id: str) -> int:
        """Return 0: each read looks at storage."""
        return 0

    def age_ms(self, run_id: str, version: int) -> int | None:
        manifest = self.versions().chain.get(version)
        return None if manifest is None else max(0, self._now_ms() - manifest.created_ms)

    def feature_views(self) -> list[RunningView]:
        of = self._registration(versions := self.versions(), versions.newest_completed())
        views = read_feature_views(self._open(self.place.state_location, self.place.options))
        return [RunningView(view, of.query_id, of.run_id, of.name) for view in views]

    def located_view(self, view: str) -> LocatedView:
        """See ``StateReads``. Raises ``UnknownOperatorError`` for a feature of another query."""
        declared = {running.view.name: running.view for running in self.feature_views()}
        if view not in declared:
            raise UnknownFeatureViewError(
                f"The checkpoint at {self.place.checkpoint_location} has no feature view {view!r}; feature views "
                f"that exist: {listed_names(view, declared)}"
            )
        # Storage has no name of the query: whatever the program calls it, its operators are here.
        operators = tuple(self.locate(operator, None) for operator, _ in declared[view].sources)
        return LocatedView(declared[view], operators)

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
            if self._looked_up is not None and version == self._looked_up.version:
                self._looked_up.require_made_by(versions.chain[version].run_id if version else "")
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


WATCH_POLL_SECONDS = 1.0
"""How often a watch looks for the next version."""
CHECKPOINT_READ_SECONDS = 24 * 3600.0
"""Storage answers when it answers; the reads of a checkpoint wait for nothing else."""


class CheckpointClient(QueryableStateClient):
    """Reads the state of one query from its checkpoint, by the methods of ``QueryableStateClient``.

        client = CheckpointClient.open("s3://bucket/ck")
        client.get("user_totals", 42)
        client.sql("select user, spent from user_totals order by spent desc limit 10").df()

    Keys, versions, errors and results are those of the query client. The query may run at the same time, and is not
    disturbed; changes that Spark has not committed yet are not visible. A lookup loads the key's partition, a scan all
    partitions, one after the other.
    """

    def __init__(self, reads: StoredReads) -> None:
        connections = KvConnections("", timeout=CHECKPOINT_READ_SECONDS)
        super().__init__(
            _InStorage(reads), connections, StateRouter(connections, local=(ADDRESS, reads)), CHECKPOINT_READ_SECONDS
        )
        self.reads = reads
        self._features = FeatureReads(reads, self._router, lambda run_id, operator: reads.locate(operator, None))
        self._access.find_views = lambda request, deadline: self._features.views(request)

    @classmethod
    def open(
        cls,
        checkpoint_location: str,
        state_location: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        *,
        damaged: Callable[[str], None] = log.warning,
        open_storage: OpenStorage = CheckpointStorage.open,
    ) -> CheckpointClient:
        """Open the checkpoint of a query.

        ``state_location`` is the value of ``spark.statestore.location`` when the query ran, if it was set. If a
        manifest is damaged, the versions that it does not concern can still be read, and ``damaged`` receives the
        damage. Raises ``MissingFileError`` if the checkpoint has no state, ``DamagedFileError``.
        """
        place = find_state(checkpoint_location, state_location, storage_options, open_storage=open_storage)
        return cls(StoredReads(place, damaged=damaged, open_storage=open_storage))

    def operators(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        return self.reads.operators()

    def describe(self, operator: str, query: str | None = None, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the description of one operator. Its only host is the storage, which holds nothing in memory."""
        target = KnownOperator.of(self.reads.locate(operator, query))
        return operator_description(target, [self.reads.describe(operator, query)])

    def _ask_features(
        self, target: KnownView, at: list[At], defaults: bool, keys: StoredKeys, deadline: float
    ) -> FeatureAnswer:
        request = FeaturesRequest(target.location.view.name, target.location.revision, at, defaults)
        stored = pa.array(keys, pa.binary()) if isinstance(keys, list) else keys
        return self._features.features(request, stored, deadline)

    def watch(  # type: ignore[override]
        self,
        operator: str,
        keys: Any = None,
        *,
        state: str | None = None,
        query: str | None = None,
        from_version: int | None = None,
        timeout: float | None = None,
        from_run: str | None = None,
        every_version: bool = False,
    ) -> StoredWatch:
        """Return the changes of each completed version, as storage shows them; see ``StoredWatch``."""
        return StoredWatch(self.reads, operator, keys, state, query, from_version, from_run, every_version)


class _InStorage:
    """The ``Discovery`` of a client that asks no host."""

    def __init__(self, reads: StoredReads) -> None:
        self._reads = reads

    def locate(self, operator: str, query: str | None, deadline: float) -> OperatorLocation:
        return self._reads.locate(operator, query)

    def proxy(self) -> str:
        raise RequestError("This client reads a checkpoint; it has no hosts to ask.")

    def knows_proxy(self) -> bool:
        """Return False: there is none."""
        return False

    def failed(self) -> None:
        """Do nothing: a checkpoint has no other host."""

    def note(self, addresses: Sequence[str]) -> None:
        """Do nothing: no host is asked."""


class StoredWatch:
    """The changes of an operator's state, version by version, like ``StateWatch``; it looks every second.

    Iterate over it; it ends with ``close`` only, as storage does not show whether the query still runs. A watch of some
    keys reads the changelogs of each version, and loads a partition only if one of its keys has changed. ``run_id`` is
    the newest run when the changes up to ``position`` were read. Raises ``StateVersionError`` if a later run has remade
    them.
    """

    def __init__(
        self,
        reads: StoredReads,
        operator: str,
        keys: Any,
        state: str | None,
        query: str | None,
        from_version: int | None,
        from_run: str | None = None,
        every_version: bool = False,
    ) -> None:
        self._reads = reads
        self._state = state
        self._every_version = every_version
        self._known = KnownOperator.of(reads.locate(operator, query))
        view = self._known.view(state)
        codec = view.without_window
        self._keys = None if keys is None else codec.encode(codec.columns(keys)).unique()
        newest = self._known.location.completed_version
        if from_version is not None:
            try:
                reads.versions().resolve(from_version)
            except VersionNotFoundError as error:
                raise StateVersionError(
                    f"from_version={from_version} of operator {operator!r} cannot be watched from. {error}"
                ) from error
        self.position = newest if from_version is None else from_version
        # The position is one of the history that storage shows now: a rollback before the first change counts as well.
        epoch = reads.versions().log.epochs.newest()
        self.run_id = from_run if from_run is not None or epoch is None else epoch.run_id
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def __enter__(self) -> StoredWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[StateChange]:
        return self

    def __next__(self) -> StateChange:
        while not self._closed.is_set():
            try:
                newest = self._reads.versions().resolve(None)
            except VersionNotFoundError as error:
                raise StateVersionError(str(error)) from error
            for change in self.up_to(newest):
                return change
            self._closed.wait(WATCH_POLL_SECONDS)
        raise StopIteration

    def up_to(self, version: int) -> Iterator[StateChange]:
        """Yield the changes that are after ``position``, up to a completed version."""
        while self.position < version and not self._closed.is_set():
            change, newest_run = self._of_version(self.position + 1)
            self.position, self.run_id = change.version, newest_run
            if change.batch.num_rows or self._every_version:
                yield change

    def _of_version(self, version: int) -> tuple[StateChange, str | None]:
        location = self._known.location
        request = ChangesRequest(location.run_id, location.operator.name, version - 1, version, self._state)
        newest = self._reads.versions().log.epochs.newest()
        answer = self._reads.changes(request, self._keys)
        parts = list(answer.batches) or [pa.RecordBatch.from_pylist([], answer.schema)]
        if self.run_id is not None:
            # After the changes, which the same versions or earlier ones have given.
            require_same_history(location.operator.name, self._reads.versions(), version - 1, self.run_id)
        return StateChange(version, without_last_columns(parts)), None if newest is None else newest.run_id


# The query client on a path in storage, which is a checkpoint or a savepoint.


@contextmanager
def client_of_path(
    location: str,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    *,
    progress: Callable[[str], None] = lambda step: None,
    damaged: Callable[[str], None] = log.warning,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> Iterator[CheckpointClient]:
    """Yield a client that reads the checkpoint or savepoint at ``location``.

    A savepoint is first restored to a temporary directory, with messages to ``progress``, and has one version: that of
    the savepoint. ``damaged`` is that of ``CheckpointClient.open``. Raises what ``open`` and
    ``restore_into_checkpoint`` raise.
    """
    options = dict(storage_options or {})
    if not open_storage(location, options).exists(METADATA_FILE):
        yield CheckpointClient.open(location, state_location, options, damaged=damaged, open_storage=open_storage)
        return
    progress(f"{location} is a savepoint; it is restored to a temporary directory to be read.")
    with TemporaryDirectory(prefix="statestore-savepoint-") as scratch:
        checkpoint = str(Path(scratch) / "checkpoint")
        restore_into_checkpoint(location, checkpoint, storage_options=options, open_storage=open_storage)
        yield CheckpointClient.open(checkpoint, None, options, open_storage=open_storage)
