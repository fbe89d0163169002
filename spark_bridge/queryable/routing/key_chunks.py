"""Cuts keys into chunks that fit into a request, and joins the answers to the chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from backends.encoding.columns import concatenated, placed
from spark_bridge.exceptions import RequestLimitError
from spark_bridge.queryable.routing.routing_table import KeyPositions

KEYS_PER_REQUEST = 200_000
BYTES_PER_REQUEST = 32 << 20
"""Bytes of keys in one request. More keys are asked for in several requests, one after the other."""


def key_chunks(keys: pa.BinaryArray) -> Iterator[pa.BinaryArray]:
    """Yield slices of ``keys`` that one request may have; no keys are one empty slice."""
    content = keys.buffers()[2]
    if len(keys) <= KEYS_PER_REQUEST and (content is None or content.size <= BYTES_PER_REQUEST):
        yield keys
        return
    step = KEYS_PER_REQUEST
    if keys.nbytes > BYTES_PER_REQUEST:
        step = max(1, min(step, len(keys) * BYTES_PER_REQUEST // keys.nbytes))
    for begin in range(0, max(1, len(keys)), step):
        yield keys.slice(begin, step)


def joined_values(arrays: Sequence[pa.BinaryArray], places: Sequence[KeyPositions] | None = None) -> pa.BinaryArray:
    """Return several arrays of values as one: one after the other, or each value at its place.

    Raises ``RequestLimitError`` if the values have more bytes than an Arrow array can.
    """
    try:
        return concatenated(arrays) if places is None else placed(arrays, places)
    except pa.ArrowInvalid as error:
        raise RequestLimitError(
            f"The values of these keys do not fit into one Arrow array ({error}): ask for fewer keys."
        ) from error


def shifted_positions(batch: pa.RecordBatch, places: KeyPositions | None, begin: int) -> pa.RecordBatch:
    """Return ``batch`` with ``position``, the first column, counted among all keys instead of those of one request.

    ``places`` are the positions of the request's keys among the keys of its chunk (None: the same ones), ``begin`` is
    that of the chunk's first key.
    """
    if places is None and not begin:
        return batch
    position = np.asarray(batch.column(0))
    shifted = (position if places is None else places[position]) + begin
    columns = [pa.array(shifted, pa.int64()), *batch.columns[1:]]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
