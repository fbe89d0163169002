"""The measurements of a comparison, as plain data that goes to JSON and back.

A ``Result`` is what is kept of one comparison in ``results/<comparison>.json``: one ``Part`` for each environment that
it ran in. A part has cases; a case is one piece of work that several contestants did in turns.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
Size = dict[str, Any]
"""The sizes of a run: names of quantities, and their values."""
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
    """The result of one run in one environment. If it failed, ``failure`` is the reason, and ``cases`` is empty."""

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

    def case(self, name: str) -> Case | None:
        """Return the case of that name; None if it was not measured."""
        return next((case for case in self.cases if case.name == name), None)


@dataclass(frozen=True)
class Result:
    """All kept results of a comparison, by environment."""

    comparison: str
    parts: dict[str, Part]

    def with_part(self, part: Part) -> Result:
        """Return the result with this part in place of the part of the same environment."""
        return Result(self.comparison, {**self.parts, part.environment: part})


def to_json(result: Result) -> str:
    """Return the JSON to keep: a turn's figures are on one line, so that a difference can be read."""
    parts = {name: json.loads(part_to_json(part)) for name, part in result.parts.items()}
    data = {"format": FORMAT, "comparison": result.comparison, "parts": parts}
    text = json.dumps(data, indent=1, ensure_ascii=False)
    return _short_lists(text) + "\n"


def from_json(text: str) -> Result:
    """Read what ``to_json`` has written. Raises ``ValueError`` for another format."""
    data = json.loads(text)
    if data.get("format") != FORMAT:
        raise ValueError(f"These results have format {data.get('format')!r}, not {FORMAT}; measure them again.")
    return Result(data["comparison"], {name: part_from_dict(part) for name, part in data["parts"].items()})


def part_from_dict(data: Mapping[str, Any]) -> Part:
    """Return a part from its JSON object."""
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
