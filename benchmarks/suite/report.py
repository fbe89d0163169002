"""``RESULTS.md`` and its plots, made of the kept results alone: the same results give the same text."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.model import (
    ENVIRONMENTS,
    Case,
    Comparison,
    Contestant,
    Judged,
    Part,
    Result,
    Spread,
    amount,
    judge,
    kept_ratios,
    ratios,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WHOLE_RUN = "whole-run.json"

HEAD = """# Results

Made by `make bench`; the raw figures are in [`results/`](results). `make bench ARGS="NAME"` measures one comparison
again and replaces its part here, and each size can be given: `make bench ARGS="throughput --keys 1000000"`.
`make bench-list` names them all.

Contestants take turns in one run on the same kind of cluster, each turn beginning with another one. A figure is the
median of a contestant's turns, a ratio the median of the ratios turn by turn, with the least and the greatest in
brackets. "Times as fast" is above 1 where ours is faster. No figure is given unless the results of all contestants
were equal.

The last five runs on each type of machine are kept. Targets are judged by the worst median of all kept runs, with the
range over them.
"""
OURS, OTHERS, INK = "#1f6fb2", "#9aa5b1", "#24292f"
MAX_LINEAR_RATIO = 30
PIECES = (
    "The parts were measured at different times: each has its date and its commit. `make bench` makes all in one go."
)


def render(
    comparisons: Mapping[str, Comparison],
    results: Mapping[str, Result],
    remarks: Mapping[str, str] | None = None,
    whole_run: WholeRun | None = None,
) -> str:
    """Return the content of ``RESULTS.md``. ``remarks`` are written by hand, by the name of the comparison."""
    made = PIECES if whole_run is None else whole_run.sentence()
    sections = [HEAD, f"{made}\n", "## Targets\n", *_targets(comparisons, results)]
    for name, comparison in comparisons.items():
        sections += _section(comparison, results.get(name))
        if remarks and name in remarks:
            sections += ["### Remarks\n", remarks[name].strip() + "\n"]
    return "\n".join(sections)


def plots(comparisons: Mapping[str, Comparison], results: Mapping[str, Result]) -> dict[str, str]:
    """Return SVG by file name, for each part that a picture explains better than a table."""
    found = {}
    for name, comparison in comparisons.items():
        for part in _parts(comparison, results.get(name)):
            if part.failure is None and (picture := _picture(comparison, part)):
                found[_plot_name(comparison, part)] = picture
    return found


def _targets(comparisons: Mapping[str, Comparison], results: Mapping[str, Result]) -> list[str]:
    rows = []
    for name, comparison in comparisons.items():
        for target in comparison.targets:
            result = results.get(name)
            judged = judge(target, [] if result is None else result.runs(target.environment))
            rows.append((target.what, f"[{name}](#{name})", *_judged(judged)))
    return [_table(("target", "comparison", "limit", "measured", ""), rows), ""]


def _judged(judged: Judged) -> tuple[str, str, str]:
    """Return the limit, what was measured, and the verdict."""
    target, found, is_factor = judged.target, judged.found, judged.target.kind in ("ratio", "growth")
    unit = " times" if is_factor else f" {target.unit}".rstrip()
    limit = f"{'at least' if target.at_least else 'at most'} {amount(target.limit)}{unit}"
    if found is None:
        return limit, "not measured", "-"
    measured = f"{found}{unit}{f', {judged.runs} runs' if judged.runs > 1 else ''}"
    if judged.reached:
        return limit, measured, "reached"
    low, high = sorted((found.median, target.limit))
    away = f"{amount(high / low)} times away" if is_factor else f"by {amount(high - low)}{unit}"
    return limit, measured, f"**not reached**: {away}"


# -- a comparison


def _parts(comparison: Comparison, result: Result | None) -> list[Part]:
    """Return the kept parts, in the order of the environments."""
    return [] if result is None else [result.parts[e] for e in comparison.environments if e in result.parts]


def _section(comparison: Comparison, result: Result | None) -> list[str]:
    lines = [f"## {comparison.name}\n", f"{comparison.title}. {comparison.about}\n"]
    parts = _parts(comparison, result)
    if not parts:
        return [*lines, *_marked(comparison, "Not measured yet.")]
    for part in parts:
        if len(comparison.environments) > 1:
            lines.append(f"### {comparison.name} on {ENVIRONMENTS[part.environment]}\n")
        if part.failure is not None:
            lines += _marked(comparison, f"**Failed** on {part.day} after {part.seconds:.0f} s: {_cell(part.failure)}")
        else:
            if _picture(comparison, part):
                lines.append(f"![{comparison.title}](results/{_plot_name(comparison, part)})\n")
            lines += [*_figures(comparison, part), *(f"- {note}" for note in part.notes), *[""] * bool(part.notes)]
            lines += [_settings(part.contestants), ""]
        lines += _circumstances(comparison, part)
        lines += _all_runs(result.runs(part.environment) if result is not None else [])
    return lines


def _all_runs(runs: Sequence[Part]) -> list[str]:
    """Return the ratios over all kept runs; nothing for a single run."""
    if len(runs) < 2:
        return []
    types = Counter(run.machine_type for run in runs)
    columns = (f"{one}: {count} run{'s' if count > 1 else ''}" for one, count in types.items())
    heading = ("case", "times as fast as", "worst median (range of all turns)", *columns)
    rows = [
        (
            *(case, f"{ours} / {other}", str(Spread.over([spread for _, spread in kept]))),
            *(_medians([spread.median for kind, spread in kept if kind == one]) for one in types),
        )
        for (case, ours, other), kept in kept_ratios(runs).items()
    ]
    return ["Medians of all kept runs:\n", _table(heading, rows), ""]


def _medians(medians: Sequence[float]) -> str:
    if not medians:
        return "-"
    low, high = amount(min(medians)), amount(max(medians))
    return low if low == high else f"{low} to {high}"


def _marked(comparison: Comparison, text: str) -> list[str]:
    """Return text, between marks for the pages of the docs if the comparison has its own table."""
    if comparison.table is None:
        return [f"{text}\n"]
    return [f"<!-- table of {comparison.name} -->\n", text, f"\n<!-- end of the table of {comparison.name} -->\n"]


def _figures(comparison: Comparison, part: Part) -> list[str]:
    if comparison.table is not None:
        return _marked(comparison, _table(comparison.table.heading, comparison.table.lines(part)))
    table = ratios(part)
    compared = {other for _, _, other in table}
    others = [name for name in part.contestants if name in compared]
    heading = ("case", "contestant", "median", "min to max", "turns", *(f"times as fast as {n}" for n in others))
    rows = []
    for case in part.cases:
        for i, name in enumerate(case.turns):
            spread = Spread.of(case.figures(name))
            label = f"**{name}**" if part.contestants[name].is_ours else name
            least_and_most = f"{amount(spread.low)} to {amount(spread.high)}"
            times = [str(table.get((case.name, name, other), "")) for other in others]
            what = [case.name if i == 0 else "", label, f"{amount(spread.median)} {case.unit}", least_and_most]
            rows.append([*what, str(len(case.turns[name])), *times])
    return [_table(heading, rows), ""]


def _settings(contestants: Mapping[str, Contestant]) -> str:
    rows = [
        (name, c.label, ", ".join(f"`{k}={v}`" if v else f"`{k}`" for k, v in c.settings.items()) or "defaults")
        for name, c in contestants.items()
    ]
    return _table(("contestant", "what it is", "settings"), rows)


def _circumstances(comparison: Comparison, part: Part) -> list[str]:
    size = ", ".join(f"{name} {_size(value)}" for name, value in part.size.items())
    versions = ", ".join(f"{name} {version}" for name, version in part.versions.items()) or "not known"
    machine = f"{part.machine['cores']}; {part.machine['memory']}; load {part.machine['load']} at the start"
    command = f'make bench ARGS="{_arguments(comparison, part)}"'
    memory = ", ".join(f"{role} {mib:,.0f}" for role, mib in sorted(part.memory.items()))
    keys = part.size.get("keys")
    of_keys = f", with {keys:,} keys" if isinstance(keys, int) else ""
    return [
        f"Size: {size}.  ",
        f"Versions: {versions}.  ",
        f"Machine: cores {machine}.  ",
        *([f"Memory at most, in MiB by role, of looks every five seconds{of_keys}: {memory}.  "] if memory else []),
        f"Measured on {part.day}, in {part.seconds:.0f} s. Repeat it with `{command}`.\n",
    ]


def _arguments(comparison: Comparison, part: Part) -> str:
    words = [comparison.name]
    if len(comparison.environments) > 1:
        words.append(f"--environment {part.environment}")
    usual = comparison.sizes["full"]
    for name, value in part.size.items():
        if name in usual and value != usual[name]:
            values = value if isinstance(value, list) else [value]
            given = (str(v).lower() if isinstance(v, bool) else str(v) for v in values)
            words.append(f"--{name.replace('_', '-')} {' '.join(given)}")
    return " ".join(words)


def _size(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_size, value))
    return f"{value:,}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


# -- pictures


def _plot_name(comparison: Comparison, part: Part) -> str:
    return f"{comparison.name}{'' if len(comparison.environments) == 1 else f'-{part.environment}'}.svg"


def _picture(comparison: Comparison, part: Part) -> str:
    """Return the plot of a part as SVG; "" if it has none."""
    where = f", {ENVIRONMENTS[part.environment]}" if len(comparison.environments) > 1 else ""
    title = f"{comparison.title}{where}"
    if comparison.picture == "lines":
        cases = [case for case in part.cases if case.x is not None]
        if len({case.x for case in cases}) < 2:
            return ""
        points: dict[str, list[tuple[float, Spread]]] = {}
        for case in cases:
            for name in case.turns:
                label = f"{name}, {case.curve}" if case.curve else name
                points.setdefault(label, []).append((case.x or 0.0, Spread.of(case.figures(name))))
        return lines(title, cases[0].unit, comparison.x_label, points)
    # Figures of different units have no axis in common; the first is what the comparison is about.
    cases = [case for case in part.cases if case.unit == part.cases[0].unit]
    return bars(title, cases, part.contestants) if comparison.picture == "bars" and cases else ""


def bars(title: str, cases: Sequence[Case], contestants: Mapping[str, Contestant]) -> str:
    """Draw a horizontal bar with its spread for each contestant of each case, and return the SVG."""
    axes = _axes(title, 1.2 + 0.3 * sum(len(case.turns) + 1 for case in cases))
    place, spreads = 0, list[Spread]()
    ticks: dict[int, str] = {}
    for case in cases:
        if len(cases) > 1:
            axes.text(0, place, f" {case.name}", transform=axes.get_yaxis_transform(), weight="bold", va="center")
            place += 1
        for name in case.turns:
            spreads.append(s := Spread.of(case.figures(name)))
            axes.barh(place, s.median, color=OURS if contestants[name].is_ours else OTHERS)
            axes.hlines(place, s.low, s.high, color=INK)
            axes.annotate(amount(s.median), (s.high, place), (5, 0), textcoords="offset points", va="center")
            ticks[place] = name
            place += 1
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylim(place - 0.4, -0.6)
    axes.margins(x=0.12)
    is_log = _scale(axes.set_xscale, spreads)
    axes.set_xlabel(_axis_label(cases[0].unit, is_log))
    return _svg(axes)


def lines(
    title: str, unit: str, x_label: str, points: Mapping[str, Sequence[tuple[float, Spread]]], *, is_time: bool = False
) -> str:
    """Draw a line with spreads for each label over a logarithmic x axis, and return the SVG.

    With ``is_time`` the x axis is linear from zero, and figures are single values without a spread.
    """
    axes = _axes(title, 4.0)
    for label, places in points.items():
        xs, spreads = zip(*sorted(places), strict=True)
        (line,) = axes.plot(xs, [s.median for s in spreads], marker=None if is_time else "o", label=label)
        if not is_time:
            axes.vlines(xs, [s.low for s in spreads], [s.high for s in spreads], color=line.get_color())
    is_log = _scale(axes.set_yscale, [s for places in points.values() for _, s in places])
    if is_time:
        axes.set_xlim(left=0)
    else:
        axes.set_xscale("log")
        xs = sorted({x for places in points.values() for x, _ in places})
        axes.set_xticks(xs, [amount(x) for x in xs])
        axes.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel(unit if is_time and not is_log else _axis_label(unit, is_log))
    axes.legend()
    return _svg(axes)


def _axes(title: str, height: float) -> Axes:
    from matplotlib.figure import Figure  # only the parent of the suite draws, and the measured programs do not need it

    axes: Axes = Figure(figsize=(9, height), layout="constrained").add_subplot()
    axes.set_title(title, loc="left", weight="bold")
    return axes


def _scale(set_scale: Any, spreads: Sequence[Spread]) -> bool:
    """Make an axis logarithmic if its figures differ more than 30 times; return whether it is."""
    medians = [s.median for s in spreads]
    is_log = min(s.low for s in spreads) > 0 and max(medians) > MAX_LINEAR_RATIO * min(medians)
    if is_log:
        set_scale("log")
    return is_log


def _axis_label(unit: str, is_log: bool) -> str:
    return f"{unit}, medians, with minimum and maximum{'; logarithmic scale' if is_log else ''}"


def _svg(axes: Axes) -> str:
    """Return the figure as SVG with text as text. The same data gives the same bytes."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "statestore"}):
        axes.figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(_cell(text) for text in line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


# -- the record of the last run of all comparisons


@dataclass(frozen=True)
class WholeRun:
    """A run of all comparisons: its begin, commit and seconds, and the comparisons measured again afterwards.

    ``again`` has names of comparisons with their environments, such as ``throughput on Spark 3.5``.
    """

    began: str
    commit: str
    seconds: float
    again: tuple[str, ...] = ()

    def sentence(self) -> str:
        minutes = round(self.seconds / 60)
        took = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
        again = f" Measured again since: {', '.join(self.again)}; each part has its date and commit." * bool(self.again)
        return f"Made in one go on {self.began} (UTC), commit {self.commit}, in {took}.{again}"

    @staticmethod
    def load(directory: Path) -> WholeRun | None:
        """Return the record; None if the kept results were not made in one go."""
        path = directory / WHOLE_RUN
        if not path.exists():
            return None
        data = json.loads(path.read_text())
        return WholeRun(**{**data, "again": tuple(data["again"])})

    def save(self, directory: Path) -> None:
        (directory / WHOLE_RUN).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def record_again(directory: Path, parts: Collection[str]) -> None:
        """Add parts that have been measured again to the record, if there is one."""
        if (run := WholeRun.load(directory)) is not None:
            replace(run, again=tuple(dict.fromkeys((*run.again, *parts)))).save(directory)
