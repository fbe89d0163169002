"""A stopped query of Spark is taken over with its state: it gives what it would have given if it had never stopped."""

from __future__ import annotations

import datetime as dt
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import starmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyspark
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.exceptions import InvalidStateStoreArgument
from coordinator_actor.exceptions import SavepointError
from coordinator_actor.messages import OperatorSpec
from spark_bridge import (
    aggregate,
    deduplicate,
    state_table,
    take_over,
    trigger_savepoint,
)
from spark_bridge import functions as S
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_surgery.declared_operators import OfProgram
from spark_bridge.state_surgery.shuffle import Routing, RowCounts, Target, _distinct, gather_pairs
from spark_bridge.state_surgery.spark_state import Conversion, SparkOperator
from spark_bridge.state_surgery.take_over import _check_columns, _operator
from tests.backends.storage.s3_faults import FaultProxy
from tests.effort import only_thorough
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.conftest import Stream, driver_environment, wait_until
from tests.spark_bridge.state_surgery.surgery_steps import OwnWorkers
from tests.spark_bridge.streams.processors import drain, gather, ordered
from tests.spark_bridge.streams.programs_in_both_forms import (
    BATCHES_BEFORE,
    CASES,
    INPUT,
    LAST,
    PROVIDERS,
    START,
    joined_by_spark,
    joined_here,
    rows,
)

pytestmark = [
    pytest.mark.spark,
    pytest.mark.spark42_only,
    pytest.mark.skipif(pyspark.__version__ < "4", reason="This Spark has no reader of state."),
    pytest.mark.slow,
]


@pytest.fixture
def provider(request: pytest.FixtureRequest, make_stream: Callable[..., Stream]) -> Iterator[str]:
    """The state provider of the native query."""
    spark = make_stream(INPUT).spark
    settings = {"spark.sql.streaming.stateStore.providerClass": PROVIDERS + request.param}
    if "TTL" in request.node.name:  # with processing time, Spark would make such batches for ever
        settings["spark.sql.streaming.noDataMicroBatches.enabled"] = "false"
    if ", format " in request.node.name:
        settings["spark.sql.streaming.join.stateFormatVersion"] = request.node.name.partition(", format ")[2][0]
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield request.param
    for name, value in before.items():
        spark.conf.set(name, value)


def outputs(batches: dict[int, list[Any]]) -> list[Any]:
    """Rows of all batches. Deviations differ in their last digits: both are sums, in another order."""
    # The copy allows a running query to add a batch at the same time.
    rows = (row for batch in list(batches.values()) for row in batch)
    return ordered(tuple(round(value, 9) if isinstance(value, float) else value for value in row) for row in rows)


