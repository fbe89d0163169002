"""The state variables of an operator, as the overview describes them."""

from __future__ import annotations

from backends.encoding.operator_schema import OperatorSchema
from spark_bridge.overview.model import Variable
from spark_bridge.queryable.reads.operators.operator_summary import variables_summary


def variables_in_use(schema: OperatorSchema) -> tuple[Variable, ...]:
    """Return the variables that are in use, with the columns that queries see."""
    return tuple(Variable(**described) for described in variables_summary(schema))
