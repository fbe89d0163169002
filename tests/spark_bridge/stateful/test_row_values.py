"""Rows of Arrow as Python rows and back: PySpark's values, at the speed of columns."""

from __future__ import annotations

import datetime as dt
import enum
import math
import pickle
import time
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql import types as T

from spark_bridge.stateful.state_values import RowCodec, row_class
from tests.effort import examples

POINT = T.StructType().add("x", "long").add("at", T.TimestampType())
LEAVES: dict[str, tuple[T.DataType, st.SearchStrategy[Any]]] = {
    "bool": (T.BooleanType(), st.booleans()),
    "byte": (T.ByteType(), st.integers(-128, 127)),
    "int": (T.IntegerType(), st.integers(-(2**31), 2**31 - 1)),
    "long": (T.LongType(), st.integers(-(2**63), 2**63 - 1)),
    "float": (T.FloatType(), st.floats(width=32, allow_nan=False)),
    "double": (T.DoubleType(), st.floats(allow_nan=False)),
    "string": (T.StringType(), st.text(max_size=5)),
    "binary": (T.BinaryType(), st.binary(max_size=5)),
    "date": (T.DateType(), st.dates()),
    "timestamp": (T.TimestampType(), st.datetimes(dt.datetime(1970, 1, 3), dt.datetime(2100, 1, 1))),
    "timestamp_ntz": (T.TimestampNTZType(), st.datetimes()),
    "decimal": (T.DecimalType(10, 2), st.decimals(-99999999, 99999999, places=2)),
}
ALL = T.StructType([T.StructField(n, k) for n, (k, _) in LEAVES.items()])
NESTED = (
    T.StructType()
    .add("point", POINT)
    .add("tags", T.ArrayType(T.StringType()))
    .add("path", T.ArrayType(POINT))
    .add("scores", T.MapType(T.StringType(), T.ArrayType(T.LongType())))
)


class Count(enum.IntEnum):
    ONE = 1


class Name(str):
    pass


class Day(dt.date):
    pass


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process whose local time has summer and winter."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def struct(**fields: str | T.DataType) -> T.StructType:
    made = T.StructType()
    for name, kind in fields.items():
        made = made.add(name, kind)
    return made


@settings(max_examples=examples(25), deadline=None)
@given(rows=st.lists(st.tuples(*[st.none() | s for _, s in LEAVES.values()]), max_size=6))
def test_flat_values_come_back_as_they_were(rows: list[tuple[Any, ...]]) -> None:
    codec = RowCodec(ALL)
    batch = codec.to_batch(rows)
    batch.validate(full=True)
    assert batch.schema == codec.schema
    assert codec.to_tuples(batch) == rows
    # Somewhere in a greater batch, too.
    twice = pa.Table.from_batches([batch, batch]).combine_chunks().to_batches()
    assert not rows or codec.to_tuples(twice[0].slice(len(rows))) == rows


@settings(max_examples=examples(25), deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.none() | st.tuples(st.none() | st.integers(0, 9), st.none() | st.just(dt.datetime(2020, 7, 1))),
            st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3),
            st.none() | st.lists(st.none() | st.tuples(st.integers(0, 9), st.none()), max_size=3),
            st.none() | st.dictionaries(st.text(max_size=2), st.none() | st.lists(st.integers(0, 9), max_size=2)),
        ),
        max_size=5,
    )
)
def test_nested_values_come_back_as_they_were(rows: list[tuple[Any, ...]]) -> None:
    codec = RowCodec(NESTED)
    batch = codec.to_batch(rows)
    batch.validate(full=True)
    assert codec.to_tuples(batch) == rows


def test_rows_are_pysparks_rows() -> None:
    codec = RowCodec(struct(k="long", count="long", point=POINT))
    (row,) = codec.iter_rows(codec.to_batch([(1, 2, (3, None))]))
    plain = Row(k=1, count=2, point=Row(x=3, at=None))
    assert isinstance(row, Row)
    assert row == plain
    assert repr(row) == repr(plain)
    assert (row.k, row["count"], row.point.x, "k" in row) == (1, 2, 3, True)
    assert row.asDict(recursive=True) == plain.asDict(recursive=True)
    assert callable(row.count), "a field does not hide a method of tuple, as in any Row"
    assert type(pickle.loads(pickle.dumps(row))) is Row
    assert pickle.loads(pickle.dumps(row)).asDict() == plain.asDict()
    with pytest.raises(AttributeError):
        row.nothing  # noqa: B018
    assert list(codec.iter_rows(codec.to_batch([]))) == []


