"""Rows of Arrow as DataFrames and back, as PySpark's functions on pandas have them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pandas.core.internals import BlockManager
from pandas.core.internals.api import make_block

from spark_bridge.stateful.ddl import struct_of
from spark_bridge.stateful.pandas_values import PandasCodec, rows_of_frame
from spark_bridge.stateful.state_values import RowCodec
from tests.effort import examples

NOON = dt.datetime(2020, 7, 1, 12)
UTC_NOON = NOON.replace(tzinfo=dt.timezone.utc)


def codec(fields: str, zone: str = "America/New_York") -> PandasCodec:
    return PandasCodec(struct_of(fields), zone)


def back(made: PandasCodec, *frames: pd.DataFrame) -> pa.RecordBatch:
    """The frames as a batch."""
    return made.to_batch([made.to_columns(f) for f in frames])


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
    part = rows_of_frame(frame, 2, 5)
    part["a"] += 1
    part.loc[0, "c"] = 9.0
    part.loc[1, "d"] = "y"
    part["e"] = 7
    assert part.index.tolist() == [0, 1, 2]
    assert part["a"].tolist() == [3, 4, 5]
    rest = rows_of_frame(frame, 5, 6)
    assert rest.to_dict("list") == {"a": [5], "b": [5], "c": [2.5], "d": ["x"]}


def test_parts_of_a_frame_share_nothing_that_shows() -> None:
    made = codec("a long, at timestamp, b long, d string")
    frame = frame_of(made, [(i, UTC_NOON, 10 * i, "x") for i in range(6)])
    part = rows_of_frame(frame, 2, 5)
    pd.testing.assert_frame_equal(part, frame.iloc[2:5].reset_index(drop=True))
    assert type(part.index) is pd.RangeIndex
    part.index.name, part.columns.name = "row", "column"
    part["a"] = ["text"] * 3  # another type, in a separate block
    part.insert(0, "first", 1.5)
    del part["at"]
    assert part.columns.tolist() == ["first", "a", "b", "d"]
    assert part["b"].tolist() == [20, 30, 40]
    other = rows_of_frame(frame, 2, 5)
    pd.testing.assert_frame_equal(other, frame.iloc[2:5].reset_index(drop=True))
    assert (other.index.name, other.columns.name) == (None, None)
    assert rows_of_frame(frame, 3, 3).empty


def test_parts_of_a_frame_may_be_copied_on_write() -> None:
    with pd.option_context("mode.copy_on_write", True):
        frame = frame_of(codec("a long, b long"), [(i, i) for i in range(4)])
        part, same = rows_of_frame(frame, 1, 3), rows_of_frame(frame, 1, 3)
        part.loc[0, "a"] = 9
        assert part["a"].tolist() == [9, 2]
        assert same["a"].tolist() == [1, 2]


def out_of_order() -> pd.DataFrame:
    """A frame whose only block has the columns the other way round, and in strides."""
    values = np.array([[3, 4], [0, 0], [1, 2]])[::2]
    block = make_block(values, placement=np.array([1, 0]))
    frame: pd.DataFrame = pd.DataFrame._from_mgr(  # type: ignore[attr-defined]
        BlockManager((block,), [pd.Index(["a", "b"]), pd.RangeIndex(2)]), []
    )
    return frame


TWO = {"a": [1, 2], "b": [3, 4]}
FRAMES: dict[str, Callable[[], pd.DataFrame]] = {
    "one block": lambda: pd.DataFrame(TWO),
    "by position": lambda: pd.DataFrame(np.array([[1, 3], [2, 4]])),
    "labels": lambda: pd.DataFrame([[1, 3], [2, 4]], columns=pd.Index(["a", "b"], dtype="category")),
    "other order": lambda: pd.DataFrame({"b": [3, 4], "a": [1, 2]}),
    "turned round": lambda: pd.DataFrame({"b": [3, 4], "a": [1, 2]}).iloc[:, ::-1],
    "block out of order": out_of_order,
    "more columns": lambda: pd.DataFrame({"x": [0, 0], "b": [3, 4], "a": [1, 2]}),
    "a name twice": lambda: pd.DataFrame([[1, 9, 3], [2, 9, 4]], columns=["a", "a", "b"]),
    "several blocks": lambda: pd.DataFrame({"x": [0, 0], "b": [3, 4]}).assign(y=1.5, a=[1, 2]),
    "other rows": lambda: pd.DataFrame({"a": [0, 1, 0, 2], "b": [0, 3, 0, 4]}, index=list("abcd")).iloc[1::2],
    "ints": lambda: pd.DataFrame(TWO, dtype="int8"),
    "bytes swapped": lambda: pd.DataFrame(np.array([[1, 3], [2, 4]], ">i8"), columns=["a", "b"]),
    "floats": lambda: pd.DataFrame(TWO, dtype="float64"),
    "missing": lambda: pd.DataFrame({"a": [1, np.nan], "b": [np.nan, 4]}),
    "large": lambda: pd.DataFrame({"a": [2**60 + 1, 2**60 + 3], "b": [0, 1]}),
    "large unsigned": lambda: pd.DataFrame({"a": [2**60 + 1, 2**60 + 3], "b": [0, 1]}, dtype="uint64"),
    "objects": lambda: pd.DataFrame({"a": [1, None], "b": [2**60 + 1, 4]}, dtype=object),
    "objects and ints": lambda: pd.DataFrame({"a": pd.Series([None, 2], dtype=object), "b": [3, 4]}),
    "nullable": lambda: pd.DataFrame({"a": [1, None], "b": [2**60 + 1, 4]}, dtype="Int64"),
    "nullable and ints": lambda: pd.DataFrame({"a": pd.array([1, None], "Int64"), "b": [3, 4]}),
    "categories": lambda: pd.DataFrame({"a": pd.Categorical([1, None]), "b": pd.Categorical([3, 4])}),
    "no rows": lambda: pd.DataFrame({"a": [], "b": []}),
}


def columns_of(frame: pd.DataFrame) -> list[pd.Series]:
    """The columns a and b, or else the first and the second, each by itself."""
    by_name = "a" in frame.columns
    places = [frame.columns.tolist().index(label) for label in "ab"] if by_name else [0, 1]
    return [frame.iloc[:, place].reset_index(drop=True) for place in places]


@pytest.mark.parametrize("name", FRAMES)
def test_columns_of_a_frame_are_copies_in_their_own_types(name: str) -> None:
    frame = FRAMES[name]()
    kept = [column.copy() for column in columns_of(frame)]
    found = codec("a long, b long").to_columns(frame)
    for i in range(frame.shape[1] if len(frame) else 0):
        frame.iloc[0, i] = frame.iloc[1, i]  # in place
    for values, column in zip(found, kept, strict=True):
        assert values.dtype == column.dtype
        pd.testing.assert_series_equal(pd.Series(values), column, check_names=False)


@given(st.lists(st.sampled_from(sorted(FRAMES)), min_size=1, max_size=8))
@example(["one block", "floats", "missing", "large", "large", "objects", "objects", "large unsigned"])
@example(["bytes swapped", "bytes swapped", "objects and ints", "large"])
@settings(max_examples=examples(60), deadline=None)
def test_frames_of_any_layout_are_their_rows(names: list[str]) -> None:
    frames = [FRAMES[name]() for name in names]
    values = [[None if pd.isna(v) else int(v) for f in frames for v in columns_of(f)[i]] for i in (0, 1)]
    assert back(codec("a long, b long"), *frames).to_pydict() == dict(zip("ab", values, strict=True))


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
        ("date", pd.Series([dt.date(2020, 7, 1), pd.NaT, np.nan], dtype=object), [dt.date(2020, 7, 1), None, None]),
        ("string", pd.Series(["a", np.nan, pd.NaT, pd.NA], dtype=object), ["a", None, None, None]),
        ("long", pd.Series([1.0, np.nan, np.int8(2)], dtype=object), [1, None, 2]),
        ("decimal(5,2)", [Decimal("NaN"), 1], [None, Decimal("1.00")]),
        ("timestamp", pd.Series([pd.NaT, np.nan, pd.NA], dtype=object), [None, None, None]),
        ("array<int>", [np.array([1.0, np.nan]), np.nan], [[1, None], None]),
        ("array<date>", [[dt.date(2020, 7, 1), pd.NaT], pd.NaT], [[dt.date(2020, 7, 1), None], None]),
        (
            "struct<d:date,n:int,s:string>",
            [{"d": pd.NaT, "n": np.nan, "s": np.nan}],
            [{"d": None, "n": None, "s": None}],
        ),
        ("map<string,date>", [{"a": pd.NaT}], [[("a", None)]]),
    ],
)
def test_values_are_converted_as_in_pyspark(kind: str, values: Any, kept: list[Any]) -> None:
    found = back(codec(f"v {kind}"), pd.DataFrame({"v": values})).column(0).to_pylist()
    assert found == kept


@pytest.mark.parametrize(
    ("kind", "values", "error", "words"),
    [
        ("long", [1.5], ValueError, ["'v'", "1.5"]),
        ("long", ["x"], TypeError, ["'v'", "'x' (str)"]),
        ("long", pd.Series([1.5], dtype=object), ValueError, ["'v'", "1.5"]),
        ("date", pd.Series([1.5], dtype=object), TypeError, ["'v'", "not a date", "1.5"]),
        ("date", [5], TypeError, ["'v'", "not a date", "5"]),
        ("timestamp", [5], TypeError, ["'v'", "not a time", "5 (int)"]),
        ("timestamp", pd.Series([5.0, None], dtype=object), TypeError, ["'v'", "not a time", "5.0"]),
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
    assert back(made, pd.DataFrame({"b": ["x"], "a": [" "]}).assign(a=3)).to_pylist() == [{"a": 3, "b": "x"}]
    for wrong in (pd.DataFrame({"a": [1]}), pd.DataFrame([[1]]), pd.DataFrame({"a": [1], 1: ["x"]})):
        with pytest.raises(ValueError, match="DataFrame has"):
            made.to_columns(wrong)
    assert made.to_columns(pd.DataFrame()) == []


def test_frames_of_strings_and_times_are_joined() -> None:
    texts, local = ["a", None], NOON - dt.timedelta(hours=4)
    frames = [
        pd.DataFrame({"at": pd.to_datetime([UTC_NOON, None], utc=True), "s": texts}),
        pd.DataFrame({"s": pd.array(texts, "string"), "at": pd.to_datetime([local, None])}),
        pd.DataFrame({"s": texts, "at": [local, None]}, dtype=object),
        pd.DataFrame({"s": texts, "at": [local, None]}, dtype=object),
        pd.DataFrame({"s": pd.Categorical(texts), "at": pd.to_datetime([UTC_NOON, None]).tz_convert("Asia/Tokyo")}),
    ]
    rows = [("a", UTC_NOON), (None, None)] * len(frames)
    made = codec("s string, at timestamp")
    assert back(made, *frames) == RowCodec(made.struct).to_batch(rows)
    assert back(made, *frames[::-1]) == RowCodec(made.struct).to_batch(rows)


def test_frames_of_different_types_lose_nothing() -> None:
    frames = [
        pd.DataFrame({"v": [2**60 + 1]}),
        pd.DataFrame({"v": [np.nan]}),
        pd.DataFrame({"v": [True]}).astype(object),
    ]
    with pytest.raises(TypeError, match="True"):
        back(codec("v long"), *frames)
    assert back(codec("v long"), *frames[:2]).column(0).to_pylist() == [2**60 + 1, None]


def test_times_that_nanoseconds_cannot_hold_are_microseconds() -> None:
    made = codec("at timestamp, wall timestamp_ntz, near timestamp, p struct<at:timestamp>, l array<timestamp>")
    far = [dt.datetime(year, 12, 31, 23, 59, 58, 7, tzinfo=dt.timezone.utc) for year in (1, 9000, 9998)]
    rows = [(at, at.replace(tzinfo=None), UTC_NOON, (at,), [at]) for at in far]
    frame = frame_of(made, [*rows, (None,) * 5])
    kinds = ["datetime64[us]", "datetime64[us]", "datetime64[ns]", "object", "object"]
    assert list(map(str, frame.dtypes)) == kinds
    assert frame["at"].isna().tolist() == [False] * 3 + [True]
    assert frame["wall"][2].to_pydatetime() == far[2].replace(tzinfo=None)
    assert back(made, frame) == RowCodec(made.struct).to_batch([*rows, (None,) * 5])
    objects = pd.DataFrame({"at": [*far, None]}, dtype=object)
    assert back(codec("at timestamp"), objects).column(0).to_pylist() == [*far, None]
    naive = pd.DataFrame({"at": [at.replace(tzinfo=None) for at in far]}, dtype=object)
    assert back(codec("at timestamp_ntz"), naive).column(0).to_pylist() == naive["at"].tolist()


def test_times_after_the_year_9999_are_kept_or_their_column_is_named() -> None:
    made = codec("n int, at timestamp", zone="UTC")
    far = pa.array([253_402_300_800_000_000, None], pa.int64()).view(pa.timestamp("us", "UTC"))
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2], pa.int32()), far], schema=made.schema)
    frame = made.to_frame(batch)
    assert frame["at"].to_numpy().tolist() == [253_402_300_800_000_000, None]
    assert back(made, frame) == batch
    for kind, column in {
        "struct<at:timestamp>": pa.StructArray.from_arrays([far], ["at"]),
        "date": pa.array([3_000_000, None], pa.int32()).view(pa.date32()),
    }.items():
        wrong = codec(f"n int, due {kind}", zone="UTC")
        given = pa.RecordBatch.from_arrays([batch.column(0), column.cast(wrong.schema.types[1])], schema=wrong.schema)
        with pytest.raises(ValueError, match="'due' has a time that"):
            wrong.to_frame(given)
