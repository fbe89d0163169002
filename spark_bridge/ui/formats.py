"""Values of state as the page writes them."""

from __future__ import annotations

import math
from datetime import date, datetime, timedelta
from typing import Any

MOST_CHARACTERS = 300
"""At most this many characters of a value are shown."""


def value(cell: Any) -> str:
    """Return a value of state as text, cut where it is long."""
    made = _value(cell)
    return made if len(made) <= MOST_CHARACTERS else f"{made[:MOST_CHARACTERS]}… ({len(made):,} characters)"


def _value(cell: Any) -> str:
    if cell is None:
        return "null"
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return repr(cell) if math.isfinite(cell) else {True: "NaN"}.get(math.isnan(cell), str(cell))
    if isinstance(cell, bytes):
        return f"0x{cell[:MOST_CHARACTERS].hex()}"
    if isinstance(cell, datetime):
        return cell.isoformat(sep=" ").replace("+00:00", "Z")
    if isinstance(cell, date | timedelta):
        return str(cell)
    if isinstance(cell, dict):
        if set(cell) == {"start", "end"} and all(isinstance(v, datetime) for v in cell.values()):
            return f"{_value(cell['start'])} – {_value(cell['end'])}"
        return "{" + ", ".join(f"{k}: {_value(v)}" for k, v in cell.items()) + "}"
    if isinstance(cell, list | tuple):
        return "[" + ", ".join(_value(v) for v in cell) + "]"
    return str(cell)
