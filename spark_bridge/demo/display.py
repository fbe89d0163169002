"""The demo's display: one live picture on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spark_bridge.demo.events import (
    BatchCommitted,
    DemoEvent,
    HostKilled,
    HostsPlaced,
    LookupAnswered,
    Progress,
    Started,
    Verified,
)

LOOKUPS_SHOWN = 6
SECONDS_BETWEEN_LOOKUP_LINES = 2.0


class Display(Protocol):
    """Shows events as they come; a context manager."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, event: DemoEvent) -> None:
        """Show one event."""


def choose_display(console: Console, batches: int) -> Display:
    """Return the live picture where it can be drawn, else lines."""
    return LiveDisplay(console, batches) if console.is_terminal else LineDisplay(console, batches)


class LineDisplay:
    """One line per batch, and a lookup every two seconds."""

    def __init__(self, console: Console, batches: int) -> None:
        self._console = console
        self._batches = batches
        self._next_lookup = 0.0

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, event: DemoEvent) -> None:
        """Print the event, but of lookups only one every two seconds."""
        if isinstance(event, BatchCommitted):
            self._line(describe_batch(event, self._batches))
        elif isinstance(event, LookupAnswered):
            if time.monotonic() >= self._next_lookup:
                self._next_lookup = time.monotonic() + SECONDS_BETWEEN_LOOKUP_LINES
                self._line("  lookup " + describe_lookup(event))
        else:
            line = event_line(event)
            if line is not None:
                self._line(line)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """Progress bar, figures of the newest batch, and the newest lookups, drawn in place."""

    def __init__(self, console: Console, batches: int) -> None:
        self._console = console
        self._batches = batches
        self._batch: BatchCommitted | None = None
        self._step = "starting"
        self._lookups: deque[LookupAnswered] = deque(maxlen=LOOKUPS_SHOWN)
        self._live = Live(self._picture(), console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, event: DemoEvent) -> None:
        """Draw the picture anew; lines that must stay in sight are printed above it."""
        if isinstance(event, BatchCommitted):
            self._batch = event
        elif isinstance(event, LookupAnswered):
            self._lookups.appendleft(event)
        elif isinstance(event, Progress):
            self._step = event.text
        else:
            line = event_line(event)
            if line is not None:
                self._live.console.print(line, markup=False, highlight=False)
        self._live.update(self._picture())

    def _picture(self) -> RenderableType:
        done = self._batch.number if self._batch else 0
        figures = Text(describe_batch(self._batch, self._batches) if self._batch else f"{self._step} ...")
        lookups = Table(box=None, padding=(0, 2), title="looked up by another process", title_justify="left")
        for heading in ("aircraft", "ms", "what the state says"):
            lookups.add_column(heading, justify="right" if heading == "ms" else "left", no_wrap=True)
        for lookup in self._lookups:
            lookups.add_row(lookup.key, f"{lookup.milliseconds:.1f}", lookup.answer or "not seen yet")
        return Group(ProgressBar(total=self._batches, completed=done, width=60), figures, lookups)


def describe_batch(batch: BatchCommitted, batches: int) -> str:
    """Return the figures of one batch, as far as they are known."""
    parts = [f"batch {batch.number}/{batches}", f"{batch.rows:,} rows"]
    parts.append(f"{batch.rows_per_second:,.0f} rows/s")
    if batch.touched_keys is not None:
        parts.append(f"{batch.touched_keys:,} aircraft touched")
    if batch.total_keys is not None:
        parts.append(f"{batch.total_keys:,} in the state")
    parts.append(f"checkpoint {batch.checkpoint}")
    timing = f"{batch.batch_ms:,.0f} ms"
    if batch.state_ms is not None:
        timing += f", state {batch.state_ms:,.0f} ms"
    parts.append(timing)
    return " | ".join(parts)


def describe_lookup(lookup: LookupAnswered) -> str:
    """Return one lookup as a line."""
    return f"{lookup.key}: {lookup.answer or 'not seen yet'} ({lookup.milliseconds:.1f} ms)"


def event_line(event: DemoEvent) -> str | None:
    """Return the line for any other event; None for an event without a line."""
    if isinstance(event, Progress):
        return f"{event.text} ..."
    if isinstance(event, Started) and event.done:
        return f"Going on after batch {event.done}, which an earlier run committed."
    if isinstance(event, HostsPlaced):
        return "State hosts by machine: " + ", ".join(f"{at}: {count}" for at, count in event.by_machine.items())
    if isinstance(event, HostKilled):
        return f"kill -9 {event.pid}: that was a StateStoreHost, during batch {event.number}."
    if isinstance(event, Verified):
        return (
            f"The state of all {event.keys:,} aircraft ({event.flights:,} flights) is what pandas computes; "
            f"{event.unknown_keys} unknown ones are not in it. Read back in {event.read_ms:,.0f} ms."
        )
    return None
