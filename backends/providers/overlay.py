"""A store that consists of a readable version and uncommitted changes over it.

A provider only has to implement reads of a version (``VersionReader``) and the commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import DEFAULT_FAMILY, StateStoreId, check_name
from backends.encoding import values as lists
from backends.encoding.keys import first_key_after
from backends.encoding.sorted_pairs import PAIRS_SCHEMA, SortedPairs, as_binary, merged_scan
from backends.engines.sorted_map_engine import SortedMap
from backends.exceptions import InvalidStateStoreArgument, StoreClosedError
from backends.formats.changelog import Changes, read_changelog
from backends.formats.manifest import Lineage
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.store import CHANGE_FEED_SCHEMA, StateStore, StateStoreMetrics

# Uncommitted changes of one column family.


_LONGEST_DICT = 1 << 16


class WriteBuffer:
    """Uncommitted changes of one column family.

    The newest single changes are in a dict. Others are sorted, and join a sorted map once something is read: a commit
    that follows one bulk change takes it as it is.
    """

    def __init__(self) -> None:
        self._singles: dict[bytes, bytes | None] = {}
        self._unread: list[SortedPairs] = []
        self._map = SortedMap(keeps_removed=True)

    def put(self, key: bytes, value: bytes | None) -> None:
        """Set one value; None removes the key."""
        self._singles[key] = value
        if len(self._singles) >= _LONGEST_DICT:
            self._flush()

    def put_many(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """Set many values; null removes a key. Of equal keys, the last one wins."""
        self._flush()
        self._unread.append(SortedPairs.last_wins(keys, values))

    def _flush(self) -> None:
        if self._singles:
            self._unread.append(SortedPairs.from_dict(self._singles))
            self._singles = {}

    def _merged(self) -> SortedMap:
        """Return all changes but the newest single ones."""
        for pairs in self._unread:
            self._map = self._map.with_changes(pairs)
        self._unread = []
        return self._map

    def get(self, key: bytes) -> tuple[bool, bytes | None]:
        """Return whether a key was changed, and its new value (None: removed)."""
        if key in self._singles:
            return True, self._singles[key]
        return self._merged().find(key)

    def get_many(self, keys: pa.BinaryArray, below: pa.BinaryArray) -> pa.BinaryArray:
        """Return the values of ``keys`` with these changes; ``below`` are their values without them."""
        self._flush()
        return self._merged().get_many(keys, below)

    def between(self, start: bytes | None, end: bytes | None) -> SortedPairs:
        """Return the changes of keys from ``start`` (included) to ``end`` (not included)."""
        if start is None and end is None:
            return self.all()
        self._flush()
        return self._merged().between(start, end)

    def all(self) -> SortedPairs:
        """Return all changes."""
        self._flush()
        if self._map.runs or len(self._unread) > 1:
            self._unread = [self._merged().between(None, None)]
            self._map = SortedMap(keeps_removed=True)
        return self._unread[0] if self._unread else SortedPairs.empty()


class VersionReader(Protocol):
    """A version of a state that can be read."""

    @property
    def id(self) -> StateStoreId:
        """The store of the version."""

    @property
    def version(self) -> int:
        """The number of the version."""

    def get_many(self, keys: pa.BinaryArray, column_family: str) -> pa.BinaryArray:
        """Return the values in the order of the keys, null where a key has none."""

    def scan(self, start: bytes | None, end: bytes | None, column_family: str) -> Iterator[pa.RecordBatch]:
        """Return batches of ``key`` and ``value`` from ``start`` (included) to ``end`` (not included), in key order."""

    def column_families(self) -> frozenset[str]:
        """Return the column families of the version."""

    def metrics(self) -> StateStoreMetrics:
        """Return the figures of the version, or of the newest one."""

    def close(self) -> None:
        """Release the version: nothing more will be read."""


class OverlayStateStore(StateStore):
    """A store over one version. ``commit_changes(changes)`` makes the next version, and returns its number and figures.

    Without ``commit_changes`` the store is read-only.
    """

    def __init__(
        self, reader: VersionReader, commit_changes: Callable[[Changes], tuple[int, StateStoreMetrics]] | None
    ) -> None:
        self._reader = reader
        self._commit_changes = commit_changes
        self._buffers: dict[str, WriteBuffer] = {}
        self._families_below = reader.column_families()
        self._families = set(self._families_below)
        self._closed: str | None = None
        self._has_committed = False
        self._num_appended = 0
        self._times = {"put_ms": 0.0, "commit_ms": 0.0}
        self._last_metrics: StateStoreMetrics | None = None

    @property
    def id(self) -> StateStoreId:
        return self._reader.id

    @property
    def version(self) -> int:
        return self._reader.version

    @property
    def column_families(self) -> frozenset[str]:
        """The column families of the version that was opened, by the names under which they are stored."""
        return self._families_below

    @property
    def has_committed(self) -> bool:
        return self._has_committed

    @property
    def metrics(self) -> StateStoreMetrics:
        """The figures now; after a commit or abort, those of that moment. ``put_ms`` is the sum over bulk writes."""
        if self._last_metrics is not None:
            return self._last_metrics
        figures = self._reader.metrics()
        return replace(figures, custom={**figures.custom, **self._times})

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._times[name] += (time.perf_counter() - started) * 1e3

    def get(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> bytes | None:
        self._check_key(key)
        self._check_no_list(column_family)
        buffer = self._buffer_to_read(column_family)
        if buffer is not None:
            is_changed, value = buffer.get(key)
            if is_changed:
                return value
        value_below: bytes | None = self._get_below(pa.array([key], pa.binary()), column_family)[0].as_py()
        return value_below

    def put(self, key: bytes, value: bytes, column_family: str = DEFAULT_FAMILY) -> None:
        self._check_key(key)
        if not isinstance(value, bytes):
            raise InvalidStateStoreArgument(
                f"The value of {key!r} is {value!r}: a value is bytes. To take a key away, use remove(key)."
            )
        if self._is_list(column_family):
            self.remove(key, column_family)
            self.merge(key, value, column_family)
        else:
            self._buffer_to_write(column_family).put(key, value)

    def remove(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> None:
        self._check_key(key)
        buffer = self._buffer_to_write(column_family)
        if not self._is_list(column_family):
            buffer.put(key, None)
            return
        for batch in self._scan_list(key, column_family):
            buffer.put_many(batch.column(0), pa.nulls(len(batch), pa.binary()))

    def get_many(self, keys: pa.Array | pa.ChunkedArray, column_family: str = DEFAULT_FAMILY) -> pa.BinaryArray:
        keys = self._checked("keys", keys)
        self._check_no_list(column_family)
        buffer = self._buffer_to_read(column_family)
        values = self._get_below(keys, column_family)
        return values if buffer is None else buffer.get_many(keys, values)

    def put_many(
        self, keys: pa.Array | pa.ChunkedArray, values: pa.Array | pa.ChunkedArray, column_family: str = DEFAULT_FAMILY
    ) -> None:
        keys, values = self._checked_pairs(keys, values)
        if self._is_list(column_family):
            latest = SortedPairs.last_wins(keys, values)
            self.remove_many(latest.keys, column_family)
            self.merge_many(latest.keys, latest.values, column_family)
            return
        with self._timed("put_ms"):
            self._buffer_to_write(column_family).put_many(keys, values)

    def remove_many(self, keys: pa.Array | pa.ChunkedArray, column_family: str = DEFAULT_FAMILY) -> None:
        keys = self._checked("keys", keys)
        if self._is_list(column_family):
            for key in keys.to_pylist():
                self.remove(key, column_family)
            return
        with self._timed("put_ms"):
            self._buffer_to_write(column_family).put_many(keys, pa.nulls(len(keys), pa.binary()))

    def merge(self, key: bytes, value: bytes, column_family: str = DEFAULT_FAMILY) -> None:
        self._check_key(key)
        if not isinstance(value, bytes):
            raise InvalidStateStoreArgument(
                f"{value!r} cannot be appended to the list of {key!r}: an element is bytes."
            )
        self.merge_many(pa.array([key], pa.binary()), pa.array([value], pa.binary()), column_family)

    def merge_many(
        self, keys: pa.Array | pa.ChunkedArray, values: pa.Array | pa.ChunkedArray, column_family: str = DEFAULT_FAMILY
    ) -> None:
        keys, values = self._checked_pairs(keys, values)
        buffer = self._buffer_to_write(column_family)
        self._check_list(column_family)
        with self._timed("put_ms"):
            buffer.put_many(lists.element_keys(keys, self.version + 1, self._num_appended), values)
        self._num_appended += len(keys)

    def values_iterator(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> Iterator[bytes]:
        self._check_key(key)
        self._buffer_to_read(column_family)
        self._check_list(column_family)
        return (value for _, value in _pairs(self._scan_list(key, column_family)))

    def scan(
        self, start: bytes | None = None, end: bytes | None = None, column_family: str = DEFAULT_FAMILY
    ) -> Iterator[pa.RecordBatch]:
        """Return batches of the pairs from ``start`` (included) to ``end`` (not included), as they are at the call."""
        for limit in (start, end):
            if limit is not None:
                self._check_key(limit)
        self._buffer_to_read(column_family)
        if not self._is_list(column_family):
            return self._scan_stored(start, end, column_family)
        first, last = (None if limit is None else lists.escape(limit) for limit in (start, end))
        return map(_list_batch, self._scan_stored(first, last, lists.list_family_name(column_family)))

    def _scan_list(self, key: bytes, column_family: str) -> Iterator[pa.RecordBatch]:
        prefix = lists.elements_prefix(key)
        return self._scan_stored(prefix, first_key_after(prefix), lists.list_family_name(column_family))

    def _scan_stored(self, start: bytes | None, end: bytes | None, stored: str) -> Iterator[pa.RecordBatch]:
        buffer = self._buffers.get(stored)
        if start is not None and end is not None and start >= end:
            return iter(())
        changes = SortedPairs.empty() if buffer is None else buffer.between(start, end)
        below: Iterator[pa.RecordBatch] = iter(())
        if stored in self._families_below:
            below = self._reader.scan(start, end, stored)
        return self._while_open(merged_scan(below, changes))

    def get_range(
        self, start: bytes | None = None, end: bytes | None = None, column_family: str = DEFAULT_FAMILY
    ) -> Iterator[tuple[bytes, bytes]]:
        return _pairs(self.scan(start, end, column_family))

    def prefix_scan(self, prefix: bytes, column_family: str = DEFAULT_FAMILY) -> Iterator[tuple[bytes, bytes]]:
        self._check_key(prefix)
        return self.get_range(prefix, first_key_after(prefix), column_family)

    def iterator(self, column_family: str = DEFAULT_FAMILY) -> Iterator[tuple[bytes, bytes]]:
        return self.get_range(None, None, column_family)

    def create_column_family(self, name: str, use_multiple_values_per_key: bool = False) -> None:
        check_name("a column family", name)
        if name.startswith("__"):
            raise InvalidStateStoreArgument(f"{name!r} cannot name a column family: names with '__' are the backend's.")
        self._check_writable()
        stored, other = name, lists.list_family_name(name)
        if use_multiple_values_per_key:
            stored, other = other, stored
        if other in self._families:
            raise InvalidStateStoreArgument(
                f"The column family {name!r} of {self.id} exists with use_multiple_values_per_key="
                f"{not use_multiple_values_per_key}, and stays as it is: choose another name."
            )
        if stored not in self._families:
            self._families.add(stored)
            self._buffers[stored] = WriteBuffer()

    def commit(self) -> int:
        self._check_writable()
        assert self._commit_changes is not None
        with self._timed("commit_ms"):
            changes = Changes({name: buffer.all() for name, buffer in self._buffers.items()})
            version, figures = self._commit_changes(changes)
        self._has_committed = True
        self._last_metrics = replace(figures, custom={**figures.custom, **self._times})
        self._end("committed")
        return version

    def abort(self) -> None:
        if self._closed is None:
            self._end("aborted")

    def _end(self, how: str) -> None:
        try:
            self._last_metrics = self.metrics  # after a commit, those of the commit
        except StoreClosedError:  # the provider was closed before the store, and has no figures any more
            self._last_metrics = StateStoreMetrics(0, 0, dict(self._times))
        self._closed = how
        self._buffers.clear()
        self._reader.close()

    def _get_below(self, keys: pa.BinaryArray, column_family: str) -> pa.BinaryArray:
        if column_family not in self._families_below:
            return pa.nulls(len(keys), pa.binary())
        return self._reader.get_many(keys, column_family)

    def _while_open(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self._check_open()
            yield batch

    def _buffer_to_read(self, column_family: str) -> WriteBuffer | None:
        self._check_open()
        return self._buffers.get(self._stored(column_family))

    def _buffer_to_write(self, column_family: str) -> WriteBuffer:
        self._check_writable()
        return self._buffers.setdefault(self._stored(column_family), WriteBuffer())

    def _is_list(self, column_family: str) -> bool:
        return isinstance(column_family, str) and lists.list_family_name(column_family) in self._families

    def _stored(self, column_family: str) -> str:
        """Return the name that a column family is stored under."""
        if not isinstance(column_family, str):
            raise InvalidStateStoreArgument(f"{column_family!r} is not a column family's name: give a string.")
        if self._is_list(column_family):
            return lists.list_family_name(column_family)
        if column_family not in self._families or lists.is_list(column_family):
            raise InvalidStateStoreArgument(
                f"Column family {column_family!r} does not exist in {self.id}; there are "
                f"{', '.join(sorted(map(lists.user_name, self._families)))}. Create it with create_column_family."
            )
        return column_family

    def _check_no_list(self, column_family: str) -> None:
        if self._is_list(column_family):
            raise InvalidStateStoreArgument(
                f"The column family {column_family!r} of {self.id} holds lists: read one with values_iterator(key), or "
                "all with iterator or scan."
            )

    def _check_list(self, column_family: str) -> None:
        if not self._is_list(column_family):
            raise InvalidStateStoreArgument(
                f"The column family {column_family!r} of {self.id} holds single values: create one with "
                "use_multiple_values_per_key=True to append to lists."
            )

    def _check_open(self) -> None:
        if self._closed is not None:
            raise StoreClosedError(
                f"The store of {self.id} at version {self.version} was {self._closed}; open it again with get_store."
            )

    def _check_writable(self) -> None:
        self._check_open()
        if self._commit_changes is None:
            raise StoreClosedError(
                f"The store of {self.id} at version {self.version} is read-only; open it with get_store to change it."
            )

    @staticmethod
    def _check_key(key: bytes) -> None:
        if not isinstance(key, bytes):
            raise InvalidStateStoreArgument(f"The key {key!r} is of type {type(key).__name__}: a key is bytes.")

    @classmethod
    def _checked_pairs(
        cls, keys: pa.Array | pa.ChunkedArray, values: pa.Array | pa.ChunkedArray
    ) -> tuple[pa.BinaryArray, pa.BinaryArray]:
        keys, values = cls._checked("keys", keys), cls._checked("values", values)
        if len(keys) != len(values):
            raise InvalidStateStoreArgument(f"{len(keys)} keys came with {len(values)} values.")
        return keys, values

    @staticmethod
    def _checked(what: str, column: pa.Array | pa.ChunkedArray) -> pa.BinaryArray:
        array = as_binary(what, column)
        if array.null_count:
            row = pc.index(array.is_null(), True).as_py()
            raise InvalidStateStoreArgument(f"{array.null_count} of the {what} are null, the first in row {row}.")
        return array


def _list_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([lists.user_keys_of_lists(batch.column(0)), batch.column(1)], schema=PAIRS_SCHEMA)


def _pairs(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[bytes, bytes]]:
    for batch in batches:
        yield from zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)


# The changes between two versions (Spark: the change feed of its state data source).


def read(storage: CheckpointStorage, base: VersionReader, lineage: Lineage) -> Iterator[pa.RecordBatch]:
    """Return a batch per version and column family, from the version after ``base`` to that of ``lineage``.

    The batches are of ``CHANGE_FEED_SCHEMA``. ``base`` is closed at the end.
    """
    try:
        families = base.column_families()
        since: dict[str, SortedPairs] = {}
        for ref in lineage.changelogs:
            if ref.version <= base.version:
                continue
            _, changes = read_changelog(storage.read(ref.file), storage.full_location(ref.file.path))
            for family, pairs in sorted(changes.families.items()):
                if not len(pairs):
                    continue
                seen = since.get(family, SortedPairs.empty())
                values = base.get_many(pairs.keys, family) if family in families else pa.nulls(len(pairs), pa.binary())
                before = seen.overlay(pairs.keys, values)
                keys = lists.user_keys_of_lists(pairs.keys) if lists.is_list(family) else pairs.keys
                since[family] = seen.under(pairs)
                yield pa.RecordBatch.from_arrays(
                    [
                        pa.repeat(pa.scalar(ref.version, pa.int64()), len(pairs)),
                        pa.repeat(pa.scalar(lists.user_name(family), pa.string()), len(pairs)),
                        keys,
                        before,
                        pairs.values,
                    ],
                    schema=CHANGE_FEED_SCHEMA,
                )
    finally:
        base.close()
