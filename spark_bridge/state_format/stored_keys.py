"""Stored keys made of parts of other keys, without decoding: each column adds its own bytes to a key.

``backends.encoding.keys`` has the encoding of a key: two bytes of the key group, then each column's bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import binary_array, binary_content, gather_fixed, gather_ranges, join_columns
from backends.encoding.keys import KEY_GROUP_BYTES, KeyRange, encode_keys

INT64_KEY_BYTES = 9
"""Bytes of an int64 that is not null in a key: a byte that says that there is a value, and eight of the value."""
_LONG = pa.schema([pa.field("long", pa.int64())])


def columns_of_key(rows: pa.RecordBatch) -> pa.BinaryArray:
    """Return the bytes that these columns add to a key, row by row."""
    return _sliced(encode_keys(rows, np.zeros(rows.num_rows, np.uint16)), KEY_GROUP_BYTES)


def longs_of_key(values: npt.NDArray[np.int64]) -> pa.BinaryArray:
    """Return the bytes that an int64 column adds to a key, row by row."""
    return columns_of_key(pa.RecordBatch.from_arrays([pa.array(values, pa.int64())], schema=_LONG))


def with_more(keys: pa.BinaryArray, more: pa.BinaryArray) -> pa.BinaryArray:
    """Return keys with the bytes of further columns after them."""
    return join_columns([keys, more])


def by_expiry(keys: pa.BinaryArray, expiries: npt.NDArray[np.int64]) -> pa.BinaryArray:
    """Return grouping keys as keys whose first column is an expiry, so that those that expire first stand first."""
    return join_columns([_sliced(keys, 0, KEY_GROUP_BYTES), longs_of_key(expiries), _sliced(keys, KEY_GROUP_BYTES)])


def without_expiry(keys: pa.BinaryArray) -> pa.BinaryArray:
    """Return the grouping keys that ``by_expiry`` was given."""
    return join_columns([_sliced(keys, 0, KEY_GROUP_BYTES), _sliced(keys, KEY_GROUP_BYTES + INT64_KEY_BYTES)])


def last_longs(keys: pa.BinaryArray) -> npt.NDArray[np.int64]:
    """Return the int64 that is the last column of each key; none is null."""
    content, offsets = binary_content(keys)
    longs: npt.NDArray[np.int64] = (
        gather_fixed(content, offsets[1:] - 8, np.dtype(">u8")).astype(np.uint64).view(np.int64)
    )
    return longs ^ np.iinfo(np.int64).min


def without_last_long(keys: pa.BinaryArray) -> pa.BinaryArray:
    """Return the keys without their last column, an int64."""
    content, offsets = binary_content(keys)
    return binary_array(*gather_ranges(content, offsets[:-1], offsets[1:] - INT64_KEY_BYTES))


def expired_ranges(key_groups: tuple[int, int], until_ms: int) -> list[KeyRange]:
    """Return where the keys of ``by_expiry`` lie whose expiry is at most ``until_ms``, a range per key group.

    ``key_groups`` are the first key group and the one after the last.
    """
    end = longs_of_key(np.array([min(until_ms + 1, np.iinfo(np.int64).max)]))[0].as_py()
    groups = [group.to_bytes(KEY_GROUP_BYTES, "big") for group in range(*key_groups)]
    return [(group, group + end) for group in groups]


def group_range(group: int) -> KeyRange:
    """Return where the keys of one key group lie."""
    return prefix_range(group.to_bytes(KEY_GROUP_BYTES, "big"))


def prefix_range(prefix: bytes) -> KeyRange:
    """Return where the keys lie that begin with ``prefix``."""
    kept = prefix.rstrip(b"\xff")
    return prefix, kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def key_groups_of(keys: pa.BinaryArray) -> npt.NDArray[np.int32]:
    """Return the key groups that stored keys begin with."""
    content, offsets = binary_content(keys)
    groups: npt.NDArray[np.int32] = gather_fixed(content, offsets[:-1], np.dtype(">u2")).astype(np.int32)
    return groups


def _sliced(keys: pa.BinaryArray, start: int, stop: int | None = None) -> pa.BinaryArray:
    """Return the bytes of each key from ``start`` to ``stop``; keys are that long."""
    content, offsets = binary_content(keys)
    stops = offsets[1:] if stop is None else offsets[:-1] + stop
    return binary_array(*gather_ranges(content, offsets[:-1] + start, stops))
