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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from suite.runner import Steps

T = TypeVar("T")
FORMAT = 1
Size = dict[str, Any]
"""The sizes of a run: names of quantities, and their values; several values are a list."""
Turns = dict[str, list[list[float]]]
"""By contestant the figures of each of its turns."""
KEPT_RUNS = 5
"""Of runs on machines of one type with the same sizes, the newest of this number are kept."""
NUMBERS = re.compile(r"\[\s*(-?\d[^\[\]{}\"]*?)\s*\]")


@dataclass(frozen=True)
class Contestant:
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
    turns: Turns
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
    parts = {name: part_to_dict(part) for name, part in result.parts.items()}
    earlier = {name: [part_to_dict(run) for run in runs] for name, runs in result.earlier.items() if runs}
    data = {"format": FORMAT, "comparison": result.comparison, "parts": parts, "earlier": earlier}
    text = json.dumps(data, indent=1, ensure_ascii=False)
    return NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def from_json(text: str) -> Result:
    """Read what ``to_json`` has written. Raises ``ValueError`` for another format."""
    data = json.loads(text)
    if data.get("format") != FORMAT:
        raise ValueError(f"These results have format {data.get('format')!r}, not {FORMAT}; measure them again.")
    earlier = {name: tuple(map(part_from_dict, runs)) for name, runs in data.get("earlier", {}).items()}
    return Result(data["comparison"], {name: part_from_dict(part) for name, part in data["parts"].items()}, earlier)


def part_from_dict(data: Mapping[str, Any]) -> Part:
    contestants = {name: Contestant(**given) for name, given in data["contestants"].items()}
    cases, notes = tuple(Case(**case) for case in data["cases"]), tuple(data["notes"])
    return Part(**{**data, "contestants": contestants, "cases": cases, "notes": notes})


def part_to_dict(part: Part) -> dict[str, Any]:
    """Return one part for JSON. Figures have five digits: more is noise."""
    data = dataclasses.asdict(part)
    for case in data["cases"]:
        turns = case["turns"].items()
        case["turns"] = {name: [[float(f"{v:.5g}") for v in turn] for turn in its] for name, its in turns}
    data["memory"] = {role: round(mib) for role, mib in part.memory.items()}
    return data


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
    def at_most(what: str, case: str, contestant: str, limit: float, unit: str, environment: str = "venv") -> Target:
        """Return the target that a contestant's figure is at most so large."""
        return Target(what, case, contestant, limit, "value", unit=unit, environment=environment)


@dataclass(frozen=True)
class Judged:
    """A target, its measured value (None: not measured), whether that is enough, and the number of runs behind it."""

    target: Target
    found: Spread | None
    reached: bool | None
    runs: int = 0


Place = tuple[str, str, str]
"""A case, one of our contestants, and another one."""


def ratio(case: Case, contestant: str, other: str) -> Spread:
    """Return how many times as fast ``contestant`` is as ``other``, turn by turn."""
    pairs = zip(case.figures(contestant), case.figures(other), strict=False)
    return Spread.of([o / t if case.more_is_better else t / o for o, t in pairs])


def ratios(part: Part) -> dict[Place, Spread]:
    """Return the ratios of each of our contestants to each other one, in every case."""
    return {
        (case.name, ours, other): ratio(case, ours, other)
        for case in part.cases
        for ours, other in permutations(case.turns, 2)
        if part.contestants[ours].is_ours and not part.contestants[other].is_ours
    }


def judge(target: Target, runs: Sequence[Part]) -> Judged:
    """Judge a target by the worst of the kept runs."""
    spreads = [spread for run in runs if (spread := _found(target, run)) is not None]
    if not spreads:
        return Judged(target, None, None)
    worst = Spread.over(spreads, more_is_better=target.at_least)
    reached = worst.median >= target.limit if target.at_least else worst.median <= target.limit
    return Judged(target, worst, reached, len(spreads))


def _found(target: Target, part: Part) -> Spread | None:
    case, since = part.case(target.case), part.case(target.since or target.case)
    against = target.against or target.contestant
    if case is None or since is None or target.contestant not in since.turns:
        return None
    if not {target.contestant, against} <= case.turns.keys():
        return None
    figures = case.figures(target.contestant)
    if target.kind == "ratio":
        return ratio(case, target.contestant, against)
    if target.kind == "difference":
        return Spread.of([ours - theirs for ours, theirs in zip(figures, case.figures(against), strict=False)])
    if target.kind == "growth":
        usual = statistics.median(since.figures(target.contestant))  # turns of two cases are not close in time
        return Spread.of([value / usual for value in figures])
    return Spread.of(figures)


