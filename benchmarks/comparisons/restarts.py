"""Host kills, cold restarts, savepoints, other partition counts, and rewritten state of a query with a large state."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.machine import directory
from suite.model import VENV, VENV42, Case, Comparison, Contestant, Measured, Size, Target, Turns
from suite.runner import Steps

if TYPE_CHECKING:
    import pyarrow as pa
    from lanes import Input, Lane

FILL_ROWS = 500_000
OURS, NATIVE, AGAIN = "aggregate", "native", "native, computed again"


def _input(root: Path, size: Size) -> Input:
    import lanes
    from totals import Workload

    return lanes.Input(root, Workload(size["rows"], size["keys"]))


def _filled_and_stopped(
    spark: Any, names: list[str], root: Path, given: Input, batches: int, steps: Steps
) -> dict[str, Lane]:
    import lanes

    running = {}
    for name in names:
        (running[name],) = lanes.warmed(spark, [name], root, given, 0, steps)
        _fill([running[name]], batches, steps)
        running[name].query.stop()
    return running


def _fill(running: list[Lane], batches: int, steps: Steps) -> None:
    for lane in running:
        steps.now(f"filling {lane.contestant.name}")
        lane.run(batches)
        lane.check()
        steps.advance()


# -- a host is killed

BEYOND, OWN = "beyond the batch's own time", "a batch, to its commit"
KILLED = "kill of a host to the next completed checkpoint"


def _timed_batch(lane: Lane) -> float:
    """Return the seconds from the input to the batch's progress, which Spark reports once the batch is committed."""
    began = time.perf_counter()
    lane.run(1)
    return time.perf_counter() - began


def run_kill(size: Size, steps: Steps) -> Measured:
    """Kill one host after another, each right before the input of a batch."""
    import lanes

    from spark_bridge.session.current import current_cluster

    measured = lanes.measured_of([OURS])
    own, killed = [], []
    steps.expect(size["turns"] + 2)
    with directory() as root, lanes.session(size["partitions"], configs=lanes.AT_ONCE) as spark:
        given = _input(root / "batches", size)
        fills = given.fill(0, size["keys"], FILL_ROWS)
        given.draw(size["warm_up"] + size["turns"] * (size["batches"] + 1))
        (lane,) = lanes.warmed(spark, [OURS], root, given, 0, steps)
        _fill([lane], fills + size["warm_up"], steps)
        time.sleep(size["settle"])
        for turn in range(size["turns"]):
            steps.now(f"host killed: turn {turn + 1} of {size['turns']}")
            own.append([_timed_batch(lane) for _ in range(size["batches"])])
            hosts = current_cluster().describe_hosts()
            began = time.perf_counter()
            os.kill(int(hosts[turn % len(hosts)]["pid"]), signal.SIGKILL)
            lane.run(1)
            killed.append([time.perf_counter() - began])
            steps.advance()
        lane.check()
    beyond = [[after[0] - statistics.median(before)] for after, before in zip(killed, own, strict=True)]
    measured.cases += [Case(n, "s", {OURS: turns}) for n, turns in ((BEYOND, beyond), (KILLED, killed), (OWN, own))]
    measured.notes.append(
        "The host is killed by SIGKILL and the batch's input appears at the same moment; Ray starts the host again, "
        "and its partitions are loaded where the coordinator puts them. Spark's own store has nothing to compare: "
        "losing an executor fails its tasks."
    )
    return measured


# -- a query starts again where only its checkpoint is left

RESTART = "query start to the first completed batch"


def run_restart(size: Size, steps: Steps) -> Measured:
    """Fill the queries, then start them again and again, each time in a new cluster, in turns."""
    import lanes
    from totals import Workload

    names = lanes.chosen(size["contestants"])
    measured = lanes.measured_of(names)
    seconds: Turns = {name: [] for name in names}
    steps.expect(len(names) * (2 * size["turns"] + 2))
    with directory() as root:
        given = _input(root / "batches", size)
        small = lanes.Input(root / "small", Workload(1_000, 1_000))
        fills = given.fill(0, size["keys"], FILL_ROWS)
        given.draw(size["turns"] * 2)
        small.draw(3)
        with lanes.session(size["partitions"]) as spark:
            running = lanes.warmed(spark, names, root, given, 0, steps)
            _fill(running, fills, steps)
            # Both take their snapshots in the background, once a minute.
            time.sleep(size["settle"])
            for lane in running:
                lane.query.stop()
        for turn in range(size["turns"]):
            with lanes.session(size["partitions"]) as spark:
                # A small query of each kind first, so that the JVMs and Python have loaded their code.
                for warm in lanes.warmed(spark, names, root / f"warm-{turn}", small, len(small.directories), steps):
                    warm.query.stop()
                for lane in running if turn % 2 == 0 else running[::-1]:
                    steps.now(f"restart: turn {turn + 1} of {size['turns']}, {lane.contestant.name}")
                    lane.feed(1)
                    began = time.perf_counter()
                    lanes.start(spark, lane)
                    lane.wait(0.02)
                    seconds[lane.contestant.name].append([time.perf_counter() - began])
                    lane.run(1)
                    lane.query.stop()
                    steps.advance()
        for lane in running:
            lane.check()
    measured.cases.append(Case(RESTART, "s", seconds))
    measured.notes.append(
        f"Each turn is a new Ray cluster, Spark session and hosts: nothing but the checkpoint is left. The first batch "
        f"has {size['rows']:,} rows. Queries were stopped after both had had time for a snapshot."
    )
    return measured


