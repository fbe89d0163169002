"""The course of the contestants: the input, the programs at work, turns of the same rows, and the check of all results.

A turn's rows are in the input before the contestant starts; one that takes all of them as one batch gets those that
count when the warm-up is through. A turn's figures are of the time between two results: that of the last row of the
warm-up, and that of the turn's last row. So neither the start counts nor the stop.

After the last turn, the contestant starts again and writes its results to files. Single events, one after the other,
measure the time from a new row to its result. Then each user gets a row of the amount 0, whose results are the whole
state.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from suite.model import rotated
from suite.runner import Steps

from alternatives.comparison import Alternative, Group, Pace

# -- the input of all contestants: files of JSON lines, and the totals that they must give

Longs = npt.NDArray[np.int64]
Totals = dict[int, tuple[int, int]]
"""By user the count and the sum."""
SLICES = 10
"""Files of a batch. A file is a slice of the input; contestants take them in order, in turns of so many slices."""
LARGEST = 100_000
OLDEST = 1_700_000_000
"""Seconds since 1970. Spark takes files in the order of their times, which are those of their batch."""


@dataclass(frozen=True)
class Given:
    """Slices of ``rows`` rows of random users below ``keys``, and by slice the counts and sums of its rows alone."""

    directory: Path
    rows: int
    keys: int
    counts: Longs
    sums: Longs

    def expected(self, slices: int) -> Totals:
        """Return the totals behind the first slices, of the users that had a row."""
        if slices > len(self.counts):
            raise ValueError(f"There are {len(self.counts)} slices, not {slices}.")
        counts, sums = self.counts[:slices].sum(0), self.sums[:slices].sum(0)
        seen = np.flatnonzero(counts)
        return dict(zip(seen.tolist(), zip(counts[seen].tolist(), sums[seen].tolist(), strict=True), strict=True))

    def feed(self, inbox: Path, first: int, slices: int) -> None:
        """Put slices into a contestant's input; each file appears as a whole."""
        for i in range(first, first + slices):
            os.link(self.directory / name_of(i), inbox / name_of(i))


def make(directory: Path, rows: int, keys: int, slices: int) -> Given:
    """Make slices of ``rows`` rows; the same sizes give the same bytes."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(20130101)
    counts, sums = np.zeros((slices, keys), np.int64), np.zeros((slices, keys), np.int64)
    for i in range(slices):
        users, amounts = rng.integers(0, keys, rows), rng.integers(1, LARGEST, rows)
        np.add.at(counts[i], users, 1)
        np.add.at(sums[i], users, amounts)
        write(directory, i, users, amounts)
    return Given(directory, rows, keys, counts, sums)


def write(directory: Path, i: int, users: Longs, amounts: Longs) -> None:
    """Write slice i; the file appears as a whole."""
    path = directory / name_of(i)
    draft = directory.parent / f".{path.name}"
    rows = zip(users.tolist(), amounts.tolist(), strict=True)
    draft.write_text("".join(f'{{"user":{user},"amount":{amount}}}\n' for user, amount in rows))
    os.utime(draft, (OLDEST + i // SLICES, OLDEST + i // SLICES))
    draft.rename(path)


def name_of(i: int) -> str:
    return f"{i:06}.json"


# -- the results that a contestant has written


LINE = re.compile(r"(?P<gone>-[UD])?\[?(?P<user>\d+), ?(?P<n>\d+), ?(?P<spent>\d+)\]?$")
"""``user,n,spent``; or Flink's print: ``2> +U[user, n, spent]``, with -U and -D for what no longer holds."""
RESULTS_LOOK_SECONDS = 0.001


class Results:
    """Follows the files of a directory. Of each user the result with the greatest count is the last one."""

    def __init__(self, directory: Path) -> None:
        self.last: Totals = {}
        self._directory = directory
        self._read: dict[Path, int] = {}

    def look(self) -> Totals:
        """Read what has been written since the last look, and return the last results."""
        for path in self._directory.iterdir():
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.decode().splitlines():
                found = LINE.search(line)
                if found is None or found["gone"]:
                    continue
                user, n, spent = int(found["user"]), int(found["n"]), int(found["spent"])
                if n >= self.last.get(user, (0, 0))[0]:
                    self.last[user] = (n, spent)
        return self.last

    def wait(self, is_there: Callable[[Totals], bool], seconds: float, alive: Callable[[], None]) -> bool:
        """Wait for results; return whether they came in time. ``alive`` raises if no process is left to write them."""
        deadline = time.monotonic() + seconds
        while not is_there(self.look()):
            if time.monotonic() > deadline:
                return False
            alive()
            time.sleep(RESULTS_LOOK_SECONDS)
        return True


