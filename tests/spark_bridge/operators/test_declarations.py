"""What the driver takes and refuses in an operator's declaration: its name, its keys, its outputs, its event time.

The driver takes the names that the store takes, and no others. It aims at a Spark partition through Spark's own hash.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from pyspark.sql import types as T

from backends import StateStoreId
from backends.exceptions import InvalidStateStoreArgument
from coordinator_actor.messages import BatchTimes
from spark_bridge import functions as S
from spark_bridge import lookups
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.functions import AggregateFunction
from spark_bridge.operators.aggregate import output_of
from spark_bridge.operators.columns import (
    arrow_type,
    check_keys,
    is_ordered,
    session_event_time,
    watermark_columns,
    watermark_lag_ms,
    with_event_time,
    without_event_time,
)
from spark_bridge.operators.map_in_arrow import check_operator_name, murmur3_int, partition_targets
from spark_bridge.task.state_task import WATERMARK_METADATA, EventTime

SESSION = T.StructType().add("start", T.TimestampType()).add("end", T.TimestampType())
MARK = {WATERMARK_METADATA: 1000}


@pytest.mark.parametrize("output_mode", ["append", "update"])
def test_watermark_next_to_the_session_window_is_rejected(output_mode: str) -> None:
    beside = T.StructType().add("session_window", SESSION).add("ts2", T.TimestampType(), metadata=MARK)
    with pytest.raises(InvalidOperatorError, match=r"'ts2' has the watermark.*'session_window'.*withWatermark"):
        session_event_time(beside, ["session_window", "ts2"], "session_window", output_mode)
    assert session_event_time(beside, ["session_window", "ts2"], "session_window", "complete") is None
    assert session_event_time(beside, ["session_window"], "session_window", output_mode) is None


def test_delayed_columns_carry_their_watermark_lag() -> None:
    source = T.StructField("t", T.TimestampType(), metadata={**MARK, "comment": "of the source"})
    plain = T.StructField("at", T.TimestampType(), metadata={"comment": "own"})
    at_once, waited = with_event_time(plain, source, 0), with_event_time(source, source, 2500)
    assert at_once.metadata == {**MARK, "comment": "own"}
    # Spark's own operators would take the rows for late, and find no watermark.
    assert WATERMARK_METADATA not in waited.metadata
    schema = T.StructType([at_once, waited])
    assert watermark_columns(schema) == ["at", "t"]
    assert [watermark_lag_ms(schema, time) for time in (EventTime("at"), EventTime("t"), None)] == [0, 2500, 0]
    assert without_event_time(waited).metadata == {"comment": "of the source"}


def test_the_watermark_counts_later_for_rows_that_have_waited() -> None:
    assert BatchTimes(7, 9000, 4000).behind(2500) == BatchTimes(7, 6500, 1500)
    assert BatchTimes(7, 9000, 0).behind(10_000) == BatchTimes(7, 0, 0)


def test_the_session_window_has_the_event_time() -> None:
    schema = T.StructType().add("session_window", SESSION, metadata=MARK).add("k", T.LongType())
    event_time = session_event_time(schema, ["session_window", "k"], "session_window", "append")
    assert event_time == EventTime("session_window", is_window=True)


def test_names_of_the_state_stores_own_columns_are_refused() -> None:
    schema = T.StructType().add("user", T.LongType()).add("__statestore_key_group", T.IntegerType())
    check_keys(schema, ["user"])
    with pytest.raises(InvalidOperatorError, match=r"'__statestore_key_group'.*begin with __statestore_: rename it"):
        check_keys(schema, ["user", "__statestore_key_group"])


HAS_COLLATIONS = "collation" in inspect.signature(T.StringType).parameters
NESTED: dict[str, Callable[[T.DataType], T.DataType]] = {
    "string": lambda kind: kind,
    "array<string>": T.ArrayType,
    "struct<name:string>": lambda kind: T.StructType().add("name", kind),
    "array<struct<name:string>>": lambda kind: T.ArrayType(T.StructType().add("name", kind)),
}


@pytest.mark.spark42
@pytest.mark.skipif(not HAS_COLLATIONS, reason="This Spark has no collations.")
@pytest.mark.parametrize("plain", NESTED)
def test_values_that_are_equal_by_another_collation_are_not_compared(plain: str) -> None:
    kind = NESTED[plain](T.StringType("UTF8_LCASE"))
    schema = T.StructType().add("name", kind).add("n", "long")
    words = f"'name'.*UTF8_LCASE.*by their bytes: cast it to {plain}[.,]"
    with pytest.raises(InvalidOperatorError, match=words):
        check_keys(schema, ["name"])
    compare = [S.min("name"), S.max("name"), S.top_k("name", 2), S.collect_set("name"), S.approx_count_distinct("name")]
    for function in [*compare, S.last("n", by="name"), S.collect_list("n", by="name"), S.top_k("n", 2, by="name")]:
        with pytest.raises(InvalidOperatorError, match=words):
            output_of(schema, "o", function, None)
    with pytest.raises(InvalidOperatorError, match=r"'n, name' has type struct.*UTF8_LCASE.*by their bytes"):
        output_of(schema, "o", S.top_k(["n", "name"], 2), None)
    output_of(schema, "o", S.count("name"), None)
    codec = SimpleNamespace(by=("name",), in_words="name")
    types = {"name": arrow_type(NESTED[plain](T.StringType()))}
    view: Any = SimpleNamespace(codec=codec, operator="o", types=types)
    df: Any = SimpleNamespace(schema=schema, columns=schema.names)
    with pytest.raises(InvalidOperatorError, match=words):
        lookups._keys(df, view, "name", False)
    bytewise = T.StructType().add("name", NESTED[plain](T.StringType()))
    df.schema = bytewise
    assert lookups._keys(df, view, "name", False) == {"name": "name"}
    check_keys(bytewise, ["name"])
    output_of(bytewise, "o", S.max("name"), None)


MAP = T.MapType(T.StringType(), T.LongType())


@pytest.mark.parametrize("kind", [MAP, T.ArrayType(MAP), T.StructType().add("a", "long").add("m", MAP)])
def test_maps_have_no_order_wherever_they_are(kind: T.DataType) -> None:
    assert not is_ordered(kind)
    assert not is_ordered(T.ArrayType(T.StructType().add("deep", kind)))
    assert is_ordered(T.ArrayType(T.StructType().add("deep", "string").add("n", "decimal(10,2)")))
    with pytest.raises(InvalidOperatorError, match="which cannot be a key"):
        check_keys(T.StructType().add("k", kind), ["k"])


SCHEMA = T.StructType().add("text", "string").add("flag", "boolean")


@pytest.mark.parametrize("function", [S.sum, S.avg, S.stddev, S.variance])
def test_arithmetic_on_strings_is_rejected_with_sparks_cast(function: object) -> None:
    asked = function("text")  # type: ignore[operator]
    assert isinstance(asked, AggregateFunction)
    with pytest.raises(InvalidOperatorError, match=r"'text' has type string.*cast\(\"double\"\)"):
        output_of(SCHEMA, "total", asked, None)


def test_the_cast_names_the_column_as_spark_resolves_it() -> None:
    with pytest.raises(InvalidOperatorError) as caught:
        output_of(T.StructType().add("a.b`c", "string"), "total", S.sum("a.b`c"), None)
    assert ".withColumn('a.b`c', F.col('`a.b``c`').cast(\"double\"))" in str(caught.value)


def test_a_name_in_another_case_is_named() -> None:
    with pytest.raises(InvalidOperatorError, match=r"'Text': .* case-sensitive here, .*: write 'text'\.$"):
        output_of(SCHEMA, "total", S.max("Text"), None)
    with pytest.raises(InvalidOperatorError, match=r"has text, flag\.$"):
        output_of(SCHEMA, "total", S.max("other"), None)


def test_other_types_are_refused_without_that_remedy() -> None:
    with pytest.raises(InvalidOperatorError, match="'flag' has type boolean") as caught:
        output_of(SCHEMA, "total", S.sum("flag"), None)
    assert "cast" not in str(caught.value)


NO_PLAN = cast(Any, None)


@pytest.mark.parametrize("name", ["größe", "-x", "x" * 201, "", ".x", "a/b", "a b", "x\n", None])
def test_driver_rejects_names_that_the_store_rejects(name: Any) -> None:
    with pytest.raises(InvalidStateStoreArgument):
        StateStoreId("ck", name, 0)
    with pytest.raises(InvalidOperatorError, match=r"operator=.*: use 1 to 200 letters"):
        check_operator_name(name, NO_PLAN)


@pytest.mark.parametrize("name", ["user_totals", "A.b-c", "_x", "0", "x" * 200])
def test_driver_accepts_names_that_the_store_accepts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_bridge.operators.map_in_arrow.declared_in", lambda df: [])
    check_operator_name(name, NO_PLAN)
    assert StateStoreId("ck", name, 0).operator_id == name


def test_murmur3_equals_sparks_hash_of_ints() -> None:
    # select hash(0), hash(1), hash(-1), hash(42), hash(2147483647) on Spark 3.5 and 4.2
    values = np.array([0, 1, -1, 42, 2147483647], dtype=np.int32)
    assert murmur3_int(values).tolist() == [933211791, -559580957, -1604776387, 29417773, 133916647]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 200, 4096])
def test_every_partition_has_a_target_that_hashes_to_it(n: int) -> None:
    targets = np.array(partition_targets(n), dtype=np.int32)
    assert np.mod(murmur3_int(targets).astype(np.int64), n).tolist() == list(range(n))
