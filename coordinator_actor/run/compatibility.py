"""Checks whether a program may continue a query's stored state; lists every reason why not, naming both sides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from backends.conf import DEFAULT_FAMILY
from backends.encoding.operator_schema import HORIZONS, OperatorSchema, evolved, horizons_since
from backends.encoding.schema import StateSchema, columns_in_words
from backends.exceptions import IncompatibleSchemaError
from backends.formats.manifest import Manifest
from coordinator_actor.durable import manifests
from coordinator_actor.messages import OperatorSpec
from coordinator_actor.run.query_state import QueryState
from coordinator_actor.run.recovery import NOT_CONSUMED, how_to_repeat, incomplete_message
from coordinator_actor.run.versions import tasks_of


def refusal_of(
    run: QueryState, stored: manifests.QueryFile | None, place: manifests.CheckpointPlace | None
) -> str | None:
    """Return why the run may not continue from the stored state, or None. Reads storage; changes nothing.

    ``stored`` and ``place`` are the state's records of its query and of its checkpoint's place.
    """
    registration = run.registration
    where = registration.state_location
    if any(o.num_partitions > registration.key_groups for o in registration.operators):
        return (
            f"An operator has more partitions than there are key groups ({registration.key_groups}); "
            "lower num_partitions."
        )
    if stored is not None and stored.query_id != registration.query_id:
        return (
            f"The state at {where} belongs to query {stored.query_id}, and this is query {registration.query_id}: the "
            "checkpoint's metadata file was replaced or the directory shared. Use a separate checkpoint location."
        )
    refusal = place_refusal(run, place)
    if refusal is not None:
        return refusal
    if stored is not None and stored.key_groups != registration.key_groups:
        return (
            f"The state at {where} has {stored.key_groups} key groups, fixed when it was created, and the program "
            f"asks for {registration.key_groups}; set spark.statestore.keyGroups={stored.key_groups}."
        )
    base = _base(run)
    if base is not None:
        refusal = _program_refusal(run, base)
        if refusal is not None:
            return refusal
    if run.versions.oldest > run.versions.completed:
        return (
            f"Spark begins {registration.checkpoint_location} with batch {run.versions.completed}, and so needs state "
            f"version {run.versions.completed}, but at {where} versions {run.versions.oldest} to "
            f"{max(run.versions.chain)} are kept: more of Spark's offsets and commits were removed than "
            "min_versions_to_retain allows for. Restore them, or use a new checkpoint location."
        )
    if run.versions.completed > 0 and run.versions.completed not in run.versions.chain:
        return _missing_version(run, is_known=stored is not None)
    return None


def place_refusal(run: QueryState, place: manifests.CheckpointPlace | None) -> str | None:
    """Return why the run may not use a state whose checkpoint is at ``place`` (None: it has no record), or None."""
    registration = run.registration
    state, here = registration.state_location, registration.checkpoint_location
    if place is None or manifests.is_inside(state, here) or place.is_at(here):
        return None
    base = state.rstrip("/").rpartition("/")[0]
    options = registration.storage_options
    return (
        f"The state at {state} belongs to the checkpoint at {place.checkpoint_location}, and this one is at {here}: "
        "two checkpoints must not share a state. If the checkpoint was moved, run\n"
        f"  {manifests.checkpoint_command('move', here, base, options)}\n"
        "If this is a copy that needs a separate state, run\n"
        f"  {manifests.checkpoint_command('fork', here, base, options)}"
        f"{manifests.values_in_words(options)}"
    )


def bound_elsewhere(run: QueryState, place: manifests.CheckpointPlace | None) -> str | None:
    """Record where the checkpoint is, unless ``place`` already says so.

    Return why the run may not continue, or None.
    """
    registration = run.registration
    if manifests.is_inside(registration.state_location, registration.checkpoint_location):
        return None
    return place_refusal(run, place or run.manifests.record_place(registration.checkpoint_location, None))


def _program_refusal(run: QueryState, base: Manifest) -> str | None:
    where = run.registration.state_location
    declared = {o.name: o for o in run.registration.operators}
    if set(declared) != set(base.operators):
        return (
            f"The state at {where} has the operators {_names(base.operators)}, and the program has {_names(declared)}; "
            "give the operators their old names, or use a new checkpoint location."
        )
    for spec in declared.values():
        try:
            _evolved(run, base, spec)
        except IncompatibleSchemaError as error:
            return _schema_refusal(run, base, spec, error)
    return None


def evolved_operators(run: QueryState) -> tuple[OperatorSpec, ...]:
    """Return the run's operators with their evolved schemas: the stored ones with the program's changes.

    Only for a run that is not rejected. The result is the same however often this is called, including for a run that
    already has these operators. Reads storage; changes nothing. Raises ``IncompatibleSchemaError``.
    """
    base = _base(run)
    return tuple(
        msgspec.structs.replace(spec, schema=_evolved(run, base, spec).to_json()) for spec in run.registration.operators
    )


def _base(run: QueryState) -> Manifest | None:
    """Return the manifest of the state that the run continues from.

    The run does not know changes by versions above it.
    """
    below = [version for version in run.versions.chain if version <= run.versions.completed]
    return run.versions.chain[max(below)] if below else None


def _evolved(run: QueryState, base: Manifest | None, spec: OperatorSpec) -> OperatorSchema:
    declared = OperatorSchema.from_json(spec.schema)
    if base is None:
        return evolved(None, declared, spec.kind)
    schema_id = base.operators[spec.name].schema_id
    if schema_id == declared.id:
        return declared
    stored = OperatorSchema.from_json(run.manifests.schema(schema_id))
    schema = evolved(stored, declared, spec.kind)
    if HORIZONS not in schema.settings:
        return schema
    since = horizons_since(stored.settings[HORIZONS], schema.settings[HORIZONS], _watermark_us(run))
    return replace(schema, settings={**schema.settings, HORIZONS: since})


def _watermark_us(run: QueryState) -> int:
    """Return the watermark of the last batch that Spark has planned, in microseconds; 0 without one."""
    last = run.commits.last_begun()
    return 0 if last is None else run.commits.times(last).watermark_ms * 1000


def _schema_refusal(run: QueryState, base: Manifest, spec: OperatorSpec, error: IncompatibleSchemaError) -> str:
    stored = OperatorSchema.from_json(run.manifests.schema(base.operators[spec.name].schema_id))
    declared = OperatorSchema.from_json(spec.schema)
    where = run.registration.state_location
    stored_rows, declared_rows = (s.families.get(DEFAULT_FAMILY) for s in (stored, declared))
    checkpoint = run.registration.checkpoint_location
    if any(v.indexes for v in (*stored.variables, *declared.variables)) and stored_rows == declared_rows:
        return (
            f"The indexes of operator {spec.name!r} differ from those stored at {where}. {error} Restore index=, or "
            f"call rewrite_state({checkpoint!r}, {spec.name!r}, lambda rows: rows, {checkpoint.rstrip('/') + '-2'!r}, "
            "program=dataframe) and start the query with the new checkpoint."
        )
    if stored_rows is not None and declared_rows is not None and stored_rows != declared_rows:
        part = "key" if stored_rows.key != declared_rows.key else "state"
        return (
            f"The {part} schema of operator {spec.name!r} differs from the one stored at {where}: {error} "
            f"Stored: {_columns(stored_rows)}. Program: {_columns(declared_rows)}. Outputs of an aggregate can be "
            "added, removed and reordered. Restore all other columns, or rewrite the state into a new checkpoint with "
            f"rewrite_state({checkpoint!r}, {spec.name!r}, function, {checkpoint.rstrip('/') + '-2'!r}, "
            "program=dataframe), where function makes the new rows of the old ones."
        )
    return (
        f"The state of operator {spec.name!r} at {where} cannot be continued as the program declares it now. {error} "
        "Restore the old declaration, replace it with a state variable of another name, or use a new checkpoint "
        "location."
    )


def _missing_version(run: QueryState, *, is_known: bool) -> str | None:
    """Return why the run cannot continue from the completed version, which no manifest names, or None if it can.

    ``is_known``: the state already belongs to this query. Then its tasks never ran in the batches since its last
    version, and Spark can repeat these if it still has the first one's offsets.
    """
    completed = run.versions.completed
    changes = run.stored_changes(completed)
    total, missing = len(tasks_of(changes.layouts)), changes.missing
    if not missing:
        return None
    if len(missing) < total:
        return incomplete_message(completed - 1, missing, total)
    versions = sorted(run.versions.chain)
    exist = f"versions {versions[0]} to {versions[-1]} exist" if versions else "no version exists"
    lacks = (
        f"Spark has committed batch {completed - 1} of {run.registration.checkpoint_location}, so the query needs "
        f"state version {completed}, but at {run.registration.state_location} {exist}."
    )
    first = max((version for version in versions if version < completed), default=0)
    if is_known and run.commits.has_begun(first):
        since = f"batch {first}" if first == completed - 1 else f"the batches {first} to {completed - 1}"
        return (
            f"{lacks} No state partition ran in {since}: most likely a foreachBatch function {NOT_CONSUMED}. "
            f"{how_to_repeat(first, completed - 1)} If state was removed, restore it instead, or start with a new "
            "checkpoint location."
        )
    return (
        f"{lacks} If the operators are new to this query, or their state was removed, start with a new checkpoint "
        "location."
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(n) for n in sorted(names))


def _columns(schema: StateSchema) -> str:
    return f"key {columns_in_words(schema.key)}, state {columns_in_words(schema.value)}"
