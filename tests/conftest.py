"""Order of the suite: what needs no cluster first, so that simple mistakes show within seconds."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: 2 if item.get_closest_marker("spark") else 1 if item.get_closest_marker("ray") else 0)
