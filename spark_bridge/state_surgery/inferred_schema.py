"""The operators whose state is rewritten: which of their variables have a function, and the rows of these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
from msgspec import structs

from backends.conf import DEFAULT_FAMILY, check_name
from backends.encoding.columns import normalized_type
from backends.encoding.operator_schema import TIMERS, OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from backends.exceptions import InvalidStateStoreArgument
from backends.formats.manifest import Lineage
from backends.storage.checkpoint_storage import OpenStorage
from coordinator_actor.reading.stored_versions import Piece, Reading, StateVersions
from spark_bridge.state_data.state_sources import StateSource, packed_pieces
from spark_bridge.state_format import layouts
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_surgery import shuffle
from spark_bridge.state_surgery.declared_operators import check_written_by_hand

Functions: TypeAlias = shuffle.Function | Mapping[Any, Any] | None
"""A function, or one for each state variable; if several operators are rewritten, for each operator."""


def _partition_rows(source: StateSource, packed: bytes, columns: tuple[str, ...]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one partition of one variable, without the columns that follow from the key."""
    for batch in source.packed_batches(packed):
        yield batch.select(list(columns))


def no_rows(rows: VariableRows) -> pa.RecordBatch:
    """Return a batch without rows, in the columns that a function gets."""
    columns = PairsOfRows(rows).columns
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in columns], schema=columns)


