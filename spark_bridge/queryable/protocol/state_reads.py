"""The reads that a ``KvStateServer`` answers from.

``HostReads`` reads the partitions of its host. ``ForwardingReads`` of a proxy asks other hosts for the partitions that
they own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from coordinator_actor.messages import OperatorLocation
from spark_bridge.queryable.protocol.messages import ChangesRequest, KeyRowsRequest, LookupRequest, ScanRequest


@dataclass(frozen=True)
class StateAnswer:
    """Rows at a version. ``batches`` have ``schema``; closing them early releases everything that they hold.

    A batch may be empty: a read that finds no rows for a second gives one, so that the server can check whether the
    client still waits. In the answer to ``changes``, ``version`` is the last version that was read, and each batch
    belongs to one version, which a column names.
    """

    version: int
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]

    def close(self) -> None:
        """End the answer early and release what it holds; nothing happens if it has ended."""
        close = getattr(self.batches, "close", None)
        if close is not None:
            close()


class StateReads(Protocol):
    """Answers the requests of ``messages``. Safe from many threads. All rows of an answer are of one version.

    Every method raises ``NotOwnerError`` if another host owns a partition, ``UnknownOperatorError``,
    ``UnknownKvStateIdError`` naming the state variables that exist, ``StateVersionError`` naming the versions that can
    be read, ``RequestError`` for a request that makes no sense, and what the coordinator raises.
    """

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        """Return where an operator's partitions are. Raises ``QueryEndedError`` if its query has ended."""

    def lookup(self, request: LookupRequest, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
        """Return the version, and the stored values of stored keys in the order asked; null where a key has no value.

        With ``latest`` the version is the lowest one of the partitions asked. That version need not be completed, so it
        is no floor for later reads.
        """

    def lookup_one(self, request: LookupRequest, key: bytes) -> tuple[int, bytes | None]:
        """Return the result of ``lookup`` for one key; the fast path."""

    def key_rows(self, request: KeyRowsRequest, keys: pa.BinaryArray) -> StateAnswer:
        """Return the rows of stored grouping keys.

        The first column, ``position`` (int64), is the index of the row's key. Rows are ordered by position, and within
        a key as in a scan. The keys of aggregates by windows come without the window, and their key groups do not
        count: the answer has the rows of those keys in this host's partitions (see ``windowed_keys``).
        """

    def scan(self, request: ScanRequest) -> StateAnswer:
        """Return the rows of a state variable, partition after partition in the order of stored keys."""

    def count(self, request: ScanRequest) -> tuple[int, int]:
        """Return the version, and the number of rows that ``scan`` would give."""

    def changes(self, request: ChangesRequest, keys: pa.BinaryArray | None) -> StateAnswer:
        """Return the rows that versions have changed, in the order of versions; a batch belongs to one version."""

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        """Return the completed version once it is after ``after``, or the one that there is after ``seconds``."""

    def lag_ms(self, run_id: str) -> int:
        """Return how many ms ago storage was last looked at, for a run that follows a query and is late; else 0."""

    def operators(self) -> list[dict[str, Any]]:
        """Return the operators of all running queries, ready for JSON."""

    def describe(self, operator: str | None, query: str | None) -> dict[str, Any]:
        """Return the description of this host's partitions, of one operator or of all, ready for JSON."""
