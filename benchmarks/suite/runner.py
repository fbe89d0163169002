"""Runs comparisons, each in its own process with a time limit, so that one that fails or hangs stops no other.

The child is ``bench.py --child``: it writes its part as JSON into a file. A child that writes none has failed, and its
part has the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from suite.machine import machine, memory_by_role, versions
from suite.model import (
    ENVIRONMENTS,
    VENV,
    VENV42,
    VENV43,
    Comparison,
    Kind,
    Part,
    Size,
    T,
    part_from_dict,
    part_to_dict,
    rotated,
)

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
GRACE = 15.0
LEAVE = 3.0  # seconds for processes that a child has left, which may be about to end
LOOK_EVERY = 5.0  # seldom, as a look takes CPU time from the comparison
# A smoke run is too short for the JVM's second compiler to pay. Its kept figures are made without it too.
SMOKE_JVM = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote -Xss4m"
)
QUIET = 10.0


class Steps:
    """The steps of a comparison: a bar on a terminal within ``bar``, otherwise a line from time to time."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, stderr=True)
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.bar.add_task("starting", total=None)
        (self._task,) = self.bar.tasks
        self._said = 0.0

    def expect(self, steps: int) -> None:
        self.bar.update(self._task.id, total=(self._task.total or 0) + steps)

    def now(self, what: str) -> None:
        self.bar.update(self._task.id, description=what)
        if not self.console.is_terminal and time.monotonic() - self._said > QUIET:
            self._said = time.monotonic()
            self.say(f"{self._task.completed:g} of {self._task.total or '?'}: {what}")

    def advance(self) -> None:
        self.bar.advance(self._task.id)

    def turns(self, what: str, contestants: Iterable[str], turns: int) -> Iterator[str]:
        """Give the contestants, turn by turn; each turn begins with another one. Each use is one step."""
        for turn in range(turns):
            for name in rotated(list(contestants), turn):
                self.now(f"{what}: turn {turn + 1} of {turns}, {name}")
                yield name
                self.advance()

    def take_turns(self, what: str, names: Iterable[str], turns: int, take: Callable[[str], T]) -> dict[str, list[T]]:
        """Return what ``take`` returns for each turn of a contestant, by its name."""
        found: dict[str, list[T]] = {name: [] for name in names}
        for name in self.turns(what, found, turns):
            found[name].append(take(name))
        return found

    def say(self, text: str) -> None:
        self.console.print(f"  {text}", markup=False)


class EnvironmentMissingError(RuntimeError):
    """The environment that a comparison needs could not be made."""


def interpreter(environment: str) -> Path:
    """Return the Python of an environment, which is made if it is missing.

    ``make venv42`` makes Spark 4.2's; STATESTORE_VENV42 names another one. Spark 4.3's is a cell of ``make
    test-matrix``. Raises ``EnvironmentMissingError`` if it cannot be made.
    """
    if environment == VENV:
        return Path(sys.executable)
    if environment == VENV43:
        directory, command = ROOT / ".venvs" / "spark-4.3", [sys.executable, "-m", "tests.matrix"]
        command += ["--cells", directory.name, "--only-make"]
    else:
        assert environment == VENV42, environment
        directory, command = Path(os.environ.get("STATESTORE_VENV42", ROOT / ".venv42")), ["make", "venv42"]
    python = directory / "bin" / "python"
    if not python.exists():
        if environment == VENV42 and "STATESTORE_VENV42" in os.environ:
            raise EnvironmentMissingError(f"STATESTORE_VENV42={directory} has no bin/python.")
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status or not python.exists():
            names = ", or name an environment of Spark 4.2 with STATESTORE_VENV42=/path/to/it"
            raise EnvironmentMissingError(
                f"{' '.join(command)} ended with status {status} and did not make {python}; see what it said"
                f"{names if environment == VENV42 else ''}."
            )
    return python


def made_environment(directory: Path, requirements: str) -> Path:
    """Return the Python of an environment with these lines of requirements, which is made again if they have changed.

    Raises ``EnvironmentMissingError`` if it cannot be made.
    """
    python, wanted, made = (directory / name for name in ("bin/python", "requirements.txt", ".made-of"))
    if made.exists() and made.read_text() == requirements:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    wanted.write_text(requirements)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(wanted)]
    for command in ([sys.executable, "-m", "venv", str(directory)], pip):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
            raise EnvironmentMissingError(f"{' '.join(command[1:])} ended with status {done.returncode}: {said[-1]}")
    wanted.rename(made)
    return python


