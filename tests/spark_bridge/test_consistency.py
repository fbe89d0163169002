"""Answers over several partitions are of one version, whatever dies meanwhile; ``bank.py`` makes longer runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .bank import run_bank
from .conftest import Stream

pytestmark = pytest.mark.spark
ANSWERS = 20_000


def test_no_answer_is_ever_broken(make_stream: Callable[..., Stream], tmp_path: Path) -> None:
    directory = tmp_path / "tellers"
    directory.mkdir()
    answers, _, newest = run_bank(make_stream("account long, amount long"), directory, 5, ANSWERS, 45, pause=1.0)
    assert answers > ANSWERS // 20, "the tellers had hardly any answer"
    assert newest > 5, "the tellers have hardly seen a new version"
