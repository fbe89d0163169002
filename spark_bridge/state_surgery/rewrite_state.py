"""Makes new checkpoints: ``rewrite_state`` of an operator's old rows, ``bootstrap_state`` of rows from anywhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from backends.conf import DEFAULT_FAMILY
from backends.encoding.key_groups import DEFAULT_KEY_GROUPS, check_num_groups, check_partitions
from backends.encoding.operator_schema import ROLLING_KIND, TIMERS, OperatorSchema, evolved
from backends.exceptions import IncompatibleSchemaError, InvalidStateStoreArgument
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.savepoints.export import SparkFiles
from coordinator_actor.savepoints.new_checkpoint import NewCheckpoint
from coordinator_actor.savepoints.savepoint_format import METADATA_FILE
from spark_bridge.session.current import current_spark, session_options, session_state_location
from spark_bridge.state_format.layouts import ENDS_FAMILY, SESSIONS
from spark_bridge.state_surgery import declared_operators, inferred_schema, shuffle
from spark_bridge.state_surgery.declared_operators import Combining, Program
from spark_bridge.state_surgery.inferred_schema import Functions
from spark_bridge.state_surgery.new_state import (
    NewOperator,
    NewState,
    NewStateReport,
    RayWorkers,
    Workers,
    new_query_id,
)

# Plans the operators of a rewritten state: those that stay as they are, and those that get rows.


def planned_rewrite(
    versions: StateVersions,
    version: int,
    rewritten: Mapping[str, inferred_schema.RewrittenOperator],
    *,
    program: Program | None,
    key: Sequence[str] | Mapping[str, Sequence[str]] | None,
    combine: Combining | Mapping[Any, Combining] | None,
    num_partitions: int | Mapping[str, int] | None,
    backend: str | None,
    sample: inferred_schema.Sample,
    open_storage: OpenStorage,
) -> tuple[list[NewOperator], tuple[shuffle.ReadJob, ...]]:
    """Return the operators that are written, and the state that is read.

    ``sample`` returns the columns that a variable's function makes, by target, for its first rows. Raises
    ``InvalidStateStoreArgument`` naming the mismatch.
    """
    specs = None if program is None else declared_operators.declared(program)
    if specs is not None and key is not None:
        raise InvalidStateStoreArgument("key= and program= were given: the program already defines its keys.")
    stored = versions.operators(version)
    if specs is None:
        kept = [name for name in stored if name not in rewritten]
        fresh = inferred_schema.inferred_operators(rewritten, kept, key, sample)
    else:
        staying = [name for name in stored if name not in rewritten or rewritten[name].copied]
        if lost := [name for name in staying if name not in specs]:
            raise InvalidStateStoreArgument(
                f"The state has the operators {', '.join(map(repr, lost))}, and the program does not: name them in "
                "operator=, with None as the function of each of their state variables to leave them out."
            )
        kept = [name for name in specs if name in stored and name not in rewritten]
        fresh = {}
        for name, (spec, *_) in specs.items():
            if name not in kept:
                staying_schema = rewritten[name].staying if name in rewritten else None
                schema = declared_operators.schema_to_write(spec, staying_schema)
                copied = {v.identity for v in staying_schema.variables} if staying_schema else set()
                variables = tuple(v for v in schema.in_use if v.identity not in copied)
                fresh[name] = inferred_schema.Fresh(schema, variables, spec.num_partitions, spec.backend)
    program_specs = {name: one.spec for name, one in (specs or {}).items()}
    operators = [_unchanged(versions, version, name, program_specs.get(name), open_storage) for name in kept]
    names = [(name, v.name) for name, one in fresh.items() for v in one.variables]
    combines = declared_operators.combining(combine, names, {})
    for name, one in fresh.items():
        n = _partitions(name, num_partitions, one.num_partitions, versions.key_groups)
        aggregator = specs[name].aggregator if specs else None
        targets = declared_operators.targets_of(name, one.schema, one.variables, n, combines, aggregator)
        copied_state = rewritten[name].copied_state if name in rewritten else None
        operators.append(NewOperator(name, n, backend or one.backend, one.schema, targets, copied_state))
    if isinstance(num_partitions, Mapping) and (unknown := num_partitions.keys() - fresh.keys()):
        raise InvalidStateStoreArgument(
            f"num_partitions= names {', '.join(map(repr, sorted(unknown)))}, and {', '.join(map(repr, fresh))} are "
            "rewritten."
        )
    all_targets = {t.name: t for o in operators for t in o.targets}
    return operators, tuple(job for old in rewritten.values() for job in old.jobs(all_targets))


def _partitions(name: str, wanted: int | Mapping[str, int] | None, default: int, key_groups: int) -> int:
    of_operator = wanted.get(name) if isinstance(wanted, Mapping) else wanted
    return check_partitions(name, default if of_operator is None else of_operator, key_groups)


def _unchanged(versions: StateVersions, version: int, name: str, spec: Any, open_storage: OpenStorage) -> NewOperator:
    """Return an operator that stays as it is. It keeps its layout, even if the program has another one.

    The query changes the layout when it starts.
    """
    reading = versions.reading(name, version)
    if spec is not None:
        try:
            evolved(reading.schema, OperatorSchema.from_json(spec.schema), spec.kind)
        except IncompatibleSchemaError as error:
            raise InvalidStateStoreArgument(
                f"The program cannot continue from operator {name!r} as it is stored: {error} Rewrite it as well."
            ) from error
    entry = versions.entry(name, version)
    families = tuple(f for v in reading.schema.variables if not v.deleted for f in v.families)
    copied = shuffle.CopiedState(reading.place, inferred_schema.in_order(reading.pieces), families, open_storage)
    return NewOperator(name, reading.num_partitions, entry.backend, reading.schema, (), copied)


log = logging.getLogger(__name__)


def rewrite_state(
    checkpoint_location: str,
    operator: str | Sequence[str],
    function: Functions,
    new_checkpoint_location: str,
    *,
    program: Program | None = None,
    key: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
    combine: Combining | Mapping[Any, Combining] | None = None,
    version: int | None = None,
    num_partitions: int | Mapping[str, int] | None = None,
    backend: str | None = None,
    state_only: bool = False,
    dry_run: bool = False,
    reference: str | None = None,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    concurrency: int | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    workers: Workers | None = None,
    clock: Callable[[], float] = time.time,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> NewStateReport:
    """Make a new checkpoint for a query to continue from, with other rows in some operators.

    The old checkpoint stays unchanged; its query may run at the same time. Operators that are not named go to the new
    checkpoint unchanged, and so does the progress of the sources.

    ``function`` takes a ``pa.RecordBatch`` of an operator's rows, with the columns of
    ``state_batches(state_columns=True)`` without ``key_group`` and ``partition_id``, and returns a batch or table of
    new rows, with the columns of the key among them. It returns None for no rows, and a mapping for rows of several
    operators: ``{"operator": rows}``, or ``{("operator", "variable"): rows}``. It is called for some thousand rows at a
    time, on Ray, and perhaps again for the same rows: it must return the same for the same rows. For an operator with
    several state variables pass ``{"variable": function}``: the others stay unchanged; None as a function leaves all
    rows out. ``operator`` may name several operators, with a function for all of them, or one for each by name.

    ``program`` is the streaming DataFrame of the query that is to continue: its declarations define the columns of the
    new state, and rows are cast to them if no value changes. Without it, the first rows that the function makes define
    the columns, ``key`` names the columns of new keys (by operator if there are several), and columns that keep name
    and type keep their declaration. ``combine`` is called if new keys occur several times (by operator if there are
    several): it takes a ``pa.Table`` with all rows of some keys, and returns one row for each of them. ``"merge"``
    merges the states of an ``aggregate`` of ``program``. Elements of a list need none: they all stay, in the order of
    the old keys.

    ``version`` is by default the last completed one; Spark must still have the offsets of its batch. With
    ``state_only`` a new query begins with the state, at batch 0. ``num_partitions`` and ``backend`` are those of the
    rewritten operators, by default those of the program, or the old ones. ``dry_run`` does everything but write, and
    returns the same report. ``reference`` is recorded in the audit log of the new checkpoint. ``state_location`` and
    ``storage_options`` are those of both checkpoints, by default those of the Spark session. ``concurrency`` is the
    most tasks at once, ``ray_remote_args`` are for the tasks, which take one CPU each. ``progress`` is called with each
    step.

    Reads each partition of the operators once, and writes each new one once. Tasks hold some 64 MiB of rows, or the
    rows of one key group, and with the backend ``file`` a partition; the rest is in Ray's object store, and on disk
    if that is full.

    Raises ``MissingFileError``, ``VersionNotFoundError``, ``SavepointError`` (the new location is not empty),
    ``StorageError``, and the errors of ``function``. Raises ``InvalidStateStoreArgument`` for an operator or a variable
    that does not exist, for rows that do not have the columns of the state, and for keys that occur several times.
    After an error, nothing is left at the new location. The idea is that of Flink's State Processor API.
    """
    say = progress or log.info
    options = session_options(storage_options)
    old = open_storage(checkpoint_location, options)
    if old.exists(METADATA_FILE):
        raise InvalidStateStoreArgument(
            f"{checkpoint_location} is a savepoint: restore_savepoint makes a checkpoint of it, which can be rewritten."
        )
    base = state_location or session_state_location()
    place = find_state(checkpoint_location, base, options, open_storage=open_storage)
    versions = StateVersions.look(place, passes_over_damage=True, open_storage=open_storage)
    for what in versions.damages.values():
        log.warning("Versions that need this file cannot be rewritten: %s", what)
    at = versions.resolve(version)
    if at == 0 and not state_only:
        raise InvalidStateStoreArgument(
            f"No batch of {checkpoint_location} is committed yet, so no query can continue from it: give "
            "state_only=True for a new query that begins with the rewritten state."
        )
    rewritten = inferred_schema.rewritten_operators(versions, at, operator, function, open_storage)
    new = NewCheckpoint.at(
        new_checkpoint_location,
        base,
        options,
        query_id=new_query_id(),
        key_groups=versions.key_groups,
        version=0 if state_only else at,
        how="rewritten",
        open_storage=open_storage,
    )
    new.check_place(old, "checkpoint")
    run = workers or RayWorkers(ray_remote_args, concurrency)
    operators, jobs = planned_rewrite(
        versions,
        at,
        rewritten,
        program=program,
        key=key,
        combine=combine,
        num_partitions=num_partitions,
        backend=backend,
        sample=lambda one, variable: run.columns_of(one.first_rows(variable), say),
        open_storage=open_storage,
    )
    say(f"rewriting {', '.join(map(repr, rewritten))} of {place.checkpoint_location} at version {at}")
    state = NewState(
        new,
        options,
        operators,
        jobs,
        origin=f"{new.query_id}/{at}",
        what="rewrite_state",
        details={"checkpoint": place.checkpoint_location, "version": str(at)},
        reference=reference,
        spark_files=None if state_only else SparkFiles(old, at - 1),
        open_storage=open_storage,
    )
    return state.write(run, say, dry_run=dry_run, clock=clock)


def bootstrap_state(
    rows: Any,
    checkpoint_location: str,
    program: Program,
    *,
    as_input: bool = False,
    combine: Combining | Mapping[Any, Combining] | None = None,
    num_partitions: int | Mapping[str, int] | None = None,
    backend: str | None = None,
    key_groups: int | None = None,
    dry_run: bool = False,
    reference: str | None = None,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    concurrency: int | None = None,
    ray_remote_args: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    workers: Workers | None = None,
    clock: Callable[[], float] = time.time,
) -> NewStateReport:
    """Make a new checkpoint with these rows as the state: the query of ``program`` begins there at batch 0.

    ``program`` is the streaming DataFrame of the query. ``rows`` are the rows of its operator: a Ray ``Dataset``, a
    Spark DataFrame, a pandas DataFrame, or a ``pa.Table``, ``pa.RecordBatch`` or ``pa.RecordBatchReader``. For several
    operators or state variables pass a mapping: ``{"operator": rows}`` or ``{("operator", "variable"): rows}``; those
    that are not in the mapping begin empty.

    The columns are those of ``state_batches(state_columns=True)``, without ``key_group`` and ``partition_id``: the key,
    and the value's. They are cast if no value changes. With ``as_input``, rows are input rows of an ``aggregate``
    with the columns that its ``by=`` and functions name (a window as a struct of ``start`` and ``end``), and the state
    is the one that the operator would have made of them.
    ``combine`` is as in ``rewrite_state``, for keys that occur several times.

    ``key_groups`` is the number of key groups of the query, by default that of the session
    (``spark.statestore.keyGroups``), else 1,024. See ``rewrite_state`` for the other arguments. The rows of a Spark
    DataFrame go through the driver, one partition at a time; if Spark runs on Ray, ``ray.data.from_spark`` avoids
    that.

    Raises, with nothing left at the new location, ``SavepointError`` (the location is not empty),
    ``InvalidStateStoreArgument`` (unknown operator or variable; rows that do not have the columns of the state; keys
    that occur several times), and ``StorageError``. The idea is that of Flink's State Processor API.
    """
    say = progress or log.info
    options = session_options(storage_options)
    specs = declared_operators.declared(program)
    groups = _key_groups(key_groups)
    operators, targets = _operators(specs, num_partitions, backend, combine, groups, as_input=as_input)
    _check_rolling(specs, rows if isinstance(rows, Mapping) else [] if targets else specs)
    rows_by_target = rows if isinstance(rows, Mapping) else {_only(targets): rows}
    names = {key: _name(key, targets) for key in rows_by_target}
    if len(set(names.values())) != len(names):
        raise InvalidStateStoreArgument(f"rows= names a state variable twice: {', '.join(map(repr, names))}.")
    functions = {name: _function(specs[name[0]], targets[name]) if as_input else None for name in names.values()}
    new = NewCheckpoint.at(
        checkpoint_location,
        state_location or session_state_location(),
        options,
        query_id=new_query_id(),
        key_groups=groups,
        version=0,
        how="bootstrapped",
    )
    new.check_place()
    say(f"making state of {', '.join(sorted({repr(name[0]) for name in names.values()}))} at {checkpoint_location}")

    def jobs() -> Iterator[shuffle.ReadJob]:
        for key, source in rows_by_target.items():
            name = names[key]
            routing = shuffle.Routing(name, functions[name], {name: targets[name]}, groups)
            yield from (shuffle.ReadJob(one, routing) for one in declared_operators.sources_of(source))

    state = NewState(new, options, operators, jobs(), f"{new.query_id}/0", "bootstrap_state", {}, reference)
    return state.write(workers or RayWorkers(ray_remote_args, concurrency), say, dry_run=dry_run, clock=clock)


def _check_rolling(specs: Mapping[str, declared_operators.OfProgram], names: Collection[Any]) -> None:
    """Raise ``InvalidStateStoreArgument`` if rows are given for rolling aggregates."""
    given = {key[0] if isinstance(key, tuple) else key for key in names}
    for name, (spec, *_) in specs.items():
        if spec.kind == ROLLING_KIND and name in given:
            raise InvalidStateStoreArgument(f"{declared_operators.without_rows(name)} Leave {name!r} out of rows=.")


def _operators(
    specs: Mapping[str, declared_operators.OfProgram],
    num_partitions: int | Mapping[str, int] | None,
    backend: str | None,
    combine: Combining | Mapping[Any, Combining] | None,
    groups: int,
    *,
    as_input: bool,
) -> tuple[list[NewOperator], dict[shuffle.OperatorVariable, shuffle.Target]]:
    unknown = [name for name in (num_partitions if isinstance(num_partitions, Mapping) else {}) if name not in specs]
    if unknown:
        raise InvalidStateStoreArgument(
            f"num_partitions= names {', '.join(map(repr, unknown))}, and the program has {', '.join(map(repr, specs))}."
        )
    schemas = {name: declared_operators.schema_to_write(spec, None) for name, (spec, *_) in specs.items()}
    fresh = {name: declared_operators.written_by_hand(schema, schema.in_use) for name, schema in schemas.items()}
    merged = {
        (name, v.name): declared_operators.MERGE
        for name, (_, aggregator, _) in specs.items()
        for v in fresh[name]
        if as_input and aggregator is not None and ENDS_FAMILY not in v.families
    }
    combines = declared_operators.combining(combine, [(name, v.name) for name, of in fresh.items() for v in of], merged)
    operators = []
    for name, (spec, aggregator, _) in specs.items():
        n = _partitions(name, num_partitions, spec.num_partitions, groups)
        targets = declared_operators.targets_of(name, schemas[name], fresh[name], n, combines, aggregator)
        operators.append(NewOperator(name, n, backend or spec.backend, schemas[name], targets))
    return operators, {t.name: t for o in operators for t in o.targets}


def _function(of_program: declared_operators.OfProgram, target: shuffle.Target) -> shuffle.Function:
    """Return the function that makes state from input rows.

    Raises ``InvalidStateStoreArgument`` if the operator is not an aggregate, or has session windows.
    """
    if of_program.aggregator is None or target.name[1] != DEFAULT_FAMILY or target.pairs.rows.kind == SESSIONS:
        raise InvalidStateStoreArgument(
            f"as_input=True makes states of the input rows of an aggregate without session windows, and "
            f"{target.in_words} is none: give the rows of its state."
        )
    return partial(declared_operators.states_of_rows, of_program.aggregator, target.pairs, target.in_words)


def _only(targets: Mapping[shuffle.OperatorVariable, shuffle.Target]) -> shuffle.OperatorVariable:
    row_targets = [name for name, target in targets.items() if target.pairs.rows.kind != TIMERS]
    if len(row_targets) != 1:
        names = ", ".join(map(repr, targets)) or "none that can be given"
        raise InvalidStateStoreArgument(
            f"The program has the state variables {names}: give rows as a mapping of them, as {{'operator': rows}}."
        )
    return row_targets[0]


def _name(key: Any, targets: Mapping[shuffle.OperatorVariable, shuffle.Target]) -> shuffle.OperatorVariable:
    if (name := shuffle.target_name(key, targets)) is None:
        names = ", ".join(map(repr, targets)) or "none that can be given"
        raise InvalidStateStoreArgument(f"rows= has rows for {key!r}; the program has the state variables {names}.")
    return name


def _key_groups(key_groups: int | None) -> int:
    if key_groups is None:
        if (spark := current_spark()) is None:
            return DEFAULT_KEY_GROUPS
        from spark_bridge.operators.map_in_arrow import configured_key_groups

        key_groups = configured_key_groups(spark)
    check_num_groups(key_groups)
    return key_groups
