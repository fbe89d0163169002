"""What an Arrow expression says: as a tree of calls, fields and literals.

Arrow has no interface for that. Its serialized form, which its pickling uses, has all of it: an Arrow IPC file whose
schema's metadata are the tree in prefix order, with literals and options as columns (``Serialize`` in Arrow's
``compute/expression.cc``). The keys of that metadata repeat, which Python's dict of them loses, so that it is read by
the C data interface. (``str(expression)`` abbreviates long IN lists; Substrait knows no IN, and would need protobuf.)
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
"""Of calls within each other; deeper trees are not looked at."""
_METADATA_AT = 2
"""The place of ``metadata`` among the pointers that ``struct ArrowSchema`` begins with."""


@dataclass(frozen=True)
class FieldRef:
    """A column; of a struct's field the names on the way to it."""

    path: tuple[str, ...]


@dataclass(frozen=True)
class Literal:
    """A value."""

    value: pa.Scalar


@dataclass(frozen=True)
class Call:
    """An Arrow compute function. ``options`` is a struct of its ``FunctionOptions``."""

    function: str
    arguments: tuple[Node, ...]
    options: pa.StructScalar | None = None


Node: TypeAlias = "FieldRef | Literal | Call"


class UnknownExpressionError(Exception):
    """Arrow's serialized form of an expression is not as it is known here."""


def parsed(expression: pc.Expression) -> Node:
    """The tree of an expression. Raises ``UnknownExpressionError`` if it is not understood."""
    try:
        # What pickle would be given: Arrow's own bytes. Nothing is pickled or unpickled here.
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


def columns_of(node: Node) -> set[str]:
    """The names of the columns that an expression reads."""
    if isinstance(node, FieldRef):
        return {node.path[0]}
    return set().union(*map(columns_of, node.arguments)) if isinstance(node, Call) else set()


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
            return Call(value, tuple(arguments), options)
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
    """The schema's metadata in order, keys that repeat as well, by Arrow's C data interface."""
    capsule = schema.__arrow_c_schema__()  # owns what the pointers point at
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
