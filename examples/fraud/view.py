"""The screen: the alarms of the model, the time of its answers, and the age of its features."""

import time
from collections import deque
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from examples.fraud.model import Scores
from examples.fraud.payments import Payment

ALARM, ALARMS_SHOWN, BARS = 0.99, 8, "▁▂▃▄▅▆▇█"
COLUMNS = ("card", "amount", "payments/min", "spent/min", "merchants/min", "usually", "fraud?", "")


class Screen:
    """Draws at most five times a second, while ``live`` is entered."""

    def __init__(self, console: Console) -> None:
        self.live = Live(console=console, auto_refresh=False)
        self._begun, self._drawn = time.monotonic(), 0.0
        self._alarms = deque[tuple[Payment, dict[str, Any], float]](maxlen=ALARMS_SHOWN)
        self._events = deque[str](maxlen=4)
        self._verdicts = deque[tuple[bool, bool]](maxlen=10_000)
        self._payments, self._seconds, self._reads, self._age = 0, [0.0], [0.0], 0.0

    def say(self, event: str) -> None:
        self._events.append(f"[dim]{time.monotonic() - self._begun:5.1f} s[/]  {event}")
        self.draw()

    def add(self, batch: list[Payment], scores: Scores, seconds: float) -> None:
        """Show the scores of payments, which took the model so many seconds."""
        self._payments, self._age = self._payments + len(batch), scores.age
        self._seconds.append(seconds)
        self._reads.append(scores.read_seconds)
        for i, (payment, probability) in enumerate(zip(batch, scores.probabilities, strict=True)):
            self._verdicts.append((probability >= ALARM, payment.is_fraud))
            if probability >= ALARM:
                row = {name: values[i] for name, values in scores.features.items()}
                self._alarms.appendleft((payment, row, float(probability)))
        if time.monotonic() > self._drawn + 0.2:
            self.draw()

    def draw(self) -> None:
        self._drawn = time.monotonic()
        picture = Group(self._numbers(), "", self._table(), "", *map(Text.from_markup, self._events))
        self.live.update(Panel(picture, title="Kafka → Spark → state in Ray → model on Ray Serve"), refresh=True)

    def _numbers(self) -> Table:
        recent, reads = self._seconds[-100:], self._reads[-100:]
        alarms, frauds, caught = (sum(map(of, self._verdicts)) for of in (lambda v: v[0], lambda v: v[1], all))
        grid = Table.grid(padding=(0, 4))
        caught_of = f"caught [b green]{caught}[/] of the last {frauds} frauds"
        grid.add_row(f"[b]{self._payments:,}[/] payments scored", caught_of, f"[b]{alarms - caught}[/] wrong alarms")
        age = f"features [b]{self._age:.1f} s[/] old, read in [b]{np.median(reads) * 1e3:.1f} ms[/]"
        answers = f"answer [b]{np.median(recent) * 1e3:.0f} ms[/], slowest [b]{max(recent) * 1e3:.0f} ms[/]"
        grid.add_row(age, answers, "[cyan]" + "".join(BARS[min(7, int(s * 200))] for s in recent[-30:]))
        return grid

    def _table(self) -> Table:
        table = Table(expand=True, box=None, header_style="dim")
        for i, name in enumerate(COLUMNS):
            table.add_column(name, justify="right" if i < 6 else "left", no_wrap=True)
        for payment, row, probability in self._alarms:
            sums = f"{row['payments']}", f"{row['spent']:.2f}", f"{row['merchants']}", f"{row['usual']:.2f}"
            verdict = "[green]stolen[/]" if payment.is_fraud else "[yellow]wrong[/]"
            bar = f"[red]{'█' * int(8 * probability)}[/] {probability:.1%}"
            table.add_row(f"{payment.card}", f"{payment.amount:.2f}", *sums, bar, verdict)
        return table
