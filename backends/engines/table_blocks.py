"""The blocks of a RocksDB table file, decoded to columns.

Each key of a block names how many bytes it shares with the key before it. At a restart point a key is whole. All runs
between restart points are decoded beside each other, a step at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import Bytes, binary_array, even_array, gather_fixed, gather_ranges, record

LONG_KEY_BYTES = 256
"""Each key of a step takes the time and the memory of the longest one: runs with longer keys are decoded one by one."""
_SEQUENCE = 8
"""A stored key ends in its sequence number and its type."""
_REMOVED, _VALUE, _REMOVED_ONCE = 0, 1, 7
"""Types of pairs."""
_PAD = bytes(64)
# The first bytes of a word of eight, by their number.
_FIRST_BYTES = np.array([(1 << 8 * n) - 1 for n in range(9)], "<u8")

_U4, _WORD = np.dtype("<u4"), np.dtype("<u8")

Block: TypeAlias = "bytes | memoryview | pa.Buffer"
_Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class DamagedTableError(Exception):
    """A file is not what was written."""


def varint_at(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins at ``at``, and where it ends."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


def restarts_at(block: bytes) -> int:
    """Return where the pairs of a block end."""
    (num,) = struct.unpack_from("<I", block, len(block) - 4)
    return len(block) - 4 - 4 * int(num)


def stored_pairs(data: bytes, at: int, stop: int) -> Iterator[tuple[bytes, bytes]]:
    """Return the pairs of runs that lie between two positions, one after the other."""
    key = b""
    while at < stop:
        shared, at = varint_at(data, at)
        more, at = varint_at(data, at)
        size, at = varint_at(data, at)
        key, at = key[:shared] + data[at : at + more], at + more
        yield key, data[at : at + size]
        at += size


def decoded_blocks(blocks: Sequence[Block]) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    """Return the keys of blocks, and their values; null for a key that is removed."""
    joined = b"".join([_PAD, *blocks, _PAD])
    data = np.frombuffer(joined, np.uint8)
    ends = np.cumsum([len(_PAD), *(len(block) for block in blocks)])
    starts, stops = _runs(data, ends[:-1], ends[1:])
    entries = _Entries(data, starts, stops)
    is_long = entries.longest() > LONG_KEY_BYTES
    if not is_long.any():
        return _columns(entries)
    keys, values = _columns(_Entries(data, starts[~is_long], stops[~is_long]))
    runs = zip(starts[is_long].tolist(), stops[is_long].tolist(), strict=True)
    long_keys, long_values = _columns_of([pair for start, stop in runs for pair in stored_pairs(joined, start, stop)])
    run = np.repeat(np.arange(len(starts)), entries.counts)
    order = pa.array(np.argsort(np.concatenate([run[~is_long[run]], run[is_long[run]]]), kind="stable"))
    return pa.concat_arrays([keys, long_keys]).take(order), pa.concat_arrays([values, long_values]).take(order)


def _columns(entries: _Entries) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    keys, kinds = entries.keys()
    return keys, entries.values(_is_there(kinds))


def _columns_of(pairs: Sequence[tuple[bytes, bytes]]) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    """Return stored pairs as columns."""
    is_there = _is_there(np.array([key[-_SEQUENCE] for key, _ in pairs], np.uint8))
    values = [value if there else None for (_, value), there in zip(pairs, is_there.tolist(), strict=True)]
    return pa.array([key[:-_SEQUENCE] for key, _ in pairs], pa.binary()), pa.array(values, pa.binary())


def _is_there(kinds: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return which pairs have a value, by the types of pairs."""
    is_there: npt.NDArray[np.bool_] = kinds == _VALUE
    if not is_there.all() and not np.isin(kinds, (_VALUE, _REMOVED, _REMOVED_ONCE)).all():
        raise DamagedTableError(f"Pairs have the types {np.unique(kinds)}, which nothing here writes.")
    return is_there


def _runs(data: Bytes, begins: _Positions, ends: _Positions) -> tuple[_Positions, _Positions]:
    """Return where the runs between the restart points of blocks begin and end."""
    counts = gather_fixed(data, ends - 4, _U4).astype(np.int64)
    if (counts >= 1 << 31).any():
        raise DamagedTableError("A block has an index of hashes, which no setting asks for.")
    block = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    restarts = ends - 4 - 4 * counts
    at = restarts[block] + 4 * (np.arange(len(block)) - first[block])
    starts = gather_fixed(data, at, _U4).astype(np.int64) + begins[block]
    stops = np.empty_like(starts)
    stops[:-1] = starts[1:]
    stops[first + counts - 1] = restarts
    return starts, stops


class _Step(NamedTuple):
    """The n-th pairs of runs. ``goes_on`` says which runs of the step before have one; None if all have."""

    runs: _Positions
    goes_on: npt.NDArray[np.bool_] | None
    shared: _Positions
    key_at: _Positions
    value_at: _Positions
    ends: _Positions


