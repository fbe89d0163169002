"""How many requests to storage wait for each other: a logical clock in place of a stopwatch.

Each thread has a time. A request ends one tick later. Work in another thread begins at the time of its submission. A
thread that waits for a result continues at the later of both times.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from backends.spans import Pool
from backends.storage.requests import RequestSender


class CriticalPath:
    """Counts ticks from its making on. ``longest`` is the latest time of any thread."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.longest = 0
        self._now = threading.local()
        self._lock = threading.Lock()
        send: Any = RequestSender.send
        submit: Any = Pool.submit
        result: Any = Future.result
        start: Any = threading.Thread.start

        def sent(sender: Any, *args: Any, **more: Any) -> Any:
            self._at(self._time() + 1)
            return send(sender, *args, **more)

        def submitted(pool: Any, work: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
            began, ended = self._time(), [0]

            def worked(*args: Any, **more: Any) -> Any:
                self._now.time = began
                try:
                    return work(*args, **more)
                finally:
                    ended[0] = self._time()

            future = submit(pool, worked, *args, **more)
            future.ended = ended
            return future

        def waited(future: Any, timeout: float | None = None) -> Any:
            try:
                return result(future, timeout)
            finally:
                self._at(max(self._time(), getattr(future, "ended", [0])[0]))

        def started(thread: Any) -> None:
            began, run = self._time(), thread.run

            def ran() -> None:
                self._now.time = began
                run()

            thread.run = ran
            start(thread)

        patch.setattr(RequestSender, "send", sent)
        patch.setattr(Pool, "submit", submitted)
        patch.setattr(Future, "result", waited)
        patch.setattr(threading.Thread, "start", started)

    def _time(self) -> int:
        return getattr(self._now, "time", 0)

    def _at(self, time: int) -> None:
        self._now.time = time
        with self._lock:
            self.longest = max(self.longest, time)
