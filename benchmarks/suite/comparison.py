"""The definition of a comparison, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from suite.model import Case, Contestant, Part, Size
from suite.progress import Steps
from suite.ratios import Target

VENV, VENV42 = "venv", "venv42"
ENVIRONMENTS = {VENV: "Spark 3.5", VENV42: "Spark 4.2"}
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
    picture: Literal["bars", "lines", ""] = ""
    x_label: str = ""
    command: str = ""
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
    """Read a value of the type of the usual one."""
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
