"""Keeping a program running as a job of Ray: start it again when it fails, a bounded number of times, and say why.

Ray starts a program that is submitted as a job on its head node, and says how the program ended; nothing of Ray starts
the program again. The doubling delay and the name of the limit are those of a Kubernetes Job (``backoffLimit``). The
cluster is called through ``Jobs``; clock and waits are handed in.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")

JOB_POLL_SECONDS = 1.0
"""Ray is asked once in this many seconds."""
FIRST_RESTART_DELAY = 1.0
LONGEST_RESTART_DELAY = 60.0
STOP_SLACK = 30.0
"""So much longer than the program may take to end, a stop is waited for."""

JOB_SUCCEEDED, JOB_STOPPED, JOB_FAILED = "SUCCEEDED", "STOPPED", "FAILED"

ENDED_WELL, GAVE_UP, NOT_REACHED, STOPPED_ELSEWHERE = 0, 1, 2, 3
"""Exit codes; after a signal the code is 128 and its number, as in a shell."""


class ClusterAwayError(Exception):
    """Nothing that knows of jobs answers at the address of the cluster."""


class NotOursError(Exception):
    """A job is there that this supervisor must not touch, or the cluster refuses the job."""


@dataclass(frozen=True)
class JobRun:
    """One run of the program, as Ray knows it.

    ``cause`` is Ray's name for why the run failed, ``message`` what Ray says besides. A negative ``exit_code`` is a
    signal.
    """

    number: int
    status: str
    command: str = ""
    exit_code: int | None = None
    cause: str | None = None
    message: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the run has ended in one way or another."""
        return self.status in (JOB_SUCCEEDED, JOB_STOPPED, JOB_FAILED)


class Jobs(Protocol):
    """The jobs of one name in a Ray cluster: run 1, 2 and so on. Each method raises ``ClusterAwayError``."""

    def newest(self) -> JobRun | None:
        """Return the run with the highest number; None if the cluster knows none."""

    def look(self, number: int) -> JobRun | None:
        """Return a run; None if the cluster does not know it."""

    def submit(self, number: int, command: str) -> None:
        """Start a run, unless there is one of that number. Raises ``NotOursError`` if the cluster refuses."""

    def stop(self, number: int) -> None:
        """Ask a run to end."""

    def follow(self, number: int) -> None:
        """Print what a run prints, from its beginning, beside everything else."""

    def named(self, number: int) -> str:
        """Return the id of a run by which Ray's own commands know it."""


@dataclass(frozen=True)
class Patience:
    """Bounds of a supervisor: how often a program is started again, and how long the cluster is waited for.

    ``backoff_limit`` is the number of failures in a row after which nothing is started again. A run that took
    ``healthy_after`` seconds ends the row. ``cluster_timeout`` are the seconds without any answer of the cluster,
    ``stop_timeout`` those that the program has to end when it is asked to.
    """

    backoff_limit: int = 20
    healthy_after: float = 600.0
    cluster_timeout: float = 600.0
    stop_timeout: float = 30.0

    def delay(self, failures: int) -> float:
        """Return the seconds before the next start, after ``failures`` failures in a row."""
        return float(min(FIRST_RESTART_DELAY * 2.0 ** min(failures - 1, 16), LONGEST_RESTART_DELAY))


