"""``take_over``: makes a checkpoint for a query of this project out of that of a stopped query of Spark.

Spark 4's own readers of state read the old checkpoint at its last committed batch. Each stateful operator of
Spark gives rows to one operator of the program. Columns are matched by name, and the buffers of an aggregation by their
order. Spark's records of sources, offsets and commits are copied, so that the new query continues with the next row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa

from backends.encoding.key_groups import check_partitions
from backends.encoding.operator_schema import ROLLING_KIND, TIMERS, OperatorSchema
from backends.exceptions import InvalidStateStoreArgument
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.savepoints.export import SparkFiles
from coordinator_actor.savepoints.new_checkpoint import NewCheckpoint
from spark_bridge.aggregates.computation import outputs_of
from spark_bridge.operators.map_in_arrow import key_group_count, sources_in_plan
from spark_bridge.session.settings import STATE_LOCATION_CONF, storage_settings
from spark_bridge.state_format.layouts import EXPIRES_AT
from spark_bridge.state_surgery import new_state
from spark_bridge.state_surgery.declared_operators import (
    STAGING,
    OfProgram,
    declared,
    schema_to_write,
    sources_of,
    staged_rows,
    targets_of,
    without_rows,
)
from spark_bridge.state_surgery.new_state import NewStateReport, Workers
from spark_bridge.state_surgery.shuffle import OperatorVariable, ReadJob, Routing, Target, key_in_words
from spark_bridge.state_surgery.spark_state import (
    AGGREGATE,
    GROUP_STATE,
    JOIN,
    KINDS_BY_SPARK,
    PROCESSOR,
    SESSION,
    Conversion,
    FileSink,
    SparkOperator,
    SparkQuery,
    listed,
    times_of_micros,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


def take_over(
    spark_checkpoint: str,
    checkpoint_location: str,
    program: DataFrame,
    *,
    operators: Mapping[str, int] | None = None,
    columns: Mapping[str, Mapping[str, str | int]] | None = None,
    file_sink: str | None = None,
    backend: str | None = None,
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
    """Make a new checkpoint, from which the query of ``program`` continues a stopped query of Spark.

    ``program`` is the streaming DataFrame of the new query, with the sources of the old one in the same order. Its
    ``aggregate`` takes over ``groupBy(...).agg(...)`` with count, sum, min, max, mean, deviations and variances, also
    of windows and sessions; ``deduplicate`` takes over ``dropDuplicates`` and ``dropDuplicatesWithinWatermark``; a
    processor takes over ``transformWithState(InPandas)``, or ``applyInPandasWithState`` with its one value and timer;
    ``join`` takes over a join of two streams, whose keys are matched by their order.
    Keys and state variables are matched by their names, and functions by their order. ``operators`` says which operator
    of the program takes over which operator of Spark, by its number; it may be left out if there is one of each kind.
    ``columns`` names what does not match: ``{"operator": {"user": "user_id", "total": 2}}`` takes the key ``user`` from
    Spark's column ``user_id``, and the output ``total`` from buffer 2. If an output of an operator has a place, all
    must have one, and buffers without an output are left out. Errors list columns and buffers as Spark has them.

    The new query gets a new id. It begins with the batch after the last committed one. A batch that Spark has planned
    and not committed runs again with the same offsets. The old checkpoint stays as it is. Never start the old query
    again while the new one writes to the same sink.

    ``file_sink`` is the directory of the old query's file sink, if the new query writes to it too. Its batches keep
    their numbers, and the sink skips a batch that it has. So a directory is refused whose last batch is not the last
    committed one, or which a running query of this session writes to.

    With ``dry_run`` everything is read and converted, and nothing is written: look at ``samples_after`` of the report.
    See ``rewrite_state`` for the other arguments.

    Raises, with nothing left at the new location, ``InvalidStateStoreArgument`` (Spark 3.5; a running query; state that
    cannot be taken over, named), ``SavepointError`` (the location is not empty; other sources), and ``StorageError``.
    """
    say, spark = progress or log.info, program.sparkSession
    options = {**storage_settings(spark), **(storage_options or {})}
    sink = None if file_sink is None else FileSink(open_storage(file_sink, options))
    query = SparkQuery.at(spark, spark_checkpoint, open_storage(spark_checkpoint, options), sink)
    specs = declared(program)
    pairs = _matched(query, specs, operators)
    key_groups = key_group_count(program)
    new = NewCheckpoint.at(
        checkpoint_location,
        state_location or spark.conf.get(STATE_LOCATION_CONF, "") or None,
        options,
        query_id=new_state.new_query_id(),
        key_groups=key_groups,
        version=query.batch_id + 1,
        how="taken-over",
        open_storage=open_storage,
    )
    new.check_place(query.storage, "checkpoint")
    new_operators = [_operator(spec, backend, key_groups) for spec in specs.values()]
    targets = {target.name: target for one in new_operators for target in one.targets}
    frames = _frames(query, specs, pairs, targets, columns or {})
    say(f"taking over {', '.join(one.in_words for one in pairs.values())} of {spark_checkpoint} at {query.batch_id}")

    if query.planned == query.batch_id + 1:
        say(f"batch {query.planned} is planned and not committed, and will run again: the old query must have stopped")

    def jobs() -> Iterator[ReadJob]:
        for name, frame in frames.items():
            last = targets[name].pairs.columns[-1]
            function = partial(times_of_micros, last) if last.name == EXPIRES_AT else None
            routing = Routing(name, function, {name: targets[name]}, key_groups)
            sources = sources_of(frame) if dry_run else staged_rows(frame, new.state.location, options)
            yield from (ReadJob(source, routing) for source in sources)
        query.check_stopped()

    state = new_state.NewState(
        new,
        options,
        new_operators,
        jobs(),
        origin=f"{new.query_id}/{query.batch_id}",
        what="take_over",
        details={"checkpoint": query.storage.location, "batch": str(query.batch_id), "query": query.id},
        reference=reference,
        spark_files=_spark_files(query, program, round(clock() * 1000)),
        open_storage=open_storage,
        staging=STAGING,
    )
    return state.write(workers or new_state.RayWorkers(ray_remote_args, concurrency), say, dry_run=dry_run, clock=clock)


def _matched(
    query: SparkQuery, specs: Mapping[str, OfProgram], operators: Mapping[str, int] | None
) -> dict[str, SparkOperator]:
    """Return the operator of Spark for each operator of the program."""
    for name, spec in specs.items():
        if _kind(spec) == ROLLING_KIND:
            raise InvalidStateStoreArgument(
                f"{without_rows(name)} Spark has no such state: take over with a program without {name!r}, and start "
                "it as a query of its own."
            )
    of_spark, there = {one.id: one for one in query.operators}, ", ".join(one.in_words for one in query.operators)
    if unreadable := [one.in_words for one in query.operators if one.name not in KINDS_BY_SPARK]:
        raise InvalidStateStoreArgument(
            f"{', '.join(unreadable)} of {query.storage.location} cannot be taken over: operators that can are "
            f"{', '.join(KINDS_BY_SPARK)}."
        )
    if len(of_spark) != len(specs):
        raise InvalidStateStoreArgument(
            f"{query.storage.location} has {there or 'no stateful operator'}, and the program has the operators "
            f"{listed(list(specs))}: each operator must take over one."
        )
    if operators is None:
        by_kind = {KINDS_BY_SPARK[one.name]: one.id for one in query.operators}
        operators = {name: by_kind.get(_kind(spec), -1) for name, spec in specs.items()}
    numbers = [operators.get(name, -1) for name in specs]
    if set(operators) != set(specs) or sorted(numbers) != sorted(of_spark):
        raise InvalidStateStoreArgument(
            f"operators= must name one operator of Spark for each of {listed(list(specs))}, as in "
            f"{{{next(iter(specs))!r}: {min(of_spark)}}}. There are {there}."
        )
    matched = {name: of_spark[number] for name, number in zip(specs, numbers, strict=True)}
    for name, one in matched.items():
        if KINDS_BY_SPARK[one.name] != _kind(specs[name]):
            raise InvalidStateStoreArgument(
                f"Operator {name!r} of the program is of the kind {_kind(specs[name])}, and cannot take over "
                f"{one.in_words}, which is of the kind {KINDS_BY_SPARK[one.name]}."
            )
    if len(specs) > 1 and any(_has_watermark(one) for one in specs.values()):
        raise InvalidStateStoreArgument(
            f"{query.storage.location} has {len(specs)} stateful operators with a watermark. Spark's "
            "records lack the watermark of each operator: such state cannot be taken over."
        )
    return matched


def _has_watermark(one: OfProgram) -> bool:
    if _kind(one) != PROCESSOR:
        return one.spec.uses_time
    return str(OperatorSchema.from_json(one.spec.schema).settings.get("time_mode", "")).lower() == "eventtime"


def _kind(one: OfProgram) -> str:
    return PROCESSOR if one.spec.kind.startswith(PROCESSOR) else one.spec.kind


def refuse_several_keys(target: Target, rows: pa.Table) -> NoReturn:
    """Raise ``InvalidStateStoreArgument`` for rows of Spark's keys that are one key here: ``combine`` of a target.

    Only the old query can say what both states are together.
    """
    key = key_in_words(rows.slice(0, 1).combine_chunks().to_batches()[0], target.pairs, 0)
    raise InvalidStateStoreArgument(
        f"Spark has several keys that are one key of {target.in_words}, such as {key}: 0.0 and -0.0 are two "
        "keys of Spark. Have the old query remove the state of one of them, add 0.0 to that column before its "
        "operator, and call take_over again."
    )


def _operator(one: OfProgram, backend: str | None, key_groups: int) -> new_state.NewOperator:
    spec = one.spec
    schema = schema_to_write(spec, None)
    count = check_partitions(spec.name, spec.num_partitions, key_groups)
    targets = targets_of(spec.name, schema, schema.in_use, count, {}, one.aggregator, one.sides)
    refusing = tuple(replace(target, combine=partial(refuse_several_keys, target)) for target in targets)
    return new_state.NewOperator(spec.name, count, backend or spec.backend, schema, refusing)


def _frames(
    query: SparkQuery,
    specs: Mapping[str, OfProgram],
    pairs: Mapping[str, SparkOperator],
    targets: Mapping[OperatorVariable, Target],
    columns: Mapping[str, Mapping[str, str | int]],
) -> dict[OperatorVariable, DataFrame]:
    """Return the rows of each variable. Raises ``InvalidStateStoreArgument`` for state that no variable takes."""
    if unknown := sorted(columns.keys() - pairs.keys()):
        raise InvalidStateStoreArgument(f"columns= names {listed(unknown)}, and the program has {listed(list(pairs))}.")
    if asof := [name for name, of in pairs.items() if KINDS_BY_SPARK[of.name] == JOIN and not specs[name].sides]:
        raise InvalidStateStoreArgument(
            f"join_asof cannot take over a join of Spark, as {listed(asof)} should: use join."
        )
    _check_columns(specs, pairs, targets, columns)
    for name, operator in pairs.items():
        variables = [variable for owner, variable in targets if owner == name]
        if extra := [variable for variable in operator.variables if variable not in variables]:
            raise InvalidStateStoreArgument(
                f"{operator.in_words} has the state variables {listed(extra)}, which the processor of {name!r} does "
                "not declare: declare them. The new query may delete them with deleteIfExists."
            )
        values = [v for v in variables if targets[name, v].pairs.rows.kind != TIMERS]
        if operator.name == GROUP_STATE and len(values) != 1:
            raise InvalidStateStoreArgument(
                f"{operator.in_words} has one value at a key, and the processor of {name!r} has the state variables "
                f"{listed(values)}: declare one value state with the fields of the old state, and add others later."
            )
    sides = {(owner, side.name): side for owner, one in specs.items() for side in one.sides}
    frames = {
        name: Conversion(query, pairs[name[0]], target, columns.get(name[0], {}), sides.get(name)).rows()
        for name, target in targets.items()
    }
    return {name: frame for name, frame in frames.items() if frame is not None}


def _check_columns(
    specs: Mapping[str, OfProgram],
    pairs: Mapping[str, SparkOperator],
    targets: Mapping[OperatorVariable, Target],
    columns: Mapping[str, Mapping[str, str | int]],
) -> None:
    """Raise ``InvalidStateStoreArgument`` if ``columns`` names what an operator does not have, or no place."""
    for owner, given in columns.items():
        of_owner = [target for (name, _), target in targets.items() if name == owner]
        outputs: list[str] = []
        if KINDS_BY_SPARK[pairs[owner].name] in (AGGREGATE, SESSION):
            rows = of_owner[0].pairs.rows
            outputs = [output for output, _, _ in outputs_of(rows.stored_value)]
            known = [*rows.key.names, *outputs]
        else:
            of_sides = [name for side in specs[owner].sides for name in side.columns.names]
            known = [*(name for target in of_owner for name in target.pairs.columns.names), *of_sides]
        if not isinstance(given, Mapping) or (unknown := [name for name in given if name not in known]):
            said = listed(unknown) if isinstance(given, Mapping) else repr(given)
            raise InvalidStateStoreArgument(
                f"columns= has {said} for operator {owner!r}, whose columns are {listed(list(dict.fromkeys(known)))}: "
                f"give them as columns={{{owner!r}: {{{known[0]!r}: ...}}}}."
            )
        for output in outputs:
            place = given.get(output, 0)
            if not isinstance(place, int) or isinstance(place, bool) or place < 0:
                raise InvalidStateStoreArgument(
                    f"columns= has {place!r} for the output {output!r} of operator {owner!r}: give the place of its "
                    "first buffer among those of Spark's operator, from 0 on."
                )


def _spark_files(query: SparkQuery, program: DataFrame, now_ms: int) -> SparkFiles:
    """Return Spark's files, with places for the sources of the program that make batches on a quiet stream."""
    are_ticks = sources_in_plan(program._jdf.queryExecution().analyzed())
    ticks = tuple(place for place, is_tick in enumerate(are_ticks) if is_tick)
    places = tuple(place for place, is_tick in enumerate(are_ticks) if not is_tick)
    planned = SparkCommits(query.storage).sources()
    if planned is not None and planned.num_sources not in (None, len(places)):
        raise InvalidStateStoreArgument(
            f"The query of {query.storage.location} has {planned.num_sources} sources, and the program has "
            f"{len(places)}: give it the same sources in the same order."
        )
    return SparkFiles(query.storage, query.batch_id, places if ticks else None, ticks, now_ms, with_planned_batch=True)
