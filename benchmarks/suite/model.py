"""The data of the suite: measurements and their JSON, ratios and targets, and the definition of a comparison.

A ``Result`` is what ``results/<comparison>.json`` keeps of one comparison: a ``Part`` for each environment that it ran
in, and the parts of earlier runs. A part has cases; a case is one piece of work that several contestants did in turns.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from suite.runner import Steps

T = TypeVar("T")
FORMAT = 1
Size = dict[str, Any]
"""The sizes of a run: names of quantities, and their values."""
KEPT_RUNS = 5
"""Of runs on machines of one type with the same sizes, the newest of this number are kept."""
NUMBERS = re.compile(r"\[\s*(-?\d[^\[\]{}\"]*?)\s*\]")


@dataclass(frozen=True)
class Contestant:
    """A contestant: its label, its settings, and whether it is this project's."""

    label: str
    settings: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False


@dataclass(frozen=True)
class Case:
    """One piece of work. ``turns[contestant][i]`` are the figures of the contestant's i-th turn, in ``unit``.

    The i-th turns of all contestants were close in time. Cases of one ``curve`` are points of a line at the places
    ``x``, as a plot shows them.
    """

    name: str
    unit: str
    turns: dict[str, list[list[float]]]
    more_is_better: bool = False
    curve: str = ""
    x: float | None = None

    def figures(self, contestant: str) -> list[float]:
        """Return one figure per turn: the median of the turn's figures."""
        return [statistics.median(turn) for turn in self.turns[contestant]]


@dataclass(frozen=True)
class Part:
    """The result of one run in one environment. If it failed, ``failure`` is the reason, and ``cases`` is empty.

    ``memory`` has the most MiB of the processes of each role, by looks every few seconds. Older parts have none.
    """

    environment: str
    kind: str
    size: Size
    day: str
    seconds: float
    versions: dict[str, str]
    machine: dict[str, str]
    contestants: dict[str, Contestant] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    notes: tuple[str, ...] = ()
    failure: str | None = None
    memory: dict[str, float] = field(default_factory=dict)

    def case(self, name: str) -> Case | None:
        """Return the case of that name; None if it was not measured."""
        return next((case for case in self.cases if case.name == name), None)

    @property
    def machine_type(self) -> str:
        """Return cores, processor and memory."""
        return f"{self.machine['cores']}, {self.machine['memory']}"


@dataclass(frozen=True)
class Result:
    """The newest part of each environment, and its earlier parts that succeeded, oldest first."""

    comparison: str
    parts: dict[str, Part]
    earlier: dict[str, tuple[Part, ...]] = field(default_factory=dict)

    def with_part(self, part: Part) -> Result:
        """Return the result with this part as the newest one of its environment."""
        of = part.environment
        before = (*self.earlier.get(of, ()), *([self.parts[of]] if of in self.parts else []))
        kept: list[Part] = []
        for run in reversed([run for run in before if run.failure is None]):
            alike = [k for k in (part, *kept) if (k.machine_type, k.size) == (run.machine_type, run.size)]
            if len([k for k in alike if k.failure is None]) < KEPT_RUNS:
                kept.insert(0, run)
        return Result(self.comparison, {**self.parts, of: part}, {**self.earlier, of: tuple(kept)})

    def runs(self, environment: str) -> list[Part]:
        """Return all kept runs with the sizes of the newest one that succeeded, newest first."""
        newest = [self.parts[environment]] if environment in self.parts else []
        runs = [run for run in (*newest, *reversed(self.earlier.get(environment, ()))) if run.failure is None]
        return [run for run in runs if run.size == runs[0].size]


def to_json(result: Result) -> str:
    """Return the JSON to keep: a turn's figures are on one line, so that a difference can be read."""
    parts = {name: json.loads(part_to_json(part)) for name, part in result.parts.items()}
    earlier = {name: [json.loads(part_to_json(run)) for run in runs] for name, runs in result.earlier.items() if runs}
    data = {"format": FORMAT, "comparison": result.comparison, "parts": parts, "earlier": earlier}
    text = json.dumps(data, indent=1, ensure_ascii=False)
    return _short_lists(text) + "\n"


def from_json(text: str) -> Result:
    """Read what ``to_json`` has written. Raises ``ValueError`` for another format."""
    data = json.loads(text)
    if data.get("format") != FORMAT:
        raise ValueError(f"These results have format {data.get('format')!r}, not {FORMAT}; measure them again.")
    earlier = {name: tuple(map(part_from_dict, runs)) for name, runs in data.get("earlier", {}).items()}
    return Result(data["comparison"], {name: part_from_dict(part) for name, part in data["parts"].items()}, earlier)


