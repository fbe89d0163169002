"""Running totals in a stream: the input, the expected output by numpy, and the contestants that compute them.

A key is a number below ``keys``; ``Workload.key_columns`` makes the key columns of it. All values are whole numbers, so
that results are compared exactly, by the number of rows of each batch and a hash of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from backends.encoding.key_groups import spark_xxhash64

Longs = npt.NDArray[np.int64]
Gives = Literal["totals", "rows"]
"""The output of a contestant: running totals, or the input."""


@dataclass(frozen=True)
class Aggregate:
    """One running figure: how it is made of a column (of ones if there is none), and how two are combined."""

    name: str
    combine: Any
    column: str = ""


TWO = (Aggregate("n", np.add), Aggregate("spent", np.add, "amount"))
FIVE = (
    *TWO,
    Aggregate("least", np.minimum, "amount"),
    Aggregate("most", np.maximum, "amount"),
    Aggregate("pieces", np.add, "pieces"),
)


@dataclass(frozen=True)
class Workload:
    """Rows of a batch: so many of ``keys``, each key as likely as any other; and ``hot_rows`` more, all of key 0."""

    rows: int
    keys: int
    key: Literal["long", "string", "columns"] = "long"
    aggregates: tuple[Aggregate, ...] = TWO
    hot_rows: int = 0

    @property
    def key_names(self) -> list[str]:
        return [name for name, _ in KEY_SCHEMAS[self.key]]

    @property
    def key_schema(self) -> str:
        """Return the key's columns with types, as Spark writes them."""
        return ", ".join(f"{name} {kind}" for name, kind in KEY_SCHEMAS[self.key])

    @property
    def value_names(self) -> list[str]:
        return list(dict.fromkeys(a.column for a in self.aggregates if a.column))

    @property
    def state(self) -> str:
        return ", ".join(f"{a.name} long" for a in self.aggregates)

    @property
    def output(self) -> str:
        return f"{self.key_schema}, {self.state}"

    @property
    def input(self) -> str:
        return ", ".join([self.key_schema, *(f"{name} long" for name in self.value_names)])

    def key_columns(self, ids: Longs) -> dict[str, pa.Array]:
        """Return the key columns of these keys; they differ for different keys."""
        return dict(zip(self.key_names, KEY_COLUMNS[self.key](ids), strict=True))

    def draw(self, rng: np.random.Generator) -> Batch:
        ids = rng.integers(0, self.keys, self.rows)
        if self.hot_rows:
            ids = rng.permutation(np.concatenate([ids, np.zeros(self.hot_rows, np.int64)]))
        return self.batch_of(ids, rng)

    def batch_of(self, ids: Longs, rng: np.random.Generator) -> Batch:
        """Return a batch with a row for each of these keys, and random values."""
        values = {name: rng.integers(1, LARGEST[name], len(ids)) for name in self.value_names}
        return Batch(ids.astype(np.int64), values)


LARGEST = {"amount": 100_000, "pieces": 10}
KEY_SCHEMAS = {
    "long": [("user", "long")],
    "string": [("user", "string")],
    "columns": [("shop", "long"), ("country", "string"), ("day", "int")],
}


def _padded(prefix: str, ids: Longs, width: int) -> pa.Array:
    return pc.binary_join_element_wise(prefix, pc.utf8_lpad(pa.array(ids).cast(pa.string()), width, "0"), "")


KEY_COLUMNS: dict[str, Callable[[Longs], list[pa.Array]]] = {
    "long": lambda ids: [pa.array(ids)],
    "string": lambda ids: [_padded("user-", ids, 12)],
    "columns": lambda ids: [
        pa.array(ids // 1500),
        _padded("c", ids % 50, 2),
        pa.array(ids // 50 % 30).cast(pa.int32()),
    ],
}


@dataclass(frozen=True)
class Batch:
    ids: Longs
    values: Mapping[str, Longs]

    def table(self, workload: Workload, rows: slice = slice(None)) -> pa.Table:
        columns = {name: pa.array(values[rows]) for name, values in self.values.items()}
        return pa.table({**workload.key_columns(self.ids[rows]), **columns})


class Expected:
    """Running totals by numpy, and the expected output of each batch, (rows, hash), by kind of output."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.checks: dict[Gives, list[tuple[int, int]]] = {"totals": [], "rows": []}
        self._totals = {a.name: np.zeros(workload.keys, np.int64) for a in workload.aggregates}
        self._seen = np.zeros(workload.keys, bool)

    def add(self, batch: Batch) -> None:
        order = np.argsort(batch.ids, kind="stable")
        ids = batch.ids[order]
        starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
        touched = ids[starts]
        old = self._seen[touched]
        totals = {}
        for a in self.workload.aggregates:
            values = batch.values[a.column][order] if a.column else np.ones(len(ids), np.int64)
            added = a.combine.reduceat(values, starts)
            totals[a.name] = np.where(old, a.combine(self._totals[a.name][touched], added), added)
            self._totals[a.name][touched] = totals[a.name]
        self._seen[touched] = True
        keys = self.workload.key_columns(touched)
        self.checks["totals"].append(_check({**keys, **totals}))
        self.checks["rows"].append(_check({**self.workload.key_columns(batch.ids), **batch.values}))

    def of_all(self) -> tuple[int, int]:
        """Return the expected output of all batches at once."""
        keys = np.flatnonzero(self._seen)
        return _check({**self.workload.key_columns(keys), **{name: v[keys] for name, v in self._totals.items()}})


def _check(columns: Mapping[str, Any]) -> tuple[int, int]:
    arrays = [values if isinstance(values, pa.Array) else pa.array(values) for values in columns.values()]
    hashes = spark_xxhash64(pa.RecordBatch.from_arrays(arrays, list(columns)))
    return len(hashes), int(np.bitwise_xor.reduce(hashes))


# -- the contestants: the same work, written in each way that Spark has, and in ours

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
        Contestant("arrow", "transform_with_state_in_arrow", arrow, is_ours=True),
        Contestant("rows", "transform_with_state", rows, is_ours=True),
        Contestant("pandas", "transform_with_state_in_pandas", pandas, is_slow=True, is_ours=True),
        Contestant("spark_pandas_state", "Spark applyInPandasWithState", spark_pandas_state, "update", **_SPARK_4),
        Contestant("spark_rows", "Spark transformWithState", spark_rows, "update", **_SPARK_4),
        Contestant("spark_pandas", "Spark transformWithStateInPandas", spark_pandas, "update", **_SPARK_4),
    )
}


def checked(df: DataFrame) -> DataFrame:
    """Count the rows of each batch, and combine their hashes such that the order of rows does not matter."""
    return df.observe(
        CHECK, F.count(F.lit(1)).alias("rows"), F.expr(f"bit_xor(xxhash64({', '.join(df.columns)}))").alias("hashes")
    )
