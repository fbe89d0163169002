"""Keys as users give them, and answers as they get them: without any host."""

from __future__ import annotations

import datetime as dt
import math
import re
import sys
import types
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from backends.encoding.user_values import CAST_ERRORS, cast_without_loss, python_rows, python_values
from spark_bridge.exceptions import RequestError, UnknownKeyOrNamespaceError, UnknownKvStateIdError
from spark_bridge.queryable.client import state_views
from spark_bridge.queryable.client.arguments import (
    KeyCodec,
    NamedColumns,
    bound,
    comparisons,
    intersection,
    key_columns,
    key_range,
)
from spark_bridge.queryable.client.results import KeyedResults, formed, plain_values
from spark_bridge.queryable.client.scans import StateScan
from spark_bridge.queryable.client.state_views import state_view
from spark_bridge.queryable.protocol import Comparison, StateAnswer
from spark_bridge.state_format import stored_rows as state_rows
from spark_bridge.state_format.layouts import PRESENT, TTL_COLUMN
from tests.spark_bridge.state_flows import KEYS as FLOW_KEYS
from tests.spark_bridge.state_flows import Everything

UTC = dt.timezone.utc
NINE = dt.datetime(2024, 3, 9, 9, tzinfo=UTC)
WINDOW = pa.struct([pa.field("start", pa.timestamp("us", "UTC")), pa.field("end", pa.timestamp("us", "UTC"))])
G = 64


def codec(*fields: tuple[str, pa.DataType], by: tuple[str, ...] | None = None) -> KeyCodec:
    stored = pa.schema([pa.field(name, kind) for name, kind in fields])
    return KeyCodec("totals", stored, by or tuple(stored.names), G)


ONE = codec(("user", pa.int64()))
TWO = codec(("user", pa.string()), ("shard", pa.int32()))
TURNED = codec(("shard", pa.int32()), ("user", pa.string()), by=("user", "shard"))
WINDOWED = codec(("window", WINDOW), ("user", pa.int64()), by=("user", "window"))


def stored_keys(of: KeyCodec, keys: Any) -> list[bytes]:
    return of.encode(of.columns(keys)).to_pylist()


def frame(kind: Callable[[dict[str, Any]], Any]) -> list[Any]:
    return [kind({"shard": [1, 2], "user": ["a", "b"]}), kind({"x": ["a", "b"], "y": [1, 2]})]


PAIRS = [("a", 1), ("b", 2)]


@pytest.mark.parametrize(
    "keys",
    [
        PAIRS,
        [["a", 1], ["b", 2]],
        [{"shard": 1, "user": "a"}, {"user": "b", "shard": 2}],
        [("a", 1), {"user": "b", "shard": 2}],
        {"user": ["a", "b"], "shard": np.array([1, 2])},
        np.array(PAIRS, dtype=[("user", "U1"), ("shard", "i8")]),
        np.array(PAIRS, dtype=object),
        pa.array([{"user": "a", "shard": 1}, {"user": "b", "shard": 2}]),
        pa.chunked_array([[{"user": "a", "shard": 1}], [{"user": "b", "shard": 2}]]),
        pd.MultiIndex.from_tuples(PAIRS, names=["user", "shard"]),
        pd.DataFrame({"n": [5, 6]}, pd.MultiIndex.from_tuples(PAIRS, names=["user", "shard"])),
        pd.Series(PAIRS),
        *frame(pa.table),
        *frame(pa.record_batch),
        *frame(pd.DataFrame),
        *frame(pl.DataFrame),
        (pair for pair in PAIRS),
        dict.fromkeys(PAIRS).keys(),
    ],
    ids=lambda keys: type(keys).__name__,
)
def test_keys_of_several_columns_in_every_form(keys: Any) -> None:
    for of in (TWO, TURNED):
        if not isinstance(keys, type(x for x in ())):
            assert stored_keys(of, keys) == stored_keys(of, PAIRS)
    assert of.columns(PAIRS).to_pydict() == {"user": ["a", "b"], "shard": [1, 2]}


