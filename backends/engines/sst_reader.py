"""Reads RocksDB's own files by columns: many pairs at once, where an iterator returns one after the other.

The format is that of RocksDB's block-based tables, format version 6: blocks of pairs, found by an index. A file with
any other content (a later format, merge operands, range deletions) is rejected when it is opened, and RocksDB reads it.
So is a file of long keys, which RocksDB reads faster.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from backends.encoding.columns import Bytes, binary_array, even_array, gather_fixed, gather_ranges, record
from backends.encoding.keys import KEY_GROUP_BYTES
from backends.encoding.sorted_pairs import SortedPairs, in_step, is_strictly_sorted
from backends.exceptions import StateStoreError, StoreClosedError

# The blocks of a RocksDB table file, decoded to columns.
#
# Each key of a block names how many bytes it shares with the key before it. At a restart point a key is whole. All runs
# between restart points are decoded in parallel, a step at a time.


LONG_KEY_BYTES = 256
"""Each key of a step takes the time and the memory of the longest one: runs with longer keys are decoded one by one."""
_SEQUENCE = 8
"""A stored key ends in its sequence number and its type."""
_REMOVED, _VALUE, _REMOVED_ONCE = 0, 1, 7
"""Types of pairs."""
_PAD = bytes(64)
_FIRST_BYTES = np.array([(1 << 8 * n) - 1 for n in range(9)], "<u8")
"""The mask of the first n bytes of a word of eight bytes, for each n from 0 to 8."""

_U4, _WORD = np.dtype("<u4"), np.dtype("<u8")

Block: TypeAlias = "bytes | memoryview | pa.Buffer"
_Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
OnFailure: TypeAlias = "Callable[[str, Exception], StateStoreError]"


class DamagedTableError(Exception):
    """A file differs from what was written."""


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
    """Return the end of a block's pairs: the position where its list of restart points begins."""
    (num,) = struct.unpack_from("<I", block, len(block) - 4)
    return len(block) - 4 - 4 * int(num)


def stored_pairs(data: bytes, at: int, stop: int) -> Iterator[tuple[bytes, bytes]]:
    """Return the pairs of the runs between two positions, one after the other."""
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
    is_there = _is_there(np.array([key[-_SEQUENCE] for key, _ in pairs], np.uint8))
    values = [value if has_value else None for (_, value), has_value in zip(pairs, is_there.tolist(), strict=True)]
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
    """The n-th pair of each run that has so many.

    ``is_in_step`` is a mask of the runs of the step before: those that have an n-th pair. None if all have one.
    """

    runs: _Positions
    is_in_step: npt.NDArray[np.bool_] | None
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
        runs, at, is_in_step = np.arange(len(starts)), starts, None
        while len(at):
            shared, more, size, key_at = _headers(data, at)
            value_at = key_at + more
            at = value_at + size
            self._steps.append(_Step(runs, is_in_step, shared, key_at, value_at, at))
            counts[runs] += 1
            is_in_step = at < stops[runs]
            if is_in_step.all():
                is_in_step = None
            else:
                at, runs = at[is_in_step], runs[is_in_step]
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
            if step.is_in_step is not None:
                before = [word[step.is_in_step] for word in before]
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
        """Return the keys of a step as words of eight bytes. ``before`` are the words of the keys before them.

        A key begins with the bytes that it shares with the key before it. Its own bytes follow.
        """
        # The position where the key would begin if the file had the shared bytes in front of the key's own bytes.
        begins = step.key_at - step.shared
        last = len(self._data) - _WORD.itemsize
        words = []
        for i in range(self._num_words):
            at = begins + _WORD.itemsize * i
            if 8 * i > len(_PAD) - 8:
                at = np.minimum(at, last)  # a position that this changes is after the key's end
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
        """Return one number per pair, in the order of the pairs, from the numbers of each step."""
        placed = np.empty(self._num, np.int64)
        for rows, step in zip(self._rows, steps, strict=True):
            placed[rows] = step
        return placed


