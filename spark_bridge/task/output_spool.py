"""The output that a task holds back until its state is committed: in memory, and beyond a limit on the local disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pyarrow as pa

from spark_bridge.task.local_directory import temporary_file

SPOOL_MEMORY_BYTES = 64 << 20


class Spool:
    """Takes batches of one schema and gives them back in order. Use it in a ``with`` statement.

    ``memory`` is the limit in bytes. The file has no name: it is gone at the end, and if the process dies.
    """

    def __init__(self, schema: pa.Schema, memory: int = SPOOL_MEMORY_BYTES) -> None:
        self.schema = schema
        self.num_rows = 0
        self.is_on_disk = False
        self._memory = memory
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._open = ExitStack()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch."""
        if not batch.num_rows:
            return
        self.num_rows += batch.num_rows
        self._held.append(batch)
        self._held_bytes += batch.nbytes
        if self._held_bytes > self._memory:
            self._write()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Give all batches, once; nothing can be added afterwards."""
        if self.is_on_disk:
            self._writer.close()
            self._file.seek(0)
            yield from pa.ipc.open_stream(pa.PythonFile(self._file, "r"))
        yield from self._held

    def _write(self) -> None:
        if not self.is_on_disk:
            file = temporary_file()
            self._file = self._open.enter_context(file)
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_stream(pa.PythonFile(self._file, "w"), self.schema, options=options)
            self.is_on_disk = True
        for batch in self._held:
            self._writer.write_batch(batch)
        self._held, self._held_bytes = [], 0
