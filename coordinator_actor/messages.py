"""The records that messages carry between driver, tasks, hosts and the coordinator.

Plain typed records (msgspec), the same over Ray actor calls and, as JSON, over Arrow Flight. Their roles follow Spark's
``StateStoreCoordinatorMessage`` family and Flink's ``AcknowledgeCheckpoint``. ``coordinator_port.py`` declares the
messages themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType

import msgspec
from msgspec import Struct, field

from backends.formats.manifest import ChangelogRef, SnapshotDescriptor, SnapshotRef
from backends.storage.locations import FileRef
from coordinator_actor.exceptions import InvalidRequestError, UnknownOperatorError, listed_names
from coordinator_actor.feature_views import FeatureView


class OperatorSpec(Struct, frozen=True):
    """One stateful operator of a query, as the program declares it.

    ``schema`` is the JSON of a ``backends.encoding.operator_schema.OperatorSchema``; its digest is the schema id.
    ``kind`` tells readers how to turn stored values into results. ``uses_time``: the tasks of the operator need the
    times of the batch.
    """

    name: str
    num_partitions: int
    schema: str
    backend: str = "rocksdb"
    kind: str = "aggregate"
    uses_time: bool = False


class BatchTimes(Struct, frozen=True):
    """The times of a micro-batch, in ms since 1970, as Spark has logged them. A repeated batch has the same times.

    ``timestamp_ms`` is the processing time of the batch. ``watermark_ms`` closes windows and fires timers. Rows at or
    before ``late_watermark_ms``, the watermark of the batch before, are late.
    """

    timestamp_ms: int = 0
    watermark_ms: int = 0
    late_watermark_ms: int = 0

    def behind(self, lag_ms: int) -> BatchTimes:
        """Return the times for rows that may be late by ``lag_ms``; watermarks do not go below 0."""
        return BatchTimes(
            self.timestamp_ms, max(0, self.watermark_ms - lag_ms), max(0, self.late_watermark_ms - lag_ms)
        )


class InputPace(Struct, frozen=True):
    """The input of a query in its last batch, as Spark reports it: rows a second received, and rows a second processed.

    ``backlog_rows`` are rows in the sources that the query has not read; None if no source reports them.
    ``behind_seconds`` is how old the state of a mirror may be; None if the query is not a mirror, or
    does not know it yet.
    """

    rows_per_second: float = 0.0
    processed_per_second: float = 0.0
    backlog_rows: int | None = None
    behind_seconds: float | None = None


class OperatorFigures(Struct, frozen=True):
    """Counts of one task's work on the state of its partition (Spark: ``StateOperatorProgress``).

    ``num_rows`` counts input rows that were not late. ``custom`` has the operator's own figures.
    """

    num_rows: int = 0
    num_rows_updated: int = 0
    num_rows_removed: int = 0
    num_rows_dropped_by_watermark: int = 0
    custom: dict[str, float] = field(default_factory=dict)


MIRROR = "mirror"
"""The kind of the operators of a mirror."""
DUPLICATES = "numDroppedDuplicateRows"
"""Spark's name for the figure of ``deduplicate``, in ``OperatorFigures.custom``."""


DROPPED_ELEMENTS = "numDroppedElements"
"""The figure of elements that the limits of ``collect_list`` and ``collect_set`` have dropped. Only operators with such
limits have it in ``OperatorFigures.custom``.
"""


class CommitFigures(Struct, frozen=True):
    """Counts and times of a task and its commit, for the history of checkpoints.

    For rows see ``OperatorFigures``; ``duplicates`` are rows that were dropped as such. ``steps`` has milliseconds by
    step, at most ``MAX_STEPS``. ``storage`` are the host's requests to the query's storage since its last commit of
    that query: requests by kind, and bytes.
    """

    rows: int = 0
    updated: int = 0
    removed: int = 0
    late: int = 0
    storage: dict[str, int] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)
    duplicates: int = 0


MAX_STEPS = 16
"""At most this many steps of a task are distinguished: their names come from tasks."""


