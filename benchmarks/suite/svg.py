"""Plots as SVG: bars with their spread, and lines over a logarithmic axis. The same data gives the same bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from suite.ratios import Spread

WIDTH, BAR, GAP, LEFT, RIGHT, TOP = 760, 20, 8, 250, 110, 44
OURS, OTHERS, INK, FAINT = "#1f6fb2", "#9aa5b1", "#24292f", "#d0d7de"
COLOURS = ("#1f6fb2", "#d1672c", "#3b8f4a", "#8a5fbf", "#6e7781", "#b5322f")
STYLE = 'font-family="system-ui, sans-serif" font-size="12"'


@dataclass(frozen=True)
class Bar:
    """One contestant's figure. Bars of one group stand together."""

    group: str
    label: str
    spread: Spread
    is_ours: bool


@dataclass(frozen=True)
class Line:
    """One contestant's figures along an axis: (x, figure)."""

    label: str
    points: tuple[tuple[float, Spread], ...]


def bars(title: str, unit: str, items: Sequence[Bar]) -> str:
    """Draw horizontal bars from zero; on a logarithmic scale from a round number if they differ more than 30 times."""
    groups = list(dict.fromkeys(bar.group for bar in items))
    named = [group for group in groups if group]
    height = TOP + len(items) * (BAR + GAP) + len(named) * 24 + 40
    scale = _Scale.of([bar.spread for bar in items], LEFT, WIDTH - RIGHT)
    body, y = [], float(TOP)
    for tick in scale.ticks:
        x = scale(tick)
        body.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{height - 34}" stroke="{FAINT}"/>')
        body.append(_text(x, height - 18, amount(tick), anchor="middle"))
    for group in groups:
        if group:
            body.append(_text(8, y + 16, group, weight="bold"))
            y += 24
        for bar in (bar for bar in items if bar.group == group):
            end, middle = scale(bar.spread.median), y + BAR / 2
            colour = OURS if bar.is_ours else OTHERS
            body.append(_text(LEFT - 8, y + 14, bar.label, anchor="end"))
            body.append(
                f'<rect x="{LEFT}" y="{y:.1f}" width="{max(end - LEFT, 1):.1f}" height="{BAR}" fill="{colour}"/>'
            )
            low, high = scale(bar.spread.low), scale(bar.spread.high)
            body.append(f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}" stroke="{INK}" stroke-width="1.5"/>')
            body += [f'<path d="M{x:.1f} {middle - 4:.1f}v8" stroke="{INK}" stroke-width="1.5"/>' for x in (low, high)]
            body.append(_text(max(high, end) + 8, y + 14, amount(bar.spread.median)))
            y += BAR + GAP
    return _page(title, _subtitle(unit, scale), height, body)


def lines(title: str, unit: str, x_label: str, items: Sequence[Line], *, is_time: bool = False) -> str:
    """Draw lines over a logarithmic x axis, y from zero (logarithmic if they differ more than 30 times).

    With ``is_time`` the x axis begins at zero and is linear, and figures are what they are, not medians.
    """
    height, bottom, left, right = 380, 310, 70, WIDTH - 190
    xs = sorted({x for line in items for x, _ in line.points})
    across = _Scale.of([Spread(x, x, x) for x in xs], left, right, is_log=not is_time)
    up = _Scale.of([spread for line in items for _, spread in line.points], bottom, TOP + 10)
    body = []
    for tick in up.ticks:
        y = up(tick)
        body.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="{FAINT}"/>')
        body.append(_text(left - 8, y + 4, amount(tick), anchor="end"))
    body += [_text(across(x), bottom + 20, amount(x), anchor="middle") for x in (across.ticks if is_time else xs)]
    body.append(_text((left + right) / 2, bottom + 42, x_label, anchor="middle"))
    ends: list[float] = []
    for i, line in enumerate(items):
        colour = COLOURS[i % len(COLOURS)]
        places = [(across(x), up(s.median), up(s.low), up(s.high)) for x, s in sorted(line.points)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y, *_ in places)
        body.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y, low, high in places:
            body.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{colour}"/>')
            body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
        end = places[-1][1] + 4
        while any(abs(end - other) < 14 for other in ends):
            end += 2  # labels do not lie over each other
        ends.append(end)
        body.append(_text(right + 12, end, line.label, colour=colour))
    log = "logarithmic scale" if up.is_log else ""
    subtitle = ", ".join(part for part in (unit, log) if part) if is_time else _subtitle(unit, up)
    return _page(title, subtitle, height, body)


def amount(value: float) -> str:
    """Return a figure in three digits."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class _Scale:
    """From figures to places."""

    def __init__(self, low: float, high: float, start: float, end: float, is_log: bool) -> None:
        self._low, self._high, self._start, self._end, self.is_log = low, high, start, end, is_log

    @staticmethod
    def of(spreads: Sequence[Spread], start: float, end: float, is_log: bool | None = None) -> _Scale:
        most = max(s.high for s in spreads)
        least = min(s.low for s in spreads)
        if is_log is None:
            is_log = least > 0 and max(s.median for s in spreads) > 30 * min(s.median for s in spreads)
        if is_log:
            low, high = 10.0 ** math.floor(math.log10(least)), 10.0 ** math.ceil(math.log10(most))
            return _Scale(low, high if high > low else low * 10, start, end, True)
        step = _round_step((most or 1.0) / 5)
        return _Scale(
            min(0.0, step * math.floor(least / step)), step * math.ceil((most or 1.0) / step), start, end, False
        )

    def __call__(self, value: float) -> float:
        low, high = self._low, self._high
        if self.is_log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        return self._start + (value - low) / (high - low) * (self._end - self._start)

    @property
    def ticks(self) -> list[float]:
        """Return round numbers along the axis."""
        if self.is_log:
            return [self._low * 10.0**i for i in range(round(math.log10(self._high / self._low)) + 1)]
        step = _round_step((self._high - self._low) / 5)
        return [self._low + step * i for i in range(round((self._high - self._low) / step) + 1)]


def _subtitle(unit: str, scale: _Scale) -> str:
    return f"{unit}, medians, with the least and the most{'; logarithmic scale' if scale.is_log else ''}"


def _round_step(about: float) -> float:
    """Return 1, 2 or 5 times a power of ten, not below ``about``."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(power * i for i in (1, 2, 5, 10) if power * i >= about * 0.999)


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", colour: str = INK) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _page(title: str, subtitle: str, height: float, body: Sequence[str]) -> str:
    head = [_text(8, 18, title, weight="bold"), _text(8, 35, subtitle, colour="#57606a")]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" {STYLE}>',
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
            *head,
            *body,
            "</svg>\n",
        ]
    )
