"""Plans the operators of a rewritten state: those that stay as they are, and those that get rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.encoding.operator_schema import OperatorSchema, evolved
from backends.exceptions import IncompatibleSchemaError, InvalidStateStoreArgument
from backends.storage.checkpoint_storage import OpenStorage
from coordinator_actor.reading.stored_versions import StateVersions
from spark_bridge.state_surgery.programs import Combining, Program, combining, declared, schema_to_write, targets_of
from spark_bridge.state_surgery.rewriting.inferred_operators import Fresh, Sample, inferred_operators
from spark_bridge.state_surgery.rewriting.rewritten_operators import RewrittenOperator, in_order
from spark_bridge.state_surgery.stages.first_stage import ReadJob
from spark_bridge.state_surgery.stages.new_state import NewOperator, check_partitions
from spark_bridge.state_surgery.stages.second_stage import CopiedState


@dataclass(frozen=True)
class RewritePlan:
    """The state that is read, and the operators that are written."""

    operators: tuple[NewOperator, ...]
    jobs: tuple[ReadJob, ...]


def planned_rewrite(
    versions: StateVersions,
    version: int,
    rewritten: Mapping[str, RewrittenOperator],
    *,
    program: Program | None,
    key: Sequence[str] | Mapping[str, Sequence[str]] | None,
    combine: Combining | Mapping[Any, Combining] | None,
    num_partitions: int | Mapping[str, int] | None,
    backend: str | None,
    sample: Sample,
    open_storage: OpenStorage,
) -> RewritePlan:
    """Return the plan. ``sample`` gives the columns that a variable's function makes, by target, for its first rows.

    Raises ``InvalidStateStoreArgument`` naming what does not fit.
    """
    specs = None if program is None else declared(program)
    if specs is not None and key is not None:
        raise InvalidStateStoreArgument("key= and program= were given: the program says which columns its keys have.")
    stored = versions.operators(version)
    if specs is None:
        kept = [name for name in stored if name not in rewritten]
        fresh = inferred_operators(rewritten, kept, key, sample)
    else:
        staying = [name for name in stored if name not in rewritten or rewritten[name].copied]
        lost = [name for name in staying if name not in specs]
        if lost:
            raise InvalidStateStoreArgument(
                f"The state has the operators {', '.join(map(repr, lost))}, which the program has not: name them in "
                "operator=, with None as the function of each of their state variables to leave them out."
            )
        kept = [name for name in specs if name in stored and name not in rewritten]
        fresh = {}
        for name, (spec, _) in specs.items():
            if name not in kept:
                held = rewritten[name].staying if name in rewritten else None
                schema = schema_to_write(spec, held)
                copied = {v.identity for v in held.variables} if held else set()
                variables = tuple(v for v in schema.in_use if v.identity not in copied)
                fresh[name] = Fresh(schema, variables, spec.num_partitions, spec.backend)
    operators = [
        _unchanged(versions, version, name, None if specs is None else specs[name].spec, open_storage) for name in kept
    ]
    names = [(name, v.name) for name, one in fresh.items() for v in one.variables]
    combines = combining(combine, names, {})
    for name, one in fresh.items():
        given = num_partitions.get(name) if isinstance(num_partitions, Mapping) else num_partitions
        n = check_partitions(name, one.num_partitions if given is None else given, versions.key_groups)
        aggregator = specs[name].aggregator if specs else None
        targets = targets_of(name, one.schema, one.variables, n, combines, aggregator)
        copied_state = rewritten[name].copied_state if name in rewritten else None
        operators.append(NewOperator(name, n, backend or one.backend, one.schema, targets, copied_state))
    if isinstance(num_partitions, Mapping) and (unknown := num_partitions.keys() - fresh.keys()):
        raise InvalidStateStoreArgument(
            f"num_partitions= names {', '.join(map(repr, sorted(unknown)))}, and {', '.join(map(repr, fresh))} are "
            "rewritten."
        )
    all_targets = {t.name: t for o in operators for t in o.targets}
    jobs = tuple(job for old in rewritten.values() for job in old.jobs(all_targets))
    return RewritePlan(tuple(operators), jobs)


def _unchanged(versions: StateVersions, version: int, name: str, spec: Any, open_storage: OpenStorage) -> NewOperator:
    """Return an operator that stays as it is, in its layout: a start of the query changes that."""
    reading = versions.reading(name, version)
    if spec is not None:
        try:
            evolved(reading.schema, OperatorSchema.from_json(spec.schema), spec.kind)
        except IncompatibleSchemaError as error:
            raise InvalidStateStoreArgument(
                f"The program cannot go on from operator {name!r} as it is stored: {error} Rewrite it as well."
            ) from error
    entry = versions.entry(name, version)
    families = tuple(f for v in reading.schema.variables if not v.deleted for f in v.families)
    copied = CopiedState(reading.place, in_order(reading.pieces), families, open_storage)
    return NewOperator(name, reading.num_partitions, entry.backend, reading.schema, (), copied)
