"""Comparisons with columns of every type: values as JSON can say them, in the column's type."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.protocol.messages import Comparison
from spark_bridge.queryable.reads.rows.row_selection import RowSelection
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
        ("i", 1.5),
        ("i", 1 << 40),
        ("i", 1 << 70),
        ("i", False),
        ("f", "x"),
        ("s", True),
        ("day", "2013-13-01"),
        ("at", "yesterday"),
        ("price", "1.234"),
        ("many", 1),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(column: str, value: Any) -> None:
    with pytest.raises(RequestError, match=rf"olumn {column!r}"):
        found(Comparison(column, "=", [value]))


def test_lists_can_be_compared_with_null() -> None:
    assert found(Comparison("many", "is null")) == [2]
    assert found(Comparison("many", "is not null"), Comparison("i", "<", [100])) == [1]


def test_the_position_comes_first_under_a_name_of_its_own() -> None:
    selection = RowSelection.of(ROWS, ["s", "k"], (), with_position=True)
    assert selection.schema.names == ["position", "s", "k"]
    schema = OperatorSchema.of_rows(
        StateSchema(pa.schema([pa.field("position", pa.int64())]), pa.schema([pa.field("n", pa.int64())]))
    )
    of = RowSelection.of(VariableRows(schema, schema.variables[0]), None, (), with_position=True)
    assert of.schema.names == ["position_", "position", "n"]