@dataclass(frozen=True)
class RewrittenOperator:
    """An operator of the old state: the functions of its variables (None: no rows of it are kept), and the others."""

    reading: Reading
    functions: Mapping[str, shuffle.Function | None]
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
    def copied_state(self) -> shuffle.CopiedState | None:
        """Return the column families that stay as they are; None if there are none."""
        if not (families := tuple(name for v in self.copied for name in v.families)):
            return None
        return shuffle.CopiedState(self.reading.place, in_order(self.reading.pieces), families, self.open_storage)

    def rows(self, variable: str) -> VariableRows:
        """Return how the rows of a variable are read."""
        schema = self.reading.schema
        return VariableRows(schema, schema.variable(variable), raw=True)

    def jobs(self, targets: Mapping[shuffle.OperatorVariable, shuffle.Target]) -> Iterator[shuffle.ReadJob]:
        """Yield a job for each partition of each variable that has a function."""
        for name in self.functions:
            yield from self._jobs(name, targets, self.reading.pieces)

    def first_rows(self, variable: str) -> list[shuffle.ReadJob]:
        """Return a job for each partition of a variable, as it is in its newest snapshot: no changes are replayed."""
        return list(self._jobs(variable, {}, [_of_snapshot(piece) for piece in self.reading.pieces]))

    def _jobs(
        self, name: str, targets: Mapping[shuffle.OperatorVariable, shuffle.Target], pieces: Sequence[Piece]
    ) -> Iterator[shuffle.ReadJob]:
        function = self.functions[name]
        if function is None:
            return
        rows = self.rows(name)
        routing = shuffle.Routing((self.reading.operator, name), function, targets, self.reading.key_groups)
        columns = tuple(PairsOfRows(rows).columns.names)
        source = StateSource(replace(self.reading, pieces=()), rows, open_storage=self.open_storage)
        for packed in packed_pieces(pieces):
            yield shuffle.ReadJob(partial(_partition_rows, source, packed, columns), routing)


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
    versions: StateVersions, version: int, operator: str | Sequence[str], function: Functions, open_storage: OpenStorage
) -> dict[str, RewrittenOperator]:
    """Return the operators that are rewritten, by name.

    Raises ``InvalidStateStoreArgument`` for an operator or a variable that does not exist, and if the function of an
    operator with several variables does not name its variable.
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
    rewritten = {}
    for name in names:
        reading = versions.reading(name, version)
        rewritten[name] = RewrittenOperator(reading, _functions(reading, of_operator[name]), open_storage)
    return rewritten


def _functions(reading: Reading, functions: Any) -> dict[str, shuffle.Function | None]:
    variables = reading.schema.in_use
    if isinstance(functions, Mapping):
        for name, function in functions.items():
            _check_function(reading, reading.schema.variable(name), function)
        if not functions:
            raise InvalidStateStoreArgument(f"function= names no state variable of operator {reading.operator!r}.")
        return dict(functions)
    own = [v for v in variables if v.name == DEFAULT_FAMILY] or [v for v in variables if v.kind != TIMERS]
    if len(own) != 1:
        raise InvalidStateStoreArgument(
            f"Operator {reading.operator!r} has the state variables {', '.join(repr(v.name) for v in variables)}: "
            "give a function for each one to rewrite, as function={'name': function}."
        )
    _check_function(reading, own[0], functions)
    return {own[0].name: functions}


def _check_function(reading: Reading, variable: StateVariable, function: Any) -> None:
    if function is None:
        return
    if not callable(function):
        raise InvalidStateStoreArgument(
            f"The function of operator {reading.operator!r} is {function!r}: it must be a function of a "
            "pa.RecordBatch, or None to leave the rows out."
        )
    check_written_by_hand(reading.operator, reading.schema, variable)


# The schema of rewritten state without a program: that of the old state, with the new rows' columns.


def inferred_variable(
    owner: str, source: VariableRows, columns_made: pa.Schema, key_columns: Sequence[str], name: str
) -> tuple[StateVariable, tuple[str, ...]]:
    """Return the variable ``name`` with rows of the columns ``made``, of the kind of ``source``, and its key columns.

    ``key_columns`` are in the user's order. A column that has the name and type of one of ``source`` keeps its
    declaration; others may be null. ``owner`` names the rows in messages. Raises ``InvalidStateStoreArgument`` if a key
    column is missing, for a type that state cannot have, and for state whose layout only a program can declare.
    """
    variable = source.variable
    by_time = variable.kind == TIMERS or bool({layouts.ENDS_FAMILY, layouts.EXPIRY_FAMILY} & variable.families.keys())
    if by_time or variable.indexes:
        raise InvalidStateStoreArgument(
            f"The rows of {owner} are also kept by {'time' if by_time else 'an index'}: give program=, the DataFrame "
            "of the query that continues."
        )
    shown = _shown(source)
    columns = {
        f.name: f for f in columns_made if f.name not in shuffle.DERIVED or f.name in shown or f.name in key_columns
    }
    if missing := [name for name in key_columns if name not in columns]:
        raise InvalidStateStoreArgument(
            f"The rows of {owner} came without the key columns {', '.join(map(repr, missing))}, with "
            f"{', '.join(map(repr, columns))}: name the columns of the key with key=."
        )
    first = next(iter(variable.families.values()))
    keys = [_field(columns.pop(name), first.key) for name in key_columns]
    stored = first.key.names
    window = layouts.window_place(variable)
    if set(stored) == set(key_columns):
        keys.sort(key=lambda f: stored.index(f.name))
    elif window is not None:  # first in stored keys, so that the keys of a window are adjacent
        keys.sort(key=lambda f: f.name != stored[window])
    key = pa.schema(keys)
    has_ttl = source.has_ttl and columns.pop(source.value.names[-1], None) is not None
    inner = [_named(columns.pop(s), o, key) for s, o in shown.items() if s in columns and o in source.inner.names]
    inner = [_field(f, source.inner) for f in inner]
    before = pa.schema([f for f in source.stored_value if f.name != layouts.TTL_COLUMN])
    taken = pa.schema([*key, *inner])
    value = [_field(_named(f, shown.get(s, s), taken), before) for s, f in columns.items()]
    if variable.kind == layouts.ROWS:
        families = {DEFAULT_FAMILY: StateSchema(key, pa.schema(value))}
    else:
        families = layouts.families_of(variable.kind, name, key, inner, value, has_ttl=has_ttl)
    made_variable = StateVariable(name, variable.kind, families, variable.ttl_ms if has_ttl else None)
    in_order = tuple(key.names) == tuple(key_columns)
    return made_variable, () if in_order and variable.kind == layouts.ROWS else tuple(key_columns)


def _shown(source: VariableRows) -> dict[str, str]:
    """Return the names that rows show of the columns after the key, with the names that they have in the state."""
    own = [f.name for f in (*source.inner, *source.stored_value) if f.name != layouts.TTL_COLUMN]
    names = PairsOfRows(source).columns.names[len(source.key) :]
    return dict(zip(names, own, strict=False))


def _named(field: pa.Field, own: str, taken: pa.Schema) -> pa.Field:
    """Return a field under its own name if rows show it under another, because an earlier column has that name."""
    return field.with_name(own) if own in taken.names else field


def _field(new_field: pa.Field, before: pa.Schema) -> pa.Field:
    kind = normalized_type(new_field.name, new_field.type)
    same = (field for field in before if field.name == new_field.name and field.type == kind)
    return next(same, pa.field(new_field.name, kind))


# The operators of a rewritten state without a program: their columns are those of the first new rows.


Sample: TypeAlias = Callable[[RewrittenOperator, str], shuffle.TargetColumns | None]
"""Returns the columns of the first rows that the function of a variable makes, by target; None if it makes none."""


class Fresh(NamedTuple):
    """An operator that gets rows: which of its variables do so, and its layout if nothing else is asked for."""

    schema: OperatorSchema
    variables: tuple[StateVariable, ...]
    num_partitions: int
    backend: str


def inferred_operators(
    rewritten: Mapping[str, RewrittenOperator],
    kept: Collection[str],
    key: Sequence[str] | Mapping[str, Sequence[str]] | None,
    sample: Sample,
) -> dict[str, Fresh]:
    """Return the operators by the rows that functions make of the first rows; those of ``kept`` stay as they are.

    Raises ``InvalidStateStoreArgument``.
    """
    variables: dict[str, dict[str, tuple[StateVariable, tuple[str, ...], RewrittenOperator]]] = {}
    for old in rewritten.values():
        operator = old.reading.operator
        for variable, function in old.functions.items():
            if function is None:
                continue
            made_columns = sample(old, variable) or shuffle.Routing((operator, variable), function, {}, 1).columns(
                iter([no_rows(old.rows(variable))])
            )
            if not made_columns:
                raise InvalidStateStoreArgument(
                    f"The function made no rows of {variable!r} of operator {operator!r}, so the columns of "
                    "new rows are unknown: give program=, or None as the function to leave all rows out."
                )
            for target, columns in made_columns.items():
                name = _checked_name(target, variable, kept)
                rows = old.rows(variable)
                key_names = key.get(name[0]) if isinstance(key, Mapping) else key
                if isinstance(key_names, str):  # one column, not its letters
                    key_names = [key_names]
                by = [rows.key.field(i).name for i in rows.key_order] if key_names is None else list(key_names)
                owner = f"operator {name[0]!r}" if name[0] == operator else f"the new operator {name[0]!r}"
                inferred, key_columns = inferred_variable(owner, rows, columns, by, name[1])
                earlier = variables.setdefault(name[0], {}).get(name[1])
                if earlier is not None and (earlier[0] != inferred or earlier[1] != key_columns):
                    raise InvalidStateStoreArgument(
                        f"Two functions gave rows of different columns to {owner}: {earlier[0].families} and "
                        f"{inferred.families}. Make them the same, or give program=."
                    )
                variables[name[0]][name[1]] = inferred, key_columns, old
    operators = {}
    for operator in [*rewritten, *(name for name in variables if name not in rewritten)]:
        of_operator = variables.get(operator, {})
        own = rewritten.get(operator)
        fresh = tuple(v for v, _, _ in of_operator.values())
        copied = () if own is None else own.copied
        if not fresh and not copied:
            continue  # all of its rows are left out, and with them the operator
        source = own or next(old for _, _, old in of_operator.values())
        orders = {order for _, order, _ in of_operator.values()} or {source.reading.schema.key_columns}
        if len(orders) > 1:
            raise InvalidStateStoreArgument(
                f"The state variables of operator {operator!r} would have different keys: {sorted(orders)}. All "
                "variables of an operator have its key."
            )
        _check_same_key(operator, fresh, copied)
        # Settings are those of the operator that the rows come from.
        schema = OperatorSchema((*copied, *fresh), orders.pop(), source.reading.schema.settings)
        operators[operator] = Fresh(schema, fresh, source.reading.num_partitions, source.reading.pieces[0].backend)
    return operators


def _checked_name(target: Any, variable: str, kept: Collection[str]) -> shuffle.OperatorVariable:
    """Return the operator and variable that a function gave rows to, or raise ``InvalidStateStoreArgument``."""
    name = target if isinstance(target, tuple) else (target, variable)
    if len(name) != 2 or not all(isinstance(part, str) for part in name):
        raise InvalidStateStoreArgument(
            f"A function gave rows to {target!r}: name an operator, or an operator and its state variable."
        )
    check_name("an operator", name[0])
    if name[0] in kept:
        raise InvalidStateStoreArgument(
            f"A function gave rows to operator {name[0]!r}, which stays as it is: name it in operator= as well, with "
            "a function for its own rows."
        )
    return name[0], name[1]


def _check_same_key(operator: str, fresh: Sequence[StateVariable], copied: Sequence[StateVariable]) -> None:
    """Raise ``InvalidStateStoreArgument`` if variables that stay have another key than those that are rewritten."""
    keys = {v.name: next(iter(v.families.values())).key for v in (*fresh, *copied) if v.kind != TIMERS}
    for timers in (v for v in copied if v.kind == TIMERS):
        keys[timers.name] = min((s.key for s in timers.families.values()), key=len)
    for name, key in keys.items():
        if fresh and key != keys[fresh[0].name]:
            raise InvalidStateStoreArgument(
                f"State variable {name!r} of operator {operator!r} has the key {_in_words(key)}, and that of "
                f"{fresh[0].name!r} would be {_in_words(keys[fresh[0].name])}: give functions for all variables, or "
                "None to leave rows out."
            )


def _in_words(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name}: {f.type}" for f in schema)
