"""The bodies of requests and answers, which validate requests and generate the OpenAPI description."""

from __future__ import annotations

import datetime as dt
import io
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.csv as pacsv
from pydantic import BaseModel, ConfigDict, Field

from backends.encoding.columns import distinct_names
from spark_bridge.queryable.client import json_values
from spark_bridge.state_http.access import problem_of


class Isolation(str, Enum):
    """The version that is read."""

    completed = "completed"
    latest = "latest"


class Problem(BaseModel):
    """An error (RFC 9457). ``error`` is the name of the same error in the Python client."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    error: str | None = None


class StateVariable(BaseModel):
    """One state variable: the columns of its key and of its values, with their Arrow types."""

    model_config = ConfigDict(extra="allow")

    name: str
    kind: str
    key: dict[str, str]
    value: dict[str, str]


class RunningOperator(BaseModel):
    """One operator of a running query. The versions from ``oldest_version`` to ``completed_version`` can be read."""

    model_config = ConfigDict(extra="allow")

    operator: str
    query_name: str | None
    query_id: str
    run_id: str
    oldest_version: int
    completed_version: int
    state: list[StateVariable]


class OperatorList(BaseModel):
    """The operators of all running queries."""

    operators: list[RunningOperator]


class OperatorDescription(BaseModel):
    """One operator: its columns, the owners of its partitions, and how its hosts have answered requests."""

    model_config = ConfigDict(extra="allow")

    operator: str
    query_name: str | None
    query_id: str
    run_id: str
    completed_version: int


class KeyAnswer(BaseModel):
    """The state of one key.

    ``value`` is an object of columns; an array for list states, windows and timers; an object or an array of pairs for
    map states.
    """

    operator: str
    key: Any
    value: Any
    at: str | None = Field(default=None, description="The time that rolling aggregates are of; absent for others.")


QueryField = Annotated[
    str | None, Field(description="Name, query id or run id: which query, if several have an operator of that name.")
]
StateField = Annotated[str | None, Field(description="The state variable, if the operator has several.")]
VersionField = Annotated[
    int | None, Field(ge=0, description="A version that is still retained, in place of `isolation`.")
]

AT_TEXT = (
    "The time that rolling aggregates are of, in ISO 8601, in UTC without a zone; by default now. With `watermark`, "
    "the watermark of the last completed version, which is then read."
)
AtField = Annotated[str | None, Field(description=AT_TEXT)]


class LookupRequest(BaseModel):
    """Many keys at once. A key is a value, or an array or an object of the key columns' values."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"keys": [42, 43]}, {"keys": [["de", 1], ["fr", 2]], "state": "pages"}]},
    )

    keys: list[Any]
    query: QueryField = None
    state: StateField = None
    window: Annotated[
        str | None, Field(description="The window's start, or start/end, in ISO 8601; of aggregates by windows.")
    ] = None
    isolation: Isolation = Isolation.completed
    version: VersionField = None
    at: AtField = None


class LookupAnswer(BaseModel):
    """One row per key asked for, in that order: the key's columns, then its value's, null if there is none."""

    operator: str
    rows: list[dict[str, Any]]
    at: str | None = Field(default=None, description="The time that rolling aggregates are of; absent for others.")


class FeatureViewList(BaseModel):
    """The feature views of all running queries, with the age of each of their queries in seconds."""

    views: list[dict[str, Any]]


