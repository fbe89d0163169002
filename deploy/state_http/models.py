"""The bodies of requests and answers, by which requests are checked and the OpenAPI description is made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


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


QueryField = Annotated[
    str | None, Field(description="Name, query id or run id: which query, where several have an operator of that name.")
]
StateField = Annotated[str | None, Field(description="The state variable, where the operator has several.")]
VersionField = Annotated[
    int | None, Field(ge=0, description="A version that is still retained, in place of `isolation`.")
]


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


class LookupAnswer(BaseModel):
    """One row per key asked for, in that order: the key's columns, then its value's, null where there is none."""

    operator: str
    rows: list[dict[str, Any]]


class Condition(BaseModel):
    """A condition on one column; a row must meet all conditions of a scan."""

    model_config = ConfigDict(extra="forbid")

    column: str
    comparison: Literal["=", "!=", "<", "<=", ">", ">=", "in", "is null", "is not null"]
    value: Annotated[
        Any, Field(description="What is compared with; of `in` an array. Times and decimals are strings.")
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
    limit: Annotated[int | None, Field(ge=0, description="At most this many rows, whichever.")] = None
    query: QueryField = None
    state: StateField = None
    isolation: Isolation = Isolation.completed
    version: VersionField = None


class SqlRequest(BaseModel):
    """One statement that reads. Without ``limit``, more rows than the application gives are an error."""

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
    limit: Annotated[int | None, Field(ge=0, description="At most this many rows; others are left out.")] = None


class SqlColumn(BaseModel):
    """One column of an answer, with its Arrow type."""

    name: str
    type: str


class SqlAnswer(BaseModel):
    """The rows of a statement. ``versions`` has the version that was read of each query, by its id."""

    columns: list[SqlColumn]
    versions: dict[str, int]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class WatchRequest:
    """The request of a watch. ``keys`` are as in a path; none means all keys."""

    operator: str
    keys: tuple[str, ...]
    query: str | None
    state: str | None
    from_version: int | None
