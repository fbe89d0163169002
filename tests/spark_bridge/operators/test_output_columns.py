"""What an output of ``aggregate`` refuses to be computed from, and the remedy that it names."""

from __future__ import annotations

import pytest
from pyspark.sql import types as T

from spark_bridge import functions as S
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.functions import AggregateFunction
from spark_bridge.operators.aggregate import output_of

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
