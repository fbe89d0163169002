"""Predicate pushdown: the parts of a filter that hosts can apply, as comparisons, lookups of keys, and ranges of keys.

Only parts that are understood are pushed down, and only conditions that hold for every row that passes the filter. The
caller must apply the filter itself to the rows that come back. So a part that is missed here costs time, and never
rows.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from typing import Literal as OneOf

import pyarrow as pa
import pyarrow.compute as pc

from spark_bridge.queryable.protocol import Comparison

# Arrow expressions as trees of calls, fields and literals.
#
# Arrow has no interface for that. Its serialized form, which pickling uses, contains the whole tree. It is an Arrow
# IPC file: the metadata of its schema are the tree in prefix order, its columns are literals and options
# (``Serialize`` in Arrow's ``compute/expression.cc``). The keys of that metadata repeat. Python's dict of the
# metadata loses repeated keys, so the metadata are read by the C data interface. (``str(expression)`` abbreviates
# long IN lists; Substrait has no IN, and would need protobuf.)


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
MAX_DEPTH = 100
"""The depth of nested calls; deeper trees are not read."""
_METADATA_AT = 2
"""The place of ``metadata`` among the pointers that ``struct ArrowSchema`` begins with."""


@dataclass(frozen=True)
class FieldRef:
    """A column, or a field of a struct: ``path`` are the names that lead to the field."""

    path: tuple[str, ...]


@dataclass(frozen=True)
class Literal:
    """A value."""

    value: pa.Scalar


@dataclass(frozen=True)
class FunctionCall:
    """A call of an Arrow compute function. ``options`` is a struct of the function's ``FunctionOptions``."""

    function: str
    arguments: tuple[Node, ...]
    options: pa.StructScalar | None = None


Node: TypeAlias = "FieldRef | Literal | FunctionCall"


class UnknownExpressionError(Exception):
    """The serialized form of an expression is not the one that this module knows."""


def parse_expression(expression: pc.Expression) -> Node:
    """Return the tree of an expression. Raises ``UnknownExpressionError`` if the expression is not understood."""
    try:
        # The bytes that Arrow passes to pickle. Nothing is pickled or unpickled here.
        (content,) = expression.__reduce__()[1]
        with pa.ipc.open_file(pa.py_buffer(content)) as reader:
            batch = reader.get_batch(0)
        parts = _metadata(batch.schema)
        node = _node(next(parts), parts, batch, MAX_DEPTH)
        behind = next(parts, None)
    except (pa.ArrowException, TypeError, ValueError, IndexError, KeyError, StopIteration) as error:
        raise UnknownExpressionError(
            f"The expression {expression} is not as Arrow is known to write it: {error}"
        ) from error
    if behind is not None:
        raise UnknownExpressionError(
            f"The expression {expression} has more characters where it should end: {behind!r}."
        )
    return node


def columns_read(node: Node) -> set[str]:
    """Return the names of the columns that an expression reads."""
    if isinstance(node, FieldRef):
        return {node.path[0]}
    return set().union(*map(columns_read, node.arguments)) if isinstance(node, FunctionCall) else set()


def _node(part: tuple[str, str], parts: Iterator[tuple[str, str]], batch: pa.RecordBatch, depth: int) -> Node:
    if depth == 0:
        raise ValueError(f"more than {MAX_DEPTH} calls within each other")
    kind, value = part
    if kind == "field_ref":
        return FieldRef((value,))
    if kind == "nested_field_ref":
        return FieldRef(tuple(_nested(next(parts)) for _ in range(int(value))))
    if kind == "literal":
        return Literal(batch.column(int(value))[0])
    if kind != "call":
        raise ValueError(f"unknown part {part!r}")
    arguments: list[Node] = []
    options: pa.StructScalar | None = None
    for inner in parts:
        if inner == ("end", value):
            return FunctionCall(value, tuple(arguments), options)
        if inner[0] == "options":
            options = batch.column(int(inner[1]))[0]
        else:
            arguments.append(_node(inner, parts, batch, depth - 1))
    raise ValueError(f"call of {value} without an end")


def _nested(part: tuple[str, str]) -> str:
    if part[0] != "field_ref":
        raise ValueError(f"{part!r} in the path to a nested field")
    return part[1]


def _metadata(schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """Yield the schema's metadata in order, with repeated keys, by Arrow's C data interface."""
    capsule = schema.__arrow_c_schema__()  # owns the memory of the pointers
    pointer = _get_pointer(capsule, b"arrow_schema")
    at = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p))[_METADATA_AT]
    if not at:
        return
    (count,) = struct.unpack("=i", ctypes.string_at(at, 4))
    at += 4
    for _ in range(count):
        texts = []
        for _ in range(2):
            (length,) = struct.unpack("=i", ctypes.string_at(at, 4))
            texts.append(ctypes.string_at(at + 4, length).decode())
            at += 4 + length
        yield texts[0], texts[1]


