"""Columns of every type that can be stored, with values that are likely to go wrong."""

import datetime as dt
from decimal import Decimal

import pyarrow as pa
from hypothesis import strategies as st

UTC = dt.timezone.utc


def _ints(bits):
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return st.integers(low, high) | st.sampled_from([low, -1, 0, 1, high])


def _decimals(precision, scale):
    limit = 10**precision - 1
    return st.integers(-limit, limit).map(lambda i: Decimal((i < 0, tuple(map(int, str(abs(i)))), -scale)))


STRINGS = st.text(max_size=6) | st.text("\x00\x01aÿ", max_size=5)
BINARIES = st.binary(max_size=6) | st.lists(st.sampled_from([0, 1, 254, 255]), max_size=5).map(bytes)
FIXED = {
    pa.bool_(): st.booleans(),
    pa.int8(): _ints(8),
    pa.int16(): _ints(16),
    pa.int32(): _ints(32),
    pa.int64(): _ints(64),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats() | st.sampled_from([0.0, -0.0, float("nan"), float("inf"), float("-inf")]),
    pa.date32(): st.dates(),
    pa.timestamp("us"): st.datetimes(),
    pa.timestamp("us", tz="UTC"): st.datetimes(timezones=st.just(UTC)),
    pa.decimal128(9, 2): _decimals(9, 2),
    pa.decimal128(38, 10): _decimals(38, 10),
}
LEAVES = {**FIXED, pa.string(): STRINGS, pa.binary(): BINARIES}


def values_of(kind):
    """Values of a type, None among them."""
    if pa.types.is_struct(kind):
        made = st.fixed_dictionaries({f.name: values_of(f.type) for f in kind})
    elif pa.types.is_map(kind):
        made = st.dictionaries(LEAVES[kind.key_type], values_of(kind.item_type), max_size=3).map(
            lambda d: list(d.items())
        )
    elif pa.types.is_list(kind):
        made = st.lists(values_of(kind.value_type), max_size=3)
    else:
        made = LEAVES[kind]
    return st.none() | made


def kinds(*, maps):
    """Types: leaves, and structs, arrays and maybe maps of them."""

    def nest(inner):
        options = [
            inner.map(pa.list_),
            st.lists(inner, min_size=1, max_size=3).map(lambda ts: pa.struct([(f"f{i}", t) for i, t in enumerate(ts)])),
        ]
        if maps:
            options.append(st.tuples(st.sampled_from([pa.string(), pa.int32()]), inner).map(lambda kv: pa.map_(*kv)))
        return st.one_of(options)

    return st.recursive(st.sampled_from(list(LEAVES)), nest, max_leaves=3)


@st.composite
def batches(draw, *, maps=False, max_columns=3, max_rows=8):
    """Record batches of any schema; about half of them slices of a longer one."""
    chosen = draw(st.lists(kinds(maps=maps), min_size=1, max_size=max_columns))
    n = draw(st.integers(0, max_rows))
    columns = [pa.array(draw(st.lists(values_of(t), min_size=n, max_size=n)), t) for t in chosen]
    batch = pa.record_batch(columns, names=[f"c{i}" for i in range(len(chosen))])
    if n and draw(st.booleans()):
        first = draw(st.integers(0, n - 1))
        batch = batch.slice(first, draw(st.integers(0, n - first)))
    return batch


def sort_key(value):
    """Orders values as keys are to be ordered: null first, NaN last, strings by their UTF-8 bytes."""
    if value is None:
        return (0,)
    if isinstance(value, float):
        return (1, value != value, 0.0 if value != value else value + 0.0)
    if isinstance(value, str):
        return (1, value.encode())
    if isinstance(value, dict):
        return (1, *(sort_key(v) for _, v in sorted(value.items())))
    if isinstance(value, list):
        return (1, [sort_key(v) for v in value])
    return (1, value)


def normal(value):
    """A value as it must come back from a key: -0.0 as 0.0, NaN comparable."""
    if isinstance(value, float):
        return "nan" if value != value else value + 0.0
    if isinstance(value, dict):
        return {k: normal(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [normal(v) for v in value]
    return value
