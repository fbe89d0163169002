"""May this program go on from that checkpoint? Every reason why not, with both sides named."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pyarrow as pa

from backends.manifest import Manifest
from backends.schema import StateSchema, to_spark_type
from coordinator_actor.messages import OperatorSpec
from coordinator_actor.query import QueryState, incomplete_message, tasks_of


def refusal_of(run: QueryState) -> str | None:
    """Why the run may not go on from what is stored, or None. Reads storage; changes nothing."""
    registration = run.registration
    where = registration.state_location
    if any(o.num_partitions > registration.key_groups for o in registration.operators):
        return f"An operator has more partitions than there are key groups ({registration.key_groups}); lower num_partitions."
    stored = run.log.query_file()
    if stored is not None and stored.query_id != registration.query_id:
        return (
            f"The state at {where} belongs to query {stored.query_id}, and this is query {registration.query_id}: the "
            "checkpoint's metadata file was replaced or the directory shared. Use a checkpoint location of its own."
        )
    if stored is not None and stored.key_groups != registration.key_groups:
        return (
            f"The state at {where} has {stored.key_groups} key groups, fixed when it was first made, and the program asks for "
            f"{registration.key_groups}; set spark.statestore.keyGroups={stored.key_groups}."
        )
    newest = run.chain[max(run.chain)] if run.chain else None
    if newest is not None:
        refusal = _program_refusal(run, newest)
        if refusal is not None:
            return refusal
    if run.oldest > run.completed:
        return (
            f"Spark begins {registration.checkpoint_location} with batch {run.completed}, and so needs state version "
            f"{run.completed}, but at {where} versions {run.oldest} to {max(run.chain)} are kept: more of Spark's offsets and "
            "commits were removed than min_versions_to_retain allows for. Restore them, or use a new checkpoint location."
        )
    if run.completed > 0 and run.completed not in run.chain:
        return _missing_version(run)
    return None


def _program_refusal(run: QueryState, newest: Manifest) -> str | None:
    where = run.registration.state_location
    declared = {o.name: o for o in run.registration.operators}
    if set(declared) != set(newest.operators):
        return (
            f"The state at {where} has the operators {_names(newest.operators)}, and the program has {_names(declared)}; give "
            "the operators their old names, or use a new checkpoint location."
        )
    for name, spec in declared.items():
        entry = newest.operators[name]
        if entry.schema_id != StateSchema.from_json(spec.schema).id:
            return _schema_refusal(run, spec, entry.schema_id)
    return None


def _schema_refusal(run: QueryState, spec: OperatorSpec, stored_id: str) -> str:
    stored, declared = StateSchema.from_json(run.log.schema(stored_id)), StateSchema.from_json(spec.schema)
    part = "key" if stored.key != declared.key else "state"
    return (
        f"The {part} schema of operator {spec.name!r} differs from the one stored at {run.registration.state_location}. "
        f"Stored: {_columns(stored)}. Program: {_columns(declared)}. Restore the old columns and aggregations, or use a new "
        "checkpoint location."
    )


def _missing_version(run: QueryState) -> str | None:
    versions = sorted(run.chain)
    layouts, found = run.stored_changes(run.completed)
    tasks = tasks_of(layouts)
    lacking = [task for task in tasks if task not in found]
    if not lacking:
        return None
    if len(lacking) < len(tasks):
        return incomplete_message(run.completed - 1, lacking, len(tasks))
    exist = f"versions {versions[0]} to {versions[-1]} exist" if versions else "no version exists"
    return (
        f"Spark has committed batch {run.completed - 1} of {run.registration.checkpoint_location}, so the query needs state "
        f"version {run.completed}, but at {run.registration.state_location} {exist}. If the operators are new to this query, "
        "or their state was removed, start with a new checkpoint location."
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(n) for n in sorted(names))


def _type(field: pa.Field) -> str:
    spark = to_spark_type(field.name, field.type)
    return spark if isinstance(spark, str) else json.dumps(spark)


def _columns(schema: StateSchema) -> str:
    key = ", ".join(f"{f.name} {_type(f)}" for f in schema.key)
    value = ", ".join(f"{f.name} {_type(f)}" for f in schema.value)
    return f"key ({key}), state ({value})"