def _headers(data: Bytes, at: _Positions) -> tuple[_Positions, _Positions, _Positions, _Positions]:
    """Return the three numbers in front of each pair, and the position after them.

    The numbers are the bytes that the key shares with the key before it, the key's own bytes, and the value's bytes.
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


FIRST_BLOCKS, STEP_BLOCKS = 4, 256
"""At most this many blocks are decoded together: few at first for readers of only some pairs, and then more."""
STEP_BYTES = 1 << 20
"""Blocks that have this many bytes together are not decoded with further ones."""
MEAN_KEY_BYTES = 64
"""Files whose stored keys are longer on average are read faster by RocksDB."""
_FOOTER = 53
_MAGIC = 0x88E241B785F4CFF7
_FORMAT_VERSION = 6
_XXH3 = 4
_LAST_BYTE = 0x6B9083D9
_LOW = 0xFFFFFFFF
_TRAILER = 5
"""The type of compression, and the checksum."""
_PLAIN, _CODECS = 0, {4: pa.Codec("lz4_raw"), 7: pa.Codec("zstd")}
_EXPECTED: Mapping[bytes, tuple[bytes, ...]] = {
    b"rocksdb.comparator": (b"leveldb.BytewiseComparator",),
    b"rocksdb.block.based.table.index.type": (bytes(4),),
    b"rocksdb.index.key.is.user.key": (b"\x01",),
    b"rocksdb.index.value.is.delta.encoded": (b"\x01",),
    b"rocksdb.merge.operands": (b"\x00",),
    b"rocksdb.num.range-deletions": (b"\x00",),
    b"rocksdb.compression": (b"NoCompression", b"LZ4", b"ZSTD"),
}
_NUM_ENTRIES, _KEY_BYTES = b"rocksdb.num.entries", b"rocksdb.raw.key.size"
_EXPECTED_BLOCKS = frozenset({b"rocksdb.index", b"rocksdb.properties"})
_FILTER = b"fullfilter."


class UnknownTableError(Exception):
    """A file has content that only RocksDB reads."""


class TableFile:
    """One file of ``size`` bytes, which stays readable if RocksDB removes it after the open.

    Raises ``UnknownTableError`` if RocksDB must read it, ``FileNotFoundError`` if RocksDB has removed it.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._closed = weakref.finalize(self, os.close, self._descriptor)
        try:
            self._open(size)
        except BaseException:
            self.close()
            raise

    def _open(self, size: int) -> None:
        if (file_size := os.fstat(self._descriptor).st_size) != size:
            raise UnknownTableError(f"{self._path} has {file_size} bytes, where RocksDB lists {size}.")
        footer = self._read(size - _FOOTER, _FOOTER) if size > _FOOTER else bytes(_FOOTER)
        kind, _, _, self._context, meta_size = struct.unpack_from("<B4sIII", footer)
        version, magic = struct.unpack_from("<IQ", footer, _FOOTER - 12)
        if (kind, version, magic) != (_XXH3, _FORMAT_VERSION, _MAGIC):
            raise UnknownTableError(f"{self._path} is not a table of format {_FORMAT_VERSION} with checksums by XXH3.")
        meta = self._block(size - _FOOTER - meta_size - _TRAILER, meta_size)
        handles = {name: _handle(value) for name, value in stored_pairs(meta, 0, restarts_at(meta))}
        if unknown := [n for n in handles.keys() ^ _EXPECTED_BLOCKS if not n.startswith(_FILTER)]:
            raise UnknownTableError(f"{self._path} has, or lacks, {unknown}.")
        named = self._block(*handles[b"rocksdb.properties"])
        properties = dict(stored_pairs(named, 0, restarts_at(named)))
        unknown = [n for n, values in _EXPECTED.items() if properties.get(n) not in values]
        if unknown := unknown + [n for n in (_NUM_ENTRIES, _KEY_BYTES) if n not in properties]:
            raise UnknownTableError(f"{self._path} has {[(n, properties.get(n)) for n in unknown]}.")
        self._index = handles[b"rocksdb.index"]
        self.num_entries, _ = varint_at(properties[_NUM_ENTRIES], 0)
        key_bytes, _ = varint_at(properties[_KEY_BYTES], 0)
        if key_bytes > MEAN_KEY_BYTES * self.num_entries:
            raise UnknownTableError(f"{self._path} has long keys: {self.num_entries} of {key_bytes} bytes.")

    def pairs(self, start: bytes | None, end: bytes | None) -> Iterator[SortedPairs]:
        """Return the pairs from ``start`` (included) to ``end`` (not included), a step at a time.

        Values of keys that are removed here are null. Raises ``DamagedTableError``.
        """
        last: bytes | None = None
        num_entries = 0
        for blocks in self._steps(start, end):
            keys, values = decoded_blocks(blocks)
            num_entries += len(keys)
            step = _newest(keys, values, last)
            if not len(step):
                continue
            if not is_strictly_sorted(step.keys) or (last is not None and step.keys[0].as_py() < last):
                raise DamagedTableError(f"The keys of {self._path} do not ascend.")
            last = step.keys[-1].as_py()
            wanted = step if start is None and end is None else step.between(start, end)
            if len(wanted):
                yield wanted
        if start is None and end is None and num_entries != self.num_entries:
            raise DamagedTableError(f"{self._path} should have {self.num_entries} pairs, and has {num_entries}.")

    def close(self) -> None:
        self._closed()

    def _steps(self, start: bytes | None, end: bytes | None) -> Iterator[list[Block]]:
        """Return the blocks that may have keys of a range, in lists of those that are decoded together."""
        most = FIRST_BLOCKS
        handles = self._handles(start, end)
        while ranges := _next_ranges(handles, most):
            begin = ranges[0][0]
            # Blocks are adjacent in the file, so one read has all of them.
            data = self._read(begin, sum(ranges[-1]) + _TRAILER - begin)
            step: list[Block] = []
            nbytes = 0
            for offset, size in ranges:
                step.append(self._content(data, offset - begin, size, offset))
                nbytes += len(step[-1])
                if nbytes >= STEP_BYTES:
                    yield step
                    step, nbytes = [], 0
            if step:
                yield step
            most = min(2 * most, STEP_BLOCKS)

    def _handles(self, start: bytes | None, end: bytes | None) -> Iterator[tuple[int, int]]:
        """Return the offsets and the sizes of the blocks that may have keys of a range."""
        index = self._block(*self._index)
        at, stop = 0, restarts_at(index)
        while at < stop:
            shared, length, at = index[at], index[at + 1], at + 2
            if shared:
                raise DamagedTableError(f"{self._path} has shortened keys in its index.")
            if length >= 0x80:
                length, at = varint_at(index, at - 1)
            key, at = index[at : at + length], at + length
            offset, at = varint_at(index, at)
            size, at = varint_at(index, at)
            if start is not None and key < start:  # the key of the index is not below any key of the block
                continue
            yield offset, size
            if end is not None and key >= end:
                return

    def _block(self, offset: int, size: int) -> bytes:
        return bytes(self._content(self._read(offset, size + _TRAILER), 0, size, offset))

    def _content(self, data: bytes, at: int, size: int, offset: int) -> Block:
        """Return the content of the block that begins at ``at`` of ``data``, and at ``offset`` of the file."""
        content = memoryview(data)[at : at + size]
        compression = data[at + size]
        checksum = (xxhash.xxh3_64_intdigest(content) & _LOW) ^ (compression * _LAST_BYTE & _LOW)
        if self._context:
            place = (offset & _LOW) + (offset >> 32)
            checksum = (checksum + (self._context ^ (place & _LOW))) & _LOW
        if checksum != int.from_bytes(data[at + size + 1 : at + size + _TRAILER], "little"):
            raise DamagedTableError(f"{self._path} is damaged: the block of {size} bytes at {offset} has changed.")
        if compression == _PLAIN:
            return content
        if compression not in _CODECS:
            raise DamagedTableError(f"{self._path} is compressed by {compression}, which no setting asks for.")
        length, begins = varint_at(content, 0)
        decompressed: pa.Buffer = _CODECS[compression].decompress(content[begins:], length)
        return decompressed

    def _read(self, offset: int, size: int) -> bytes:
        if not self._closed.alive:
            raise DamagedTableError(f"{self._path} was closed while it was read.")
        data = os.pread(self._descriptor, size, offset)
        if len(data) != size:
            raise DamagedTableError(f"{self._path} has {len(data)} bytes at {offset}, where {size} are needed.")
        return data


