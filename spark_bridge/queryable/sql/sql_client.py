"""The interface of a client to SQL: the methods that SQL calls. A client depends on ``sql``, never the other way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from spark_bridge.queryable.protocol.messages import Comparison


class VersionedRows(Protocol):
    """Rows at one version, as they come: what a client's scan returns."""

    @property
    def schema(self) -> pa.Schema:
        """The columns."""

    @property
    def version(self) -> int:
        """The version of all rows."""

    def __iter__(self) -> Iterator[pa.RecordBatch]: ...

    def close(self) -> None:
        """End the scan, so that the hosts stop."""


class SqlClient(Protocol):
    """The methods of ``QueryableStateClient`` that SQL uses."""

    def operators(self) -> list[dict[str, Any]]:
        """Return the operators of the running queries."""

    def scan(
        self,
        operator: str,
        state: str | None = None,
        prefix: Any = None,
        start: Any = None,
        end: Any = None,
        limit: int | None = None,
        columns: Sequence[str] | None = None,
        *,
        where: Sequence[Comparison] = (),
        query: str | None = None,
        version: int | None = None,
        timeout: float | None = None,
    ) -> VersionedRows:
        """Return the rows of a state variable."""

    def key_rows(
        self,
        operator: str,
        keys: pa.RecordBatch,
        state: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        query: str | None = None,
        version: int | None = None,
        timeout: float | None = None,
    ) -> VersionedRows:
        """Return the rows that some keys have, in the columns of ``scan``."""
