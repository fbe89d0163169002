"""The table of the report: a contestant a line, the fastest first."""

from __future__ import annotations

from collections.abc import Sequence

from suite.model import Part
from suite.ratios import Spread, ratio
from suite.svg import amount

PER_CORE = "updates a second and core"
PER_SECOND = "updates a second on two cores"
TO_RESULT = "one event, to its result"
TO_QUERY = "one event, to a value that can be queried"
AGAINST = "aggregate"
HEADING = (
    "contestant",
    "what it is",
    "updates a second and core",
    f"`{AGAINST}` is so many times as fast",
    "updates a second, 2 cores",
    "one event: ms to its result",
    "ms to a value that can be queried",
)


def rows(part: Part) -> list[Sequence[str]]:
    """Return the lines of the table below ``HEADING``."""
    per_core = part.case(PER_CORE)
    if per_core is None:
        return []
    names = sorted(per_core.turns, key=lambda name: -Spread.of(per_core.figures(name)).median)
    made = []
    for name in names:
        contestant = part.contestants[name]
        times = "" if name == AGAINST or AGAINST not in per_core.turns else _spread(ratio(per_core, AGAINST, name))
        queried = _figure(part, TO_QUERY, name)
        made.append(
            (
                f"**{name}**" if contestant.is_ours else name,
                contestant.label,
                _figure(part, PER_CORE, name),
                times,
                _figure(part, PER_SECOND, name),
                _figure(part, TO_RESULT, name),
                queried or ("" if contestant.is_ours else "none"),
            )
        )
    return made


def _figure(part: Part, case: str, name: str) -> str:
    found = part.case(case)
    return _spread(Spread.of(found.figures(name))) if found is not None and name in found.turns else ""


def _spread(spread: Spread) -> str:
    return f"{amount(spread.median)} ({amount(spread.low)} to {amount(spread.high)})"
