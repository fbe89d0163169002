"""Casts to the types of state columns that change no value."""

from __future__ import annotations

import pyarrow as pa

_INT64_DIGITS = 19
_MAX_DIGITS = 38


class _OtherType(ValueError):
    """A value is of another kind than its column."""


CAST_ERRORS = (pa.ArrowException, _OtherType, TypeError, ValueError, OverflowError, NotImplementedError)
"""The errors of values that cannot be cast without loss."""


def cast_without_loss(given: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """Return an array of a state column's type, if no value changes by the cast. Numbers are not read from strings.

    Raises one of ``CAST_ERRORS``.
    """
    if isinstance(given, pa.ChunkedArray):
        given = given.combine_chunks()
        if isinstance(given, pa.ChunkedArray):  # some releases of Arrow return chunks
            given = given.chunk(0) if given.num_chunks else pa.array([], given.type)
    if isinstance(given, pa.ExtensionArray):
        given = given.storage
    if pa.types.is_dictionary(given.type):
        given = given.dictionary_decode()
    if given.type == kind:
        return given
    _check_kind(given.type, kind)
    if pa.types.is_integer(given.type) and pa.types.is_decimal(kind):
        # A direct cast would need room for any integer, so cast to a decimal with enough digits first.
        given = given.cast(pa.decimal128(min(_MAX_DIGITS, _INT64_DIGITS + 1 + max(0, kind.scale)), max(0, kind.scale)))
    made = given.cast(kind)
    if pa.types.is_date(kind) and pa.types.is_timestamp(given.type) and not made.cast(given.type).equals(given):
        raise _OtherType("these have a time of day.")
    return made


def _check_kind(given: pa.DataType, kind: pa.DataType) -> None:
    """Raise ``_OtherType`` for conversions that Arrow makes and no user means, such as of strings to numbers."""
    if pa.types.is_null(given):
        return
    there, here = _kind_of(kind), _kind_of(given)
    if there != here:
        raise _OtherType(f"{given} is another kind of type.")
    if there == "struct":
        names = [f.name for f in kind]
        if sorted(f.name for f in given) != sorted(names):
            raise _OtherType(f"its fields must be {', '.join(names)}.")
        for f in kind:
            _check_kind(given.field(given.get_field_index(f.name)).type, f.type)
    elif there == "list":
        _check_kind(given.value_type, kind.value_type)


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
