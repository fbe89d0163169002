"""Sorted changes of one column family: the form that changelogs, pending changes and uncommitted changes share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import binary_content, even_rows, gather_fixed, one_array, placed, take_binary
from backends.exceptions import InvalidStateStoreArgument


class HasBytes(Protocol):
    """An object with a size."""

    @property
    def nbytes(self) -> int:
        """The number of bytes."""


HasBytesT = TypeVar("HasBytesT", bound=HasBytes)


def grouped_by_bytes(parts: Iterable[HasBytesT], least: int) -> Iterator[list[HasBytesT]]:
    """Yield consecutive parts in groups of at least ``least`` bytes; the last group may be smaller."""
    group: list[HasBytesT] = []
    nbytes = 0
    for part in parts:
        group.append(part)
        nbytes += part.nbytes
        if nbytes >= least:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


# Sorts many keys by their bytes, several times as fast as by comparing the keys one by one.
#
# The first bytes where any keys differ are compared as one integer. Keys of a table have most bytes in common: an id of
# eight bytes differs in three or four, after two of the key group.


KEYS_BY_COMPARISON = 20_000
"""At most this many keys are sorted faster by comparing them."""
COMPARED_BYTES = 32
"""``key_order`` looks at this many bytes of each key, and compares whole keys where these bytes are equal."""
_WORD = 8


def key_order(keys: pa.BinaryArray) -> pa.Array:
    """Return the positions of ``keys`` in ascending order of their bytes; equal keys stay in their order. No nulls."""
    if len(keys) <= KEYS_BY_COMPARISON:
        return pc.sort_indices(keys)  # stable
    content, offsets = binary_content(keys)
    lengths = np.diff(offsets)
    longest = int(lengths.max())
    width = max(_WORD, min(longest, COMPARED_BYTES))
    padded = np.concatenate([content, np.zeros(width, np.uint8)])
    heads = gather_fixed(padded, offsets[:-1], np.dtype(f"V{width}")).view(np.uint8).reshape(-1, width)
    is_even = int(lengths.min()) == longest
    if not is_even:
        heads[np.arange(width) >= lengths[:, None]] = 0
    differing = np.flatnonzero(heads.min(axis=0) != heads.max(axis=0))
    word = np.zeros((len(keys), _WORD), np.uint8)
    word[:, : min(_WORD, len(differing))] = heads[:, differing[:_WORD]]
    words = word.view(">u8").reshape(-1).astype(np.uint64)
    order = np.argsort(words, kind="stable")
    if is_even and len(differing) <= _WORD and longest <= width:
        return pa.array(order)
    return _with_ties_resolved(keys, words, order)


def _with_ties_resolved(keys: pa.BinaryArray, words: npt.NDArray[np.uint64], order: npt.NDArray[np.int64]) -> pa.Array:
    """Return the order of keys. ``order`` sorts them by ``words``; keys with equal words may still differ."""
    ordered = words[order]
    is_same = ordered[1:] == ordered[:-1]
    if not is_same.any():
        return pa.array(order)
    is_tied = np.append(is_same, False) | np.append(False, is_same)
    places = np.flatnonzero(is_tied)
    if 2 * len(places) > len(order):
        return pc.sort_indices(keys)
    tied = order[places]
    runs = np.cumsum(np.append(True, ordered[places][1:] != ordered[places][:-1]))
    table = pa.table({"run": runs, "key": keys.take(pa.array(tied))})
    within = np.asarray(pc.sort_indices(table, sort_keys=[("run", "ascending"), ("key", "ascending")]))
    order[places] = tied[within]
    return pa.array(order)


MAX_COPIED_KEYS = 1 << 16
"""Of so many keys a copy is made for the search of single keys."""
_HAS_SEARCH = hasattr(pc, "search_sorted")  # pyarrow 26, which needs Python 3.11


class SortedPairs:
    """Keys, sorted by bytes and unique, with their new values. A null value means that the key is removed.

    Immutable. ``keys`` and ``values`` are ``pa.BinaryArray`` of one length.
    """

    def __init__(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        self.keys = keys
        self.values = values

    @classmethod
    def of(cls, keys: pa.Array | pa.ChunkedArray, values: pa.Array | pa.ChunkedArray) -> SortedPairs:
        """Make changes from arrays, and sort them if necessary.

        Raises ``InvalidStateStoreArgument`` for other types, other lengths, null keys or a key that is given twice.
        """
        keys, values = as_keys(keys), as_binary("values", values)
        if len(keys) != len(values):
            raise InvalidStateStoreArgument(f"{len(keys)} keys came with {len(values)} values.")
        if not is_strictly_sorted(keys):
            order = key_order(keys)
            keys, values = keys.take(order), values.take(order)
            if not is_strictly_sorted(keys):
                raise InvalidStateStoreArgument("A key was given twice in one set of changes; give each key once.")
        return cls(keys, values)

    @classmethod
    def last_wins(cls, keys: pa.BinaryArray, values: pa.BinaryArray) -> SortedPairs:
        """Sort pairs that are given in write order. Of equal keys, the last one wins."""
        if is_strictly_sorted(keys):
            return cls(keys, values)
        order = key_order(keys)
        keys, values = keys.take(order), values.take(order)
        if len(keys) > 1:
            is_last = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
            if pc.all(is_last).as_py() is False:
                keep = pa.concat_arrays([is_last, pa.array([True])])
                keys, values = keys.filter(keep), values.filter(keep)
        return cls(keys, values)

    @classmethod
    def from_dict(cls, pairs: Mapping[bytes, bytes | None]) -> SortedPairs:
        keys = sorted(pairs)
        return cls(pa.array(keys, pa.binary()), pa.array([pairs[k] for k in keys], pa.binary()))

    @classmethod
    def empty(cls) -> SortedPairs:
        """Make an object without changes."""
        return cls(pa.array([], pa.binary()), pa.array([], pa.binary()))

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def nbytes(self) -> int:
        """The memory of both arrays, in bytes."""
        return int(self.keys.nbytes + self.values.nbytes)

    def find(self, keys: pa.BinaryArray) -> npt.NDArray[np.int64]:
        """Return the position of each key here; -1 for a key that is absent."""
        if not len(self):
            return np.full(len(keys), -1, np.int64)
        at, is_here = self._search(keys)
        return np.where(is_here, at, -1)

    def _search(self, keys: pa.BinaryArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return where each key is or would be inserted, and whether the key is there. Not for an empty ``self``."""
        here, asked = even_rows(self.keys), even_rows(keys)
        if here is not None and asked is not None and here.dtype == asked.dtype:
            # Strings of one width, which numpy compares byte by byte in a third of Arrow's time.
            text = f"S{here.dtype.itemsize}"
            strings, needles = here.view(text), asked.view(text)
            at = np.searchsorted(strings, needles)
            return at, strings[np.minimum(at, len(self) - 1)] == needles
        if _HAS_SEARCH:
            at = np.asarray(pc.search_sorted(self.keys, keys)).astype(np.int64)
        else:
            # The sort is stable, and the needles come first: a needle is sorted before the key that equals it. So the
            # number of keys before a needle is the number of smaller keys.
            order = np.asarray(pc.sort_indices(pa.concat_arrays([keys, self.keys])))
            is_needle = order < len(keys)
            at = np.empty(len(keys), np.int64)
            at[order[is_needle]] = np.cumsum(~is_needle)[is_needle]
        nearest = self.keys.take(pa.array(np.minimum(at, len(self) - 1)))
        is_here = np.asarray(pc.equal(nearest, keys)) & (at < len(self))
        return at, is_here

    def overlay(self, keys: pa.BinaryArray, below: pa.BinaryArray) -> pa.BinaryArray:
        """Return the values of ``keys`` with these changes; ``below`` are their values without them."""
        at = self.find(keys)
        is_here = at >= 0
        if not is_here.any():
            return below
        changed = self.values.take(pa.array(at[is_here]))  # not all values: there may be many more changes than keys
        if len(changed) == len(keys):
            return changed
        rows = np.arange(len(keys)) + len(changed)
        rows[is_here] = np.arange(len(changed))
        return pa.concat_arrays([changed, below]).take(pa.array(rows))

    @cached_property
    def _even_keys(self) -> tuple[bytes, int] | None:
        """All keys as one object, and their width; None if their widths differ, or if the copy would be large."""
        rows = even_rows(self.keys) if len(self) <= MAX_COPIED_KEYS else None
        return None if rows is None else (rows.tobytes(), rows.dtype.itemsize)

    def get(self, key: bytes) -> tuple[bool, bytes | None]:
        """Return whether a key is among these changes, and its new value (None: removed)."""
        even = self._even_keys
        if even is None:
            at = self.lower_bound(key)
        else:  # three times as fast
            content, width = even
            at, high = 0, len(self)
            while at < high:
                middle = (at + high) // 2
                if content[middle * width : (middle + 1) * width] < key:
                    at = middle + 1
                else:
                    high = middle
        if at == len(self) or self.keys[at].as_py() != key:
            return False, None
        return True, self.values[at].as_py()

    def between(self, start: bytes | None, end: bytes | None) -> SortedPairs:
        """Return the changes of keys from ``start`` (included) to ``end`` (not included)."""
        first = 0 if start is None else self.lower_bound(start)
        last = len(self) if end is None else self.lower_bound(end)
        return self.slice(first, max(0, last - first))

    def within(self, ranges: Sequence[tuple[bytes, bytes | None]]) -> SortedPairs:
        """Return the changes of keys in ascending, non-overlapping ranges; only the last range may have no end."""
        if not len(self) or not ranges:
            return SortedPairs.empty()
        ends = [end for _, end in ranges if end is not None]
        bounds = [*(start for start, _ in ranges), *ends]
        if _HAS_SEARCH:
            at, _ = self._search(pa.array(bounds, pa.binary()))
        else:
            at = np.array([self.lower_bound(bound) for bound in bounds])
        steps = np.zeros(len(self) + 1, np.int64)
        np.add.at(steps, at[: len(ranges)], 1)
        np.add.at(steps, at[len(ranges) :], -1)
        chosen = pa.array(np.cumsum(steps[:-1]) > 0)
        return SortedPairs(self.keys.filter(chosen), self.values.filter(chosen))

    def lower_bound(self, key: bytes) -> int:
        """Return the number of keys below ``key``."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.keys[middle].as_py() < key:
                low = middle + 1
            else:
                high = middle
        return low

    def under(self, newer: SortedPairs) -> SortedPairs:
        """Return these changes followed by newer ones, as one."""
        if not len(newer):
            return self
        if not len(self):
            return newer
        at, is_here = self._search(newer.keys)
        stays = np.ones(len(self), np.bool_)
        stays[at[is_here]] = False
        below = np.concatenate([[0], np.cumsum(stays)])
        if not below[-1]:
            return newer
        is_newer = np.zeros(int(below[-1]) + len(newer), np.bool_)
        is_newer[below[at] + np.arange(len(newer))] = True
        left, rows = np.flatnonzero(stays), (np.flatnonzero(~is_newer), np.flatnonzero(is_newer))
        keys = placed((take_binary(self.keys, left), newer.keys), rows)
        return SortedPairs(keys, placed((take_binary(self.values, left), newer.values), rows))

    def slice(self, offset: int, length: int | None = None) -> SortedPairs:
        """Return ``length`` changes from the position ``offset``; nothing is copied."""
        return SortedPairs(self.keys.slice(offset, length), self.values.slice(offset, length))

    def compact(self) -> SortedPairs:
        """Return a copy. A slice would keep its whole source in memory."""
        return SortedPairs(pa.concat_arrays([self.keys]), pa.concat_arrays([self.values]))

    def present(self) -> SortedPairs:
        """Return the changes without the removed keys."""
        if not self.values.null_count:
            return self
        keep = pc.is_valid(self.values)
        return SortedPairs(self.keys.filter(keep), self.values.filter(keep))

    def batch(self) -> pa.RecordBatch:
        """Return the pairs in the columns of ``PAIRS_SCHEMA``."""
        return pa.RecordBatch.from_arrays([self.keys, self.values], schema=PAIRS_SCHEMA)


def is_strictly_sorted(keys: pa.BinaryArray) -> bool:
    """Return whether every key is greater, byte by byte, than the one before it."""
    if len(keys) < 2:
        return True
    return bool(pc.all(pc.greater(keys.slice(1), keys.slice(0, len(keys) - 1))).as_py())


def as_binary(what: str, array: pa.Array | pa.ChunkedArray) -> pa.BinaryArray:
    """Return one contiguous ``pa.BinaryArray``. Raises ``InvalidStateStoreArgument`` for another type."""
    array = one_array(array)
    if not isinstance(array, pa.Array):
        raise InvalidStateStoreArgument(f"{what} must be an Arrow array of binary, not {type(array).__name__}.")
    if pa.types.is_binary(array.type):
        return array
    if pa.types.is_large_binary(array.type) or pa.types.is_fixed_size_binary(array.type):
        return array.cast(pa.binary())
    raise InvalidStateStoreArgument(f"{what} must be an Arrow array of binary, not of {array.type}.")


def as_keys(array: pa.Array | pa.ChunkedArray) -> pa.BinaryArray:
    """Return ``as_binary`` of keys. Raises ``InvalidStateStoreArgument`` for nulls, too."""
    keys = as_binary("keys", array)
    if keys.null_count:
        raise InvalidStateStoreArgument(f"{keys.null_count} of {len(keys)} keys are null; a key cannot be null.")
    return keys


def to_bytes_list(array: pa.BinaryArray) -> list[bytes | None]:
    """Return the elements as Python ``bytes``, several times faster than ``to_pylist``."""
    n = len(array)
    if n == 0:
        return []
    offsets = np.frombuffer(array.buffers()[1], np.int32)[array.offset : array.offset + n + 1]
    content = array.buffers()[2]
    first, last = int(offsets[0]), int(offsets[-1])
    data = b"" if content is None else memoryview(content)[first:last].tobytes()
    width = int(offsets[1] - first)
    if width and not array.null_count and (np.diff(offsets) == width).all():
        return np.frombuffer(data, f"V{width}").tolist()  # type: ignore[no-any-return]
    bounds = (offsets - first).tolist()
    values: list[bytes | None] = [data[a:b] for a, b in pairwise(bounds)]
    if array.null_count:
        for i in np.flatnonzero(np.asarray(array.is_null())).tolist():
            values[i] = None
    return values


PAIRS_SCHEMA = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
"""The columns of scans and changelogs."""


# Sorted pairs of several places, merged a batch at a time.


def in_step(streams: Sequence[Iterator[SortedPairs]]) -> Iterator[list[SortedPairs]]:
    """Read several sorted streams in parallel. Each step has a part of every stream, which may be empty.

    All keys of a step are greater than all keys of the steps before it.
    """
    heads: list[SortedPairs | None] = [next(stream, None) for stream in streams]
    while True:
        for i, stream in enumerate(streams):
            while (pairs := heads[i]) is not None and not len(pairs):
                heads[i] = next(stream, None)
        lasts = [pairs.keys[len(pairs) - 1].as_py() for pairs in heads if pairs is not None]
        if not lasts:
            return
        end = min(lasts) + b"\x00"
        step = []
        for i, pairs in enumerate(heads):
            if pairs is None:
                step.append(SortedPairs.empty())
                continue
            cut = pairs.lower_bound(end)
            step.append(pairs.slice(0, cut))
            heads[i] = pairs.slice(cut)
        yield step


def merged_scan(base: Iterator[pa.RecordBatch], changes: SortedPairs) -> Iterator[pa.RecordBatch]:
    """Return the pairs of ``base`` with ``changes`` applied, in key order.

    ``changes`` must already be cut to the range of the scan. Each changed pair is merged into the batch of ``base``
    whose keys surround it, so that memory does not grow with the range.
    """
    done = 0
    for batch in base:
        through = changes.lower_bound(batch.column(0)[-1].as_py() + b"\x00") if len(changes) else 0
        if through == done:
            yield batch
            continue
        merged = SortedPairs(batch.column(0), batch.column(1)).under(changes.slice(done, through - done)).present()
        done = through
        if len(merged):
            yield merged.batch()
    rest = changes.slice(done).present()
    if len(rest):
        yield rest.batch()