@pytest.mark.parametrize(
    "keys",
    [
        [1, None, 3],
        [(1,), None, (3,)],
        [{"user": 1}, None, 3.0],
        [np.int8(1), None, Decimal(3)],
        pa.array([1, None, 3], pa.int16()),
        pa.chunked_array([pa.array([1, None], pa.uint8()), pa.array([3], pa.uint8())]),
        pa.chunked_array([pa.array([1, None, 3]).dictionary_encode()]),
        pa.table({"id": [1, None, 3]}),
        pa.table({"other": ["a", "b", "c"], "user": [1, None, 3]}),
        np.array([1, None, 3], object),
        pd.Series([1, None, 3]),
        pd.Series([1, None, 3], dtype="Int32", index=[7, 8, 9]),
        pd.Series([1, None, 3], dtype=object),
        pd.Index([1, None, 3]),
        pd.DataFrame({"user": [1, None, 3]}, index=[7, 8, 9]),
        pl.Series("anything", [1, None, 3]),
        pl.DataFrame({"user": [1, None, 3]}, schema={"user": pl.Int8}),
    ],
    ids=lambda keys: type(keys).__name__,
)
def test_keys_of_one_column_in_every_form(keys: Any) -> None:
    assert ONE.columns(keys).column(0).equals(pa.array([1, None, 3], pa.int64()))


def test_keys_match_the_encoding_of_columns_and_key_groups() -> None:
    columns = pa.record_batch([pa.array([5, 7], pa.int64())], names=["user"])
    expected = encode_keys(columns, key_groups(columns, G)).to_pylist()
    assert stored_keys(ONE, [5, 7]) == expected
    assert [ONE.encode_one(5), ONE.encode_one((7,))] == expected


@pytest.mark.parametrize("key", [("a", 1), ["a", 1], {"shard": 1, "user": "a"}, ("a", np.int64(1)), ("a", 1.0)])
def test_one_key_is_encoded_as_many_are(key: Any) -> None:
    for of in (TWO, TURNED):
        assert [of.encode_one(key)] == stored_keys(of, [("a", 1)])


def test_one_key_of_columns_of_one_type_that_are_stored_in_another_order() -> None:
    of = codec(("b", pa.int64()), ("a", pa.int64()), by=("a", "b"))
    assert of.encode_one((1, 2)) == of.encode_one({"b": 2, "a": 1}) == stored_keys(of, [(1, 2)])[0]
    assert of.encode_one((1, 2)) != of.encode_one((2, 1))


TIMES = codec(("at", pa.timestamp("us", "UTC")), ("day", pa.date32()), ("price", pa.decimal128(10, 2)))


def test_times_days_and_decimals() -> None:
    naive, there = NINE.replace(tzinfo=None), NINE.astimezone(dt.timezone(dt.timedelta(hours=2)))
    day = dt.date(2024, 3, 9)
    keys = [(NINE, day, Decimal("1.50")), (naive, dt.datetime(2024, 3, 9), 1.5), (there, day, Decimal("1.5"))]
    first, *others = stored_keys(TIMES, keys)
    assert others == [first, first]
    assert [TIMES.encode_one(key) for key in keys] == [first] * 3
    assert TIMES.columns([(NINE, day, 3)]).column(2).to_pylist() == [Decimal("3.00")]


NAME = codec(("name", pa.string()))
DAY = codec(("day", pa.date32()))
PRICE = codec(("price", pa.decimal128(38, 20)))
FLOAT = codec(("weight", pa.float32()))
A_UUID = uuid.UUID("71cfbec6-2d32-4f2a-b914-b2e5cee485b4")


@pytest.mark.parametrize(
    ("of", "given", "same"),
    [
        (DAY, np.datetime64("2024-03-09"), dt.date(2024, 3, 9)),
        (DAY, np.datetime64("2024-03-09T00:00", "ns"), dt.date(2024, 3, 9)),
        (DAY, pd.Timestamp("2024-03-09"), dt.date(2024, 3, 9)),
        (DAY, pd.NaT, None),
        (DAY, np.datetime64("NaT"), None),
        (ONE, pd.NA, None),
        (NAME, pd.NA, None),
        (NAME, np.str_("a"), "a"),
        (PRICE, 5, Decimal(5)),
        (PRICE, np.int64(5), Decimal(5)),
        (PRICE, 0.1, Decimal("0.1")),
        (FLOAT, 0.1, np.float32(0.1)),
        (FLOAT, -0.0, 0),
        (TIMES, (np.datetime64("2024-03-09T09:00"), pd.NaT, 5), (NINE, None, Decimal(5))),
        (WINDOWED, (1, (np.datetime64("2024-03-09T09"), pd.NaT)), (1, (NINE, None))),
    ],
)
def test_values_of_other_types_are_matched_without_loss(of: KeyCodec, given: Any, same: Any) -> None:
    assert of.encode_one(given) == of.encode_one(same)
    known = dt.date(2024, 1, 1) if of is DAY else None
    assert stored_keys(of, [given, same]) == [of.encode_one(same)] * 2
    if len(of.by) == 1:
        assert stored_keys(of, [known, given]) == [of.encode_one(known), of.encode_one(same)]
        assert stored_keys(of, pd.Series([given], dtype=object)) == [of.encode_one(same)]


