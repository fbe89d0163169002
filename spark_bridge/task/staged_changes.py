"""The changes that a task has staged and not committed yet: in memory, and beyond a budget on local disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import pyarrow as pa

from spark_bridge.task.local_directory import temporary_file
from spark_bridge.transport.protocol import COMMIT_SCHEMA

BUDGET_BYTES = 64 << 20
_FAMILY = b"column_family"


class StagedChanges:
    """Batches of changes by column family, in the order in which they were added. Every try to commit reads them all.

    ``budget`` is in bytes.
    """

    def __init__(self, budget: int = BUDGET_BYTES) -> None:
        self._budget = budget
        self._held: list[tuple[str, pa.RecordBatch]] = []
        self._held_bytes = 0
        self._spilled_bytes = 0
        self._file: IO[bytes] | None = None
        self._writer: pa.RecordBatchStreamWriter | None = None

    def add(self, column_family: str, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """Add changes; a null value removes its key."""
        if not len(keys):
            return
        batch = pa.RecordBatch.from_arrays([keys, values], schema=COMMIT_SCHEMA)
        self._held.append((column_family, batch))
        self._held_bytes += batch.nbytes
        if self._held_bytes > self._budget:
            self._spill()

    def _spill(self) -> None:
        if self._writer is None:
            self._file = temporary_file()
            self._writer = pa.ipc.new_stream(self._file, COMMIT_SCHEMA)
        for family, batch in self._held:
            self._writer.write_batch(batch, custom_metadata={_FAMILY: family.encode()})
        self._spilled_bytes += self._held_bytes
        self._held, self._held_bytes = [], 0

    @property
    def nbytes(self) -> int:
        """Return how many bytes all changes have in memory."""
        return self._spilled_bytes + self._held_bytes

    def __iter__(self) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._file is not None:
            self._file.flush()
            # The stream's end is not written yet, so the file is read up to its length.
            end = self._file.tell()
            self._file.seek(0)
            try:
                with pa.ipc.open_stream(self._file) as reader:
                    while self._file.tell() < end:
                        read = reader.read_next_batch_with_custom_metadata()
                        yield read.custom_metadata[_FAMILY].decode(), read.batch
            finally:
                self._file.seek(end)
        yield from self._held

    def close(self) -> None:
        """Drop all changes, and the file."""
        self._held = []
        if self._file is not None:
            self._file.close()
            self._file = None