def logs_of(checkpoint: str) -> dict[str, bytes]:
    """Spark's files without the state, where its maintenance may still write."""
    paths = [path for name in ("offsets", "commits", "sources") for path in Path(checkpoint, name).rglob("*")]
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.parametrize(
    ("case", "provider", "is_planned"),
    [
        ("aggregate", "HDFSBackedStateStoreProvider", False),
        pytest.param("windows", "RocksDBStateStoreProvider", True, marks=pytest.mark.matrix),
        *starmap(
            only_thorough,
            (
                ("all rows", "RocksDBStateStoreProvider", True),
                ("sessions", "HDFSBackedStateStoreProvider", False),
                ("sessions after the key", "RocksDBStateStoreProvider", False),
                ("TTL", "RocksDBStateStoreProvider", False),
                ("duplicates", "HDFSBackedStateStoreProvider", True),
                ("duplicates within the watermark", "RocksDBStateStoreProvider", False),
                ("processor", "RocksDBStateStoreProvider", True),
                ("group state", "HDFSBackedStateStoreProvider", False),
                ("outer join", "RocksDBStateStoreProvider", True),
                ("inner join", "HDFSBackedStateStoreProvider", False),
                ("semi join", "RocksDBStateStoreProvider", False),
                ("outer join, format 3", "RocksDBStateStoreProvider", True),
                ("inner join, format 3", "RocksDBStateStoreProvider", False),
                ("semi join, format 3", "RocksDBStateStoreProvider", False),
            ),
        ),
    ],
    indirect=["provider"],
)
def test_query_continues_as_if_it_had_not_stopped(
    make_stream: Callable[..., Stream], provider: str, case: str, is_planned: bool
) -> None:
    mode, native, taken = CASES[case]
    stream = make_stream(INPUT)
    old, never_stopped, new = (str(stream.root / name) for name in ("old", "never-stopped", "new"))
    for batch in range(BATCHES_BEFORE):
        stream.add(rows(batch))
    query, _ = gather(native(stream.read()), old, mode)
    drain(query, old, stream.files)
    query.stop()
    if is_planned:  # Spark died after it had planned the last batch
        last = max(int(path.name) for path in Path(old, "offsets").glob("[0-9]*"))
        for path in (Path(old, "commits", str(last)), Path(old, "commits", f".{last}.crc")):
            path.unlink(missing_ok=True)
    files = logs_of(old)
    shutil.copytree(old, never_stopped)

    program = taken(stream.read())
    # Spark keeps the left rows of this join under the names of the source.
    columns = {"totals": {"la": "amount", "lt": "ts"}} if case.startswith("semi join") else None
    report = take_over(old, new, program, columns=columns, dry_run=True, workers=OwnWorkers())
    assert report.dry_run and not Path(new).exists() and report.samples_after
    report = take_over(old, new, program, columns=columns, workers=OwnWorkers())
    assert sum(report.rows_written.values()) > 0
    assert logs_of(old) == files

    for batch in range(BATCHES_BEFORE, 2 * BATCHES_BEFORE):
        stream.add(rows(batch))
    stream.add(LAST)
    query, of_spark = gather(native(stream.read()), never_stopped, mode)
    query.processAllAvailable()
    query.stop()
    query, of_new = gather(program, new, "append" if mode == "append" else "update")
    drain(query, new, stream.files)
    with suppress(AssertionError):  # the comparison says more
        wait_until(lambda: query.exception() is not None or len(outputs(of_new)) >= len(outputs(of_spark)))
    query.stop()
    assert outputs(of_new) == outputs(of_spark) and outputs(of_spark)
    assert min(of_new) == min(of_spark)


NATIVE = """
import sys
from pyspark.sql import SparkSession
from tests.spark_bridge.conftest import CONFIGS
from tests.spark_bridge.streams.test_take_over import CASES, INPUT, PROVIDERS, on_time_stream, written

case, root, provider = sys.argv[1:]
settings = {**CONFIGS, "spark.sql.session.timeZone": "UTC"}
settings["spark.sql.streaming.stateStore.providerClass"] = PROVIDERS + provider
builder = SparkSession.builder.master("local[2]")
for name, value in settings.items():
    builder = builder.config(name, value)
mode, native, _ = CASES[case]
written(native(on_time_stream(builder.getOrCreate(), root).read()), root, "old", mode).awaitTermination()
"""
"""A driver with a native query."""
FILES = 7


def on_time_stream(spark: Any, root: str | Path) -> Stream:
    """The input of a query that is killed. No row is late: where a file sink skips a batch that runs again, Spark's
    watermark stays behind, and rows would not be late that were.
    """
    return Stream(spark, Path(root), INPUT)


def written(df: DataFrame, root: str | Path, checkpoint: str, mode: str) -> Any:
    """Start a query whose output stays in ``root/out`` when its driver is killed: in mode append, by a file sink."""
    out = Path(root, "out")
    df = df.toDF(*(f"column{place}" for place in range(len(df.columns))))  # both queries write the same columns
    writer = df.writeStream.outputMode(mode).option("checkpointLocation", str(Path(root, checkpoint)))
    if mode == "append":
        return writer.format("parquet").start(str(out))

    def write(batch: DataFrame, number: int) -> None:
        out.mkdir(exist_ok=True)
        draft = out / f".{number}"
        draft.write_bytes(pickle.dumps([tuple(row) for row in batch.collect()]))
        draft.replace(out / str(number))

    return writer.foreachBatch(write).start()


def output_in(stream: Stream, mode: str) -> list[Any]:
    """Return all rows that queries have written to ``out``."""
    out = stream.root / "out"
    if mode == "append":
        return outputs({0: stream.spark.read.parquet(str(out)).collect()})
    return outputs({int(path.name): pickle.loads(path.read_bytes()) for path in out.glob("[0-9]*")})


