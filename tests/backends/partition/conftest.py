"""Queries that are rescaled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends import fault_points
from tests.backends.partition.partition_steps import Query


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Callable[..., Query]]:
    made: list[Query] = []

    def make(n: int = 4, backend: str = "file") -> Query:
        made.append(Query(tmp_path / str(len(made)), n, backend))
        return made[-1]

    yield make
    fault_points.set_hook(None)
    for one in made:
        one.close()