class FeaturesRequest(BaseModel):
    """The entities of a feature view. A key is a value, or an array or an object of the key columns' values."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"keys": ["4711", "4712"]}, {"keys": ["4711"], "versions": {"cards": 812}}]},
    )

    keys: list[Any]
    defaults: Annotated[bool, Field(description="A null becomes the default of its feature.")] = True
    isolation: Isolation = Isolation.completed
    versions: Annotated[
        dict[str, int] | None, Field(description="A retained version of each query of the view, by name or id.")
    ] = None
    at: Annotated[
        str | None,
        Field(
            description="The time that rolling aggregates are of, in ISO 8601, in UTC without a zone; by default now."
        ),
    ] = None


class FeaturesAnswer(BaseModel):
    """One row per key asked for, in that order: the entity's columns, then the features.

    ``versions`` has the version that was read of each query, ``ages`` the age of each feature in seconds.
    """

    view: str
    versions: dict[str, int]
    at: str | None = Field(default=None, description="The time that rolling aggregates are of; absent for others.")
    ages: dict[str, float | None]
    rows: list[dict[str, Any]]


class Condition(BaseModel):
    """A condition on one column; a row must meet all conditions of a scan."""

    model_config = ConfigDict(extra="forbid")

    column: str
    comparison: Literal["=", "!=", "<", "<=", ">", ">=", "in", "is null", "is not null"]
    value: Annotated[
        Any, Field(description="The value to compare with; for `in` an array. Times and decimals are strings.")
    ] = None


class ScanRequest(BaseModel):
    """All rows, or those of some keys. ``start`` is included, ``end`` is not."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"where": [{"column": "n", "comparison": ">", "value": 10}], "columns": ["user", "n"], "limit": 100}
            ]
        },
    )

    prefix: Annotated[
        Any,
        Field(description="The first key columns, as an array; or the beginning of the first, if that is a string."),
    ] = None
    start: Annotated[Any, Field(description="The first key columns, as an array.")] = None
    end: Annotated[Any, Field(description="The first key columns, as an array.")] = None
    where: Annotated[list[Condition], Field(max_length=100)] = []
    columns: Annotated[list[str] | None, Field(description="The columns wanted; all by default.")] = None
    limit: Annotated[int | None, Field(ge=0, description="At most this many rows, of any keys.")] = None
    query: QueryField = None
    state: StateField = None
    isolation: Isolation = Isolation.completed
    version: VersionField = None
    at: AtField = None


