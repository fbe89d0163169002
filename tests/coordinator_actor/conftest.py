"""Streams without Spark, closed in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator_actor.savepoints.savepoint_streams import Stream


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Callable[..., Stream]]:
    made: list[Stream] = []

    def make(batches: int = 2, **kwargs: Any) -> Stream:
        made.append(Stream(tmp_path / str(len(made)), **kwargs))
        made[-1].batches(0, batches)
        return made[-1]

    yield make
    for one in made:
        one.close()
