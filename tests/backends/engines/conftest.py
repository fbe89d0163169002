"""Hashes that are the same in each run."""

import random

import numpy as np
import pytest

from backends.engines import cached_rows


@pytest.fixture
def same_hashes_each_time(monkeypatch):
    """A few of many rows find no place, other ones in each process."""
    rng = random.Random(7)
    monkeypatch.setattr(cached_rows, "_FACTORS", [np.uint64(rng.getrandbits(64) | 1) for _ in cached_rows._FACTORS])
    monkeypatch.setattr(cached_rows, "_SEED", np.uint64(7))
