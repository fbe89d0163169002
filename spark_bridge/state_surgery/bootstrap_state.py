"""``bootstrap_state``: makes a new checkpoint for a query to begin with, out of rows from anywhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from backends.conf import DEFAULT_FAMILY
from backends.encoding.key_groups import DEFAULT_KEY_GROUPS, check_num_groups, check_partitions
from backends.encoding.operator_schema import ROLLING_KIND, TIMERS
from backends.exceptions import InvalidStateStoreArgument
from coordinator_actor.savepoints.new_checkpoint import NewCheckpoint
from spark_bridge.session.current import current_spark, session_options, session_state_location
from spark_bridge.state_format.layouts import ENDS_FAMILY, SESSIONS
from spark_bridge.state_surgery.declared_operators import (
    MERGE,
    Combining,
    OfProgram,
    Program,
    StatesOfRows,
    combining,
    declared,
    schema_to_write,
    sources_of,
    targets_of,
    without_rows,
    written_by_hand,
)
from spark_bridge.state_surgery.new_state import (
    NewOperator,
    NewState,
    NewStateReport,
    RayWorkers,
    Workers,
    new_query_id,
)
from spark_bridge.state_surgery.shuffle import Function, OperatorVariable, ReadJob, Routing, Target, target_name

log = logging.getLogger(__name__)


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
    """Make a new checkpoint, from which the query of ``program`` begins at batch 0 with these rows as its state.

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
    specs = declared(program)
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

    def jobs() -> Iterator[ReadJob]:
        for key, source in rows_by_target.items():
            name = names[key]
            routing = Routing(name, functions[name], {name: targets[name]}, groups)
            yield from (ReadJob(one, routing) for one in sources_of(source))

    state = NewState(
        new,
        options,
        operators,
        jobs(),
        origin=f"{new.query_id}/0",
        what="bootstrap_state",
        details={},
        reference=reference,
    )
    return state.write(workers or RayWorkers(ray_remote_args, concurrency), say, dry_run=dry_run, clock=clock)


def _check_rolling(specs: Mapping[str, OfProgram], names: Collection[Any]) -> None:
    """Raise ``InvalidStateStoreArgument`` if rows are given for rolling aggregates."""
    given = {key[0] if isinstance(key, tuple) else key for key in names}
    for name, (spec, *_) in specs.items():
        if spec.kind == ROLLING_KIND and name in given:
            raise InvalidStateStoreArgument(f"{without_rows(name)} Leave {name!r} out of rows=.")


def _operators(
    specs: Mapping[str, OfProgram],
    num_partitions: int | Mapping[str, int] | None,
    backend: str | None,
    combine: Combining | Mapping[Any, Combining] | None,
    groups: int,
    *,
    as_input: bool,
) -> tuple[list[NewOperator], dict[OperatorVariable, Target]]:
    unknown = [name for name in (num_partitions if isinstance(num_partitions, Mapping) else {}) if name not in specs]
    if unknown:
        raise InvalidStateStoreArgument(
            f"num_partitions= names {', '.join(map(repr, unknown))}, and the program has {', '.join(map(repr, specs))}."
        )
    schemas = {name: schema_to_write(spec, None) for name, (spec, *_) in specs.items()}
    fresh = {name: written_by_hand(schema, schema.in_use) for name, schema in schemas.items()}
    merged = {
        (name, v.name): MERGE
        for name, (_, aggregator, _) in specs.items()
        for v in fresh[name]
        if as_input and aggregator is not None and ENDS_FAMILY not in v.families
    }
    combines = combining(combine, [(name, v.name) for name, of in fresh.items() for v in of], merged)
    operators = []
    for name, (spec, aggregator, _) in specs.items():
        wanted_partitions = num_partitions.get(name) if isinstance(num_partitions, Mapping) else num_partitions
        n = check_partitions(name, spec.num_partitions if wanted_partitions is None else wanted_partitions, groups)
        targets = targets_of(name, schemas[name], fresh[name], n, combines, aggregator)
        operators.append(NewOperator(name, n, backend or spec.backend, schemas[name], targets))
    return operators, {t.name: t for o in operators for t in o.targets}


def _function(of_program: OfProgram, target: Target) -> Function:
    """Return the function that makes state of input rows. Raises ``InvalidStateStoreArgument`` if the operator is no
    aggregate.
    """
    if of_program.aggregator is None or target.name[1] != DEFAULT_FAMILY or target.pairs.rows.kind == SESSIONS:
        raise InvalidStateStoreArgument(
            f"as_input=True makes states of the input rows of an aggregate without session windows, and "
            f"{target.in_words} is none: give the rows of its state."
        )
    return StatesOfRows(of_program.aggregator, target.pairs, target.in_words)


def _only(targets: Mapping[OperatorVariable, Target]) -> OperatorVariable:
    row_targets = [name for name, target in targets.items() if target.pairs.rows.kind != TIMERS]
    if len(row_targets) != 1:
        names = ", ".join(map(repr, targets)) or "none that can be given"
        raise InvalidStateStoreArgument(
            f"The program has the state variables {names}: give rows as a mapping of them, as {{'operator': rows}}."
        )
    return row_targets[0]


def _name(key: Any, targets: Mapping[OperatorVariable, Target]) -> OperatorVariable:
    name = target_name(key, targets)
    if name is None:
        names = ", ".join(map(repr, targets)) or "none that can be given"
        raise InvalidStateStoreArgument(f"rows= has rows for {key!r}; the program has the state variables {names}.")
    return name


def _key_groups(key_groups: int | None) -> int:
    if key_groups is None:
        spark = current_spark()
        if spark is None:
            return DEFAULT_KEY_GROUPS
        from spark_bridge.operators.map_in_arrow import configured_key_groups

        key_groups = configured_key_groups(spark)
    check_num_groups(key_groups)
    return key_groups