def test_columns_of_other_types_are_matched_without_loss() -> None:
    assert stored_keys(PRICE, pa.array([5, 10**17])) == stored_keys(PRICE, [5, Decimal(10**17)])
    assert stored_keys(PRICE, pa.array([0.1])) == stored_keys(PRICE, [Decimal("0.1")])
    assert stored_keys(DAY, np.array(["2024-03-09", "NaT"], "M8[s]")) == stored_keys(DAY, [dt.date(2024, 3, 9), None])
    for missing in (np.nan, pd.NA, None):
        for names in (pd.DataFrame({"name": ["a", missing]}), pd.Series(["a", missing]), pd.Index(["a", missing])):
            assert stored_keys(NAME, names) == stored_keys(NAME, ["a", None])
    assert stored_keys(ONE, pd.Series([(1,), {"user": 3}])) == stored_keys(ONE, [1, 3])
    assert stored_keys(DAY, pd.DataFrame({"day": [dt.date(2024, 3, 9), pd.NaT]})) == stored_keys(
        DAY, [dt.date(2024, 3, 9), None]
    )


@pytest.mark.parametrize(
    ("of", "keys", "words"),
    [
        (NAME, [A_UUID], ("name", "not text but of class UUID", "str()")),
        (NAME, ["a", A_UUID], ("not text but of class UUID",)),
        (NAME, pd.Series([A_UUID], dtype=object), ("not text but of class UUID",)),
        (NAME, pd.DataFrame({"name": [A_UUID]}), ("not text but of class UUID",)),
        (DAY, pd.DataFrame({"day": [dt.date(2024, 3, 9), 5]}), ("not a date but of class int",)),
        (NAME, pa.array([A_UUID.bytes], pa.uuid()), ("uuid",)),
        (NAME, pa.array([b"0123456789abcdef"], pa.binary(16)), ("fixed_size_binary",)),
        (codec(("id", pa.binary())), [A_UUID], ("not bytes but of class UUID",)),
        (DAY, [dt.date(2024, 3, 9), dt.datetime(2024, 3, 9, 5)], ("time of day",)),
        (DAY, [np.datetime64("2024-03-09T05")], ("time of day",)),
        (DAY, [5], ("not a date",)),
        (DAY, [1.5], ("not a date",)),
        (codec(("at", pa.timestamp("us"))), [np.datetime64(1, "ns")], ("nanoseconds",)),
        (codec(("at", pa.timestamp("us"))), [pd.Timestamp(1)], ("nanoseconds",)),
        (PRICE, [Decimal("NaN")], ("not finite",)),
        (PRICE, [True], ("not a number",)),
        (FLOAT, [1e300], ("too large",)),
        (FLOAT, pa.array([1e300]), ("too large",)),
        (codec(("x", pa.float64())), [2**53 + 1], ("rounded",)),
        (TIMES, pa.table({"at": [NINE], "day": [dt.date(2024, 3, 9)], "price": [1.555]}), ("price", "data loss")),
        (ONE, [1, 1.5], ("1.5", "int64", "user")),
        (ONE, ["1"], ("'1'", "int64")),
        (ONE, [True], ("True", "int64")),
        (ONE, [1 << 63], ("9223372036854775808",)),
        (ONE, [float("nan")], ("nan",)),
        (ONE, [(1, 2)], ("(1, 2)",)),
        (ONE, [{"shard": 1}], ("shard", "user: int64")),
        (ONE, pa.array([1.5]), ("double", "int64")),
        (ONE, pa.array(["1"]), ("string", "int64")),
        (ONE, pl.Series([1.5]), ("double", "int64")),
        (ONE, pd.Series([1.5]), ("double", "int64")),
        (ONE, pa.table({"a": [1], "b": [2]}), ("'a', 'b'", "user")),
        (ONE, "abc", ("'abc'", "one key")),
        (ONE, 5, ("5", "int")),
        (ONE, np.zeros((1, 1, 1)), ("3",)),
        (TWO, ["a"], ("'a'", "tuple of 2")),
        (TWO, [("a", 1), None], ("None", "tuple of 2")),
        (TWO, [("a", 1, 2)], ("('a', 1, 2)",)),
        (TWO, [("a", 1), ("b", 1 << 40)], (str(1 << 40), "shard", "int32")),
        (TWO, [(1, 1)], ("user", "string")),
        (TWO, [{"user": "a"}], ("exactly",)),
        (TWO, {"user": ["a"], "shard": [1, 2]}, ("different lengths",)),
        (TWO, pa.table({"user": ["a"], "other": [1]}), ("'shard'",)),
        (TWO, pd.DataFrame({"user": ["a"]}), ("'shard'",)),
        (TIMES, [(NINE, dt.datetime(2024, 3, 9, 1), 1)], ("day", "time of day")),
        (TIMES, [(NINE, dt.date(2024, 3, 9), Decimal("1.555"))], ("price", "1.555")),
        (TIMES, [("2024-03-09", dt.date(2024, 3, 9), 1)], ("at", "not a datetime but of class str")),
        (WINDOWED, [(1, {"start": NINE})], ("start, end",)),
    ],
)
def test_invalid_key_is_an_error_that_says_why(of: KeyCodec, keys: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UnknownKeyOrNamespaceError, match=r"totals|one key|keys must be|dimensions") as caught:
        of.columns(keys)
    for word in words:
        assert word in str(caught.value)
    if isinstance(keys, list):
        with pytest.raises(UnknownKeyOrNamespaceError):
            for key in keys:
                of.encode_one(key)


