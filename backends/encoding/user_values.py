"""Python values and Arrow columns that users give, in the types of state, and state as Python values.

Arrow guesses: it takes NaT for a day of the year 1, 1.5 for the day after 1970-01-01, and a UUID for text of 16 bytes.
So every Python value passes through ``plain_value`` before Arrow sees it.
"""

from __future__ import annotations

import datetime as dt
import math
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import list_array, list_parts, null_mask, one_array, struct_array

_INT64_DIGITS = 19
_GREATEST_FLOAT = float(np.finfo(np.float32).max)


class ForeignValueError(TypeError):
    """A value is of another kind than its column."""


_KINDS: tuple[tuple[Callable[[pa.DataType], bool], str, tuple[type, ...]], ...] = (
    (pa.types.is_boolean, "a truth value", (bool,)),
    (pa.types.is_integer, "an integer", (int,)),
    (pa.types.is_floating, "a number", (float,)),
    (pa.types.is_decimal, "a number", (Decimal, int)),
    (pa.types.is_string, "text", (str,)),
    (pa.types.is_binary, "bytes", (bytes,)),
    (pa.types.is_date, "a date", (dt.date,)),
    (pa.types.is_timestamp, "a datetime", (dt.datetime,)),
    (pa.types.is_duration, "a timedelta", (dt.timedelta,)),
    (pa.types.is_struct, "a tuple or dict", ()),
    (pa.types.is_list, "a list", ()),
)
"""The kinds of types: a noun for their values, and the classes that Arrow converts to a flat type without guessing."""

CAST_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError, NotImplementedError)
"""The errors of values that cannot be converted without loss."""


# -- Python values ---------------------------------------------------------------------------


def is_missing(value: object, *, nan: bool = False) -> bool:
    """Return whether a value stands for null: None, pandas' NaT and NA, and NaT of numpy.

    A NaN is a number; with ``nan``, as in pandas, it stands for null too.
    """
    if value is None:
        return True
    if isinstance(value, np.datetime64 | np.timedelta64):
        return bool(np.isnat(value))
    if nan and isinstance(value, float | np.floating | Decimal):
        return value.is_nan() if isinstance(value, Decimal) else bool(np.isnan(value))
    # Do not import pandas: if the process has not imported it, no such value can exist.
    pandas = sys.modules.get("pandas")
    return pandas is not None and (value is getattr(pandas, "NaT", None) or value is getattr(pandas, "NA", None))


@lru_cache(maxsize=1024)
def plain_classes(kind: pa.DataType) -> frozenset[type]:
    """Return the classes whose values, subclasses aside, Arrow converts to a flat type without guessing."""
    classes: tuple[type, ...] = next((classes for is_kind, _, classes in _KINDS if is_kind(kind)), ())
    return frozenset((*classes, type(None)))


def are_plain(values: Sequence[Any], kind: pa.DataType) -> bool:
    """Return whether all values are of ``plain_classes``."""
    classes: frozenset[type] = plain_classes(kind)
    return classes.issuperset(map(type, values))


def plain_value(value: Any, kind: pa.DataType, *, lossless: bool = False) -> Any:
    """Return a value as Arrow takes it for a type: None for a missing one, else of one of ``plain_classes``.

    With ``lossless``, as for keys, numbers of other classes are taken if they are equal, and nothing may be cut off.
    Without, a datetime is the date of its day, as in PySpark. A time beyond Python's years is an integer of
    microseconds. Raises ``ForeignValueError``, ``ValueError`` or ``OverflowError``.
    """
    if isinstance(value, pa.Scalar):
        value = value.as_py()
    if is_missing(value):
        return None
    types = pa.types
    if types.is_struct(kind):
        return _plain_struct(value, kind, lossless)
    if types.is_list(kind):
        if not isinstance(value, list | tuple | np.ndarray):
            raise _foreign(value, kind)
        return [plain_value(v, kind.value_type, lossless=lossless) for v in value]
    if isinstance(value, np.datetime64):
        return _time64(value, kind, lossless)
    if isinstance(value, np.generic):
        value = value.item()
    if types.is_boolean(kind) and isinstance(value, bool):
        return value
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return _number(value, kind, lossless)
    if types.is_string(kind) or types.is_binary(kind):
        return _text(value, kind)
    if types.is_date(kind) and isinstance(value, dt.date):
        if isinstance(value, dt.datetime):
            if lossless and (value.time() != dt.time.min or _nanoseconds(value)):
                raise ValueError("it has a time of day.")
            value = value.date()
        return dt.date.fromordinal(value.toordinal())
    if types.is_timestamp(kind):
        return _time(value, kind, lossless)
    if types.is_duration(kind) and isinstance(value, dt.timedelta):
        if getattr(value, "nanoseconds", 0) and lossless:
            raise ValueError("it has nanoseconds.")
        return dt.timedelta(value.days, value.seconds, value.microseconds)
    raise _foreign(value, kind)


