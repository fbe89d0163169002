"""``StateScan``: the rows of a scan, as they come to a client."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pyarrow as pa

from backends.encoding.given_values import python_rows
from spark_bridge.queryable.client.answers.results import to_pandas, to_polars
from spark_bridge.queryable.protocol.state_reads import StateAnswer


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

    def __init__(self, answer: StateAnswer, limit: int | None, columns: Sequence[int] | None = None) -> None:
        self._answer = answer
        self._columns = columns
        self._rows = self._limited(limit)

    @property
    def version(self) -> int:
        """The version of all rows."""
        return self._answer.version

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
