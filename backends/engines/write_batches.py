"""RocksDB's write batches of changes."""

from __future__ import annotations

from collections.abc import Mapping

from rocksdict import WriteBatch

from backends.encoding.sorted_pairs import SortedPairs, to_bytes_list
from backends.formats.changelog import Changes

WRITE_ROWS = 1 << 10
"""Pairs of one write batch. No other thread can run while RocksDB writes a batch, about a microsecond per pair."""


def write_batches(changes: Changes, handles: Mapping[str, object]) -> list[WriteBatch]:
    """Return write batches of all changes, at least one batch. ``handles`` are those of the column families."""
    batches: list[WriteBatch] = []
    for name, pairs in changes.families.items():
        for at in range(0, len(pairs), WRITE_ROWS):
            batch = WriteBatch(raw_mode=True)
            _fill(batch, pairs.slice(at, WRITE_ROWS), handles[name])
            batches.append(batch)
    return batches or [WriteBatch(raw_mode=True)]


def _fill(batch: WriteBatch, pairs: SortedPairs, handle: object) -> None:
    put, delete = batch.put, batch.delete
    for key, value in zip(to_bytes_list(pairs.keys), to_bytes_list(pairs.values), strict=True):
        if value is None:
            delete(key, handle)
        else:
            put(key, value, handle)