def part_from_dict(data: Mapping[str, Any]) -> Part:
    return Part(
        **{
            **data,
            "contestants": {name: Contestant(**given) for name, given in data["contestants"].items()},
            "cases": tuple(Case(**case) for case in data["cases"]),
            "notes": tuple(data["notes"]),
        }
    )


def part_to_json(part: Part) -> str:
    """Return one part as a JSON object. Figures have five digits: more is noise."""
    data = dataclasses.asdict(part)
    for case in data["cases"]:
        case["turns"] = {name: [[_rounded(v) for v in turn] for turn in turns] for name, turns in case["turns"].items()}
    data["memory"] = {role: round(mib) for role, mib in part.memory.items()}
    return json.dumps(data)


def load(directory: Path) -> dict[str, Result]:
    """Return all kept results, by comparison. Other programs keep their figures in the same directory."""
    texts = [path.read_text() for path in sorted(directory.glob("*.json"))]
    results = (from_json(text) for text in texts if "comparison" in json.loads(text))
    return {result.comparison: result for result in results}


def save(directory: Path, result: Result) -> None:
    """Write a result to its file, which appears as a whole."""
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f".{result.comparison}.draft"
    draft.write_text(to_json(result))
    draft.replace(directory / f"{result.comparison}.json")


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _short_lists(text: str) -> str:
    """Return JSON text with each list of numbers on one line."""
    return NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


# -- ratios and targets

SLOWER = 1.5


@dataclass(frozen=True)
class Spread:
    """A median, and the least and the greatest of its values."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))

    @staticmethod
    def over(spreads: Sequence[Spread], *, more_is_better: bool = True) -> Spread:
        """Return the worst median of several runs, with the range over all of them."""
        worst = (min if more_is_better else max)(s.median for s in spreads)
        return Spread(worst, min(s.low for s in spreads), max(s.high for s in spreads))

    def __str__(self) -> str:
        return f"{amount(self.median)} ({amount(self.low)} to {amount(self.high)})"


def amount(value: float) -> str:
    """Return a figure in three digits."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


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
    kind: Literal["ratio", "difference", "growth", "value"] = "ratio"
    against: str = ""
    since: str = ""
    at_least: bool = False
    environment: str = "venv"
    unit: str = ""

    @staticmethod
    def times(what: str, case: str, contestant: str, limit: float, against: str, environment: str = "venv") -> Target:
        """Return the target that a contestant is at least so many times as fast as another."""
        return Target(what, case, contestant, limit, against=against, at_least=True, environment=environment)

    @staticmethod
    def at_most(
        what: str, case: str, contestant: str, limit: float, unit: str = "", environment: str = "venv"
    ) -> Target:
        """Return the target that a contestant's figure is at most so large."""
        return Target(what, case, contestant, limit, "value", unit=unit, environment=environment)


@dataclass(frozen=True)
class Judged:
    """A target, its measured value (None: not measured), whether that is enough, and the number of runs behind it."""

    target: Target
    found: Spread | None
    reached: bool | None
    runs: int = 0


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


def judge(target: Target, runs: Sequence[Part]) -> Judged:
    """Judge a target by the worst of the kept runs."""
    spreads = [spread for run in runs if (spread := _found(target, run)) is not None]
    if not spreads:
        return Judged(target, None, None)
    worst = Spread.over(spreads, more_is_better=target.at_least)
    reached = worst.median >= target.limit if target.at_least else worst.median <= target.limit
    return Judged(target, worst, reached, len(spreads))


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
class KeptRatio:
    """A ratio over all kept runs of an environment: the medians of the runs by machine type, and the worst of them."""

    case: str
    contestant: str
    other: str
    medians: dict[str, list[float]]
    worst: Spread


def kept_ratios(runs: Sequence[Part]) -> list[KeptRatio]:
    """Return the ratios of the newest run, each over all runs that have it."""
    found = []
    tables = [(run.machine_type, {(c.name, ours, other): s for c, ours, other, s in ratios(run)}) for run in runs]
    for key in tables[0][1] if tables else ():
        medians: dict[str, list[float]] = {}
        for machine_type, table in tables:
            if key in table:
                medians.setdefault(machine_type, []).append(table[key].median)
        found.append(KeptRatio(*key, medians, Spread.over([table[key] for _, table in tables if key in table])))
    return found