def test_no_keys_in_every_form() -> None:
    for keys in ([], pa.array([], pa.int64()), pa.array([]), np.zeros(0), pd.Series([], dtype=object), pl.Series([])):
        assert ONE.columns(keys).num_rows == 0
        assert ONE.encode(ONE.columns(keys)).to_pylist() == []
    assert TWO.columns([]).num_rows == 0


@pytest.mark.parametrize(
    ("given", "kind", "why"),
    [
        (pa.array([1e300]), pa.float32(), "too large"),
        (pa.array([dt.datetime(2024, 1, 1, 13)], pa.timestamp("us")), pa.date32(), "time of day"),
        (pa.array([1.239]), pa.decimal128(5, 2), "data loss|rounded"),
    ],
)
def test_nothing_is_lost_inside_of_structs_and_arrays_either(given: pa.Array, kind: pa.DataType, why: str) -> None:
    offsets = pa.array([0, 1], pa.int32())
    for array, wanted in (
        (given, kind),
        (pa.ListArray.from_arrays(offsets, given), pa.list_(kind)),
        (pa.LargeListArray.from_arrays(offsets.cast(pa.int64()), given), pa.list_(kind)),
        (pa.StructArray.from_arrays([given], ["x"]), pa.struct([("x", kind)])),
    ):
        with pytest.raises(CAST_ERRORS, match=why):
            cast_without_loss(array, wanted)
        with pytest.raises(CAST_ERRORS, match=why):
            cast_without_loss(pa.chunked_array([array, array]), wanted)


def test_nested_values_that_lose_nothing_are_cast() -> None:
    floats = pa.list_(pa.float32())
    for given in (
        pa.array([[1.5, math.nan, math.inf, None], None, []], pa.list_(pa.float64())),
        pa.array([[1.5, math.nan, math.inf, None], None, []], pa.large_list(pa.float64())),
    ):
        cast = cast_without_loss(given, floats)
        assert str(cast.to_pylist()) == str(given.to_pylist()) and cast.type == floats
    assert cast_without_loss(pa.nulls(2), floats).to_pylist() == [None, None]
    hidden = pa.StructArray.from_arrays([pa.array([1e300, 1.0])], ["x"], mask=pa.array([True, False]))
    cast = cast_without_loss(hidden, pa.struct([("x", pa.float32())]))
    assert cast.to_pylist() == [None, {"x": 1.0}], "bytes under a null are no values"


