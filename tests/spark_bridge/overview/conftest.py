"""Streams without Spark whose checkpoints can be looked at from outside."""

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
        root = tmp_path / f"stream{len(made)}"
        made.append(Stream(root, **kwargs))
        (root / "ck" / "metadata").write_text('{"id":"q"}')
        made[-1].batches(0, batches)
        return made[-1]

    yield make
    for one in made:
        for host in one.hosts.values():
            host.close()
