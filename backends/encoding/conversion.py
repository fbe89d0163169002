"""Rows of an earlier schema in the columns of a later one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pyarrow as pa

from backends.encoding.columns import list_array, list_parts, null_mask, struct_array


def converted(
    columns: Sequence[pa.Array], earlier: pa.Schema, later: pa.Schema, n: int, zeros: Collection[str] = ()
) -> list[pa.Array]:
    """Return columns of the schema ``earlier``, ``n`` rows, as columns of ``later``.

    A column that ``earlier`` lacks is null, or zero if it is one of ``zeros``: 0, an empty list, no bytes. ``later``
    must be able to follow on ``earlier``: ``schema_evolution`` finds nothing wrong.
    """
    there = dict(zip(earlier.names, columns, strict=True))
    return [_converted(there.get(field.name), field, n, zeros) for field in later]


def _converted(array: pa.Array | None, field: pa.Field, n: int, zeros: Collection[str]) -> pa.Array:
    kind = field.type
    if array is None:
        return pa.repeat(_zero(kind), n) if field.name in zeros else pa.nulls(n, kind)
    if array.type.equals(kind):
        return array
    if pa.types.is_struct(kind):
        there = {f.name: array.field(i) for i, f in enumerate(array.type)}
        children = [_converted(there.get(f.name), f, n, zeros) for f in kind]
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
