"""A contestant for the tests of the course: counts in this process, with its state in a JSON file. No engine is needed.

It counts some rows at each look at how many are counted; with results it counts in a thread. "wrong" adds 1 to the sum
of user 3 once; "forgetful" knows what it has read, not its totals; "hasty" counts all rows before the first look;
"broken" fails when it starts; "silent" ends.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import protocol

STEP = 100


class Counting(protocol.Program):
    look_every = 0.001

    def start(self, contestant: str, directory: Path, collect: bool, checkpoint_seconds: float) -> None:
        if contestant == "broken":
            raise ValueError("no such engine")
        if contestant == "silent":
            os._exit(7)
        self._state, self._input = directory / "state" / "totals", directory / "input"
        self._totals: dict[str, list[int]] = {}
        self._done: list[str] = []
        if self._state.exists():
            totals, self._done = json.loads(self._state.read_text())
            self._totals = {} if contestant == "forgetful" else totals
        self._results = protocol.Results(directory / "results") if collect else None
        self._contestant, self._rows, self._ends = contestant, 0, threading.Event()
        self._waiting = self._lines()
        self._thread = threading.Thread(target=self._work, daemon=True)
        if collect:
            self._thread.start()

    def _lines(self) -> Iterator[str]:
        for name in sorted({path.name for path in self._input.iterdir()} - {*self._done}):
            yield from (self._input / name).read_text().splitlines()
            self._done.append(name)

    def _work(self) -> None:
        while not self._ends.wait(0.001):
            for line in self._lines():
                self._count(**json.loads(line))

    def _count(self, user: int, amount: int) -> None:
        total = self._totals.setdefault(str(user), [0, 0])
        if self._contestant == "wrong" and user == 3 and not total[0]:
            total[1] += 1
        total[0] += 1
        total[1] += amount
        self._rows += 1
        if self._results is not None:
            self._results.write(user, *total)

    def rows(self) -> int:
        if self._contestant == "hasty":
            self._waiting = self._lines()
        for line in islice(self._waiting, None if self._contestant == "hasty" else STEP):
            self._count(**json.loads(line))
        return self._rows

    def sees(self, user: int) -> int:
        return self._totals.get(str(user), [0])[0]

    def stop(self) -> None:
        self._ends.set()
        for _ in self._waiting if self._results is None else ():
            raise AssertionError("Stopped before all rows were counted.")
        if self._results is not None:
            self._thread.join()
        self._state.write_text(json.dumps([self._totals, self._done]))


if __name__ == "__main__":
    protocol.serve(Counting())
