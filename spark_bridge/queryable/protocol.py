"""The messages between query clients and ``KvStateServer``: frames over TCP, after Flink's queryable-state protocol.

A frame has two lengths (uint32 each, little-endian), a header and a body. The first length is that of header and body
together, the second that of the header. A header is a msgpack array, checked by msgspec. A body is keys or values
(``byte_arrays``), or Arrow IPC. The first message of a client is ``Hello``. A request is answered by one frame, a scan
by ``RowsReply`` frames and an ``EndOfRows``, a failed request by a ``Failure``.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Struct

from backends.conf import DEFAULT_FAMILY
from backends.decoders import msgpack_decoder
from backends.encoding.columns import (
    EVEN_ROWS,
    EVEN_WIDTH,
    MAX_BYTES,
    binary_content,
    even_array,
    even_rows,
    offsets_of,
    record,
)
from coordinator_actor.feature_views import FeatureView
from coordinator_actor.messages import LocatedView, OperatorLocation, RunningView
from spark_bridge.exceptions import ConnectionClosedError, RequestError

PROTOCOL = 1
FRAME_PREFIX = struct.Struct("<II")
"""Length of header and body together, length of the header."""
MAX_HEADER_BYTES = 1 << 20

Isolation = Literal["completed", "latest", "version"]
Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
RunId = Annotated[str, msgspec.Meta(max_length=256)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""The name of an operator, query, state variable or column; bounded, because hosts remember asked names."""


WATERMARK = "watermark"
"""The ``at=`` of a call whose rolling aggregates are as of the watermark of the version that it reads."""


