"""The protocol of the programs of all contestants: commands on standard input, answers on standard output.

Each line is a JSON object. The commands:

- ``{"do": "start", "contestant": NAME, "directory": PATH, "collect": BOOL, "checkpoint_seconds": S}`` starts the
  contestant on ``PATH/input``, from its state in ``PATH/state`` if there is one. With ``collect`` each result goes to a
  file of ``PATH/results``, as a line "user,n,spent"; else results are dropped.
- ``{"do": "await", "rows": N, "seconds": S}`` answers when the results of N rows are out, counted from the start, with
  their number.
- ``{"do": "see", "user": U, "n": N, "seconds": S}`` answers when a query of the running state gives N for this user.
- ``{"do": "stop"}`` ends the contestant; all that it has counted is durable.

An answer is ``{"ok": VALUE}``, or ``{"error": TEXT}``. This module needs only the standard library: each program runs
in its own environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


class Program(ABC):
    """What runs one contestant after the other."""

    look_every = 0.01
    """Seconds between two looks at how far the contestant is."""

    @abstractmethod
    def start(self, contestant: str, directory: Path, collect: bool, checkpoint_seconds: float) -> None: ...

    @abstractmethod
    def rows(self) -> int:
        """Return of how many rows the results are out, since the start."""

    def sees(self, user: int) -> int:
        """Return the count of a user by a query of the running state; ``NotImplementedError`` where there is none."""
        raise NotImplementedError(f"{type(self).__name__} has no queries of its state.")

    @abstractmethod
    def stop(self) -> None: ...

    def close(self) -> None:  # noqa: B027 - most have nothing
        """Give back what is kept between contestants."""


def serve(program: Program) -> None:
    """Carry out the commands of the standard input until its end. All other output goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": carry_out(program, command)}
        except Exception as error:  # noqa: BLE001 - the comparison has the error, and says which contestant it was
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:50_000]}
        print(json.dumps(answer), file=answers, flush=True)
    program.close()


def carry_out(program: Program, command: dict[str, Any]) -> Any:
    if command["do"] == "start":
        directory = Path(command["directory"])
        for name in ("input", "state", "results"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        program.start(command["contestant"], directory, command["collect"], command["checkpoint_seconds"])
        return None
    if command["do"] == "await":
        return _until(program.rows, command["rows"], command["seconds"], program.look_every)
    if command["do"] == "see":
        return _until(lambda: program.sees(command["user"]), command["n"], command["seconds"], 0.0)
    if command["do"] == "stop":
        program.stop()
        return None
    raise ValueError(f"Unknown command {command['do']!r}.")


def _until(look: Callable[[], int], wanted: int, seconds: float, look_every: float) -> int:
    """Return what is seen once that is ``wanted`` or more. Raises ``TimeoutError``."""
    deadline = time.monotonic() + seconds
    while (seen := look()) < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{seen:,} of {wanted:,} after {seconds:g} s")
        time.sleep(look_every)
    return seen


class Results:
    """The file of results of one worker; each line is out as soon as it is written."""

    def __init__(self, directory: Path) -> None:
        self._file: TextIO = (directory / f"{os.getpid()}-{time.time_ns()}.csv").open("w", buffering=1)

    def write(self, user: int, n: int, spent: int) -> None:
        self._file.write(f"{user},{n},{spent}\n")
