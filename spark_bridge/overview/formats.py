"""Numbers, sizes, times and money for people, on the page and in the terminal. An unknown value is an empty text."""

from __future__ import annotations

from datetime import datetime, timezone


def size(nbytes: float | None) -> str:
    """Return a size in binary units."""
    if nbytes is None:
        return ""
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def number(value: float | None) -> str:
    """Return a number with thousands apart."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) or abs(value) < 10 else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Return a rate with the digits that say something."""
    return "" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def dollars(amount: float | None) -> str:
    """Return an amount of money: what a request costs is a fraction of a cent."""
    return "" if amount is None else f"${amount:,.2f}" if amount >= 1 else f"${amount:.6f}"


def duration(ms: float | None) -> str:
    """Return a duration in one unit, or in two from a minute on."""
    if ms is None:
        return ""
    if ms < 1000:
        return f"{ms:.0f} ms" if ms >= 10 or ms == int(ms) else f"{ms:.2g} ms"
    seconds = ms / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def moment(ms: int | None) -> str:
    """Return a moment in UTC."""
    if ms is None:
        return ""
    try:
        return datetime.fromtimestamp(ms / 1000, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms"
