"""Aiming at a Spark partition through its own hash."""

from __future__ import annotations

import numpy as np
import pytest

from spark_bridge.operators.map_in_arrow import murmur3_int, partition_targets


def test_murmur3_equals_sparks_hash_of_ints() -> None:
    # select hash(0), hash(1), hash(-1), hash(42), hash(2147483647) on Spark 3.5 and 4.2
    values = np.array([0, 1, -1, 42, 2147483647], dtype=np.int32)
    assert murmur3_int(values).tolist() == [933211791, -559580957, -1604776387, 29417773, 133916647]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 200, 4096])
def test_every_partition_has_a_target_that_hashes_to_it(n: int) -> None:
    targets = np.array(partition_targets(n), dtype=np.int32)
    assert np.mod(murmur3_int(targets).astype(np.int64), n).tolist() == list(range(n))
