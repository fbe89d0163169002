"""Results of single states: exactly what the columns give, or nothing."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding.schema import StateSchema
from backends.encoding.single_rows import ValueDecoder
from spark_bridge.aggregates.aggregator import result_fields, results, state_fields
from spark_bridge.aggregates.computation import Output
from spark_bridge.state_format.stored_values import MOMENT_FUNCTIONS, SingleResults
from tests.backends.strategies import LEAVES, comparable, values_of
from tests.effort import examples

INT, FLOAT, MONEY = pa.int32(), pa.float64(), pa.decimal128(12, 2)


def of_leaf(name, functions):
    made = st.tuples(st.sampled_from(functions), st.sampled_from(list(LEAVES)), st.sampled_from(list(LEAVES)))
    return made.map(lambda f: Output(name, f[0], "x", "t", f[1], f[2]))


OUTPUTS = st.one_of(
    st.sampled_from([Output("n", "count", None, None, None), Output("n", "count_if", "b", None, pa.bool_())]),
    st.sampled_from([INT, FLOAT, MONEY]).map(lambda kind: Output("n", "sum", "x", None, kind)),
    st.just(Output("n", "mean", "x", None, INT)),
    of_leaf("n", ["min", "max"]),
    of_leaf("n", ["first", "last"]),
    st.sampled_from(MOMENT_FUNCTIONS).map(lambda function: Output("n", function, "x", None, FLOAT)),
)


@st.composite
def states(draw):
    outputs = draw(st.lists(OUTPUTS, min_size=1, max_size=4))
    fields = [
        pa.field(f.name.replace("n.", f"out.{i}.", 1), f.type) for i, o in enumerate(outputs) for f in state_fields(o)
    ]
    schema = pa.schema(fields)
    counts = st.none() | st.integers(-2, 5) | st.sampled_from([1 << 53, (1 << 53) + 1])
    others = {pa.int64(): counts, pa.decimal128(22, 2): st.none() | st.decimals(-1000, 1000, places=2)}
    columns = [pa.array([draw(others[f.type] if f.type in others else values_of(f.type))], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def columnar(batch):
    return pa.RecordBatch.from_arrays(results(batch), schema=pa.schema(result_fields(batch.schema))).to_pylist()[0]


@settings(deadline=None, max_examples=examples(300))
@given(states())
def test_results_are_those_of_the_columns(batch):
    result = SingleResults.of(batch.schema).of_row(batch.to_pylist()[0])
    if result is None:
        assert {1 << 53, (1 << 53) + 1} & set(batch.to_pylist()[0].values()) or any(
            isinstance(value, float) and value < 0 for value in batch.to_pylist()[0].values()
        )
    else:
        expected = columnar(batch)
        assert list(result) == list(expected)
        assert comparable(result) == comparable(expected)


@pytest.mark.parametrize("function", ["mean", *MOMENT_FUNCTIONS])
def test_each_count_likely_to_go_wrong(function):
    schema = pa.schema(state_fields(Output("n", function, "x", None, INT if function == "mean" else FLOAT)))
    for count in (None, -1, 0, 1, 2, 5):
        for value in (None, 0.0, -0.0, 1.5):
            columns = [pa.array([count if f.type == pa.int64() else value], f.type) for f in schema]
            batch = pa.RecordBatch.from_arrays(columns, schema=schema)
            result = SingleResults.of(schema).of_row(batch.to_pylist()[0])
            assert result is not None
            assert comparable(result) == comparable(columnar(batch)), (count, value)


def test_a_count_that_a_double_does_not_hold_is_left_to_the_columns():
    batch = pa.record_batch({"m.mean.sum": [1.0], "m.mean.count": [(1 << 53) + 1]})
    assert SingleResults.of(batch.schema).of_row(batch.to_pylist()[0]) is None
    with pytest.raises(pa.ArrowInvalid):
        results(batch)


def test_other_functions_are_left_to_the_columns():
    count = Output("n", "count", None, None, None)
    for other in (
        Output("m", "mean(12,2)", "m", None, MONEY),
        Output("m", "collect_list(3)", "x", None, INT),
        Output("m", "approx_count_distinct(12)", "x", None, INT),
    ):
        schema = pa.schema([*state_fields(count), *state_fields(other)])
        assert SingleResults.of(schema) is None


def test_from_the_stored_bytes():
    batch = pa.record_batch({"a.b.count.count": [3], "m.mean.sum": [1.5], "m.mean.count": [3], "w.last.value": ["x"]})
    schema = StateSchema(pa.schema([("k", pa.int64())]), batch.schema)
    row = ValueDecoder.of(schema.value, schema.history).decode(schema.encode_values(batch)[0].as_py())
    assert SingleResults.of(schema.value).of_row(row) == {"a.b": 3, "m": 0.5, "w": "x"}
