"""Contestants that keep running totals in a stream: the same work, written in each way that Spark has, and in ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from workloads import Aggregate, Gives, Workload

CHECK = "check"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
HDFS = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
PROVIDER = "spark.sql.streaming.stateStore.providerClass"
ON_ROCKSDB = {
    PROVIDER: ROCKSDB,
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
}
"""As Spark's guide advises for speed."""
ON_HDFS = {PROVIDER: HDFS}


@dataclass(frozen=True)
class Contestant:
    """One way to write the query: ``make`` makes it of the input; ``output_mode`` and ``settings`` are Spark's.

    ``arguments`` are unusual arguments of the call. ``is_slow`` says that it needs many seconds a batch, and takes
    fewer batches.
    """

    name: str
    label: str
    make: Callable[[DataFrame, Workload], DataFrame]
    output_mode: str = "append"
    needs_spark_4: bool = False
    is_slow: bool = False
    gives: Gives = "totals"
    is_ours: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)


def native(df: DataFrame, workload: Workload) -> DataFrame:
    """Spark's own aggregation, in the JVM."""
    made = {"n": F.count(F.lit(1)), "spent": F.sum("amount"), "pieces": F.sum("pieces")}
    made |= {"least": F.min("amount"), "most": F.max("amount")}
    return df.groupBy(*workload.key_names).agg(*(made[a.name].alias(a.name) for a in workload.aggregates))


def aggregate(df: DataFrame, workload: Workload, **options: Any) -> DataFrame:
    from spark_bridge import aggregate
    from spark_bridge import functions as S

    made = {"n": S.count(), "spent": S.sum("amount"), "pieces": S.sum("pieces")}
    made |= {"least": S.min("amount"), "most": S.max("amount")}
    figures: dict[str, Any] = {a.name: made[a.name] for a in workload.aggregates}
    return aggregate(df, by=workload.key_names, operator="totals", **options, **figures)


def aggregate_partial(df: DataFrame, workload: Workload) -> DataFrame:
    """As our documentation advises where few keys have most of the rows."""
    return aggregate(df, workload, partial_aggregation=True)


def identity(df: DataFrame, workload: Workload) -> DataFrame:
    """The same shuffle, and a Python stage that passes its rows on: the floor of any operator in Python."""

    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    return df.repartition(*map(F.col, workload.key_names)).mapInArrow(same, workload.input)


