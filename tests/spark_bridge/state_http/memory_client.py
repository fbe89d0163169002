"""An asynchronous query client of tables in memory, for the HTTP application."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pyarrow as pa

from spark_bridge.exceptions import AccessDeniedError, UnknownOperatorError
from spark_bridge.queryable.server.tokens import Grant

TOKEN = "right-token"
UTC = dt.timezone.utc
TOTALS = pa.table(
    {
        "country": ["de", "de", "fr", 'a,"b'],
        "user": pa.array([1, 2, 1, 2**62], pa.int64()),
        "n": pa.array([1, 2**53, None, -(2**60)], pa.int64()),
        "mean": [1.5, float("nan"), float("inf"), None],
        "spent": pa.array([Decimal("1.20"), None, Decimal("-3.00"), Decimal("0.00")], pa.decimal128(20, 2)),
        "last": pa.array([dt.datetime(2024, 3, 9, 23, 0, 0, 7, UTC)] * 4, pa.timestamp("us", "UTC")),
        "day": pa.array([dt.date(2024, 3, 9)] * 4),
        "code": pa.array([b"\x00\xff"] * 4),
        "tags": pa.array([["x", None]] * 4),
        "pages": pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int64())),
        "by_id": pa.array([[(7, "x")]] * 4, pa.map_(pa.int64(), pa.string())),
    }
)
WINDOW = pa.struct([("start", pa.timestamp("us", "UTC")), ("end", pa.timestamp("us", "UTC"))])
USERS = pa.table({"user": pa.array(range(10_000), pa.int64()), "name": [f"user {n}" for n in range(10_000)]})


@dataclass
class Rows:
    table: pa.Table
    version: int
    owner: MemoryClient
    closed: bool = False
    at: None = None

    @property
    def schema(self) -> pa.Schema:
        return self.table.schema

    async def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        for number, batch in enumerate(self.table.to_batches(max_chunksize=1000)):
            await asyncio.sleep(self.owner.pause)
            if self.owner.failure is not None and number == self.owner.fail_after:
                raise self.owner.failure
            yield batch

    async def aclose(self) -> None:
        await asyncio.sleep(0.001)
        if not self.closed:
            self.closed = True
            self.owner.open_scans -= 1


@dataclass
class MemoryClient:
    """Operators: "totals" (key country, user), "users" (key user), "per_minute" (key user and window). ``asked`` is
    what was called.
    """

    failure: Exception | None = None
    fail_after: int | None = None
    pause: float = 0.0
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    open_scans: int = 0
    gathered: int = 0
    most_gathered: int = 0
    lag_seconds: float = 0.0

    async def operators(self) -> list[dict[str, Any]]:
        window = f"{WINDOW}"
        found = []
        for name, key, more in (
            ("totals", {"country": "string", "user": "int64"}, {}),
            ("users", {"user": "int64"}, {}),
            ("per_minute", {"user": "int64", "window": window}, {"window": "window"}),
            ("by_window", {"window": window}, {"window": "window"}),
        ):
            state = {"name": "default", "kind": "rows", "key": key, "value": {"n": "int64"}, **more}
            names = {"operator": name, "query_name": "clicks", "query_id": "q-1", "run_id": "r-1"}
            found.append({**names, "oldest_version": 1, "completed_version": 7, "state": [state]})
        return found

    async def describe(self, operator: str, query: str | None = None) -> dict[str, Any]:
        for found in await self.operators():
            if found["operator"] == operator:
                return {**found, "hosts": []}
        raise UnknownOperatorError(f"There is no {operator!r}.")

    async def get(
        self, operator: str, key: Any, query: str | None = None, state: str | None = None, **options: Any
    ) -> Any:
        self.asked.append(("get", operator, key, query, state, options))
        self.gathered += 1
        self.most_gathered = max(self.most_gathered, self.gathered)
        await asyncio.sleep(self.pause)
        self.gathered -= 1
        if self.failure is not None:
            raise self.failure
        if operator == "totals":
            for row in TOTALS.to_pylist():
                if (row.pop("country"), row.pop("user")) == key:
                    return row
            return None
        if operator in ("per_minute", "by_window"):
            return {"n": 3}
        return {"name": f"user {key}"} if 0 <= key < USERS.num_rows else None

    async def get_many(
        self, operator: str, keys: Any, query: str | None = None, state: str | None = None, **options: Any
    ) -> Any:
        self.asked.append(("get_many", operator, keys, query, state, options))
        if self.failure is not None:
            raise self.failure
        if operator == "totals":
            found = {(r["country"], r["user"]): r for r in TOTALS.to_pylist()}
            rows = [found.get(k, {"country": k[0], "user": k[1]}) for k in keys]
            return pa.Table.from_pylist(rows, TOTALS.schema)
        names = [f"user {k}" if isinstance(k, int) and k < USERS.num_rows else None for k in keys]
        return pa.table(
            {
                "user": pa.array([k for k in keys if isinstance(k, int)], pa.int64()),
                "name": pa.array(names)[: sum(isinstance(k, int) for k in keys)],
            }
        )

    def scan(
        self, operator: str, state: str | None = None, limit: int | None = None, **options: Any
    ) -> Awaitable[Rows]:
        return self._scan(operator, state, limit, options)

    async def _scan(self, operator: str, state: str | None, limit: int | None, options: dict[str, Any]) -> Rows:
        self.asked.append(("scan", operator, state, limit, options))
        if self.failure is not None and self.fail_after is None and limit != 0:
            raise self.failure
        windows = {
            "user": pa.array([1], pa.int64()),
            "window": pa.array([None], WINDOW),
            "n": pa.array([3], pa.int64()),
        }
        tables = {
            "totals": TOTALS,
            "users": USERS,
            "per_minute": pa.table(windows),
            "by_window": pa.table(windows).drop_columns(["user"]),
        }
        if operator not in tables:
            raise UnknownOperatorError(
                f"No running query has an operator {operator!r}; operators that exist: {', '.join(tables)}."
            )
        table = tables[operator].slice(0, limit)
        columns: Sequence[str] | None = options.get("columns")
        self.open_scans += 1
        return Rows(table if columns is None else table.select(list(columns)), 7, self)


@dataclass
class Tokens:
    """A verifier that knows the tokens in ``valid``."""

    valid: set[str] = field(default_factory=lambda: {TOKEN})

    def verify(self, token: str) -> Grant:
        if token not in self.valid:
            raise AccessDeniedError("The token is unknown." if token else "No token was given.")
        return Grant(token, read_only=True)
