"""``StateScan``: the rows of a scan, as they come to a client."""

from __future__ import annotations

import datetime as dt
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import TIMERS
from backends.encoding.user_values import python_rows
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.client.arguments import WhereCondition, comparisons, key_range
from spark_bridge.queryable.client.discovery import KnownOperator
from spark_bridge.queryable.client.results import to_pandas, to_polars
from spark_bridge.queryable.client.state_views import StateView
from spark_bridge.queryable.protocol import At, ScanRequest, StateAnswer
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.state_format import stored_rows
from spark_bridge.state_format.layouts import SESSIONS, with_distinct_names
from spark_bridge.state_format.stored_rows import ComparedRows


def scan_request(
    target: KnownOperator,
    view: StateView,
    state: str | None,
    at: At,
    prefix: Any,
    start: Any,
    end: Any,
    *,
    limit: int | None = None,
    columns: Sequence[str] | None = None,
    where: Sequence[WhereCondition] | None = None,
) -> ScanRequest:
    """Return the request of a scan. Raises ``RequestError`` for arguments that do not fit the operator."""
    (first, behind), conditions = key_range(view.codec, view.window, prefix, start, end)
    return ScanRequest(
        target.location.run_id,
        target.location.operator.name,
        state,
        at,
        first,
        behind,
        None if columns is None else list(columns),
        comparisons([*conditions, *(where or ())], view.types),
        limit,
    )


def utc_time(us: int) -> dt.datetime:
    """Return the time of microseconds since 1970."""
    return dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(microseconds=us)