MAX_PUSHED_KEYS = 10_000
"""A statement that can have more keys than this scans instead of looking up keys."""
MAX_WHERE_BYTES = 256 << 10
"""Longer comparisons are left to the client, because the header of a request is limited."""
COMPARISONS: dict[str, OneOf["=", "!=", "<", "<=", ">", ">="]] = {
    "equal": "=",
    "not_equal": "!=",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
}
_MIRRORED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


@dataclass(frozen=True)
class ScanPushdown:
    """The request of a scan. ``columns`` (None: all) includes the columns that the filter reads.

    ``keys``: only these keys have rows that pass. ``prefix``, or ``start`` (included) and ``end`` (not included): only
    keys within these bounds have rows that pass.
    """

    columns: list[str] | None = None
    where: list[Comparison] = field(default_factory=list)
    keys: pa.RecordBatch | None = None
    prefix: tuple[Any, ...] | None = None
    start: tuple[Any, ...] | None = None
    end: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class ColumnCondition:
    """The condition ``column operator values``, with values in the column's type."""

    column: str
    operator: OneOf["=", "!=", "<", "<=", ">", ">=", "in", "is null", "is not null"]
    values: tuple[pa.Scalar, ...] = ()


def push_down(
    expression: pc.Expression | None,
    columns: Sequence[str] | None,
    schema: pa.Schema,
    key: Sequence[str],
    *,
    has_ranges: bool = True,
) -> ScanPushdown:
    """Return the columns, filters and bounds of a scan for the rows of a table of ``schema`` that pass ``expression``.

    ``columns`` are the wanted columns (None: all), ``key`` the columns of the grouping key in their order.
    ``has_ranges``: a scan can be bounded by the key.
    """
    if expression is None:
        return ScanPushdown(None if columns is None else list(columns))
    try:
        tree = parse_expression(expression)
    except UnknownExpressionError:
        return ScanPushdown()
    needed = None if columns is None else list(dict.fromkeys([*columns, *sorted(columns_read(tree))]))
    conditions = list(_conditions(tree, schema))
    where = _where(conditions)
    keys = _keys(conditions, schema, key)
    if keys is not None or not has_ranges:
        return ScanPushdown(needed, where, keys)
    return ScanPushdown(needed, where, None, *_bounds(conditions, schema, key))


def _conditions(node: Node, schema: pa.Schema) -> Iterator[ColumnCondition]:
    """Yield conditions that hold wherever the expression holds."""
    if not isinstance(node, FunctionCall):
        return
    if node.function in ("and", "and_kleene"):
        for argument in node.arguments:
            yield from _conditions(argument, schema)
    elif (condition := _condition(node, schema)) is not None:
        yield condition


def _condition(node: FunctionCall, schema: pa.Schema) -> ColumnCondition | None:
    match node:
        case FunctionCall(function, (FieldRef((column,)), Literal(value))) if function in COMPARISONS:
            return _comparison(schema, column, COMPARISONS[function], value)
        case FunctionCall(function, (Literal(value), FieldRef((column,)))) if function in COMPARISONS:
            return _comparison(schema, column, _MIRRORED[COMPARISONS[function]], value)
        case FunctionCall("is_in", (FieldRef((column,)),), pa.StructScalar() as options):
            return _in(schema, column, options, nulls=False)
        case FunctionCall(
            "if_else",
            (
                FunctionCall("is_valid", (FieldRef((tested,)),)),
                FunctionCall("is_in", (FieldRef((column,)),), pa.StructScalar() as options),
                Literal(otherwise),
            ),
        ) if tested == column and not otherwise.is_valid:
            return _in(schema, column, options, nulls=True)
        case FunctionCall("is_valid", (FieldRef((column,)),)) if column in schema.names:
            return ColumnCondition(column, "is not null")
        case FunctionCall("is_null", (FieldRef((column,)),), pa.StructScalar() as options) if column in schema.names:
            return ColumnCondition(column, "is null") if options.as_py().get("nan_is_null") is False else None
        case FunctionCall("or" | "or_kleene"):
            return _alternatives(node, schema)
    return None


def _comparison(schema: pa.Schema, column: str, operator: Any, value: pa.Scalar) -> ColumnCondition | None:
    fitting = _fitting(schema, column, value)
    return None if fitting is None else ColumnCondition(column, operator, (fitting,))


def _in(schema: pa.Schema, column: str, options: pa.StructScalar, *, nulls: bool) -> ColumnCondition | None:
    """Return an ``in`` condition. ``nulls``: a null among the values has no effect: null rows do not pass anyway."""
    values = [v for v in options["value_set"] if v.is_valid or not nulls]
    fitting = [_fitting(schema, column, v) for v in values]
    not_null = tuple(v for v in fitting if v is not None)
    return ColumnCondition(column, "in", not_null) if len(not_null) == len(values) else None