def test_names_that_no_attribute_can_have() -> None:
    row = tuple.__new__(row_class(("a b", "a b", "__len__", "class")), (1, 2, 3, 4))
    assert (row["a b"], row["__len__"], getattr(row, "class"), len(row)) == (1, 3, 4, 4)


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize(
    "micros",
    [
        0,
        1_585_443_599_999_999,  # the last microsecond of winter 2020
        1_585_443_600_000_000,  # summer
        1_603_580_400_000_000,  # 25 October 2020, 01:00 in summer
        1_603_583_999_000_000,  # 02:59:59 in summer
        1_603_584_000_000_001,  # 02:00:00 in winter: the hour repeats
        1_603_587_600_000_000,  # 03:00 in winter
        -1_693_706_400_000_000,
        -62_000_000_000_000_000,
    ],
)
def test_timestamps_are_local_times_as_pyspark_has_them(micros: int) -> None:
    codec = RowCodec(struct(at=T.TimestampType()))
    instants = pa.array([micros, None, micros + 7], pa.int64()).view(pa.timestamp("us", "America/Lima"))
    batch = pa.record_batch({"at": instants})
    values = [at for (at,) in codec.to_tuples(batch)]
    kind = T.TimestampType()
    assert values == [kind.fromInternal(micros), None, kind.fromInternal(micros + 7)]
    assert values[0].timestamp() == micros / 1_000_000
    back = codec.to_batch([(v,) for v in values])
    assert back.column(0).view(pa.int64()).to_pylist() == [micros, None, micros + 7]


@pytest.mark.usefixtures("in_berlin")
def test_times_with_a_zone_are_instants() -> None:
    codec = RowCodec(struct(at=T.TimestampType()))
    aware = dt.datetime(2020, 7, 1, 12, tzinfo=dt.timezone.utc)
    naive = dt.datetime(2020, 7, 1, 14)
    nowhere = dt.datetime(2020, 3, 29, 2, 30)
    made = codec.to_batch(
        [(aware,), (naive,), (pd.Timestamp(aware),), (np.datetime64("2020-07-01T14:00"),), (nowhere,)]
    )
    assert made.column(0).cast(pa.timestamp("us")).to_pylist() == [
        *[aware.replace(tzinfo=None)] * 4,
        dt.datetime(2020, 3, 29, 1, 30),
    ]


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        ("int", np.int64(7), 7),
        ("int", 7.0, 7),
        ("double", 7, 7.0),
        ("double", 2**60 + 1, float(2**60 + 1)),
        ("double", np.float32(0.5), 0.5),
        ("long", pd.NA, None),
        ("timestamp", pd.NaT, None),
        ("boolean", np.bool_(True), True),
        ("int", Count.ONE, 1),
        ("string", Name("ann"), "ann"),
        ("string", np.str_("ann"), "ann"),
        ("binary", np.bytes_(b"x"), b"x"),
        ("date", Day(2020, 7, 1), dt.date(2020, 7, 1)),
        ("date", np.datetime64("2020-07-01"), dt.date(2020, 7, 1)),
        ("date", pd.Timestamp("2020-07-01 05:00", tz="Asia/Tokyo"), dt.date(2020, 7, 1)),
        ("timestamp_ntz", pd.Timestamp("2020-07-01 05:00:00.000001999"), dt.datetime(2020, 7, 1, 5, 0, 0, 1)),
        ("timestamp_ntz", np.datetime64("9999-12-31T23:59"), dt.datetime(9999, 12, 31, 23, 59)),
        (
            "decimal(38,2)",
            Decimal("1234567890123456789012345678901234.125"),
            Decimal("1234567890123456789012345678901234.13"),
        ),
        ("decimal(38,20)", np.int64(5), Decimal("5.00000000000000000000")),
        ("binary", bytearray(b"x"), b"x"),
        ("decimal(10,2)", Decimal("1.005"), Decimal("1.01")),
        ("decimal(10,2)", 3, Decimal("3.00")),
        ("array<int>", (1, 2), [1, 2]),
        ("array<int>", np.array([1, 2]), [1, 2]),
        ("struct<a:int,b:int>", {"b": 2}, (None, 2)),
        ("struct<a:int,b:int>", Row(b=2, a=1), (1, 2)),
        ("struct<a:int,b:int>", [1, 2], (1, 2)),
    ],
)
def test_values_of_other_python_types(kind: str, value: Any, kept: Any) -> None:
    codec = RowCodec(of_ddl(kind))
    assert codec.to_tuples(codec.to_batch([(None,), (value,)])) == [(None,), (kept,)]