class SqlRequest(BaseModel):
    """One statement that reads. Without ``limit``, more rows than the application allows are an error."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"sql": "select country, sum(n) as n from user_totals group by country"},
                {"sql": "select * from user_totals where user = ?", "params": [42], "version": 7},
            ]
        },
    )

    sql: Annotated[str, Field(min_length=1, description="The statement, in DuckDB's SQL.")]
    params: Annotated[
        list[Any] | dict[str, Any] | None,
        Field(description="The values of `?` or `$1` (an array), or of `$name` (an object)."),
    ] = None
    version: Annotated[
        int | None, Field(ge=0, description="A version that is still retained, of a statement over one query.")
    ] = None
    at: AtField = None
    limit: Annotated[int | None, Field(ge=0, description="At most this many rows; others are left out.")] = None


class SqlColumn(BaseModel):
    """One column of an answer, with its Arrow type."""

    name: str
    type: str


class SqlAnswer(BaseModel):
    """The rows of a statement.

    By the id of each query, ``versions`` has the version that was read, and ``times`` the time of the rolling
    aggregates, if there are any.
    """

    columns: list[SqlColumn]
    versions: dict[str, int]
    times: dict[str, str]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class WatchRequest:
    """The request of a watch. ``keys`` are as in a path; none means all keys."""

    operator: str
    keys: tuple[str, ...]
    query: str | None
    state: str | None
    from_version: int | None


# Rows as the body of an answer, piece by piece: JSON lines, one JSON document, CSV, or an Arrow IPC stream.


ARROW = "application/vnd.apache.arrow.stream"
LINES = "application/x-ndjson"
JSON = "application/json"
CSV = "text/csv"
PIECE_ROWS = 4096
"""At most this many rows are made into JSON at once, and sent as one piece."""


class Body(ABC):
    """Writes rows as the body of an answer."""

    @abstractmethod
    def rows(self, batch: pa.RecordBatch) -> bytes:
        """Return the bytes of some rows, and before the first rows those of their columns."""

    def end(self) -> bytes:
        """Return the bytes after the last row."""
        return b""

    def problem(self, error: Exception) -> bytes:
        """Return the bytes in place of the rows that an error prevents.

        CSV has no place for an error, and a stream of Arrow lacks its end, which readers notice: the connection is cut.
        """
        return b""


class LinesBody(Body):
    """A JSON object in each line."""

    def rows(self, batch: pa.RecordBatch) -> bytes:
        return json_values.lines(batch)

    def problem(self, error: Exception) -> bytes:
        return json_values.json_bytes({"problem": problem_of(error)}) + b"\n"


class DocumentBody(Body):
    """One JSON document: ``{"columns": [{"name", "type"}], "versions": {query id: version}, "times": ..., "rows"}``."""

    def __init__(self, schema: pa.Schema, versions: Mapping[str, int], times: Mapping[str, dt.datetime]) -> None:
        names = distinct_names(schema.names)  # as in the rows
        columns = [{"name": name, "type": str(kind)} for name, kind in zip(names, schema.types, strict=True)]
        times_of = json_values.to_json(dict(times))
        head = json_values.json_bytes({"columns": columns, "versions": dict(versions), "times": times_of})
        self._next = head[:-1] + b',"rows":['

    def rows(self, batch: pa.RecordBatch) -> bytes:
        encoded = b",".join(map(json_values.json_bytes, json_values.rows_to_json(batch)))
        before, self._next = self._next, b"," if encoded else self._next
        return before + encoded if encoded else b""

    def end(self) -> bytes:
        return self._before_end() + b"]}"

    def problem(self, error: Exception) -> bytes:
        return self._before_end() + b'],"problem":' + json_values.json_bytes(problem_of(error)) + b"}"

    def _before_end(self) -> bytes:
        return b"" if self._next == b"," else self._next


class CsvBody(Body):
    """CSV with a header line. Strings are quoted, null is an empty field, nested values are JSON."""

    def __init__(self, schema: pa.Schema) -> None:
        self._is_begun = False
        self._schema = schema

    def rows(self, batch: pa.RecordBatch) -> bytes:
        columns = [_csv_column(column) for column in batch.columns]
        table = pa.table(columns, names=distinct_names(self._schema.names))
        written = io.BytesIO()
        pacsv.write_csv(table, written, pacsv.WriteOptions(include_header=not self._is_begun))
        self._is_begun = True
        return written.getvalue()

    def end(self) -> bytes:
        """Return the header line, if there were no rows."""
        return b"" if self._is_begun else self.rows(pa.RecordBatch.from_pylist([], self._schema))


def _csv_column(column: pa.Array) -> pa.Array:
    """Return a column that Arrow writes as CSV: numbers, booleans and strings unchanged, others as JSON."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_string(kind):
        return column
    cells = json_values.column_to_json(column)
    if all(v is None or isinstance(v, float) for v in cells):
        return pa.array(cells, pa.float64())
    return pa.array(
        [v if v is None or isinstance(v, str) else json_values.json_bytes(v).decode() for v in cells], pa.string()
    )


class ArrowBody(Body):
    """An Arrow IPC stream."""

    def __init__(self, schema: pa.Schema) -> None:
        self._written = io.BytesIO()
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._written, "w"), schema)

    def rows(self, batch: pa.RecordBatch) -> bytes:
        self._writer.write_batch(batch)
        return self._taken()

    def end(self) -> bytes:
        self._writer.close()
        return self._taken()

    def _taken(self) -> bytes:
        content = self._written.getvalue()
        self._written.seek(0)
        self._written.truncate()
        return content


def arrow_stream(table: pa.Table) -> bytes:
    """Return a table as an Arrow IPC stream."""
    body = ArrowBody(table.schema)
    return b"".join([*(body.rows(batch) for batch in table.to_batches()), body.end()])