class At(Struct, frozen=True, array_like=True):
    """The version to read.

    - ``completed``: the last completed version, which must be ``version`` or later.
    - ``latest``: the version that each partition has committed last.
    - ``version``: exactly ``version``. With ``held_only`` it is not read from storage if the host no longer has it in
      memory.

    ``moment`` is the time of rolling aggregates in microseconds since 1970; None is the host's clock. With
    ``staleness``, any copy of a partition may answer, at a version that is at most so many versions behind the newest
    one that its host has heard of; ``version`` is then the lowest one allowed.
    """

    isolation: Isolation = "completed"
    version: Natural = 0
    held_only: bool = False
    moment: int | None = None
    staleness: Natural = 0


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a connection. Without a valid token a server answers nothing."""

    protocol: int
    token: str

    def __repr__(self) -> str:
        return f"Hello({self.protocol})"  # the token must not reach a log


class LocateOperatorRequest(Struct, frozen=True, array_like=True, tag="locate"):
    """Ask for the location of an operator. ``query`` is a name, query id or run id. Answered by ``LocateReply``."""

    operator: Name
    query: Name | None = None


class LookupRequest(Struct, frozen=True, array_like=True, tag="lookup"):
    """Ask for the stored values of keys; the body is the stored keys.

    Answered by ``LookupReply``, whose body has as many values. ``forward``: this host asks the owners of partitions
    that it does not own; without it such partitions are a ``NotOwnerError``.
    """

    run_id: RunId
    operator: Name
    at: At = At()
    column_family: Name = DEFAULT_FAMILY
    forward: bool = False


class KeyRowsRequest(Struct, frozen=True, array_like=True, tag="rows"):
    """Ask for the typed rows that keys have in a state variable: windows of an aggregate, list elements, map entries.

    The body is the stored grouping keys, without a window. Answered like a ``ScanRequest``; the first column,
    ``position``, is the position of the row's key. ``partitions`` are the partitions to look for the windows of
    windowed keys, which may be in any partition; None means all that this host owns.
    """

    run_id: RunId
    operator: Name
    state: Name | None = None
    at: At = At()
    columns: Annotated[list[Name], msgspec.Meta(max_length=4096)] | None = None
    forward: bool = False
    partitions: list[Natural] | None = None


class Comparison(Struct, frozen=True, array_like=True):
    """The condition ``column operator values``: one value, or several for ``in``.

    None for ``is null`` and ``is not null``. Values are JSON values. Values of types that JSON does not have are
    strings that Arrow casts to the column's type; integers of more than 64 bits and NaN are strings too. With
    ``is_base64`` all values are bytes in base64.
    """

    column: Name
    comparison: Literal["=", "!=", "<", "<=", ">", ">=", "in", "is null", "is not null"]
    values: list[str | int | float | bool] = []
    is_base64: bool = False


class ScanRequest(Struct, frozen=True, array_like=True, tag="scan"):
    """Ask for the typed rows of a state variable, in the order of the stored keys within a partition.

    ``start`` (included) and ``end`` (not included) bound the grouping key by its encoded columns without the key group,
    within every key group. ``partitions`` None means all that this host owns, with ``forward`` all. All conditions of
    ``where`` must hold. ``limit`` is the most rows of this answer. ``previous_run`` is the earlier run that has already
    returned rows of this version: if a later run has remade the version, the answer is a ``StateVersionError``.
    """

    run_id: RunId
    operator: Name
    state: Name | None = None
    at: At = At()
    start: bytes | None = None
    end: bytes | None = None
    columns: Annotated[list[Name], msgspec.Meta(max_length=4096)] | None = None
    where: Annotated[list[Comparison], msgspec.Meta(max_length=1024)] = []
    limit: Natural | None = None
    collect: bool = False
    partitions: list[Natural] | None = None
    forward: bool = False
    previous_run: RunId = ""


class CountRequest(Struct, frozen=True, array_like=True, tag="count"):
    """Ask for the number of rows of a ``ScanRequest``. Answered by ``CountReply``."""

    scan: ScanRequest


class ChangesRequest(Struct, frozen=True, array_like=True, tag="changes"):
    """Ask for the rows that the versions after ``after`` up to ``until`` changed, in the order of versions.

    Changes of every layout are read from storage, so any host can answer. The body, if there is one, is the grouping
    keys that matter. Answered as a ``ScanRequest``. ``previous_run`` is the run that returned the changes up to
    ``after``, if that was an earlier run: if a later run has remade the version ``after``, the answer is a
    ``StateVersionError``.
    """

    run_id: RunId
    operator: Name
    after: Natural
    until: Natural
    state: Name | None = None
    previous_run: RunId = ""


class AwaitRequest(Struct, frozen=True, array_like=True, tag="await"):
    """Wait ``seconds`` at most for a completed version after ``after``. Answered by ``CountReply`` with the version."""

    run_id: RunId
    after: Natural
    seconds: Seconds


class OperatorsRequest(Struct, frozen=True, array_like=True, tag="operators"):
    """Ask for the operators of all running queries. Answered by ``DescribeReply`` with a list."""


class DescribeRequest(Struct, frozen=True, array_like=True, tag="describe"):
    """Ask what this host, with ``forward`` each host of the operator's query, has. Answered by ``DescribeReply``."""

    operator: Name | None = None
    query: Name | None = None
    forward: bool = False


class ViewsRequest(Struct, frozen=True, array_like=True, tag="views"):
    """Ask for one feature view, or all. Answered by ``DescribeReply`` with a list of ``ViewLocation``."""

    view: Name | None = None


class FeaturesRequest(Struct, frozen=True, array_like=True, tag="features"):
    """Ask for the features of entities; the body is their stored keys in the first operator. Any host can answer.

    ``revision`` is that of the ``ViewLocation`` by which the client encodes keys and decodes columns. ``at`` has the
    version for each of its queries. ``defaults``: a null becomes the default of its feature. ``takes_rows``: the answer
    may have the rows of a few keys as values. Answered by ``FeaturesReply``.
    """

    view: Name
    revision: Annotated[str, msgspec.Meta(max_length=64)]
    at: Annotated[list[At], msgspec.Meta(max_length=1024)]
    defaults: bool = True
    takes_rows: bool = False


Request = (
    Hello
    | LocateOperatorRequest
    | LookupRequest
    | KeyRowsRequest
    | ScanRequest
    | CountRequest
    | ChangesRequest
    | AwaitRequest
    | OperatorsRequest
    | DescribeRequest
    | ViewsRequest
    | FeaturesRequest
)


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """The answer to ``Hello``: who answers, the limits on a request, and the host's clock in us since 1970."""

    protocol: int
    host_id: str
    max_request_bytes: int
    max_keys: int
    now_us: int = 0


class ViewQuery(Struct, frozen=True):
    """A query whose operators a feature view has; ``age_ms`` is the age of its last completed version, if known."""

    query_id: str
    query_name: str | None
    run_id: str
    version: int
    age_ms: int | None = None