class StateScan:
    """The rows of a state variable at one version, batch by batch as they come from the hosts.

    Iterate over it for ``pyarrow.RecordBatch``es, or take all rows that are left at once; once only. Memory stays flat
    while batches are used one after the other. A caller that stops early should ``close`` the scan, or use it in a
    ``with``, so that the hosts stop too.

            with client.scan("user_totals", prefix=("de",), columns=["user", "n"]) as rows:
                for batch in rows:
                    ...
            frame = client.scan("user_totals", where=[("n", ">", 10)]).to_polars()
    """

    def __init__(
        self, answer: StateAnswer, limit: int | None, columns: Sequence[int] | None = None, *, moment: int | None = None
    ) -> None:
        self._answer = answer
        self._moment = moment
        self._columns = columns
        self._rows = self._limited(limit)

    @property
    def version(self) -> int:
        """The version of all rows."""
        return self._answer.version

    @property
    def at(self) -> dt.datetime | None:
        """The time that rolling aggregates are of; None for rows of other operators."""
        return None if self._moment is None else utc_time(self._moment)

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch."""
        schema = self._answer.schema
        return schema if self._columns is None else pa.schema([schema.field(i) for i in self._columns])

    def _limited(self, limit: int | None) -> Generator[pa.RecordBatch, None, None]:
        left = limit
        try:
            for rows in self._answer.batches if left != 0 else ():
                batch = rows if self._columns is None else rows.select(list(self._columns))
                if left is not None:
                    batch = batch.slice(0, left)
                    left -= batch.num_rows
                if batch.num_rows:
                    yield batch
                if left == 0:
                    return
        finally:
            self._answer.close()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self._rows

    def __next__(self) -> pa.RecordBatch:
        return next(self._rows)

    def to_arrow(self) -> pa.Table:
        """Return all rows that are left."""
        return pa.Table.from_batches(list(self._rows), self.schema)

    def to_reader(self) -> pa.RecordBatchReader:
        """Return all rows that are left as an Arrow stream."""
        return pa.RecordBatchReader.from_batches(self.schema, self._rows)

    def to_pandas(self) -> Any:
        """Return all rows that are left as a pandas frame."""
        return to_pandas(self.to_arrow())

    def to_polars(self) -> Any:
        """Return all rows that are left as a Polars frame. Raises ``RequestError`` if Polars is not installed."""
        return to_polars(self.to_arrow())

    def to_pylist(self) -> list[dict[str, Any]]:
        """Return all rows that are left as dicts."""
        rows: list[dict[str, Any]] = python_rows(self.to_arrow())
        return rows

    def close(self) -> None:
        """End the scan, so that the hosts stop. Nothing happens if it has ended."""
        self._rows.close()
        self._answer.close()

    def __enter__(self) -> StateScan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ``client.diff``: the keys whose values differ between two versions.
#
# Both versions are read in the order of the stored keys and merged, so that memory depends on a batch of rows,
# not on the size of the state or the number of versions between the two. Stored keys begin with their key group, and a
# partition has a range of key groups, so the order does not depend on the number of partitions.


class VersionDiff:
    """The differences, batch by batch. Iterate over it once; ``close`` ends it early.

    There is a row per key that differs: ``change_type`` ("insert", "update" or "delete"), the columns of the key, and
    the structs ``before`` and ``after`` of its values, null if there are none. A list or map is one value; each
    window, session and timer is a separate row. Rows that have expired are in neither version.
    """

    def __init__(self, view: StateView, before: StateAnswer, after: StateAnswer) -> None:
        self.from_version, self.to_version = before.version, after.version
        self._answers = (before, after)
        keys = len(view.codec.by) + (len(view.row_fields[0]) if view.kind in (SESSIONS, TIMERS) else 0)
        self._sides = tuple(_Side(view, answer, keys) for answer in self._answers)
        fields, self._value = list(after.schema)[:keys], list(after.schema)[keys:]
        structs = stored_rows.change_fields(self._value)
        named = list(with_distinct_names([*fields, *structs, pa.field(stored_rows.CHANGE_TYPE, pa.string())]))
        self.schema = pa.schema([named[-1], *named[:-1]])
        self._batches = self._merged()

    @classmethod
    def begin(
        cls, router: StateRouter, target: KnownOperator, view: StateView, first: At, last: At, deadline: float
    ) -> VersionDiff:
        """Begin to read both versions. Raises the errors of ``StateRouter.scan``, ``RequestError``."""
        newest = _opened(router, target, view, last, deadline)
        if first.version > newest.version:
            newest.close()
            raise RequestError(
                f"A diff from version {first.version} to version {newest.version}: give the earlier version first."
            )
        try:
            return cls(view, _opened(router, target, view, first, deadline), newest)
        except BaseException:
            newest.close()
            raise

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self._batches

    def to_arrow(self) -> pa.Table:
        """Return all differences that are left."""
        return pa.Table.from_batches(list(self._batches), self.schema)

    def close(self) -> None:
        """End the reading, so that the hosts stop. Nothing happens if it has ended."""
        for answer in self._answers:
            answer.close()

    def __enter__(self) -> VersionDiff:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _merged(self) -> Iterator[pa.RecordBatch]:
        before, after = self._sides
        try:
            while True:
                lasts = [last for last in (before.last(), after.last()) if last is not None]
                if not lasts:
                    return
                batch = self._differing(before.take_up_to(min(lasts)), after.take_up_to(min(lasts)))
                if batch.num_rows:
                    yield batch
        finally:
            self.close()

    def _differing(self, before: ComparedRows, after: ComparedRows) -> pa.RecordBatch:
        values = _without_maps(before).comparable(), _without_maps(after).comparable()
        changed = stored_rows.changed_rows((before.ids, after.ids), values)
        types, keys, structs = stored_rows.change_columns(before, after, changed, self._value)
        return pa.RecordBatch.from_arrays([types, *keys, *structs], schema=self.schema)


class _Side:
    """The rows of one version; one batch of them is held."""

    def __init__(self, view: StateView, answer: StateAnswer, num_keys: int) -> None:
        self._view = view
        self._batches = answer.batches
        self._num_keys = num_keys
        empty = [pa.array([], field.type) for field in answer.schema]
        self._empty = ComparedRows(pa.array([], pa.binary()), empty, num_keys)
        self._held = self._empty

    def last(self) -> bytes | None:
        """Return the last id of the rows that are held; None at the end."""
        while not len(self._held.ids):
            batch = next(self._batches, None)
            if batch is None:
                return None
            self._held = ComparedRows(self._ids(batch), batch.columns, self._num_keys)
        last: bytes = self._held.ids[-1].as_py()
        return last

    def take_up_to(self, last: bytes) -> ComparedRows:
        """Return the rows up to the id ``last``, and hold the others."""
        if not len(self._held.ids):
            return self._empty
        cut = pc.less_equal(self._held.ids, pa.scalar(last, pa.binary())).true_count
        rows, self._held = self._held[:cut], self._held[cut:]
        return rows

    def _ids(self, batch: pa.RecordBatch) -> pa.BinaryArray:
        """Return the stored keys of rows: they are different for each row, and ascend in the order of the rows."""
        view = self._view
        n = len(view.codec.by)
        keys = pa.RecordBatch.from_arrays(batch.columns[:n], schema=view.codec.columns_schema)
        stored = view.codec.encode(keys)
        inner = batch.columns[n : self._num_keys]
        if not inner:
            return stored
        by_column = [keys.column(keys.schema.get_field_index(name)) for name in view.codec.stored.names]
        # Timers are stored in the order of their times, and sessions in the order of their keys.
        columns = [*inner, *by_column] if view.kind == TIMERS else [*by_column, *inner]
        rows = pa.RecordBatch.from_arrays(columns, names=[str(i) for i in range(len(columns))])
        return encode_keys(rows, stored_rows.key_groups_of(stored))


def _opened(router: StateRouter, target: KnownOperator, view: StateView, at: At, deadline: float) -> StateAnswer:
    location = target.location
    request = ScanRequest(location.run_id, location.operator.name, view.variable.name, at, collect=True)
    return router.scan(location, request, deadline, in_order=True)


def _without_maps(rows: ComparedRows) -> ComparedRows:
    """Return rows whose maps are lists of entries, which can be encoded."""
    return replace(rows, columns=[_entries(c) if pa.types.is_map(c.type) else c for c in rows.columns])


def _entries(maps: pa.MapArray) -> pa.ListArray:
    entry = pa.struct([pa.field("key", maps.type.key_type), pa.field("value", maps.type.item_type)])
    return maps.cast(pa.list_(entry))
