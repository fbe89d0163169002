"""``join`` as a stream: the rows of Spark's own join of the same files, also through restarts and rescaling."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark_bridge import join
from tests.effort import only_thorough
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.streams.test_windows_stream import Running, flat, start

pytestmark = [pytest.mark.spark]

START = dt.datetime(2024, 3, 9, 23, 50, tzinfo=dt.timezone.utc)
SCHEMAS = ("k long, lt timestamp, a long", "k long, b string, rt timestamp")
WITHIN = ("-10 seconds", "30 seconds")
FILES = 4


class Sides:
    """Two streams whose files are a minute apart. Rows are either late or not, whichever batch has raised the watermark
    last: those without data do it as they like.
    """

    def __init__(self, make_stream: Callable[..., Stream], seed: int = 3) -> None:
        self.streams = [make_stream(schema) for schema in SCHEMAS]
        self.random = np.random.default_rng(seed)
        self.files = 0

    def add(self, files: int = 1, rows: int = 60) -> None:
        """Add files of both sides."""
        for _ in range(files):
            for side, stream in enumerate(self.streams):
                offsets = self.random.integers(-15, 60, rows)
                if self.files >= 2:
                    offsets[:5] = self.random.integers(-300, -90, 5)
                offsets[-1] = 59
                stream.add([self.row(side, self.files * 60 + int(offset)) for offset in offsets])
            self.files += 1

    def row(self, side: int, at: int) -> tuple[Any, ...]:
        """A row of a side; some have no key."""
        key = None if self.random.random() < 0.05 else int(self.random.integers(0, 12))
        time, value = START + dt.timedelta(seconds=at), int(self.random.integers(1 << 40))
        return (key, time, value) if side == 0 else (key, str(value), time)

    def end(self) -> None:
        """Add rows far ahead, which nothing matches."""
        for side, stream in enumerate(self.streams):
            time = START + dt.timedelta(hours=3 + side)
            stream.add([(99, time, 0) if side == 0 else (98, "0", time)])

    def read(self) -> tuple[DataFrame, DataFrame]:
        """Both streams with their watermarks."""
        left, right = (stream.read() for stream in self.streams)
        return left.withWatermark("lt", "20 seconds"), right.withWatermark("rt", "25 seconds")

    def native(self, how: str) -> DataFrame:
        """Spark's own join."""
        left, right = self.read()
        right = right.withColumnRenamed("k", "rk")
        condition = (
            (F.col("k") == F.col("rk"))
            & (F.col("rt") >= F.col("lt") - F.expr("interval 10 seconds"))
            & (F.col("rt") <= F.col("lt") + F.expr("interval 30 seconds"))
        )
        joined = left.join(right, condition, "left" if how == "left_anti" else how)
        if how == "left_anti":  # Spark has none of streams
            joined = joined.where("rt is null")
        if how in ("left_semi", "left_anti"):
            return joined.select("k", "lt", "a")
        return joined.select(F.coalesce("k", "rk").alias("k"), "lt", "a", "b", "rt")

    def ours(self, how: str, **options: Any) -> DataFrame:
        """The same join by the state store."""
        return join(*self.read(), on="k", how=how, within=WITHIN, operator="joined", **options)


@pytest.fixture
def sides(make_stream: Callable[..., Stream]) -> Sides:
    return Sides(make_stream)


def begin(sides: Sides, df: DataFrame, name: str) -> Running:
    return start(df, sides.streams[0], name)


def same(ours: Running, native: Running, at_least: int = 30) -> Counter[Any]:
    """Both give the same rows in the end."""
    expected = flat(native.finish())
    assert sum(expected.values()) > at_least
    found = flat(ours.finish(sum(expected.values())))
    assert not found - expected, f"too many: {found - expected}"
    assert not expected - found, f"missing: {expected - found}"
    return found


@pytest.mark.spark42
@pytest.mark.parametrize("how", ["full", "left_semi", *map(only_thorough, ("inner", "left", "right", "left_anti"))])
def test_rows_are_those_of_sparks_own_join(sides: Sides, how: str) -> None:
    sides.add(FILES)
    sides.end()
    same(begin(sides, sides.ours(how), "ours"), begin(sides, sides.native(how), "native"))