def killed_native_query(case: str, root: Path, provider: str, event: str) -> None:
    """Run a native query in another driver, and kill all its processes once the file ``event`` exists."""
    command = [sys.executable, "-c", NATIVE, case, str(root), provider]
    said = root / "driver.log"
    with said.open("wb") as log:
        driver = subprocess.Popen(
            command, env=driver_environment(root), stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
        try:
            wait_until(lambda: (root / event).exists() or driver.poll() is not None, every=0.001)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
        driver.communicate()  # all processes that have its end of the pipe are gone
    assert driver.returncode == -signal.SIGKILL, said.read_text()[-3000:]
    assert (root / event).exists(), said.read_text()[-3000:]


@pytest.mark.thorough  # otherwise: the tests of planned batches above, and of directories of sinks below
@pytest.mark.parametrize(
    ("case", "provider", "events"),
    [
        ("windows", "RocksDBStateStoreProvider", ("old/offsets/{}", "old/commits/{}", "out/_spark_metadata/{}")),
        ("duplicates", "HDFSBackedStateStoreProvider", ("out/_spark_metadata/{}",)),
        ("aggregate", "RocksDBStateStoreProvider", ("old/offsets/{}", "old/commits/{}", "out/{}")),
        ("processor", "RocksDBStateStoreProvider", ("old/offsets/{}", "old/commits/{}")),
        ("outer join", "HDFSBackedStateStoreProvider", ("old/offsets/{}", "old/commits/{}")),
    ],
    indirect=["provider"],
)
def test_query_killed_in_any_batch_continues(
    make_stream: Callable[..., Stream], provider: str, case: str, events: tuple[str, ...]
) -> None:
    mode, native, taken = CASES[case]
    stream = make_stream(INPUT)
    root = stream.root
    for batch in range(FILES):
        stream.add([row for row in rows(batch) if row[-1] >= START + dt.timedelta(minutes=10 * batch)])
    event = random.choice(events).format(random.randrange(1, 4))
    print(f"killed at {event}")
    killed_native_query(case, root, provider, event)

    old, new = str(root / "old"), str(root / "new")
    committed, planned = (max(int(p.name) for p in Path(old, log).glob("[0-9]*")) for log in ("commits", "offsets"))
    program = taken(stream.read())
    sink = str(root / "out") if mode == "append" else None
    if sink and Path(sink, "_spark_metadata", str(committed + 1)).exists():
        with pytest.raises(InvalidStateStoreArgument, match=f"stop it when it has committed batch {planned}"):
            take_over(old, new, program, file_sink=sink, workers=OwnWorkers())
        query = written(native(stream.read()), root, "old", mode)
        wait_until(lambda: query.exception() is not None or Path(old, "commits", str(planned)).exists())
        with pytest.raises(InvalidStateStoreArgument, match="is running: stop it first"):
            take_over(old, new, program, file_sink=sink, workers=OwnWorkers())
        query.stop()
        committed = planned
    report = take_over(old, new, program, file_sink=sink, workers=OwnWorkers())
    assert report.batch_id is not None and report.batch_id >= committed

    never_stopped = str(root / "never-stopped")
    query, of_spark = gather(native(stream.read()), never_stopped, mode)
    query.processAllAvailable()
    query.stop()
    query = written(program, root, "new", mode)
    drain(query, new, FILES)
    with suppress(AssertionError):  # the comparison says more
        wait_until(lambda: query.exception() is not None or len(output_in(stream, mode)) >= len(outputs(of_spark)))
    query.stop()
    assert output_in(stream, mode) == outputs(of_spark) and outputs(of_spark)
    # The state that a native query ends with.
    other = str(root / "other")
    take_over(never_stopped, other, program, workers=OwnWorkers())
    for _, variable in report.rows_written:
        states = [state_table(location, "totals", variable).to_pylist() for location in (new, other)]
        assert outputs({0: [row.values() for row in states[0]]}) == outputs({0: [row.values() for row in states[1]]})


@pytest.mark.matrix
def test_state_that_cannot_be_taken_over_is_named_before_anything_is_written(
    make_stream: Callable[..., Stream],
) -> None:
    stream = make_stream(INPUT)
    old, new = str(stream.root / "old"), stream.root / "new"
    stream.add(rows(0))
    df = stream.read()
    native = df.groupBy("user").agg(F.count("*"), F.collect_list("amount"), F.sum("amount"))
    query, _ = gather(native, old)
    drain(query, old, stream.files)

    def refusal(program: DataFrame, checkpoint: str = old, **options: Any) -> str:
        with pytest.raises((InvalidStateStoreArgument, SavepointError)) as refused:
            take_over(checkpoint, str(new), program, workers=OwnWorkers(), **options)
        assert not new.exists()
        return str(refused.value)

    def totals(by: str = "user", **functions: Any) -> DataFrame:
        return aggregate(df, by=by, operator="totals", **functions)

    count_and_sum = totals(n=S.count(), total=S.sum("amount"))
    assert "is running: stop it first" in refusal(count_and_sum)
    query.stop()
    said = refusal(count_and_sum)
    assert "total=sum does not find its buffers there (0 count, 1 buf, 2 sum)" in said
    assert "columns={'totals': {'total': 0}}" in said
    assert "the program needs the functions" in refusal(totals(n=S.count())).lower()
    assert "n=collect_list" in refusal(totals(n=S.collect_list("amount", limit=3)))
    by_amount = totals("amount", n=S.count())
    assert "key has the columns 'user', and the program's has 'amount'. Both must be as many" in refusal(
        by_amount, columns={"totals": {"n": 0}}
    )
    assert "of the kind deduplicate, and cannot take over" in refusal(
        deduplicate(df, "user", operator="totals"), operators={"totals": 0}
    )
    assert "{'totals': 0}" in refusal(count_and_sum, operators={"totals": 1})
    assert "columns= names 'other'" in refusal(count_and_sum, columns={"other": {}})
    both = df.union(stream.read())
    assert "has 1 sources, and the program has 2" in refusal(
        aggregate(both, by="user", operator="totals", n=S.count(), total=S.sum("amount")),
        columns={"totals": {"n": 0, "total": 2}},
    )
    assert "buffer 2 is a double: give the column the type that it had" in refusal(
        totals(n=S.count(), price=S.sum("price")), columns={"totals": {"n": 0, "price": 2}}
    )
    assert "not the checkpoint of a query" in refusal(count_and_sum, str(stream.root / "in"))

    places = {"totals": {"n": 0, "total": 2}}
    sink, log = str(stream.root / "sink"), stream.root / "sink" / "_spark_metadata"
    other = df.writeStream.option("checkpointLocation", str(stream.root / "other")).format("parquet").start(sink)
    # Its first batch may run still: no progress names the sink yet.
    assert f"The query {other.id} writes to {sink}" in refusal(count_and_sum, columns=places, file_sink=sink)
    other.processAllAvailable()
    assert f"The query {other.id} writes to {sink}" in refusal(count_and_sum, columns=places, file_sink=sink)
    other.stop()
    assert "has no batch" in refusal(count_and_sum, columns=places, file_sink=str(stream.root / "in"))
    shutil.copy(log / "0", log / "1")
    assert "has batch 1 as its last one" in refusal(count_and_sum, columns=places, file_sink=sink)
    shutil.copy(Path(old, "offsets", "0"), Path(old, "offsets", "1"))
    assert "stop it when it has committed batch 1" in refusal(count_and_sum, columns=places, file_sink=sink)
    Path(old, "offsets", "1").unlink()
    (log / "1").unlink()

    shutil.rmtree(Path(old, "state", "0", "_metadata"))  # as of Spark 3.5, which keeps no metadata of operators
    # The remedy: places of buffers. The list is left out.
    report = take_over(old, str(new), count_and_sum, columns=places, file_sink=sink, workers=OwnWorkers())
    taken = {row["user"]: (row["n"], row["total"]) for row in state_table(str(new), "totals").to_pylist()}
    data = pd.DataFrame(rows(0), columns=["user", "amount", "price", "cents", "ts"])
    sums = data.groupby("user", dropna=False)["amount"].agg(["size", "sum"])
    assert len(taken) == len(sums) == report.rows_written["totals", "default"]
    assert {None if pd.isna(k) else int(k): (r["size"], r["sum"]) for k, r in sums.iterrows()} == taken
    assert "in " + str(new) in refused_again(old, str(new), count_and_sum)


def test_two_keys_of_the_program_cannot_be_one_of_spark() -> None:
    """Otherwise the state would have other keys than the old one, and only a reader would see it."""
    keys = pa.schema([("person", pa.string()), ("land", pa.string())])
    schema = OperatorSchema.of_rows(StateSchema(keys, pa.schema([("n.count.count", pa.int64())])))
    target = Target(("totals", "default"), 1, PairsOfRows(VariableRows(schema, schema.in_use[0], raw=True)))
    of_spark = SimpleNamespace(dataType=SimpleNamespace(names=["user", "country"]))
    frame: Any = SimpleNamespace(schema={"key": of_spark})
    query: Any = None
    columns = {"person": "user", "land": "user"}
    conversion = Conversion(query, SparkOperator(0, "stateStoreSave"), target, columns)
    with pytest.raises(InvalidStateStoreArgument, match=r"from its columns 'user', 'user': .* has 'user', 'country'"):
        conversion._key_columns(frame)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"usr": "user_id"}, "'usr' for operator 'totals', whose columns are 'user', 'n', 'spent'"),
        ({"n.count.count": 0}, "'n.count.count' for operator"),
        ("user", "'user' for operator"),
        ({"spent": "sum"}, "'sum' for the output 'spent' of operator 'totals': give the place"),
        ({"n": 0, "spent": -1}, "-1 for the output 'spent'"),
    ],
)
def test_columns_that_would_be_ignored_are_refused(given: Any, said: str) -> None:
    values = pa.schema([("n.count.count", pa.int64()), ("spent.sum.sum", pa.float64())])
    schema = OperatorSchema.of_rows(StateSchema(pa.schema([("user", pa.string())]), values))
    target = Target(("totals", "default"), 1, PairsOfRows(VariableRows(schema, schema.in_use[0], raw=True)))
    of_program = {"totals": OfProgram(OperatorSpec("totals", 1, schema.to_json()))}
    places = of_program, {"totals": SparkOperator(0, "stateStoreSave")}, {target.name: target}
    _check_columns(*places, {"totals": {"user": "user_id", "n": 0, "spent": 2}})
    with pytest.raises(InvalidStateStoreArgument, match=said):
        _check_columns(*places, {"totals": given})


