"""XXH64 of many values at once, each with a seed of its own: https://xxhash.com, as Spark's ``xxhash64`` computes it.

Values of fixed width are one round each. Strings are hashed side by side: the first eight bytes of all of them, then
the next eight of those that have 16 bytes or more, and so on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from backends.encoding.columns import Bytes, Offsets, binary_content, gather_fixed

RowHashes = npt.NDArray[np.uint64]

LONG_STRING_BYTES = 512
"""Longer strings are hashed one by one: few strings of a batch are that long."""
STRINGS_ONE_BY_ONE = 100
"""At most this many strings are hashed faster one by one."""
HASH_STEP_ROWS = 1 << 15
"""This many strings are hashed side by side: their words stay in the caches of a core."""

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_SEED_4 = _P5 + np.uint64(4)
_SEED_8 = _P5 + np.uint64(8)
_STRIPE = 32
_WORD = np.dtype("<u8")
_HALF = np.dtype("<u4")


def hash_8(values: RowHashes, seeds: RowHashes) -> RowHashes:
    """Return the hash of eight bytes, a little-endian integer, per row."""
    return _avalanche(_with_word(seeds + _SEED_8, values))


def hash_4(values: npt.NDArray[np.uint32], seeds: RowHashes) -> RowHashes:
    """Return the hash of four bytes, a little-endian integer, per row."""
    return _avalanche(_with_half(seeds + _SEED_4, values))


def hash_bytes(values: pa.BinaryArray, seeds: RowHashes) -> RowHashes:
    """Return the hash of each element; none is null."""
    content, offsets = binary_content(values)
    hashes = np.empty(len(values), np.uint64)
    for first in range(0, len(values), HASH_STEP_ROWS):
        step = slice(first, min(first + HASH_STEP_ROWS, len(values)))
        hashes[step] = _hashed(content, offsets[step], offsets[step.start + 1 : step.stop + 1], seeds[step])
    return hashes


def _hashed(content: Bytes, starts: Offsets, ends: Offsets, seeds: RowHashes) -> RowHashes:
    lengths = ends - starts
    if len(starts) <= STRINGS_ONE_BY_ONE:
        return _one_by_one(content, starts, ends, seeds)
    if int(lengths.min()) == int(lengths.max()) <= LONG_STRING_BYTES:  # as ids and dates are: nothing has to be sorted
        return _in_order(content, starts, lengths, seeds)
    order = np.argsort(lengths, kind="stable")
    by_length = lengths[order]
    number = int(np.searchsorted(by_length, LONG_STRING_BYTES, "right"))
    hashes = np.empty(len(starts), np.uint64)
    short, long = order[:number], order[number:]
    hashes[short] = _in_order(content, starts[short], by_length[:number], seeds[short])
    hashes[long] = _one_by_one(content, starts[long], ends[long], seeds[long])
    return hashes


def _one_by_one(content: Bytes, starts: Offsets, ends: Offsets, seeds: RowHashes) -> RowHashes:
    all_bytes, hash_one = content.data, xxhash.xxh64_intdigest
    rows = zip(starts.tolist(), ends.tolist(), seeds.tolist(), strict=True)
    hashes: RowHashes = np.fromiter(
        (hash_one(all_bytes[start:end], seed) for start, end, seed in rows), np.uint64, len(starts)
    )
    return hashes


def _in_order(content: Bytes, starts: Offsets, lengths: Offsets, seeds: RowHashes) -> RowHashes:
    """Return the hashes of strings whose lengths ascend: those that have more bytes are always the last ones."""
    hashes = seeds + _P5
    behind_stripes = int(np.searchsorted(lengths, _STRIPE))
    if behind_stripes < len(starts):
        rest = slice(behind_stripes, None)
        hashes[rest] = _stripes(content, starts[rest], lengths[rest], seeds[rest])
    hashes += lengths.astype(np.uint64)
    at = starts + lengths // _STRIPE * _STRIPE
    left = lengths % _STRIPE
    for _ in range(int(left.max(initial=0)) // 8):
        rows = np.flatnonzero(left >= 8)
        hashes[rows] = _with_word(hashes[rows], gather_fixed(content, at[rows], _WORD))
        at[rows] += 8
        left[rows] -= 8
    rows = np.flatnonzero(left >= 4)
    if len(rows):
        hashes[rows] = _with_half(hashes[rows], gather_fixed(content, at[rows], _HALF))
        at[rows] += 4
        left[rows] -= 4
    while len(rows := np.flatnonzero(left)):
        hashes[rows] = _rotated(hashes[rows] ^ content[at[rows]].astype(np.uint64) * _P5, 11) * _P1
        at[rows] += 1
        left[rows] -= 1
    return _avalanche(hashes)


def _stripes(content: Bytes, starts: Offsets, lengths: Offsets, seeds: RowHashes) -> RowHashes:
    """Return the hash state after the whole 32-byte stripes of strings of at least 32 bytes; lengths ascend."""
    lanes = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
    for begin in range(0, int(lengths[-1]) // _STRIPE * _STRIPE, _STRIPE):
        first = int(np.searchsorted(lengths, begin + _STRIPE))
        for i, lane in enumerate(lanes):
            lane[first:] = _round(lane[first:], gather_fixed(content, starts[first:] + (begin + 8 * i), _WORD))
    hashes = sum((_rotated(lane.copy(), bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)), np.uint64(0))
    for lane in lanes:
        hashes = (hashes ^ _round(np.zeros_like(lane), lane)) * _P1 + _P4
    return np.asarray(hashes, np.uint64)


def _round(lane: RowHashes, words: RowHashes) -> RowHashes:
    mixed: RowHashes = words * _P2
    mixed += lane
    mixed = _rotated(mixed, 31)
    mixed *= _P1
    return mixed


def _with_word(hashes: RowHashes, words: RowHashes) -> RowHashes:
    mixed: RowHashes = words * _P2
    mixed = _rotated(mixed, 31)
    mixed *= _P1
    mixed ^= hashes
    mixed = _rotated(mixed, 27)
    mixed *= _P1
    mixed += _P4
    return mixed


def _with_half(hashes: RowHashes, halves: npt.NDArray[np.uint32]) -> RowHashes:
    mixed: RowHashes = halves.astype(np.uint64)
    mixed *= _P1
    mixed ^= hashes
    mixed = _rotated(mixed, 23)
    mixed *= _P2
    mixed += _P3
    return mixed


def _rotated(values: RowHashes, bits: int) -> RowHashes:
    """Rotate the bits of each value to the left; ``values`` are overwritten."""
    rotated: RowHashes = values << np.uint64(bits)
    values >>= np.uint64(64 - bits)
    rotated |= values
    return rotated


def _avalanche(hashes: RowHashes) -> RowHashes:
    """Return hashes with the bits mixed; they are overwritten."""
    hashes ^= hashes >> np.uint64(33)
    hashes *= _P2
    hashes ^= hashes >> np.uint64(29)
    hashes *= _P3
    hashes ^= hashes >> np.uint64(32)
    return hashes