class Stop:
    """The signal that has come. It ends every wait."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._set = threading.Event()

    def __call__(self, number: int, frame: object = None) -> None:
        """Take a signal. The next one of its kind ends the process at once."""
        self._signal = number
        self._set.set()
        signal.signal(number, signal.SIG_DFL)

    def sent(self) -> int | None:
        """Return the signal that has come; None if none has."""
        return self._signal

    def wait(self, seconds: float) -> None:
        """Wait ``seconds``, or until a signal comes."""
        self._set.wait(seconds)


class Supervisor:
    """Keeps one program running. ``say`` is given a line for people at each turn; ``run`` blocks until the end."""

    def __init__(
        self,
        jobs: Jobs,
        command: str,
        patience: Patience,
        stop: Stop,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = jobs
        self._command = command
        self._patience = patience
        self._stop = stop
        self._say = say
        self._clock = clock
        self._failures = 0

    def run(self) -> int:
        """Keep the program running; return the exit code of the supervisor.

        Raises ``NotOursError`` if a job of this name runs another command, or the cluster refuses the job, and
        ``ClusterAwayError`` if the cluster has not answered for too long.
        """
        number = self._begin()
        while True:
            began = self._clock()
            ended = self._await_end(number)
            if self._stop.sent() is not None:
                return self._end(number)
            if ended is not None and ended.status == JOB_SUCCEEDED:
                self._say(f"{self._jobs.named(number)} has ended by itself, without an error.")
                return ENDED_WELL
            if ended is not None and ended.status == JOB_STOPPED:
                self._say(f"{self._jobs.named(number)} was stopped by somebody else, and is not started again.")
                return STOPPED_ELSEWHERE
            took = self._clock() - began
            self._failures = 1 if took >= self._patience.healthy_after else self._failures + 1
            self._say(f"{self._jobs.named(number)} has ended after {_lasted(took)}: {why(ended)}.")
            if self._failures > self._patience.backoff_limit:
                self._say(
                    f"That were {self._failures} failures in a row (--backoff-limit {self._patience.backoff_limit}); "
                    "nothing is started again. The state is in the checkpoint location."
                )
                return GAVE_UP
            delay = self._patience.delay(self._failures)
            self._say(
                f"Starting again in {delay:.0f} s (failure {self._failures} in a row, {self._patience.backoff_limit} "
                "are allowed); the stream goes on from its checkpoint."
            )
            self._stop.wait(delay)
            if self._stop.sent() is not None:
                return self._end(number)
            number += 1
            self._submit(number)

    def _begin(self) -> int:
        newest = self._asked(self._jobs.newest)
        if newest is None or newest.is_over:
            number = 1 if newest is None else newest.number + 1
            if self._stop.sent() is None:
                self._submit(number)
            return number
        self._require_same(newest)
        self._say(
            f"{self._jobs.named(newest.number)} runs already; watching it. What it has printed: "
            f"ray job logs {self._jobs.named(newest.number)}"
        )
        return newest.number

    def _submit(self, number: int) -> None:
        """Start a run, or find that another supervisor of this name was first."""
        self._asked(lambda: self._jobs.submit(number, self._command))
        run = self._asked(lambda: self._jobs.look(number))
        if run is not None:
            self._require_same(run)
        if self._stop.sent() is None:
            self._say(f"{self._jobs.named(number)} is started: {self._command}")
            self._jobs.follow(number)

    def _require_same(self, run: JobRun) -> None:
        if run.command != self._command:
            name = self._jobs.named(run.number)
            raise NotOursError(
                f"{name} runs already, by another command: {run.command!r}, not {self._command!r}. Stop it "
                f"(ray job stop {name}), or give this one another --name."
            )

    def _await_end(self, number: int) -> JobRun | None:
        """Wait until a run is over; None if the cluster does not know it any more, or a signal has come."""
        while self._stop.sent() is None:
            run = self._asked(lambda: self._jobs.look(number))
            if run is None or run.is_over:
                return run
            self._stop.wait(JOB_POLL_SECONDS)
        return None

    def _asked(self, ask: Callable[[], T]) -> T | None:
        """Ask the cluster, as often as it takes until it answers; None if a signal has come meanwhile."""
        silent_since: float | None = None
        while True:
            try:
                answer = ask()
            except ClusterAwayError as error:
                now = self._clock()
                if silent_since is None:
                    silent_since = now
                    self._say(
                        f"No cluster answers; waiting for one up to {self._patience.cluster_timeout:.0f} s. A head "
                        f"without fault tolerance takes all its streams with it. {error}"
                    )
                if self._stop.sent() is not None:
                    return None
                if now - silent_since >= self._patience.cluster_timeout:
                    raise
                self._stop.wait(JOB_POLL_SECONDS)
                continue
            if silent_since is not None:
                self._say("The cluster answers again.")
            return answer

    def _end(self, number: int) -> int:
        """End the run because of a signal."""
        sent, name = self._stop.sent() or signal.SIGTERM, self._jobs.named(number)
        self._say(f"{signal.Signals(sent).name}: stopping {name}.")
        try:
            self._jobs.stop(number)
            deadline = self._clock() + self._patience.stop_timeout + STOP_SLACK
            while (run := self._jobs.look(number)) is not None and not run.is_over:
                if self._clock() > deadline:
                    self._say(f"{name} does not end; see ray job status {name}.")
                    return NOT_REACHED
                time.sleep(JOB_POLL_SECONDS / 4)
        except ClusterAwayError as error:
            self._say(f"{name} may still run, for the cluster does not answer: {error} Later: ray job stop {name}")
            return NOT_REACHED
        self._say(f"{name} has ended; its state is in the checkpoint location.")
        return 128 + sent


def why(run: JobRun | None) -> str:
    """Return in words why a run has failed; None is a run that its cluster does not know any more."""
    if run is None:
        return "the head of the cluster has died and with it all that ran there: the cluster that answers now is new"
    first_line = run.message.strip().partition("\n")[0].rstrip(".:")
    if run.exit_code is not None and run.exit_code != 0:
        killed = -run.exit_code if run.exit_code < 0 else run.exit_code - 128
        if 0 < killed <= max(signal.Signals):
            name = signal.Signals(killed).name if killed in list(signal.Signals) else f"signal {killed}"
            out_of_memory = " (by hand, or by the system for want of memory)" if killed == signal.SIGKILL else ""
            return f"the driver was killed by {name}{out_of_memory}"
        return f"the program has ended with exit code {run.exit_code}; its last lines say why"
    told = {
        "JOB_SUPERVISOR_ACTOR_DIED": "the driver's machine, or Ray's process that looks after the driver, has died",
        "RUNTIME_ENV_SETUP_FAILURE": "its environment could not be made",
        "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": "Ray has not started it in time",
        "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": "no node could take it",
    }.get(run.cause or "")
    said = f" (Ray: {first_line})" if first_line else ""
    return f"{told or 'it failed'}{said}"


def _lasted(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
