"""Programs in Spark's own operators and in ours, whose output is the same, and the rows that they are given."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pandas as pd
import pyspark
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_bridge import (
    StatefulProcessor,
    StatefulProcessorHandle,
    aggregate,
    deduplicate,
    join,
    transform_with_state,
    transform_with_state_in_pandas,
)
from spark_bridge import functions as S
from tests.spark_bridge.streams.processors import native_of

INPUT = "user long, amount double, price decimal(10,2), cents decimal(6,2), ts timestamp"
START = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
BATCHES_BEFORE = 3
ROWS = 40
PROVIDERS = "org.apache.spark.sql.execution.streaming.state."


def rows(batch: int) -> list[tuple[Any, ...]]:
    """Rows of a batch: ten minutes each, some of them late, some equal to earlier ones, some with nulls."""
    return [
        (
            None if i % 11 == 0 else i % 5,
            None if i % 7 == 0 else float(i % 13 + batch),
            Decimal(i) / 4,
            None if i % 4 == 0 else Decimal(i) / 4,
            START + dt.timedelta(minutes=10 * batch + i % 9 - (20 if i % 10 == 3 else 0)),
        )
        for i in range(ROWS)
    ] + [(7, 5.0, Decimal(1), Decimal(1), START + dt.timedelta(minutes=10 * batch + 8))] * (200 if batch == 2 else 0)


LAST = [(99, 1.0, Decimal(1), Decimal(1), START + dt.timedelta(days=30))]
"""Lets the watermark pass everything before it."""


class Totals(StatefulProcessor):
    """One variable of each kind, and a timer."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.n = handle.getValueState("n", "n long")
        self.seen = handle.getListState("seen", "amount double")
        self.by_minute = handle.getMapState("by_minute", "minute int", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        data = pd.concat(list(rows)).sort_values(["ts", "amount"])
        n = (self.n.get()[0] if self.n.exists() else 0) + len(data)
        self.n.update((n,))
        for amount in data["amount"].dropna():
            self.seen.appendValue((amount,))
        for minute in data["ts"].dt.minute:
            before = self.by_minute.getValue((minute,)) if self.by_minute.containsKey((minute,)) else (0,)
            self.by_minute.updateValue((minute,), (before[0] + 1,))
        self.handle.registerTimer(int(data["ts"].max().timestamp() * 1000) + 60_000)
        elements = [one[0] for one in self.seen.get()]
        minutes = sorted((k[0], v[0]) for k, v in self.by_minute.iterator())
        yield pd.DataFrame({"user": [key[0]], "n": [n], "text": [f"{sum(elements)} {elements[:5]} {minutes}"]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        expires = expiredTimerInfo.getExpiryTimeInMs()
        yield pd.DataFrame({"user": [key[0]], "n": [-1], "text": [str(expires)]})

    def close(self) -> None:
        pass


def counted(key: Any, frames: Any, state: Any) -> Iterator[pd.DataFrame]:
    """Counts the rows of a key: a function of ``applyInPandasWithState``."""
    n = (state.get[0] if state.exists else 0) + sum(len(frame) for frame in frames)
    state.update((n, f"{n} rows"))
    yield pd.DataFrame({"user": [key[0]], "n": [n]})


class Counted(StatefulProcessor):
    """The processor that takes over ``counted``."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("state", "n long, s string")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        n = (self.state.get()[0] if self.state.exists() else 0) + sum(1 for _ in rows)
        self.state.update((n, f"{n} rows"))
        yield pyspark.sql.Row(user=key[0], n=n)

    def close(self) -> None:
        pass


class Expiring(StatefulProcessor):
    """One variable of each kind, whose values expire long after the test."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        hour = 3_600_000
        self.n = handle.getValueState("n", "n long", hour)
        self.seen = handle.getListState("seen", "amount double", hour)
        self.by_amount = handle.getMapState("by_amount", "amount string", "n long", hour)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        data = pd.concat(list(rows)).sort_values(["ts", "amount"])
        n = (self.n.get()[0] if self.n.exists() else 0) + len(data)
        self.n.update((n,))
        for amount in data["amount"].dropna():
            self.seen.appendValue((amount,))
            before = self.by_amount.getValue((str(amount),)) if self.by_amount.containsKey((str(amount),)) else (0,)
            self.by_amount.updateValue((str(amount),), (before[0] + 1,))
        text = f"{sum(one[0] for one in self.seen.get())} {sorted((k[0], v[0]) for k, v in self.by_amount.iterator())}"
        yield pd.DataFrame({"user": [key[0]], "n": [n], "text": [text]})

    def close(self) -> None:
        pass


def of_processor(df: DataFrame) -> DataFrame:
    return df.groupBy("user").transformWithStateInPandas(
        native_of(Totals), "user long, n long, text string", "append", "eventTime"
    )


def watermarked(df: DataFrame, delay: str = "5 minutes") -> DataFrame:
    return df.withWatermark("ts", delay)


def sides(df: DataFrame, key: str | None = None) -> tuple[DataFrame, DataFrame]:
    """The rows of a stream as two sides of a join: under names of their own, or with a common key."""
    left, right = (watermarked(df.where(f"amount {by} 4")) for by in ("<", ">="))
    return (
        left.selectExpr(f"user AS {key or 'lu'}", "amount AS la", "ts AS lt"),
        right.selectExpr(f"user AS {key or 'ru'}", "amount AS ra", "ts AS rt"),
    )


def joined_by_spark(df: DataFrame, how: str) -> DataFrame:
    left, right = sides(df)
    joined = left.join(right, F.expr("lu = ru AND rt BETWEEN lt AND lt + INTERVAL 3 MINUTES"), how)
    if how == "leftSemi":
        return joined
    return joined.select(F.coalesce("lu", "ru").alias("user"), "la", "lt", "ra", "rt")


def joined_here(df: DataFrame, how: str) -> DataFrame:
    left, right = sides(df, "user")
    return join(left, right, on="user", operator="totals", how=how, within=("0 seconds", "3 minutes"))


Transform = Callable[[DataFrame], DataFrame]
CASES: dict[str, tuple[str, Transform, Transform]] = {
    "aggregate": (
        "update",
        lambda df: df.groupBy("user").agg(
            F.count("*"),
            F.sum("amount"),
            F.avg("amount"),
            F.min("amount"),
            F.max("ts"),
            F.count("amount"),
            F.sum("price"),
            F.avg("price"),
            F.sum("cents"),
            F.avg("cents"),
            F.stddev("amount"),
        ),
        lambda df: aggregate(
            df,
            by="user",
            operator="totals",
            n=S.count(),
            total=S.sum("amount"),
            mean=S.mean("amount"),
            least=S.min("amount"),
            last=S.max("ts"),
            known=S.count("amount"),
            price=S.sum("price"),
            mean_price=S.mean("price"),
            cents=S.sum("cents"),
            mean_cents=S.mean("cents"),
            deviation=S.stddev("amount"),
        ),
    ),
    "all rows": (
        "complete",
        lambda df: df.groupBy().agg(F.count("*"), F.sum("amount")),
        lambda df: aggregate(df, by=[], operator="totals", output_mode="complete", n=S.count(), total=S.sum("amount")),
    ),
    "windows": (
        "append",
        lambda df: watermarked(df).groupBy(F.window("ts", "5 minutes"), "user").agg(F.count("*"), F.sum("amount")),
        lambda df: aggregate(
            watermarked(df),
            by=[S.window("ts", "5 minutes"), "user"],
            operator="totals",
            output_mode="append",
            n=S.count(),
            total=S.sum("amount"),
        ),
    ),
    "sessions": (
        "append",
        lambda df: watermarked(df).groupBy(F.session_window("ts", "3 minutes"), "user").agg(F.count("*")),
        lambda df: aggregate(
            watermarked(df),
            by=[S.session_window("ts", "3 minutes"), "user"],
            operator="totals",
            output_mode="append",
            n=S.count(),
        ),
    ),
    "sessions after the key": (
        "append",
        lambda df: watermarked(df).groupBy("user", F.session_window("ts", "3 minutes")).agg(F.count("*")),
        lambda df: aggregate(
            watermarked(df),
            by=["user", S.session_window("ts", "3 minutes")],
            operator="totals",
            output_mode="append",
            n=S.count(),
        ),
    ),
    "TTL": (
        "update",
        lambda df: (
            df.where("user is not null")
            .groupBy("user")
            .transformWithStateInPandas(
                native_of(Expiring), "user long, n long, text string", "update", "processingTime"
            )
        ),
        lambda df: transform_with_state_in_pandas(
            df.where("user is not null"),
            "user",
            Expiring(),
            "user long, n long, text string",
            operator="totals",
            time_mode="processingTime",
        ),
    ),
    "duplicates": (
        "append",
        lambda df: df.select("user", "amount").dropDuplicates(["user", "amount"]),
        lambda df: deduplicate(df.select("user", "amount"), ["user", "amount"], operator="totals"),
    ),
    "duplicates within the watermark": (
        "append",
        # No row is late, and no key is forgotten before the last batch: Spark forgets keys one batch earlier.
        lambda df: watermarked(df, "2 hours").select("user", "ts").dropDuplicatesWithinWatermark(["user"]),
        lambda df: deduplicate(
            watermarked(df, "2 hours").select("user", "ts"), ["user"], operator="totals", within="2 hours"
        ),
    ),
    "processor": (
        "append",
        # Spark's pandas form takes each row with a null key as a key of its own.
        lambda df: of_processor(watermarked(df.where("user is not null"))),
        lambda df: transform_with_state_in_pandas(
            watermarked(df.where("user is not null")),
            "user",
            Totals(),
            "user long, n long, text string",
            operator="totals",
            time_mode="eventTime",
        ),
    ),
    "inner join": ("append", lambda df: joined_by_spark(df, "inner"), lambda df: joined_here(df, "inner")),
    "outer join": ("append", lambda df: joined_by_spark(df, "fullOuter"), lambda df: joined_here(df, "full")),
    "semi join": ("append", lambda df: joined_by_spark(df, "leftSemi"), lambda df: joined_here(df, "left_semi")),
    "group state": (
        "update",
        lambda df: df.groupBy("user").applyInPandasWithState(
            counted, "user long, n long", "n long, s string", "update", "NoTimeout"
        ),
        lambda df: transform_with_state(df, "user", Counted(), "user long, n long", operator="totals"),
    ),
}
CASES |= {f"{case}, format 3": CASES[case] for case in ("outer join", "inner join", "semi join")}
