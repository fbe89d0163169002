"""Lists the differences between a savepoint and the program that is to go on from it, with both sides named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa

from backends.encoding.operator_schema import OperatorSchema, evolved
from backends.encoding.schema import StateSchema
from backends.encoding.spark_types import to_spark_type
from backends.exceptions import IncompatibleSchemaError
from backends.ids import DEFAULT_FAMILY
from coordinator_actor.messages import OperatorSpec
from coordinator_actor.savepoints.savepoint_format import SavepointMetadata, SavepointOperator


def differences(
    metadata: SavepointMetadata, operators: Sequence[OperatorSpec | str], *, allow_non_restored_state: bool
) -> list[str]:
    """Return the differences that keep the program from going on, one line each.

    Names in ``operators`` only choose operators of the savepoint. Declarations are the whole program, which must then
    have a place for all state unless ``allow_non_restored_state``.
    """
    held = {operator.name: operator for operator in metadata.operators}
    found: list[str] = []
    for wanted in operators:
        name = wanted if isinstance(wanted, str) else wanted.name
        operator = held.get(name)
        if operator is None:
            found.append(f"operator {name!r} is not in the savepoint, which has {', '.join(map(repr, sorted(held)))}")
        elif isinstance(wanted, OperatorSpec):
            found += _operator_differences(operator, wanted)
    if any(isinstance(wanted, OperatorSpec) for wanted in operators) and not allow_non_restored_state:
        named = {wanted if isinstance(wanted, str) else wanted.name for wanted in operators}
        found += [
            f"operator {name!r} is in the savepoint, but not in the program (allow_non_restored_state=True drops it)"
            for name in sorted(held.keys() - named)
        ]
    return found


def _operator_differences(operator: SavepointOperator, spec: OperatorSpec) -> Iterator[str]:
    if operator.kind != spec.kind:
        yield f"operator {spec.name!r} is of the kind {operator.kind!r} in the savepoint, {spec.kind!r} in the program"
    stored, declared = operator.schema, OperatorSchema.from_json(spec.schema)
    try:
        evolved(stored, declared, spec.kind)
    except IncompatibleSchemaError as error:
        there, here = stored.families.get(DEFAULT_FAMILY), declared.families.get(DEFAULT_FAMILY)
        lines = [] if there is None or here is None else list(_row_differences(there, here))
        yield from (f"operator {spec.name!r}: {line}" for line in lines or [str(error)])


def _row_differences(stored: StateSchema, declared: StateSchema) -> Iterator[str]:
    for what, there, here in (("key", stored.key, declared.key), ("state", stored.value, declared.value)):
        yield from (f"{what} {line}" for line in _column_differences(there, here))


def _column_differences(stored: pa.Schema, declared: pa.Schema) -> Iterator[str]:
    there = {field.name: _type(field) for field in stored}
    here = {field.name: _type(field) for field in declared}
    for name, kind in there.items():
        if name not in here:
            yield f"column {name!r} ({kind}) is in the savepoint, but not in the program"
        elif here[name] != kind:
            yield f"column {name!r} is {kind} in the savepoint, {here[name]} in the program"
    for name, kind in here.items():
        if name not in there:
            yield f"column {name!r} ({kind}) is in the program, but not in the savepoint"
    if there == here and list(there) != list(here):
        yield f"columns come as {', '.join(there)} in the savepoint, as {', '.join(here)} in the program"


def _type(field: pa.Field) -> str:
    spark = to_spark_type(field.name, field.type)
    kind = spark if isinstance(spark, str) else json.dumps(spark, sort_keys=True)
    return kind if field.nullable else f"{kind} not null"
