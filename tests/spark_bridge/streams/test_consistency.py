"""Answers over several partitions are of one version, even if processes die; ``bank.py`` makes longer runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.effort import effort
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.streams.bank import ACCOUNTS, OPENING, Bank, check_history, run_bank

pytestmark = [pytest.mark.spark, pytest.mark.slow]
ANSWERS = effort(4_000, 20_000)
SECONDS = effort(7, 45)


def test_every_answer_is_consistent(make_stream: Callable[..., Stream], tmp_path: Path) -> None:
    directory = tmp_path / "tellers"
    directory.mkdir()
    at_least = (1_001, 6)
    stream = make_stream("account long, amount long")
    answers, _, newest = run_bank(stream, directory, 5, ANSWERS, SECONDS, pause=1.0, at_least=at_least)
    assert answers >= at_least[0], "the tellers had hardly any answer"
    assert newest >= at_least[1], "the tellers have hardly seen a new version"


@pytest.mark.parametrize(
    ("record", "is_right"),
    [
        ({"asked": 15.0, "answered": 15.1, "version": 1}, True),
        ({"asked": 15.0, "answered": 25.0, "version": 2}, True),
        ({"asked": 25.0, "answered": 25.1, "version": 1}, False),  # stale: version 2 was completed before
        ({"asked": 15.0, "answered": 15.1, "version": 2}, False),  # of a batch that Spark had not committed
        ({"asked": 25.0, "answered": 25.1, "account": 0, "balance": 900}, True),
        ({"asked": 25.0, "answered": 25.1, "account": 0, "balance": 1_000}, False),
        ({"asked": 25.0, "answered": 25.1, "account": 0, "balance": None}, False),
    ],
)
def test_history_check_finds_wrong_answers(tmp_path: Path, record: dict[str, Any], is_right: bool) -> None:
    bank = Bank(tmp_path, 1)
    bank.next_batch()
    bank.balances[0], bank.balances[1] = 900, 1_100
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write(json.dumps(bank.balances) + "\n")
    (tmp_path / "records-1.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "sink-0.json").write_text(json.dumps(dict.fromkeys(range(ACCOUNTS), OPENING)))
    (tmp_path / "sink-1.json").write_text(json.dumps({0: 900, 1: 1_100}))
    committed = {0: 10.0, 1: 20.0}
    if is_right:
        assert check_history(tmp_path, committed) == 1
        (tmp_path / "sink-1.json").write_text(json.dumps({0: 900}))
        with pytest.raises(AssertionError, match="the sink lacks accounts of batch 1"):
            check_history(tmp_path, committed)
    else:
        with pytest.raises(AssertionError, match="completed were"):
            check_history(tmp_path, committed)
