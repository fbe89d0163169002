"""Columns of every type that can be stored, with values that are likely to go wrong."""

import datetime as dt
import math
import struct
from decimal import Decimal

import pyarrow as pa
from hypothesis import strategies as st

UTC = dt.timezone.utc


def _ints(bits):
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return st.integers(low, high) | st.sampled_from([low, -1, 0, 1, high])


def _decimal(digits, scale):
    return Decimal((digits < 0, tuple(map(int, str(abs(digits)))), -scale))


def _decimals(precision, scale):
    limit = 10**precision - 1
    numbers = st.integers(-limit, limit) | st.sampled_from([-limit, -1, 0, 1, limit])
    return numbers.map(lambda i: _decimal(i, scale))


SPECIAL_FLOATS = st.sampled_from([0.0, -0.0, float("nan"), float("inf"), float("-inf")])
# U+FFFF comes before U+10000 by UTF-8 bytes and code points, but not in UTF-16.
STRINGS = st.text(max_size=6) | st.text("\x00\x01aÿ\uffff\U00010000\U0010ffff", max_size=5)
BINARIES = st.binary(max_size=6) | st.lists(st.sampled_from([0, 1, 254, 255]), max_size=5).map(bytes)
FIXED = {
    pa.bool_(): st.booleans(),
    pa.int8(): _ints(8),
    pa.int16(): _ints(16),
    pa.int32(): _ints(32),
    pa.int64(): _ints(64),
    pa.float32(): st.floats(width=32) | SPECIAL_FLOATS,
    pa.float64(): st.floats() | SPECIAL_FLOATS,
    pa.date32(): st.dates() | st.dates(max_value=dt.date(1970, 1, 1)),
    pa.timestamp("us"): st.datetimes() | st.datetimes(max_value=dt.datetime(1970, 1, 1)),
    pa.timestamp("us", tz="UTC"): st.datetimes(timezones=st.just(UTC)),
    pa.decimal128(9, 2): _decimals(9, 2),
    pa.decimal128(38, 10): _decimals(38, 10),
}
LEAVES = {**FIXED, pa.string(): STRINGS, pa.binary(): BINARIES}


def _int_ladder(bits):
    return [-(2 ** (bits - 1)), -256, -1, 0, 1, 256, 2 ** (bits - 1) - 1]


def _float_ladder(least, greatest):
    return [-math.inf, -greatest, -1.0, -least, 0.0, least, 1.0, greatest, math.inf, math.nan]


def _decimal_ladder(precision, scale):
    limit = 10**precision - 1
    return [_decimal(i, scale) for i in (-limit, -256, -1, 0, 1, 256, limit)]


_MOMENTS = [
    dt.datetime.min,
    dt.datetime(1969, 12, 31, 23, 59, 59, 999999),
    dt.datetime(1970, 1, 1),
    dt.datetime(1970, 1, 1, 0, 0, 0, 1),
    dt.datetime.max,
]
LADDERS = {
    pa.bool_(): [False, True],
    pa.int8(): [-128, -2, -1, 0, 1, 126, 127],
    pa.int16(): _int_ladder(16),
    pa.int32(): _int_ladder(32),
    pa.int64(): _int_ladder(64),
    pa.float32(): _float_ladder(2.0**-149, (2 - 2.0**-23) * 2.0**127),
    pa.float64(): _float_ladder(5e-324, 1.7976931348623157e308),
    pa.date32(): [dt.date.min, dt.date(1969, 12, 31), dt.date(1970, 1, 1), dt.date(1970, 1, 2), dt.date.max],
    pa.timestamp("us"): _MOMENTS,
    pa.timestamp("us", tz="UTC"): [moment.replace(tzinfo=UTC) for moment in _MOMENTS],
    pa.decimal128(9, 2): _decimal_ladder(9, 2),
    pa.decimal128(38, 10): _decimal_ladder(38, 10),
    pa.string(): [
        *("", "\0", "\0\0", "\0\x01", "\0a", "\x01", "a", "a\0", "a\0\0", "a\0b", "a\x01", "aa", "b"),
        *("\x7f", "\x80", "ÿ", "\uffff", "\U00010000", "\U0010ffff", "\U0010ffff\0"),
    ],
    pa.binary(): [
        *(b"", b"\0", b"\0\0", b"\0\0\xff", b"\0\x01", b"\0\xff", b"\0\xff\0", b"\0\xff\xff", b"\x01", b"a"),
        *(b"\xff", b"\xff\0", b"\xff\0\0", b"\xff\0\xff", b"\xff\xff"),
    ],
    pa.list_(pa.int8()): [[], [None], [None, None], [None, -128], [-128], [-128, None], [-128, 0], [0], [0, 0], [1]],
    pa.list_(pa.string()): [[], [None], [None, ""], [""], ["", None], ["", ""], ["\0"], ["\0", "\0"], ["\0a"], ["a"]],
    pa.list_(pa.list_(pa.int8())): [[], [None], [None, []], [[]], [[], []], [[], [1]], [[None]], [[0]], [[0], [0]]],
    pa.struct([("z", pa.string()), ("a", pa.float64())]): [
        {"z": None, "a": None},
        {"z": None, "a": math.nan},
        {"z": "", "a": None},
        {"z": "", "a": 0.0},
        {"z": "\0", "a": -1.0},
        {"z": "\0", "a": math.inf},
        {"z": "a", "a": None},
    ],
    pa.list_(pa.struct([("z", pa.binary()), ("a", pa.list_(pa.bool_()))])): [
        [],
        [None],
        [{"z": None, "a": None}],
        [{"z": None, "a": []}],
        [{"z": None, "a": [False]}],
        [{"z": b"", "a": []}],
        [{"z": b"", "a": []}, None],
        [{"z": b"\0", "a": [True]}],
    ],
}
"""Of each type, distinct values in ascending order."""


def values_of(kind):
    """Values of a type, None among them."""
    if pa.types.is_struct(kind):
        names = [f.name for f in kind]  # the dict has their order, which sort_key relies on
        made = st.tuples(*(values_of(f.type) for f in kind)).map(lambda xs: dict(zip(names, xs, strict=True)))
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
            st.lists(inner, min_size=1, max_size=3).map(
                lambda ts: pa.struct([(f"f{9 - i}", t) for i, t in enumerate(ts)])
            ),
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
        return (1, *map(sort_key, value.values()))
    if isinstance(value, list):
        return (1, [sort_key(v) for v in value])
    return (1, value)


def normal(value):
    """A value as it must come back from a key: -0.0 as 0.0."""
    if isinstance(value, float):
        return value + 0.0
    if isinstance(value, dict):
        return {k: normal(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [normal(v) for v in value]
    return value


def comparable(value):
    """Return a value that is equal only for identical values: NaN equals NaN, -0.0 does not equal 0.0."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, dict):
        return {k: comparable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(v) for v in value]
    return value


def hide(values, kind, mask):
    """A column that is null by ``mask``, over ``values`` that stay in its buffers."""
    full = pa.array(values, kind)
    validity = pa.array([not hidden for hidden in mask]).buffers()[1]
    if pa.types.is_struct(kind):
        return pa.Array.from_buffers(kind, len(full), [validity], children=[full.field(i) for i in range(len(kind))])
    if pa.types.is_list(kind):
        return pa.Array.from_buffers(kind, len(full), [validity, full.buffers()[1]], children=[full.values])
    return pa.Array.from_buffers(kind, len(full), [validity, *full.buffers()[1:]])
