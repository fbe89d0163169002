"""The cost of a savepoint and of a change of the partition count for a query with a large state."""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.comparison import VENV, VENV42, Comparison, Measured
from suite.model import Case, Contestant, Size
from suite.progress import Steps
from suite.ratios import Target

from comparisons.streams import AT_ONCE, EQUAL, ON_CLUSTER, described, directory

if TYPE_CHECKING:
    from lanes import Input, Lane

FILL_ROWS = 500_000
OURS, NATIVE, AGAIN = "aggregate", "native", "native, computed again"
BESIDE, WITHOUT = "beside a savepoint", "without one"
FEW, MANY = 4, 8
BATCH, SAVEPOINT = "a batch", "a savepoint, while batches go on"
RESCALED = "{} to {} partitions, to the first completed batch"
RESTARTS = (3, 16)
RESTARTED = "restarted with {} partitions, first batch"
PARTITIONS = "spark.sql.shuffle.partitions"


def run(size: Size, steps: Steps) -> Measured:
    """Measure savepoints while batches run, then the same state with other partition counts."""
    import lanes
    from stateful_queries import CONTESTANTS
    from workloads import Workload

    with directory() as root, lanes.session(FEW, configs=AT_ONCE) as spark:
        names = (OURS, NATIVE) if _can_repartition(spark) else (OURS,)
        measured = Measured(
            {
                BESIDE: Contestant("batches of `aggregate` while a savepoint is made", {}, True),
                WITHOUT: Contestant("its batches before and after"),
                **described(names),
                AGAIN: Contestant(
                    "Spark's own aggregate over all input again, in one batch", CONTESTANTS[NATIVE].settings
                ),
            },
            [],
            [f"All on {ON_CLUSTER}.", EQUAL],
        )
        steps.expect(len(names) + size["savepoints"] + 1 + len(RESTARTS) + size["rescales"])
        given = lanes.Input(root / "batches", Workload("long", "a long key", size["rows"], size["keys"]))
        fills = given.fill(0, size["keys"], FILL_ROWS)
        running = {name: lanes.Lane(CONTESTANTS[name], root / name, given) for name in names}
        for lane in running.values():
            steps.now(f"filling {lane.contestant.name}")
            lanes.start(spark, lane)
            lane.run(fills)
            lane.check()
            lane.stop()
            steps.advance()
        lanes.start(spark, running[OURS])
        _savepoints(running[OURS], given, root / "savepoints", size, steps, measured)
        _last_savepoint(running[OURS], root / "savepoints", steps, measured)
        partitions = _rescales(spark, running, given, root, size, steps, measured)
        _restarts(spark, running[OURS], given, partitions, size["settle"], steps, measured)
    return measured


def _can_repartition(spark: Any) -> bool:
    """Return whether this Spark can change the partitions of a checkpoint, offline."""
    return hasattr(type(spark), "_streamingCheckpointManager")


def _savepoints(lane: Lane, given: Input, path: Path, size: Size, steps: Steps, measured: Measured) -> None:
    """Measure savepoints, and the batches before and during each."""
    from spark_bridge import describe_savepoint, trigger_savepoint

    seconds, rates, beside, without = [], [], [], []

    def batch() -> float:
        given.add()
        return lane.run(1)[0]

    for _ in range(3):
        batch()
    for i in range(size["savepoints"]):
        steps.now(f"savepoint {i + 1} of {size['savepoints']}")
        around = [batch() for _ in range(size["batches"])]
        began = time.perf_counter()
        ended: list[float] = []
        future = trigger_savepoint(lane.query, str(path))
        future.add_done_callback(partial(_note_end, ended))
        meanwhile = [batch()]
        while not future.done():
            meanwhile.append(batch())
        made = future.result()
        # The callback may come a moment after the result.
        seconds.append([(ended or [time.perf_counter()])[0] - began])
        rates.append([describe_savepoint(made).size / 1e6 / seconds[-1][0]])
        without.append(around + [batch() for _ in range(size["batches"])])
        beside.append(meanwhile)
        steps.advance()
    measured.cases += [
        Case(BATCH, "s a batch", {BESIDE: beside, WITHOUT: without}),
        Case(SAVEPOINT, "s", {OURS: seconds}),
        Case(f"{SAVEPOINT}: Parquet written", "MB/s", {OURS: rates}, more_is_better=True),
    ]
    measured.notes.append("Batches beside a savepoint are those that began while it was being made.")


