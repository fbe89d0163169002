"""State as Arrow tables, for pandas, Polars and the like, without Spark and Ray: only the storage is read.

The counterparts with Spark are ``read_state`` and ``read_state_changes`` in ``spark_frames``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from typing import TypeVar

import pyarrow as pa

from backends.exceptions import VersionNotFoundError
from coordinator_actor.reading.stored_versions import find_state
from spark_bridge.state_data.state_sources import AnySource, changes_source, state_source

T = TypeVar("T")

VERSION_ATTEMPTS = 3
"""So often the last version is looked up, if it is removed before it can be read."""


def state_batches(
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    version: int | None = None,
    *,
    as_of: str | datetime | None = None,
    flatten: bool = True,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.RecordBatchReader:
    """Return the rows of a state variable at a retained version, one partition after the other, in batches.

    ``state`` is the variable, by default the only one or the operator's own rows; timers are ``"timers"``. ``version``
    is by default the last completed one; version N+1 is the state after batch N. ``as_of`` asks for the version that
    was the last completed one at a time: a datetime, or a text of ISO 8601; without a zone it is UTC.

    The columns are first the key's. Then come the columns of the variable. A value has its fields. A list has the
    fields of an element, one row per element in their order. A map has the columns of the user's key and of the value,
    one row per entry. Timers have ``expiration_timestamp_ms``. An aggregate has its results, or with ``state_columns``
    the state that it keeps. Then come ``ttl_expiration_ms`` if the variable has a TTL (rows that have expired and are
    not removed yet are shown), ``key_group`` and ``partition_id``. A column whose name is taken already gets
    ``__value`` appended. Without ``flatten`` a list or map is one row per key, in the column ``list_value`` or
    ``map_value``.

    ``state_location`` is the value of ``spark.statestore.location`` when the query ran, if it was set;
    ``storage_options`` are the settings of the storage. The query may run meanwhile, and is not disturbed. Raises
    ``VersionNotFoundError`` naming the versions that there are, also if the version is removed while it is read;
    ``MissingFileError``; ``DamagedFileError``; ``InvalidStateStoreArgument`` naming operators and variables.
    """
    place = find_state(checkpoint_location, state_location, storage_options)
    return _reader(
        lambda: state_source(place, operator, state, version, as_of=as_of, collect=not flatten, raw=state_columns),
        is_newest=version is None and as_of is None,
    )


def state_table(
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    version: int | None = None,
    *,
    as_of: str | datetime | None = None,
    flatten: bool = True,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.Table:
    """Return all rows of ``state_batches`` as one table."""

    def read() -> pa.Table:
        return state_batches(
            checkpoint_location,
            operator,
            state,
            version,
            as_of=as_of,
            flatten=flatten,
            state_columns=state_columns,
            state_location=state_location,
            storage_options=storage_options,
        ).read_all()

    return _again(read, is_newest=version is None and as_of is None)


def state_changes_batches(
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    *,
    from_version: int,
    to_version: int | None = None,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.RecordBatchReader:
    """Return the changes of a state variable from one version to a later one, in batches.

    ``to_version`` is by default the last completed one. These are the changes of batches ``from_version`` to
    ``to_version - 1``. There is a row per change. Its columns are ``version`` (the version that the change led to),
    ``change_type`` ("insert", "update" or "delete"), and the columns of the key and of a map's user key. Then come the
    structs ``before`` and ``after`` of the value columns (null where there is no value), ``key_group``, and
    ``partition_id`` (in the layout of that version). Elements of lists are only inserted and deleted. Rows ascend by
    version within a partition. Everything else is as in ``state_batches``.
    """
    place = find_state(checkpoint_location, state_location, storage_options)
    return _reader(
        lambda: changes_source(place, operator, state, from_version, to_version, raw=state_columns), is_newest=False
    )


def state_changes_table(
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    *,
    from_version: int,
    to_version: int | None = None,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.Table:
    """Return all rows of ``state_changes_batches`` as one table."""
    return state_changes_batches(
        checkpoint_location,
        operator,
        state,
        from_version=from_version,
        to_version=to_version,
        state_columns=state_columns,
        state_location=state_location,
        storage_options=storage_options,
    ).read_all()


def _reader(source: Callable[[], AnySource], *, is_newest: bool) -> pa.RecordBatchReader:
    """Return the batches of all pieces.

    The first batch is read at once, so that errors are raised here, and a newest version that is gone is looked up
    again.
    """

    def begin() -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        made = source()
        batches = (batch for piece in made.reading.pieces for batch in made.batches(piece))
        first = next(batches, None)
        return made.schema, batches if first is None else chain([first], batches)

    return pa.RecordBatchReader.from_batches(*_again(begin, is_newest=is_newest))


def _again(read: Callable[[], T], *, is_newest: bool) -> T:
    for _ in range(VERSION_ATTEMPTS - 1 if is_newest else 0):
        try:
            return read()
        except VersionNotFoundError as error:
            if error.__cause__ is None:  # the version was not removed meanwhile: there is none
                raise
    return read()
