"""Order of the suite: what needs no cluster first, so that simple mistakes show within seconds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 4 << 30:
    # Most tests write and sync many small files; what they show does not depend on where.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: 2 if item.get_closest_marker("spark") else 1 if item.get_closest_marker("ray") else 0)