def test_columns_of_keys_do_not_share_the_arrays_of_the_caller() -> None:
    """A loop that fills one array again and again has other keys in it when it takes an answer."""
    of = codec(("user", pa.int64()), ("shard", pa.int64()))
    plain, table = np.array([1, 2]), np.asfortranarray([[1, 5], [2, 6]])
    named = np.array([(1, 5)], dtype=[("user", "i8"), ("shard", "i8")])[:1]
    series, nullable = pd.Series([1, 2]), pd.Series([1, 2], dtype="Int64")
    frame_of = pd.DataFrame({"user": np.array([1, 2]), "shard": np.array([5, 6])})
    one = [ONE.columns(keys) for keys in (plain, series, nullable)]
    two = [of.columns(keys) for keys in (table, frame_of, named)]
    for keys in (plain, table, series, nullable):
        keys[:] = 9
    named["user"] = 9
    frame_of.iloc[:, :] = 9
    assert [columns.to_pydict() for columns in one] == [{"user": [1, 2]}] * 3
    assert [columns.to_pydict() for columns in two[:2]] == [{"user": [1, 2], "shard": [5, 6]}] * 2
    assert two[2].to_pydict() == {"user": [1], "shard": [5]}
    arrow = pa.array([1, 2])
    assert ONE.columns(arrow).column(0).buffers()[1].address == arrow.buffers()[1].address


def test_times_that_pythons_datetime_cannot_hold_are_numpys() -> None:
    at, day = pa.timestamp("us", "UTC"), pa.date32()
    far, early = np.datetime64("10000-01-01", "us"), np.datetime64("-0001-01-01", "us")
    micros = [int(far.astype(int)), int(early.astype(int)), 0, None]
    values = [far, early, dt.datetime(1970, 1, 1, tzinfo=UTC), None]
    times = pa.array(micros, pa.int64()).view(at)
    assert python_values(times) == python_values(pa.chunked_array([times])) == values
    assert python_values(pa.array([3_000_000, 0, None], pa.int32()).view(day)) == [
        np.datetime64("10183-09-21"),
        dt.date(1970, 1, 1),
        None,
    ]
    offsets = pa.array([0, 1, 2, 4], pa.int32())
    nested = pa.StructArray.from_arrays(
        [
            pa.ListArray.from_arrays(offsets, times),
            pa.MapArray.from_arrays(offsets, pa.array(["a", "b", "c", "d"]), times),
        ],
        ["list", "map"],
    )
    assert python_values(nested)[0] == {"list": [far], "map": [("a", far)]}
    assert python_rows(pa.table({"x": nested}))[2] == {
        "x": {"list": values[2:], "map": [("c", values[2]), ("d", None)]}
    }
    by_time, by_day = codec(("at", at)), codec(("day", day))
    assert stored_keys(by_time, [far, values[2]]) == stored_keys(by_time, times.take(pa.array([0, 2])))
    assert by_time.encode_one(early) == stored_keys(by_time, times)[1]
    assert (
        by_day.encode_one(np.datetime64("10183-09-21"))
        == stored_keys(by_day, pa.array([3_000_000]).cast(pa.int32()).view(day))[0]
    )


# -- ranges ----------------------------------------------------------------------------------


def within(of: KeyCodec, keys: list[Any], prefix: Any = None, start: Any = None, end: Any = None) -> list[Any]:
    """The keys whose stored form, without the group, is in the range."""
    (first, behind), conditions = key_range(of, None, prefix, start, end)
    assert not conditions
    without_group = [key[2:] for key in stored_keys(of, keys)]
    return [
        key
        for key, stored in zip(keys, without_group, strict=True)
        if (first is None or stored >= first) and (behind is None or stored < behind)
    ]


USERS = ["", "a", "ab", "ab\x00", "ab\x00c", "abc", "ac", "b", "\U0010ffff", None]


