"""How Spark's progress is assigned to batches, and which batches are compared."""

from __future__ import annotations

from typing import Any

import pytest
from nexmark.lanes import Batch, Check, seconds_by_batch


def progress(batch: int, ms: int, rows: int, watermark: str | None = None, check: Any = None) -> dict[str, Any]:
    return {
        "batchId": batch,
        "durationMs": {"triggerExecution": ms, "addBatch": ms},
        "sources": [
            {"description": "FileStreamSource[file:/in/*]", "numInputRows": rows},
            # Ticks, which have rows in every batch.
            {"description": "RateStreamV2[rowsPerSecond=1]", "numInputRows": 1},
        ],
        "eventTime": {} if watermark is None else {"watermark": watermark},
        "observedMetrics": {} if check is None else {"check": check},
    }


def test_a_batch_is_read_from_its_progress() -> None:
    check = {"rows": 3, "hashes": 12}
    batch = Batch.of(progress(4, 1500, 7, "2015-07-15T00:00:01.250Z", check))
    assert batch == Batch(4, 1.5, True, 1_436_918_401_250, Check(3, 12))
    assert Batch.of(progress(0, 20, 0, None, {"rows": 0, "hashes": None})) == Batch(0, 0.02, False, -1, Check())
    assert Batch.of(progress(0, 20, 0)).check == Check()


@pytest.mark.parametrize(("first", "must"), [(0, [1.5, 4.25]), (1, [4.25]), (3, [4.25]), (4, []), (6, [])])
def test_the_batch_of_a_watermark_counts_with_the_batch_before(first: int, must: list[float]) -> None:
    watermarks = [
        (True, 1.0, 0),
        (False, 0.5, 9),
        (False, 64.0, 9),
        (True, 4.0, 9),
        (False, 0.25, 12),
        (False, 64.0, 12),
    ]
    executed = [Batch(i, s, data, mark, Check()) for i, (data, s, mark) in enumerate(watermarks)]
    assert seconds_by_batch(executed, first) == must


def test_batches_without_watermark_count_by_themselves() -> None:
    executed = [Batch(i, s, data, -1, Check()) for i, (s, data) in enumerate([(1.0, True), (2.0, True), (64.0, False)])]
    assert seconds_by_batch(executed, 0) == [1.0, 2.0]
