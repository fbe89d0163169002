"""The stateful operators that this driver has declared, and finding them in a query's plan.

Spark's plan shows the name of the function after every ``mapInArrow``. Each operator's function has a name of its own,
by which the listener finds the declaration.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame

from backends.exceptions import InvalidStateStoreArgument
from backends.ids import check_name
from coordinator_actor.messages import OperatorSpec
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.initial_state import InitialState

FUNCTION_PREFIX = "statestore_"


@dataclass(frozen=True)
class DeclaredOperator:
    """An operator of this driver; its initial state, and how its rows are aggregated, if it has and does that."""

    spec: OperatorSpec
    initial: InitialState | None = None
    aggregator: Aggregator | None = None


_declared: dict[str, DeclaredOperator] = {}
_lock = threading.Lock()
"""Guards ``_declared``."""


def declare(spec: OperatorSpec, initial: InitialState | None = None, aggregator: Aggregator | None = None) -> str:
    """Remember an operator, and return the function name under which the plan will show it."""
    name = f"{FUNCTION_PREFIX}{uuid.uuid4().hex}"
    with _lock:
        _declared[name] = DeclaredOperator(spec, initial, aggregator)
    return name


def operators_in_plan(plan: Any) -> list[DeclaredOperator]:
    """Return the operators of a JVM logical plan, in no particular order, one entry per occurrence."""
    found = []
    for node in nodes(plan):
        if node.nodeName() in ("MapInArrow", "PythonMapInArrow"):
            name = node.functionExpr().name() if hasattr(node.functionExpr(), "name") else ""
            if name.startswith(FUNCTION_PREFIX):
                with _lock:
                    found.append(_declared[name])
    return found


def nodes(plan: Any) -> Iterator[Any]:
    """Yield all nodes of a JVM logical plan, the root first."""
    yield plan
    children = plan.children().iterator()
    while children.hasNext():
        yield from nodes(children.next())


def operators_of(df: DataFrame) -> list[OperatorSpec]:
    """Return the operators that are in a DataFrame's plan."""
    return [o.spec for o in declared_in(df)]


def declared_in(df: DataFrame) -> list[DeclaredOperator]:
    """Return the declarations of the operators that are in a DataFrame's plan."""
    return operators_in_plan(df._jdf.queryExecution().analyzed())


def check_operator_name(name: str, df: DataFrame) -> None:
    """Raise ``InvalidOperatorError`` for a name that a directory cannot have, or that is in the DataFrame's plan."""
    try:
        check_name("an operator", name)
    except InvalidStateStoreArgument as error:
        raise InvalidOperatorError(f"operator={error} It names the state in the checkpoint and in queries.") from error
    if any(o.name == name for o in operators_of(df)):
        raise InvalidOperatorError(
            f"operator={name!r} is used twice in one query; give each stateful operator a name of its own."
        )


def duplicate_names(operators: list[OperatorSpec]) -> list[str]:
    """Return the names that occur more than once in a plan, for instance on both sides of a union."""
    names = [o.name for o in operators]
    return sorted({n for n in names if names.count(n) > 1})