def test_a_string_is_a_prefix_of_strings_and_a_tuple_of_columns() -> None:
    keys = [(user, shard) for user in USERS for shard in (1, 2)]
    for prefix in ["", "a", "ab", "ab\x00", "\U0010ffff", "x"]:
        assert within(TWO, keys, prefix) == [k for k in keys if k[0] is not None and k[0].startswith(prefix)]
        assert within(TWO, keys, (prefix,)) == [k for k in keys if k[0] == prefix]
        assert within(TWO, keys, {"user": prefix}) == [k for k in keys if k[0] == prefix]
    assert within(TWO, keys, ("ab", 2)) == [("ab", 2)]
    assert within(TWO, keys, (None,)) == [(None, 1), (None, 2)]
    assert within(ONE, [-5, 3, 255, 256], 255) == [255]


def test_start_is_included_and_end_is_not() -> None:
    keys = [(user, shard) for user in USERS[:-1] for shard in (1, 2)]
    assert within(TWO, keys, start="ab", end="b") == [k for k in keys if "ab" <= k[0] < "b"]
    assert within(TWO, keys, start=("ab", 2), end=("ac", 2)) == [k for k in keys if ("ab", 2) <= k < ("ac", 2)]
    assert within(TWO, keys, prefix="a", start=("ab", 2), end="abc") == [k for k in keys if ("ab", 2) <= k < ("abc",)]
    assert within(ONE, [-5, -1, 0, 3], start=-1, end=3) == [-1, 0]
    assert intersection((b"a", None), (b"b", b"c")) == (b"b", b"c")


def test_bounds_that_exclude_each_other_are_named_as_they_were_given() -> None:
    with pytest.raises(RequestError, match=r"within start=\('b', 1\), end='a': these bounds end before they start"):
        key_range(TWO, None, None, ("b", 1), "a")
    with pytest.raises(RequestError, match=r"within prefix=\('b',\), end='a':"):
        key_range(TWO, None, ("b",), None, "a")
    assert within(TWO, [("a", 1)], start="a", end="a") == []


def test_bounds_where_the_window_is_stored_first_become_conditions() -> None:
    assert key_range(WINDOWED, "window", 42, None, None) == ((None, None), [("user", "=", 42)])
    assert key_range(WINDOWED, "window", (None,), None, None) == ((None, None), [("user", "is null")])
    bounds = key_range(WINDOWED, "window", None, 3, (9,))
    assert bounds == ((None, None), [("user", ">=", 3), ("user", "<", 9)])
    with pytest.raises(RequestError, match="window, user"):
        key_range(WINDOWED, "window", None, (3, (NINE, NINE)), None)


@pytest.mark.parametrize(
    ("values", "words"), [(("a", 1, 2), "it has 2"), ({"shard": 1}, "first columns"), (1, "string")]
)
def test_bounds_that_are_not_keys_are_rejected(values: Any, words: str) -> None:
    with pytest.raises(UnknownKeyOrNamespaceError, match=words):
        bound(TWO, values)


def test_conditions_are_converted_to_json() -> None:
    types = {"at": pa.timestamp("us", "UTC"), "local": pa.timestamp("us"), "n": pa.int64()}
    there = NINE.astimezone(dt.timezone(dt.timedelta(hours=2)))
    made = comparisons(
        [
            ("n", "==", np.int32(5)),
            ("n", "IN", [1, 2.5]),
            ("n", "is null"),
            Comparison("n", "<", [3]),
            ("at", ">=", NINE.replace(tzinfo=None)),
            ("at", "<", there),
            ("local", "=", there),
            ("day", "<>", dt.date(2024, 3, 9)),
            ("price", "=", Decimal("1.50")),
            ("price", "=", pa.scalar("x")),
        ],
        types,
    )
    assert [(c.comparison, c.values) for c in made] == [
        ("=", [5]),
        ("in", [1, 2.5]),
        ("is null", []),
        ("<", [3]),
        (">=", ["2024-03-09T09:00:00+00:00"]),
        ("<", ["2024-03-09T09:00:00+00:00"]),
        ("=", ["2024-03-09T09:00:00"]),
        ("!=", ["2024-03-09"]),
        ("=", ["1.50"]),
        ("=", ["x"]),
    ]


@pytest.mark.parametrize(
    "condition",
    [
        "n > 1",
        ("n",),
        ("n", ">"),
        ("n", "like", "x"),
        ("n", "=", None),
        ("n", "=", pd.NaT),
        ("n", "=", b"x"),
        ("n", "=", A_UUID),
        (5, "=", 5),
    ],
)
def test_invalid_conditions_are_rejected(condition: Any) -> None:
    with pytest.raises(RequestError, match="where"):
        comparisons([condition], {})


