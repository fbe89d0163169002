"""The operators that a program declares, and the schema with which their state is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union

from backends.encoding.operator_schema import OperatorSchema, StateVariable, evolved
from backends.exceptions import IncompatibleSchemaError, InvalidStateStoreArgument
from coordinator_actor.messages import OperatorSpec
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_surgery.aggregate_states import MergedStates
from spark_bridge.state_surgery.stages.first_stage import Combine, OperatorVariable, Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MERGE = "merge"
"""As ``combine``: the states of an ``aggregate`` are merged, as those of two tasks are."""
Program: TypeAlias = Union["DataFrame", Sequence[OperatorSpec]]
"""The streaming DataFrame of a query, or the declarations of its operators."""
Combining: TypeAlias = Combine | str
"""A function, or ``MERGE``."""


class OfProgram(NamedTuple):
    """An operator of a program, and how its rows are aggregated, if they are and that is known."""

    spec: OperatorSpec
    aggregator: Aggregator | None


def declared(program: Program) -> dict[str, OfProgram]:
    """Return a program's operators by name. Raises ``InvalidStateStoreArgument`` if there are none."""
    if hasattr(program, "_jdf"):
        from spark_bridge.operators.declared_operators import declared_in

        found = [OfProgram(one.spec, one.aggregator) for one in declared_in(program)]
    else:
        found = [OfProgram(spec, None) for spec in program]
    if not found or not all(isinstance(one.spec, OperatorSpec) for one in found):
        raise InvalidStateStoreArgument(
            "program= must be the DataFrame of a query with stateful operators of this project, as aggregate(...) "
            "returns it, and it has none."
        )
    return {one.spec.name: one for one in found}


def schema_to_write(spec: OperatorSpec, stored: OperatorSchema | None) -> OperatorSchema:
    """Return the schema of an operator whose variables in ``stored`` stay as they are, and whose others are new.

    Raises ``InvalidStateStoreArgument`` if the program cannot go on with those that stay.
    """
    try:
        return evolved(stored, OperatorSchema.from_json(spec.schema), spec.kind)
    except IncompatibleSchemaError as error:
        raise InvalidStateStoreArgument(
            f"What stays as it is of operator {spec.name!r} does not fit the program: {error} Rewrite these state "
            "variables as well, or give None as their function, which leaves their rows out."
        ) from error


def written_by_hand(schema: OperatorSchema, variables: Sequence[StateVariable]) -> list[StateVariable]:
    """Return the variables that can get rows: all but the sides of ``join``, which wait by times of the program."""
    return [v for v in variables if not PairsOfRows(VariableRows(schema, v, raw=True)).is_by_time_of_program]


def check_written_by_hand(operator: str, schema: OperatorSchema, variable: StateVariable) -> None:
    """Raise ``InvalidStateStoreArgument`` for the rows of a side of ``join``."""
    if not written_by_hand(schema, [variable]):
        raise InvalidStateStoreArgument(
            f"The rows of {variable.name!r} of operator {operator!r} wait by times that only join(...) can tell: they "
            "cannot be written by hand. Give None as their function, so that the join begins anew, from sources that "
            "reach back as far as within=."
        )


def combining(
    given: Combining | Mapping[Any, Combining] | None,
    names: Sequence[OperatorVariable],
    default: Mapping[OperatorVariable, Combining],
) -> dict[OperatorVariable, Combining]:
    """Return how the rows of each variable are combined: as given, for all or by operator or variable, or by default.

    Raises ``InvalidStateStoreArgument`` for a mapping that names something else.
    """
    if given is None:
        return dict(default)
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    found = dict(default)
    for target, how in given.items():
        of_target = [n for n in names if target in (n, n[0])]
        if not of_target:
            known = ", ".join(map(repr, names))
            raise InvalidStateStoreArgument(f"combine= names {target!r}, which gets no rows: there are {known}.")
        found.update(dict.fromkeys(of_target, how))
    return found


def targets_of(
    operator: str,
    schema: OperatorSchema,
    variables: Sequence[StateVariable],
    num_partitions: int,
    combine: Mapping[OperatorVariable, Combining],
    aggregator: Aggregator | None = None,
) -> tuple[Target, ...]:
    """Return where the rows of some variables of an operator go: not the sides of ``join``.

    Raises ``InvalidStateStoreArgument`` for states that cannot be merged.
    """
    targets = []
    for variable in written_by_hand(schema, variables):
        pairs = PairsOfRows(VariableRows(schema, variable, raw=True))
        name = (operator, variable.name)
        how = combine.get(name)
        if isinstance(how, str):
            how = _merging(how, operator, pairs, aggregator)
        targets.append(Target(name, num_partitions, pairs, how))
    return tuple(targets)


def _merging(how: str, operator: str, pairs: PairsOfRows, aggregator: Aggregator | None) -> Combine:
    if how != MERGE:
        raise InvalidStateStoreArgument(f"combine={how!r} must be a function, or {MERGE!r}.")
    if aggregator is None or len(pairs.rows.inner):
        raise InvalidStateStoreArgument(
            f"combine={MERGE!r} merges the states of an aggregate, and program= has to say how: for operator "
            f"{operator!r} give program=, the DataFrame that aggregate(...) returns, or a function as combine=."
        )
    return MergedStates(aggregator, pairs)
