"""The contestants of ``stateful.py``: one running count and sum by user, in every way there is to write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from backends.key_groups import spark_xxhash64

INPUT = "user long, amount long"
OUTPUT = "user long, n long, spent long"
STATE = "n long, spent long"
CHECK = "check"

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Contestant:
    """One way to write the query: ``make`` from the input, started with Spark's ``output_mode``.

    ``is_slow``: it needs many seconds a batch, and takes fewer batches. Without ``keeps_state`` its
    results are those of each batch alone: what shuffle and Python cost by themselves.
    """

    name: str
    label: str
    make: Callable[[DataFrame], DataFrame]
    output_mode: str = "append"
    needs_spark_4: bool = False
    is_slow: bool = False
    keeps_state: bool = True


def native(df: DataFrame) -> DataFrame:
    """Spark's own aggregation, in the JVM."""
    return df.groupBy("user").agg(F.count(F.lit(1)).alias("n"), F.sum("amount").alias("spent"))


def aggregate(df: DataFrame) -> DataFrame:
    from spark_bridge import aggregate
    from spark_bridge import functions as S

    return aggregate(df, by="user", operator="totals", n=S.count(), spent=S.sum("amount"))


def stateless(df: DataFrame) -> DataFrame:
    """The same shuffle and a Python stage that adds up each batch by itself: what is left if state costs nothing."""
    import pyarrow as pa

    def totals(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = list(batches)
        if found:
            answer = pa.Table.from_batches(found).group_by("user").aggregate([([], "count_all"), ("amount", "sum")])
            yield from (
                answer.select(["user", "count_all", "amount_sum"]).rename_columns(["user", "n", "spent"]).to_batches()
            )

    return df.repartition(F.col("user")).mapInArrow(totals, OUTPUT)


def _row_processor(base: Any) -> Any:
    class RunningTotals(base):
        """The processor that a user of Spark 4 would write."""

        def init(self, handle: Any) -> None:
            self.total = handle.getValueState("total", STATE)

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            n, spent = self.total.get() or (0, 0)
            for row in rows:
                n += 1
                spent += row.amount
            self.total.update((n, spent))
            yield Row(user=key[0], n=n, spent=spent)

        def close(self) -> None:
            pass

    return RunningTotals()


def _pandas_processor(base: Any) -> Any:
    import pandas as pd

    class RunningTotals(base):
        """The same on frames."""

        def init(self, handle: Any) -> None:
            self.total = handle.getValueState("total", STATE)

        def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
            n, spent = self.total.get() or (0, 0)
            for frame in rows:
                n += len(frame)
                spent += int(frame["amount"].sum())
            self.total.update((n, spent))
            yield pd.DataFrame({"user": [key[0]], "n": [n], "spent": [spent]})

        def close(self) -> None:
            pass

    return RunningTotals()


def arrow(df: DataFrame) -> DataFrame:
    from spark_bridge import ArrowBatch, ArrowResult, ArrowStatefulProcessor, transform_with_state_in_arrow

    class RunningTotals(ArrowStatefulProcessor):
        """All keys at once: every key has rows, for there are no timers."""

        def init(self, handle: Any) -> None:
            handle.declare_state(STATE)

        def process(self, batch: ArrowBatch) -> ArrowResult | None:
            if not batch.num_keys:
                return None
            amounts = batch.rows["amount"].to_numpy()
            n = np.diff(batch.offsets) + batch.state["n"].fill_null(0).to_numpy()
            spent = np.add.reduceat(amounts, batch.offsets[:-1]) + batch.state["spent"].fill_null(0).to_numpy()
            state = pa.table({"n": n, "spent": spent})
            return ArrowResult(output=state.add_column(0, "user", batch.keys["user"]), state=state)

    return transform_with_state_in_arrow(df, "user", RunningTotals(), OUTPUT, operator="arrow_totals")


def rows(df: DataFrame) -> DataFrame:
    from spark_bridge import StatefulProcessor, transform_with_state

    return transform_with_state(df, "user", _row_processor(StatefulProcessor), OUTPUT, operator="row_totals")


def pandas(df: DataFrame) -> DataFrame:
    from spark_bridge import StatefulProcessor, transform_with_state_in_pandas

    return transform_with_state_in_pandas(
        df, "user", _pandas_processor(StatefulProcessor), OUTPUT, operator="pandas_totals"
    )


def spark_rows(df: DataFrame) -> DataFrame:
    from pyspark.sql.streaming import StatefulProcessor

    return df.groupBy("user").transformWithState(_row_processor(StatefulProcessor), OUTPUT, "Update", "none")


def spark_pandas(df: DataFrame) -> DataFrame:
    from pyspark.sql.streaming import StatefulProcessor

    return df.groupBy("user").transformWithStateInPandas(_pandas_processor(StatefulProcessor), OUTPUT, "Update", "none")


CONTESTANTS = {
    c.name: c
    for c in (
        Contestant("native", "Spark groupBy().agg()", native, "update"),
        Contestant("aggregate", "aggregate", aggregate),
        Contestant("stateless", "a shuffle and mapInArrow, without state", stateless, keeps_state=False),
        Contestant("arrow", "transform_with_state_in_arrow", arrow),
        Contestant("rows", "transform_with_state", rows),
        Contestant("pandas", "transform_with_state_in_pandas", pandas, is_slow=True),
        Contestant("spark_rows", "Spark transformWithState", spark_rows, "update", needs_spark_4=True, is_slow=True),
        Contestant(
            "spark_pandas", "Spark transformWithStateInPandas", spark_pandas, "update", needs_spark_4=True, is_slow=True
        ),
    )
}


def checked(df: DataFrame) -> DataFrame:
    """Count the rows of each batch, and combine their hashes in a way that their order does not matter to."""
    return df.observe(
        CHECK, F.count(F.lit(1)).alias("rows"), F.expr("bit_xor(xxhash64(user, n, spent))").alias("hashes")
    )


def expected_checks(
    batches: Sequence[tuple[Longs, Longs]], keys: int, *, keeps_state: bool = True
) -> list[tuple[int, int]]:
    """What ``checked`` must see of each batch of (users, amounts), computed here with numpy."""
    n, spent = np.zeros(keys, np.int64), np.zeros(keys, np.int64)
    checks = []
    for users, amounts in batches:
        if not keeps_state:
            n[:], spent[:] = 0, 0
        n += np.bincount(users, minlength=keys)
        np.add.at(spent, users, amounts)
        touched = np.unique(users)
        columns = [pa.array(values) for values in (touched, n[touched], spent[touched])]
        hashes = spark_xxhash64(pa.RecordBatch.from_arrays(columns, ["user", "n", "spent"]))
        checks.append((len(touched), int(np.bitwise_xor.reduce(hashes))))
    return checks
