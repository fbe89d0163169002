"""Answers over several partitions are of one version, even if processes die; ``bank.py`` makes longer runs.

A read after Spark has reported the end of a batch returns that batch or a later one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from spark_bridge import QueryableStateClient, aggregate
from spark_bridge import functions as S
from tests.effort import effort
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.streams.bank import ACCOUNTS, OPENING, Bank, check_history, run_bank

pytestmark = [pytest.mark.spark]
ANSWERS = effort(4_000, 20_000)
SECONDS = effort(7, 45)


@pytest.mark.slow
def test_every_answer_is_consistent(make_stream: Callable[..., Stream], tmp_path: Path) -> None:
    directory = tmp_path / "tellers"
    directory.mkdir()
    at_least = (1_001, 6)
    stream = make_stream("account long, amount long")
    answers, _, newest = run_bank(stream, directory, 5, ANSWERS, SECONDS, pause=1.0, at_least=at_least)
    assert answers >= at_least[0], "the tellers had hardly any answer"
    assert newest >= at_least[1], "the tellers have hardly seen a new version"


@pytest.mark.slow
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


QUERIES = effort(8, 100)


def counts(stream: Stream) -> DataFrame:
    return aggregate(stream.read(), by="k", operator="counts", n=S.count(), num_partitions=2)


@pytest.mark.spark42_only
def test_a_short_query_that_has_ended_is_never_answered_from_before_its_batch(
    make_stream: Callable[..., Stream],
) -> None:
    for _ in range(QUERIES):
        stream = make_stream()
        stream.add([(1, 1.0), (2, 1.0), (2, 1.0)])
        writer = counts(stream).writeStream.format("noop").option("checkpointLocation", stream.checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        with QueryableStateClient.connect() as client:
            assert client.get("counts", 2, query=str(query.id)) == {"n": 2}


@pytest.mark.spark42_only
def test_each_batch_is_visible_once_spark_reports_its_end(stream: Stream) -> None:
    """By a new client after ``processAllAvailable``, and by ``foreachBatch`` in the next batch."""
    seen: list[tuple[int, Any]] = []

    def ask(batch: DataFrame, batch_id: int) -> None:
        batch.collect()
        if batch_id:
            with QueryableStateClient.connect() as client:
                seen.append((batch_id, client.get("counts", 1)))

    writer = counts(stream).writeStream.foreachBatch(ask).option("checkpointLocation", stream.checkpoint)
    stream.add([(1, 1.0)])
    query = writer.start()
    query.processAllAvailable()
    for n in range(2, QUERIES):
        stream.add([(1, 1.0)])
        query.processAllAvailable()
        with QueryableStateClient.connect() as client:
            assert client.get("counts", 1) == {"n": n}
    query.stop()
    assert seen == [(i, {"n": i}) for i in range(1, QUERIES - 1)]