def test_keys_of_spark_that_are_one_key_here_are_named() -> None:
    values = pa.schema([("n.count.count", pa.int64())])
    schema = OperatorSchema.of_rows(StateSchema(pa.schema([("price", pa.float64())]), values))
    (target,) = _operator(OfProgram(OperatorSpec("totals", 1, schema.to_json())), None, 8).targets
    rows = pa.table({"price": [0.0, -0.0], "n.count.count": [1, 2]})
    (runs,) = Routing(target.name, None, {target.name: target}, 8).cut(iter(rows.to_batches()), RowCounts())
    ((found, keys),) = gather_pairs(target, list(runs.values()), 0, 8)
    with pytest.raises(InvalidStateStoreArgument, match=r"one key of operator 'totals', such as price=0\.0: .* add 0"):
        _distinct(target, found, keys, 8)


@pytest.mark.thorough  # otherwise: nothing; only Spark 4.3 writes this format, if it is set
@pytest.mark.skipif(pyspark.__version__ < "4.3", reason="This Spark does not write format 4.")
@pytest.mark.parametrize("provider", ["RocksDBStateStoreProvider"], ids=["of a join, format 4"], indirect=True)
def test_state_of_a_later_format_is_refused(make_stream: Callable[..., Stream], provider: str) -> None:
    stream = make_stream(INPUT)
    stream.add(rows(0))
    old, new = str(stream.root / "old"), str(stream.root / "new")
    query, _ = gather(joined_by_spark(stream.read(), "inner"), old, "append")
    drain(query, old, stream.files)
    query.stop()
    with pytest.raises(InvalidStateStoreArgument, match=r"has format 4, .*stateFormatVersion=3"):
        take_over(old, new, joined_here(stream.read(), "inner"), workers=OwnWorkers())


