"""Answers over several partitions are of one version, whatever dies meanwhile; ``bank.py`` makes longer runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.effort import effort
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.streams.bank import run_bank

pytestmark = pytest.mark.spark
ANSWERS = effort(4_000, 20_000)
SECONDS = effort(7, 45)


def test_no_answer_is_ever_broken(make_stream: Callable[..., Stream], tmp_path: Path) -> None:
    directory = tmp_path / "tellers"
    directory.mkdir()
    at_least = (1_001, 6)
    stream = make_stream("account long, amount long")
    answers, _, newest = run_bank(stream, directory, 5, ANSWERS, SECONDS, pause=1.0, at_least=at_least)
    assert answers >= at_least[0], "the tellers had hardly any answer"
    assert newest >= at_least[1], "the tellers have hardly seen a new version"
