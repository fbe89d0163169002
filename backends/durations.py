"""Durations as users write them: "10 minutes", "1 hour 30 minutes", "90s", "1h30m". No months, no years."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

SECOND, MINUTE, HOUR, DAY = 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000
"""In microseconds."""
_UNITS = {
    **dict.fromkeys(("us", "microsecond", "microseconds"), ("us", 1)),
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), ("ms", 1_000)),
    **dict.fromkeys(("s", "second", "seconds"), ("s", SECOND)),
    **dict.fromkeys(("m", "min", "minute", "minutes"), ("m", MINUTE)),
    **dict.fromkeys(("h", "hour", "hours"), ("h", HOUR)),
    **dict.fromkeys(("d", "day", "days"), ("d", DAY)),
    **dict.fromkeys(("w", "week", "weeks"), ("w", 7 * DAY)),
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


class Duration(NamedTuple):
    """A duration in microseconds, and its short spelling, such as "1h30m"."""

    us: Fraction
    name: str


def parse_duration(text: object) -> Duration | None:
    """Return the duration that a text says: numbers with units, one after the other. None if it says none above 0."""
    if not isinstance(text, str):
        return None
    us, name, end = Fraction(0), "", 0
    for match in _PART.finditer(text.lower()):
        unit = _UNITS.get(match[2])
        if match.start() != end or unit is None:
            return None
        short, length = unit
        us, name, end = us + Fraction(match[1]) * length, f"{name}{match[1]}{short}", match.end()
    return Duration(us, name) if us and end == len(text) else None