def _alternatives(node: FunctionCall, schema: pa.Schema) -> ColumnCondition | None:
    """Return ``a = 1 or a = 2`` as ``a in (1, 2)``; None for other alternatives."""
    parts: list[ColumnCondition] = []
    for argument in node.arguments:
        part = _condition(argument, schema) if isinstance(argument, FunctionCall) else None
        if part is None or part.operator not in ("=", "in"):
            return None
        parts.append(part)
    if len({part.column for part in parts}) != 1:
        return None
    return ColumnCondition(parts[0].column, "in", tuple(itertools.chain.from_iterable(p.values for p in parts)))


def _fitting(schema: pa.Schema, column: str, value: pa.Scalar) -> pa.Scalar | None:
    """Return a value in its column's type; None if it is not exact in that type or in Python, or is null or NaN."""
    if column not in schema.names or not value.is_valid:
        return None
    wanted = schema.field(column).type
    if pa.types.is_nested(wanted):
        return None
    try:
        fitting = value if value.type == wanted else value.cast(wanted)
        if fitting is not value and not fitting.cast(value.type).equals(value):
            return None
        plain = fitting.as_py()
    except (pa.ArrowException, ValueError, OverflowError):
        return None
    if isinstance(plain, float) and not math.isfinite(plain):
        return None
    return fitting


# -- comparisons ---------------------------------------------------------------------------------


def _where(conditions: Sequence[ColumnCondition]) -> list[Comparison]:
    where: list[Comparison] = []
    left = MAX_WHERE_BYTES
    for condition in conditions:
        values = [as_json(v) for v in condition.values]
        exact = [v for v in values if v is not None]
        size = sum(len(str(v).encode()) + 8 for v in exact)
        if len(exact) == len(values) and size <= left:
            left -= size
            where.append(Comparison(condition.column, condition.operator, exact))
    return where


def as_json(value: pa.Scalar) -> str | int | float | bool | None:
    """Return a JSON value for ``Comparison``, or a string that Arrow casts to exactly this value; else None."""
    kind = value.type
    plain: Any = value.as_py()
    if isinstance(plain, bool | int | float | str):
        return plain
    try:
        if pa.types.is_binary(kind):
            text: str = plain.decode()
        elif pa.types.is_temporal(kind):
            text = value.cast(pa.string()).as_py()
        elif pa.types.is_decimal(kind):
            text = format(plain, "f")
        else:
            return None
        return text if pa.scalar(text).cast(kind).equals(value) else None
    except (pa.ArrowException, UnicodeDecodeError):
        return None


# -- keys ----------------------------------------------------------------------------------------


def _keys(conditions: Sequence[ColumnCondition], schema: pa.Schema, key: Sequence[str]) -> pa.RecordBatch | None:
    """Return the only keys that can pass, if there are conditions on all columns of the key; else None."""
    choices = [_choices(conditions, column) for column in key]
    keys = [c for c in choices if c is not None]
    if not key or len(keys) < len(choices) or math.prod(map(len, keys)) > MAX_PUSHED_KEYS:
        return None
    rows = list(itertools.product(*(dict.fromkeys(v.as_py() for v in choice) for choice in keys)))
    fields = [schema.field(column) for column in key]
    arrays = [pa.array([row[i] for row in rows], f.type) for i, f in enumerate(fields)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _choices(conditions: Sequence[ColumnCondition], column: str) -> tuple[pa.Scalar, ...] | None:
    """Return the smallest list of the possible values of a column; None if it has no such list."""
    lists = [c.values for c in conditions if c.column == column and c.operator in ("=", "in")]
    return min(lists, key=len, default=None)


def _bounds(
    conditions: Sequence[ColumnCondition], schema: pa.Schema, key: Sequence[str]
) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """Return prefix, start and end of the keys that can pass."""
    fixed: list[Any] = []
    for column in key:
        equal = [c.values[0] for c in conditions if c.column == column and c.operator == "="]
        if not equal:
            break
        fixed.append(equal[0].as_py())
    else:
        return (tuple(fixed) or None), None, None
    column = key[len(fixed)]
    bounds = [c for c in conditions if c.column == column]
    low = [c.values[0].as_py() for c in bounds if c.operator in (">", ">=")]
    high = [_first_excluded(c, schema.field(column).type) for c in bounds if c.operator in ("<", "<=")]
    ends = [value for value in high if value is not None]
    if fixed and not (low and ends):
        return tuple(fixed), None, None
    start = (*fixed, max(low)) if low else None
    return None, start, ((*fixed, min(ends)) if ends else None)


def _first_excluded(condition: ColumnCondition, kind: pa.DataType) -> Any:
    """Return the first value that an upper bound excludes; None if the type has no such value."""
    value = condition.values[0].as_py()
    if condition.operator == "<":
        return value
    if pa.types.is_integer(kind) and value < (1 << (kind.bit_width - 1)) - 1:
        return value + 1
    return None
