"""The stored keys of lists of the provider API (``merge``): each element is a pair of its own; appending reads nothing.

The lists of processors (``ListState``) have another layout, see ``spark_bridge/state_format/layouts.py``.

A column family of lists is stored under its name and a mark. The stored key of an element is the user's key, then the
version that appended the element, and its number within the commit. So elements follow in the order in which they were
appended. The user's key is escaped so that no key is a prefix of another one, and the order of keys stays. (Spark's
RocksDB provider has the same contract, ``useMultipleValuesPerKey`` and ``merge``, by RocksDB's merge operator.)
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_MARK = "!list"
_END = b"\x00\x00"
_SUFFIX_BYTES = 16


def list_family_name(column_family: str) -> str:
    """Return the name under which a column family of lists is stored; no user's family has such a name."""
    return column_family + _MARK


def is_list(stored: str) -> bool:
    """Return whether a stored family holds lists."""
    return stored.endswith(_MARK)


def user_name(stored: str) -> str:
    """Return the user's name of a stored family."""
    return stored.removesuffix(_MARK)


def escape(key: bytes) -> bytes:
    """Return the beginning of the stored keys of all user keys that begin with ``key``. Keeps the order of keys."""
    return key.replace(b"\x00", b"\x00\xff")


def elements_prefix(key: bytes) -> bytes:
    """Return the beginning of the stored keys of one list, which no other keys have."""
    return escape(key) + _END


def element_keys(keys: pa.BinaryArray, version: int, first: int) -> pa.BinaryArray:
    """Return the stored keys of elements that ``version`` appends to the lists ``keys``, numbered from ``first``."""
    suffixes = np.empty((len(keys), 2), ">u8")
    suffixes[:, 0] = version
    suffixes[:, 1] = np.arange(first, first + len(keys))
    tails = pa.Array.from_buffers(pa.binary(_SUFFIX_BYTES), len(keys), [None, pa.py_buffer(suffixes.tobytes())])
    escaped = pc.replace_substring(keys, b"\x00", b"\x00\xff")
    return pc.binary_join_element_wise(escaped, tails.cast(pa.binary()), _END)


def user_keys_of_lists(stored: pa.BinaryArray) -> pa.BinaryArray:
    """Return the user's keys of stored keys."""
    if not len(stored):
        return stored
    return pc.replace_substring(pc.binary_slice(stored, 0, -_SUFFIX_BYTES - len(_END)), b"\x00\xff", b"\x00")
