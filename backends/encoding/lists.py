"""List values by key layout: every element is a pair of its own, so that appending reads nothing.

A column family of lists is kept under its name and a mark. The key of an element is the user's
key, escaped so that no key is a prefix of another and the order stays, then the version that
appended it and its number within the commit: elements follow in the order they were appended.
(Spark's RocksDB provider has the same contract, ``useMultipleValuesPerKey`` and ``merge``, on RocksDB's
merge operator.)
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_MARK = "!list"
_END = b"\x00\x00"
_SUFFIX_BYTES = 16


def stored_name(column_family: str) -> str:
    """What a column family of lists is stored as; no user's family has such a name."""
    return column_family + _MARK


def is_list(stored: str) -> bool:
    """Return whether a stored family is one of lists."""
    return stored.endswith(_MARK)


def user_name(stored: str) -> str:
    """Return the name that users know a stored family by."""
    return stored.removesuffix(_MARK)


def escape(key: bytes) -> bytes:
    """What the stored keys of all user keys that begin with ``key`` begin with; keeps the order."""
    return key.replace(b"\x00", b"\x00\xff")


def elements_prefix(key: bytes) -> bytes:
    """What the stored keys of one list begin with, and no others."""
    return escape(key) + _END


def element_keys(keys: pa.BinaryArray, version: int, first: int) -> pa.BinaryArray:
    """Return stored keys of elements that are appended to the lists ``keys``, in this order."""
    suffixes = np.empty((len(keys), 2), ">u8")
    suffixes[:, 0] = version
    suffixes[:, 1] = np.arange(first, first + len(keys))
    tails = pa.Array.from_buffers(pa.binary(_SUFFIX_BYTES), len(keys), [None, pa.py_buffer(suffixes.tobytes())])
    escaped = pc.replace_substring(keys, b"\x00", b"\x00\xff")
    return pc.binary_join_element_wise(escaped, tails.cast(pa.binary()), _END)


def list_keys(stored: pa.BinaryArray) -> pa.BinaryArray:
    """Return the user's keys of stored ones."""
    if not len(stored):
        return stored
    return pc.replace_substring(pc.binary_slice(stored, 0, -_SUFFIX_BYTES - len(_END)), b"\x00\xff", b"\x00")
