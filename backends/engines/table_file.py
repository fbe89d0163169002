"""RocksDB's own files, read by columns: many pairs at once, where an iterator hands over one after the other.

The format is that of RocksDB's block-based tables, format version 6: blocks of pairs (``table_blocks``), found by an
index. A file with anything else in it (a later format, merge operands, ranges that are removed) is refused when it is
opened, and is read by RocksDB. So is a file of long keys, which RocksDB reads faster.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from backends.encoding.sorted_pairs import SortedPairs, is_strictly_sorted
from backends.engines.table_blocks import (
    Block,
    DamagedTableError,
    decoded_blocks,
    restarts_at,
    stored_pairs,
    varint_at,
)

FIRST_BLOCKS, STEP_BLOCKS = 4, 256
"""At most this many blocks are decoded together: few at first, for a reader may want no more than some pairs, and then
more.
"""
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
    """A file has something in it that only RocksDB reads."""


class TableFile:
    """One file of ``size`` bytes, which stays readable though RocksDB removes it meanwhile.

    Raises ``UnknownTableError`` if it is to be read by RocksDB, ``FileNotFoundError`` if RocksDB has removed it.
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
        if (found := os.fstat(self._descriptor).st_size) != size:
            raise UnknownTableError(f"{self._path} has {found} bytes, where RocksDB lists {size}.")
        footer = self._read(size - _FOOTER, _FOOTER) if size > _FOOTER else bytes(_FOOTER)
        kind, _, _, self._context, meta_size = struct.unpack_from("<B4sIII", footer)
        version, magic = struct.unpack_from("<IQ", footer, _FOOTER - 12)
        if (kind, version, magic) != (_XXH3, _FORMAT_VERSION, _MAGIC):
            raise UnknownTableError(f"{self._path} is no table of format {_FORMAT_VERSION} with checksums by XXH3.")
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
        """Let go of the file."""
        self._closed()

    def _steps(self, start: bytes | None, end: bytes | None) -> Iterator[list[Block]]:
        """Return the blocks that may have keys of a range, in lists of those that are decoded together."""
        most = FIRST_BLOCKS
        handles = self._handles(start, end)
        while together := _first(handles, most):
            begin = together[0][0]
            # Blocks follow one another in the file.
            data = self._read(begin, sum(together[-1]) + _TRAILER - begin)
            step: list[Block] = []
            nbytes = 0
            for offset, size in together:
                step.append(self._content(data, offset - begin, size, offset))
                nbytes += len(step[-1])
                if nbytes >= STEP_BYTES:
                    yield step
                    step, nbytes = [], 0
            if step:
                yield step
            most = min(2 * most, STEP_BLOCKS)

    def _handles(self, start: bytes | None, end: bytes | None) -> Iterator[tuple[int, int]]:
        """Return where the blocks begin that may have keys of a range, and how long they are."""
        index = self._block(*self._index)
        at, stop = 0, restarts_at(index)
        while at < stop:
            shared, length, at = index[at], index[at + 1], at + 2
            if shared:
                raise DamagedTableError(f"{self._path} has keys in its index that are not whole.")
            if length >= 0x80:
                length, at = varint_at(index, at - 1)
            key, at = index[at : at + length], at + length
            offset, at = varint_at(index, at)
            size, at = varint_at(index, at)
            if start is not None and key < start:  # no key of the block is after it
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
        found = (xxhash.xxh3_64_intdigest(content) & _LOW) ^ (compression * _LAST_BYTE & _LOW)
        if self._context:
            place = (offset & _LOW) + (offset >> 32)
            found = (found + (self._context ^ (place & _LOW))) & _LOW
        if found != int.from_bytes(data[at + size + 1 : at + size + _TRAILER], "little"):
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


def _first(handles: Iterator[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Return the next blocks, ``most`` of them if they have few bytes."""
    taken: list[tuple[int, int]] = []
    for handle in handles:
        taken.append(handle)
        if len(taken) == most or sum(handle) - taken[0][0] >= STEP_BYTES:
            break
    return taken


def _newest(keys: pa.BinaryArray, values: pa.BinaryArray, last: bytes | None) -> SortedPairs:
    """Return the first of equal keys, which is the newest, as pairs after the key ``last``."""
    if not is_strictly_sorted(keys):
        is_new = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
        is_new = pa.concat_arrays([pa.array([True]), is_new])
        keys, values = keys.filter(is_new), values.filter(is_new)
    again = int(len(keys) > 0 and last is not None and keys[0].as_py() == last)
    return SortedPairs(keys.slice(again), values.slice(again))
