"""The operators whose state is rewritten: which of their variables have a function, and the rows of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa
from msgspec import structs

from backends.encoding.operator_schema import TIMERS, OperatorSchema, StateVariable
from backends.exceptions import InvalidStateStoreArgument
from backends.formats.manifest import Lineage
from backends.ids import DEFAULT_FAMILY
from backends.storage.checkpoint_storage import OpenStorage
from coordinator_actor.reading.stored_versions import Piece, Reading, StateVersions
from spark_bridge.state_data.packed_pieces import packed_pieces, unpacked_piece
from spark_bridge.state_data.state_sources import StateSource
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_surgery.programs import check_written_by_hand
from spark_bridge.state_surgery.stages.first_stage import Function, OperatorVariable, ReadJob, Routing, Target
from spark_bridge.state_surgery.stages.second_stage import CopiedState

Functions: TypeAlias = Function | Mapping[Any, Any] | None
"""A function, or one for each state variable; where several operators are rewritten, for each operator."""


@dataclass(frozen=True)
class PartitionRows:
    """The rows of one partition of one variable, without the columns that follow from the key."""

    source: StateSource
    packed: bytes
    columns: tuple[str, ...]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """See ``RowSource``."""
        for batch in self.source.batches(unpacked_piece(self.packed)):
            yield batch.select(list(self.columns))


def no_rows(rows: VariableRows) -> pa.RecordBatch:
    """Return a batch without rows, in the columns that a function gets."""
    columns = PairsOfRows(rows).columns
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in columns], schema=columns)


@dataclass(frozen=True)
class RewrittenOperator:
    """An operator of the old state: the functions of its variables (None: no rows of it are kept), and the others."""

    reading: Reading
    functions: Mapping[str, Function | None]
    open_storage: OpenStorage

    @property
    def copied(self) -> tuple[StateVariable, ...]:
        """Return the variables that stay as they are, timers that a user's variable hides among them."""
        named = {self.reading.schema.variable(name).identity for name in self.functions}
        return tuple(v for v in self.reading.schema.variables if not v.deleted and v.identity not in named)

    @property
    def staying(self) -> OperatorSchema | None:
        """Return the part of the operator's schema that stays as it is; None if nothing does."""
        return replace(self.reading.schema, variables=self.copied) if self.copied else None

    @property
    def copied_state(self) -> CopiedState | None:
        """Return the column families that stay as they are; None if there are none."""
        families = tuple(name for v in self.copied for name in v.families)
        if not families:
            return None
        return CopiedState(self.reading.place, in_order(self.reading.pieces), families, self.open_storage)

    def rows(self, variable: str) -> VariableRows:
        """Return how the rows of a variable are read."""
        schema = self.reading.schema
        return VariableRows(schema, schema.variable(variable), raw=True)

    def jobs(self, targets: Mapping[OperatorVariable, Target]) -> Iterator[ReadJob]:
        """Yield a job for each partition of each variable that has a function."""
        for name in self.functions:
            yield from self._jobs(name, targets, self.reading.pieces)

    def first_rows(self, variable: str) -> list[ReadJob]:
        """Return a job for each partition of a variable, as it is in its newest snapshot: no changes are replayed."""
        return list(self._jobs(variable, {}, [_of_snapshot(piece) for piece in self.reading.pieces]))

    def _jobs(
        self, name: str, targets: Mapping[OperatorVariable, Target], pieces: Sequence[Piece]
    ) -> Iterator[ReadJob]:
        function = self.functions[name]
        if function is None:
            return
        rows = self.rows(name)
        routing = Routing((self.reading.operator, name), function, targets, self.reading.key_groups)
        columns = tuple(PairsOfRows(rows).columns.names)
        source = StateSource(replace(self.reading, pieces=()), rows, self.open_storage)
        for packed in packed_pieces(pieces):
            yield ReadJob(PartitionRows(source, packed, columns), routing)


def _of_snapshot(piece: Piece) -> Piece:
    """Return a partition at the version of its newest snapshot, or as it is if it has none."""
    whole = piece.lineage
    if not whole.snapshots:
        return piece
    version = max(ref.version for ref in whole.snapshots)
    changelogs = tuple(ref for ref in whole.changelogs if ref.version <= version)
    return structs.replace(piece, lineage=Lineage(version, changelogs, whole.snapshots, whole.rescaled))


def in_order(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return the partitions of one layout, the first one first."""
    return tuple(sorted(pieces, key=lambda piece: piece.partition))


def rewritten_operators(
    versions: StateVersions,
    version: int,
    operator: str | Sequence[str],
    function: Functions,
    open_storage: OpenStorage,
) -> dict[str, RewrittenOperator]:
    """Return the operators that are rewritten, by name.

    Raises ``InvalidStateStoreArgument`` for an operator or a variable that there is not, and where the function of an
    operator with several variables does not say which one it is for.
    """
    names = [operator] if isinstance(operator, str) else list(operator)
    if not names or len(set(names)) != len(names):
        raise InvalidStateStoreArgument(f"operator={operator!r} must name one operator or more, each of them once.")
    of_operator: Mapping[str, Any]
    if isinstance(operator, str):
        of_operator = {operator: function}
    elif isinstance(function, Mapping):
        if set(function) != set(names):
            raise InvalidStateStoreArgument(
                f"function= has functions for {', '.join(map(repr, function))}, and operator= names "
                f"{', '.join(map(repr, names))}: give one for each of them."
            )
        of_operator = function
    else:
        of_operator = dict.fromkeys(names, function)
    found = {}
    for name in names:
        reading = versions.reading(name, version)
        found[name] = RewrittenOperator(reading, _functions(reading, of_operator[name]), open_storage)
    return found


def _functions(reading: Reading, given: Any) -> dict[str, Function | None]:
    there = reading.schema.in_use
    if isinstance(given, Mapping):
        for name, function in given.items():
            _check_function(reading, reading.schema.variable(name), function)
        if not given:
            raise InvalidStateStoreArgument(f"function= names no state variable of operator {reading.operator!r}.")
        return dict(given)
    own = [v for v in there if v.name == DEFAULT_FAMILY] or [v for v in there if v.kind != TIMERS]
    if len(own) != 1:
        raise InvalidStateStoreArgument(
            f"Operator {reading.operator!r} has the state variables {', '.join(repr(v.name) for v in there)}: give a "
            "function for each that is to be rewritten, as function={'name': function}."
        )
    _check_function(reading, own[0], given)
    return {own[0].name: given}


def _check_function(reading: Reading, variable: StateVariable, function: Any) -> None:
    if function is None:
        return
    if not callable(function):
        raise InvalidStateStoreArgument(
            f"The function of operator {reading.operator!r} is {function!r}: it must be a function of a "
            "pa.RecordBatch, or None to leave the rows out."
        )
    check_written_by_hand(reading.operator, reading.schema, variable)