@pytest.mark.thorough  # otherwise: the same storage interface on a local disk
def test_state_may_go_to_an_object_store(make_stream: Callable[..., Stream], s3: FaultProxy) -> None:
    from spark_bridge.session.current import current_cluster

    stream = make_stream(INPUT)
    old, new = str(stream.root / "old"), str(stream.root / "new")
    stream.add(rows(0))
    query, _ = gather(stream.read().groupBy("user").agg(F.count("*"), F.sum("amount")), old)
    drain(query, old, stream.files)
    query.stop()
    program = aggregate(stream.read(), by="user", operator="totals", n=S.count(), total=S.sum("amount"))
    options = dict(current_cluster().conf.storage_options)
    report = take_over(old, new, program, storage_options=options, workers=OwnWorkers())
    assert sum(report.rows_written.values()) == 6 and not Path(new, "statestore").exists()
    stream.add(rows(1))
    query, found = gather(program, new)
    drain(query, new, stream.files)
    query.stop()
    data = pd.DataFrame([*rows(0), *rows(1)], columns=["user", "amount", "price", "cents", "ts"])
    sums = data.groupby("user", dropna=False)["amount"].agg(["size", "sum"])
    expected = [(None if pd.isna(k) else int(k), int(row["size"]), float(row["sum"])) for k, row in sums.iterrows()]
    assert outputs(found) == ordered(expected)


