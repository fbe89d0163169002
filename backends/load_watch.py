"""Progress of a load, for the threads that wait for the load, and the request to end the load."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from backends.exceptions import LoadEndedError

log = logging.getLogger(__name__)

_numbers = itertools.count()
LOG_SECONDS = 10.0
"""A load that takes longer is logged with its progress, once in this many seconds."""


class LoadProgress(Struct, frozen=True):
    """Progress of a load: files and bytes, the known totals that the load needs, and steps of work of any kind.

    ``load`` differs from load to load. The totals grow during the load: a snapshot first, then changelogs.
    """

    load: str = ""
    files: int = 0
    of_files: int = 0
    nbytes: int = 0
    of_bytes: int = 0
    steps: int = 0

    def is_behind(self, other: LoadProgress) -> bool:
        """Return whether ``other`` shows progress since this one. A different load must have made some progress."""
        done = other.files, other.nbytes, other.steps
        return any(done) if self.load != other.load else (self.files, self.nbytes, self.steps) != done

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"{self.files} of {self.of_files} files, {self.nbytes / mib:.1f} of {self.of_bytes / mib:.1f} MiB "
            f"({self.steps} steps)"
        )


class LoadWatch:
    """Counts the work of one load. ``what`` names the load in logs.

    ``is_abandoned`` is asked between two steps: if it is true, or ``end`` was called, the next step raises
    ``LoadEndedError``. While ``is_ahead`` is true, loads that are waited for fetch their files first; ``number`` is the
    load's place in the order of all loads. ``on_step`` is called after each step, in the thread that loads. Threads
    that fetch files call ``begin_file`` and ``end_file``; the lock is held briefly. Reading the progress iterates over
    the files that are being fetched, which are at most ``load_threads``.
    """

    def __init__(
        self,
        what: str = "a partition",
        *,
        is_abandoned: Callable[[], bool] = lambda: False,
        is_ahead: Callable[[], bool] = lambda: False,
        on_step: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = what
        self.number = next(_numbers)
        self.ended: str | None = None
        self.is_over = False
        self.reserve: Callable[[int], None] | None = None
        """Called with the bytes of files before they are fetched. May raise ``LocalDiskFullError``."""
        self._is_abandoned = is_abandoned
        self._is_ahead = is_ahead
        self._on_step = on_step
        self._clock = clock
        self._id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._started = self._logged = clock()
        self._files = self._of_files = self._nbytes = self._of_bytes = self._steps = 0
        self._fetching: dict[Path, int] = {}

    def end(self, why: str, *, is_over: bool = False) -> None:
        """End the load at its next step. ``is_over``: no later load will continue from it."""
        self.is_over = self.is_over or is_over
        self.ended = self.ended or why

    def check(self) -> None:
        if self.ended is None and self._is_abandoned():
            self.ended = "no caller waits for it any more"
        if self.ended is not None:
            raise LoadEndedError(
                f"The load of {self.what} was ended: {self.ended}. Its progress was {self.progress()}."
            )

    @property
    def is_ahead(self) -> bool:
        """Return whether no task and no reader waits for the load now."""
        return self._is_ahead()

    @property
    def is_wanted(self) -> bool:
        """Return whether the load is to continue, as far as is known before its next step."""
        return self.ended is None and not self._is_abandoned()

    def expect(self, files: int, nbytes: int) -> None:
        """Add files to those that the load needs. Raises ``LocalDiskFullError`` if there is no room for them."""
        if self.reserve is not None:
            self.reserve(nbytes)
        with self._lock:
            self._of_files += files
            self._of_bytes += nbytes

    def begin_file(self, target: Path, size: int) -> None:
        """Record that a file of ``size`` bytes is being written to ``target``: its bytes count as they arrive."""
        self.check()
        with self._lock:
            self._fetching[target] = size

    def end_file(self, target: Path, *, is_done: bool) -> None:
        with self._lock:
            size = self._fetching.pop(target)
            if is_done:
                self._files += 1
                self._nbytes += size

    def step(self, files: int = 0, nbytes: int = 0) -> None:
        with self._lock:
            self._steps += 1
            self._files += files
            self._nbytes += nbytes
        self._on_step()
        now = self._clock()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.info("Loading %s since %.0f s: %s", self.what, now - self._started, self.progress())
        self.check()

    def progress(self) -> LoadProgress:
        with self._lock:
            under_way = sum(_size(path) for path in self._fetching)
            return LoadProgress(
                self._id, self._files, self._of_files, self._nbytes + under_way, self._of_bytes, self._steps
            )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
