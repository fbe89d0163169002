"""A checkpoint coordinator with a clock and stores of the test's own, and the batches that it is told of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class ManualTimer:
    due: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class World:
    """A clock, and timers that run when it is turned."""

    now: float = 1000.0
    timers: list[ManualTimer] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None]) -> ManualTimer:
        assert delay >= 0
        self.timers.append(ManualTimer(self.now + delay, callback))
        return self.timers[-1]

    @property
    def armed(self) -> list[ManualTimer]:
        return [t for t in self.timers if not t.cancelled]

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [t for t in self.armed if t.due <= end + 1e-9]:
            first = min(due, key=lambda t: t.due)
            self.timers.remove(first)
            self.now = max(self.now, first.due)
            first.callback()
        self.now = end