PAGE = Path(__file__).parents[3] / "docs/how-to/take-over.md"


@pytest.mark.thorough  # otherwise: nothing; a savepoint is Parquet, and the rest is Spark's
@pytest.mark.parametrize("provider", ["RocksDBStateStoreProvider"], indirect=True)
def test_native_query_starts_from_a_savepoint_as_the_page_shows(
    make_stream: Callable[..., Stream], provider: str
) -> None:
    stream, later = make_stream(INPUT), make_stream(INPUT)
    stream.add([row for row in rows(0) if row[0] is not None])
    later.add([row for row in rows(2) if row[0] is not None])
    program = aggregate(stream.read(), by="user", operator="user_totals", n=S.count(), spent=S.sum("amount"))
    query, _ = gather(program, stream.checkpoint)
    drain(query, stream.checkpoint, stream.files)
    savepoint = trigger_savepoint(query, str(stream.root / "savepoints"), stop=True).result(PATIENCE)

    code = PAGE.read_text().partition("## The way back")[2].partition("```python")[2].partition("```")[0]
    names: dict[str, Any] = {"spark": stream.spark, "clicks": later.read().where("user is not null")}
    exec(code.replace("savepoint/", f"{savepoint}/"), names)
    query, found = gather(names["totals"], str(later.root / "native"))
    drain(query, str(later.root / "native"), later.files)
    query.stop()
    data = pd.DataFrame([*rows(0), *rows(2)], columns=["user", "amount", "price", "cents", "ts"])
    sums = data.groupby("user")["amount"].agg(["size", "sum"])
    assert outputs(found) == ordered((int(k), int(row["size"]), float(row["sum"])) for k, row in sums.iterrows())


def refused_again(old: str, new: str, program: DataFrame) -> str:
    with pytest.raises(SavepointError) as refused:
        take_over(old, new, program, columns={"totals": {"n": 0, "total": 2}}, workers=OwnWorkers())
    return str(refused.value)


PROGRAM = """
from ray_statestore import aggregate
from ray_statestore import functions as S

def totals(spark):
    clicks = spark.readStream.schema("{schema}").parquet("{directory}")
    return aggregate(clicks, by="user", operator="totals", num_partitions=2, n=S.count(), total=S.sum("amount"))
"""


@pytest.mark.thorough  # otherwise: the tests above; the command starts a Spark and a Ray of its own
def test_command_takes_over_a_query(make_stream: Callable[..., Stream], tmp_path: Path) -> None:
    stream = make_stream(INPUT)
    old = str(stream.root / "old")
    stream.add(rows(0))
    query, _ = gather(stream.read().groupBy("user").agg(F.count("*"), F.sum("amount")), old)
    drain(query, old, stream.files)
    query.stop()
    (tmp_path / "my_job.py").write_text(PROGRAM.format(schema=INPUT, directory=stream.root / "in"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "spark_bridge.cli.main", "take-over", old, str(tmp_path / "new"), *arguments]
        environment = {**driver_environment(tmp_path), "PYTHONPATH": str(Path.cwd()), "SPARK_MASTER": "local[1]"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=HANG
        )

    looked = run("my_job:totals", "--dry-run")
    assert looked.returncode == 0, looked.stderr
    assert "totals/default: 6 rows" in looked.stdout and "Nothing was written" in looked.stdout
    assert not (tmp_path / "new").exists()
    done = run("my_job:totals", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows_written"] == {"totals/default": 6}
    assert state_table(str(tmp_path / "new"), "totals").num_rows == 6
    wrong = run("my_job:nothing")
    assert wrong.returncode == 2 and "must be MODULE:FUNCTION" in wrong.stderr, wrong.stderr
