"""Row caches that do the same in each run."""

import random

import numpy as np
import pytest

from backends.engines import row_cache, row_cache_table


@pytest.fixture
def same_hashes_each_time(monkeypatch):
    """A few of many rows find no place, other ones in each process."""
    rng = random.Random(7)
    monkeypatch.setattr(
        row_cache_table, "_FACTORS", [np.uint64(rng.getrandbits(64) | 1) for _ in row_cache_table._FACTORS]
    )
    monkeypatch.setattr(row_cache_table, "_SEED", np.uint64(7))


@pytest.fixture
def few_rows_are_kept(monkeypatch):
    """Rows are added at once, as those of large reads are."""
    monkeypatch.setattr(row_cache, "MIN_KEPT", 1)
