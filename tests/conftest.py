"""Order of the suite: what needs no cluster first, so that simple mistakes show within seconds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

from tests.effort import examples

_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 4 << 30:
    # Most tests write and sync many small files; what they show does not depend on where.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

settings.register_profile("suite", max_examples=examples(100), deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: 2 if item.get_closest_marker("spark") else 1 if item.get_closest_marker("ray") else 0)
