"""A program of ``programs/`` at work: its process on two cores, its commands, and the CPU time of all below it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from alternatives.cpu_time import Moment, family, moment

BENCHMARKS = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).resolve().parent / "programs"
CORES = 2
SLACK = 120.0
"""Seconds for an answer, beyond those that the command itself may wait. Starting Spark on Ray takes most of them."""
LEAVE = 30.0
PR_SET_CHILD_SUBREAPER = 36
CAUSE = re.compile(r"(Caused by: )?[\w.$]+(Error|Exception)\b")


class ContestantError(RuntimeError):
    """A contestant could not do its work: its program's own error, or the end of its process."""


class Running:
    """The process of a program. ``log`` gets all that it prints."""

    def __init__(self, python: Path, program: str, log: Path) -> None:
        self._log = log
        cores = sorted(os.sched_getaffinity(0))[:CORES]
        given = {
            "PYTHONPATH": os.pathsep.join((str(BENCHMARKS), str(BENCHMARKS.parent))),
            "PYSPARK_PYTHON": str(python),
        }
        with log.open("a") as output:
            self._process = subprocess.Popen(
                [str(python), str(PROGRAMS / f"{program}.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | given,
                preexec_fn=lambda: _bind(cores),  # noqa: PLW1509 - no threads here
            )

    def start(self, contestant: str, directory: Path, *, collect: bool, checkpoint_seconds: float) -> None:
        """Start the contestant on its directory, from the state that is there."""
        where = {"contestant": contestant, "directory": str(directory)}
        self._tell("start", {**where, "collect": collect, "checkpoint_seconds": checkpoint_seconds})

    def wait(self, rows: int, seconds: float) -> int:
        """Wait until the results of so many rows are out; return of how many they are."""
        return int(self._tell("await", {"rows": rows, "seconds": seconds}, seconds))

    def see(self, user: int, n: int, seconds: float) -> None:
        """Wait until a query of the running state gives this count of the user."""
        self._tell("see", {"user": user, "n": n, "seconds": seconds}, seconds)

    def stop(self) -> None:
        """Stop the contestant, with all that it has counted durable."""
        self._tell("stop", {})

    def check_alive(self) -> None:
        """Raise ``ContestantError`` if the process has ended."""
        if (status := self._process.poll()) is not None:
            raise ContestantError(f"the program ended with status {status}; the last it said: {self._said()}")

    def cpu_time(self) -> Moment:
        """Return what the process and all below it have used until now."""
        return moment(self._process.pid)

    def close(self) -> None:
        """End the process, and whatever it has left."""
        assert self._process.stdin is not None and self._process.stdout is not None
        left = family(self._process.pid)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                if process.is_running():
                    process.kill()
        self._process.wait()
        self._process.stdout.close()

    def _tell(self, do: str, arguments: dict[str, Any], seconds: float = 0.0) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self.check_alive()
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._process.wait()
            self.check_alive()
        if not select.select([self._process.stdout], [], [], seconds + SLACK)[0]:
            raise ContestantError(f"no answer to {do!r} in {seconds + SLACK:g} s")
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self.check_alive()
        answer = json.loads(line)
        if "error" in answer:
            raise ContestantError(f"{do}: {in_short(answer['error'])}")
        return answer["ok"]

    def _said(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "nothing"


def in_short(error: str) -> str:
    """Return the first line of an error, and the last line of its traces that names another one, as its cause."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["no reason given"]
    causes = [line for line in lines[1:] if CAUSE.match(line)]
    return " ... ".join(line[:200] for line in (lines[0], *causes[-1:]))


def _bind(cores: Sequence[int]) -> None:
    """Bind this process to cores, and let orphans below it become its children, so that none is lost from sight."""
    os.sched_setaffinity(0, cores)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
