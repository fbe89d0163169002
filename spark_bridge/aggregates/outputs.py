"""One output column of an aggregation: which function, of which columns and types."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from spark_bridge.exceptions import InvalidOperatorError

_FUNCTION = re.compile(r"(\w+)(?:\(([\w,]*)\))?")


@dataclass(frozen=True)
class UserAggregate:
    """A user's own aggregate, as functions on Arrow tables; see ``functions.merge``."""

    state: pa.Schema
    partial: Callable[[pa.Table], pa.Table]
    merge: Callable[[pa.Table], pa.Table]
    finish: Callable[[pa.Table], pa.Array | pa.ChunkedArray] | None = None
    result_type: pa.DataType | None = None


@dataclass
class DroppedElements:
    """Counts the elements that the ``limit`` of a list has dropped."""

    num: int = 0


@dataclass(frozen=True)
class Output:
    """One output column: ``function`` of the input ``column`` (None: of rows), ordered ``by`` where order matters.

    ``function`` has the arguments that its state depends on, as in ``top_k(10)``. ``columns`` are several input
    columns, which make a struct, instead of ``column``. ``type`` is the type of the input, ``by_type`` that of ``by``.

    With ``max_bytes`` a list keeps all elements, up to that many bytes for each key, whatever limit its function names;
    without, the elements beyond the limit are counted by ``dropped``.
    """

    name: str
    function: str
    column: str | None
    by: str | None
    type: pa.DataType | None
    by_type: pa.DataType | None = None
    columns: tuple[str, ...] = ()
    user: UserAggregate | None = None
    max_bytes: int | None = None
    dropped: DroppedElements | None = field(default=None, compare=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the columns of the rows that the output reads."""
        return tuple(c for c in (self.column, *self.columns, self.by) if c is not None)

    @property
    def input_types(self) -> list[tuple[str, pa.DataType]]:
        """Return the columns of the rows that the output reads, with their types."""
        found = [] if self.column is None or self.type is None else [(self.column, self.type)]
        if self.type is not None and pa.types.is_struct(self.type):
            found += [(name, self.type.field(name).type) for name in self.columns]
        return found if self.by is None or self.by_type is None else [*found, (self.by, self.by_type)]


def split_function(function: str) -> tuple[str, tuple[str, ...]]:
    """Return name and arguments of a function such as ``top_k(10)``; raises ``InvalidOperatorError``."""
    found = _FUNCTION.fullmatch(function)
    if found is None:
        raise InvalidOperatorError(f"{function!r} is no aggregate function; it must look like sum, or top_k(10).")
    return found[1], tuple(found[2].split(",")) if found[2] else ()
