"""Which state variables are rewritten, which stay as they are, and which rows the new operators get."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa

from backends.encoding.operator_schema import OperatorSchema, StateVariable, evolved
from backends.exceptions import IncompatibleSchemaError, InvalidStateStoreArgument
from backends.ids import DEFAULT_FAMILY, check_name
from coordinator_actor.reading.stored_versions import Piece, Reading, StateVersions
from spark_bridge.state_data.packed_pieces import packed_pieces, unpacked
from spark_bridge.state_data.state_sources import StateSource
from spark_bridge.state_format.layouts import TIMERS
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_surgery.first_stage import Columns, Function, Name, ReadJob, Routing, Target
from spark_bridge.state_surgery.inferred_schema import inferred_operator, inferred_variable
from spark_bridge.state_surgery.new_state import NewOperator, check_partitions
from spark_bridge.state_surgery.programs import (
    Combining,
    Program,
    check_written_by_hand,
    combining,
    declared,
    schema_to_write,
    targets_of,
)
from spark_bridge.state_surgery.second_stage import CopiedState

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
        for batch in self.source.batches(unpacked(self.packed)):
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

    @property
    def copied(self) -> tuple[StateVariable, ...]:
        """Return the variables that stay as they are, timers that a user's variable hides among them."""
        named = {self.reading.schema.variable(name).identity for name in self.functions}
        return tuple(v for v in self.reading.schema.variables if not v.deleted and v.identity not in named)

    def rows(self, variable: str) -> VariableRows:
        """Return how the rows of a variable are read."""
        schema = self.reading.schema
        return VariableRows(schema, schema.variable(variable), raw=True)

    def jobs(self, targets: Mapping[Name, Target], variable: str | None = None) -> Iterator[ReadJob]:
        """Yield a job for each partition of each variable that has a function, or of one variable."""
        for name, function in self.functions.items():
            if function is not None and variable in (None, name):
                rows = self.rows(name)
                routing = Routing((self.reading.operator, name), function, targets, self.reading.key_groups)
                columns = tuple(PairsOfRows(rows).columns.names)
                source = StateSource(replace(self.reading, pieces=()), rows)
                for packed in packed_pieces(self.reading.pieces):
                    yield ReadJob(PartitionRows(source, packed, columns), routing)


@dataclass(frozen=True)
class RewritePlan:
    """What is read, and what is written."""

    operators: tuple[NewOperator, ...]
    jobs: tuple[ReadJob, ...]


