"""Reads objects that many loads of a process need at about the same time: each object once, for all loads.

When a query starts, a host loads dozens of partitions, whose changelogs and small snapshots lie in the same few
objects. A request for each part of each partition takes longer than the bytes do.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from backends.exceptions import MissingFileError, StorageError

ALONE = 2
"""The first readers of an object, this many, read their parts alone: one load asks once or twice.

Where more loads are under way, the first one reads for all: they are most likely those of a host that starts anew.
"""
OBJECT_BYTES = 4 << 20
"""At most this many bytes of an object are read for all. The parts after them are read alone."""
MOST_OBJECTS = 64
MOST_BYTES = 16 << 20
"""What is kept of all objects; what was used longest ago goes first."""


class SharedObjects:
    """The beginnings of objects that were read of late. Thread-safe: ``_lock`` guards the tables, not the requests.

    ``_asked`` counts the readers of each object, ``_held`` has what was read for all or is being read. Both are bounded
    by ``MOST_OBJECTS``, the bytes by ``MOST_BYTES`` besides what is being read. ``_loads`` counts the loads under way.
    ``spare(nbytes, drop)`` counts bytes in the memory of the process, as ``HostMemory.spare`` does, and returns None
    where there is no room for them.
    """

    def __init__(self, spare: Callable[[int, Callable[[], None]], object | None]) -> None:
        self._lock = threading.Lock()
        self._spare = spare
        self._asked: OrderedDict[str, int] = OrderedDict()
        self._held: OrderedDict[str, Future[bytes]] = OrderedDict()
        self._claims: dict[str, object] = {}
        self._loads = 0

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count a load for as long as the block lasts."""
        with self._lock:
            self._loads += 1
        try:
            yield
        finally:
            with self._lock:
                self._loads -= 1

    def has(self, name: str, end: int) -> bool:
        """Return whether an object is held up to ``end``, or is being read for all."""
        with self._lock:
            return end <= OBJECT_BYTES and name in self._held

    def part(
        self, name: str, offset: int, size: int, read: Callable[[int], bytes], *, is_new_reader: bool = True
    ) -> bytes | None:
        """Return a part of an object, unchecked; None if the caller has to read it alone.

        ``read`` reads a given number of bytes from the object's beginning. The first one who needs them for all reads
        them, and the others wait. What fails for one, others are not told: they read alone.
        """
        if offset + size > OBJECT_BYTES:
            return None
        with self._lock:
            asked = self._asked.pop(name, 0) + is_new_reader
            self._asked[name] = asked
            if len(self._asked) > MOST_OBJECTS:
                self._asked.popitem(last=False)
            future = self._held.get(name)
            if future is None and asked <= ALONE and self._loads <= ALONE:
                return None
            reads = future is None
            if future is None:
                future = self._held[name] = Future()
            self._held.move_to_end(name)
        if reads:
            self._read(name, future, read)
        whole = future.result()
        return whole[offset : offset + size] if offset + size <= len(whole) else None

    def _read(self, name: str, future: Future[bytes], read: Callable[[int], bytes]) -> None:
        found = b""
        try:
            found = read(OBJECT_BYTES)
        except (StorageError, MissingFileError):
            pass  # whoever reads alone now is told
        finally:
            claim = self._spare(len(found), partial(self._forget, name)) if found else None
            with self._lock:
                if claim is None:
                    self._held.pop(name, None)
                elif name in self._held:  # it may have been dropped again by now
                    self._claims[name] = claim
                future.set_result(found)
                self._shrink()

    def _forget(self, name: str) -> None:
        """Keep an object no longer. Those who wait for it still get it."""
        with self._lock:
            self._held.pop(name, None)
            self._claims.pop(name, None)

    def _shrink(self) -> None:
        done = [(name, len(held.result())) for name, held in self._held.items() if held.done()]
        nbytes = sum(size for _, size in done)
        for name, size in done:
            if nbytes <= MOST_BYTES and len(self._held) <= MOST_OBJECTS:
                return
            del self._held[name]
            self._claims.pop(name, None)
            nbytes -= size
