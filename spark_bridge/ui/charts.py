"""The geometry of charts. Templates draw SVG of these; colours are classes of the style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from statistics import median
from typing import Any

from spark_bridge.overview.model import Checkpoint, Operator, Partition, duration, number, size

PHASES = ("tasks", "acknowledge", "manifest", "commit")
"""The phases of a batch in their order, as in ``CheckpointRecord.phases``."""
WIDTH, HEIGHT = 600.0, 120.0
MAX_DURATION_BARS = 60
MAX_CELLS = 2_000
"""The most cells of a heat map, over all hosts."""
MAX_HOSTS = 100
"""The most rows of a heat map; the hosts with the highest values come first."""
SHADES = 8


@dataclass(frozen=True)
class Part:
    """A coloured part of a bar or strip: class, place and extent, in the units of the chart."""

    kind: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Bar:
    """One bar, and its description."""

    title: str
    parts: tuple[Part, ...]
    is_marked: bool = False
    x: float = 0.0
    width: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The last batches as stacked bars. ``top_ms`` is the height of the chart."""

    bars: tuple[Bar, ...]
    top_ms: float
    first: int
    last: int


def timeline(checkpoints: Sequence[Checkpoint]) -> Timeline | None:
    """Return the chart of the last checkpoints whose duration is known; None if there are none."""
    shown = [c for c in checkpoints if c.phases][-MAX_DURATION_BARS:]
    if not shown:
        return None
    top = max(sum(c.phases.values()) for c in shown) or 1
    step = WIDTH / max(len(shown), 12)
    bars = []
    for place, one in enumerate(shown):
        y, parts = HEIGHT, []
        for phase in PHASES:
            height = one.phases.get(phase, 0) / top * HEIGHT
            y -= height
            if height:
                x, width = round(place * step + 0.5, 1), round(step - 1, 1)
                parts.append(Part(phase, x, round(y, 1), width, round(height, 1)))
        told = ", ".join(f"{phase} {duration(one.phases[phase])}" for phase in PHASES if phase in one.phases)
        title = f"batch {one.version - 1}: {duration(sum(one.phases.values()))} ({told})"
        if one.retried:
            title += f"; {one.retried} tasks retried"
        bars.append(Bar(title, tuple(parts), bool(one.retried), round(place * step + 0.5, 1), round(step - 1, 1)))
    return Timeline(tuple(bars), top, shown[0].version - 1, shown[-1].version - 1)


@dataclass(frozen=True)
class StepShare:
    """One step of tasks: its usual time in the slowest task of a batch, over all tasks, and its share of all steps."""

    name: str
    slowest_ms: float
    sum_ms: float
    share: float


def steps(checkpoints: Sequence[Checkpoint]) -> list[StepShare]:
    """Return the time that tasks spent in each step in some checkpoints, the longest step first. Times are medians."""
    times: dict[str, tuple[list[float], list[float]]] = {}
    for one in checkpoints:
        for name, step in one.steps.items():
            slowest, total = times.setdefault(name, ([], []))
            slowest.append(step.max_ms)
            total.append(step.sum_ms)
    medians = {name: (median(slowest), median(total)) for name, (slowest, total) in times.items()}
    together = sum(total for _, total in medians.values()) or 1.0
    shares = [StepShare(name, slowest, total, total / together) for name, (slowest, total) in medians.items()]
    return sorted(shares, key=lambda step: -step.sum_ms)


def strip(amounts: Mapping[str, float], whole: float) -> list[Part]:
    """Return amounts next to one another on a strip that is 100 wide and stands for ``whole``."""
    parts, x = [], 0.0
    for name, amount in amounts.items():
        width = 0.0 if whole <= 0 else min(100.0 - x, amount / whole * 100)
        if width > 0:
            parts.append(Part(name, round(x, 2), 0, round(width, 2), 1))
            x += width
    return parts


@dataclass(frozen=True)
class Cell:
    """One cell of a heat map: partitions ``first`` to ``last`` in the host's order, the highest value among them."""

    title: str
    shade: int


@dataclass(frozen=True)
class HeatRow:
    """The partitions of one host. ``share`` is its part of the sum over all hosts."""

    host: str
    partitions: int
    total: float
    highest: float
    share: float
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class HeatMap:
    """Partitions over hosts by a measure. ``left_out`` hosts are not drawn; ``per_cell`` partitions share a cell."""

    measure: str
    rows: tuple[HeatRow, ...]
    highest: float
    left_out: int
    per_cell: int


MEASURES = ("keys", "bytes", "time", "rows")


