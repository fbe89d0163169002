"""What the stream has read last: mostly the very pairs that its next commit replaces."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from backends.encoding.sorted_pairs import SortedPairs


@dataclass(frozen=True)
class _Read:
    """Bulk reads of one column family at a completed version, in ascending order of their keys."""

    head: str | None
    parts: tuple[SortedPairs, ...]
    nbytes: int


class RecentReads:
    """The last bulk reads of each column family, up to ``max_bytes`` each.

    Needs no lock: every read and write is that of one dict entry.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._reads: dict[str, _Read] = {}

    def remember(self, head: str | None, column_family: str, read: SortedPairs) -> None:
        """Keep what was read at the version that ``head`` made.

        An operator reads in steps, in ascending order of the keys: what follows on the last read is added to it.
        """
        held = self._reads.get(column_family)
        follows = held is not None and held.head == head and held.parts[-1].keys[-1].as_py() < read.keys[0].as_py()
        parts, nbytes = (held.parts, held.nbytes) if held is not None and follows else ((), 0)
        nbytes += read.nbytes
        if nbytes <= self._max_bytes:
            self._reads[column_family] = _Read(head, (*parts, read), nbytes)

    def values(self, head: str | None, column_family: str, keys: pa.BinaryArray) -> pa.BinaryArray | None:
        """Return the values of sorted keys at the version that ``head`` made; None unless all of them were read."""
        read = self._reads.get(column_family)
        if read is None or read.head != head:
            return None
        read_keys = pa.concat_arrays([p.keys for p in read.parts])
        read_values = pa.concat_arrays([p.values for p in read.parts])
        if keys.equals(read_keys):
            return read_values
        at = SortedPairs(read_keys, read_values).find(keys)
        return read_values.take(pa.array(at)) if (at >= 0).all() else None

    def clear(self) -> None:
        """Forget all reads."""
        self._reads = {}
