"""Key groups, and the partition that owns each: Spark's ``pmod(xxhash64(key columns), G)``, computed here bit for bit.

Spark's ``xxhash64`` is XXH64 with seed 42 over little-endian bytes. Each column's hash is the seed of the next column;
a null leaves the seed as it is. Fixed-width columns are hashed a column at a time. Key groups as the unit of rescaling
are Flink's idea.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import (
    binary_values,
    fixed_dtype,
    fixed_values,
    is_list_like,
    list_parts,
    normalized_column,
    null_mask,
)
from backends.encoding.xxhash64 import RowHashes, hash_4, hash_8, hash_bytes
from backends.exceptions import InvalidStateStoreArgument, UnsupportedTypeError

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
        raise InvalidStateStoreArgument(f"There is no partition {partition} of {num_partitions}.")
    return -(-partition * num_groups // num_partitions), -(-(partition + 1) * num_groups // num_partitions)


def _hash_column(name: str, column: pa.Array, seeds: RowHashes) -> RowHashes:
    array = normalized_column(name, column)
    if pa.types.is_map(array.type):
        raise UnsupportedTypeError(
            f"Column {name!r} has the type {array.type}: a map has no order and cannot be a key."
        )
    hashes = _hash_array(name, array, seeds)
    mask = null_mask(array)
    return hashes if mask is None else np.where(mask, seeds, hashes)


def _hash_array(name: str, array: pa.Array, seeds: RowHashes) -> RowHashes:
    kind = array.type
    if pa.types.is_struct(kind):
        for i, child in enumerate(array.flatten()):
            seeds = _hash_column(f"{name}.{kind.field(i).name}", child, seeds)
        return seeds
    if is_list_like(kind):
        return _hash_lists(f"{name}.element", array, seeds)
    if pa.types.is_decimal128(kind):
        return _hash_decimals(array, seeds)
    dtype = fixed_dtype(kind)
    if dtype is None:
        return hash_bytes(binary_values(array), seeds)
    values = fixed_values(array, dtype)
    if pa.types.is_floating(kind):
        # Like Spark: -0.0 is 0.0, and every NaN is the same NaN.
        values = np.where(np.isnan(values), np.array(np.nan, dtype), values + dtype.type(0))
        return hash_8(values.view(np.uint64), seeds) if dtype.itemsize == 8 else hash_4(values.view(np.uint32), seeds)
    if dtype.itemsize == 8:
        return hash_8(values.view(np.uint64), seeds)
    return hash_4(values.astype(np.int32).view(np.uint32), seeds)


def _hash_lists(name: str, array: pa.Array, seeds: RowHashes) -> RowHashes:
    """Hash arrays: each element's hash is the seed of the next. All rows' first elements, then all second ones."""
    elements, offsets = list_parts(array)
    counts = np.diff(offsets)
    hashes: RowHashes = seeds.copy()
    for position in range(int(counts.max(initial=0))):
        rows = np.flatnonzero(counts > position)
        chosen = elements.take(pa.array(offsets[rows] + position))
        hashes[rows] = _hash_column(name, chosen, hashes[rows])
    return hashes


def _hash_decimals(array: pa.Array, seeds: RowHashes) -> RowHashes:
    words = fixed_values(array, np.dtype("V16")).copy().view(np.uint64).reshape(-1, 2)
    if array.type.precision <= SMALL_DECIMAL:
        return hash_8(words[:, 0], seeds)
    unscaled = ((int(high) << 64) | int(low) for low, high in zip(words[:, 0], words[:, 1].view(np.int64), strict=True))
    return hash_bytes(pa.array([java_bytes(u) for u in unscaled], pa.binary()), seeds)


def java_bytes(value: int) -> bytes:
    """Return ``java.math.BigInteger.toByteArray``: the shortest two's complement, with room for the sign."""
    magnitude = value if value >= 0 else ~value
    return value.to_bytes(magnitude.bit_length() // 8 + 1, "big", signed=True)
