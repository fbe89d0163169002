"""Which columns can be keys."""

from __future__ import annotations

import inspect

import pytest
from pyspark.sql import types as T

from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.columns import check_keys


def test_names_of_the_state_stores_own_columns_are_refused() -> None:
    schema = T.StructType().add("user", T.LongType()).add("__statestore_key_group", T.IntegerType())
    check_keys(schema, ["user"])
    with pytest.raises(InvalidOperatorError, match=r"'__statestore_key_group'.*begin with __statestore_: rename it"):
        check_keys(schema, ["user", "__statestore_key_group"])


@pytest.mark.spark42
@pytest.mark.skipif(
    "collation" not in inspect.signature(T.StringType).parameters, reason="This Spark has no collations."
)
def test_keys_that_are_equal_by_another_collation_are_refused() -> None:
    kind = T.StringType("UTF8_LCASE")  # type: ignore[call-arg]
    with pytest.raises(InvalidOperatorError, match=r"'name'.*UTF8_LCASE.*by their bytes: cast it to string"):
        check_keys(T.StructType().add("name", kind), ["name"])
    check_keys(T.StructType().add("name", T.StringType()), ["name"])