NESTED_IN = {
    "{}": lambda v: v,
    "array<{}>": lambda v: [v, v],
    "map<string,{}>": lambda v: {"k": v},
    "struct<a:{},b:int>": lambda v: (v, 1),
    "array<struct<a:{},b:int>>": lambda v: [(v, 1)],
}


@pytest.mark.parametrize("missing", [pd.NaT, pd.NA, np.datetime64("NaT"), np.timedelta64("NaT")], ids=repr)
@pytest.mark.parametrize("within", NESTED_IN)
@pytest.mark.parametrize("kind", ["boolean", *list(LEAVES)[1:], "array<int>", "struct<x:int>", "map<string,int>"])
def test_missing_values_are_null_at_every_level(kind: str, within: str, missing: Any) -> None:
    codec = RowCodec(of_ddl(within.format(kind)))
    made = NESTED_IN[within]
    assert codec.to_batch([(made(missing),)]).equals(codec.to_batch([(made(None),)]))


@pytest.mark.usefixtures("in_berlin")
def test_the_second_of_two_equal_hours_is_kept() -> None:
    codec = RowCodec(struct(at=T.TimestampType(), times=T.ArrayType(T.TimestampType())))
    first = dt.datetime(2020, 10, 25, 2, 30)
    both = [first, first.replace(fold=1)]
    columns = codec.to_batch([(at, both) for at in both])
    instants = [dt.datetime(2020, 10, 25, hour, 30, tzinfo=dt.timezone.utc) for hour in (0, 1)]
    assert [at.astimezone(dt.timezone.utc) for at in columns.column(0).to_pylist()] == instants
    assert [at.astimezone(dt.timezone.utc) for at in columns.column(1)[0].as_py()] == instants


@pytest.mark.parametrize(
    ("kind", "value", "error", "words"),
    [
        ("int", 1.5, ValueError, ["'v'", "integer", "1.5"]),
        ("int", "7", TypeError, ["'v'", "'7' (str)"]),
        ("int", True, TypeError, ["'v'", "bool"]),
        ("tinyint", 300, ValueError, ["'v'", "byte", "300"]),
        ("long", 2**70, ValueError, ["'v'", str(2**70)]),
        ("double", "1", TypeError, ["'v'", "double", "'1'"]),
        ("string", 7, TypeError, ["'v'", "string", "7 (int)"]),
        ("string", "a\ud800", ValueError, ["'v'", "surrogates"]),
        ("date", "2020-01-01", TypeError, ["'v'", "date"]),
        ("timestamp", 5, TypeError, ["'v'", "timestamp", "5 (int)"]),
        ("timestamp", dt.date(2020, 1, 1), TypeError, ["'v'", "not a datetime"]),
        ("date", 5, TypeError, ["'v'", "not a date", "5 (int)"]),
        ("date", 1.5, TypeError, ["'v'", "not a date"]),
        ("date", np.bool_(True), TypeError, ["'v'", "not a date"]),
        ("date", Decimal("1.5"), TypeError, ["'v'", "not a date"]),
        ("int", math.nan, ValueError, ["'v'", "integer", "nan"]),
        ("int", np.float32("inf"), ValueError, ["'v'", "integer", "inf"]),
        ("string", math.nan, TypeError, ["'v'", "string", "nan"]),
        ("string", b"\xff", TypeError, ["'v'", "utf-8"]),
        ("string", uuid.UUID(int=5), TypeError, ["'v'", "not text", "str()"]),
        ("binary", uuid.UUID(int=5), TypeError, ["'v'", "not bytes"]),
        ("decimal(10,2)", Decimal("NaN"), ValueError, ["'v'", "not finite"]),
        ("decimal(10,2)", Decimal("sNaN"), ValueError, ["'v'", "not finite"]),
        ("decimal(10,2)", Decimal("-Infinity"), ValueError, ["'v'", "not finite"]),
        ("timestamp", np.timedelta64(1, "s"), TypeError, ["'v'", "timestamp"]),
        ("map<date,int>", {pd.NaT: 1}, ValueError, ["'v.key'", "not nullable"]),
        ("timestamp_ntz", dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc), ValueError, ["'v'", "time zone"]),
        ("decimal(4,2)", Decimal("123.4"), ValueError, ["'v'", "decimal(4,2)", "123.4"]),
        ("decimal(4,2)", 1.5, TypeError, ["'v'", "1.5 (float)"]),
        ("array<int>", [1, "x"], TypeError, ["'v.element'", "'x'"]),
        ("array<int>", 7, TypeError, ["'v' is an array", "7 (int)"]),
        ("array<int>", "ab", TypeError, ["'v' is an array", "'ab'"]),
        ("map<string,int>", {"a": "x"}, TypeError, ["'v.value'", "'x'"]),
        ("map<string,int>", [("a", 1)], TypeError, ["'v' is a map"]),
        ("map<string,int>", {None: 1}, ValueError, ["'v.key'", "not nullable"]),
        ("struct<a:int>", 7, TypeError, ["'v' is a struct (a)", "7 (int)"]),
        ("struct<a:int>", (1, 2), ValueError, ["(1, 2) has 2 values", "'v' has 1 (a)"]),
        ("struct<a:array<int>>", ([1, 2.5],), ValueError, ["'v.a.element'", "2.5"]),
    ],
)
def test_what_does_not_fit_is_named(kind: str, value: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        RowCodec(of_ddl(kind)).to_batch([(None,), (value,)])
    for word in words:
        assert word in str(raised.value)


def test_rows_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2, 3\) has 3 values, but the schema has 2 fields \(a, b\)"):
        RowCodec(struct(a="long", b="long")).to_batch([(1, 2), (1, 2, 3)])


