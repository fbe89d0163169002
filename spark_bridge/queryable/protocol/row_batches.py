"""Rows as they come over the wire, decoded: see ``wire.Batch``."""

from __future__ import annotations

import pyarrow as pa

from spark_bridge.exceptions import ConnectionClosedError


class BatchDecoder:
    """Of one answer: turns the bodies of its ``Batch`` frames into record batches, without copying them."""

    def __init__(self) -> None:
        self.schema: pa.Schema | None = None

    def decode(self, body: memoryview | bytes) -> pa.RecordBatch | None:
        """The rows of a body; None if it has only the schema. Raises ``ConnectionClosedError`` for anything else."""
        source = pa.BufferReader(pa.py_buffer(body))
        try:
            if self.schema is None:
                self.schema = pa.ipc.read_schema(source)
                if source.tell() == source.size():
                    return None
            return pa.ipc.read_record_batch(pa.ipc.read_message(source), self.schema)
        except (pa.ArrowException, EOFError, OSError) as error:
            raise ConnectionClosedError(f"Rows of {len(body)} bytes make no sense: {error}") from error