def are_counted(totals: Totals, expected: Totals) -> bool:
    """Return whether every expected user has as many rows as expected, whatever their sum."""
    return all(user in totals and totals[user][0] >= n for user, (n, _) in expected.items())


def check(contestant: str, found: Totals, expected: Totals) -> None:
    """Raise ``AssertionError`` unless counts and sums of all users are equal."""
    wrong = [user for user in sorted({*found, *expected}) if found.get(user) != expected.get(user)]
    if wrong:
        shown = ", ".join(f"user {u}: {found.get(u)}, not {expected.get(u)}" for u in wrong[:3])
        raise AssertionError(
            f"{contestant} has other totals (count, sum) than expected of {len(wrong):,} of {len(expected):,} users: "
            f"{shown}."
        )


# -- the CPU time that a process and all below it use between two moments


@dataclass(frozen=True)
class Used:
    """CPU seconds of one process: its own, and those of its children that have ended and been waited for."""

    parent: int
    own: float
    children: float


Moment = Mapping[int, Used]
"""By number of the process."""


def family(pid: int) -> list[psutil.Process]:
    """Return the process and all below it."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def moment(pid: int) -> Moment:
    """Return what the process and all below it have used until now."""
    found = {}
    for process in family(pid):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            ended = times.children_user + times.children_system
            found[process.pid] = Used(process.ppid(), times.user + times.system, ended)
    return found


def seconds_between(before: Moment, after: Moment) -> float:
    """Return the CPU seconds used between two moments.

    When a process ends in between, the kernel adds all its CPU time to the process that waited for it. The part from
    before the first moment is subtracted. If no process waits for it, its time after the first moment is lost, and its
    time before that is not subtracted from that of others.
    """
    handed_on: dict[int, float] = defaultdict(float)
    for pid, used in before.items():
        if pid not in after:
            parent = used.parent
            while parent in before and parent not in after:
                parent = before[parent].parent
            handed_on[parent] += used.own + used.children
    total, none = 0.0, Used(0, 0.0, 0.0)
    for pid, used in after.items():
        earlier = before.get(pid, none)
        total += used.own - earlier.own + max(0.0, used.children - earlier.children - handed_on[pid])
    return total


# -- a program of ``programs/`` at work: its process on two cores, its commands, its CPU time


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


# -- turns


PACES: Mapping[Pace, tuple[int, int]] = {"fast": (8, 3), "medium": (4, 1), "slow": (2, 1)}
"""Batches of a turn, and how many of them are the warm-up. "slowest" is one slice, and two fifths of it."""
SLOWEST = 0.4
EVENTS_BEFORE = 2
"""Events that do not count: the first batches of a query that has just started take longer."""
SECONDS = 300.0
"""How long a wait for results may take."""
GRACE = 10.0
"""How long the last results may come behind the first of each user."""
CLOCK = 0.01
"""The resolution of CPU times, in seconds."""


@dataclass
class Course:
    """The measurements of one contestant: a figure per turn, and the milliseconds of each event."""

    alternative: Alternative
    per_core: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)
    to_result: list[float] = field(default_factory=list)
    to_query: list[float] = field(default_factory=list)
    fed: int = 0  # slices


@dataclass(frozen=True)
class Sizes:
    turns: int
    events: int
    checkpoint_seconds: float
    share: float
    """Of the batches of ``PACES``; a smoke run takes fewer."""


def slices_of(pace: Pace, share: float) -> tuple[int, float]:
    """Return the slices of a turn, and how many of them are the warm-up."""
    if pace == "slowest":
        return 1, SLOWEST
    batches, warm_up = PACES[pace]
    batches = max(2, round(batches * share))
    return batches * SLICES, max(1, min(round(warm_up * share), batches - 1)) * SLICES


def take_turn(running: Running, course: Course, given: Given, directory: Path, sizes: Sizes) -> None:
    """Start the contestant, from its state if it has one, give it the rows of a turn, and stop it."""
    slices, warm_up = slices_of(course.alternative.pace, sizes.share)
    inbox = directory / "input"
    inbox.mkdir(parents=True, exist_ok=True)
    at_first = int(warm_up) if course.alternative.fed_twice else slices
    given.feed(inbox, course.fed, at_first)
    running.start(course.alternative.mode, directory, collect=False, checkpoint_seconds=sizes.checkpoint_seconds)
    before = running.wait(round(warm_up * given.rows), SECONDS)
    began, used_before = time.perf_counter(), running.cpu_time()
    given.feed(inbox, course.fed + at_first, slices - at_first)
    rows = running.wait(slices * given.rows, SECONDS) - before
    if not rows:
        raise ContestantError("all rows were counted before the first look; it needs more rows a turn")
    took, used = time.perf_counter() - began, seconds_between(used_before, running.cpu_time())
    running.stop()
    course.fed += slices
    course.per_second.append(rows / took)
    course.per_core.append(rows / max(used, CLOCK))


def take_events(running: Running, course: Course, given: Given, directory: Path, sizes: Sizes) -> None:
    """Start the contestant with its results written down, time single events, and compare the whole state."""
    mode, inbox = course.alternative.mode, directory / "input"
    running.start(mode, directory, collect=True, checkpoint_seconds=sizes.checkpoint_seconds)
    results, slice_, expected = Results(directory / "results"), len(given.counts), given.expected(course.fed)
    for i in range(EVENTS_BEFORE + sizes.events):
        user = given.keys + i
        for kind in ("result", "query") if course.alternative.is_ours else ("result",):
            began = time.perf_counter()
            n = expected.get(user, (0, 0))[0] + 1
            write(inbox, slice_, np.array([user]), np.array([n]))
            if kind == "query":
                running.see(user, n, SECONDS)
            elif not results.wait(lambda found, user=user: user in found, SECONDS, running.check_alive):
                raise ContestantError(f"one event had no result after {SECONDS:g} s")
            taken = (time.perf_counter() - began) * 1e3
            if i >= EVENTS_BEFORE:
                (course.to_result if kind == "result" else course.to_query).append(taken)
            expected[user] = (n, expected.get(user, (0, 0))[1] + n)
            slice_ += 1
    users = np.array(sorted(expected))
    write(inbox, slice_, users, np.zeros(len(users), np.int64))
    expected = {user: (n + 1, spent) for user, (n, spent) in expected.items()}
    results.wait(lambda found: expected.keys() <= found.keys(), SECONDS, running.check_alive)
    results.wait(lambda found: are_counted(found, expected), GRACE, running.check_alive)
    check(course.alternative.name, results.look(), expected)
    running.stop()


# -- all contestants in turns, and what happens to one that fails


@dataclass
class Courses:
    """Runs the contestants. ``left_out`` says of each that failed why."""

    root: Path
    pythons: Mapping[str, Path]
    given: Given
    sizes: Sizes
    steps: Steps
    left_out: dict[str, str] = field(default_factory=dict)
    _running: Running | None = None

    def run(self, alternatives: Sequence[Alternative]) -> list[Course]:
        """Run all turns, and return the courses of those that came through.

        Raises ``AssertionError`` if the totals of one are wrong.
        """
        courses = {a.name: Course(a) for a in alternatives}
        groups = list(dict.fromkeys(a.group for a in alternatives))
        for turn in range(self.sizes.turns):
            for group in rotated(groups, turn):
                self._run_group(group, rotated([a for a in alternatives if a.group == group], turn), courses, turn)
        return [course for name, course in courses.items() if name not in self.left_out]

    def _run_group(
        self, group: Group, members: Sequence[Alternative], courses: Mapping[str, Course], turn: int
    ) -> None:
        is_last = turn == self.sizes.turns - 1
        try:
            for a in members:
                if a.name in self.left_out:
                    continue
                course, directory = courses[a.name], self.root / a.name
                self.steps.now(f"turn {turn + 1} of {self.sizes.turns}: {a.name}")
                try:
                    take_turn(self._process(group), course, self.given, directory, self.sizes)
                    self.steps.advance()
                    if is_last:
                        self.steps.now(f"single events, and the check of all totals: {a.name}")
                        take_events(self._process(group), course, self.given, directory, self.sizes)
                        self.steps.advance()
                except ContestantError as error:
                    self.left_out[a.name] = str(error)
                    self.steps.say(f"{a.name} is left out: {error}")
                    self._close()
                else:
                    of_core, of_second = (
                        ", ".join(f"{v:,.0f}" for v in of) for of in (course.per_core, course.per_second)
                    )
                    self.steps.say(f"{a.name}: {of_core} updates a CPU second, {of_second} a second")
        finally:
            self._close()

    def _process(self, group: Group) -> Running:
        """Return the group's process, a new one if it cannot start a second contestant."""
        if self._running is not None and not group.restartable:
            self._close()
        if self._running is None:
            log = self.root / f"{group.name}.log"
            self._running = Running(self.pythons[group.environment], group.program, log)
        return self._running

    def _close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
