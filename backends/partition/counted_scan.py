"""Counts the memory that a scan holds."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from backends.host_memory import SCANS, Claim, HostMemory

_FEW_BYTES = 64 << 10
"""Smaller batches are not counted: a task scans thousands of ranges with few pairs each, one after the other."""


def counted_scan(
    batches: Iterator[pa.RecordBatch], memory: HostMemory, changes: Claim | None
) -> Iterator[pa.RecordBatch]:
    """Return the batches of a scan; its last batch is counted, and ``changes`` as long as the scan lives."""
    last: Claim | None = None
    for batch in batches:
        if last is not None or batch.nbytes >= _FEW_BYTES:
            last = last or memory.note(SCANS, 0)
            memory.resize(last, batch.nbytes)
        yield batch
