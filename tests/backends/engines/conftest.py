"""Hashes that are the same in each run."""

import random

import numpy as np
import pytest

from backends.engines import row_cache_table


@pytest.fixture
def same_hashes_each_time(monkeypatch):
    """A few of many rows find no place, other ones in each process."""
    rng = random.Random(7)
    monkeypatch.setattr(
        row_cache_table, "_FACTORS", [np.uint64(rng.getrandbits(64) | 1) for _ in row_cache_table._FACTORS]
    )
    monkeypatch.setattr(row_cache_table, "_SEED", np.uint64(7))
