"""The progress of a comparison: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

QUIET = 10.0


class Steps:
    """Takes the reports of a comparison."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, stderr=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._done = self._total = 0
        self._said = 0.0

    @contextmanager
    def shown(self) -> Iterator[Steps]:
        """Show a bar within the block, if there is a terminal."""
        if not self.console.is_terminal:
            yield self
            return
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as self._bar:
            self._task = self._bar.add_task("starting", total=None)
            yield self
        self._bar = None

    def expect(self, steps: int) -> None:
        """Note that so many more steps will come."""
        self._total += steps
        self._update()

    def now(self, what: str) -> None:
        """Note what is being done."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=what)
        elif time.monotonic() - self._said > QUIET:
            self._said = time.monotonic()
            self.console.print(f"  {self._done} of {self._total or '?'}: {what}", markup=False)

    def advance(self, steps: int = 1) -> None:
        """Note that so many steps are done."""
        self._done += steps
        self._update()

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(f"  {text}", markup=False)

    def _update(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, total=self._total or None)
