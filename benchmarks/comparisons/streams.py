"""What comparisons of streams have in common."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from suite.comparison import Measured
from suite.model import Case, Contestant
from suite.progress import Steps

if TYPE_CHECKING:
    from lanes import Lane
    from pyspark.sql import SparkSession

SLOW_TURNS = 2
ON_CLUSTER = "RayDP with two executors of one core, two hosts, checkpoints on the local disk, the sink noop"
AT_ONCE = {"spark.sql.streaming.pollingDelay": "10ms"}
"""Spark's default, for queries that run alone and are timed from their input on."""
EQUAL = "Of every batch, warm-up included, the number of rows and a hash of them were equal to what numpy computes."


@contextmanager
def directory() -> Iterator[Path]:
    """Give a directory for input and checkpoints."""
    with tempfile.TemporaryDirectory(prefix="statestore-bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def described(names: Sequence[str]) -> dict[str, Contestant]:
    """Return contestants of ``stateful_queries`` as the report shows them."""
    from stateful_queries import CONTESTANTS

    return {n: Contestant(c.label, {**c.settings, **c.arguments}, c.is_ours) for n in names if (c := CONTESTANTS[n])}


def chosen(wanted: Sequence[str]) -> list[str]:
    """Return the wanted contestants that this environment has. Raises ``ValueError`` for an unknown name."""
    from lanes import available
    from stateful_queries import CONTESTANTS

    if unknown := [name for name in wanted if name not in CONTESTANTS]:
        raise ValueError(f"There is no contestant {', '.join(unknown)}; there are {', '.join(CONTESTANTS)}.")
    return [name for name in wanted if name in available()]


def in_turns(lanes: Sequence[Lane], turns: int, batches: int, steps: Steps, what: str) -> dict[str, list[list[float]]]:
    """Return the seconds of each batch, turn by turn; Lanes keep their CPU.

    Slow contestants have one batch in each of the first ``SLOW_TURNS`` turns.
    """
    import stateful_profile

    found: dict[str, list[list[float]]] = {lane.contestant.name: [] for lane in lanes}
    for lane in lanes:
        lane.counted_from = len(lane.progress)
    for turn in range(turns):
        first = turn % len(lanes)
        for lane in (*lanes[first:], *lanes[:first]):
            if lane.contestant.is_slow and turn >= SLOW_TURNS:
                continue
            steps.now(f"{what}: turn {turn + 1} of {turns}, {lane.contestant.name}")
            count, before = 1 if lane.contestant.is_slow else batches, stateful_profile.cpu_seconds()
            found[lane.contestant.name].append(lane.run(count))
            lane.note_cpu(before, count)
            lane.note_store()
            steps.advance()
    for lane in lanes:
        lane.check()
    return found


def cpu(name: str, lanes: Sequence[Lane]) -> Case:
    """Return the CPU of all processes, Spark's and ours, in each turn: a busy machine hardly changes it."""
    turns = {lane.contestant.name: [[seconds] for seconds in lane.cpu_of_turns] for lane in lanes}
    return Case(f"{name}: CPU of all processes", "CPU s a batch", turns)


def profile(spark: SparkSession, lane: Lane) -> str:
    """Report where the time of a contestant's batches went, in medians."""
    import stateful_profile

    name, batches = lane.contestant.name, [p["batchId"] for p in lane.counted]
    sections = {
        "Spark, ms a batch": stateful_profile.spark_steps(lane.counted),
        **{f"{stage}, ms": steps for stage, steps in stateful_profile.stages(spark, name, batches).items()},
        "state store, ms a partition": lane.store_steps,
        "CPU, ms a batch": lane.cpu,
    }
    said = []
    for section, steps in sections.items():
        medians = sorted(((statistics.median(values), step) for step, values in steps.items()), reverse=True)
        if shown := ", ".join(f"{step} {value:.0f}" for value, step in medians if value >= 1):
            said.append(f"{section}: {shown}")
    return f"Where the time of `{name}` goes. {'; '.join(said)}."


def measured_of(names: Sequence[str]) -> Measured:
    """Return the empty part for the results of these contestants."""
    return Measured(described(names), [], [f"All on {ON_CLUSTER}.", EQUAL])
