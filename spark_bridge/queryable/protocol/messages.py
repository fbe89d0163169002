"""What query clients and ``KvStateServer`` say to each other: frames over a TCP connection, after Flink's queryable-state protocol.

A frame is the length of what follows the two lengths (uint32), the length of its header (uint32), the header and the body; all
little-endian. A header is a msgpack array, checked by msgspec; a body is keys or values (``pack_bytes``) or Arrow IPC. A client says
``Hello`` first. Each request is answered by one frame, a scan by ``Batch`` frames and an ``End``; what goes wrong, by a ``Failure``.

Arrow Flight was tried for this first: in a trial of bare servers over a dict, one client made 3,000 lookups a second by it, 10,400 of
Redis, and 15,500 by frames like these.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Struct

from backends.decoders import msgpack_decoder
from backends.encoding.columns import EVEN_ROWS, EVEN_WIDTH, MAX_BYTES, binary_content, even_array, even_rows, record
from backends.ids import DEFAULT_FAMILY
from spark_bridge.exceptions import RequestError

PROTOCOL = 1
PREFIX = struct.Struct("<II")
"""Length of header and body together, length of the header."""
MAX_HEADER_BYTES = 1 << 20
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<i")
_ABSENT = -1

Isolation = Literal["completed", "latest", "version"]
Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
RunId = Annotated[str, msgspec.Meta(max_length=256)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]
"""Of an operator, query, state variable or column: hosts remember some of those that they were asked for."""


class At(Struct, frozen=True, array_like=True):
    """Which version is read.

    ``completed``: the last completed one, which must be ``version`` or later. ``latest``: what was committed last, partition by
    partition. ``version``: exactly ``version``; with ``held_only`` not from storage, if the host does not have it in memory any more.
    """

    isolation: Isolation = "completed"
    version: Natural = 0
    held_only: bool = False


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The first frame of a connection. No token, no answer."""

    protocol: int
    token: str


class Locate(Struct, frozen=True, array_like=True, tag="locate"):
    """Where is an operator? ``query`` is a name, query id or run id. Answered by ``Located``."""

    operator: Name
    query: Name | None = None


class Lookup(Struct, frozen=True, array_like=True, tag="lookup"):
    """The stored values of keys; the body is the stored keys. Answered by ``Values``, whose body has as many values.

    ``forward``: partitions that this host does not own are asked of their owners; else they are a ``NotOwnerError``.
    """

    run_id: RunId
    operator: Name
    at: At = At()
    column_family: Name = DEFAULT_FAMILY
    forward: bool = False


class KeyRows(Struct, frozen=True, array_like=True, tag="rows"):
    """The rows that keys have in a state variable of any kind (windows of an aggregate, elements, entries), typed.

    The body is the stored grouping keys (without a window). Answered as a ``Scan``; the first column, ``position``, is that of the row's key.
    ``partitions``: where the windows of windowed keys are looked for, which may be in any; None is all that this host owns.
    """

    run_id: RunId
    operator: Name
    state: Name | None = None
    at: At = At()
    columns: Annotated[list[Name], msgspec.Meta(max_length=4096)] | None = None
    forward: bool = False
    partitions: list[Natural] | None = None


class Comparison(Struct, frozen=True, array_like=True):
    """``column operator values``: one value, or several for ``in``; none for ``is null``, ``is not null``. Values as JSON can say them.

    Values of types that JSON has not are strings that Arrow casts to the column's type.
    """

    column: Name
    comparison: Literal["=", "!=", "<", "<=", ">", ">=", "in", "is null", "is not null"]
    values: list[str | int | float | bool] = []


class Scan(Struct, frozen=True, array_like=True, tag="scan"):
    """The rows of a state variable, typed, in the order of the stored keys within a partition.

    ``start`` (included) and ``end`` (not included) bound the grouping key by its encoded columns without the key group, within every key
    group. ``partitions`` None is all that this host owns, with ``forward`` all. ``where``: all must hold. ``limit`` counts rows of this answer.
    ``behind_run``: the earlier run that has given rows of this very version already. A version that a later run has made anew is a
    ``StateVersionError``.
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
    behind_run: RunId = ""


class Count(Struct, frozen=True, array_like=True, tag="count"):
    """How many rows a ``Scan`` would give. Answered by ``Counted``."""

    scan: Scan


class Changes(Struct, frozen=True, array_like=True, tag="changes"):
    """The rows that the versions behind ``after`` up to ``until`` changed, in the order of versions, whichever layout they are in.

    Read from storage, so any host can answer. The body, if there is one, is the grouping keys that matter. Answered as a ``Scan``.
    ``behind_run``: the run that gave what is before, if it is an earlier one. A version ``after`` that a later run has made anew is a
    ``StateVersionError``.
    """

    run_id: RunId
    operator: Name
    after: Natural
    until: Natural
    state: Name | None = None
    behind_run: RunId = ""


class Await(Struct, frozen=True, array_like=True, tag="await"):
    """Wait until a version behind ``after`` is completed, ``seconds`` at most. Answered by ``Counted`` with the completed version."""

    run_id: RunId
    after: Natural
    seconds: Seconds


class Operators(Struct, frozen=True, array_like=True, tag="operators"):
    """The operators of all running queries. Answered by ``Described`` with a list."""


class Describe(Struct, frozen=True, array_like=True, tag="describe"):
    """What this host holds, and how it has answered. With ``forward``, of all hosts of the operator's query. Answered by ``Described``."""

    operator: Name | None = None
    query: Name | None = None
    forward: bool = False