def test_none_where_the_schema_forbids_it() -> None:
    with pytest.raises(ValueError, match="'a' is declared not nullable"):
        RowCodec(T.StructType().add("a", "long", nullable=False)).to_batch([(1,), (None,)])
    optional = T.StructType().add("s", T.StructType().add("a", "long", nullable=False))
    assert RowCodec(optional).to_batch([(None,), ((1,),)]).num_rows == 2, "an absent struct has no field"
    with pytest.raises(ValueError, match=r"'s\.a' is declared not nullable"):
        RowCodec(optional).to_batch([((None,),)])


def test_times_that_python_does_not_have() -> None:
    codec = RowCodec(struct(at=T.TimestampType(), day="date"))
    late = pa.array([253_402_300_800_000_000]).view(pa.timestamp("us", "UTC"))
    with pytest.raises(ValueError, match=r"Column 'at': .*10000-01-01.*years 1 to 9999"):
        codec.to_tuples(pa.record_batch({"at": late, "day": pa.array([0]).cast(pa.int32()).view(pa.date32())}))
    days = pa.array([2932897], pa.int32()).view(pa.date32())
    with pytest.raises(ValueError, match="Column 'day'"):
        codec.to_tuples(pa.record_batch({"at": pa.array([0]).view(pa.timestamp("us", "UTC")), "day": days}))


def test_whatever_form_spark_sends_columns_in() -> None:
    codec = RowCodec(struct(s="string", b="binary", d="string", f="double", w="interval day to second"))
    batch = pa.record_batch(
        {
            "s": pa.array(["a", None], pa.large_string()),
            "b": pa.array([None, b"b"], pa.large_binary()),
            "d": pa.array(["x", None]).dictionary_encode(),
            "f": pa.array([math.nan, None]),
            "w": pa.array([dt.timedelta(days=1), None], pa.duration("us")),
        }
    )
    first, second = codec.iter_rows(batch)
    assert first[:3] == ("a", None, "x")
    assert math.isnan(first.f)
    assert first.w == dt.timedelta(days=1)
    assert second == (None, b"b", None, None, None)


def test_empty_batches() -> None:
    assert RowCodec(ALL).to_batch([]).schema == RowCodec(ALL).schema
    assert RowCodec(T.StructType()).to_tuples(pa.RecordBatch.from_arrays([], names=[])) == []


def of_ddl(kind: str) -> T.StructType:
    from spark_bridge.stateful.ddl import struct_of

    return struct_of(f"v {kind}")
