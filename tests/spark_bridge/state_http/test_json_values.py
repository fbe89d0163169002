"""Keys and values of the state as JSON and in paths: round trips and rejected values."""

from __future__ import annotations

import datetime as dt
import json
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding.schema import StateSchema
from spark_bridge.exceptions import UnknownKeyOrNamespaceError
from spark_bridge.queryable.client import json_values
from spark_bridge.state_format.stored_values import StoredValues
from spark_bridge.state_http.models import CsvBody
from tests.effort import examples
from tests.spark_bridge.state_http.memory_client import TOTALS, UTC

KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), st.text()),
    (pa.binary(), st.binary()),
    (pa.bool_(), st.booleans()),
    (pa.timestamp("us", "UTC"), st.datetimes(timezones=st.just(UTC))),
    (pa.date32(), st.dates()),
    (pa.duration("us"), st.timedeltas()),
    (pa.decimal128(20, 3), st.decimals(-(10**15), 10**15, places=3)),
    (pa.list_(pa.int64()), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3)),
    (
        pa.struct([("a", pa.string()), ("b", pa.int64())]),
        st.fixed_dictionaries({"a": st.text(), "b": st.none() | st.integers(-(2**60), 2**60)}),
    ),
]


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_values_go_through_json_and_back(data: st.DataObject) -> None:
    kind, strategy = data.draw(st.sampled_from(KINDS))
    value = data.draw(strategy)
    through = json.loads(json_values.json_bytes(json_values.to_json(value)))
    assert json_values.from_json(through, kind, "it") == value


def test_strings_that_are_not_utf8_spoil_no_answer() -> None:
    """Spark makes a string of any bytes, as by ``CAST(value AS STRING)`` of a record of Kafka."""
    raw = pa.array([b"plain", b"\xff\xfeA", None, "ü".encode()], pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    nested = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4]), text)
    readable = ["plain", "\\xff\\xfeA", None, "ü"]
    rows = json_values.rows_to_json(pa.record_batch({"key": text, "list": nested}))
    assert rows == [{"key": value, "list": [value]} for value in readable]
    assert len({json_values.json_bytes(row) for row in rows}) == len(rows)
    stored = StoredValues(StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("key", pa.string())])), True)
    encoded = stored.schema.encode_values(pa.record_batch({"key": text}))
    assert [stored.decode_one(value) for value in encoded.to_pylist()] == [{"key": value} for value in readable]


def test_csv_has_times_that_pythons_datetime_cannot_hold() -> None:
    far = pa.array([int(np.datetime64("10000-01-01", "us").astype(int)), 0], pa.int64()).view(pa.timestamp("us"))
    body = CsvBody(pa.schema([("at", far.type)]))
    lines = body.rows(pa.record_batch({"at": far})).decode().splitlines()
    assert lines == ['"at"', '"+10000-01-01T00:00:00"', '"1970-01-01T00:00:00"']


def test_an_empty_map_has_the_form_of_a_filled_one() -> None:
    """Also within structs, lists and other maps."""
    by_text = pa.map_(pa.string(), pa.int64())
    by_number, nested = pa.map_(pa.int64(), by_text), pa.struct([("maps", pa.list_(by_text))])
    columns = {
        "text": pa.array([[("a", 1)], [], None], by_text),
        "number": pa.array([[(1, [("a", 2)])], [], [(1, [])]], by_number),
        "nested": pa.array([{"maps": [[("a", 1)], []]}, {"maps": []}, {"maps": None}], nested),
    }
    assert json_values.rows_to_json(pa.table(columns)) == [
        {"text": {"a": 1}, "number": [{"key": 1, "value": {"a": 2}}], "nested": {"maps": [{"a": 1}, {}]}},
        {"text": {}, "number": [], "nested": {"maps": []}},
        {"text": None, "number": [{"key": 1, "value": {}}], "nested": {"maps": None}},
    ]


def test_numbers_in_strings_have_digits_alone() -> None:
    """Python would take more: underscores, spaces, and digits of other scripts."""
    kinds = (pa.int64(), pa.float64(), pa.decimal128(5, 1))
    assert [json_values.from_json("-10", kind, "it") for kind in kinds] == [-10, -10.0, Decimal(-10)]
    for wrong, of in (("1_0", kinds), (" 1", kinds[:1]), ("+1", kinds[:1]), ("٣", kinds[:1])):
        for kind in of:
            with pytest.raises(UnknownKeyOrNamespaceError, match=r"It should be an? (integer|number)"):
                json_values.from_json(wrong, kind, "it")
    with pytest.raises(UnknownKeyOrNamespaceError, match="Key column 'user': '1_0' is no int64"):
        json_values.key_of_text("1_0", pa.schema([("user", pa.int64())]))


def test_durations() -> None:
    assert json_values.to_json(dt.timedelta(days=1, hours=2, microseconds=500_000)) == "P1DT2H0.5S"
    assert json_values.to_json(-dt.timedelta(seconds=90)) == "-PT1M30S"
    assert (json_values.to_json(dt.timedelta(0)), json_values.to_json(dt.timedelta(days=3))) == ("PT0S", "P3D")
    table = pa.table({"spent": pa.array([dt.timedelta(seconds=5), None], pa.duration("us"))})
    assert json_values.rows_to_json(table) == [{"spent": "PT5S"}, {"spent": None}]
    for wrong in ("", "P", "PT", "P1DT", "1D", "P1Y", "PT1.S", "P999999999DT999999999H", 5, "PT٣S"):
        with pytest.raises(UnknownKeyOrNamespaceError):
            json_values.from_json(wrong, pa.duration("us"), "it")


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.text(), min_size=2, max_size=4))
def test_keys_in_a_path_go_through_quotes(parts: list[str]) -> None:
    schema = pa.schema([(str(i), pa.string()) for i in range(len(parts))])
    text = ",".join('"' + part.replace('"', '""') + '"' for part in parts)
    assert json_values.key_of_text(text, schema) == tuple(parts)
    plain = [part.replace(",", "").replace('"', "") for part in parts]
    assert json_values.key_of_text(",".join(plain), schema) == tuple(plain)


def test_columns_convert_like_single_values() -> None:
    rows = json_values.rows_to_json(TOTALS)
    by_value = [{k: json_values.to_json(v) for k, v in row.items()} for row in TOTALS.to_pylist()]
    assert rows == by_value
    assert rows[0]["n"] == 1 and rows[1]["n"] == str(2**53)
    assert math.isfinite(json_values.rows_to_json(TOTALS.slice(0, 1))[0]["mean"])
    with pytest.raises(TypeError):
        json_values.to_json(object())


@settings(max_examples=examples(150), deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda c: st.lists(c) | st.dictionaries(st.text(), c),
        max_leaves=5,
    ),
    st.sampled_from([k for k, _ in KINDS]),
)
def test_any_json_is_a_value_or_an_error(value: Any, kind: pa.DataType) -> None:
    try:
        made = json_values.from_json(value, kind, "it")
    except UnknownKeyOrNamespaceError as error:
        assert str(error).startswith("it: ")
    else:
        assert made is None or isinstance(
            made, int | float | str | bytes | bool | dt.date | dt.timedelta | Decimal | list | dict
        )