def array_without_loss(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return an array of Python values, if none of them changes by it.

    Times without a zone are UTC. Raises one of ``CAST_ERRORS``.
    """
    # A double that four bytes cannot hold would silently become infinite.
    if pa.types.is_float32(kind) or not are_plain(values, kind):
        values = [plain_value(value, kind, lossless=True) for value in values]
    try:
        return pa.array(values, kind)
    except pa.ArrowException:
        # For the better error of a value that is not plain after all, such as a NaN decimal.
        return pa.array([plain_value(value, kind, lossless=True) for value in values], kind)


def _foreign(value: Any, kind: pa.DataType) -> ForeignValueError:
    wanted = next((noun for is_kind, noun, _ in _KINDS if is_kind(kind)), f"a value of {kind}")
    remedy = " Convert it as the state has it, for example with str()." if wanted in ("text", "bytes") else ""
    return ForeignValueError(f"not {wanted} but of class {type(value).__name__}.{remedy}")


def _number(value: Any, kind: pa.DataType, lossless: bool) -> Any:
    types = pa.types
    if isinstance(value, bool):
        if types.is_floating(kind) and not lossless:
            return float(value)
        raise _foreign(value, kind)
    is_decimal = isinstance(value, Decimal)
    if not isinstance(value, int | float) and not (is_decimal and (lossless or types.is_decimal(kind))):
        raise _foreign(value, kind)
    if types.is_integer(kind):
        if not isinstance(value, int) and (not math.isfinite(value) or value != int(value)):
            raise ValueError("it is not an integer.")
        return int(value)
    if types.is_decimal(kind):
        if isinstance(value, float):
            if not lossless:
                raise _foreign(value, kind)
            value = Decimal(repr(float(value)))  # the digits that people see
        if is_decimal and not value.is_finite():
            raise ValueError("it is not finite.")
        return Decimal(value)
    number = float(value)
    if lossless and math.isfinite(number):
        if (Decimal(repr(number)) if is_decimal else number) != value:
            raise ValueError("it would be rounded.")
        if types.is_float32(kind) and abs(number) > _GREATEST_FLOAT:
            raise ValueError("it is too large.")
    return number


def _text(value: Any, kind: pa.DataType) -> Any:
    if isinstance(value, bytearray | memoryview):
        value = bytes(value)
    if not isinstance(value, str | bytes):
        raise _foreign(value, kind)
    if isinstance(value, str):
        text = str.__str__(value)
        return text if pa.types.is_string(kind) else text.encode()
    return value.decode() if pa.types.is_string(kind) else bytes(value)


def _time(value: Any, kind: pa.DataType, lossless: bool) -> Any:
    if isinstance(value, dt.datetime):
        if lossless and _nanoseconds(value):
            raise ValueError("it has nanoseconds.")
        return value
    if isinstance(value, dt.date) and lossless:
        return dt.datetime(value.year, value.month, value.day)
    raise _foreign(value, kind)


def _nanoseconds(value: Any) -> int:
    """Return the nanoseconds that pandas times have in addition to Python's microseconds."""
    return getattr(value, "nanosecond", 0)


def _time64(value: np.datetime64, kind: pa.DataType, lossless: bool) -> Any:
    if not (pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
        raise _foreign(value, kind)
    unit = "D" if pa.types.is_date(kind) else "us"
    cut = value.astype(f"M8[{unit}]")
    if lossless and cut != value:
        raise ValueError("it has a time of day." if unit == "D" else "it has nanoseconds.")
    return cut.item()


def _plain_struct(value: Any, kind: pa.StructType, lossless: bool) -> dict[str, Any]:
    names = [f.name for f in kind]
    if isinstance(value, tuple | list) and len(value) == len(names):
        value = dict(zip(names, value, strict=True))
    if not isinstance(value, dict):
        raise _foreign(value, kind)
    if set(value) != set(names):
        raise ValueError(f"its fields must be {', '.join(names)}.")
    return {f.name: plain_value(value[f.name], f.type, lossless=lossless) for f in kind}


def python_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return a column's values as ``to_pylist`` does, also where Python's datetime or text cannot hold one of them.

    A time or a date outside the years 1 to 9999 is a ``numpy.datetime64``; times with a zone are in UTC. Spark allows
    any bytes in a string: each byte that is not UTF-8 is written as an escape, such as ``\\xff``.
    """
    try:
        values: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):
        values = [python_value(scalar) for scalar in column]
    return values


def python_value(scalar: pa.Scalar) -> Any:
    """Return one value as ``python_values`` does."""
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if pa.types.is_struct(kind):
        return {kind.field(i).name: python_value(scalar[i]) for i in range(kind.num_fields)}
    if pa.types.is_map(kind):
        return [(python_value(entry[0]), python_value(entry[1])) for entry in scalar.values]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return python_values(scalar.values)
    if pa.types.is_dictionary(kind):
        return python_value(scalar.value)
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes().decode(errors="backslashreplace")
    except (OverflowError, ValueError):
        if pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
            return np.datetime64(scalar.value, "D" if pa.types.is_date32(kind) else kind.unit)
        raise


def python_rows(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as dicts, with ``python_values``."""
    columns = [python_values(column) for column in table.columns]
    names = table.schema.names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


# -- Arrow columns -----------------------------------------------------------------------------


def cast_without_loss(array: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """Return an array of a state column's type, if no value changes by the cast. Numbers are not read from strings.

    A double becomes the nearest float, as a Python number does, and a decimal of any scale; inside of structs and
    arrays a decimal must be exactly that double. Raises one of ``CAST_ERRORS``.
    """
    array = one_array(array)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.type == kind:
        return array
    _check_kind(array.type, kind)
    if pa.types.is_integer(array.type) and pa.types.is_decimal(kind):
        # A direct cast would need room for any integer, so cast to a decimal with enough digits first.
        scale = max(0, kind.scale)
        array = array.cast(pa.decimal256(_INT64_DIGITS + 1 + scale, scale))
    if pa.types.is_floating(array.type) and pa.types.is_decimal(kind):
        # Arrow would take the digits of the binary fraction, 0.1000000000000000055 for 0.1.
        return array_without_loss(array.to_pylist(), kind)
    cast = array.cast(kind)
    for given, stored in _flat_parts(array, cast):
        _check_lossless(given, stored)
    return cast


def _check_lossless(array: pa.Array, cast: pa.Array) -> None:
    """Raise ``ValueError`` if a cast of one flat type to another has changed a value."""
    kind = cast.type
    if pa.types.is_date(kind) and pa.types.is_timestamp(array.type) and not cast.cast(array.type).equals(array):
        raise ValueError("these have a time of day.")
    if not pa.types.is_float32(kind):
        _check_not_rounded(array, cast)
    elif not pc.all(pc.equal(pc.is_finite(cast), pc.is_finite(array)), min_count=0).as_py():
        raise ValueError("values are too large.")


def check_same(array: pa.Array | pa.ChunkedArray, cast: pa.Array) -> None:
    """Raise ``ValueError`` if numbers were rounded: the result, cast back, differs from the input."""
    for given, stored in _flat_parts(one_array(array), cast):
        _check_not_rounded(given, stored)


def _check_not_rounded(array: pa.Array, cast: pa.Array) -> None:
    kinds = (array.type, cast.type)
    if kinds[0] == kinds[1] or not any(pa.types.is_floating(k) or pa.types.is_decimal(k) for k in kinds):
        return
    back = cast.cast(array.type, safe=False)
    same = pc.equal(back, array)
    if pa.types.is_floating(array.type):
        same = pc.or_(same, pc.and_(pc.is_nan(back), pc.is_nan(array)))
    if not pc.all(same, min_count=0).as_py():  # nulls count as equal
        raise ValueError("values would be rounded.")


def _flat_parts(array: pa.Array, cast: pa.Array) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Yield the columns of flat types in an array and in its cast, without what is below a null.

    The types of maps are equal, so that there is nothing to compare in them.
    """
    kind = cast.type
    if pa.types.is_null(array.type):
        return
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_struct(kind):
        by_name = dict(zip([f.name for f in array.type], array.flatten(), strict=True))
        for field, part in zip(kind, cast.flatten(), strict=True):
            yield from _flat_parts(by_name[field.name], part)
    elif pa.types.is_list(kind):
        yield from _flat_parts(array.flatten(), cast.flatten())
    elif not pa.types.is_map(kind):
        yield array, cast


def _check_kind(array_type: pa.DataType, kind: pa.DataType) -> None:
    """Raise for conversions that Arrow makes and no user means, such as of strings to numbers, or bytes to text."""
    if pa.types.is_null(array_type):
        return
    wanted_kind, here = _kind_of(kind), _kind_of(array_type)
    if wanted_kind != here or (pa.types.is_fixed_size_binary(array_type) and not pa.types.is_binary(kind)):
        raise ForeignValueError(f"{array_type} is another kind of type.")
    if wanted_kind == "struct":
        names = [f.name for f in kind]
        if sorted(f.name for f in array_type) != sorted(names):
            raise ValueError(f"its fields must be {', '.join(names)}.")
        for f in kind:
            _check_kind(array_type.field(array_type.get_field_index(f.name)).type, f.type)
    elif wanted_kind == "list":
        _check_kind(array_type.value_type, kind.value_type)


def _kind_of(kind: pa.DataType) -> str:
    types = pa.types
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_date(kind) or types.is_timestamp(kind):
        return "time"
    if types.is_struct(kind):
        return "struct"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return "list"
    return "string" if is_string(kind) else str(kind)


def is_string(kind: pa.DataType) -> bool:
    """Return whether a type has strings or bytes."""
    types = pa.types
    is_text = types.is_string(kind) or types.is_large_string(kind) or str(kind) in ("string_view", "binary_view")
    return bool(is_text or types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))


# Rows of an earlier schema in the columns of a later one.


def converted(
    columns: Sequence[pa.Array], earlier: pa.Schema, later: pa.Schema, n: int, zeros: Collection[str] = ()
) -> list[pa.Array]:
    """Return columns of the schema ``earlier``, ``n`` rows, as columns of ``later``.

    A column that ``earlier`` lacks is null, or zero if it is one of ``zeros``: 0, an empty list, no bytes. ``later``
    must be able to follow ``earlier`` by the rules of ``backends.encoding.schema``.
    """
    by_name = dict(zip(earlier.names, columns, strict=True))
    return [_converted(by_name.get(field.name), field, n, zeros) for field in later]


def _converted(array: pa.Array | None, field: pa.Field, n: int, zeros: Collection[str]) -> pa.Array:
    kind = field.type
    if array is None:
        # Arrow repeats no list zero times.
        return pa.repeat(_zero(kind), n) if n and field.name in zeros else pa.nulls(n, kind)
    if array.type.equals(kind):
        return array
    if pa.types.is_struct(kind):
        by_name = {f.name: array.field(i) for i, f in enumerate(array.type)}
        children = [_converted(by_name.get(f.name), f, n, zeros) for f in kind]
        return struct_array(children, n, null_mask(array), kind)
    if pa.types.is_list(kind):
        elements, offsets = list_parts(array)
        children = _converted(elements, kind.value_field, len(elements), zeros)
        return list_array(children, offsets, null_mask(array), kind)
    if pa.types.is_map(kind):
        entries, offsets = list_parts(array)
        as_struct = pa.field("entries", pa.struct([kind.key_field, kind.item_field]))
        return list_array(_converted(entries, as_struct, len(entries), zeros), offsets, null_mask(array), kind)
    # Not safe in Arrow's sense: a long that no double is equal to becomes the nearest one, as in Avro.
    return array.cast(kind, safe=False)


def _zero(kind: pa.DataType) -> pa.Scalar:
    value: object = 0
    if pa.types.is_list(kind):
        value = []
    elif pa.types.is_binary(kind):
        value = b""
    return pa.scalar(value, kind)
