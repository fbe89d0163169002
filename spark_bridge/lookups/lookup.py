"""``lookup``: a DataFrame, enriched with another query's state at one recorded version per batch.

The lookup join of Flink SQL and the lookup of Quix Streams read whatever the table holds at the moment, so a batch that
runs again gives other rows. Here each batch of a stream records the version that it reads, before it reads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from coordinator_actor.durable.lookup_records import LookupRecord
from coordinator_actor.messages import OperatorLocation
from coordinator_actor.reading.stored_versions import StatePlace
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.lookups.looked_up_state import recorded_in_storage
from spark_bridge.lookups.lookup_task import LookupTask
from spark_bridge.operators.map_in_arrow import map_in_arrow
from spark_bridge.operators.spark_types import arrow_type, other_case
from spark_bridge.queryable.client.answers.state_views import StateView
from spark_bridge.queryable.client.cluster.known_operators import KnownOperator
from spark_bridge.session.current import current_cluster
from spark_bridge.state_data.spark_frames import spark_schema, state_place
from spark_bridge.state_data.stored_reads import StoredReads
from spark_bridge.state_format.layouts import ROWS, VALUE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

LOOKUP_TYPES = ("left", "inner")


def lookup(
    df: DataFrame,
    operator: str,
    *,
    on: str | Sequence[str] | Mapping[str, str],
    columns: Sequence[str] | None = None,
    how: Literal["left", "inner"] = "left",
    query: str | None = None,
    state: str | None = None,
    checkpoint: str | None = None,
    version: Literal["completed"] | int = "completed",
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return a DataFrame, streaming or not, with columns of another query's state after its own.

        lookup(clicks, "user_totals", on="user", columns=["spent"])

    Each batch of a stream reads **one version**: the one that is completed when its first task asks. The version is
    recorded beside the state before anything is read, and kept until two batches later. So a batch that is run again,
    by whatever has died, reads the same; where that cannot be, it fails and says so. A batch DataFrame reads the
    version that is completed when ``lookup`` is called.

    - ``on``: the columns of ``df`` that are the key, by the names of the key's columns; or a dict of ``df``'s columns
      to them. A row with a null in the key has no match, as in SQL.
    - ``columns``: those of ``get``; by default all of them. The names must not be those of columns of ``df``.
    - ``how``: "left" has nulls where there is no match, "inner" leaves such rows out.
    - ``query``: the name or id of the query, where several have the operator. It runs in this cluster, or has ended
      there and is answered on. ``state`` names the state variable of a processor; it must be a value state.
    - ``checkpoint``: read the checkpoint at this location instead, whether its query runs or not. Every task loads the
      partitions that it needs; where that is too slow, ``serve_state`` the checkpoint and ask its hosts.
    - ``version``: "completed", or the number of a version, for all batches.
    - ``state_location`` and ``storage_options``: see ``read_state``.

    State with a TTL is read as of the moment at which the version was recorded. Raises ``InvalidOperatorError`` for
    everything that can be seen to be wrong, ``UnknownOperatorError`` if no query has the operator,
    ``VersionNotFoundError`` if a version is not kept.
    """
    fixed = _fixed(version)
    place: StatePlace | None = None
    if checkpoint is None:
        location: OperatorLocation = current_cluster().coordinator.locate(operator, query)
    else:
        place = state_place(df.sparkSession, checkpoint, state_location, storage_options)
        location = StoredReads(place).locate(operator, query)
    if fixed is None and not df.isStreaming:
        fixed = _now(location.completed_version) if place is None else recorded_in_storage(place, None)
    task, schema = planned_lookup(df, location, state, on, columns, how, fixed, place)
    return map_in_arrow(df, task.run, f"lookup_in_{operator}", schema)


