"""A sorted scan with changes applied, merged a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from backends.encoding.sorted_pairs import PAIRS_SCHEMA, SortedPairs


def merged_scan(base: Iterator[pa.RecordBatch], changes: SortedPairs) -> Iterator[pa.RecordBatch]:
    """Return the pairs of ``base`` with ``changes`` applied, in key order.

    ``changes`` must already be cut to the range of the scan. Each changed pair is merged into the batch of ``base``
    whose keys surround it, so that memory does not grow with the range.
    """
    done = 0
    for batch in base:
        through = _number_up_to(changes, batch.column(0)[-1].as_py()) if len(changes) else 0
        if through == done:
            yield batch
            continue
        due = SortedPairs(changes.keys.slice(done, through - done), changes.values.slice(done, through - done))
        done = through
        merged = SortedPairs(batch.column(0), batch.column(1)).under(due).present()
        if len(merged):
            yield _batch(merged)
    rest = SortedPairs(changes.keys.slice(done), changes.values.slice(done)).present()
    if len(rest):
        yield _batch(rest)


def _number_up_to(changes: SortedPairs, key: bytes) -> int:
    return changes.lower_bound(key + b"\x00")


def _batch(pairs: SortedPairs) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pairs.keys, pairs.values], schema=PAIRS_SCHEMA)
