"""Times that a task spends on each step, for progress reports."""

from __future__ import annotations

import time


class StepTimer:
    """Milliseconds by step. Names that end in ``_ms`` are work on state, ``input_wait`` is the wait for input rows."""

    def __init__(self) -> None:
        self.milliseconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Forget the time since the last step: other code has used it."""
        self._last = time.perf_counter()

    def step(self, name: str) -> None:
        """Book the time since the last step under ``name``."""
        now = time.perf_counter()
        self.milliseconds[name] = self.milliseconds.get(name, 0.0) + (now - self._last) * 1e3
        self._last = now