def planned_lookup(
    df: DataFrame,
    location: OperatorLocation,
    state: str | None,
    on: str | Sequence[str] | Mapping[str, str],
    columns: Sequence[str] | None,
    how: str,
    fixed: LookupRecord | None,
    place: StatePlace | None,
) -> tuple[LookupTask, StructType]:
    """Return the task of a lookup, and the schema of its output. Raises ``InvalidOperatorError``."""
    if how not in LOOKUP_TYPES:
        raise InvalidOperatorError(f"how={how!r}: give one of {', '.join(map(repr, LOOKUP_TYPES))}.")
    operator = location.operator.name
    view = KnownOperator.of(location, 0.0, None).view(state)
    if view.kind not in (ROWS, VALUE):
        raise InvalidOperatorError(
            f"Operator {operator!r} keeps {view.kind}, which have several rows for a key; lookup takes aggregates "
            "without windows and value states. Read the others by a query client or by read_state, and join them."
        )
    keys = _keys(df, view, on)
    wanted = _columns(df, view, columns)
    kinds = {f.name: f.type for f in view.value_fields}
    added = pa.schema([pa.field(name, kinds[name]) for name in wanted])
    own = pa.schema([pa.field(f.name, arrow_type(f.dataType)) for f in df.schema.fields])
    task = LookupTask(
        operator,
        location.query_id,
        state,
        keys,
        tuple(wanted),
        pa.schema([*own, *added]),
        how == "inner",
        df.isStreaming,
        fixed,
        place,
    )
    return task, type(df.schema)([*df.schema.fields, *spark_schema(added).fields])


def _fixed(version: Any) -> LookupRecord | None:
    if version == "completed":
        return None
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise InvalidOperatorError(f'version={version!r}: give "completed", or the number of a version.')
    return _now(version)


def _now(version: int) -> LookupRecord:
    return LookupRecord(version, "", int(time.time() * 1000))


def _keys(df: DataFrame, view: StateView, on: str | Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return the column of ``df`` for each key column."""
    by = view.codec.by
    if isinstance(on, Mapping):
        given = {key: name for name, key in on.items()}
    else:
        given = {name: name for name in ([on] if isinstance(on, str) else on)}
    if set(given) != set(by):
        example = "{" + ", ".join(f"'...': {key!r}" for key in by) + "}"
        raise InvalidOperatorError(
            f"on={on!r}: the key of {view.operator!r} is {view.codec.in_words}. Name these columns, or give a dict of "
            f"the DataFrame's columns to them: on={example}.{other_case(list(given), by)}"
        )
    missing = [name for name in given.values() if name not in df.columns]
    if missing:
        raise InvalidOperatorError(
            f"on={on!r}: the DataFrame has no {', '.join(missing)}; it has {df.columns}."
            f"{other_case(missing, df.columns)}"
        )
    for key, name in given.items():
        ours, theirs = arrow_type(df.schema[name].dataType), view.codec.schema.field(key).type
        if ours != theirs and not (pa.types.is_integer(ours) and pa.types.is_integer(theirs)):
            raise InvalidOperatorError(
                f"Column {name!r} is {ours}, and the key column {key!r} of {view.operator!r} is {theirs}: cast it."
            )
    return {key: given[key] for key in by}


def _columns(df: DataFrame, view: StateView, columns: Sequence[str] | None) -> list[str]:
    there = [f.name for f in view.value_fields]
    wanted = there if columns is None else list(dict.fromkeys(columns))
    unknown = [name for name in wanted if name not in there]
    if unknown:
        raise InvalidOperatorError(
            f"columns={columns}: {view.operator!r} has {there}, and no {', '.join(unknown)}."
            f"{other_case(unknown, there)}"
        )
    twice = [name for name in wanted if name in df.columns]
    if twice:
        raise InvalidOperatorError(
            f"The DataFrame and {view.operator!r} both have {', '.join(twice)}: rename the DataFrame's column "
            "(withColumnRenamed), or leave the state's out of columns=."
        )
    if len(set(df.columns)) != len(df.columns):
        raise InvalidOperatorError(f"The DataFrame has two columns of one name: {', '.join(df.columns)}.")
    return wanted
