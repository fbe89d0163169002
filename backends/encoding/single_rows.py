"""Encode one key or decode one value, for single look-ups; ``keys`` and ``values`` do the same for columns.

A column of one row costs Arrow and numpy hundreds of microseconds, an encoder or decoder here a few. It is made once
per schema and gives exactly the result of ``keys`` and ``values``. These still handle types and values that are not
plain, and all invalid values.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from operator import itemgetter
from typing import Any, TypeAlias

import pyarrow as pa
import xxhash

from backends.encoding.columns import fixed_dtype
from backends.encoding.key_groups import SEED, SMALL_DECIMAL, check_num_groups, java_bytes

_SIGN_8 = 1 << 63
_EPOCH = dt.datetime(1970, 1, 1)
_EPOCH_UTC = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_EPOCH_DAY = dt.date(1970, 1, 1).toordinal()
_MICROSECOND = dt.timedelta(microseconds=1)
_NO_OFFSET = dt.timedelta(0)
_EXACT = Context(prec=76)
"""The default context would round the longest decimals; this one has more digits than a decimal can have."""

_hash = xxhash.xxh64_intdigest

Column: TypeAlias = Callable[[Any, int], tuple[int, bytes]]
"""Encodes one key column: takes a value and the hash of the columns before, returns the next hash and the bytes."""
RowReading: TypeAlias = Callable[[Any], Any]


class _Unsure(Exception):
    """The value is left to the column-wise code (``encode_keys``, ``decode_values``)."""


_UNSURE = (_Unsure, struct.error, OverflowError, ValueError)


class KeyEncoder:
    """Encodes single keys of one schema, as ``keys.encode_keys`` with ``key_groups.key_groups`` would."""

    def __init__(self, columns: Sequence[Column], num_groups: int) -> None:
        self._columns = tuple(columns)
        self._num_groups = num_groups

    @classmethod
    def of(cls, schema: pa.Schema, num_groups: int) -> KeyEncoder | None:
        """Return the encoder of a ``StateSchema``'s key; None if a column is an array or a struct.

        Raises ``InvalidStateStoreArgument`` for a number of key groups outside 1 to 65,536.
        """
        check_num_groups(num_groups)
        columns = [_key_column(field.type) for field in schema]
        not_none = [column for column in columns if column is not None]
        return cls(not_none, num_groups) if not_none and len(not_none) == len(columns) else None

    def encode(self, key: Any) -> bytes | None:
        """Return the stored key: key group and columns. ``key`` is a tuple, or a plain value for one column.

        None leaves the key to the columns: they convert values of another Python type than the column's own, or reject
        them.
        """
        if type(key) is not tuple:
            key = (key,)
        hashed = SEED
        pieces = [b""]
        try:
            for column, value in zip(self._columns, key, strict=True):
                hashed, piece = column(value, hashed)
                pieces.append(piece)
        except _UNSURE:
            return None
        if hashed >= _SIGN_8:
            hashed -= 1 << 64
        pieces[0] = (hashed % self._num_groups).to_bytes(2, "big")
        return b"".join(pieces)


def _key_column(kind: pa.DataType) -> Column | None:
    if pa.types.is_boolean(kind):
        return _booleans
    if pa.types.is_signed_integer(kind):
        return _numbers(kind.bit_width // 8, _integer)
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return _floats(kind.bit_width // 8)
    if pa.types.is_date32(kind):
        return _numbers(4, _days)
    if kind in (pa.timestamp("us"), pa.timestamp("us", tz="UTC")):
        return _numbers(8, _microseconds if kind.tz is None else _microseconds_utc)
    if pa.types.is_decimal128(kind):
        return _decimals(kind.precision, kind.scale)
    if pa.types.is_string(kind):
        return _bytes(str, str.encode)
    if pa.types.is_binary(kind):
        return _bytes(bytes, bytes)
    return None


def _booleans(value: Any, seed: int) -> tuple[int, bytes]:
    if value is True:
        return _hash(b"\x01\x00\x00\x00", seed), b"\x01\x01"
    if value is False:
        return _hash(b"\x00\x00\x00\x00", seed), b"\x01\x00"
    if value is None:
        return seed, b"\x00\x00"
    raise _Unsure


def _numbers(width: int, number_of: Callable[[Any], int]) -> Column:
    """Encode values as signed integers of ``width`` bytes. Integers of fewer than 8 bytes are hashed as 4 bytes."""
    hashed = struct.Struct("<q" if width == 8 else "<i").pack
    stored = struct.Struct(">B" + {1: "B", 2: "H", 4: "I", 8: "Q"}[width]).pack
    sign = 1 << (width * 8 - 1)
    null = bytes(1 + width)

    def encode(value: Any, seed: int) -> tuple[int, bytes]:
        if value is None:
            return seed, null
        number = number_of(value)
        return _hash(hashed(number), seed), stored(1, number + sign)

    return encode


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise _Unsure
    return value


def _days(value: Any) -> int:
    if type(value) is not dt.date:
        raise _Unsure
    return value.toordinal() - _EPOCH_DAY


def _microseconds(value: Any) -> int:
    if type(value) is not dt.datetime or value.tzinfo is not None:
        raise _Unsure
    return (value - _EPOCH) // _MICROSECOND


def _microseconds_utc(value: Any) -> int:
    if type(value) is not dt.datetime:
        raise _Unsure
    if value.tzinfo is None:
        return (value - _EPOCH) // _MICROSECOND
    if value.tzinfo is not dt.timezone.utc and value.utcoffset() != _NO_OFFSET:
        raise _Unsure
    return (value - _EPOCH_UTC) // _MICROSECOND


def _floats(width: int) -> Column:
    """Encode floats, ordered by their bits, with one NaN, and -0.0 as 0.0."""
    code, bits_code = ("<f", "I") if width == 4 else ("<d", "Q")
    hashed = struct.Struct(code).pack
    bits_of = struct.Struct("<" + bits_code).unpack
    stored = struct.Struct(">B" + bits_code).pack
    sign = 1 << (width * 8 - 1)
    every = (1 << (width * 8)) - 1
    nan = hashed(float("nan"))
    null = bytes(1 + width)

    def encode(value: Any, seed: int) -> tuple[int, bytes]:
        if value is None:
            return seed, null
        if type(value) is not float:
            raise _Unsure
        # A value too small for four bytes becomes a zero that may be negative, so the sign is looked at afterwards.
        raw = nan if math.isnan(value) else hashed(value)
        bits = bits_of(raw)[0]
        if bits == sign:
            raw, bits = bytes(width), 0
        return _hash(raw, seed), stored(1, bits ^ (every if bits & sign else sign))

    return encode


def _decimals(precision: int, scale: int) -> Column:
    limit = 10**precision
    factor = 10**scale if scale >= 0 else 0
    null = bytes(17)

    def encode(value: Any, seed: int) -> tuple[int, bytes]:
        if value is None:
            return seed, null
        # A large exponent would make a large integer; and a value with more digits than the scale may be rejected.
        if type(value) is not Decimal or not factor or not -scale <= value.adjusted() < precision:
            raise _Unsure
        numerator, denominator = value.as_integer_ratio()
        unscaled, rest = divmod(numerator * factor, denominator)
        if rest or not -limit < unscaled < limit:
            raise _Unsure
        stored = b"\x01" + (unscaled + (1 << 127)).to_bytes(16, "big")
        if precision <= SMALL_DECIMAL:
            return _hash(unscaled.to_bytes(8, "little", signed=True), seed), stored
        return _hash(java_bytes(unscaled), seed), stored

    return encode


def _bytes(kind: type, bytes_of: Callable[[Any], bytes]) -> Column:
    def encode(value: Any, seed: int) -> tuple[int, bytes]:
        if value is None:
            return seed, b"\x00\x00\x00"
        if type(value) is not kind:
            raise _Unsure
        content = bytes_of(value)
        return _hash(content, seed), b"\x01" + content.replace(b"\x00", b"\x00\xff") + b"\x00\x00"

    return encode


class ValueDecoder:
    """Decodes single values of one schema, as ``values.decode_values(...).to_pylist()`` would."""

    def __init__(self, schema: pa.Schema, number: int) -> None:
        fixed = [(f.name, code) for f in schema if (code := _code(f.type)) is not None]
        data = [f for f in schema if _code(f.type) is None]
        null_bytes = (len(schema) + 7) // 8
        head = struct.Struct(f"<H{null_bytes}s{''.join(code for _, code in fixed)}{len(data)}I")
        places = [name for name, _ in fixed] + [f.name for f in data]
        self._number = number
        self._size = head.size
        self._unpack = head.unpack_from
        self._no_nulls = bytes(null_bytes)
        self._bits = [(1 << i, f.name) for i, f in enumerate(schema)]
        self._names = list(schema.names)
        # In the order of the schema. The 0 at the end: an itemgetter of one place would not give a tuple.
        self._in_order = itemgetter(*[2 + places.index(name) for name in self._names], 0)
        self._readings = [(f.name, reading) for f in schema if (reading := _reading(f.type)) is not None]
        self._data = [(f.name, pa.types.is_string(f.type)) for f in data]

    @classmethod
    def of(cls, schema: pa.Schema, history: Sequence[pa.Schema] = ()) -> ValueDecoder | None:
        """Return the decoder of a ``StateSchema``'s value; None if a column is an array, a map or a struct."""
        leaves = all(
            _code(f.type) is not None or pa.types.is_string(f.type) or pa.types.is_binary(f.type) for f in schema
        )
        is_simple = leaves and len(schema) > 0 and len(set(schema.names)) == len(schema)
        return cls(schema, len(history)) if is_simple else None

    def decode(self, value: bytes) -> dict[str, Any] | None:
        """Return the columns of a stored value.

        None leaves the value to ``decode_values``: it was written with an earlier schema, or is damaged.
        """
        start, size = self._size, len(value)
        if size < start:
            return None
        head = self._unpack(value)
        if head[0] != self._number:
            return None
        row: dict[str, Any] = dict(zip(self._names, self._in_order(head), strict=False))
        try:
            for name, reading in self._readings:
                row[name] = reading(row[name])
            begin = start
            for name, is_string in self._data:
                stop = begin + row[name]
                if not start <= stop <= size:
                    return None
                row[name] = value[start:stop].decode() if is_string else value[start:stop]
                start = stop
        except _UNSURE:
            return None
        if start != size:
            return None
        if head[1] != self._no_nulls:
            nulls = int.from_bytes(head[1], "little")
            for bit, name in self._bits:
                if nulls & bit:
                    row[name] = None
        return row


_CODES = {"u1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "f4": "f", "f8": "d", "V16": "16s"}


def _code(kind: pa.DataType) -> str | None:
    """Return the ``struct`` format code of a fixed-width column; None for another column."""
    dtype = fixed_dtype(kind)
    return None if dtype is None else _CODES[dtype.str[1:]]


def _reading(kind: pa.DataType) -> RowReading | None:
    """Return the function that makes Arrow's Python value of a stored one; None if they are the same."""
    if pa.types.is_date32(kind):
        return lambda days: dt.date.fromordinal(days + _EPOCH_DAY)
    if pa.types.is_timestamp(kind):
        # Which object stands for UTC differs from one release of Arrow to the next.
        epoch = _EPOCH.replace(tzinfo=pa.scalar(_EPOCH, kind).as_py().tzinfo)
        return lambda microseconds: epoch + dt.timedelta(microseconds=microseconds)
    if pa.types.is_decimal128(kind):
        exponent = -kind.scale
        return lambda raw: _EXACT.scaleb(Decimal(int.from_bytes(raw, "little", signed=True)), exponent)
    return None
