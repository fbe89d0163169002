"""What operators did in their last batch, asked for and told to listeners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spark_bridge import (
    StateOperatorProgress,
    add_state_operator_listener,
    aggregate,
    remove_state_operator_listener,
    state_operator_progress,
)
from spark_bridge import functions as S
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import wait_until

pytestmark = pytest.mark.spark


class Told:
    def __init__(self) -> None:
        self.batches: list[tuple[str, StateOperatorProgress]] = []

    def on_state_operator_progress(self, run_id: str, progress: Sequence[StateOperatorProgress]) -> None:
        self.batches += [(run_id, p) for p in progress]


def test_progress_counts_keys_changes_and_partitions(make_stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_bridge.session.operator_progress.WAIT_SECONDS", PATIENCE)
    stream = make_stream("k long, v double")
    stream.add([(k, 1.0) for k in range(100)])
    told = Told()
    add_state_operator_listener(told)
    try:
        totals = aggregate(stream.read(), by="k", operator="totals", num_partitions=3, n=S.count())
        query = totals.writeStream.format("noop").option("checkpointLocation", stream.checkpoint).start()
        query.processAllAvailable()
        (first,) = state_operator_progress(query)
        stream.add([(k, 1.0) for k in range(90, 120)])
        query.processAllAvailable()
        (second,) = state_operator_progress(query)
        wait_until(lambda: len(told.batches) == 2)
        query.stop()
    finally:
        remove_state_operator_listener(told)
    assert (first.batch_id, first.num_rows_total, first.num_rows_updated) == (0, 100, 100)
    assert (second.batch_id, second.num_rows_total, second.num_rows_updated) == (1, 120, 30)
    assert (second.num_rows_removed, second.num_rows_dropped_by_watermark) == (0, 0)
    assert second.num_shuffle_partitions == second.num_state_store_instances == 3
    assert second.commit_time_ms > 0 and second.memory_used_bytes > 0
    assert [(run, p.batch_id) for run, p in told.batches] == [(str(query.runId), 0), (str(query.runId), 1)]
    assert told.batches[-1][1].as_dict()["operatorName"] == "totals"
