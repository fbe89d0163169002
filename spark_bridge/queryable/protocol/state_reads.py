"""What a ``KvStateServer`` answers from: the state of this host's partitions, or of other hosts through their servers.

``HostReads`` reads what a host holds; a proxy forwards to it what other hosts own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from coordinator_actor.messages import OperatorLocation
from spark_bridge.queryable.protocol.messages import Changes, KeyRows, Lookup, Scan


@dataclass(frozen=True)
class StateAnswer:
    """Rows at a version. ``batches`` have ``schema``; closing it early releases everything that it holds.

    A batch may be empty: what finds no rows for a second gives one, so that the server sees in time that nobody waits any more.

    Of ``changes``, ``version`` is the last one that was looked at; each batch belongs to one version, which it names.
    """

    version: int
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


class StateReads(Protocol):
    """Answers the requests of ``wire``; safe from many threads. All answers of a request are at one version.

    Every method raises ``NotOwnerError`` if a partition is another host's, ``UnknownOperatorError``,
    ``UnknownKvStateIdError`` naming the state variables that exist, ``StateVersionError`` naming the versions that can be
    read, ``RequestError`` for a request that makes no sense, and what the coordinator raises.
    """

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        """Where an operator's partitions are. Raises ``QueryEndedError`` if its query has ended."""

    def lookup(self, request: Lookup, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
        """The version, and the stored values of stored keys, in the order asked; null where a key has none.

        With ``latest`` the version is the lowest of those of the partitions asked, and need not be completed: it is no floor.
        """

    def lookup_one(self, request: Lookup, key: bytes) -> tuple[int, bytes | None]:
        """``lookup`` of one key, the fast path."""

    def key_rows(self, request: KeyRows, keys: pa.BinaryArray) -> StateAnswer:
        """The rows of stored grouping keys; the first column, ``position`` (int64), is the index of the row's key.

        Ordered by position, and within a key as a scan is. Of aggregates by windows the keys come without the window and their key
        groups do not count: the answer has what this host's partitions have of them (see ``windowed_keys``).
        """

    def scan(self, request: Scan) -> StateAnswer:
        """The rows of a state variable, partition after partition in the order of stored keys."""

    def count(self, request: Scan) -> tuple[int, int]:
        """The version, and the number of rows that ``scan`` would give."""

    def changes(self, request: Changes, keys: pa.BinaryArray | None) -> StateAnswer:
        """What versions have changed, in their order; a batch belongs to one version."""

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        """The completed version once it is behind ``after``, or the one there is after ``seconds``."""

    def operators(self) -> list[dict[str, Any]]:
        """The operators of all running queries: ready for JSON."""

    def describe(self, operator: str | None, query: str | None) -> dict[str, Any]:
        """What this host holds, of one operator or of all: ready for JSON."""
