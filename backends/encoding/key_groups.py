"""Key groups, and the partition that owns each: Spark's ``pmod(xxhash64(key columns), G)``, computed here bit for bit.

Spark's ``xxhash64`` is XXH64 with seed 42 over little-endian bytes. Each column's hash is the seed of the next column;
a null leaves the seed as it is. Fixed-width columns are hashed a column at a time. Key groups as the unit of rescaling
are Flink's idea.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from backends.encoding import columns
from backends.exceptions import InvalidStateStoreArgument

# XXH64 of many values at once, each with its own seed: https://xxhash.com, as Spark's ``xxhash64`` computes it.
#
# Values of fixed width take one round each. Strings are hashed in parallel: the first eight bytes of all strings, then
# the next eight of those that have 16 bytes or more, and so on.


RowHashes = npt.NDArray[np.uint64]

LONG_STRING_BYTES = 512
"""Longer strings are hashed one by one: few strings of a batch are that long."""
STRINGS_ONE_BY_ONE = 100
"""Up to this many strings, hashing them one by one is faster."""
HASH_STEP_ROWS = 1 << 15
"""This many strings are hashed in parallel: their words stay in the caches of a core."""

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
    content, offsets = columns.binary_content(values)
    hashes = np.empty(len(values), np.uint64)
    for first in range(0, len(values), HASH_STEP_ROWS):
        step = slice(first, min(first + HASH_STEP_ROWS, len(values)))
        hashes[step] = _hashed(content, offsets[step], offsets[step.start + 1 : step.stop + 1], seeds[step])
    return hashes


def _hashed(content: columns.Bytes, starts: columns.Offsets, ends: columns.Offsets, seeds: RowHashes) -> RowHashes:
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


def _one_by_one(content: columns.Bytes, starts: columns.Offsets, ends: columns.Offsets, seeds: RowHashes) -> RowHashes:
    all_bytes, hash_one = content.data, xxhash.xxh64_intdigest
    rows = zip(starts.tolist(), ends.tolist(), seeds.tolist(), strict=True)
    hashes: RowHashes = np.fromiter(
        (hash_one(all_bytes[start:end], seed) for start, end, seed in rows), np.uint64, len(starts)
    )
    return hashes


def _in_order(content: columns.Bytes, starts: columns.Offsets, lengths: columns.Offsets, seeds: RowHashes) -> RowHashes:
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
        hashes[rows] = _with_word(hashes[rows], columns.gather_fixed(content, at[rows], _WORD))
        at[rows] += 8
        left[rows] -= 8
    rows = np.flatnonzero(left >= 4)
    if len(rows):
        hashes[rows] = _with_half(hashes[rows], columns.gather_fixed(content, at[rows], _HALF))
        at[rows] += 4
        left[rows] -= 4
    while len(rows := np.flatnonzero(left)):
        hashes[rows] = _rotated(hashes[rows] ^ content[at[rows]].astype(np.uint64) * _P5, 11) * _P1
        at[rows] += 1
        left[rows] -= 1
    return _avalanche(hashes)


def _stripes(content: columns.Bytes, starts: columns.Offsets, lengths: columns.Offsets, seeds: RowHashes) -> RowHashes:
    """Return the hash state after the whole 32-byte stripes of strings of at least 32 bytes; lengths ascend."""
    lanes = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
    for begin in range(0, int(lengths[-1]) // _STRIPE * _STRIPE, _STRIPE):
        first = int(np.searchsorted(lengths, begin + _STRIPE))
        for i, lane in enumerate(lanes):
            lane[first:] = _round(lane[first:], columns.gather_fixed(content, starts[first:] + (begin + 8 * i), _WORD))
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


MAX_KEY_GROUPS = 1 << 16
DEFAULT_KEY_GROUPS = 1024
SEED = 42
"""Spark's seed of the first column's hash."""
SMALL_DECIMAL = 18
"""Spark hashes decimals of at most this many digits as a long, and others by their bytes."""


def key_groups(batch: pa.RecordBatch, num_groups: int) -> npt.NDArray[np.int32]:
    """Return the key group of each row, 0 to ``num_groups`` - 1; all columns of ``batch`` are key columns.

    Raises ``UnsupportedTypeError`` naming a column whose type cannot be a key.
    """
    check_num_groups(num_groups)
    hashes = spark_xxhash64(batch)
    # For a power of 2, a bit mask gives the same without a division.
    is_power = num_groups & (num_groups - 1) == 0
    groups: npt.NDArray[np.int64] = hashes & np.int64(num_groups - 1) if is_power else hashes % np.int64(num_groups)
    return groups.astype(np.int32)


def spark_xxhash64(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Return Spark's ``xxhash64(*columns)`` of each row."""
    hashes = np.full(batch.num_rows, SEED, np.uint64)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        hashes = _hash_column(name, column, hashes)
    return hashes.view(np.int64)


