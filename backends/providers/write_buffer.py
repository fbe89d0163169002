"""Uncommitted changes of one column family."""

from __future__ import annotations

import pyarrow as pa

from backends.encoding.sorted_pairs import SortedPairs

_LONGEST_DICT = 1 << 16


class WriteBuffer:
    """Uncommitted changes of one column family: single changes in a dict, over bulk changes in sorted runs.

    Runs grow geometrically, as in a log-structured merge tree, so that a look-up visits only a few.
    """

    def __init__(self) -> None:
        self._singles: dict[bytes, bytes | None] = {}
        self._runs: list[SortedPairs] = []

    def put(self, key: bytes, value: bytes | None) -> None:
        """Set one value; None removes the key."""
        self._singles[key] = value
        if len(self._singles) >= _LONGEST_DICT:
            self._flush()

    def put_many(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """Set many values; null removes a key. Of equal keys the last one counts."""
        self._flush()
        self._push(SortedPairs.last_wins(keys, values))

    def _flush(self) -> None:
        if self._singles:
            run = SortedPairs.from_dict(self._singles)
            self._singles = {}
            self._push(run)

    def _push(self, run: SortedPairs) -> None:
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = self._runs.pop().under(run)
        if len(run):
            self._runs.append(run)

    def get(self, key: bytes) -> tuple[bool, bytes | None]:
        """Return whether a key was changed, and its new value (None: removed)."""
        if key in self._singles:
            return True, self._singles[key]
        for run in reversed(self._runs):
            found, value = run.get(key)
            if found:
                return True, value
        return False, None

    def merged(self) -> SortedPairs:
        """Return all changes; the buffer holds them as one run afterwards."""
        self._flush()
        merged = SortedPairs.empty()
        for run in reversed(self._runs):  # the small ones first
            merged = run.under(merged)
        self._runs = [merged] if len(merged) else []
        return merged