# -- a large state on object storage starts on an empty disk

COLD, FLOOR, SHARE = "start to the first batch", "the bytes alone, at the bandwidth", "times the floor"
BANDWIDTH, LATENCY = 200e6, 0.05
COLD_KEYS = 10_000


def run_cold(size: Size, steps: Steps) -> Measured:
    """Start a query whose state is on S3 on a host with an empty disk, several times."""
    from cold_start import filled, start
    from slow_s3 import file_s3

    from backends.conf import StateStoreConf

    conf = StateStoreConf(host_memory=1 << 30)
    measured = Measured({OURS: Contestant("one host in a separate process, whose tasks all run at once", {}, True)})
    steps.expect(size["turns"] + 1)
    with directory() as root:
        steps.now(f"filling {size['keys']:,} keys")
        with filled(root, size["keys"], size["partitions"], COLD_KEYS, conf) as state:
            steps.advance()
            floor = state.nbytes / BANDWIDTH
            with file_s3(root, LATENCY, BANDWIDTH) as s3:
                take = partial(start, state, s3, root / "cold-host", conf)
                starts = steps.take_turns("start", [OURS], size["turns"], lambda _: take())[OURS]
    measured.cases += [
        Case(COLD, "s", {OURS: [[one.first_batch] for one in starts]}),
        Case(FLOOR, "s", {OURS: [[floor]]}),
        Case(SHARE, "times", {OURS: [[one.first_batch / floor] for one in starts]}),
    ]
    measured.notes.append(
        f"{state.nbytes / 1e9:.2f} GB of RocksDB's files in {size['partitions']} partitions. Each request to storage "
        f"takes {LATENCY * 1e3:g} ms, and all of them together have {BANDWIDTH / 1e6:g} MB/s. The first batch reads "
        f"and writes {COLD_KEYS:,} keys; the time begins with the registration of the query. The server is a process "
        "on the same cores."
    )
    return measured


# -- savepoints beside a stream, and other partition counts

BESIDE, WITHOUT = "beside a savepoint", "without one"
FEW, MANY = 4, 8
BATCH, SAVEPOINT = "a batch", "a savepoint, while batches go on"
STOPPED = "a savepoint, and the query is stopped"
RESCALED = "{} to {} partitions, to the first completed batch"
RESTARTS = (3, 16)
RESTARTED = "restarted with {} partitions, first batch"
PARTITIONS = "spark.sql.shuffle.partitions"


def run_savepoint(size: Size, steps: Steps) -> Measured:
    """Measure savepoints while batches run, then the same state with other partition counts."""
    import lanes
    from totals import CONTESTANTS

    with directory() as root, lanes.session(FEW, configs=lanes.AT_ONCE) as spark:
        # Spark 4.2 can change the partitions of a checkpoint, offline.
        names = [OURS, NATIVE] if hasattr(type(spark), "_streamingCheckpointManager") else [OURS]
        again = Contestant("Spark's own aggregate over all input again, in one batch", CONTESTANTS[NATIVE].settings)
        measured = Measured(
            {
                BESIDE: Contestant("batches of `aggregate` while a savepoint is made", {}, True),
                WITHOUT: Contestant("its batches before and after"),
                **lanes.described(names),
                AGAIN: again,
            },
            notes=[f"All on {lanes.ON_CLUSTER}.", lanes.EQUAL],
        )
        steps.expect(2 * len(names) + size["savepoints"] + 1 + len(RESTARTS) + size["rescales"])
        given = _input(root / "batches", size)
        fills = given.fill(0, size["keys"], FILL_ROWS)
        running = _filled_and_stopped(spark, names, root, given, fills, steps)
        lanes.start(spark, running[OURS])
        _savepoints(running[OURS], given, root / "savepoints", size, steps, measured)
        partitions = _rescales(spark, running, given, root, size, steps, measured)
        _restarts(spark, running[OURS], given, partitions, size["settle"], steps, measured)
    return measured