def check_num_groups(num_groups: int) -> None:
    """Raise ``InvalidStateStoreArgument`` for a number of key groups outside 1 to 65,536."""
    if not 1 <= num_groups <= MAX_KEY_GROUPS:
        raise InvalidStateStoreArgument(f"The number of key groups must be 1 to {MAX_KEY_GROUPS}, not {num_groups}.")


def check_partitions(operator: str, num_partitions: object, key_groups: int) -> int:
    """Return a number of partitions, or raise ``InvalidStateStoreArgument``."""
    if isinstance(num_partitions, bool) or not isinstance(num_partitions, int) or not 1 <= num_partitions <= key_groups:
        raise InvalidStateStoreArgument(
            f"num_partitions={num_partitions!r} for operator {operator!r} must be an int from 1 to {key_groups}, the "
            "number of key groups, which is fixed for the life of the state."
        )
    return num_partitions


def partition_of(group: int, num_groups: int, num_partitions: int) -> int:
    """Return the partition that owns a key group."""
    return group * num_partitions // num_groups


def partition_range(partition: int, num_partitions: int, num_groups: int) -> tuple[int, int]:
    """Return the key groups of a partition: the first one, and the one after the last.

    Raises ``InvalidStateStoreArgument`` if there are more partitions than key groups, or no such partition.
    """
    check_num_groups(num_groups)
    if not 1 <= num_partitions <= num_groups:
        raise InvalidStateStoreArgument(
            f"{num_partitions} partitions for {num_groups} key groups: there must be 1 to {num_groups}."
        )
    if not 0 <= partition < num_partitions:
        raise InvalidStateStoreArgument(f"Partition {partition} of {num_partitions} does not exist.")
    return -(-partition * num_groups // num_partitions), -(-(partition + 1) * num_groups // num_partitions)


def _hash_column(name: str, column: pa.Array, seeds: RowHashes) -> RowHashes:
    array = columns.normalized_column(name, column)
    columns.refuse_map(name, array.type)
    hashes = _hash_array(name, array, seeds)
    mask = columns.null_mask(array)
    return hashes if mask is None else np.where(mask, seeds, hashes)


def _hash_array(name: str, array: pa.Array, seeds: RowHashes) -> RowHashes:
    kind = array.type
    if pa.types.is_struct(kind):
        for i, child in enumerate(array.flatten()):
            seeds = _hash_column(f"{name}.{kind.field(i).name}", child, seeds)
        return seeds
    if columns.is_list_like(kind):
        return _hash_lists(f"{name}.element", array, seeds)
    if pa.types.is_decimal128(kind):
        return _hash_decimals(array, seeds)
    dtype = columns.fixed_dtype(kind)
    if dtype is None:
        return hash_bytes(columns.binary_values(array), seeds)
    values = columns.fixed_values(array, dtype)
    if pa.types.is_floating(kind):
        # Like Spark: -0.0 is 0.0, and every NaN is the same NaN.
        values = np.where(np.isnan(values), np.array(np.nan, dtype), values + dtype.type(0))
        return hash_8(values.view(np.uint64), seeds) if dtype.itemsize == 8 else hash_4(values.view(np.uint32), seeds)
    if dtype.itemsize == 8:
        return hash_8(values.view(np.uint64), seeds)
    return hash_4(values.astype(np.int32).view(np.uint32), seeds)


def _hash_lists(name: str, array: pa.Array, seeds: RowHashes) -> RowHashes:
    """Hash arrays: each element's hash is the seed of the next. All rows' first elements, then all second ones."""
    elements, offsets = columns.list_parts(array)
    counts = np.diff(offsets)
    hashes: RowHashes = seeds.copy()
    for position in range(int(counts.max(initial=0))):
        rows = np.flatnonzero(counts > position)
        chosen = elements.take(pa.array(offsets[rows] + position))
        hashes[rows] = _hash_column(name, chosen, hashes[rows])
    return hashes


def _hash_decimals(array: pa.Array, seeds: RowHashes) -> RowHashes:
    words = columns.fixed_values(array, np.dtype("V16")).copy().view(np.uint64).reshape(-1, 2)
    if array.type.precision <= SMALL_DECIMAL:
        return hash_8(words[:, 0], seeds)
    unscaled = ((int(high) << 64) | int(low) for low, high in zip(words[:, 0], words[:, 1].view(np.int64), strict=True))
    return hash_bytes(pa.array([java_bytes(u) for u in unscaled], pa.binary()), seeds)


def java_bytes(value: int) -> bytes:
    """Return ``java.math.BigInteger.toByteArray``: the shortest two's complement, with room for the sign."""
    magnitude = value if value >= 0 else ~value
    return value.to_bytes(magnitude.bit_length() // 8 + 1, "big", signed=True)
