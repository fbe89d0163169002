"""Keys and values as the body of a frame: their number, their lengths, their bytes."""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np
import pyarrow as pa

from backends.encoding.columns import EVEN_ROWS, EVEN_WIDTH, MAX_BYTES, binary_content, even_array, even_rows, record
from spark_bridge.exceptions import RequestError

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
    """Return ``n`` equal lengths; those of few short values are cached."""
    if n > EVEN_ROWS or width > EVEN_WIDTH:
        return _LENGTH.pack(width) * n
    return _lengths_of(width)[: 4 * n]


@lru_cache(EVEN_WIDTH)
def _lengths_of(width: int) -> bytes:
    return _LENGTH.pack(width) * EVEN_ROWS


def pack_one(key: bytes) -> bytes:
    """Return ``pack_bytes`` of one key or value."""
    return struct.pack("<Ii", 1, len(key)) + key


def unpack_one(body: memoryview | bytes) -> bytes | None:
    """Return the one value of a body; None for null.

    Raises ``RequestError`` if the body has another number of values.
    """
    if len(body) >= 8:
        count, length = struct.unpack_from("<Ii", body)
        if count == 1 and len(body) == 8 + max(length, 0) and length >= _ABSENT:
            return None if length == _ABSENT else bytes(body[8:])
    raise RequestError(f"A body of {len(body)} bytes is not one value.")
