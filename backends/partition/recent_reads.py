"""The pairs that the stream has read last: mostly the very pairs that its next commit replaces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from weakref import ref

import pyarrow as pa

from backends.encoding.sorted_pairs import SortedPairs
from backends.host_memory import LAST_READS, Claim, HostMemory


@dataclass(frozen=True)
class _Read:
    """Bulk reads of one column family at a completed version, in ascending order of their keys up to ``last``.

    No ``parts`` if there were too many bytes.
    """

    head: str | None
    last: bytes
    parts: tuple[SortedPairs, ...] = ()
    claims: tuple[Claim, ...] = ()


class RecentReads:
    """The last bulk reads of each column family, up to ``max_bytes`` each, as long as ``memory`` can spare them.

    Kept from a task's read to its commit, or to the next version. Needs no lock: every read and write is that of one
    dict entry.
    """

    def __init__(self, max_bytes: int, memory: HostMemory) -> None:
        self._max_bytes = max_bytes
        self._memory = memory
        self._reads: dict[str, _Read] = {}

    def remember(self, head: str | None, column_family: str, read: SortedPairs) -> None:
        """Keep what was read at the version that ``head`` made.

        An operator reads in steps, in ascending order of the keys: what follows on the last read is added to it.
        """
        held, last = self._reads.get(column_family), read.keys[-1].as_py()
        follows = held is not None and held.head == head and held.last < read.keys[0].as_py()
        earlier = held if held is not None and follows else _Read(head, b"")
        nbytes = sum(c.nbytes for c in earlier.claims) + read.nbytes
        claim = None
        if (earlier.parts or not follows) and nbytes <= self._max_bytes:
            claim = self._memory.spare(LAST_READS, read.nbytes, partial(_forget, ref(self), column_family))
        if claim is None:  # a part of what was read is of no use, neither are the parts that follow
            self._reads[column_family] = _Read(head, last)
        else:
            self._reads[column_family] = _Read(head, last, (*earlier.parts, read), (*earlier.claims, claim))
            if any(c.is_dropped for c in (*earlier.claims, claim)):  # by another thread, which found nothing here
                self._reads[column_family] = _Read(head, last)

    def values(self, head: str | None, column_family: str, keys: pa.BinaryArray) -> pa.BinaryArray | None:
        """Return the values of sorted keys at the version that ``head`` made; None unless all of them were read."""
        read = self._reads.get(column_family)
        if read is None or read.head != head or not read.parts:
            return None
        read_keys = pa.concat_arrays([p.keys for p in read.parts])
        read_values = pa.concat_arrays([p.values for p in read.parts])
        if keys.equals(read_keys):
            return read_values
        at = SortedPairs(read_keys, read_values).find(keys)
        return read_values.take(pa.array(at)) if (at >= 0).all() else None

    def forget(self, column_family: str) -> None:
        """Drop what was read of a family: the task that has read it has committed, or the memory is needed."""
        self._reads.pop(column_family, None)

    def forget_others(self, head: str | None) -> None:
        """Drop what was read at other versions than the one that ``head`` made."""
        for family, read in list(self._reads.items()):
            if read.head != head:
                self._reads.pop(family, None)

    @property
    def nbytes(self) -> int:
        """Memory."""
        return sum(claim.nbytes for read in list(self._reads.values()) for claim in read.claims)

    def clear(self) -> None:
        """Drop all reads."""
        self._reads.clear()


def _forget(reads: ref[RecentReads], column_family: str) -> None:
    held = reads()
    if held is not None:
        held.forget(column_family)