def kept_ratios(runs: Sequence[Part]) -> dict[Place, list[tuple[str, Spread]]]:
    """Return the ratios of the newest run, each in all runs that have it, with the type of the machine."""
    tables = [(run.machine_type, ratios(run)) for run in runs]
    newest = tables[0][1] if tables else {}
    return {place: [(kind, table[place]) for kind, table in tables if place in table] for place in newest}


def repeated(before: Result, part: Part) -> list[str]:
    """Return a line for each ratio of a part that kept runs on this type of machine have: is it within their range?"""
    runs = [r for r in before.runs(part.environment) if (r.machine_type, r.size) == (part.machine_type, part.size)]
    kept, lines = kept_ratios(runs), []
    for place, now in ratios(part).items():
        if place in kept:
            case, ours, other = place
            over = Spread.over([spread for _, spread in kept[place]])
            verdict = "within the range" if over.low <= now.median <= over.high else "outside the range"
            lines.append(
                f"{case}: {ours} {amount(now.median)} times as fast as {other}, {verdict} of {len(runs)} kept runs "
                f"({amount(over.low)} to {amount(over.high)})"
            )
    return lines


@dataclass(frozen=True)
class Slower:
    """A ratio that has become worse than noise explains. Two are equal if they are of the same place."""

    comparison: str
    environment: str
    case: str
    contestant: str
    other: str
    kept: Spread = field(compare=False)
    now: Spread = field(compare=False)

    @property
    def times(self) -> float:
        """Return how many times slower it is, relative to the other contestant."""
        return self.kept.median / self.now.median

    def __str__(self) -> str:
        return (
            f"{self.comparison} on {ENVIRONMENTS[self.environment]}, {self.case}: {self.contestant} was {self.kept} "
            f"times as fast as {self.other}, and is {self.now}: {self.times:.1f} times slower than kept."
        )


def slower(kept: Result, now: Result) -> list[Slower]:
    """Return what has become ``SLOWER`` times slower than kept, relative to the contestant of the comparison.

    A ratio is slower only if the new median is below all kept ratios, and all new ratios are below the kept median: a
    difference within the spread of either run is noise. Parts that failed, are not kept, or had other sizes are
    ignored.
    """
    found = []
    for environment, part in now.parts.items():
        old = kept.parts.get(environment)
        if old is None or old.failure or part.failure or old.size != part.size:
            continue
        before = ratios(old)
        for place, is_now in ratios(part).items():
            was = before.get(place, is_now)
            if is_now.median * SLOWER <= was.median and is_now.median < was.low and is_now.high < was.median:
                found.append(Slower(now.comparison, environment, *place, was, is_now))
    return found


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

    def size(self, kind: Kind, given: Mapping[str, list[str]]) -> Size:
        """Return the quantities of a run of this kind, with given quantities (as words) in place of the usual ones.

        Raises ``ValueError`` for a quantity that is unknown, has no value, or cannot be read.
        """
        size = dict(self.sizes[kind])
        for name, words in given.items():
            if name not in size:
                raise ValueError(f"{self.name} has no size {name!r}; it has {', '.join(size)}.")
            size[name] = _read(name, size[name], words)
        return size


def _read(name: str, usual: Any, words: list[str]) -> Any:
    if not words:
        raise ValueError(f"--{name} needs a value.")
    if isinstance(usual, list):
        kind = type(usual[0]) if usual else str
        return [_number(name, kind, word) for word in (words if len(words) > 1 else words[0].split(","))]
    if len(words) > 1:
        raise ValueError(f"--{name} takes one value, not {' '.join(words)!r}.")
    if isinstance(usual, bool):
        if words[0] not in ("true", "false"):
            raise ValueError(f"--{name} is true or false, not {words[0]!r}.")
        return words[0] == "true"
    return _number(name, type(usual), words[0])


def _number(name: str, kind: type, text: str) -> Any:
    try:
        return kind(text.replace("_", "") if kind is not str else text)
    except ValueError as error:
        raise ValueError(f"--{name} takes a value like {kind.__name__}, not {text!r}.") from error


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Return the items in the order of a turn: each turn begins with another one."""
    first = turn % len(items) if items else 0
    return [*items[first:], *items[:first]]