class ViewLocation(Struct, frozen=True):
    """A feature view as clients need it: its queries, and no more of its operators than the key.

    ``of_feature`` has the index of each feature's query. ``key`` are the key columns as they are stored, ``columns``
    those of the features: serialized schemas of Arrow. ``addresses`` has the owner of each partition of the first
    operator. ``is_rolling``: an operator has rolling aggregates, so that requests have a moment. If ``problem`` is not
    empty, the view cannot be read now, and it says why.
    """

    view: FeatureView
    revision: str = ""
    queries: tuple[ViewQuery, ...] = ()
    of_feature: tuple[int, ...] = ()
    key: bytes = b""
    key_groups: int = 0
    columns: bytes = b""
    addresses: tuple[str, ...] = ()
    is_rolling: bool = False
    problem: str = ""

    @property
    def titles(self) -> list[str]:
        """Return the name of each query; its id if it has no name or shares it with another query of the view."""
        names = [query.query_name for query in self.queries]
        return [q.query_name if q.query_name and names.count(q.query_name) == 1 else q.query_id for q in self.queries]


class LocateReply(Struct, frozen=True, array_like=True, tag="located"):
    """The body is the ``OperatorLocation`` in JSON."""


class LookupReply(Struct, frozen=True, array_like=True, tag="values"):
    """The body is the values at ``version``, in the order of the keys.

    ``lag_ms`` is the last field of every answer from state. It is 0 unless the host follows a query elsewhere and is
    late: then it is the ms since the last successful look for new versions. ``frame`` omits a 0.
    """

    version: int
    lag_ms: int = 0


class RowsReply(Struct, frozen=True, array_like=True, tag="batch"):
    """Rows: the body is the next part of an Arrow IPC stream, with the schema in the first one.

    The bodies of an answer's ``RowsReply`` frames, one after the other, are one IPC stream without the marker at its
    end (``EndOfRows`` marks the end). Every body is whole IPC messages. The first body is the schema message and,
    unless there are no rows, one record batch message. Each other body is exactly one record batch message. There are
    no dictionaries and no compression. A record batch may have no rows: a server that has found no rows for long sends
    one as a heartbeat. So a client may feed the bodies to one ``pa.ipc.open_stream``, or read each with
    ``pa.ipc.read_message`` and ``read_record_batch``.
    """

    version: int
    lag_ms: int = 0


class EndOfRows(Struct, frozen=True, array_like=True, tag="end"):
    """The end of an answer of rows; ``rows`` is how many there were."""

    version: int
    rows: int
    lag_ms: int = 0


class CountReply(Struct, frozen=True, array_like=True, tag="counted"):
    """A number, at ``version``."""

    version: int
    count: int
    lag_ms: int = 0


class DescribeReply(Struct, frozen=True, array_like=True, tag="described"):
    """The body is JSON."""


class FeaturesReply(Struct, frozen=True, array_like=True, tag="columns"):
    """The body is one record batch message of Arrow IPC with the columns of the ``ViewLocation``.

    ``versions`` and ``ages_ms`` are by query. An age is None if it is not known, and for a version that was asked for.
    ``is_row``: the body is the one row in msgpack, an array of values: for one key, of a view whose columns are all
    numbers, booleans and strings. ``has_rows``: the body is an array of such rows, for a request that ``takes_rows``.
    """

    versions: list[int]
    ages_ms: list[int | None]
    is_row: bool = False
    lag_ms: int = 0
    has_rows: bool = False

    @property
    def version(self) -> int:
        return self.versions[0]


class Failure(Struct, frozen=True, array_like=True, tag="failure"):
    """A request has failed: the name of the error's class, and the error's text."""

    error: str
    message: str


Reply = (
    Welcome | LocateReply | LookupReply | RowsReply | EndOfRows | CountReply | DescribeReply | FeaturesReply | Failure
)

_WITH_LAG = frozenset({LookupReply, RowsReply, EndOfRows, CountReply})
_encode = msgspec.msgpack.Encoder().encode
decode_request = msgpack_decoder(Request).decode
decode_reply = msgpack_decoder(Reply).decode
_decode_row = msgpack_decoder(list[Any]).decode
_decode_rows = msgpack_decoder(list[list[Any]]).decode


