"""The course of the contestants: turns of the same rows, each a start from the state of the turn before, then a check.

A turn's rows are in the input before the contestant starts; one that takes all of them as one batch gets those that
count when the warm-up is through. A turn's figures are of the time between two results: that of the last row of the
warm-up, and that of the turn's last row. So neither the start counts nor the stop.

After the last turn, the contestant starts again and writes its results to files. Single events, one after the other,
measure the time from a new row to its result. Then each user gets a row of the amount 0, whose results are the whole
state.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from alternatives import given as g
from alternatives.contestants import Alternative, Pace
from alternatives.cpu_time import seconds_between
from alternatives.results import Results, are_counted, check
from alternatives.running import ContestantError, Running

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
    return batches * g.SLICES, max(1, min(round(warm_up * share), batches - 1)) * g.SLICES


def take_turn(running: Running, course: Course, given: g.Given, directory: Path, sizes: Sizes) -> None:
    """Start the contestant, from its state if it has one, give it the rows of a turn, and stop it."""
    slices, warm_up = slices_of(course.alternative.pace, sizes.share)
    inbox = directory / "input"
    inbox.mkdir(parents=True, exist_ok=True)
    at_first = int(warm_up) if course.alternative.fed_twice else slices
    given.feed(inbox, course.fed, at_first)
    running.start(course.alternative.told, directory, collect=False, checkpoint_seconds=sizes.checkpoint_seconds)
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


def take_events(running: Running, course: Course, given: g.Given, directory: Path, sizes: Sizes) -> None:
    """Start the contestant with its results written down, time single events, and compare the whole state."""
    told, inbox = course.alternative.told, directory / "input"
    running.start(told, directory, collect=True, checkpoint_seconds=sizes.checkpoint_seconds)
    results, slice_, expected = Results(directory / "results"), len(given.counts), given.expected(course.fed)
    for i in range(EVENTS_BEFORE + sizes.events):
        user = given.keys + i
        for kind in ("result", "query") if course.alternative.is_ours else ("result",):
            began = time.perf_counter()
            n = expected.get(user, (0, 0))[0] + 1
            g.write(inbox, slice_, np.array([user]), np.array([n]))
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
    g.write(inbox, slice_, users, np.zeros(len(users), np.int64))
    expected = g.with_one_more(expected)
    results.wait(lambda found: expected.keys() <= found.keys(), SECONDS, running.check_alive)
    results.wait(lambda found: are_counted(found, expected), GRACE, running.check_alive)
    check(course.alternative.name, results.look(), expected)
    running.stop()