def _last_savepoint(lane: Lane, path: Path, steps: Steps, measured: Measured) -> None:
    """Measure the savepoint that stops the query: no batch runs at the same time."""
    from spark_bridge import describe_savepoint, trigger_savepoint

    steps.now("savepoint to stop with")
    began = time.perf_counter()
    made = describe_savepoint(trigger_savepoint(lane.query, str(path), stop=True).result())
    seconds = time.perf_counter() - began
    measured.cases += [
        Case("a savepoint, and the query is stopped", "s", {OURS: [[seconds]]}),
        Case(
            "a savepoint, and the query is stopped: Parquet written",
            "MB/s",
            {OURS: [[made.size / 1e6 / seconds]]},
            more_is_better=True,
        ),
    ]
    steps.advance()


def _restarts(
    spark: Any, lane: Lane, given: Input, partitions: int, settle: float, steps: Steps, measured: Measured
) -> None:
    """Measure the first batch after restarts with other partition counts, one directly after the other.

    Before the first one the query has been at rest with its ``partitions`` for ``settle`` seconds, so that their
    snapshots are in storage.
    """
    import lanes

    lanes.start(spark, lane, {PARTITIONS: str(partitions)})
    given.add()
    lane.run(1)
    time.sleep(settle)
    lane.stop()
    for number in RESTARTS:
        steps.now(f"restarting with {number} partitions")
        given.add()
        lanes.start(spark, lane, {PARTITIONS: str(number)})
        began = time.perf_counter()
        lane.run(1)
        measured.cases.append(Case(RESTARTED.format(number), "s", {OURS: [[time.perf_counter() - began]]}))
        steps.advance()
        lane.check()
        lane.stop()
    measured.notes.append(
        f"Restarts with {' and at once '.join(map(str, RESTARTS))} partitions: from the input of the first batch, as "
        f"the query begins to load {given.workload.keys:,} keys. Before them the query had rested for {settle:g} s."
    )


def _note_end(ended: list[float], _: Future[str]) -> None:
    ended.append(time.perf_counter())


def _rescales(
    spark: Any, lanes_of: dict[str, Lane], given: Input, root: Path, size: Size, steps: Steps, measured: Measured
) -> int:
    """Measure the change from few to many partitions and back, up to the first completed batch; return their number."""
    import lanes

    turns: dict[tuple[int, int], dict[str, list[list[float]]]] = {}
    before, can_repartition = FEW, NATIVE in lanes_of
    for i in range(size["rescales"]):
        after = MANY if before == FEW else FEW
        steps.now(f"from {before} to {after} partitions: {i + 1} of {size['rescales']}")
        given.add()
        found = turns.setdefault((before, after), {})
        for name, lane in lanes_of.items():
            if name == NATIVE:
                if not can_repartition:
                    continue
                if (seconds := repartition_seconds(spark, lane, after, measured)) is None:
                    can_repartition = False
                    continue
            else:
                seconds = 0.0
            lane.feed(1)
            began = time.perf_counter()
            lanes.start(spark, lane, {PARTITIONS: str(after)})
            lane.wait()
            found.setdefault(name, []).append([seconds + time.perf_counter() - began])
            lane.check()
            lane.stop()
        found.setdefault(AGAIN, []).append([_again(spark, given, root / f"again-{i}", after)])
        before = after
        steps.advance()
    for (before, after), its in turns.items():
        measured.cases.append(Case(RESCALED.format(before, after), "s", its))
    if NATIVE not in lanes_of:
        measured.notes.append(
            "This Spark cannot change the partitions of a checkpoint: only computing all input again is left to "
            "compare."
        )
    return before