@pytest.mark.parametrize("value", ["n1", b"n1", 5])
def test_a_condition_in_takes_no_single_value(value: Any) -> None:
    """The letters of a string would be the values."""
    with pytest.raises(RequestError, match=re.escape(f"takes a list of values; give ('name', 'in', [{value!r}])")):
        comparisons([("name", "in", value)], {"name": pa.string()})


# -- results ---------------------------------------------------------------------------------


def test_forms() -> None:
    table = pa.table({"k": [1, 2], "v": ["a", None]})
    assert formed(table, "arrow") is table
    assert formed(table, "pylist") == [{"k": 1, "v": "a"}, {"k": 2, "v": None}]
    assert formed(table, "pandas").equals(pd.DataFrame({"k": [1, 2], "v": ["a", None]}))
    assert formed(table, "polars").equals(pl.DataFrame({"k": [1, 2], "v": ["a", None]}))
    with pytest.raises(RequestError, match="'spark'"):
        formed(table, "spark")


def test_rows_of_keys_become_lists_and_maps() -> None:
    position = pa.array([2, 0, 2, 0])
    rows = KeyedResults(position, {"page": pa.array(["c", "b", "d", "a"])}, {"n": pa.array([1, 2, None, 4])})
    ordered = rows.ordered(by_window=False)
    assert ordered.maps(4).to_pylist() == [[("b", 2), ("a", 4)], None, [("c", 1), ("d", None)], None]
    as_structs = ordered.lists(3).to_pylist()
    assert as_structs[0] == [{"page": "b", "n": 2}, {"page": "a", "n": 4}]
    assert KeyedResults(position, {}, {"n": pa.array([1, 2, 3, 4])}).ordered(by_window=False).lists(3).to_pylist() == [
        [2, 4],
        None,
        [1, 3],
    ]
    assert plain_values({"a": pa.array([{"x": 1}])}, hashable=True) == [(1,)]
    assert plain_values({"a": pa.array([1]), "b": pa.array([[2]])}, hashable=True) == [(1, (2,))]


def test_windows_are_in_the_order_of_their_starts() -> None:
    later = {"start": NINE + dt.timedelta(minutes=1), "end": NINE + dt.timedelta(minutes=2)}
    first = {"start": NINE, "end": NINE + dt.timedelta(minutes=1)}
    rows = KeyedResults(pa.array([0, 0]), {"window": pa.array([later, first], WINDOW)}, {"n": pa.array([1, 2])})
    (found,) = rows.ordered(by_window=True).lists(1).to_pylist()
    assert [row["n"] for row in found] == [2, 1]
    windows = {"window": pa.array([later, first, first, later], WINDOW)}
    of_two = KeyedResults(pa.array([0, 1, 0, 1]), windows, {"n": pa.array([2, 3, 1, 4])}).ordered(by_window=True)
    assert [[row["n"] for row in of_key] for of_key in of_two.lists(2).to_pylist()] == [[1, 2], [3, 4]]


def test_a_scan_gives_no_more_rows_than_its_limit_and_ends_what_it_does_not_need() -> None:
    ended = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for begin in range(0, 100, 10):
                yield pa.record_batch([pa.array(range(begin, begin + 10))], schema=schema)
        finally:
            ended.append(True)

    schema = pa.schema([("n", pa.int64())])
    for limit, expected in ((0, 0), (5, 5), (10, 10), (15, 15), (1000, 100), (None, 100)):
        ended.clear()
        scan = StateScan(StateAnswer(3, schema, batches()), limit)
        assert scan.to_arrow().column("n").to_pylist() == list(range(expected))
        assert ended or not limit
    scan = StateScan(StateAnswer(3, schema, batches()), None)
    next(scan)
    scan.close()
    assert ended


# -- views of state variables ---------------------------------------------------------------------


def everything() -> OperatorSchema:
    from spark_bridge.stateful.process_task import ProcessorState

    state = ProcessorState(FLOW_KEYS, "processingtime", None)
    Everything().init(state.handle)
    return OperatorSchema(state.declare(), tuple(FLOW_KEYS.names))


