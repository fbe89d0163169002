"""The model of the system, for people: queries, operators, partitions, checkpoints, hosts, savepoints, faults.

Plain data, the same for a running cluster and for storage alone. A field that a source cannot know is None. Moments
are in ms since 1970, times in ms, sizes in bytes. Records of which there are ten thousands are made quickly, and
Python's garbage collection, which holds up all threads, passes them over (``gc=False``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from backends.storage.sending.request_counts import KINDS
from coordinator_actor.durable.checkpoint_records import StepTime
from coordinator_actor.messages import InputPace
from spark_bridge.overview.processes import CoordinatorInfo, HostOverview

OVERVIEW_FORMAT_VERSION = 1
"""Grows when a field changes its meaning or goes. New fields do not change it."""

RUNNING, ENDED, RETIRED, STORED = "running", "ended", "replaced", "stored"
"""The status of a query: it runs; it has ended and is read on; a newer run has replaced it; only its storage was looked
at.
"""
WARNING, ERROR = "warning", "error"
CLUSTER, STORAGE = "cluster", "storage"
INPUT_WAIT = "input_wait"
"""The step in which a task waits for its input rows: no work on state."""


@dataclass(frozen=True)
class Fault:
    """Something that somebody should look at. ``kind`` is a fixed name, ``subject`` says whose fault it is.

    ``severity`` is "error" if queries stand still or data cannot be read, else "warning".
    """

    severity: str
    kind: str
    subject: str
    what: str
    remedy: str


class Checkpoint(Struct, frozen=True, gc=False):
    """One version, from the history, or from its manifest alone: then only id, times, bytes and partitions are known.

    For the fields see ``coordinator_actor.durable.checkpoint_records.CheckpointRecord``. ``status`` is "completed", or
    "prepared" while Spark has not committed the batch. ``is_kept``: the version can still be read.
    """

    id: int
    version: int
    epoch: int
    run_id: str
    status: str = "completed"
    is_kept: bool = False
    begun_ms: int | None = None
    prepared_ms: int | None = None
    completed_ms: int | None = None
    duration_ms: int | None = None
    phases: dict[str, int] = {}
    steps: dict[str, StepTime] = {}
    partitions: int = 0
    delta_bytes: int | None = None
    full_bytes: int | None = None
    retried: int | None = None
    rows: int | None = None
    updated: int | None = None
    removed: int | None = None
    late: int | None = None
    duplicates: int | None = None
    requests: int | None = None
    storage: dict[str, int] = {}

    @property
    def requests_by_kind(self) -> str:
        """Return the requests by kind, as people read them: ``5 put, 3 get``; "" if they are not known."""
        return ", ".join(f"{self.storage[kind]:,} {kind}" for kind in KINDS.values() if self.storage.get(kind))


class Partition(Struct, frozen=True, gc=False):
    """One partition of an operator. ``owner`` is the id of the host that holds its newest version.

    ``version`` is that of the host, or the last completed one in storage. ``snapshot_version`` is that of the newest
    snapshot, 0 for none, and ``snapshot_lag`` the versions that it is behind. ``changelog_bytes`` are those of the
    changelogs after it. ``commit_ms`` are the steps of the last commit, and ``rows`` its input rows.
    ``dropped_elements`` counts those that limits of lists have dropped since the host has loaded the partition; None if
    no list has a limit.
    """

    operator: str
    partition: int
    version: int | None = None
    owner: str | None = None
    keys: int | None = None
    memory_bytes: int | None = None
    snapshot_version: int | None = None
    snapshot_lag: int | None = None
    changelog_bytes: int | None = None
    commit_ms: dict[str, float] = {}
    rows: int | None = None
    dropped_elements: int | None = None

    @property
    def work_ms(self) -> float | None:
        """Return the time of its last commit without the wait for input rows; None if it is not known."""
        return sum(ms for name, ms in self.commit_ms.items() if name != INPUT_WAIT) if self.commit_ms else None


@dataclass(frozen=True)
class Variable:
    """One state variable: the types of its columns by name, and its time to live.

    ``inner`` are the columns that tell the rows of one key apart: the user's key of a map, when a timer fires, the
    bounds of a session. ``window`` names the key column that is a window.
    """

    name: str
    kind: str
    key: dict[str, str] = field(default_factory=dict)
    value: dict[str, str] = field(default_factory=dict)
    inner: dict[str, str] = field(default_factory=dict)
    window: str | None = None
    ttl_ms: int | None = None


@dataclass(frozen=True)
class SchemaUse:
    """The schema that the versions from ``first_version`` to ``last_version`` of an operator were written with.

    ``variables`` are known where the schema itself can be read: from storage, and of the newest.
    """

    schema_id: str
    first_version: int
    last_version: int
    variables: tuple[Variable, ...] = ()


@dataclass(frozen=True)
class Operator:
    """One operator of a query. ``skew`` is the keys of the largest partition over those of the median one, at least 1.

    ``schemas`` are those of the versions that storage has, the oldest first. ``dropped_elements`` is the sum over the
    partitions.
    """

    name: str
    num_partitions: int
    backend: str | None = None
    schema_id: str | None = None
    keys: int | None = None
    memory_bytes: int | None = None
    skew: float | None = None
    partitions: tuple[Partition, ...] = ()
    variables: tuple[Variable, ...] = ()
    schemas: tuple[SchemaUse, ...] = ()
    dropped_elements: int | None = None


@dataclass(frozen=True)
class GivenUp:
    """A checkpoint that was given up, and why."""

    id: int
    begun_ms: int
    reason: str


@dataclass(frozen=True)
class Savepoint:
    """A savepoint that was begun. Whether it was finished, its own directory says (``statestore savepoint list``)."""

    id: int
    version: int
    location: str
    created_ms: int
    run_id: str
    stop: bool


@dataclass(frozen=True)
class Query:
    """One query. Versions ``oldest_version`` to ``completed_version`` can be read.

    ``pending_partitions`` of the running batch have not acknowledged it, ``batch_ms`` after its begin. ``given_up`` are
    the last checkpoints of this run that were. A query that has ended did so at ``ended_ms``, and with the error
    ``failure`` if with one. ``watermark_ms`` and ``batch_time_ms`` are the event time up to which the last batch
    expects no more rows, and its processing time, as Spark has logged them; None without a watermark. A coordinator
    knows them where an operator needs times. ``damages`` says what is wrong with manifests that were passed over when
    storage was looked at, and ``readable`` has the first and the last of those versions in a row
    that can be read all the same. Its driver was last heard of ``driver_ms`` ago.
    Where the query is followed from elsewhere, and too late, ``lag_ms`` is the time since the last successful look.
    ``watermark_rose_ms`` is when the watermark last changed; ``input`` is the pace of the input in the last batch.
    """

    query_id: str
    run_id: str
    name: str | None
    status: str
    checkpoint_location: str
    state_location: str
    epoch: int
    completed_version: int
    prepared_version: int
    oldest_version: int | None
    operators: tuple[Operator, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    savepoints: tuple[Savepoint, ...] = ()
    pending_partitions: int = 0
    batch_ms: int | None = None
    replaced_by: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    watermark_ms: int | None = None
    batch_time_ms: int | None = None
    given_up: tuple[GivenUp, ...] = ()
    ended_ms: int | None = None
    failure: str = ""
    damages: tuple[str, ...] = ()
    readable: tuple[tuple[int, int], ...] = ()
    driver_ms: int | None = None
    lag_ms: int = 0
    watermark_rose_ms: int | None = None
    input: InputPace | None = None

    @property
    def title(self) -> str:
        """Return the name of the query for people."""
        return self.name or self.query_id


@dataclass(frozen=True)
class Overview:
    """The system at one moment. ``source`` is "cluster" or "storage"."""

    source: str
    taken_ms: int
    coordinator: CoordinatorInfo | None = None
    queries: tuple[Query, ...] = ()
    hosts: tuple[HostOverview, ...] = ()
    faults: tuple[Fault, ...] = ()
    format_version: int = OVERVIEW_FORMAT_VERSION

    def query(self, named: str | None) -> Query:
        """Return the query of that name, query id or run id; None stands for the only one. Raises ``LookupError``.

        Where several are meant, as earlier runs of a query, and one of them runs, it is that one.
        """
        found = [q for q in self.queries if named is None or named in (q.name, q.query_id, q.run_id)]
        running = [q for q in found if q.status == RUNNING]
        found = running if len(running) == 1 else found
        if len(found) != 1:
            there = ", ".join(f"{q.title} ({q.query_id})" for q in self.queries) or "none"
            asked = "A query must be named" if named is None and found else f"No single query is named {named!r}"
            raise LookupError(f"{asked}; there are: {there}." if self.queries else "There is no query.")
        return found[0]


def to_plain(described: Any) -> Any:
    """Return any of these as JSON types."""
    return msgspec.to_builtins(described)
