"""Rows as the body of an answer, piece by piece: JSON lines, one JSON document, CSV, or an Arrow IPC stream."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Protocol

import pyarrow as pa
import pyarrow.csv as pacsv

from deploy.state_http.problems import problem_of
from spark_bridge.queryable.client.answers import json_values as values

ARROW = "application/vnd.apache.arrow.stream"
LINES = "application/x-ndjson"
JSON = "application/json"
CSV = "text/csv"
PIECE_ROWS = 4096
"""At most this many rows are made into JSON at once, and sent as one piece."""


class Body(Protocol):
    """Writes rows as the body of an answer."""

    def rows(self, batch: pa.RecordBatch) -> bytes:
        """Return the bytes of some rows."""

    def end(self) -> bytes:
        """Return the bytes after the last row."""

    def problem(self, error: Exception) -> bytes:
        """Return the bytes in place of the rows that an error prevents."""


class LinesBody:
    """A JSON object in each line."""

    def rows(self, batch: pa.RecordBatch) -> bytes:
        """Return the lines of some rows."""
        return values.lines(batch)

    def end(self) -> bytes:
        """Return nothing."""
        return b""

    def problem(self, error: Exception) -> bytes:
        """Return a line with the error."""
        return values.json_bytes({"problem": problem_of(error)}) + b"\n"


class DocumentBody:
    """One JSON document: ``{"columns": [{"name", "type"}], "versions": {query id: version}, "rows": [objects]}``."""

    def __init__(self, schema: pa.Schema, versions: Mapping[str, int]) -> None:
        columns = [{"name": f.name, "type": str(f.type)} for f in schema]
        head = values.json_bytes({"columns": columns, "versions": dict(versions)})
        self._next = head[:-1] + b',"rows":['

    def rows(self, batch: pa.RecordBatch) -> bytes:
        """Return the objects of some rows, and before the first rows what stands before them."""
        encoded = b",".join(map(values.json_bytes, values.rows_to_json(batch)))
        before, self._next = self._next, b"," if encoded else self._next
        return before + encoded if encoded else b""

    def end(self) -> bytes:
        """Return the end of the document."""
        return self._before_end() + b"]}"

    def problem(self, error: Exception) -> bytes:
        """Return the end of the document, with the error."""
        return self._before_end() + b'],"problem":' + values.json_bytes(problem_of(error)) + b"}"

    def _before_end(self) -> bytes:
        return b"" if self._next == b"," else self._next


class CsvBody:
    """CSV with a line of names. Texts stand in quotes, null is an empty field, nested values are JSON."""

    def __init__(self, schema: pa.Schema) -> None:
        self._is_begun = False
        self._schema = schema

    def rows(self, batch: pa.RecordBatch) -> bytes:
        """Return the lines of some rows, and before the first rows that of the names."""
        columns = [_csv_column(column) for column in batch.columns]
        table = pa.table(columns, names=self._schema.names)
        written = io.BytesIO()
        pacsv.write_csv(table, written, pacsv.WriteOptions(include_header=not self._is_begun))
        self._is_begun = True
        return written.getvalue()

    def end(self) -> bytes:
        """Return the line of names, if there were no rows."""
        return b"" if self._is_begun else self.rows(pa.RecordBatch.from_pylist([], self._schema))

    def problem(self, error: Exception) -> bytes:
        """Return nothing: CSV has no place for an error; the connection is cut before the end of the body."""
        return b""


def _csv_column(column: pa.Array) -> pa.Array:
    """Return a column that Arrow writes as CSV: numbers, truth and texts as they are, all else as JSON has it."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_string(kind):
        return column
    made = [None if v is None else values.to_json(v) for v in column.to_pylist()]
    if all(v is None or isinstance(v, float) for v in made):
        return pa.array(made, pa.float64())
    return pa.array(
        [v if v is None or isinstance(v, str) else values.json_bytes(v).decode() for v in made], pa.string()
    )


class ArrowBody:
    """An Arrow IPC stream."""

    def __init__(self, schema: pa.Schema) -> None:
        self._written = io.BytesIO()
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._written, "w"), schema)

    def rows(self, batch: pa.RecordBatch) -> bytes:
        """Return the bytes of some rows; before the first rows the schema."""
        self._writer.write_batch(batch)
        return self._taken()

    def end(self) -> bytes:
        """Return the marker of the end."""
        self._writer.close()
        return self._taken()

    def problem(self, error: Exception) -> bytes:
        """Return nothing: the stream lacks its end, which readers notice."""
        return b""

    def _taken(self) -> bytes:
        taken = self._written.getvalue()
        self._written.seek(0)
        self._written.truncate()
        return taken


def arrow_stream(table: pa.Table) -> bytes:
    """Return a table as an Arrow IPC stream."""
    body = ArrowBody(table.schema)
    return b"".join([*(body.rows(batch) for batch in table.to_batches()), body.end()])
