"""Keys of a processor's families, made of others' bytes: each column adds its own to the key (see ``backends.encoding.keys``)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import binary_array, binary_content, gather_ranges, join
from backends.encoding.keys import GROUP_BYTES, KeyRange, encode_keys

_LONG_BYTES = 9
"""A long in a key: a byte that says that it is there, and its own eight."""
_LONG = pa.schema([pa.field("long", pa.int64())])


def columns_of_key(rows: pa.RecordBatch) -> pa.BinaryArray:
    """The bytes that these columns add to a key."""
    return _sliced(encode_keys(rows, np.zeros(rows.num_rows, np.uint16)), GROUP_BYTES)


def longs_of_key(values: npt.NDArray[np.int64]) -> pa.BinaryArray:
    """The bytes that a column of longs adds to a key."""
    return columns_of_key(pa.RecordBatch.from_arrays([pa.array(values, pa.int64())], schema=_LONG))


def with_more(keys: pa.BinaryArray, more: pa.BinaryArray) -> pa.BinaryArray:
    """Keys with further columns."""
    return join([keys, more])


def by_expiry(keys: pa.BinaryArray, expiries: npt.NDArray[np.int64]) -> pa.BinaryArray:
    """Grouping keys as keys that have the expiry first."""
    return join([_sliced(keys, 0, GROUP_BYTES), longs_of_key(expiries), _sliced(keys, GROUP_BYTES)])


def without_expiry(keys: pa.BinaryArray) -> pa.BinaryArray:
    """The grouping keys of what ``by_expiry`` has made."""
    return join([_sliced(keys, 0, GROUP_BYTES), _sliced(keys, GROUP_BYTES + _LONG_BYTES)])


def expired_ranges(key_groups: tuple[int, int], until_ms: int) -> list[KeyRange]:
    """Where the keys of ``by_expiry`` lie that have expired: an expiry of at most ``until_ms``, in each key group."""
    end = longs_of_key(np.array([min(until_ms + 1, np.iinfo(np.int64).max)]))[0].as_py()
    groups = [group.to_bytes(GROUP_BYTES, "big") for group in range(*key_groups)]
    return [(group, group + end) for group in groups]


def group_range(group: int) -> KeyRange:
    """Where the keys of one key group lie."""
    return prefix_range(group.to_bytes(GROUP_BYTES, "big"))


def prefix_range(prefix: bytes) -> KeyRange:
    """Where the keys lie that begin with ``prefix``."""
    kept = prefix.rstrip(b"\xff")
    return prefix, kept[:-1] + bytes([kept[-1] + 1]) if kept else None


def groups_of(keys: pa.BinaryArray) -> npt.NDArray[np.uint16]:
    """The key groups of stored keys."""
    groups: npt.NDArray[np.uint16] = binary_content(_sliced(keys, 0, GROUP_BYTES))[0].view(">u2")
    return groups


def _sliced(keys: pa.BinaryArray, start: int, stop: int | None = None) -> pa.BinaryArray:
    """The bytes of each key from ``start`` on; keys are that long."""
    content, offsets = binary_content(keys)
    stops = offsets[1:] if stop is None else offsets[:-1] + stop
    return binary_array(*gather_ranges(content, offsets[:-1] + start, stops))
