"""Hosts that are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark_bridge.queryable.host_world import HostWorld


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., HostWorld]]:
    made: list[HostWorld] = []

    def build(*args: Any, **kwargs: Any) -> HostWorld:
        made.append(HostWorld(tmp_path, *args, **kwargs))
        return made[-1]

    yield build
    for one in made:
        one.close()
