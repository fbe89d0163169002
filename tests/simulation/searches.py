"""Searching seeds for a failure, and worlds that try one thing more often than all others do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation.world import Result, World, run

STEPS = 4000
"""So many of each seed: a whole run that finds nothing costs most."""


def first_failure(seeds: range, max_steps: int | None = STEPS) -> Result:
    """Return the result of the first of these seeds that fails. Raises ``AssertionError`` if none does."""
    for seed in seeds:
        result = run(seed, max_steps=max_steps)
        if result.failure is not None:
            return result
    raise AssertionError(f"None of {len(seeds)} seeds from {seeds.start} on has found anything.")


def repeat_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make worlds of several partitions in which most plans run again, whole or in part, and storage fails at times."""
    made: Callable[..., None] = World.__init__

    def repeating(self: World, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.repeated, self.faults.storage_error = 0.8, 0.02
        for stream in self.streams:
            stream.num_partitions = max(2, stream.num_partitions)

    monkeypatch.setattr(World, "__init__", repeating)