def frame(header: Request | Reply, body: bytes | bytearray | memoryview | pa.Buffer = b"") -> list[Any]:
    """Return the parts of a frame, to be sent one after the other."""
    encoded = _encode(header)
    if type(header) in _WITH_LAG and not header.lag_ms:  # type: ignore[union-attr]
        # The bytes of wire version 1: an array of one element less. Clients of that version ignore a further element.
        encoded = bytes((encoded[0] - 1,)) + encoded[1:-1]
    return [FRAME_PREFIX.pack(len(encoded) + len(body), len(encoded)) + encoded, body]


# The reads that a ``KvStateServer`` answers from.
#
# ``HostReads`` reads the partitions of its host. ``ForwardingReads`` of a proxy asks other hosts for the partitions
# that they own.


@dataclass(frozen=True)
class StateAnswer:
    """Rows at a version. ``batches`` have ``schema``; closing them early releases everything that they hold.

    A batch may be empty: a read that finds no rows for a second gives one, so that the server can check whether the
    client still waits. In the answer to ``changes``, ``version`` is the last version that was read, and each batch
    belongs to one version, which a column names.
    """

    version: int
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]

    def read(self) -> pa.RecordBatch | None:
        """Return the next rows; None at the end."""
        return next(self.batches, None)

    def close(self) -> None:
        """End the answer early and release what it holds; nothing happens if it has ended."""
        close = getattr(self.batches, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True)
class FeatureAnswer:
    """Features of keys, or those of one key as a list of values. The other fields are those of ``FeaturesReply``.

    ``rows`` are the values of a few keys, and then there are no columns.
    """

    versions: list[int]
    ages_ms: list[int | None]
    lag_ms: int
    columns: pa.RecordBatch | list[Any]
    rows: list[list[Any]] | None = None

    def body(self) -> bytes | pa.Buffer:
        if self.rows is not None:
            return _encode(self.rows)
        return _encode(self.columns) if isinstance(self.columns, list) else self.columns.serialize()


def have_plain_values(columns: pa.Schema) -> bool:
    """Return whether msgpack has a value for each value of the columns of features."""
    return all(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or kind == pa.string()
        for kind in columns.types
    )