class QueryRegistration(Struct, frozen=True):
    """The driver's message that registers a streaming query at its start.

    ``state_location`` is the directory with ``manifests/`` and everything else of the state. ``checkpoint_location`` is
    Spark's own directory, whose ``commits/`` say which batches are committed. Of the versions before the completed one,
    ``min_versions_to_retain`` are kept, and those that were the newest one in the last ``min_seconds_to_retain``. The
    others are removed every ``maintenance_interval`` seconds. ``ended``: the query has ended, and its last version is
    only read. ``standby_replicas`` is the number of copies of each partition on other machines.
    """

    query_id: str
    run_id: str
    name: str | None
    session_id: str
    checkpoint_location: str
    state_location: str
    operators: tuple[OperatorSpec, ...]
    key_groups: int = 1024
    storage_options: dict[str, str] = field(default_factory=dict)
    min_versions_to_retain: int = 100
    maintenance_interval: float = 60.0
    ended: bool = False
    min_seconds_to_retain: int = 0
    standby_replicas: int = 0

    @property
    def title(self) -> str:
        """Return the name, the query id and the run id, for messages."""
        return f"{self.name or 'unnamed'} ({self.query_id}, run {self.run_id})"

    def is_named(self, query: str) -> bool:
        """Return whether that is the name, the query id, the run id or the state location."""
        return query in (self.name, self.query_id, self.run_id, self.state_location)


class RegisteredQuery(Struct, frozen=True):
    """The answer to a registration. ``refusal`` is the reason why the query may not run, or None."""

    refusal: str | None
    epoch: int
    completed_version: int


class HostInfo(Struct, frozen=True):
    """One incarnation of a StateStoreHost. ``address`` is its Flight location, ``grpc://ip:port``.

    ``host_id`` stays the same over restarts of the actor; ``incarnation`` is new with each restart, and ``restart``
    counts them: of two incarnations, the one with the higher number is the host. ``query_address`` is where its
    ``KvStateServer`` answers query clients, ``ip:port``; empty if there is none. ``zone`` is the failure domain of the
    node, such as an availability zone; empty if Ray's node labels name none.
    """

    host_id: str
    incarnation: str
    address: str
    node_id: str
    session_id: str
    query_address: str = ""
    restart: int = 0
    zone: str = ""

    @property
    def ip(self) -> str:
        return self.address.rpartition("//")[2].rpartition(":")[0]


NOBODY = -1
"""In lists of owners: the partition has no owner yet."""


class OpenBatch(Struct, frozen=True):
    """A host opens a batch on behalf of the first of its tasks. The answer serves all its tasks.

    ``assignment`` is the number of the last assignment of this run that the host knows, 0 for none. Tasks on this host
    wait for the partitions in ``waiting`` (operator and number): the answer names their owners.
    """

    run_id: str
    batch_id: int
    host_id: str
    incarnation: str
    assignment: int = 0
    waiting: tuple[tuple[str, int], ...] = ()


class BatchGrant(Struct, frozen=True):
    """The owners of partitions in a batch, and the last files at ``version`` of the partitions of the asking host.

    ``heads`` maps operator and partition to the path of the changelog that made ``version`` (left out for the empty
    version 0). Files are unique and never overwritten, so this path identifies the whole lineage. ``owners`` has an
    index into ``hosts`` for each partition of each operator. It is ``NOBODY`` for a partition whose holder may still
    report to a coordinator that was just started, and that no task was known to wait for. Both are empty if the host's
    known assignment is still valid. ``epoch`` distinguishes grants of older and newer runs. With ``registration`` the
    host can report the query to a coordinator that has lost it. ``times`` are set if an operator of the query uses
    them. ``created_ms`` is that of ``Completed``.
    """

    version: int
    epoch: int
    assignment: int
    registration: QueryRegistration
    heads: dict[str, dict[int, str]]
    hosts: tuple[HostInfo, ...] = ()
    owners: dict[str, list[int]] = field(default_factory=dict)
    times: BatchTimes | None = None
    created_ms: int = 0


class OpenGrant(Struct, frozen=True):
    """The owner of one partition, and the file that its state at ``version`` ends with; see ``BatchGrant``.

    ``is_begun``: the batch above has begun, so Spark may have committed it, even without a report.
    """

    owner: HostInfo
    version: int
    head: str | None
    registration: QueryRegistration
    epoch: int = 0
    times: BatchTimes | None = None
    is_begun: bool = False
    created_ms: int = 0


class Acknowledge(Struct, frozen=True):
    """A host has made the changes of one attempt durable. ``version`` is batch id + 1.

    ``base`` is the head of the lineage that the changes apply to. ``duration`` is the time of the commit in seconds.
    ``stage`` is Spark's stage id, which is higher when the plan of the batch runs again; None: not known. ``figures``
    describe the work of the task, if known.
    """

    run_id: str
    operator: str
    partition: int
    version: int
    attempt: str
    host_id: str
    incarnation: str
    file: FileRef
    base: str | None
    duration: float = 0.0
    stage: int | None = None
    figures: CommitFigures | None = None


