"""All contestants in turns: which process runs which contestant when, and what becomes of one that fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from suite.progress import Steps

from alternatives.contestants import Alternative, Group
from alternatives.given import Given
from alternatives.running import ContestantError, Running
from alternatives.turns import Course, Sizes, take_events, take_turn

T = TypeVar("T")


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
                    self.steps.say(in_words(course))
        finally:
            self._close()

    def _process(self, group: Group) -> Running:
        """Return the group's process, a new one if it cannot start a second contestant."""
        if self._running is not None and not group.goes_on:
            self._close()
        if self._running is None:
            log = self.root / f"{group.name}.log"
            self._running = Running(self.pythons[group.environment], group.program, log)
        return self._running

    def _close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


def rotated(items: Sequence[T], by: int) -> list[T]:
    """Return the items, begun with another one in each turn."""
    return [*items[by % len(items) :], *items[: by % len(items)]]


def in_words(course: Course) -> str:
    """Return a contestant's figures so far."""
    cores, seconds = (", ".join(f"{v:,.0f}" for v in figures) for figures in (course.per_core, course.per_second))
    return f"{course.alternative.name}: {cores} updates a CPU second, {seconds} a second"
