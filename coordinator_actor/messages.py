"""The messages between driver, tasks, hosts and the StateStoreCoordinator.

Plain typed records (msgspec), the same over Ray actor calls and, as JSON, over Arrow Flight.
Their roles follow Spark's ``StateStoreCoordinatorMessage`` family and Flink's
``AcknowledgeCheckpoint``.
"""

from __future__ import annotations

from msgspec import Struct, field

from backends.manifest import FileRef, SnapshotRef


class OperatorSpec(Struct, frozen=True):
    """One stateful operator of a query, as the program declares it.

    ``schema`` is the JSON of a ``backends.schema.StateSchema``; its digest is the schema id.
    ``kind`` tells readers how to turn stored values into results.
    """

    name: str
    num_partitions: int
    schema: str
    backend: str = "rocksdb"
    kind: str = "aggregate"


class QueryRegistration(Struct, frozen=True):
    """What the driver tells the coordinator when a streaming query starts.

    ``state_location`` is the directory that holds ``manifests/`` and the rest;
    ``checkpoint_location`` is Spark's own, whose ``commits/`` say which batches are done. Of the
    versions before the completed one, ``min_versions_to_retain`` are kept; every
    ``maintenance_interval`` seconds the others are removed.
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


class RegisteredQuery(Struct, frozen=True):
    """The answer to a registration. ``refusal`` is the reason why the query may not run, or None."""

    refusal: str | None
    epoch: int
    completed_version: int


class HostInfo(Struct, frozen=True):
    """One incarnation of a StateStoreHost. ``address`` is its Flight location, ``grpc://ip:port``.

    ``host_id`` is stable over restarts of the actor, ``incarnation`` is new with each.
    """

    host_id: str
    incarnation: str
    address: str
    node_id: str
    session_id: str


class OpenRequest(Struct, frozen=True):
    """A task, through the host ``host_id``, wants partition ``partition`` at version ``batch_id``."""

    run_id: str
    operator: str
    partition: int
    batch_id: int
    attempt: str
    host_id: str
    incarnation: str


class OpenGrant(Struct, frozen=True):
    """Who owns the partition, and which file its state at ``version`` ends with.

    ``head`` is the path of the changelog that made ``version`` (None for the empty version 0);
    since files are unique and never overwritten, it identifies the whole lineage.
    ``epoch`` tells a grant of an older run from one of a newer. ``registration`` lets the owner report the query again to a coordinator that has lost it.
    """

    owner: HostInfo
    version: int
    head: str | None
    registration: QueryRegistration
    epoch: int = 0


class Acknowledge(Struct, frozen=True):
    """A host has made the changes of one attempt durable: ``version`` is batch id + 1.

    ``base`` is the head of the lineage that the changes apply to.
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


class Acknowledged(Struct, frozen=True):
    """``manifest_id`` is set if this acknowledgement was the last one and the version is prepared."""

    version: int
    manifest_id: int | None


class SnapshotUploaded(Struct, frozen=True):
    """The owner of a partition has uploaded a snapshot, which shares files with the earlier one ``reused``."""

    run_id: str
    operator: str
    partition: int
    host_id: str
    incarnation: str
    snapshot: SnapshotRef
    reused: SnapshotRef | None


class Completed(Struct, frozen=True):
    """Version ``version`` of a run is completed; ``heads`` maps operator to the changelog path per partition."""

    run_id: str
    version: int
    heads: dict[str, dict[int, str]]


class HostReport(Struct, frozen=True):
    """What a host knows, told to a coordinator that does not know the host yet.

    ``pending`` are the acknowledged or durable changes not yet known to be completed, ``opened``
    the highest batch id opened per run.
    """

    registrations: tuple[QueryRegistration, ...] = ()
    pending: tuple[Acknowledge, ...] = ()
    opened: dict[str, int] = field(default_factory=dict)


class HostOrders(Struct, frozen=True):
    """The answer to a host's heartbeat: ``known`` False asks it to register again with its report."""

    known: bool
    completed: tuple[Completed, ...] = ()
    unload_runs: tuple[str, ...] = ()


class OperatorLocation(Struct, frozen=True):
    """Where the state of one operator is: what a query client needs. ``owners`` is one host per partition."""

    query_id: str
    run_id: str
    query_name: str | None
    operator: OperatorSpec
    key_groups: int
    completed_version: int
    owners: tuple[HostInfo, ...]
