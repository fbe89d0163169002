"""Rows that users give, as sources of the first stage: tables, pandas, Ray Datasets and Spark DataFrames."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.state_surgery.stages.first_stage import PackedRows, RowSource, packed, unpacked_rows

SOURCE_BYTES = 64 << 20
"""A task of the first stage gets about this many bytes of a table."""
SOURCE_BATCH_ROWS = 1 << 16


@dataclass(frozen=True)
class GivenRows:
    """Rows as bytes."""

    parts: tuple[PackedRows, ...]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """See ``RowSource``."""
        for part in self.parts:
            yield from unpacked_rows(part)


@dataclass(frozen=True)
class BlockRows:
    """Rows of a block of a Ray Dataset, an Arrow table, by its reference."""

    ref: Any

    def batches(self) -> Iterator[pa.RecordBatch]:
        """See ``RowSource``."""
        import ray

        yield from ray.get(self.ref).to_batches(max_chunksize=SOURCE_BATCH_ROWS)


def sources_of(rows: Any) -> Iterator[RowSource]:
    """Yield the sources of the rows that a user gave. Raises ``InvalidStateStoreArgument`` for what has no rows."""
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    if isinstance(rows, pa.Table):
        yield from _of_table(rows)
    elif isinstance(rows, pa.RecordBatchReader):
        yield from _together(packed(batch.schema, [batch]) for batch in rows)
    elif hasattr(rows, "to_arrow_refs"):
        yield from (BlockRows(ref) for ref in rows.to_arrow_refs())
    elif hasattr(rows, "_jdf"):
        if rows.isStreaming:
            raise InvalidStateStoreArgument(
                "The rows are a streaming DataFrame: state is made of a batch of rows, as spark.read gives them."
            )
        yield from _together(np.frombuffer(row[0], np.uint8) for row in _of_frame(rows))
    elif type(rows).__module__.partition(".")[0] == "pandas":
        yield from _of_table(pa.Table.from_pandas(rows, preserve_index=False))
    else:
        raise InvalidStateStoreArgument(
            f"The rows are {type(rows).__name__}: give a pyarrow Table, RecordBatch or RecordBatchReader, a pandas "
            "DataFrame, a Ray Dataset or a Spark DataFrame."
        )


def _together(parts: Iterable[PackedRows]) -> Iterator[GivenRows]:
    """Yield sources of ``SOURCE_BYTES`` at least, but for the last one."""
    held: list[PackedRows] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= SOURCE_BYTES:
            yield GivenRows(tuple(held))
            held, size = [], 0
    if held:
        yield GivenRows(tuple(held))


def _of_table(table: pa.Table) -> Iterator[GivenRows]:
    step = max(1, min(table.num_rows, table.num_rows * SOURCE_BYTES // max(1, table.nbytes)))
    for first in range(0, max(1, table.num_rows), step):
        part = table.slice(first, step)
        yield GivenRows((packed(part.schema, part.to_batches(max_chunksize=SOURCE_BATCH_ROWS)),))


def _of_frame(frame: Any) -> Iterator[Any]:
    """Give the rows of a Spark DataFrame as IPC streams, a partition after the other through the driver."""
    from spark_bridge.operators.map_in_arrow import map_in_arrow

    def packed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            yield pa.RecordBatch.from_arrays([pa.array([sink.getvalue().to_pybytes()], pa.binary())], names=["rows"])

    return iter(map_in_arrow(frame, packed, "given_rows", "rows binary").toLocalIterator(prefetchPartitions=True))
