"""The messages between tasks and hosts over Arrow Flight.

Commands are JSON, which msgspec checks when they arrive. Keys and values travel as Arrow batches. An error travels as
the name of its class and its message, never as an object.
"""

from __future__ import annotations

import pyarrow as pa
from msgspec import Struct, field

from backends.conf import DEFAULT_FAMILY
from backends.load_watch import LoadProgress
from coordinator_actor.messages import BatchTimes, OperatorFigures

KEYS_SCHEMA = pa.schema([pa.field("key", pa.binary(), nullable=False)])
VALUES_SCHEMA = pa.schema([pa.field("value", pa.binary())])
COMMIT_SCHEMA = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
"""Changes to commit: a null value removes its key."""
END_OF_CHANGES = b"end"
"""The metadata of a commit's last message, which has no batch: a task that dies while sending does not send it."""
RANGES_SCHEMA = pa.schema([pa.field("start", pa.binary(), nullable=False), pa.field("end", pa.binary())])


class TaskIdentity(Struct, frozen=True):
    """One run of a state task.

    ``attempt`` is Spark's task attempt id; ``invocation`` differs for every call of the task's function. ``stage`` is
    Spark's stage id, which distinguishes a plan that runs again from a task that is retried; None: not known.
    ``unreachable`` is the address of the host that the task could not reach last, when it opens its partition; the host
    that is asked then reports a suspicion.
    """

    run_id: str
    operator: str
    partition: int
    batch_id: int
    attempt: str
    invocation: str
    stage: int | None = None
    unreachable: str = ""


class OpenReply(Struct, frozen=True):
    """The answer to ``open``: ``redirect`` is the address of the owner, None if the host that was asked is the owner.

    ``times`` are the batch's times, if the operator uses them. ``schema`` is the operator's schema with its history, as
    JSON. ``loading`` is the progress of the partition's load: it is not open yet, and the task asks again.
    """

    redirect: str | None
    version: int
    key_groups: int = 0
    schema: str = ""
    times: BatchTimes | None = None
    loading: LoadProgress | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the partition is open at the host that was asked."""
        return self.redirect is None and self.loading is None


class GetCommand(Struct, frozen=True, tag="get"):
    """Read the values of keys. ``version`` None means the last completed version."""

    run_id: str
    operator: str
    partition: int
    version: int | None = None
    column_family: str = DEFAULT_FAMILY


class OpenAndGetCommand(Struct, frozen=True, tag="open_and_get"):
    """Open a task's partition as ``open`` does, and read the values of keys at the version opened.

    The metadata of the answer's first batch is an ``OpenReply``; if that redirects, the batch has no values.
    """

    task: TaskIdentity
    column_family: str = DEFAULT_FAMILY


class ScanCommand(Struct, frozen=True, tag="scan"):
    """Read the pairs of ranges of keys, one range after the other, at most ``limit`` pairs in all."""

    run_id: str
    operator: str
    partition: int
    version: int
    column_family: str = DEFAULT_FAMILY
    limit: int | None = None


class CommitCommand(Struct, frozen=True, tag="commit"):
    """Commit the changes of one task as version ``batch_id + 1``. ``timings`` are milliseconds by step.

    ``nbytes`` is the number of bytes of changes to come, so that the host accepts them when it has room. Each batch of
    changes names its column family in its metadata.
    """

    task: TaskIdentity
    timings: dict[str, float] = field(default_factory=dict)
    figures: OperatorFigures = field(default_factory=OperatorFigures)
    nbytes: int = 0


class LocateRequest(Struct, frozen=True):
    """Ask for the location of an operator's state. ``query`` is a name, query id or run id."""

    operator: str
    query: str | None = None


class CoordinatorCall(Struct, frozen=True):
    """A message of a task to the coordinator, which a host passes on."""

    method: str
    args: dict[str, object]


class ErrorInfo(Struct, frozen=True):
    """An error as it crosses the network: class name and message."""

    error: str
    message: str


class HostFile(Struct, frozen=True):
    """The file that a host leaves in its node's Ray session directory (mode 0600): tasks find the host with it."""

    host_id: str
    incarnation: str
    address: str
    token: str

    def __repr__(self) -> str:
        return f"HostFile({self.host_id}, {self.address})"  # the token must not reach a log
