"""Rows of Arrow as DataFrames and back, as PySpark's functions on pandas have them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from spark_bridge.stateful.ddl import struct_of
from spark_bridge.stateful.pandas_values import PandasCodec, rows_of
from spark_bridge.stateful.row_values import RowCodec

NOON = dt.datetime(2020, 7, 1, 12)
UTC_NOON = NOON.replace(tzinfo=dt.timezone.utc)


def codec(fields: str, zone: str = "America/New_York") -> PandasCodec:
    return PandasCodec(struct_of(fields), zone)


def back(made: PandasCodec, *frames: pd.DataFrame) -> pa.RecordBatch:
    """The frames as a batch."""
    columns = [made.to_columns(f) for f in frames]
    return made.to_batch(list(zip(*columns, strict=True)))


def frame_of(made: PandasCodec, rows: Sequence[tuple[Any, ...]]) -> pd.DataFrame:
    return made.to_frame(RowCodec(made.struct).to_batch(rows))


def test_types_are_those_of_pyspark() -> None:
    made = codec(
        "i int, n int, b boolean, d double, s string, day date, at timestamp, wall timestamp_ntz, x decimal(5,2)"
    )
    row = (1, 1, True, 0.5, "a", dt.date(2020, 7, 1), UTC_NOON, NOON, Decimal("1.50"))
    frame = frame_of(made, [row, (2, *[None] * 8)])
    kinds = ["int32", "float64", "object", "float64", "object", "object", "datetime64[ns]", "datetime64[ns]", "object"]
    assert list(map(str, frame.dtypes)) == kinds
    assert frame["at"][0] == pd.Timestamp("2020-07-01 08:00"), "in the session's time zone"
    assert frame["wall"][0] == pd.Timestamp(NOON)
    assert (frame["day"][0], frame["x"][0]) == (dt.date(2020, 7, 1), Decimal("1.50"))
    assert frame["at"].isna().tolist() == [False, True]
    assert back(made, frame) == RowCodec(made.struct).to_batch([row, (2, *[None] * 8)])


def test_nested_values_are_dicts_and_arrays() -> None:
    made = codec("p struct<x:int,at:timestamp>, tags array<string>, times array<timestamp>, m map<string,timestamp>")
    row = ((1, UTC_NOON), ["a", None], [UTC_NOON, None], {"k": UTC_NOON})
    frame = frame_of(made, [row, (None,) * 4])
    local = dt.datetime(2020, 7, 1, 8)
    assert frame["p"][0] == {"x": 1, "at": local}
    assert isinstance(frame["tags"][0], np.ndarray)
    assert frame["tags"][0].tolist() == ["a", None]
    assert pd.Timestamp(frame["times"][0][0]) == pd.Timestamp(local)
    assert frame["m"][0] == {"k": local}
    assert frame.loc[1].isna().all()
    again = back(
        made,
        pd.DataFrame({"p": [{"x": 1, "at": local}, None], "tags": [["a", None], None]}).assign(
            times=[[local, None], None], m=[{"k": local}, None]
        ),
    )
    assert again == RowCodec(made.struct).to_batch([row, (None,) * 4])


def test_frames_may_be_written_to() -> None:
    frame = frame_of(codec("a long, b long, c double, d string"), [(i, i, i / 2, "x") for i in range(6)])
    part = rows_of(frame, 2, 5)
    part["a"] += 1
    part.loc[0, "c"] = 9.0
    part.loc[1, "d"] = "y"
    part["e"] = 7
    assert part.index.tolist() == [0, 1, 2]
    assert part["a"].tolist() == [3, 4, 5]
    rest = rows_of(frame, 5, 6)
    assert rest.to_dict("list") == {"a": [5], "b": [5], "c": [2.5], "d": ["x"]}


@pytest.mark.parametrize(
    ("kind", "values", "kept"),
    [
        ("long", [1.0, np.nan], [1, None]),
        ("long", pd.array([2**60 + 1, None], "Int64"), [2**60 + 1, None]),
        ("double", [1, 2], [1.0, 2.0]),
        ("string", [1, 2], ["1", "2"]),
        ("string", pd.Categorical(["a", None]), ["a", None]),
        ("string", pd.array(["a", None], "string"), ["a", None]),
        ("boolean", [True, None], [True, None]),
        ("date", pd.to_datetime(["2020-07-01", None]), [dt.date(2020, 7, 1), None]),
        ("timestamp", pd.to_datetime(["2020-07-01 08:00", None]), [UTC_NOON, None]),
        ("timestamp", pd.to_datetime(["2020-07-01 12:00", None], utc=True), [UTC_NOON, None]),
        ("timestamp", pd.Series([NOON - dt.timedelta(hours=4), None], dtype=object), [UTC_NOON, None]),
        ("timestamp", pd.to_datetime(["2020-11-01 01:30"]), [dt.datetime(2020, 11, 1, 6, 30, tzinfo=dt.timezone.utc)]),
        ("timestamp", pd.to_datetime(["2020-03-08 02:30"]), [dt.datetime(2020, 3, 8, 7, tzinfo=dt.timezone.utc)]),
        ("timestamp_ntz", pd.to_datetime(["2020-07-01 12:00", None]), [NOON, None]),
        ("decimal(5,2)", [Decimal("1.005"), None], [Decimal("1.01"), None]),
        ("binary", [b"x", None], [b"x", None]),
        ("array<double>", [np.array([1.0, np.nan]), None], [[1.0, None], None]),
        ("map<string,int>", [{"a": 1}, None], [[("a", 1)], None]),
    ],
)
def test_what_users_give_is_taken_as_pyspark_takes_it(kind: str, values: Any, kept: list[Any]) -> None:
    found = back(codec(f"v {kind}"), pd.DataFrame({"v": values})).column(0).to_pylist()
    if kind == "array<double>":
        assert np.isnan(found[0][1]) or found[0][1] is None
        found[0][1] = None
    assert found == kept


@pytest.mark.parametrize(
    ("kind", "values", "error", "words"),
    [
        ("long", [1.5], ValueError, ["'v'", "1.5"]),
        ("long", ["x"], TypeError, ["'v'", "'x' (str)"]),
        ("tinyint", [300], ValueError, ["'v'", "300"]),
        ("double", ["x"], TypeError, ["'v'", "'x'"]),
        ("timestamp", ["when"], TypeError, ["'v'", "timestamp", "when"]),
        ("long not null", [1.0, np.nan], ValueError, ["'v'", "not nullable"]),
        ("array<int>", [5], TypeError, ["'v' is an array"]),
    ],
)
def test_what_does_not_fit_is_named(kind: str, values: list[Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        back(codec(f"v {kind}"), pd.DataFrame({"v": values}))
    for word in words:
        assert word in str(raised.value)


def test_columns_go_by_name_or_position() -> None:
    made = codec("a long, b string")
    named = pd.DataFrame({"b": ["x"], "a": [1]})
    numbered = pd.DataFrame([[2, "y"]])
    assert back(made, named, numbered, named).to_pylist() == [
        {"a": 1, "b": "x"},
        {"a": 2, "b": "y"},
        {"a": 1, "b": "x"},
    ]
    for wrong in (pd.DataFrame({"a": [1]}), pd.DataFrame([[1]]), pd.DataFrame({"a": [1], 1: ["x"]})):
        with pytest.raises(ValueError, match="DataFrame has"):
            made.to_columns(wrong)
    assert made.to_columns(pd.DataFrame()) == []


def test_frames_of_different_types_lose_nothing() -> None:
    frames = [
        pd.DataFrame({"v": [2**60 + 1]}),
        pd.DataFrame({"v": [np.nan]}),
        pd.DataFrame({"v": [True]}).astype(object),
    ]
    with pytest.raises(TypeError, match="True"):
        back(codec("v long"), *frames)
    assert back(codec("v long"), *frames[:2]).column(0).to_pylist() == [2**60 + 1, None]


def test_instants_that_pandas_cannot_hold_are_an_error() -> None:
    made = codec("at timestamp")
    with pytest.raises(pa.ArrowInvalid, match="out of bounds"):
        frame_of(made, [(dt.datetime(9000, 1, 1),)])
