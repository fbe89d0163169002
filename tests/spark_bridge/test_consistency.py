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
    at_least = (ANSWERS // 20 + 1, 6)
    stream = make_stream("account long, amount long")
    answers, _, newest = run_bank(stream, directory, 5, ANSWERS, 45, pause=1.0, at_least=at_least)
    assert answers >= at_least[0], "the tellers had hardly any answer"
    assert newest >= at_least[1], "the tellers have hardly seen a new version"
