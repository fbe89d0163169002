"""How much random work the suite does: some by default, so that it stays quick; all of it by ``make test-thorough``."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

IS_THOROUGH = os.environ.get("STATESTORE_TEST_EFFORT") == "thorough"


def effort(usual: T, thorough: T) -> T:
    """Something of which there is more in a thorough run: seeds, rounds, parameters."""
    return thorough if IS_THOROUGH else usual


def examples(thorough: int) -> int:
    """How many examples of a property to try; each run draws others, so in time there are many."""
    return effort(max(thorough // 3, 5), thorough)
