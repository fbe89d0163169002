"""The operators of a rewritten state where no program is given: their columns are those of the first new rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from backends.encoding.operator_schema import TIMERS, OperatorSchema, StateVariable
from backends.exceptions import InvalidStateStoreArgument
from backends.ids import check_name
from spark_bridge.state_surgery.rewriting.inferred_schema import inferred_variable
from spark_bridge.state_surgery.rewriting.rewritten_operators import RewrittenOperator, no_rows
from spark_bridge.state_surgery.stages.first_stage import OperatorVariable, Routing, TargetColumns

Sample: TypeAlias = Callable[[RewrittenOperator, str], TargetColumns | None]
"""Gives the columns of the first rows that the function of a variable makes, by target; None if it makes none."""


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
            made_columns = sample(old, variable) or Routing((operator, variable), function, {}, 1).columns(
                iter([no_rows(old.rows(variable))])
            )
            if not made_columns:
                raise InvalidStateStoreArgument(
                    f"The function made no rows of {variable!r} of operator {operator!r}, so nothing says which "
                    "columns new rows have: give program=, or None as the function to leave all rows out."
                )
            for target, columns in made_columns.items():
                name = _checked_name(target, variable, kept)
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
        # Settings are those of the operator that the rows come from.
        schema = OperatorSchema((*copied, *fresh), orders.pop(), source.reading.schema.settings)
        found[operator] = Fresh(schema, fresh, source.reading.num_partitions, source.reading.pieces[0].backend)
    return found


def _checked_name(target: Any, variable: str, kept: Collection[str]) -> OperatorVariable:
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
