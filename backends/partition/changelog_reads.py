"""The changelogs of a load, read ahead: some at once, and the first small ones while a snapshot is still fetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType

from backends.formats.manifest import ChangelogRef
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.tracing.spans import Pool

AHEAD_BYTES = 1 << 20
"""At most this many bytes of changelogs are read before they can be applied: a host loads dozens of partitions at once.
"""


class ChangelogReads:
    """Reads changelogs in their order by ``threads`` threads. A context manager, at whose end no read goes on.

    At most twice as many changelogs as threads are in memory, and ``AHEAD_BYTES`` before the first one is asked for.
    What another load of the process reads for all needs no thread here.
    """

    def __init__(self, storage: CheckpointStorage, changelogs: Sequence[ChangelogRef], threads: int) -> None:
        self._storage = storage
        self._left = deque(changelogs)
        self._window = 2 * threads
        self._under_way: deque[tuple[ChangelogRef, Callable[[], bytes]]] = deque()
        self._threads = threads
        self._pool: Pool | None = None
        nbytes = 0
        while self._left and len(self._under_way) < self._window:
            nbytes += self._left[0].file.size
            if nbytes > AHEAD_BYTES:
                break
            self._begin_next()

    def __enter__(self) -> ChangelogReads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[tuple[ChangelogRef, bytes]]:
        """Return each changelog with its content. Raises what ``CheckpointStorage.read`` raises."""
        while self._left or self._under_way:
            while self._left and len(self._under_way) < self._window:
                self._begin_next()
            ref, read = self._under_way.popleft()
            yield ref, read()

    def _begin_next(self) -> None:
        ref = self._left.popleft()
        self._under_way.append((ref, self._begun(ref)))

    def _begun(self, ref: ChangelogRef) -> Callable[[], bytes]:
        """Begin to read a changelog; return the function that waits for its content."""
        if self._storage.is_being_shared(ref.file):
            return partial(self._storage.read, ref.file)  # another load reads it, or has: a thread would only wait
        if self._pool is None:
            self._pool = Pool(self._threads, thread_name_prefix="statestore-load")
        return self._pool.submit(self._storage.read, ref.file).result
