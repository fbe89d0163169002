"""Comparisons with columns of every type: values that come as JSON are compared in the column's type."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from operator import eq, ge, gt, le, lt, ne
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.client.arguments import comparisons
from spark_bridge.queryable.protocol import Comparison
from spark_bridge.queryable.reads.scans import RowSelection
from spark_bridge.state_format.stored_rows import VariableRows

UTC = pa.timestamp("us", "UTC")
VALUES = pa.schema(
    [
        pa.field("i", pa.int32()),
        pa.field("f", pa.float64()),
        pa.field("s", pa.string()),
        pa.field("flag", pa.bool_()),
        pa.field("raw", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("at", UTC),
        pa.field("local", pa.timestamp("us")),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("many", pa.list_(pa.int64())),
    ]
)
DAY, TIME = dt.date(2013, 1, 2), dt.datetime(2013, 1, 2, 3, 4, 5)
ROW = [7, 1.5, "é", True, b"\x00\x01", DAY, TIME.replace(tzinfo=dt.timezone.utc), TIME, Decimal("12.30"), [1]]
SCHEMA = OperatorSchema.of_rows(StateSchema(pa.schema([pa.field("k", pa.int64())]), VALUES))
ROWS = VariableRows(SCHEMA, SCHEMA.variables[0])


def found(*where: Comparison) -> list[int]:
    """The keys of two rows, one of them all nulls, that comparisons leave."""
    columns = [pa.array([1, 2]), *(pa.array([v, None], f.type) for v, f in zip(ROW, VALUES, strict=True))]
    places = [pa.array([0, 0], pa.int32())] * 2
    batch = pa.RecordBatch.from_arrays([*columns, *places], schema=ROWS.output)
    selection = RowSelection.of(ROWS, ["k"], where)
    return selection.rows(batch).column(0).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("column", "equal", "above"),
    [
        ("i", 7, 8),
        ("i", "7", 7.0 + 1),
        ("f", 1.5, 2),
        ("s", "é", "ê"),
        ("flag", True, None),
        ("flag", "true", None),
        ("raw", "\x00\x01", "\x01"),
        ("day", "2013-01-02", "2013-01-03"),
        ("at", "2013-01-02T03:04:05Z", "2013-01-02T04:04:06+01:00"),
        ("at", "2013-01-02 03:04:05", "2013-01-02 03:04:05.000001"),
        ("local", "2013-01-02 03:04:05", "2014-01-01"),
        ("price", "12.3", "12.31"),
        ("price", 12.3, 13),
    ],
)
def test_values_are_compared_in_the_columns_type(column: str, equal: Any, above: Any) -> None:
    assert found(Comparison(column, "=", [equal])) == [1]
    assert found(Comparison(column, "!=", [equal])) == []
    assert found(Comparison(column, "in", [equal])) == [1]
    assert found(Comparison(column, "in", [])) == []
    assert found(Comparison(column, "is null")) == [2]
    if above is not None:
        for comparison, expected in (("<", [1]), ("<=", [1]), (">", []), (">=", []), ("=", []), ("!=", [1])):
            assert found(Comparison(column, comparison, [above])) == expected, comparison


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("i", "x"),
        ("i", False),
        ("flag", 2),
        ("f", "x"),
        ("s", True),
        ("day", "2013-13-01"),
        ("at", "yesterday"),
        ("many", 1),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(column: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"olumn {column!r}"):
        found(Comparison(column, "=", [value]))


def kept(kind: pa.DataType, values: list[Any], *condition: Any) -> list[Any]:
    """The values of a column that meet a client's condition, which is encoded and decoded as on the wire."""
    value = pa.schema([pa.field("v", kind)])
    schema = OperatorSchema.of_rows(StateSchema(pa.schema([pa.field("k", pa.int64())]), value))
    rows = VariableRows(schema, schema.variables[0])
    (made,) = comparisons([("v", *condition)], {"v": kind})
    sent = msgspec.json.decode(msgspec.json.encode(made), type=Comparison)
    places = [pa.array([0] * len(values), pa.int32())] * 2
    columns = [pa.array(range(len(values)), pa.int64()), pa.array(values, kind), *places]
    found = RowSelection.of(rows, ["v"], [sent]).rows(pa.RecordBatch.from_arrays(columns, schema=rows.output))
    return found.column(0).to_pylist()  # type: ignore[no-any-return]


