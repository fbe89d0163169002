"""Streams of row batches: limited, gathered from small batches, and released wherever they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from spark_bridge.queryable.protocol.request_context import raise_if_cancelled

STREAM_BATCH_ROWS = 1 << 14
STREAM_BATCH_BYTES = 1 << 20
"""Smaller batches are gathered until they have this many rows or bytes."""


class RowStream(Iterator[pa.RecordBatch]):
    """An iterator that calls ``release`` once: at its end, at a failure, when closed, or when garbage collected."""

    def __init__(self, batches: Iterator[pa.RecordBatch], release: Callable[[], None]) -> None:
        self._batches: Iterator[pa.RecordBatch] | None = batches
        self._release = release

    def __next__(self) -> pa.RecordBatch:
        if self._batches is None:
            raise StopIteration
        try:
            return next(self._batches)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the batches, and release what they hold."""
        batches, self._batches = self._batches, None
        if batches is None:
            return
        close = getattr(batches, "close", None)
        if close is not None:
            close()
        del batches
        self._release()

    def __del__(self) -> None:
        self.close()


def limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """Yield the first ``limit`` rows (None: all); no batch is empty."""
    left = limit
    for batch in batches if limit != 0 else ():
        rows = batch if left is None else batch.slice(0, left)
        if rows.num_rows:
            yield rows
        else:
            raise_if_cancelled()  # much may be read without a row being found
        if left is not None:
            left -= rows.num_rows
            if not left:
                return


def gather_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of about ``STREAM_BATCH_ROWS`` rows or ``STREAM_BATCH_BYTES``.

    Larger batches stay as they are.
    """
    held: list[pa.RecordBatch] = []
    num_rows = nbytes = 0
    for batch in batches:
        raise_if_cancelled()
        if not batch.num_rows:
            continue
        held.append(batch)
        num_rows, nbytes = num_rows + batch.num_rows, nbytes + batch.nbytes
        if num_rows >= STREAM_BATCH_ROWS or nbytes >= STREAM_BATCH_BYTES:
            yield _one(held)
            held, num_rows, nbytes = [], 0, 0
    if held:
        yield _one(held)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    columns = [pa.concat_arrays(c) for c in zip(*(b.columns for b in batches), strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)