def rewritten_operators(
    versions: StateVersions, version: int, operator: str | Sequence[str], function: Functions
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
        found[name] = RewrittenOperator(reading, _functions(reading, of_operator[name]))
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


def planned(
    versions: StateVersions,
    version: int,
    rewritten: Mapping[str, RewrittenOperator],
    *,
    program: Program | None,
    key: Sequence[str] | Mapping[str, Sequence[str]] | None,
    combine: Combining | Mapping[Any, Combining] | None,
    num_partitions: int | Mapping[str, int] | None,
    backend: str | None,
    sample: Callable[[RewrittenOperator, str], Columns | None],
) -> RewritePlan:
    """Return what to do. ``sample`` gives the columns that a variable's function makes, by target, for its first rows.

    Raises ``InvalidStateStoreArgument`` naming what does not fit.
    """
    specs = None if program is None else declared(program)
    if specs is not None and key is not None:
        raise InvalidStateStoreArgument("key= and program= were given: the program says which columns its keys have.")
    schemas: dict[str, tuple[OperatorSchema, tuple[StateVariable, ...], int, str]] = {}
    stored = versions.operators(version)
    if specs is None:
        schemas.update(_inferred(rewritten, key, sample))
        kept = [name for name in stored if name not in rewritten]
    else:
        staying = [name for name in stored if name not in rewritten or rewritten[name].copied]
        lost = [name for name in staying if name not in specs]
        if lost:
            raise InvalidStateStoreArgument(
                f"The state has the operators {', '.join(map(repr, lost))}, which the program has not: name them in "
                "operator=, with None as the function of each of their state variables to leave them out."
            )
        kept = [name for name in specs if name in stored and name not in rewritten]
        for name, (spec, _) in specs.items():
            if name not in kept:
                held = _staying(rewritten.get(name))
                schema = schema_to_write(spec, held)
                copied = {v.identity for v in held.variables} if held else set()
                fresh = tuple(v for v in schema.in_use if v.identity not in copied)
                schemas[name] = schema, fresh, spec.num_partitions, spec.backend
    operators = [_unchanged(versions, version, name, None if specs is None else specs[name].spec) for name in kept]
    names = [(operator, v.name) for operator, (_, fresh, _, _) in schemas.items() for v in fresh]
    combines = combining(combine, names, {})
    for name, (schema, fresh, usual, engine) in schemas.items():
        given = num_partitions.get(name) if isinstance(num_partitions, Mapping) else num_partitions
        n = check_partitions(name, usual if given is None else given, versions.key_groups)
        operators.append(
            NewOperator(
                name,
                n,
                backend or engine,
                schema,
                targets_of(name, schema, fresh, n, combines, specs[name].aggregator if specs else None),
                _copied(rewritten[name]) if name in rewritten else None,
            )
        )
    if isinstance(num_partitions, Mapping) and (unknown := num_partitions.keys() - schemas.keys()):
        raise InvalidStateStoreArgument(
            f"num_partitions= names {', '.join(map(repr, sorted(unknown)))}, and {', '.join(map(repr, schemas))} are "
            "rewritten."
        )
    targets = {t.name: t for o in operators for t in o.targets}
    jobs = tuple(job for one in rewritten.values() for job in one.jobs(targets))
    return RewritePlan(tuple(operators), jobs)


def _staying(old: RewrittenOperator | None) -> OperatorSchema | None:
    """Return the part of an operator's schema that stays as it is; None if nothing does."""
    if old is None or not old.copied:
        return None
    return replace(old.reading.schema, variables=old.copied)


def _copied(old: RewrittenOperator) -> CopiedState | None:
    families = tuple(name for v in old.copied for name in v.families)
    return CopiedState(old.reading.place, _pieces(old.reading), families) if families else None


def _pieces(reading: Reading) -> tuple[Piece, ...]:
    return tuple(sorted(reading.pieces, key=lambda piece: piece.partition))


def _unchanged(versions: StateVersions, version: int, name: str, spec: Any) -> NewOperator:
    """Return an operator that stays as it is, in its layout: a start of the query changes that."""
    reading = versions.reading(name, version)
    if spec is not None:
        try:
            evolved(reading.schema, OperatorSchema.from_json(spec.schema))
        except IncompatibleSchemaError as error:
            raise InvalidStateStoreArgument(
                f"The program cannot go on from operator {name!r} as it is stored: {error} Rewrite it as well."
            ) from error
    entry = versions.entry(name, version)
    families = tuple(f for v in reading.schema.variables if not v.deleted for f in v.families)
    copied = CopiedState(reading.place, _pieces(reading), families)
    return NewOperator(name, reading.num_partitions, entry.backend, reading.schema, (), copied)


def _inferred(
    rewritten: Mapping[str, RewrittenOperator],
    key: Sequence[str] | Mapping[str, Sequence[str]] | None,
    sample: Callable[[RewrittenOperator, str], Columns | None],
) -> dict[str, tuple[OperatorSchema, tuple[StateVariable, ...], int, str]]:
    """Return the schemas of operators by the rows that functions make of the first rows."""
    variables: dict[str, dict[str, tuple[StateVariable, tuple[str, ...], RewrittenOperator]]] = {}
    for old in rewritten.values():
        operator = old.reading.operator
        for variable, function in old.functions.items():
            if function is None:
                continue
            made_columns = sample(old, variable) or Routing((operator, variable), function, {}, 1).columns(
                iter([no_rows(old.rows(variable))])
            )
            if not made_columns:
                raise InvalidStateStoreArgument(
                    f"The function made no rows of {variable!r} of operator {operator!r}, so nothing says which "
                    "columns new rows have: give program=, or None as the function to leave all rows out."
                )
            for target, columns in made_columns.items():
                name = _checked_name(target, variable)
                rows = old.rows(variable)
                given = key.get(name[0]) if isinstance(key, Mapping) else key
                by = [rows.key.field(i).name for i in rows.key_order] if given is None else list(given)
                owner = f"operator {name[0]!r}" if name[0] == operator else f"the new operator {name[0]!r}"
                made, key_columns = inferred_variable(owner, rows, columns, by, name[1])
                earlier = variables.setdefault(name[0], {}).get(name[1])
                if earlier is not None and (earlier[0] != made or earlier[1] != key_columns):
                    raise InvalidStateStoreArgument(
                        f"Two functions gave rows of different columns to {owner}: {earlier[0].families} and "
                        f"{made.families}. Make them the same, or give program=."
                    )
                variables[name[0]][name[1]] = made, key_columns, old
    found = {}
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
        schema = inferred_operator(source.reading.schema, (*copied, *fresh), orders.pop())
        found[operator] = schema, fresh, source.reading.num_partitions, source.reading.pieces[0].backend
    return found


def _checked_name(target: Any, variable: str) -> Name:
    """Return the operator and variable that a function gave rows to, or raise ``InvalidStateStoreArgument``."""
    name = target if isinstance(target, tuple) else (target, variable)
    if len(name) != 2 or not all(isinstance(part, str) for part in name):
        raise InvalidStateStoreArgument(
            f"A function gave rows to {target!r}: name an operator, or an operator and its state variable."
        )
    check_name("an operator", name[0])
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
