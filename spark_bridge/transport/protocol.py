"""What tasks, query clients and hosts say to each other over Arrow Flight.

Commands are JSON, checked by msgspec when they arrive; keys and values travel as Arrow batches.
An error travels as the name of its class and its message, never as an object.
"""

from __future__ import annotations

import pyarrow as pa
from msgspec import Struct, field

from backends.ids import DEFAULT_FAMILY
from coordinator_actor.messages import BatchTimes, OperatorFigures

KEYS_SCHEMA = pa.schema([pa.field("key", pa.binary(), nullable=False)])
VALUES_SCHEMA = pa.schema([pa.field("value", pa.binary())])
COMMIT_SCHEMA = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
END_OF_CHANGES = b"end"
"""The metadata of the last message of a commit, which has no batch: a task that dies in the midst of its changes does not say it."""
RANGES_SCHEMA = pa.schema([pa.field("start", pa.binary(), nullable=False), pa.field("end", pa.binary())])


class TaskIdentity(Struct, frozen=True):
    """One run of a state task. ``attempt`` is Spark's task attempt id, ``invocation`` this very call of our code."""

    run_id: str
    operator: str
    partition: int
    batch_id: int
    attempt: str
    invocation: str


class OpenReply(Struct, frozen=True):
    """The answer to ``open``: the address of the owner to go to, or None if the host asked is the owner.

    ``times`` are those of the batch, if the operator uses them; ``schema`` is the operator's, with its history.
    """

    redirect: str | None
    version: int
    key_groups: int = 0
    schema: str = ""
    times: BatchTimes | None = None


class GetCommand(Struct, frozen=True, tag="get"):
    """Read the values of keys. ``version`` None means the last completed version."""

    run_id: str
    operator: str
    partition: int
    version: int | None = None
    column_family: str = DEFAULT_FAMILY


class OpenAndGetCommand(Struct, frozen=True, tag="open_and_get"):
    """Open a task's partition as ``open`` does, and read the values of keys at the version opened.

    The first batch of the answer has ``OpenReply`` for its metadata; if that redirects, it has no values.
    """

    task: TaskIdentity
    column_family: str = DEFAULT_FAMILY


class ScanCommand(Struct, frozen=True, tag="scan"):
    """Read the pairs of ranges of keys, one range after the other, ``limit`` of them in all."""

    run_id: str
    operator: str
    partition: int
    version: int
    column_family: str = DEFAULT_FAMILY
    limit: int | None = None


class CommitCommand(Struct, frozen=True, tag="commit"):
    """Commit the changes of one task as version ``batch_id + 1``. ``timings`` are milliseconds by step.

    Each batch of changes names its column family in its metadata.
    """

    task: TaskIdentity
    timings: dict[str, float] = field(default_factory=dict)
    figures: OperatorFigures = field(default_factory=OperatorFigures)


class LocateRequest(Struct, frozen=True):
    """Where is the state of this operator? ``query`` is a name, query id or run id."""

    operator: str
    query: str | None = None


class CoordinatorCall(Struct, frozen=True):
    """A message of a task to the coordinator, passed on by a host."""

    method: str
    args: dict[str, object]


class ErrorInfo(Struct, frozen=True):
    """How an error crosses the network."""

    error: str
    message: str


class HostFile(Struct, frozen=True):
    """What a host leaves in its node's Ray session directory (mode 0600) for tasks to find it again."""

    host_id: str
    incarnation: str
    address: str
    token: str