def run(comparison: Comparison, environment: str, kind: Kind, size: Size, console: Console) -> Part:
    """Run one comparison in one environment, and return its part, which says so if the run failed."""
    minutes = comparison.minutes[kind]
    where = f" on {ENVIRONMENTS[environment]}" if len(comparison.environments) > 1 else ""
    console.print(f"[bold]{comparison.name}[/]{where}: {comparison.title} (at most {minutes:g} minutes)")
    began, failed = time.perf_counter(), Part(environment, kind, size, str(date.today()), 0.0, {}, machine())
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        answer = Path(temporary) / "part.json"
        # All files that a child leaves in its temporary directory are removed with the directory.
        given = {"PYTHONPATH": os.pathsep.join((str(BENCHMARKS), str(ROOT))), "TMPDIR": temporary}
        if kind == "smoke":
            given["JAVA_TOOL_OPTIONS"] = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} {SMOKE_JVM}".strip()
        try:
            command = [str(interpreter(environment)), str(BENCHMARKS / "bench.py"), "--child", comparison.name]
            command += ["--environment", environment, "--kind", kind, "--sizes", json.dumps(size)]
            command += ["--answer", str(answer)]
            memory: dict[str, float] = {}
            status = call(command, minutes * 60, os.environ | given, memory)
            if answer.exists():
                console.print(f"  {time.perf_counter() - began:.0f} s", highlight=False)
                part = part_from_dict(json.loads(answer.read_text()))
                return replace(part, machine=failed.machine, memory=memory)
            reason = f"Its process ended with status {status} and gave no result; see its output above."
        except EnvironmentMissingError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"It was not through after {minutes:g} minutes."
    console.print(f"[bold red]  failed:[/] {reason}", highlight=False)
    return replace(failed, failure=reason, seconds=time.perf_counter() - began)


def call(
    command: list[str], seconds: float, environment: dict[str, str], memory: dict[str, float] | None = None
) -> int:
    """Run a child and return its status. Nothing that it has started outlives it.

    ``memory`` receives the most MiB of the processes of each role, by looks every ``LOOK_EVERY`` seconds. Raises
    ``TimeoutError`` if the child needs longer; it is ended then.
    """
    child = subprocess.Popen(command, cwd=ROOT, env=environment)
    family: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                return child.wait(min(LOOK_EVERY, max(deadline - time.monotonic(), 0.0)))
            except subprocess.TimeoutExpired:
                # Ray's processes are not in the child's process group, and can be found only while the child runs.
                family |= {process.pid: process for process in _descendants(child.pid)}
                if memory is not None:
                    for role, mib in memory_by_role(child.pid, [psutil.Process(child.pid), *family.values()]).items():
                        memory[role] = max(mib, memory.get(role, 0.0))
            if time.monotonic() > deadline:
                raise TimeoutError(f"{command} needs more than {seconds:g} s")
    finally:
        family |= {process.pid: process for process in _descendants(child.pid)}
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(GRACE)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        _end(list(family.values()))


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _end(processes: list[psutil.Process]) -> None:
    """End the processes that a child has left; ``is_running`` tells a process id that was given to another."""
    left = psutil.wait_procs([p for p in processes if p.is_running()], timeout=LEAVE)[1]
    for process in left:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            process.kill()
    psutil.wait_procs(left, timeout=GRACE)


def run_here(comparison: Comparison, environment: str, kind: Kind, size: Size, answer: Path) -> None:
    """Run the comparison in this process, the child, and write the part."""
    began, part = time.perf_counter(), Part(environment, kind, size, str(date.today()), 0.0, versions(), machine())
    try:
        steps = Steps()
        with steps.bar:
            measured = comparison.run(size, steps)
        part = replace(part, contestants=measured.contestants, cases=tuple(measured.cases), notes=tuple(measured.notes))
    except Exception as error:  # noqa: BLE001 - the report has the error, and the other comparisons still run
        traceback.print_exc()
        part = replace(part, failure=_in_short(error))
    answer.write_text(json.dumps(part_to_dict(replace(part, seconds=time.perf_counter() - began))))


def _in_short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'without a word'}"