def stateless(df: DataFrame, workload: Workload) -> DataFrame:
    """The same shuffle, and a Python stage that adds up each batch alone: what remains if state costs nothing."""
    import pyarrow as pa

    keys, aggregates = workload.key_names, workload.aggregates
    named = {np.add: "sum", np.minimum: "min", np.maximum: "max"}
    asked: list[tuple[Any, str]] = [(a.column, named[a.combine]) if a.column else ([], "count_all") for a in aggregates]

    def totals(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = list(batches)
        if found:
            answer = pa.Table.from_batches(found).group_by(keys).aggregate(asked)
            columns = [*keys, *(f"{c}_{how}" if c else how for c, how in asked)]
            yield from answer.select(columns).rename_columns([*keys, *(a.name for a in aggregates)]).to_batches()

    return df.repartition(*map(F.col, keys)).mapInArrow(totals, workload.output)


def _row_processor(base: Any, workload: Workload) -> Any:
    state = workload.state
    total = Row(*workload.key_names, *(a.name for a in workload.aggregates))

    class RunningTotals(base):
        """The processor that a user of Spark 4 would write."""

        def init(self, handle: Any) -> None:
            self.total = handle.getValueState("total", state)

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            n, spent = self.total.get() or (0, 0)
            for row in rows:
                n += 1
                spent += row.amount
            self.total.update((n, spent))
            yield total(*key, n, spent)

        def close(self) -> None:
            pass

    class FiveTotals(RunningTotals):
        """The same with five figures."""

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            n, spent, least, most, pieces = self.total.get() or (0, 0, 1 << 62, -(1 << 62), 0)
            for row in rows:
                amount = row.amount
                n += 1
                spent += amount
                pieces += row.pieces
                least = min(least, amount)
                most = max(most, amount)
            self.total.update((n, spent, least, most, pieces))
            yield total(*key, n, spent, least, most, pieces)

    return RunningTotals() if len(workload.aggregates) == 2 else FiveTotals()


def _fold(frame: Any, total: Sequence[int] | None, aggregates: Sequence[Aggregate]) -> tuple[int, ...]:
    """The totals with one frame of a key's rows in them."""
    found = []
    for i, a in enumerate(aggregates):
        of_frame = int(a.combine.reduce(frame[a.column].to_numpy())) if a.column else len(frame)
        found.append(of_frame if total is None else int(a.combine(total[i], of_frame)))
    return tuple(found)


def _pandas_processor(base: Any, workload: Workload) -> Any:
    import pandas as pd

    state, columns, aggregates = workload.state, list(workload.key_names), workload.aggregates
    columns += [a.name for a in aggregates]

    class RunningTotals(base):
        """The same on frames."""

        def init(self, handle: Any) -> None:
            self.total = handle.getValueState("total", state)

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
            total: Any = self.total.get()
            for frame in rows:
                total = _fold(frame, total, aggregates)
            self.total.update(total)
            yield pd.DataFrame([(*key, *total)], columns=columns)

        def close(self) -> None:
            pass

    return RunningTotals()


def arrow(df: DataFrame, workload: Workload) -> DataFrame:
    from spark_bridge import ArrowBatch, ArrowResult, ArrowStatefulProcessor, transform_with_state_in_arrow

    state, aggregates = workload.state, workload.aggregates

    class RunningTotals(ArrowStatefulProcessor):
        """All keys at once: every key has rows, because there are no timers."""

        def init(self, handle: Any) -> None:
            handle.declare_state(state)

        def process(self, batch: ArrowBatch) -> ArrowResult | None:
            if not batch.num_keys:
                return None
            starts, made = batch.offsets[:-1], {}
            is_old = batch.has_state.to_numpy(zero_copy_only=False)
            for a in aggregates:
                of_batch = (
                    a.combine.reduceat(batch.rows[a.column].to_numpy(), starts) if a.column else np.diff(batch.offsets)
                )
                old = batch.state[a.name].fill_null(0).to_numpy()
                made[a.name] = np.where(is_old, a.combine(old, of_batch), of_batch)
            table = output = pa.table(made)
            for i, name in enumerate(batch.keys.column_names):
                output = output.add_column(i, name, batch.keys[name])
            return ArrowResult(output=output, state=table)

    return transform_with_state_in_arrow(
        df, workload.key_names, RunningTotals(), workload.output, operator="arrow_totals"
    )


def rows(df: DataFrame, workload: Workload) -> DataFrame:
    from spark_bridge import StatefulProcessor, transform_with_state

    processor = _row_processor(StatefulProcessor, workload)
    return transform_with_state(df, workload.key_names, processor, workload.output, operator="row_totals")


def pandas(df: DataFrame, workload: Workload) -> DataFrame:
    from spark_bridge import StatefulProcessor, transform_with_state_in_pandas

    processor = _pandas_processor(StatefulProcessor, workload)
    return transform_with_state_in_pandas(df, workload.key_names, processor, workload.output, operator="pandas_totals")


def spark_pandas_state(df: DataFrame, workload: Workload) -> DataFrame:
    """``applyInPandasWithState``. In Spark 3.5 it fails with today's pandas and pyarrow (a slice of floats)."""
    import pandas as pd

    aggregates = workload.aggregates
    columns = [*workload.key_names, *(a.name for a in aggregates)]

    def totals(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        total: Any = state.get if state.exists else None
        for frame in frames:
            total = _fold(frame, total, aggregates)
        state.update(total)
        yield pd.DataFrame([(*key, *total)], columns=columns)

    return df.groupBy(*workload.key_names).applyInPandasWithState(
        totals, workload.output, workload.state, "update", "NoTimeout"
    )


def spark_rows(df: DataFrame, workload: Workload) -> DataFrame:
    from pyspark.sql.streaming import StatefulProcessor

    processor = _row_processor(StatefulProcessor, workload)
    return df.groupBy(*workload.key_names).transformWithState(processor, workload.output, "Update", "none")


def spark_pandas(df: DataFrame, workload: Workload) -> DataFrame:
    from pyspark.sql.streaming import StatefulProcessor

    processor = _pandas_processor(StatefulProcessor, workload)
    return df.groupBy(*workload.key_names).transformWithStateInPandas(processor, workload.output, "Update", "none")


_SPARK_4: dict[str, Any] = {"needs_spark_4": True, "is_slow": True, "settings": ON_ROCKSDB}
CONTESTANTS = {
    c.name: c
    for c in (
        Contestant("native", "Spark groupBy().agg() on RocksDB", native, "update", settings=ON_ROCKSDB),
        Contestant("native_hdfs", "Spark groupBy().agg(), HDFS-backed", native, "update", settings=ON_HDFS),
        Contestant("aggregate", "aggregate", aggregate, is_ours=True),
        Contestant(
            "aggregate_partial",
            "aggregate, added up before the shuffle too",
            aggregate_partial,
            is_ours=True,
            arguments={"partial_aggregation": "True"},
        ),
        Contestant("identity", "a shuffle and mapInArrow of an identity", identity, gives="rows"),
        Contestant("stateless", "a shuffle and mapInArrow, without state", stateless, gives="totals of the batch"),
        Contestant("arrow", "transform_with_state_in_arrow", arrow, is_ours=True),
        Contestant("rows", "transform_with_state", rows, is_ours=True),
        Contestant("pandas", "transform_with_state_in_pandas", pandas, is_slow=True, is_ours=True),
        Contestant(
            "spark_pandas_state",
            "Spark applyInPandasWithState",
            spark_pandas_state,
            "update",
            **_SPARK_4,
        ),
        Contestant("spark_rows", "Spark transformWithState", spark_rows, "update", **_SPARK_4),
        Contestant("spark_pandas", "Spark transformWithStateInPandas", spark_pandas, "update", **_SPARK_4),
    )
}
YARDSTICKS = ("native", "spark_pandas_state", "spark_rows", "spark_pandas")


def checked(df: DataFrame) -> DataFrame:
    """Count the rows of each batch, and combine their hashes such that the order of rows does not matter."""
    return df.observe(
        CHECK, F.count(F.lit(1)).alias("rows"), F.expr(f"bit_xor(xxhash64({', '.join(df.columns)}))").alias("hashes")
    )
