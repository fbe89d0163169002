"""Sending each row to the state partition that owns the key group of the row's key.

Every partition owns one contiguous range of key groups (Flink's key groups on Spark's shuffle). Spark offers only
``repartition(n, expression)``, which places a row at ``pmod(murmur3(expression), n)``. To aim at partition p, an
integer is looked up whose hash lands there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pyspark.sql import Column

SPARK_SEED = 42


def target_column(columns: list[str], num_partitions: int, key_groups: int) -> Column:
    """Return the expression for ``repartition`` that sends keys of key group g to partition ``g * n // G``.

    ``columns`` are those of the key in stored order, by names that SQL takes without quotes.
    """
    from pyspark.sql import functions as F

    # SQL's div, which Column does not offer, divides integers without a detour over doubles.
    hashed = f"xxhash64({', '.join(columns)})"
    partition = F.expr(f"cast(pmod({hashed}, {key_groups}L) * {num_partitions} div {key_groups} as int)")
    targets = F.array(*[F.lit(t) for t in partition_targets(num_partitions)])
    return F.element_at(targets, partition + F.lit(1))


@lru_cache(maxsize=64)
def partition_targets(num_partitions: int) -> tuple[int, ...]:
    """Return for each partition p the smallest int that Spark's ``repartition(num_partitions, ...)`` sends there."""
    start, size = 0, max(1024, num_partitions * 8)
    targets: dict[int, int] = {}
    while len(targets) < num_partitions:
        candidates = np.arange(start, start + size, dtype=np.int32)
        places = np.mod(murmur3_int(candidates).astype(np.int64), num_partitions)
        found, first = np.unique(places, return_index=True)
        for place, index in zip(found.tolist(), first.tolist(), strict=True):
            targets.setdefault(place, int(candidates[index]))
        start += size
    return tuple(targets[p] for p in range(num_partitions))


def murmur3_int(values: NDArray[np.int32], seed: int = SPARK_SEED) -> NDArray[np.int32]:
    """Return Spark's ``hash(int)``: Murmur3_x86_32 of the four little-endian bytes of each value."""
    with np.errstate(over="ignore"):
        k = values.astype(np.uint32) * np.uint32(0xCC9E2D51)
        k = (k << np.uint32(15)) | (k >> np.uint32(17))
        k = k * np.uint32(0x1B873593)
        h = np.uint32(seed) ^ k
        h = (h << np.uint32(13)) | (h >> np.uint32(19))
        h = h * np.uint32(5) + np.uint32(0xE6546B64)
        h = h ^ np.uint32(4)
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        h = h ^ (h >> np.uint32(16))
    result: NDArray[np.int32] = h.view(np.int32)
    return result
