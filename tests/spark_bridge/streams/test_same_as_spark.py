"""The same processors on the same random input give what Spark's own ``transformWithState`` gives, batch by batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession

from spark_bridge import transform_with_state, transform_with_state_in_pandas
from tests.effort import only_thorough
from tests.spark_bridge.conftest import Stream
from tests.spark_bridge.streams.processors import (
    BY,
    DELAY_MS,
    INITIAL,
    INPUT,
    OUTPUT,
    Commands,
    Model,
    PandasCommands,
    based_on,
    drain,
    gather,
    ordered,
    random_batches,
    random_starts,
)

# On Spark 3.5, which has no transformWithState, the collection is empty.
HAS_NATIVE = int(pyspark.__version__.split(".")[0]) >= 4
pytestmark = [
    pytest.mark.spark,
    pytest.mark.spark42,
    pytest.mark.skipif(not HAS_NATIVE, reason="This Spark has no transformWithState."),
]

SEED = int(os.environ.get("STATESTORE_TEST_SEED", "1"))
BATCHES = 6
NATIVE = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # Every task of Spark's starts a server for its state.
    "spark.sql.shuffle.partitions": "2",
    # With processing time, Spark would run them for ever.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}


@pytest.fixture
def native(spark: SparkSession) -> Iterator[None]:
    """What Spark's own transformWithState needs of the session."""
    before = {name: spark.conf.get(name, None) for name in NATIVE}
    for name, value in NATIVE.items():
        spark.conf.set(name, value)
    yield
    for name, earlier in before.items():
        if earlier is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, earlier)


CASES = {
    "pandas, no time, initial state": (PandasCommands, "none", True),
    "rows, processing time and TTL, initial state": (Commands, "processingTime", True),
    # Last: in a JVM that has just been started, both queries of it have once died of a stack overflow in Spark.
    "rows, event time": (Commands, "eventTime", False),
}


@pytest.mark.parametrize("case", [*map(only_thorough, list(CASES)[:-1]), list(CASES)[-1]])
def test_random_commands(make_stream: Callable[..., Stream], native: None, tmp_path: Path, case: str) -> None:
    from pyspark.sql.streaming import StatefulProcessor

    processor, time_mode, starts = CASES[case]
    stream = make_stream(INPUT)
    pandas = processor is PandasCommands
    # Spark's pandas form treats each row with a null number in its key as a separate key: NaN is not NaN.
    start_rows = random_starts(time_mode, null_keys=not pandas) if starts else []
    initial = stream.spark.createDataFrame(start_rows, INITIAL) if starts else None

    def of_spark(df: DataFrame) -> DataFrame:
        grouped = df.groupBy(*BY)
        transform = grouped.transformWithStateInPandas if pandas else grouped.transformWithState
        return transform(
            based_on(StatefulProcessor, processor, time_mode=time_mode),
            OUTPUT,
            "update",
            time_mode,
            initialState=None if initial is None else initial.groupBy(*BY),
        )

    def of_this_package(df: DataFrame) -> DataFrame:
        transform = transform_with_state_in_pandas if pandas else transform_with_state
        return transform(
            df,
            BY,
            # One task fails and is tried again.
            based_on(StatefulProcessor, processor, time_mode=time_mode, fails_once=str(tmp_path / "failed")),
            OUTPUT,
            operator="commands",
            time_mode=time_mode,
            initial_state=initial,
            num_partitions=3,
        )

    batches = random_batches(SEED, time_mode, BATCHES, null_keys=not pandas)
    found: dict[str, list[Any]] = {"spark": [], "package": []}
    for part in (batches[: BATCHES // 2], batches[BATCHES // 2 :]):
        for batch in part:
            stream.add(batch)
        df = stream.read().withWatermark("ts", f"{DELAY_MS} milliseconds")
        running = {
            who: gather(transformed(df), str(stream.root / who))
            for who, transformed in (("spark", of_spark), ("package", of_this_package))
        }
        for who, (query, given) in running.items():
            drain(query, str(stream.root / who), stream.files)
            query.stop()
            # Batches without data come as they like; they give nothing here.
            found[who] += [ordered(given[n]) for n in sorted(given) if given[n]]

    for number in range(BATCHES):
        theirs, ours = found["spark"][number], found["package"][number]
        assert ours == theirs, f"batch {number} of seed {SEED}"
    assert len(found["package"]) == len(found["spark"]) == BATCHES
    assert sum(map(len, found["spark"])) > 20 * BATCHES
    # The model that replaces Spark where transformWithState does not exist is right too.
    model = Model(time_mode)
    model.start_with(start_rows)
    assert found["spark"] == [model.run(batch) for batch in batches], f"the model is wrong for seed {SEED}"
