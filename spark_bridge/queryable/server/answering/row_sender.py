"""The rows of an answer on their way to the client: ``RowsReply`` frames and the ``EndOfRows``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from spark_bridge.queryable.protocol.messages import EndOfRows, RowsReply, frame
from spark_bridge.queryable.protocol.request_context import before_slow_work
from spark_bridge.queryable.protocol.state_reads import StateAnswer
from spark_bridge.queryable.server.connection.framed_socket import FramedSocket

FRAME_BYTES = 4 << 20
"""The most bytes that the rows of one ``RowsReply`` take, unless one row is larger."""
QUIET_SECONDS = 1.0
"""A scan that has found nothing for this many seconds sends an empty batch: the client sees that the scan goes on, the
server whether the client is gone.
"""


class RowSender:
    """Sends the rows of one answer until ``deadline``, in the context of the request.

    ``is_short``: the last batch is held back, to be sent together with the end. ``lag_ms`` is that of the version.
    """

    def __init__(self, frames: FramedSocket, answer: StateAnswer, deadline: float, is_short: bool, lag_ms: int) -> None:
        self.num_rows = 0
        self._frames = frames
        self._answer = answer
        self._deadline = deadline
        self._is_short = is_short
        self._lag_ms = lag_ms
        self._held: list[Any] = []
        self._is_begun = False
        self._sent_at = time.monotonic()

    def send(self, batch: pa.RecordBatch) -> None:
        """Send rows. An empty batch is sent only if the client has not heard anything for long."""
        now = time.monotonic()
        if not batch.num_rows and now - self._sent_at < QUIET_SECONDS:
            return
        self.num_rows += batch.num_rows
        self._sent_at = now
        body = batch.serialize()
        if not self._is_begun:
            self._is_begun = True
            body = b"".join((self._answer.schema.serialize(), body))
        if self._held:
            before_slow_work()  # a client that reads slowly must not keep others from their lookups
            self._frames.send(self._held, self._deadline)
        self._held = frame(RowsReply(self._answer.version, self._lag_ms), body)
        if not self._is_short:
            self._frames.send(self._held, self._deadline)
            self._held = []

    def keep_alive(self, now: float) -> None:
        """Send an empty batch if nothing has been sent for long: the work goes on."""
        if now - self._sent_at >= QUIET_SECONDS:
            schema = self._answer.schema
            self.send(pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema))

    def last_frames(self) -> list[Any]:
        """Return the frames that are still to be sent: the rows held back, and the end."""
        if not self._is_begun:
            self._held = frame(RowsReply(self._answer.version, self._lag_ms), self._answer.schema.serialize())
        return [*self._held, *frame(EndOfRows(self._answer.version, self.num_rows, self._lag_ms))]


def slices(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of at most ``FRAME_BYTES``, where single rows are not larger."""
    for batch in batches:
        pieces = -(-batch.nbytes // FRAME_BYTES)
        if pieces <= 1 or batch.num_rows <= 1:
            yield batch
            continue
        rows = max(1, batch.num_rows // pieces)
        for begin in range(0, batch.num_rows, rows):
            yield batch.slice(begin, rows)
