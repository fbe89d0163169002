"""Rows of an earlier schema in the columns of a later one."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from backends.encoding.columns import list_array, list_parts, null_mask, struct_array


def converted(columns: Sequence[pa.Array], earlier: pa.Schema, later: pa.Schema, n: int) -> list[pa.Array]:
    """Return columns of the schema ``earlier``, ``n`` rows, as columns of ``later``.

    ``later`` must be able to follow on ``earlier``: ``schema_evolution.problem_of`` finds nothing wrong.
    """
    there = dict(zip(earlier.names, columns, strict=True))
    return [_converted(there.get(field.name), field.type, n) for field in later]


def _converted(array: pa.Array | None, kind: pa.DataType, n: int) -> pa.Array:
    if array is None:
        return pa.nulls(n, kind)
    if array.type.equals(kind):
        return array
    if pa.types.is_struct(kind):
        there = {f.name: array.field(i) for i, f in enumerate(array.type)}
        children = [_converted(there.get(f.name), f.type, n) for f in kind]
        return struct_array(children, n, null_mask(array), kind)
    if pa.types.is_list(kind):
        elements, offsets = list_parts(array)
        return list_array(_converted(elements, kind.value_type, len(elements)), offsets, null_mask(array), kind)
    if pa.types.is_map(kind):
        entries, offsets = list_parts(array)
        as_struct = pa.struct([kind.key_field, kind.item_field])
        return list_array(_converted(entries, as_struct, len(entries)), offsets, null_mask(array), kind)
    # Not safe in Arrow's sense: a long that no double is equal to becomes the nearest one, as in Avro.
    return array.cast(kind, safe=False)
