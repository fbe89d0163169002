"""The names of an aggregation's state columns: ``<output>.<function>.<part>``, such as ``total.sum.sum``.

The names alone say how the state is to be read: a client that has only the schema of the state can compute results.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa


class StateColumn(NamedTuple):
    """A state column: the output that it belongs to, the output's function with arguments, and the part of the state.

    An output may have dots in its name; functions and parts have none.
    """

    output: str
    function: str
    part: str

    @property
    def name(self) -> str:
        """Return the name of the column."""
        return f"{self.output}.{self.function}.{self.part}"


def split_state_column(name: str) -> StateColumn:
    """Return the parts of the name of a state column; raises ``ValueError`` for any other name."""
    output, function, part = name.rsplit(".", 2)
    return StateColumn(output, function, part)


def outputs_of(state: pa.Schema) -> list[tuple[str, str, list[pa.Field]]]:
    """Return name, function and state columns of each output; raises ``ValueError`` for a name of another form."""
    outputs: dict[tuple[str, str], list[pa.Field]] = {}
    for field in state:
        name, function, _ = split_state_column(field.name)
        outputs.setdefault((name, function), []).append(field)
    return [(name, function, parts) for (name, function), parts in outputs.items()]