def _savepoints(lane: Lane, given: Input, path: Path, size: Size, steps: Steps, measured: Measured) -> None:
    """Measure savepoints, and the batches before and during each; then one that stops the query, without batches."""
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
        future.add_done_callback(lambda _, ended=ended: ended.append(time.perf_counter()))
        during = [batch()]
        while not future.done():
            during.append(batch())
        location = future.result()
        # The callback may come a moment after the result.
        seconds.append([(ended or [time.perf_counter()])[0] - began])
        rates.append([describe_savepoint(location).size / 1e6 / seconds[-1][0]])
        without.append(around + [batch() for _ in range(size["batches"])])
        beside.append(during)
        steps.advance()
    steps.now("savepoint to stop with")
    began = time.perf_counter()
    savepoint = describe_savepoint(trigger_savepoint(lane.query, str(path), stop=True).result())
    stopped = time.perf_counter() - began
    steps.advance()
    measured.cases.append(Case(BATCH, "s a batch", {BESIDE: beside, WITHOUT: without}))
    for name, taken, rate in (
        (SAVEPOINT, seconds, rates),
        (STOPPED, [[stopped]], [[savepoint.size / 1e6 / stopped]]),
    ):
        measured.cases.append(Case(name, "s", {OURS: taken}))
        measured.cases.append(Case(f"{name}: Parquet written", "MB/s", {OURS: rate}, more_is_better=True))
    measured.notes.append("Batches beside a savepoint are those that began while it was being made.")


def _restarts(
    spark: Any, lane: Lane, given: Input, partitions: int, settle: float, steps: Steps, measured: Measured
) -> None:
    """Measure the first batch after restarts with other partition counts, one directly after the other.

    Before the first one the query has been idle with its ``partitions`` for ``settle`` seconds, so that their snapshots
    are in storage.
    """
    import lanes

    lanes.start(spark, lane, {PARTITIONS: str(partitions)})
    given.add()
    lane.run(1)
    time.sleep(settle)
    lane.query.stop()
    for number in RESTARTS:
        steps.now(f"restarting with {number} partitions")
        given.add()
        lanes.start(spark, lane, {PARTITIONS: str(number)})
        measured.cases.append(Case(RESTARTED.format(number), "s", {OURS: [[_timed_batch(lane)]]}))
        steps.advance()
        lane.check()
        lane.query.stop()
    measured.notes.append(
        f"Restarts with {' and at once '.join(map(str, RESTARTS))} partitions: from the input of the first batch, as "
        f"the query begins to load {given.workload.keys:,} keys. Before them the query had rested for {settle:g} s."
    )


