"""Bounds of a scan as users give them (``prefix``, ``start``, ``end``), as ranges of stored keys or as conditions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from backends.encoding.given_values import is_string
from backends.encoding.keys import KEY_GROUP_BYTES, encode_keys
from spark_bridge.exceptions import RequestError, UnknownKeyOrNamespaceError
from spark_bridge.queryable.client.arguments.key_codec import KeyCodec

ScanBounds: TypeAlias = tuple[bytes | None, bytes | None]
"""The first key, and the first one after the last; None where there is no such bound."""
_STRING_END = 2
"""The bytes that the end of a string takes in a stored key."""


def key_range(
    codec: KeyCodec, window: str | None, prefix: Any, start: Any, end: Any
) -> tuple[ScanBounds, list[tuple[Any, ...]]]:
    """Return bounds on the key, in the order of ``by``: as a range of bytes, and as conditions that must hold besides.

    The range is without key group. Where a window is stored before columns that come before it in ``by``, only whole
    leading columns are possible, as conditions. Raises ``RequestError`` and ``UnknownKeyOrNamespaceError``.
    """
    if codec.is_in_order:
        of_prefix: ScanBounds = (None, None) if prefix is None else range_of_prefix(codec, prefix)
        given = (None if start is None else bound(codec, start), None if end is None else bound(codec, end))
        first, behind = intersection(of_prefix, given)
        if first is not None and behind is not None and behind < first:
            bounds = {"prefix": prefix, "start": start, "end": end}
            named = ", ".join(f"{name}={value!r}" for name, value in bounds.items() if value is not None)
            raise RequestError(
                f"No key of {codec.owner} can be within {named}: the end of these bounds lies below their start."
            )
        return (first, behind), []
    conditions: list[tuple[Any, ...]] = []
    if prefix is not None:
        conditions += _equal(codec, first_columns(codec, prefix))
    for values, operator in ((start, ">="), (end, "<")):
        if values is None:
            continue
        columns = first_columns(codec, values)
        if len(columns) > 1 or codec.by[0] == window:
            raise RequestError(
                f"Operator {codec.operator!r} keeps its keys in the order {', '.join(codec.stored.names)}, so that "
                "start= "
                f"and end= can only be of its first key column {codec.by[0]!r}; use where= for others."
            )
        conditions.append((codec.by[0], operator, columns[0]))
    return (None, None), conditions


def _equal(codec: KeyCodec, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    for name, value in zip(codec.by, values, strict=False):
        yield (name, "is null") if value is None else (name, "=", value)


def range_of_prefix(codec: KeyCodec, values: Any) -> ScanBounds:
    """Return the range of the keys that begin with ``values``.

    A tuple has whole columns: ``("ab",)`` are the keys whose first column is "ab". A plain string is the beginning of
    the first column: "ab" are "ab", "abc" and so on.
    """
    encoded = bound(codec, values)
    if isinstance(values, str | bytes) and is_string(codec.schema.field(0).type):
        encoded = encoded[:-_STRING_END]
    return encoded, first_key_after(encoded)


def bound(codec: KeyCodec, values: Any) -> bytes:
    """Return one or more first columns of a key as they are stored, without the key group."""
    given = first_columns(codec, values)
    fields = [codec.columns_schema.field(i) for i in range(len(given))]
    arrays = [codec.column(field, [value]) for field, value in zip(fields, given, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    encoded: bytes = encode_keys(batch, np.zeros(1, np.uint16))[0].as_py()
    return encoded[KEY_GROUP_BYTES:]


def first_columns(codec: KeyCodec, values: Any) -> tuple[Any, ...]:
    """Return the values of the first columns of a key; ``values`` are one value, a tuple or a dict.

    Raises ``UnknownKeyOrNamespaceError`` if they are not the first columns.
    """
    first = codec.schema.field(0)
    if isinstance(values, dict) and not (pa.types.is_struct(first.type) and first.name not in values):
        names = codec.by[: len(values)]
        if set(values) != set(names):
            raise UnknownKeyOrNamespaceError(
                f"{values!r} are not the first columns of a key of {codec.owner}: give these from the first one on."
            )
        return tuple(values[name] for name in names)
    given = values if isinstance(values, tuple) else (values,)
    if not 1 <= len(given) <= len(codec.by):
        raise UnknownKeyOrNamespaceError(
            f"{values!r} are not the first columns of a key of {codec.owner}: it has {len(codec.by)}."
        )
    return given


def intersection(one: ScanBounds, other: ScanBounds) -> ScanBounds:
    """Return the range of the keys that are in both ranges."""
    starts = [start for start, _ in (one, other) if start is not None]
    ends = [end for _, end in (one, other) if end is not None]
    return max(starts, default=None), min(ends, default=None)


def first_key_after(prefix: bytes) -> bytes | None:
    """Return the first bytes after all bytes that begin with ``prefix``; None if there are none."""
    head = prefix.rstrip(b"\xff")
    return head[:-1] + bytes([head[-1] + 1]) if head else None