def _handle(data: bytes) -> tuple[int, int]:
    offset, at = varint_at(data, 0)
    return offset, varint_at(data, at)[0]


def _next_ranges(handles: Iterator[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Return the next blocks: at most ``most``, and no more once they have ``STEP_BYTES`` together."""
    ranges: list[tuple[int, int]] = []
    for handle in handles:
        ranges.append(handle)
        if len(ranges) == most or sum(handle) - ranges[0][0] >= STEP_BYTES:
            break
    return ranges


def _newest(keys: pa.BinaryArray, values: pa.BinaryArray, last: bytes | None) -> SortedPairs:
    """Return the newest pair of each key, which is the first of equal keys. Drop older pairs of the key ``last``."""
    if not is_strictly_sorted(keys):
        is_new = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
        is_new = pa.concat_arrays([pa.array([True]), is_new])
        keys, values = keys.filter(is_new), values.filter(is_new)
    again = int(len(keys) > 0 and last is not None and keys[0].as_py() == last)
    return SortedPairs(keys.slice(again), values.slice(again))


# Scans of many pairs of a RocksDB column family, read from the files of the database.
#
# RocksDB's iterator passes its pairs to Python one by one. From the files they come by columns, in half the time. If
# some pairs are only in RocksDB's memory, RocksDB scans, or writes them to files first (``FileScans``).


log = logging.getLogger(__name__)

FEW_PAIRS = 100_000
"""Fewer pairs are scanned about as fast by RocksDB."""
_LISTINGS = 5
"""The files are listed at most this many times: RocksDB may remove one of them after a listing."""
_LEVEL = re.compile(r"--- level (\d+) --- version# \d+ ---")
_TABLE = re.compile(
    r" (\d+):(\d+)\[(\d+) \.\. (\d+)\]\['([0-9A-F]*)' seq:\d+, type:\d+ \.\. '([0-9A-F]*)' seq:\d+, type:\d+\]\(\d+\)"
)


class Table(NamedTuple):
    """A file of a column family as RocksDB describes it. ``newest`` is its highest sequence number."""

    level: int
    number: int
    size: int
    newest: int
    smallest: bytes
    largest: bytes

    def is_in(self, start: bytes | None, end: bytes | None) -> bool:
        """Whether the file may have keys of a range."""
        return (start is None or self.largest >= start) and (end is None or self.smallest < end)


def listed_tables(described: str) -> list[Table] | None:
    """Return the files that RocksDB's property "rocksdb.sstables" lists; None for an empty or unknown list."""
    tables: list[Table] = []
    level = -1
    for line in described.splitlines():
        if not line:
            continue
        if match := _LEVEL.fullmatch(line):
            level = int(match[1])
        elif level >= 0 and (match := _TABLE.fullmatch(line)):
            number, size, newest = int(match[1]), int(match[2]), int(match[4])
            tables.append(Table(level, number, size, newest, bytes.fromhex(match[5]), bytes.fromhex(match[6])))
        else:
            return None
    return tables if tables and _is_ordered(tables) else None


def _is_ordered(tables: Sequence[Table]) -> bool:
    """Whether the files of level 0 are listed newest first, and those of other levels ascend and do not overlap."""
    return all(
        one.newest > other.newest if one.level == 0 else one.largest < other.smallest
        for one, other in pairwise(tables)
        if one.level == other.level
    )


def part_of(tables: Sequence[Table], start: bytes | None, end: bytes | None) -> float:
    """Estimate the share of the files' keys that is in a range, from 0 to 1, as if all key groups were equally large.

    Return 0 if the range begins or ends within a key group.
    """
    if not tables or len(start or b"") > KEY_GROUP_BYTES or len(end or b"") > KEY_GROUP_BYTES:
        return 0.0
    first, last = (_group(min(t.smallest for t in tables)), _group(max(t.largest for t in tables)))
    begin = first if start is None else max(first, _group(start))
    stop = last + 1 if end is None else min(last + 1, _group(end))
    return max(0, stop - begin) / (last + 1 - first)


def _group(key: bytes) -> int:
    return int.from_bytes(key[:KEY_GROUP_BYTES].ljust(KEY_GROUP_BYTES, b"\0"), "big")


def open_scan(
    directory: Path,
    list_tables: Callable[[], list[Table] | None],
    start: bytes | None,
    end: bytes | None,
    failure: OnFailure,
) -> TableScan | None:
    """Open the files that have keys of a range; None if RocksDB must read them.

    All pairs of the scan must be in files; pairs that are written during the call may be included or not. RocksDB may
    replace files during the call.
    """
    for _ in range(_LISTINGS):
        tables = list_tables()
        if tables is None:
            return None
        opened: list[list[TableFile]] = []
        try:
            # Files of level 0 may overlap, so each is a run. The files of another level ascend, so they are one run.
            before: Table | None = None
            for table in tables:
                if not table.is_in(start, end):
                    continue
                if before is None or table.level == 0 or table.level != before.level:
                    opened.append([])
                opened[-1].append(TableFile(directory / f"{table.number:06}.sst", table.size))
                before = table
            return TableScan(opened, start, end, failure)
        except BaseException as error:
            for file in (file for run in opened for file in run):
                file.close()
            if isinstance(error, FileNotFoundError):
                continue
            if isinstance(error, UnknownTableError | OSError):
                # An OSError: for example, the process has too many open files. RocksDB has its files open already.
                log.debug("RocksDB scans %s: %s", directory, error)
                return None
            if isinstance(error, Exception):
                raise failure("read", error) from error
            raise
    return None


class TableScan(Iterator[pa.RecordBatch]):
    """Sorted pairs of a range, as they were when the files were opened. ``runs`` come newest first."""

    def __init__(
        self, runs: Sequence[Sequence[TableFile]], start: bytes | None, end: bytes | None, failure: OnFailure
    ) -> None:
        self._runs = runs
        self._batches = _merged([chain.from_iterable(file.pairs(start, end) for file in run) for run in runs])
        self._is_closed = False
        self._error: BaseException | None = None
        self._failure = failure
        self._reading = threading.Lock()

    def __next__(self) -> pa.RecordBatch:
        with self._reading:  # another thread may close the store
            if self._is_closed:
                raise StoreClosedError("The store was closed while it was scanned.")
            if self._error is not None:
                raise self._error  # a generator that has failed only reports its end afterwards
            try:
                pairs = next(self._batches, None)
                if pairs is not None:
                    return pairs.batch()
            except Exception as error:
                self._let_go()
                self._error = self._failure("read", error)
                raise self._error from error
            except BaseException as error:
                self._let_go()
                self._error = error
                raise
            self._let_go()
            raise StopIteration

    def close(self) -> None:
        with self._reading:
            self._is_closed = True
            self._let_go()

    def _let_go(self) -> None:
        for file in (file for run in self._runs for file in run):
            file.close()


def _merged(runs: list[Iterator[SortedPairs]]) -> Iterator[SortedPairs]:
    """Merge ascending runs. If several runs have a key, the pair of the first one counts."""
    for step in in_step(runs):
        merged = SortedPairs.empty()
        for pairs in reversed(step):
            merged = merged.under(pairs)
        present = merged.present()
        if len(present):
            yield present