Request = Hello | Locate | Lookup | KeyRows | Scan | Count | Changes | Await | Operators | Describe


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """The answer to ``Hello``: who answers, and what a request may have."""

    protocol: int
    host_id: str
    max_request_bytes: int
    max_keys: int


class Located(Struct, frozen=True, array_like=True, tag="located"):
    """The body is the ``OperatorLocation`` in JSON."""


class Values(Struct, frozen=True, array_like=True, tag="values"):
    """The body is the values at ``version``, in the order of the keys."""

    version: int


class Batch(Struct, frozen=True, array_like=True, tag="batch"):
    """Rows: the body is an Arrow IPC stream's next part, the schema in the first one.

    The bodies of an answer's ``Batch`` frames, one behind the other, are one IPC stream, without the marker at its end (``End`` says
    that). Every body is whole IPC messages: the first one the schema message and, unless there are no rows at all, one record batch
    message behind it; each other one exactly one record batch message. No dictionaries, no compression. A record batch may have no rows:
    a server that has long found none says so that it is still at work. So a client may feed the bodies to one
    ``pa.ipc.open_stream``, or read each with ``pa.ipc.read_message`` and ``read_record_batch``.
    """

    version: int


class End(Struct, frozen=True, array_like=True, tag="end"):
    """There are no more rows."""

    version: int
    rows: int


class Counted(Struct, frozen=True, array_like=True, tag="counted"):
    """A number."""

    version: int
    count: int


class Described(Struct, frozen=True, array_like=True, tag="described"):
    """The body is JSON."""


class Failure(Struct, frozen=True, array_like=True, tag="failure"):
    """The name of the error's class, and what it says."""

    error: str
    message: str


Reply = Welcome | Located | Values | Batch | End | Counted | Described | Failure

_encode = msgspec.msgpack.Encoder().encode
decode_request = msgpack_decoder(Request).decode
decode_reply = msgpack_decoder(Reply).decode


def frame(header: Request | Reply, body: bytes | bytearray | memoryview | pa.Buffer = b"") -> list[Any]:
    """The parts of a frame, to be sent one after the other."""
    encoded = _encode(header)
    return [PREFIX.pack(len(encoded) + len(body), len(encoded)) + encoded, body]


def pack_bytes(values: pa.BinaryArray) -> bytes:
    """Keys or values as a body: their number (uint32), their lengths (int32, -1 for null), their bytes."""
    even = even_rows(values)
    if even is not None:
        n = len(even)
        # mypy does not know before Python 3.12 that numpy's arrays have a buffer.
        return b"".join((_COUNT.pack(n), _even_lengths(n, even.dtype.itemsize), even))  # type: ignore[arg-type]
    content, offsets = binary_content(values.fill_null(b"") if values.null_count else values)
    lengths = np.diff(offsets).astype("<i4")
    if values.null_count:
        lengths[~np.asarray(values.is_valid())] = _ABSENT
    return b"".join((_COUNT.pack(len(values)), lengths.tobytes(), content.tobytes()))


def unpack_bytes(body: memoryview | bytes) -> pa.BinaryArray:
    """The inverse of ``pack_bytes``. Raises ``RequestError`` if it is not."""
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
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.maximum(lengths, 0), out=offsets[1:])
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
    """So many lengths, all the same; not made anew for few that are short."""
    if n > EVEN_ROWS or width > EVEN_WIDTH:
        return _LENGTH.pack(width) * n
    return _lengths_of(width)[: 4 * n]


@lru_cache(EVEN_WIDTH)
def _lengths_of(width: int) -> bytes:
    return _LENGTH.pack(width) * EVEN_ROWS


def pack_one(key: bytes) -> bytes:
    """``pack_bytes`` of one key."""
    return struct.pack("<Ii", 1, len(key)) + key


def unpack_one(body: memoryview | bytes) -> bytes | None:
    """The one value of a body. Raises ``RequestError`` if it has another number of them."""
    if len(body) >= 8:
        count, length = struct.unpack_from("<Ii", body)
        if count == 1 and len(body) == 8 + max(length, 0) and length >= _ABSENT:
            return None if length == _ABSENT else bytes(body[8:])
    raise RequestError(f"A body of {len(body)} bytes is not one value.")