class Acknowledged(Struct, frozen=True, tag=True):
    """An acknowledgement was accepted. ``manifest_id``: a manifest names it, so the version is prepared."""

    version: int
    manifest_id: int | None


class Refused(Struct, frozen=True, tag=True):
    """One of several messages was rejected: the name of the error's class, and its message."""

    error: str
    message: str


class SnapshotUploaded(Struct, frozen=True):
    """The owner of a partition has uploaded a snapshot, which shares files with the earlier snapshot ``reused``.

    ``descriptor`` names the files of the snapshot that are in storage, so that it need not be read from there.
    """

    run_id: str
    operator: str
    partition: int
    host_id: str
    incarnation: str
    snapshot: SnapshotRef
    reused: SnapshotRef | None
    descriptor: SnapshotDescriptor | None = None


class Completed(Struct, frozen=True):
    """Version ``version`` of a run is completed. ``heads``: operator to partition of one host to changelog path.

    ``ended``: the query has ended, and no later version comes. ``rewritten`` names the last exchange of files, "" if
    there was none: earlier files that a host still has must not be read any more. ``created_ms`` is when the version
    was prepared, right before Spark's commit, in ms since 1970; 0 of the empty version 0.
    """

    run_id: str
    version: int
    heads: dict[str, dict[int, str]]
    ended: bool = False
    rewritten: str = ""
    created_ms: int = 0


class HostReport(Struct, frozen=True):
    """The partitions that a host holds, for a coordinator that does not know the host yet.

    ``pending`` are acknowledged or durable changes that are not known to be completed. ``opened`` is the highest opened
    batch id per run. ``held`` has the loaded partitions per run and operator.
    """

    registrations: tuple[QueryRegistration, ...] = ()
    pending: tuple[Acknowledge, ...] = ()
    opened: dict[str, int] = field(default_factory=dict)
    held: dict[str, dict[str, list[int]]] = field(default_factory=dict)


class SavepointOrder(Struct, frozen=True):
    """An order to export ``version`` of these partitions (operator to numbers) to the savepoint at ``location``.

    ``registration`` is that of the run, which the host may not know. If the query ``is_held`` until the savepoint is
    done, to be stopped with it, there are no batches that the export could slow down.
    """

    registration: QueryRegistration
    checkpoint_id: int
    version: int
    location: str
    partitions: dict[str, list[int]]
    is_held: bool = False

    @property
    def run_id(self) -> str:
        return self.registration.run_id


class ExportedFile(Struct, frozen=True):
    """A Parquet file below a savepoint: the rows of the key groups ``first_group`` to ``last_group``, both included.

    ``size`` is in bytes, ``digest`` is that of the file's content.
    """

    path: str
    size: int
    digest: str
    rows: int
    first_group: int
    last_group: int

    @property
    def ref(self) -> FileRef:
        return FileRef(self.path, self.size, self.digest)


class SavepointExported(Struct, frozen=True):
    """A host has exported a partition for a savepoint, or has failed: ``failure`` is the reason.

    ``files`` are by state variable. ``duration`` is in seconds.
    """

    run_id: str
    checkpoint_id: int
    operator: str
    partition: int
    host_id: str
    incarnation: str
    files: dict[str, ExportedFile] = field(default_factory=dict)
    duration: float = 0.0
    failure: str | None = None


class SavepointStatus(Struct, frozen=True):
    """The status of a savepoint: ``path`` once it is done, ``failure`` if it has failed, else neither.

    ``known`` is False if this coordinator does not know the savepoint.
    """

    known: bool
    path: str | None = None
    failure: Refused | None = None


class HeldQuery(Struct, frozen=True):
    """A query whose batches wait while files of its versions are being rewritten.

    ``waits_for`` names what is still under way. None: nothing is, and nothing begins as long as the batches are held;
    ``version`` is completed then. ``untold`` are the hosts that may still answer from files that were exchanged.
    ``hold`` identifies the hold, "" if there is none.
    """

    registration: QueryRegistration
    epoch: int
    version: int
    waits_for: str | None
    untold: tuple[str, ...] = ()
    hold: str = ""


class HandOver(Struct, frozen=True):
    """A host's progress with copies of partitions, as its heartbeat reports it.

    ``number`` grows with each heartbeat: of two that overtake each other, the higher one counts. ``warm`` has the
    versions of the loaded copies, by run, operator and partition. For the runs in
    ``giving`` the host does not treat a version as the newest without a look at Spark's log. ``exchanged`` has the last
    exchange of each run whose files from before it the host no longer has.
    """

    number: int = 0
    warm: dict[str, dict[str, dict[int, int]]] = field(default_factory=dict)
    giving: tuple[str, ...] = ()
    exchanged: dict[str, str] = field(default_factory=dict)


