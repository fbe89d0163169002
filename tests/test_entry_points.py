"""The entry points that pyproject.toml declares exist, whatever an older installation says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PYPROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text()
TARGETS = re.findall(r'^[\w.-]+ = "((?:ray_statestore|spark_bridge)[\w.]*):(\w+)"$', PYPROJECT, re.MULTILINE)


def test_both_are_declared() -> None:
    assert len(TARGETS) == 2, TARGETS


@pytest.mark.parametrize(("module", "name"), TARGETS)
def test_what_is_declared_can_be_called(module: str, name: str) -> None:
    assert callable(getattr(importlib.import_module(module), name))