class StateReads(Protocol):
    """Answers the requests of this module. Thread-safe. All rows of an answer are of one version.

    Every method raises ``NotOwnerError`` if another host owns a partition, ``UnknownOperatorError``,
    ``UnknownKvStateIdError`` naming the state variables that exist, ``StateVersionError`` naming the readable versions,
    ``RequestError`` for an invalid request, and the errors of the coordinator.
    """

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        """Return the location of an operator's partitions. Raises ``QueryEndedError`` if its query has ended."""

    def lookup(self, request: LookupRequest, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
        """Return the version, and the stored values of stored keys in the order asked; null for keys without a value.

        With ``latest`` the version is the lowest one of the partitions asked. That version need not be completed, so it
        is not a lower bound for later reads.
        """

    def lookup_one(self, request: LookupRequest, key: bytes) -> tuple[int, bytes | None]:
        """Return the result of ``lookup`` for one key; the fast path."""

    def key_rows(self, request: KeyRowsRequest, keys: pa.BinaryArray) -> StateAnswer:
        """Return the rows of stored grouping keys.

        The first column, ``position`` (int64), is the index of the row's key. Rows are ordered by position, and within
        a key as in a scan. The keys of aggregates by windows come without the window, and their key groups do not
        count: the answer has the rows of those keys in this host's partitions.
        """

    def scan(self, request: ScanRequest) -> StateAnswer:
        """Return the rows of a state variable, partition after partition in the order of stored keys."""

    def count(self, request: ScanRequest) -> tuple[int, int]:
        """Return the version, and the number of rows of ``scan``."""

    def changes(self, request: ChangesRequest, keys: pa.BinaryArray | None) -> StateAnswer:
        """Return the rows that versions have changed, in the order of versions; a batch belongs to one version."""

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        """Wait for a completed version after ``after``, at most ``seconds``; return the last completed version."""

    def lag_ms(self, run_id: str) -> int:
        """Return how many ms ago storage was last looked at, for a run that follows a query and is late; else 0."""

    def operators(self) -> list[dict[str, Any]]:
        """Return the operators of all running queries, ready for JSON."""

    def describe(self, operator: str | None, query: str | None) -> dict[str, Any]:
        """Return the description of this host's partitions, of one operator or of all, ready for JSON."""


class OwnReads(StateReads, Protocol):
    """``StateReads`` of one host, or of a checkpoint. Answers for feature views are made from them."""

    def age_ms(self, run_id: str, version: int) -> int | None:
        """Return how long ago a version was prepared; of a mirror, or a late follower, at least its lag.

        None of the empty version 0, and if it is not known. Quick for the last completed versions of a run.
        """

    def located_view(self, view: str) -> LocatedView:
        """Return a feature view and the locations of its operators. Raises ``UnknownFeatureViewError``."""

    def feature_views(self) -> Sequence[RunningView]:
        """Return the feature views of all running queries."""


class ServedReads(StateReads, Protocol):
    """``StateReads`` of a server, which answers for feature views, too."""

    def views(self, request: ViewsRequest) -> list[ViewLocation]:
        """Return one feature view, or all; of all, those that cannot be read now have a ``problem``."""

    def features(self, request: FeaturesRequest, keys: pa.BinaryArray | bytes) -> FeatureAnswer:
        """Return features. Raises ``StaleFeatureError``, and ``RetiredRunError`` for another revision of the view."""


# The decoder of rows that come over the wire (see ``RowsReply``).


def features_of(reply: FeaturesReply, body: memoryview | bytes, schema: pa.Schema) -> FeatureAnswer:
    """Return the answer of a reply, whose columns are not copied. Raises ``ConnectionClosedError`` for other bytes."""
    try:
        if reply.has_rows:
            return FeatureAnswer(reply.versions, reply.ages_ms, reply.lag_ms, [], _decode_rows(body))
        columns = _decode_row(body) if reply.is_row else pa.ipc.read_record_batch(pa.py_buffer(body), schema)
    except (pa.ArrowException, EOFError, OSError, ValueError) as error:
        raise ConnectionClosedError(f"A body of {len(body)} bytes cannot be decoded as features: {error}") from error
    return FeatureAnswer(reply.versions, reply.ages_ms, reply.lag_ms, columns)


class RowBatchDecoder:
    """Turns the bodies of one answer's ``RowsReply`` frames into record batches, without copying the rows."""

    def __init__(self) -> None:
        self.schema: pa.Schema | None = None

    def decode(self, body: memoryview | bytes) -> pa.RecordBatch | None:
        """Return the rows of a body; None for the schema alone. Raises ``ConnectionClosedError`` for other bodies."""
        source = pa.BufferReader(pa.py_buffer(body))
        try:
            if self.schema is None:
                self.schema = pa.ipc.read_schema(source)
                if source.tell() == source.size():
                    return None
            return pa.ipc.read_record_batch(pa.ipc.read_message(source), self.schema)
        except (pa.ArrowException, EOFError, OSError) as error:
            raise ConnectionClosedError(f"A body of {len(body)} bytes cannot be decoded as rows: {error}") from error


# Keys and values as the body of a frame: their number, their lengths, their bytes.


_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<i")
_ABSENT = -1


def pack_bytes(values: pa.BinaryArray) -> bytes:
    """Return keys or values as a body: their number (uint32), their lengths (int32 each, -1 for null), their bytes."""
    even = even_rows(values)
    if even is not None:
        n = len(even)
        # Before Python 3.12 mypy does not know that numpy arrays have a buffer.
        return b"".join((_COUNT.pack(n), _even_lengths(n, even.dtype.itemsize), even))  # type: ignore[arg-type]
    content, offsets = binary_content(values.fill_null(b"") if values.null_count else values)
    lengths = np.diff(offsets).astype("<i4")
    if values.null_count:
        lengths[~np.asarray(values.is_valid())] = _ABSENT
    return b"".join((_COUNT.pack(len(values)), lengths.tobytes(), content.tobytes()))


def unpack_bytes(body: memoryview | bytes) -> pa.BinaryArray:
    """Return the keys or values of a body. Raises ``RequestError`` if the lengths do not fit the body."""
    size = len(body)
    count = _COUNT.unpack_from(body)[0] if size >= _COUNT.size else 0
    begin = _COUNT.size + 4 * count
    if size < max(begin, _COUNT.size):
        raise RequestError(f"A body of {size} bytes cannot have {count} keys or values.")
    width = _LENGTH.unpack_from(body, _COUNT.size)[0] if count else 0
    is_whole = width > 0 and begin + count * width == size <= MAX_BYTES
    if is_whole and bytes(body[_COUNT.size : begin]) == _even_lengths(count, width):
        return even_array(np.frombuffer(body, record(width), count, begin))
    lengths = np.frombuffer(body, "<i4", count, _COUNT.size)
    offsets = offsets_of(np.maximum(lengths, 0))
    if (count and lengths.min() < _ABSENT) or begin + offsets[-1] != size or offsets[-1] > MAX_BYTES:
        raise RequestError(
            f"A body of {size} bytes does not have the lengths that it states, {offsets[-1]} bytes of {count} values."
        )
    present = lengths >= 0
    buffers = [
        None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little")),
        pa.py_buffer(offsets.astype(np.int32)),
        pa.py_buffer(memoryview(body)[begin:]),
    ]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def _even_lengths(n: int, width: int) -> bytes:
    """Return ``n`` equal lengths; those of few short values are cached."""
    if n > EVEN_ROWS or width > EVEN_WIDTH:
        return _LENGTH.pack(width) * n
    return _lengths_of(width)[: 4 * n]


@lru_cache(EVEN_WIDTH)
def _lengths_of(width: int) -> bytes:
    return _LENGTH.pack(width) * EVEN_ROWS


StoredKeys: TypeAlias = pa.BinaryArray | list[bytes] | bytes
"""Stored keys of a request: many, a few, or one."""


def pack_few(keys: Sequence[bytes]) -> bytes:
    """Return ``pack_bytes`` of a few keys, without an array of them."""
    return struct.pack(f"<I{len(keys)}i", len(keys), *map(len, keys)) + b"".join(keys)


def pack_one(key: bytes) -> bytes:
    """Return ``pack_bytes`` of one key or value."""
    return struct.pack("<Ii", 1, len(key)) + key


def unpack_one(body: memoryview | bytes) -> bytes | None:
    """Return the one value of a body; None for null. Raises ``RequestError`` for another number of values."""
    if len(body) >= 8:
        count, length = struct.unpack_from("<Ii", body)
        if count == 1 and len(body) == 8 + max(length, 0) and length >= _ABSENT:
            return None if length == _ABSENT else bytes(body[8:])
    raise RequestError(f"A body of {len(body)} bytes is not one value.")


# The context of a request while a thread works on it: deadline, cancellation, memory, and admission of slow work.
#
# Long work calls the functions of this module between its pieces, as deep inside as it likes: nested iterators need
# not pass a context on. One thread answers a request, and the context is found by the thread. Without a context, as
# in a client, the functions do nothing.


class RequestContext:
    """Controls the work on a request. Every method may raise an error, which ends the request; here none does."""

    def raise_if_cancelled(self) -> None:
        """Raise if the deadline is over, the client has left, or its token no longer allows the request."""

    def before_slow_work(self) -> None:
        """Prepare for work that may take long, such as loading from storage."""

    def reserve_memory(self, nbytes: int) -> None:
        """Reserve ``nbytes`` bytes more, until the request is answered."""


class _OfThread(threading.local):
    context = RequestContext()


_of_thread = _OfThread()


@contextmanager
def active_context(context: RequestContext) -> Iterator[None]:
    """Make ``context`` that of this thread's work within the ``with``."""
    before, _of_thread.context = _of_thread.context, context
    try:
        yield
    finally:
        _of_thread.context = before


def raise_if_cancelled() -> None:
    """Raise the context's error if the answer is no longer wanted. Long work calls this between pieces; it is cheap."""
    _of_thread.context.raise_if_cancelled()


def before_slow_work() -> None:
    """Announce work that may take long. Raises the context's error, as ``TooManyRequestsError``."""
    _of_thread.context.before_slow_work()


def reserve_memory(nbytes: int) -> None:
    """Reserve memory for a part of an answer, before more is read. Raises the context's ``RequestLimitError``."""
    _of_thread.context.reserve_memory(nbytes)
