"""Ratios of measurements with their spread, targets reached, and ratios that have become slower."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from suite.model import Case, Part, Result

Kind = Literal["ratio", "difference", "growth", "value"]
SLOWER = 1.5


@dataclass(frozen=True)
class Spread:
    """A median, and the least and the greatest of its values."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the spread of one value per turn."""
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Target:
    """A limit that the project has set itself.

    - "ratio": how many times as fast ``contestant`` is as ``against``;
    - "difference": its figure minus that of ``against``;
    - "growth": its figure in ``case`` divided by that in the case ``since``;
    - "value": its figure.

    ``at_least`` says whether ``limit`` is the least or the most that is right.
    """

    what: str
    case: str
    contestant: str
    limit: float
    kind: Kind = "ratio"
    against: str = ""
    since: str = ""
    at_least: bool = False
    environment: str = "venv"
    unit: str = ""


@dataclass(frozen=True)
class Judged:
    """A target, its measured value (None: not measured), and whether that is enough."""

    target: Target
    found: Spread | None
    reached: bool | None


def ratio(case: Case, contestant: str, other: str) -> Spread:
    """Return how many times as fast ``contestant`` is as ``other``, turn by turn."""
    ours, theirs = case.figures(contestant), case.figures(other)
    pairs = list(zip(ours, theirs, strict=False))
    return Spread.of([o / t if case.more_is_better else t / o for o, t in pairs])


def ratios(part: Part) -> Iterator[tuple[Case, str, str, Spread]]:
    """Return the ratios of each of our contestants to each other one, in every case."""
    for case in part.cases:
        for ours in case.turns:
            for other in case.turns:
                if part.contestants[ours].is_ours and not part.contestants[other].is_ours:
                    yield case, ours, other, ratio(case, ours, other)


def judge(target: Target, part: Part | None) -> Judged:
    """Judge by the median whether a target is reached."""
    found = None if part is None else _found(target, part)
    if found is None:
        return Judged(target, None, None)
    reached = found.median >= target.limit if target.at_least else found.median <= target.limit
    return Judged(target, found, reached)


def _found(target: Target, part: Part) -> Spread | None:
    case = part.case(target.case)
    if case is None or target.contestant not in case.turns:
        return None
    if target.kind == "value":
        return Spread.of(case.figures(target.contestant))
    if target.kind == "growth":
        since = part.case(target.since)
        if since is None or target.contestant not in since.turns:
            return None
        return _growth(since.figures(target.contestant), case.figures(target.contestant))
    if target.against not in case.turns:
        return None
    if target.kind == "ratio":
        return ratio(case, target.contestant, target.against)
    pairs = zip(case.figures(target.contestant), case.figures(target.against), strict=False)
    return Spread.of([ours - theirs for ours, theirs in pairs])


def _growth(before: list[float], after: list[float]) -> Spread:
    """Return ratios to the median of earlier turns, as these turns are not close in time."""
    usual = statistics.median(before)
    return Spread.of([value / usual for value in after])


@dataclass(frozen=True)
class Slower:
    """A ratio that has become worse than noise explains."""

    comparison: str
    environment: str
    case: str
    contestant: str
    other: str
    kept: Spread
    now: Spread

    @property
    def times(self) -> float:
        """Return how many times slower it is, relative to the other contestant."""
        return self.kept.median / self.now.median


def slower(kept: Result, now: Result, times: float = SLOWER) -> list[Slower]:
    """Return what has become ``times`` slower than the kept result, relative to the contestant of the comparison.

    A ratio is slower only if the new median is below all kept ratios, and all new ratios are below the kept median: a
    difference within the spread of either run is noise. Parts that failed, are not kept, or had other sizes are
    ignored.
    """
    found = []
    for environment, part in now.parts.items():
        old = kept.parts.get(environment)
        if old is None or old.failure or part.failure or old.size != part.size:
            continue
        before = {(case.name, ours, other): spread for case, ours, other, spread in ratios(old)}
        for case, ours, other, spread in ratios(part):
            was = before.get((case.name, ours, other))
            if was is not None and _is_slower(was, spread, times):
                found.append(Slower(now.comparison, environment, case.name, ours, other, was, spread))
    return found


def in_both(first: list[Slower], second: list[Slower]) -> list[Slower]:
    """Return what two runs found slower, as the second measured it: a busy moment does not come twice in one place."""
    places = {(s.comparison, s.environment, s.case, s.contestant, s.other) for s in first}
    return [s for s in second if (s.comparison, s.environment, s.case, s.contestant, s.other) in places]


def _is_slower(kept: Spread, now: Spread, times: float) -> bool:
    return now.median * times <= kept.median and now.median < kept.low and now.high < kept.median
