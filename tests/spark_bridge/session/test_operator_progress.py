"""The progress of operators in their last batch, as queries and listeners get it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from spark_bridge import (
    CheckpointProgress,
    StateOperatorProgress,
    add_state_operator_listener,
    aggregate,
    checkpoint_progress,
    remove_state_operator_listener,
    state_operator_progress,
)
from spark_bridge import functions as S
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import wait_until

pytestmark = pytest.mark.spark


class RecordingListener:
    """Records its calls, and returns only while ``may_return`` is set."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, StateOperatorProgress]] = []
        self.checkpoints: list[CheckpointProgress] = []
        self.may_return = threading.Event()
        self.may_return.set()

    def on_state_operator_progress(self, run_id: str, progress: Sequence[StateOperatorProgress]) -> None:
        self.batches += [(run_id, p) for p in progress]
        assert self.may_return.wait(PATIENCE)

    def on_checkpoint_progress(self, run_id: str, progress: CheckpointProgress) -> None:
        self.checkpoints.append(progress)


def test_progress_counts_keys_changes_and_partitions(make_stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_bridge.session.progress.PROGRESS_WAIT_SECONDS", PATIENCE)
    stream = make_stream("k long, v double")
    stream.add([(k, 1.0) for k in range(100)])
    listener = RecordingListener()
    add_state_operator_listener(listener)
    try:
        totals = aggregate(stream.read(), by="k", operator="totals", num_partitions=3, n=S.count())
        query = totals.writeStream.format("noop").option("checkpointLocation", stream.checkpoint).start()
        query.processAllAvailable()
        (first,) = state_operator_progress(query)
        stream.add([(k, 1.0) for k in range(90, 120)])
        query.processAllAvailable()
        (second,) = state_operator_progress(query)
        wait_until(lambda: len(listener.checkpoints) == 2)
        newest = checkpoint_progress(query)
        query.stop()
    finally:
        remove_state_operator_listener(listener)
    assert [c.batch_id for c in listener.checkpoints] == [0, 1] and newest == listener.checkpoints[1]
    for checkpoint in listener.checkpoints:
        # At least a group of changes and a manifest.
        assert checkpoint.requests["put"] >= 2 and checkpoint.sent_bytes > checkpoint.delta_bytes > 0
        assert checkpoint.dollars >= 2 * 0.005 / 1000
    assert (first.batch_id, first.num_rows_total, first.num_rows_updated) == (0, 100, 100)
    assert (second.batch_id, second.num_rows_total, second.num_rows_updated) == (1, 120, 30)
    assert (second.num_rows_removed, second.num_rows_dropped_by_watermark) == (0, 0)
    assert second.num_shuffle_partitions == second.num_state_store_instances == 3
    assert second.commit_time_ms > 0 and second.memory_used_bytes > 0
    assert [(run, p.batch_id) for run, p in listener.batches] == [(str(query.runId), 0), (str(query.runId), 1)]
    assert listener.batches[-1][1].as_dict()["operatorName"] == "totals"


def test_lagging_listener_gets_each_batch_once_with_its_figures(
    make_stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_bridge.session.progress.PROGRESS_WAIT_SECONDS", PATIENCE)
    stream = make_stream("k long, v double")
    listener = RecordingListener()
    listener.may_return.clear()
    add_state_operator_listener(listener)
    try:
        totals = aggregate(stream.read(), by="k", operator="totals", num_partitions=2, n=S.count())
        query = totals.writeStream.format("noop").option("checkpointLocation", stream.checkpoint).start()
        # The listener still handles the first batch while the others are committed and completed.
        for start in (0, 10, 30):
            stream.add([(k, 1.0) for k in range(start, 2 * start + 10)])
            query.processAllAvailable()
        wait_until(lambda: [p.batch_id for p in state_operator_progress(query)] == [2])
        assert wait_until(lambda: [p.batch_id for _, p in listener.batches]) == [0]
        listener.may_return.set()
        wait_until(lambda: len(listener.batches) == 3)
        query.stop()
    finally:
        listener.may_return.set()
        remove_state_operator_listener(listener)
    figures = [
        (p.batch_id, p.num_rows_total, p.num_rows_updated, p.num_state_store_instances) for _, p in listener.batches
    ]
    assert figures == [(0, 10, 10, 2), (1, 30, 20, 2), (2, 70, 40, 2)]