def repartition_seconds(spark: Any, lane: Lane, partitions: int, measured: Measured) -> float | None:
    """Return the seconds of Spark's offline repartition; None, and a note, if Spark refuses this checkpoint."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    began = time.perf_counter()
    try:
        spark._streamingCheckpointManager.repartition(str(lane.root / "checkpoint"), partitions)
    except (PySparkException, Py4JJavaError) as error:
        measured.notes.append(
            f"Spark's offline repartition does not run on this checkpoint: {str(error).splitlines()[0][:300]}"
        )
        return None
    lane.skipped += 1  # it is a separate batch
    return time.perf_counter() - began


def _again(spark: Any, given: Input, root: Path, partitions: int) -> float:
    """Return the seconds of Spark's own aggregate over all input so far, in one batch, with so many partitions."""
    import lanes
    from stateful_queries import CHECK, CONTESTANTS

    lane = lanes.Lane(CONTESTANTS[NATIVE], root, given)
    lane.feed(len(given.directories))
    began = time.perf_counter()
    lanes.start(spark, lane, {PARTITIONS: str(partitions)}, files_per_trigger=given.files * len(given.directories))
    while (progress := lane.query.lastProgress) is None or not progress["numInputRows"]:
        if (error := lane.query.exception()) is not None:
            raise RuntimeError(f"The query of {AGAIN} failed: {error}") from error
        time.sleep(0.02)
    seconds = time.perf_counter() - began
    seen = progress["observedMetrics"][CHECK]
    lane.stop()
    if (seen["rows"], seen["hashes"]) != given.expected.of_all():
        raise AssertionError(f"{AGAIN} gave {seen}, not {given.expected.of_all()} (rows, hashes)")
    return seconds


COMPARISONS = (
    Comparison(
        name="savepoint",
        title="Savepoint and rescale",
        about="Savepoints of a running query and what they cost its batches; then the same state with twice as many "
        "partitions: ours is restarted with another number, Spark repartitions its checkpoint offline (4.2), or "
        "computes everything again. Then restarts with 3 and with 16 partitions.",
        run=run,
        sizes={
            "full": {"keys": 10_000_000, "rows": 100_000, "savepoints": 2, "batches": 6, "rescales": 1, "settle": 70.0},
            "smoke": {"keys": 20_000, "rows": 5_000, "savepoints": 1, "batches": 2, "rescales": 1, "settle": 0.0},
        },
        minutes={"full": 60, "smoke": 6},
        environments=(VENV, VENV42),
        targets=(
            Target("a savepoint of 10^7 keys beside a full stream", SAVEPOINT, OURS, 20, "value", unit="s"),
            Target(
                "the same: batches beside, at most 1.2 times as long",
                BATCH,
                BESIDE,
                0.833,
                against=WITHOUT,
                at_least=True,
            ),
            *(
                Target(
                    f"10^7 keys {RESTARTED.format(partitions)}",
                    RESTARTED.format(partitions),
                    OURS,
                    most,
                    "value",
                    unit="s",
                )
                for partitions, most in zip(RESTARTS, (8, 12), strict=True)
            ),
            Target(
                "a savepoint of 10^7 keys beside a full stream, Spark 4.2",
                SAVEPOINT,
                OURS,
                20,
                "value",
                unit="s",
                environment=VENV42,
            ),
            Target(
                "4 to 8 partitions, against Spark's offline repartition (4.2)",
                RESCALED.format(FEW, MANY),
                OURS,
                4,
                against=NATIVE,
                at_least=True,
                environment=VENV42,
            ),
        ),
        in_smoke=False,
        picture="bars",
    ),
)
