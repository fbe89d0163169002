"""How much work the suite does: a representative part by default, all of it by ``make test-thorough``.

Two means: a test or a parameter that bears the mark ``thorough`` is run by a thorough run only, and ``effort`` gives
tests fewer seeds, rounds and examples otherwise.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

IS_THOROUGH = os.environ.get("STATESTORE_TEST_EFFORT") == "thorough"


def effort(usual: T, thorough: T) -> T:
    """Return the seeds, rounds or parameters of this run: a thorough run has more of them."""
    return thorough if IS_THOROUGH else usual


def examples(thorough: int) -> int:
    """Return how many examples of a property to try; each run draws others, so in time there are many."""
    return effort(max(thorough // 10, 4), thorough)


def only_thorough(*values: Any, id: str | None = None) -> Any:
    """Return a parameter of ``pytest.mark.parametrize`` that only a thorough run tries."""
    return pytest.param(*values, marks=pytest.mark.thorough, id=id)