class WarmUp(Struct, frozen=True):
    """An order to a host to load copies of partitions before tasks ask for them: partitions that it has owned since
    recently, partitions that it is to own, while their owner keeps serving (Kafka Streams: warm-up replicas), and
    standbys, which it is to own if their owner is lost.

    ``heads`` has the path of the changelog that made ``version``, by operator and partition; None for version 0.
    ``changelogs`` has the files that lead from the copy that the host has reported to ``version``, ascending. It has no
    entry for a copy that is too far behind, or that is not there yet: the host then asks for all files of the version.
    ``snapshots`` has the version of the newest snapshot of each of these partitions, if the coordinator knows one: a
    copy that becomes the owner need not make one that its former owner has made. ``created_ms`` is that of
    ``Completed``.
    """

    registration: QueryRegistration
    epoch: int
    version: int
    heads: dict[str, dict[int, str | None]]
    changelogs: dict[str, dict[int, tuple[ChangelogRef, ...]]] = field(default_factory=dict)
    snapshots: dict[str, dict[int, int]] = field(default_factory=dict)
    created_ms: int = 0


class HostOrders(Struct, frozen=True):
    """The answer to a host's heartbeat. ``known`` False asks the host to register again with its report.

    ``unknown_runs`` are the runs of the host that the coordinator cannot speak for: it does not know them, or has not
    processed the host's report about them. The value says whether the host must report the run again; it must not while
    a report is being processed.
    ``savepoints`` are repeated until the partitions are acknowledged. A savepoint that is no longer ``pending``
    (checkpoint ids by run) is cancelled. ``revoked_tokens`` are the ids of all revoked read-only tokens. The lease runs
    for ``lease_seconds`` from the heartbeat on. Until then, unless a batch begins, no partition of the host is given to
    another host, except if its process or node is dead, or it reports that it is ``giving``. A host without an answer
    for so long may have been replaced. ``warm_up`` is repeated until the partitions have moved and the next version is
    completed; that of a standby, until the host reports the copy at the completed version. ``standbys`` has all
    partitions that the host keeps standby copies of, by run and operator, ascending; a run is absent while owners of
    its partitions are unknown. ``giving`` has the runs with partitions of the host that may move, each with its
    completed version. ``ended_runs`` are those runs of the host whose queries have ended, and whose last version can
    still be read. ``lags`` has, in seconds, how old the state of mirrors and of late followers in its session may be.
    ``calls`` is the coordinator's address for messages without Ray, ``ip:port``; empty if there is none.
    """

    known: bool
    unknown_runs: dict[str, bool] = field(default_factory=dict)
    completed: tuple[Completed, ...] = ()
    unload_runs: tuple[str, ...] = ()
    savepoints: tuple[SavepointOrder, ...] = ()
    pending: dict[str, list[int]] = field(default_factory=dict)
    revoked_tokens: tuple[str, ...] = ()
    lease_seconds: float = 4.0
    warm_up: tuple[WarmUp, ...] = ()
    giving: dict[str, int] = field(default_factory=dict)
    ended_runs: tuple[str, ...] = ()
    lags: dict[str, float] = field(default_factory=dict)
    standbys: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    calls: str = ""


class RunningOperator(Struct, frozen=True):
    """One operator of a query. Versions ``oldest_version`` to ``completed_version`` can be read.

    ``ended``: the query has ended, and hosts continue to answer from its last version.
    """

    query_id: str
    run_id: str
    query_name: str | None
    operator: OperatorSpec
    key_groups: int
    oldest_version: int
    completed_version: int
    ended: bool = False


class LookedUp(Struct, frozen=True):
    """A batch of another query reads ``version`` of the operator at ``location``.

    It reads rows that had not expired at ``at_ms``, in ms since 1970.
    """

    location: OperatorLocation
    version: int
    at_ms: int


class OperatorLocation(Struct, frozen=True):
    """The location of one operator's state, for query clients. ``owners`` is one host per partition.

    ``watermark_ms`` is the watermark of the batch that made the completed version, in ms since 1970: of operators with
    rolling aggregates, and None as long as it is not known or there is none. ``standbys`` has, by host id of an owner,
    the hosts that keep copies of its partitions. ``made_by`` is the run that made the version that was asked for, ""
    if none is known.
    """

    query_id: str
    run_id: str
    query_name: str | None
    operator: OperatorSpec
    key_groups: int
    completed_version: int
    owners: tuple[HostInfo, ...]
    watermark_ms: int | None = None
    standbys: dict[str, tuple[HostInfo, ...]] = field(default_factory=dict)
    made_by: str = ""