def partition_measure(partition: Partition, measure: str) -> float | None:
    """Return the value of a measure for a partition; None if it is not known."""
    if measure == "keys":
        return partition.keys
    if measure == "bytes":
        return partition.changelog_bytes if partition.memory_bytes is None else partition.memory_bytes
    return partition.work_ms if measure == "time" else partition.rows


def measure_in_words(measure: str, value: float | None) -> str:
    """Return a value of a measure for people."""
    if value is None:
        return "unknown"
    if measure == "bytes":
        return size(value)
    return duration(value) if measure == "time" else f"{number(value)} {measure}"


def heat_map(operator: Operator, measure: str) -> HeatMap | None:
    """Return the heat map of an operator; None if no partition knows the measure."""
    by_host: dict[str, list[tuple[int, float]]] = {}
    for one in operator.partitions:
        value = partition_measure(one, measure)
        if value is not None:
            by_host.setdefault(one.owner or "in storage", []).append((one.partition, value))
    if not by_host:
        return None
    highest = max(value for values in by_host.values() for _, value in values)
    total = sum(value for values in by_host.values() for _, value in values) or 1
    ordered = sorted(by_host.items(), key=lambda item: -max(v for _, v in item[1]))
    drawn = ordered[:MAX_HOSTS]
    cells_of_row = max(1, MAX_CELLS // len(drawn))
    per_cell = max(1, -(-max(len(values) for _, values in drawn) // cells_of_row))
    rows = []
    for host, values in drawn:
        cells = []
        for at in range(0, len(values), per_cell):
            part = values[at : at + per_cell]
            hottest, top = max(part, key=lambda one: one[1])
            among = f" and {len(part) - 1} with less" if len(part) > 1 else ""
            cells.append(Cell(f"partition {hottest}{among}: {measure_in_words(measure, top)}", shade(top, highest)))
        own = sum(value for _, value in values)
        rows.append(HeatRow(host, len(values), own, max(v for _, v in values), own / total, tuple(cells)))
    return HeatMap(measure, tuple(rows), highest, len(ordered) - len(drawn), per_cell)


def shade(value: float, highest: float) -> int:
    """Return the shade of a value, 0 to ``SHADES - 1``."""
    return 0 if highest <= 0 else min(SHADES - 1, int(value / highest * SHADES))


@dataclass(frozen=True)
class Sparkline:
    """The durations of the last ``n`` batches as the points of a polyline, 100 by 20; the top is ``top_ms``."""

    points: str
    n: int
    top_ms: int


def sparkline(checkpoints: Sequence[Checkpoint]) -> Sparkline | None:
    """Return the line of the last durations; None if fewer than two are known."""
    durations = [c.duration_ms for c in checkpoints if c.duration_ms is not None][-MAX_DURATION_BARS:]
    if len(durations) < 2:
        return None
    top = max(durations) or 1
    points = " ".join(
        f"{i / (len(durations) - 1) * 100:.1f},{19 - ms / top * 18:.1f}" for i, ms in enumerate(durations)
    )
    return Sparkline(points, len(durations), max(durations))


# Values of state as the page writes them.


MAX_CHARACTERS = 300
"""At most this many characters of a value are shown."""


def value(cell: Any) -> str:
    """Return a value of state as text, cut if it is long."""
    if isinstance(cell, bytes):  # made into text as far as it is shown
        return _cut(whole_value(cell[:MAX_CHARACTERS]), 2 + 2 * len(cell))
    text = whole_value(cell)
    return _cut(text, len(text))


def _cut(text: str, characters: int) -> str:
    return text if characters <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}… ({characters:,} characters)"


def whole_value(cell: Any) -> str:
    """Return a value of state as text, however long it is."""
    if cell is None:
        return "null"
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return repr(cell) if math.isfinite(cell) else {True: "NaN"}.get(math.isnan(cell), str(cell))
    if isinstance(cell, bytes):
        return f"0x{cell.hex()}"
    if isinstance(cell, datetime):
        return cell.isoformat(sep=" ").replace("+00:00", "Z")
    if isinstance(cell, date | timedelta):
        return str(cell)
    if isinstance(cell, dict):
        if set(cell) == {"start", "end"} and all(isinstance(v, datetime) for v in cell.values()):
            return f"{whole_value(cell['start'])} – {whole_value(cell['end'])}"
        return "{" + ", ".join(f"{k}: {whole_value(v)}" for k, v in cell.items()) + "}"
    if isinstance(cell, list | tuple):
        return "[" + ", ".join(whole_value(v) for v in cell) + "]"
    return str(cell)