def aggregates(*keys: tuple[str, pa.DataType], by: tuple[str, ...] = ()) -> OperatorSchema:
    state = pa.schema([("n.count.count", pa.int64()), ("user.sum.sum", pa.float64())])
    return OperatorSchema.of_rows(StateSchema(pa.schema([pa.field(*k) for k in keys]), state), by)


def sessions() -> OperatorSchema:
    from spark_bridge.state_format.layouts import session_schema

    states = pa.schema([("n.count.count", pa.int64())])
    return session_schema(pa.schema([("user", pa.int64())]), pa.timestamp("us", "UTC"), states)


def deduplicated() -> OperatorSchema:
    return OperatorSchema.of_rows(StateSchema(pa.schema([("user", pa.int64())]), PRESENT))


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        (everything(), {"total": "value", "visits": "list", "pages": "map", "timers": "timers"}),
        (aggregates(("user", pa.int64())), {"default": "rows"}),
        (aggregates(("window", WINDOW), ("user", pa.int64()), by=("user", "window")), {"default": "windows"}),
        (sessions(), {"default": "sessions"}),
        (deduplicated(), {"default": "rows"}),
    ],
)
def test_the_columns_of_a_scan_are_those_that_a_host_gives(schema: OperatorSchema, kinds: dict[str, str]) -> None:
    assert {v.name for v in schema.variables} == set(kinds)
    for name, kind in kinds.items():
        view = state_view("op", schema, G, name)
        hosts = state_rows.VariableRows(schema, schema.variable(name)).output
        assert view.kind == kind
        assert [(f.name, f.type) for f in view.scan_fields] == [(f.name, f.type) for f in hosts][:-2]


def test_state_variables_are_found_or_named() -> None:
    schema = everything()
    assert state_view("op", aggregates(("user", pa.int64())), G, None).kind == "rows"
    with pytest.raises(UnknownKvStateIdError, match=r"'op' needs state=.*'total' \(value\), 'visits' \(list\)"):
        state_view("op", schema, G, None)
    with pytest.raises(UnknownKvStateIdError, match=r"no state variable 'nothing'.*'total'"):
        state_view("op", schema, G, "nothing")


def test_single_values_are_decoded_as_columns_are() -> None:
    view = state_view("op", aggregates(("user", pa.int64())), G, None)
    states = pa.record_batch([pa.array([3, 0]), pa.array([1.5, None])], schema=view.schema.value)
    values = view.schema.encode_values(states)
    keys = view.codec.columns([1, 2])
    table = view.table(keys, pa.concat_arrays([values.slice(0, 1), pa.nulls(1, pa.binary())]))
    assert table.to_pylist() == [{"user": 1, "n": 3, "user__value": 1.5}, {"user": 2, "n": None, "user__value": None}]
    decode_one = view.stored_values.decode_one
    assert [decode_one(v) for v in values.to_pylist()] == [{"n": 3, "user": 1.5}, {"n": 0, "user": None}]


def test_expired_values_are_absent() -> None:
    value = pa.schema([("v", pa.string()), (TTL_COLUMN, pa.int64())])
    families = {"seen": StateSchema(pa.schema([("user", pa.int64())]), value)}
    view = state_view("op", OperatorSchema((StateVariable("seen", "value", families, 1000),)), G, None)
    later = state_views.now_ms() + 60_000
    rows = pa.record_batch([pa.array(["old", "new", "for good"]), pa.array([5, later, None], pa.int64())], schema=value)
    values = view.schema.encode_values(rows)
    table = view.table(view.codec.columns([1, 2, 3]), values)
    assert table.to_pydict() == {"user": [1, 2, 3], "v": [None, "new", "for good"]}
    for decode in (view.stored_values.decode_one, view.stored_values._one_by_columns):
        assert [decode(v) for v in values.to_pylist()] == [None, {"v": "new"}, {"v": "for good"}]


def test_keys_are_taken_while_another_thread_imports_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrow imports it with the first array of a process."""
    monkeypatch.setitem(sys.modules, "pandas", types.ModuleType("pandas"))
    assert key_columns(pa.schema([("user", pa.int64())]), list(range(20))) is None


def test_a_subclass_of_a_frame_is_a_frame() -> None:
    class Frame(pd.DataFrame):
        pass

    columns = key_columns(pa.schema([("user", pa.int64())]), Frame({"user": [1, 2]}))
    assert isinstance(columns, NamedColumns) and columns.names == ["user"]
