"""Arrow expressions as trees of calls, fields and literals.

Arrow has no interface for that. Its serialized form, which pickling uses, contains the whole tree. It is an Arrow IPC
file: the metadata of its schema are the tree in prefix order, its columns are literals and options (``Serialize`` in
Arrow's ``compute/expression.cc``). The keys of that metadata repeat. Python's dict of the metadata loses repeated keys,
so the metadata are read by the C data interface. (``str(expression)`` abbreviates long IN lists; Substrait has no IN,
and would need protobuf.)
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
MAX_DEPTH = 100
"""The depth of nested calls; deeper trees are not read."""
_METADATA_AT = 2
"""The place of ``metadata`` among the pointers that ``struct ArrowSchema`` begins with."""


@dataclass(frozen=True)
class FieldRef:
    """A column, or a field of a struct: ``path`` are the names on the way to the field."""

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
        # The bytes that Arrow gives to pickle. Nothing is pickled or unpickled here.
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
        raise UnknownExpressionError(f"The expression {expression} goes on where it should end: {behind!r}.")
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
