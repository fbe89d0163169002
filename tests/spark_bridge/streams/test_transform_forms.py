"""``transform_with_state`` on DataFrames and on columns, end to end on RayDP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from spark_bridge import (
    ArrowBatch,
    ArrowResult,
    ArrowStatefulProcessor,
    StatefulProcessor,
    transform_with_state_in_arrow,
    transform_with_state_in_pandas,
)
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.streams.processors import (
    at,
    based_on,
    ordered,
    process_all,
)

pytestmark = pytest.mark.spark


# DataFrames --------------------------------------------------------------------------------------------------------


class Frames:
    """Tells what frames it is given, and gives several, one of them empty."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        sizes, total = [], (self.total.get() or (0,))[0]
        for frame in rows:
            assert list(frame.columns) == ["k", "v", "t"] and frame.index[0] == 0
            assert (frame["k"] == key[0]).all() and frame["t"].dtype == "datetime64[ns]"
            sizes.append(len(frame))
            total += int(frame["v"].sum())
            yield frame[["v", "k"]][:1].assign(note="first", unasked=1)
        self.total.update((total,))
        yield pd.DataFrame()
        yield pd.DataFrame({0: [key[0]], 1: ["sizes"], 2: [sum(sizes)]})
        yield pd.DataFrame({"note": [f"largest {max(sizes)}"], "k": [key[0]], "v": [total]})

    def close(self) -> None:
        pass


def test_a_key_of_many_rows_comes_in_frames_of_bounded_size(
    spark: SparkSession, make_stream: Callable[..., Stream]
) -> None:
    stream = make_stream("k string, v long, t timestamp")
    before = spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch")
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "10000")
    stream.add(pd.DataFrame({"k": ["many"] * 25_000 + ["one"], "v": 1, "t": pd.Timestamp("2024-01-01", tz="UTC")}))
    df = transform_with_state_in_pandas(
        stream.read(), "k", based_on(StatefulProcessor, Frames), "k string, note string, v long", operator="frames"
    )
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", before)
    (found,) = process_all(df, stream)
    count = Counter(found)
    assert 3 <= count.pop(("many", "first", 1)) <= 10
    (largest,) = (int(note.split()[1]) for k, note, _ in count if k == "many" and note.startswith("largest"))
    assert 1_000 <= largest <= 10_000
    assert set(count) == {
        ("many", "sizes", 25_000),
        ("many", f"largest {largest}", 25_000),
        ("one", "first", 1),
        ("one", "sizes", 1),
        ("one", "largest 1", 1),
    }


# Columns -----------------------------------------------------------------------------------------------------------


class Columns(ArrowStatefulProcessor):
    """Counts and sums by key; forgets a key that comes with a negative value, or that its timer finds without rows."""

    def init(self, handle: Any) -> None:
        handle.declare_state("n long, total long")

    def process(self, batch: ArrowBatch) -> ArrowResult:
        key, v = batch.key_index.to_numpy(), batch.rows["v"].to_numpy()
        rows = np.bincount(key, minlength=batch.num_keys)
        fired = np.isin(np.arange(batch.num_keys), batch.expired_timers["key_index"].to_numpy())
        gone = fired & (rows == 0)
        n = pc.add(pc.fill_null(batch.state["n"], 0), pa.array(rows))
        total = pc.add(pc.fill_null(batch.state["total"], 0), pa.array(np.bincount(key, v, batch.num_keys).astype(int)))
        output = pa.table(
            {"k": batch.keys["k"], "what": pa.array(np.where(gone, "gone", "sum")), "n": n, "total": total}
        )
        removed = gone | (np.bincount(key, v < 0, batch.num_keys) > 0)
        last = np.zeros(batch.num_keys, np.int64)
        np.maximum.at(last, key, batch.rows["t"].cast(pa.int64()).to_numpy() // 1000)
        (timed,) = np.nonzero(~removed)
        return ArrowResult(
            output=output.filter(pa.array(~gone | np.asarray(batch.has_state))),
            state=pa.table({"total": total, "n": n}),
            removed=removed,
            # A second after the last row.
            timers=pa.table({"key_index": timed, "expiry_ms": last[timed] + 1_000}),
        )


@pytest.mark.matrix
def test_columns_come_with_the_state_of_all_keys(make_stream: Callable[..., Stream]) -> None:
    stream = make_stream("v long, k string, t timestamp")
    df = transform_with_state_in_arrow(
        stream.read().withWatermark("t", "0 seconds"),
        "k",
        Columns(),
        "k string, what string, n long, total long",
        operator="columns",
        time_mode="eventTime",
        num_partitions=2,
    )
    stream.add([(1, "a", at(10)), (2, "a", at(11)), (5, "b", at(10)), (7, None, at(10.5))])
    stream.add([(3, "a", at(12)), (-1, "b", at(11.5)), (9, "c", at(9))])
    stream.add([(100, "a", at(11)), (4, "d", at(20))])  # the first one is late
    assert process_all(df, stream) == [
        ordered([("a", "sum", 2, 3), ("b", "sum", 1, 5), (None, "sum", 1, 7)]),
        ordered([("a", "sum", 3, 6), ("b", "sum", 2, 4), ("c", "sum", 1, 9)]),
        ordered([("a", "gone", 3, 6), ("c", "gone", 1, 9), (None, "gone", 1, 7), ("d", "sum", 1, 4)]),
    ]
    stream.add([(8, "a", at(20.5)), (1, "d", at(20.7))])
    assert process_all(df, stream) == [ordered([("a", "sum", 1, 8), ("d", "sum", 2, 5)])]