FLOATS = [-math.inf, -1.5, -0.0, 0.0, 1.5, math.inf, math.nan, None]
PLACES = [0, 1, 2, 2, 3, 4, 5]
"""The rank of each float, without the null, in Spark's order."""


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
@pytest.mark.parametrize("operator", ["=", "!=", "<", "<=", ">", ">="])
@pytest.mark.parametrize("at", range(7))
def test_floats_are_compared_as_spark_compares_them(kind: pa.DataType, operator: str, at: int) -> None:
    compare: Any = {"=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}[operator]
    expected = [repr(v) for v, place in zip(FLOATS, PLACES, strict=False) if compare(place, PLACES[at])]
    assert [repr(v) for v in kept(kind, FLOATS, operator, FLOATS[at])] == expected
    if operator == "=":
        assert [repr(v) for v in kept(kind, FLOATS, "in", [FLOATS[at]])] == expected


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int32(), [-(2**31), -42, 42, 43, 2**31 - 1]),
        (pa.int64(), [-(2**63), -42, 42, 43, 2**63 - 1]),
        (pa.float32(), [-math.inf, -42, 42, 43, math.inf]),
        (pa.float64(), [-math.inf, -42, 42, 43, math.inf]),
        (pa.decimal128(38, 0), [1 - 10**38, -42, 42, 43, 10**38 - 1]),
        (pa.decimal128(4, 2), [Decimal("-99.99"), -42, 42, 43, Decimal("99.99")]),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "value",
    [
        42,
        42.0,
        42.5,
        -42.5,
        "42.5",
        Decimal("42.555"),
        2**70,
        -(2**70),
        10**200,
        1e300,
        -1e300,
        math.inf,
        99.995,
        "1e999999",
    ],
    ids=str,
)
def test_numbers_that_a_column_cannot_have_are_compared_exactly(
    kind: pa.DataType, values: list[Any], value: Any
) -> None:
    number = Decimal(str(value))
    for operator, compare in (("=", eq), ("!=", ne), ("<", lt), ("<=", le), (">", gt), (">=", ge)):
        expected = [v for v in values if compare(Decimal(v), number)]
        assert kept(kind, values, operator, value) == expected, operator
    assert kept(kind, values, "in", [value, 43]) == [v for v in values if Decimal(v) in (number, 43)]


def test_nothing_is_greater_than_nan() -> None:
    for operator in ("=", ">", ">="):
        assert kept(pa.int64(), [1], operator, math.nan) == []
    for operator in ("!=", "<", "<="):
        assert kept(pa.int64(), [1, None], operator, math.nan) == [1]


def test_bytes_are_compared_as_bytes() -> None:
    values = [b"", b"\x00", b"a", b"\xff", None]
    assert kept(pa.binary(), values, "=", b"\xff") == [b"\xff"]
    assert kept(pa.binary(), values, "<", bytearray(b"a")) == [b"", b"\x00"]
    assert kept(pa.binary(), values, "in", [b"\x00", "a"]) == [b"\x00", b"a"]
    assert kept(pa.binary(), values, "!=", "a") == [b"", b"\x00", b"\xff"]
    for column in ("raw", "s"):
        with pytest.raises(RequestError, match=f"'{column}'"):
            found(Comparison(column, "=", ["?" if column == "raw" else "YQ=="], True))


def test_lists_can_be_compared_with_null() -> None:
    assert found(Comparison("many", "is null")) == [2]
    assert found(Comparison("many", "is not null"), Comparison("i", "<", [100])) == [1]


def test_position_comes_first_under_a_unique_name() -> None:
    selection = RowSelection.of(ROWS, ["s", "k"], (), with_position=True)
    assert selection.schema.names == ["position", "s", "k"]
    schema = OperatorSchema.of_rows(
        StateSchema(pa.schema([pa.field("position", pa.int64())]), pa.schema([pa.field("n", pa.int64())]))
    )
    of = RowSelection.of(VariableRows(schema, schema.variables[0]), None, (), with_position=True)
    assert of.schema.names == ["position_", "position", "n"]