def _rescales(
    spark: Any, lanes_of: dict[str, Lane], given: Input, root: Path, size: Size, steps: Steps, measured: Measured
) -> int:
    """Measure the change from few to many partitions and back, up to the first completed batch; return their number."""
    import lanes

    turns: dict[tuple[int, int], Turns] = {}
    before, can_repartition = FEW, NATIVE in lanes_of
    for i in range(size["rescales"]):
        after = MANY if before == FEW else FEW
        steps.now(f"from {before} to {after} partitions: {i + 1} of {size['rescales']}")
        given.add()
        seconds_of = turns.setdefault((before, after), {})
        for name, lane in lanes_of.items():
            repartition: float | None = 0.0
            if name == NATIVE:
                repartition = repartition_seconds(spark, lane, after, measured) if can_repartition else None
                if repartition is None:
                    can_repartition = False
                    continue
            lane.feed(1)
            began = time.perf_counter()
            lanes.start(spark, lane, {PARTITIONS: str(after)})
            lane.wait()
            seconds_of.setdefault(name, []).append([repartition + time.perf_counter() - began])
            lane.check()
            lane.query.stop()
        seconds_of.setdefault(AGAIN, []).append([_again(spark, given, root / f"again-{i}", after)])
        before = after
        steps.advance()
    measured.cases += [Case(RESCALED.format(*change), "s", its) for change, its in turns.items()]
    if NATIVE not in lanes_of:
        measured.notes.append(
            "This Spark cannot change the partitions of a checkpoint: it can only compute all input again."
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
        reason = str(error).splitlines()[0][:300]
        measured.notes.append(f"Spark's offline repartition does not run on this checkpoint: {reason}")
        return None
    lane.skipped += 1  # it is a separate batch
    return time.perf_counter() - began


def _again(spark: Any, given: Input, root: Path, partitions: int) -> float:
    """Return the seconds of Spark's own aggregate over all input so far, in one batch, with so many partitions."""
    import lanes
    from totals import CHECK, CONTESTANTS

    lane = lanes.Lane(CONTESTANTS[NATIVE], root, given)
    lane.feed(len(given.directories))
    lane.fed = 1  # all of them are one batch
    began = time.perf_counter()
    lanes.start(spark, lane, {PARTITIONS: str(partitions)}, files_per_trigger=given.files * len(given.directories))
    lane.wait(0.02)
    seconds = time.perf_counter() - began
    seen = lane.progress[0]["observedMetrics"][CHECK]
    lane.query.stop()
    if (seen["rows"], seen["hashes"]) != given.expected.of_all():
        raise AssertionError(f"{AGAIN} gave {seen}, not {given.expected.of_all()} (rows, hashes)")
    return seconds


# -- rewriting a large state row by row, beside Spark's offline repartition, which changes no row

REWRITE, REPARTITION = "rewrite_state", "Spark's repartition"
SAME_KEY, OTHER_KEY = "a column of every row changes", "the key of every row becomes a string"
OPERATOR = "totals"
OBJECT_STORE = 4 << 30
"""Bytes of Ray's object store; by default Ray takes 30 % of the memory."""
TASKS = 2
"""As many as Spark has cores."""


def run_surgery(size: Size, steps: Steps) -> Measured:
    """Fill the same state with both, stop them, and rewrite or repartition it in turns."""
    import lanes
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have this directory on their path
    with directory() as root, lanes.session(FEW, configs=lanes.AT_ONCE, object_store_memory=OBJECT_STORE) as spark:
        measured = Measured(
            {
                REWRITE: Contestant("`rewrite_state`, a function of Arrow batches for every row", {}, True),
                REPARTITION: Contestant("Spark's offline repartition, which moves rows and changes none"),
            },
            notes=[
                f"All on {lanes.ON_CLUSTER}. Both have two tasks of one core at a time, while no query runs.",
                lanes.EQUAL,
                "Ray's object store has 4 GiB, Spark's executors have 1.5 GB each.",
                "Each changes 4 partitions to 8, and 8 to 4. Rows and sums of rewritten state are checked.",
            ],
        )
        steps.expect(4 + size["turns"])
        given = _input(root / "batches", size)
        fills = given.fill(0, size["keys"], FILL_ROWS)
        running = _filled_and_stopped(spark, [OURS, NATIVE], root, given, fills, steps)
        turns: dict[str, Turns] = {SAME_KEY: {}, OTHER_KEY: {}}
        for turn in range(size["turns"]):
            after = (MANY, FEW)[turn % 2]
            steps.now(f"turn {turn + 1} of {size['turns']}")
            for case, function in ((SAME_KEY, _one_more), (OTHER_KEY, _string_key)):
                seconds = _rewrite(running[OURS], root / "rewritten", function, after, size["keys"])
                turns[case].setdefault(REWRITE, []).append([seconds])
            repartition = repartition_seconds(spark, running[NATIVE], after, measured)
            if repartition is not None:
                for its in turns.values():
                    its.setdefault(REPARTITION, []).append([repartition])
            steps.advance()
        measured.cases += [Case(case, "s", its) for case, its in turns.items()]
    return measured


def _rewrite(lane: Lane, new: Path, function: Any, partitions: int, keys: int) -> float:
    """Return the seconds of one rewriting, check its rows and remove it."""
    import pyarrow.compute as pc

    from spark_bridge import rewrite_state, state_batches

    began = time.perf_counter()
    report = rewrite_state(
        str(lane.root / "checkpoint"),
        OPERATOR,
        function,
        str(new),
        num_partitions=partitions,
        concurrency=TASKS,
        ray_remote_args={"num_cpus": 0},  # Spark's idle executors have the CPUs
    )
    seconds = time.perf_counter() - began
    before, after = (
        sum(pc.sum(batch["n"]).as_py() for batch in state_batches(str(place), OPERATOR))
        for place in (lane.root / "checkpoint", new)
    )
    wanted = before + keys if function is _one_more else before
    if (report.rows_written[OPERATOR, "default"], after) != (keys, wanted):
        raise AssertionError(f"{report.rows_written} rows with {after} were written, not {keys} with {wanted}.")
    shutil.rmtree(new)
    return seconds


def _one_more(batch: pa.RecordBatch) -> pa.RecordBatch:
    import pyarrow.compute as pc

    return batch.set_column(1, batch.schema.names[1], pc.add(batch.column(1), 1))


def _string_key(batch: pa.RecordBatch) -> pa.RecordBatch:
    import pyarrow as pa

    return batch.set_column(0, batch.schema.names[0], batch.column(0).cast(pa.string()))


HOST_KILL = Comparison(
    name="host-kill",
    title="Recovery: a host is killed",
    about="A running query whose state is in two hosts; one of them is killed as the next batch begins.",
    run=run_kill,
    sizes={
        "full": dict(keys=1_000_000, rows=50_000, partitions=4, warm_up=5, turns=7, batches=5, settle=70.0),
        "smoke": dict(keys=20_000, rows=5_000, partitions=4, warm_up=2, turns=2, batches=3, settle=0.0),
    },
    minutes={"full": 15, "smoke": 6},
    targets=(
        Target.at_most(
            "host kill to the next completed checkpoint, beyond the batch's own time", BEYOND, OURS, 2.5, "s"
        ),
    ),
    in_smoke=False,
    picture="",
)
COLD_RESTART = Comparison(
    name="restart",
    title="Recovery: cold restart",
    about="A query with a large state is started again where nothing but its checkpoint is left.",
    run=run_restart,
    sizes={
        "full": dict(keys=10_000_000, rows=50_000, contestants=[NATIVE, OURS], partitions=4, turns=3, settle=80.0),
        "smoke": dict(keys=20_000, rows=5_000, contestants=[NATIVE, OURS], partitions=4, turns=1, settle=0.0),
    },
    minutes={"full": 60, "smoke": 6},
    targets=(Target.times("cold restart of 10^7 keys, as fast as native or faster", RESTART, OURS, 1, NATIVE),),
    in_smoke=False,
)
COLD_START = Comparison(
    name="cold-start",
    title="Recovery: start of a large state from object storage",
    about="A state on S3 (50 ms a request, 200 MB/s) starts on a host whose local disk is empty, without Spark.",
    run=run_cold,
    sizes={"full": dict(keys=100_000_000, partitions=8, turns=5), "smoke": dict(keys=2_000_000, partitions=4, turns=1)},
    minutes={"full": 15, "smoke": 3},
    targets=(
        Target.at_most("cold start of 10^8 keys (3 GB), compared with the transfer alone", SHARE, OURS, 1.2, "times"),
    ),
    in_smoke=False,
    picture="",
)
SAVEPOINTS = Comparison(
    name="savepoint",
    title="Savepoint and rescale",
    about="Savepoints of a running query and their cost for its batches; then the same state with twice as many "
    "partitions: ours is restarted with another number, Spark repartitions its checkpoint offline (4.2), or computes "
    "everything again. Then restarts with 3 and with 16 partitions.",
    run=run_savepoint,
    sizes={
        "full": dict(keys=10_000_000, rows=100_000, savepoints=2, batches=6, rescales=1, settle=70.0),
        "smoke": dict(keys=20_000, rows=5_000, savepoints=1, batches=2, rescales=1, settle=0.0),
    },
    minutes={"full": 60, "smoke": 6},
    environments=(VENV, VENV42),
    targets=(
        Target.at_most("a savepoint of 10^7 keys beside a full stream", SAVEPOINT, OURS, 20, "s"),
        Target.times("the same: batches beside, at most 1.2 times as long", BATCH, BESIDE, 0.833, WITHOUT),
        *(
            Target.at_most(f"10^7 keys {RESTARTED.format(n)}", RESTARTED.format(n), OURS, limit, "s")
            for n, limit in zip(RESTARTS, (8, 12), strict=True)
        ),
        Target.at_most("a savepoint of 10^7 keys beside a full stream, Spark 4.2", SAVEPOINT, OURS, 20, "s", VENV42),
        Target.times(
            "4 to 8 partitions, against Spark's offline repartition (4.2)",
            *(RESCALED.format(FEW, MANY), OURS, 4, NATIVE, VENV42),
        ),
    ),
    in_smoke=False,
)
SURGERY = Comparison(
    name="surgery",
    title="Rewriting state",
    about="`rewrite_state` writes a stopped query's state into a new checkpoint, with every row changed by a function. "
    "Spark has no such operation; its offline repartition (4.2) reads and writes the same rows unchanged.",
    run=run_surgery,
    sizes={"full": dict(keys=10_000_000, rows=100_000, turns=2), "smoke": dict(keys=20_000, rows=5_000, turns=2)},
    minutes={"full": 25, "smoke": 4},
    environments=(VENV42,),
    in_smoke=False,
)
COMPARISONS = (HOST_KILL, COLD_RESTART, COLD_START, SAVEPOINTS, SURGERY)