def repeated(before: Result, part: Part) -> list[str]:
    """Return a line for each ratio of a part that kept runs on this type of machine have: is it within their range?"""
    kept = [r for r in before.runs(part.environment) if (r.machine_type, r.size) == (part.machine_type, part.size)]
    now = {(case.name, ours, other): spread for case, ours, other, spread in ratios(part)}
    lines = []
    for ratio_before in kept_ratios(kept):
        spread = now.get((ratio_before.case, ratio_before.contestant, ratio_before.other))
        if spread is None:
            continue
        low, high = ratio_before.worst.low, ratio_before.worst.high
        verdict = "within the range" if low <= spread.median <= high else "outside the range"
        lines.append(
            f"{ratio_before.case}: {ratio_before.contestant} {amount(spread.median)} times as fast as "
            f"{ratio_before.other}, {verdict} of {len(kept)} kept runs ({amount(low)} to {amount(high)})"
        )
    return lines


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

    def __str__(self) -> str:
        return (
            f"{self.comparison} on {ENVIRONMENTS[self.environment]}, {self.case}: {self.contestant} was {self.kept} "
            f"times as fast as {self.other}, and is {self.now}: {self.times:.1f} times slower than kept."
        )


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


# -- the definition of a comparison

VENV, VENV42, VENV43 = "venv", "venv42", "venv43"
ENVIRONMENTS = {VENV: "Spark 3.5", VENV42: "Spark 4.2", VENV43: "Spark 4.3"}
Kind = Literal["smoke", "full"]


@dataclass
class Measured:
    """The measurements of ``run``. Notes are sentences for the report: how results were compared, cases left out."""

    contestants: dict[str, Contestant] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Table:
    """A table of a comparison's own, in place of one line for each case and contestant: its heading, and its lines."""

    heading: Sequence[str]
    lines: Callable[[Part], Sequence[Sequence[str]]]


@dataclass(frozen=True)
class Comparison:
    """One comparison of the suite.

    ``run`` gets a size and a place to report its steps to. It runs in its own process, with the interpreter of one of
    ``environments``. It lets its contestants take turns, and raises unless their results are equal, before it returns a
    figure.

    ``sizes`` has the quantities of a smoke run and of a full one; each can be given on the command line. ``minutes`` is
    how long a run may take. ``in_smoke``: whether ``make bench-smoke`` runs it, in the first of its environments.
    ``picture`` is how the cases are drawn: "bars", "lines" (along ``Case.x``), or not at all. ``table`` shows
    the cases in the comparison's own way; a page of the docs can take the table from ``RESULTS.md`` by the marks around
    it.
    """

    name: str
    title: str
    about: str
    run: Callable[[Size, Steps], Measured]
    sizes: Mapping[Kind, Size]
    minutes: Mapping[Kind, float]
    environments: tuple[str, ...] = (VENV,)
    targets: tuple[Target, ...] = ()
    in_smoke: bool = True
    picture: Literal["bars", "lines", ""] = "bars"
    x_label: str = ""
    table: Table | None = None

    def runs_in(self, kind: Kind, wanted: str | None) -> list[str]:
        """Return the environments of a run: the wanted one if it has it; else all, or in a smoke run the first."""
        if wanted is not None:
            return [e for e in self.environments if e == wanted]
        return list(self.environments if kind == "full" else self.environments[:1])

    def size(self, kind: Kind, given: Mapping[str, str | list[str]]) -> Size:
        """Return the quantities of a run of this kind, with given quantities (as text) in place of the usual ones.

        Raises ``ValueError`` for a quantity that is unknown or cannot be read.
        """
        size = dict(self.sizes[kind])
        for name, text in given.items():
            if name not in size:
                raise ValueError(f"{self.name} has no size {name!r}; it has {', '.join(size)}.")
            size[name] = _read(name, size[name], text)
        return size


def _read(name: str, usual: Any, text: str | list[str]) -> Any:
    if isinstance(usual, (list, tuple)):
        kind = type(usual[0]) if usual else str
        values = text if isinstance(text, list) else text.split(",")
        return [_number(name, kind, value) for value in values]
    if isinstance(text, list):
        raise ValueError(f"--{name} takes one value, not {' '.join(text)!r}.")
    if isinstance(usual, bool):
        if text not in ("true", "false"):
            raise ValueError(f"--{name} is true or false, not {text!r}.")
        return text == "true"
    return _number(name, type(usual), text)


def _number(name: str, kind: type, text: str) -> Any:
    try:
        return kind(text.replace("_", "") if kind is not str else text)
    except ValueError as error:
        raise ValueError(f"--{name} takes a value like {kind.__name__}, not {text!r}.") from error


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Return the items in the order of a turn: each turn begins with another one."""
    first = turn % len(items) if items else 0
    return [*items[first:], *items[:first]]
