"""What a program declares of its operators, and the schema with which its state is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from backends.encoding.operator_schema import OperatorSchema, StateVariable, evolved
from backends.exceptions import IncompatibleSchemaError, InvalidStateStoreArgument
from coordinator_actor.messages import OperatorSpec
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_surgery.exchange_tasks import Combine, Name, Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Program: TypeAlias = Union["DataFrame", Sequence[OperatorSpec]]
"""The streaming DataFrame of a query, or the declarations of its operators."""


def declared(program: Program) -> dict[str, OperatorSpec]:
    """Return a program's operators by name. Raises ``InvalidStateStoreArgument`` if there are none."""
    specs: Sequence[Any]
    if hasattr(program, "_jdf"):
        from spark_bridge.operators.declared_operators import operators_of

        specs = operators_of(program)
    else:
        specs = list(program)
    if not specs or not all(isinstance(spec, OperatorSpec) for spec in specs):
        raise InvalidStateStoreArgument(
            "program= must be the DataFrame of a query with stateful operators of this project, as aggregate(...) "
            "returns it, and it has none."
        )
    return {spec.name: spec for spec in specs}


def schema_to_write(spec: OperatorSpec, stored: OperatorSchema | None) -> OperatorSchema:
    """Return the schema of an operator whose variables in ``stored`` stay as they are, and whose others are new.

    Raises ``InvalidStateStoreArgument`` if the program cannot go on with those that stay.
    """
    try:
        return evolved(stored, OperatorSchema.from_json(spec.schema))
    except IncompatibleSchemaError as error:
        raise InvalidStateStoreArgument(
            f"What stays as it is of operator {spec.name!r} does not fit the program: {error} Rewrite these state "
            "variables as well, or give None as their function, which leaves their rows out."
        ) from error


def targets_of(
    operator: str,
    schema: OperatorSchema,
    variables: Sequence[StateVariable],
    num_partitions: int,
    combine: dict[Name, Combine],
) -> tuple[Target, ...]:
    """Return where the rows of some variables of an operator go.

    Raises ``InvalidStateStoreArgument`` for the rows of ``join``.
    """
    targets = []
    for variable in variables:
        pairs = PairsOfRows(VariableRows(schema, variable, raw=True))
        if pairs.is_by_time_of_program:
            raise InvalidStateStoreArgument(
                f"The rows of {variable.name!r} of operator {operator!r} wait by times that only join(...) can tell: "
                "they cannot be written by hand. Start the join anew, from sources that reach back as far as within=."
            )
        name = (operator, variable.name)
        targets.append(Target(name, num_partitions, pairs, combine.get(name)))
    return tuple(targets)
