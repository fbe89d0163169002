"""Streams into which faults can be put while they run: in their rows, in their tasks, in a program that is slow."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import DataFrame

from spark_bridge import StatefulProcessor, aggregate
from spark_bridge import functions as S

# The workers cannot import the tests, so the contents of this module are pickled with the query.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEMA = "k long, v double, t timestamp"
OUTPUT = "k long, n long"


def rows(n: int) -> list[tuple[Any, ...]]:
    now = datetime.now(timezone.utc)
    return [(k, float(n), now) for k in range(20)]


def counts(name: str, num_partitions: int = 2) -> Callable[[DataFrame], DataFrame]:
    """Count by key."""
    return lambda df: aggregate(df, by="k", operator=name, num_partitions=num_partitions, n=S.count())


def slowed(held: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function for mapInArrow that holds rows for so many seconds as the file ``held`` says, while it is there."""

    def seconds() -> float:
        try:
            return float(held.read_text())
        except FileNotFoundError:
            return 0.0

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            begun = time.monotonic()
            while time.monotonic() - begun < seconds():
                time.sleep(0.1)
            yield batch

    return run


def failing_once(flag: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function for mapInArrow whose first attempt fails in each task, while the file ``flag`` is there."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        for batch in batches:
            if context is not None and context.attemptNumber() == 0 and flag.exists():
                raise RuntimeError("this attempt fails behind its commit")
            yield batch

    return run


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: tasks may read it concurrently."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


class Pages(StatefulProcessor):
    """Counts the visits of a user by page: the state of one user is many keys."""

    def init(self, handle: Any) -> None:
        self.pages = handle.getMapState("pages", "page long", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for row in rows:
            self.pages.updateValue((row.page,), (1,))
        yield from ()

    def close(self) -> None:
        pass
