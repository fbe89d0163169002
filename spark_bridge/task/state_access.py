"""``StateAccess``: how an operator's logic reads and changes the state of its partition in one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from backends.encoding.keys import KeyRange
from backends.encoding.operator_schema import OperatorSchema
from backends.ids import DEFAULT_FAMILY
from coordinator_actor.messages import BatchTimes, OperatorFigures


class StateAccess(Protocol):
    """One partition's state, opened at version = batch id, and the changes to it that one commit makes."""

    @property
    def batch_id(self) -> int:
        """Return the micro-batch, which is the version that is read."""

    @property
    def times(self) -> BatchTimes:
        """Return processing time and watermarks of the batch."""

    @property
    def schema(self) -> OperatorSchema:
        """Return the operator's schema with its history, as the coordinator has it."""

    @property
    def key_groups(self) -> tuple[int, int]:
        """Return the partition's key groups: from the first (included) to the last (not included)."""

    @property
    def num_key_groups(self) -> int:
        """Return the number of key groups of all partitions together."""

    def get_many(self, keys: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> pa.BinaryArray:
        """Return values at the version opened, in the order of ``keys``, null where a key has none.

        Sorted keys are fastest. Staged changes are not seen. A family that was never written to is empty.
        """

    def scan(
        self, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY, limit: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Give pairs (``key``, ``value``) of the ranges at the version opened, range after range, ``limit`` in all."""

    def stage(self, keys: pa.BinaryArray, values: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> None:
        """Add changes to the commit: a null value removes its key; of a key staged several times the last counts."""

    def commit(self, figures: OperatorFigures, timings: dict[str, float] | None = None) -> None:
        """Make the staged changes the next version, durably, in one commit. Call it once, before giving any output."""