class _Entries:
    """The pairs of many runs. All first pairs are found together, then all second ones, and so on."""

    def __init__(self, data: Bytes, starts: _Positions, stops: _Positions) -> None:
        self._data = data
        self._steps: list[_Step] = []
        counts = np.zeros(len(starts), np.int64)
        runs, at, goes_on = np.arange(len(starts)), starts, None
        while len(at):
            shared, more, size, key_at = _headers(data, at)
            value_at = key_at + more
            at = value_at + size
            self._steps.append(_Step(runs, goes_on, shared, key_at, value_at, at))
            counts[runs] += 1
            goes_on = at < stops[runs]
            if goes_on.all():
                goes_on = None
            else:
                at, runs = at[goes_on], runs[goes_on]
        self.counts = counts
        self._first = np.cumsum(counts) - counts
        self._num = int(counts.sum())
        self._rows = [self._first[step.runs] + i for i, step in enumerate(self._steps)]
        self._lengths = self._placed([step.shared + step.value_at - step.key_at for step in self._steps])
        self._num_words = -(-int(self._lengths.max(initial=_SEQUENCE)) // 8)

    def longest(self) -> _Positions:
        """Return the length of the longest key of each run."""
        longest: _Positions = np.maximum.reduceat(self._lengths, self._first)
        return longest

    def keys(self) -> tuple[pa.BinaryArray, npt.NDArray[np.uint8]]:
        """Return the keys without their sequence numbers, and their types."""
        words = np.empty((self._num, self._num_words), _WORD)
        before: list[Words] = []
        for step, rows in zip(self._steps, self._rows, strict=True):
            if step.goes_on is not None:
                before = [word[step.goes_on] for word in before]
            before = self._words(step, before)
            for i, word in enumerate(before):
                words[rows, i] = word
        stored = words.view(np.uint8)
        length = int(self._lengths[0]) if self._num else _SEQUENCE
        if (self._lengths == length).all():
            kinds = stored[:, length - _SEQUENCE]
            if length > _SEQUENCE:
                content = np.ascontiguousarray(stored[:, : length - _SEQUENCE])
                return even_array(content.view(record(length - _SEQUENCE)).reshape(-1)), kinds
        flat = stored.reshape(-1)
        begins = 8 * self._num_words * np.arange(self._num)
        ends = begins + self._lengths - _SEQUENCE
        return binary_array(*gather_ranges(flat, begins, ends)), flat[ends]

    def _words(self, step: _Step, before: list[Words]) -> list[Words]:
        """Return the keys of a step in words of eight bytes: of the key before as many bytes as the key shares."""
        # Where the whole key would begin, if its own bytes stood after those that it shares.
        begins = step.key_at - step.shared
        last = len(self._data) - _WORD.itemsize
        words = []
        for i in range(self._num_words):
            at = begins + _WORD.itemsize * i
            if 8 * i > len(_PAD) - 8:
                at = np.minimum(at, last)  # after the key, and after all
            own: Words = gather_fixed(self._data, at, _WORD)
            if before:
                shared = _FIRST_BYTES[np.clip(step.shared - _WORD.itemsize * i, 0, _WORD.itemsize)]
                own ^= (own ^ before[i]) & shared
            words.append(own)
        return words

    def values(self, is_there: npt.NDArray[np.bool_]) -> pa.BinaryArray:
        """Return the values; null where none is there."""
        begins = self._placed([step.value_at for step in self._steps])
        ends = self._placed([step.ends for step in self._steps])
        sizes = ends - begins
        if self._num and sizes[0] and is_there.all() and (sizes == sizes[0]).all():
            return even_array(gather_fixed(self._data, begins, record(int(sizes[0]))))
        content, offsets = gather_ranges(self._data, begins, ends)
        return binary_array(content, offsets, None if is_there.all() else ~is_there)

    def _placed(self, steps: Sequence[_Positions]) -> _Positions:
        """Return figures of all pairs in the order of the pairs."""
        placed = np.empty(self._num, np.int64)
        for rows, step in zip(self._rows, steps, strict=True):
            placed[rows] = step
        return placed


def _headers(data: Bytes, at: _Positions) -> tuple[_Positions, _Positions, _Positions, _Positions]:
    """Return how many bytes pairs share with the key before, how many more their keys and their values have.

    The last are the positions after these three numbers.
    """
    together = gather_fixed(data, at, _U4)
    if not (together & 0x808080).any():
        shared, more, size = (((together >> shift) & 0xFF).astype(np.int64) for shift in (0, 8, 16))
        return shared, more, size, at + 3
    shared, at = _varints(data, at)
    more, at = _varints(data, at)
    size, at = _varints(data, at)
    return shared, more, size, at


def _varints(data: Bytes, at: _Positions) -> tuple[_Positions, _Positions]:
    """Return the numbers that begin at positions, and where they end."""
    numbers = np.zeros(len(at), np.int64)
    at = at.copy()
    going = np.arange(len(at))
    for shift in range(0, 35, 7):
        byte = data[at[going]].astype(np.int64)
        numbers[going] |= (byte & 0x7F) << shift
        at[going] += 1
        going = going[byte >= 0x80]
        if not len(going):
            return numbers, at
    raise DamagedTableError("A number of a block has more than 32 bits.")
