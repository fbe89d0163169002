"""The windows that the keys of a windowed aggregate have in a partition: all of them, and perhaps some that are gone.

The windows of one grouping key may be in any partition, because their key groups differ. With the windows known, the
rows of a grouping key are single lookups. A partition is scanned for its windows when they are first asked for; from
then on every commit tells which windows it has added.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.bounded_dict import BoundedDict
from backends.encoding.columns import binary_content, fixed_dtype
from backends.encoding.keys import KEY_GROUP_BYTES, decode_keys, encode_keys
from backends.formats.changelog import Changes
from backends.ids import DEFAULT_FAMILY
from spark_bridge.host.held.instance import Instance
from spark_bridge.queryable.reads.operators.operator_plan import without_prefix
from spark_bridge.queryable.reads.versions.answer_version import PartitionView

KNOWN_HEADS = 16
"""Versions that are remembered as versions whose windows are all known."""
_MIN_RESCAN = 64


class KeyWindowIndex:
    """The windows in the keys of one loaded partition, as bytes of the encoded column.

    Thread-safe; the lock guards all of it. ``key`` are the columns of the stored key, ``place`` is the position of the
    window among them.
    """

    def __init__(self, key: pa.Schema, place: int) -> None:
        self._key = key
        self._place = place
        self._lock = threading.Lock()
        self._windows: frozenset[bytes] = frozenset()
        self._heads: BoundedDict[str | None, None] = BoundedDict(KNOWN_HEADS)
        self._heads[None] = None  # the empty version 0 has no windows
        self._scanned = 0

    @classmethod
    def of(cls, instance: Instance | None, key: pa.Schema, place: int) -> KeyWindowIndex:
        """Return the index of a loaded partition, or a new one for a mere copy (``instance`` None)."""
        if instance is None:
            return cls(key, place)
        held = instance.key_windows
        if not isinstance(held, KeyWindowIndex):
            held = instance.key_windows = cls(key, place)
        return held

    def add(self, base: str | None, head: str, changes: Changes) -> None:
        """Add the windows of the version with the head ``head``, which has ``changes`` over the one with the head
        ``base``.
        """
        if base not in self._heads:
            return
        pairs = changes.families.get(DEFAULT_FAMILY)
        found = self._windows_of(iter(() if pairs is None else (pairs.keys,)))
        with self._lock:
            if base in self._heads:
                self._windows |= found
                self._heads[head] = None

    def windows(self, view: PartitionView) -> frozenset[bytes]:
        """Return at least the windows that there are in a version."""
        with self._lock:  # another thread may be replacing the windows by those of another version
            is_known = view.head in self._heads and (view.head is not None or view.version == 0)
            if is_known and len(self._windows) <= 2 * self._scanned + _MIN_RESCAN:
                return self._windows
        scanned = view.reads.scan(view.version, head=view.head)
        found = self._windows_of(batch.column(0) for batch in scanned)
        with self._lock:
            if is_known:
                # Most windows that commits have added are gone again. Other versions are scanned again.
                self._windows, self._heads = found, BoundedDict(KNOWN_HEADS)
            else:
                self._windows |= found
            self._scanned = len(found)
            if view.head is not None:
                self._heads[view.head] = None
        return found

    def _windows_of(self, keys: Iterator[pa.BinaryArray]) -> frozenset[bytes]:
        found: set[bytes] = set()
        for part in keys:
            if len(part):
                found.update(pc.unique(self._window_bytes(part)).to_pylist())
        return frozenset(found)

    def _window_bytes(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        before = [_width(field.type) for field in list(self._key)[: self._place]]
        width = _width(self._key.field(self._place).type)
        if width is not None and None not in before:
            start = KEY_GROUP_BYTES + sum(w for w in before if w is not None)
            content, offsets = binary_content(keys)
            at = offsets[:-1, None] + np.arange(start, start + width)
            return pa.Array.from_buffers(pa.binary(width), len(keys), [None, pa.py_buffer(content[at].tobytes())])
        windows = decode_keys(keys, self._key).select([self._place])
        return without_prefix(encode_keys(windows, np.zeros(len(keys), np.uint16)))

    def decoded(self, windows: frozenset[bytes]) -> pa.Array:
        """Return windows as a column, ascending."""
        keys = pa.array([bytes(KEY_GROUP_BYTES) + window for window in sorted(windows)], pa.binary())
        return decode_keys(keys, pa.schema([self._key.field(self._place)])).column(0)


def _width(kind: pa.DataType) -> int | None:
    """Return the bytes that a column of a type takes in every key; None if keys differ in that."""
    if pa.types.is_struct(kind):
        parts = [_width(kind.field(i).type) for i in range(kind.num_fields)]
        return None if None in parts else 1 + sum(p for p in parts if p is not None)
    dtype = fixed_dtype(kind)
    return None if dtype is None else 1 + dtype.itemsize