class RunningView(Struct, frozen=True):
    """A feature view, and the query whose state has its record."""

    view: FeatureView
    query_id: str
    run_id: str
    query_name: str | None


class LocatedView(Struct, frozen=True):
    """A feature view, and the locations of its operators, in the order of ``FeatureView.sources``."""

    view: FeatureView
    operators: tuple[OperatorLocation, ...]

    @property
    def revision(self) -> str:
        """Return a digest of the declaration, of the runs and of the operators' schemas, but not of the owners."""
        parts = (self.view, [(o.run_id, o.operator, o.key_groups) for o in self.operators])
        return sha256(msgspec.json.encode(parts)).hexdigest()[:16]


# The version of the messages between drivers, hosts, tasks and the coordinator, of one release or several.
#
# Durable formats and the port of query clients have separate versions. These messages are between processes of one Ray
# cluster, mostly of one session; but a coordinator outlives the sessions that use it, and machines are upgraded one by
# one. A process that joins asks first, and gets a clear refusal, instead of a later failure on a message of another
# shape.


WIRE_VERSION = 2
"""Increase this whenever processes of the previous release cannot read a changed message or record.

``tests/fixtures/messages-<version>.txt`` has their shapes, and a test fails when they change.
"""


def other_version(who: str, theirs: object, ours: str) -> str | None:
    """Return why two processes cannot work together; None if they can. ``theirs`` None: it has no version."""
    if theirs == WIRE_VERSION:
        return None
    return (
        f"{who} speaks version {0 if theirs is None else theirs} of ray-statestore's messages, and {ours} version "
        f"{WIRE_VERSION}: two releases that cannot work together. Nothing was changed. Install the same release on all "
        "machines; where streams of the other release still run, stop them first, or use another namespace."
    )


# ``KvStateLocationOracle``: which host owns which key groups of which operator of one run of a query.
#
# After Flink's ``KvStateLocation``: a client gets it once, and then finds owners without further requests.


class OperatorOwners(Struct, frozen=True):
    """The owners of one operator: the index of each partition's host in ``KvStateLocationOracle.hosts``."""

    name: str
    owners: tuple[int, ...]

    @property
    def num_partitions(self) -> int:
        return len(self.owners)


class KvStateLocationOracle(Struct, frozen=True):
    """An immutable view of one run at one moment. Make one with ``of``.

    It is small to send, because each host is listed once. ``key_groups`` is the query's fixed number of key groups.
    Partition p of n owns the groups g with ``g * n // key_groups == p``. ``state_location`` distinguishes the query
    from a copy of its checkpoint, which has the same ``query_id``. ``standbys`` is that of ``OperatorLocation``.
    """

    query_id: str
    run_id: str
    name: str | None
    key_groups: int
    completed_version: int
    hosts: tuple[HostInfo, ...]
    operators: tuple[OperatorOwners, ...]
    state_location: str = ""
    standbys: dict[str, tuple[HostInfo, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for operator in self.operators:
            if not 1 <= operator.num_partitions <= self.key_groups:
                raise InvalidRequestError(
                    f"Operator {operator.name!r} has {operator.num_partitions} partitions; there must be at least 1 "
                    f"and at most as many as key groups ({self.key_groups})."
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
        standbys: Mapping[str, tuple[HostInfo, ...]] = MappingProxyType({}),
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
        return cls(
            query_id, run_id, name, key_groups, completed_version, hosts, operators, state_location, dict(standbys)
        )

    def partition_of(self, operator: str, key_group: int) -> int:
        """Return the partition that owns a key group.

        Raises ``UnknownOperatorError``, or ``InvalidRequestError`` if the key group does not exist.
        """
        n = self._operator(operator).num_partitions
        if not 0 <= key_group < self.key_groups:
            raise InvalidRequestError(
                f"Operator {operator!r} has no key group {key_group}: query {self.query_id} has {self.key_groups}, "
                "numbered from 0."
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
        exist = listed_names(name, (o.name for o in self.operators))
        raise UnknownOperatorError(
            f"Query {self.name or 'unnamed'} ({self.query_id}, run {self.run_id}) has no operator {name!r}; "
            f"operators that exist: {exist}"
        )
