"""The decoder of rows that come over the wire (see ``messages.RowsReply``)."""

from __future__ import annotations

import pyarrow as pa

from spark_bridge.exceptions import ConnectionClosedError


class RowBatchDecoder:
    """Turns the bodies of one answer's ``Batch`` frames into record batches, without copying the rows."""

    def __init__(self) -> None:
        self.schema: pa.Schema | None = None

    def decode(self, body: memoryview | bytes) -> pa.RecordBatch | None:
        """Return the rows of a body; None if it has only the schema.

        Raises ``ConnectionClosedError`` for any other body.
        """
        source = pa.BufferReader(pa.py_buffer(body))
        try:
            if self.schema is None:
                self.schema = pa.ipc.read_schema(source)
                if source.tell() == source.size():
                    return None
            return pa.ipc.read_record_batch(pa.ipc.read_message(source), self.schema)
        except (pa.ArrowException, EOFError, OSError) as error:
            raise ConnectionClosedError(f"Rows of {len(body)} bytes make no sense: {error}") from error
