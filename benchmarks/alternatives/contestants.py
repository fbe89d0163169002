"""The contestants, their environments and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Pace = Literal["fast", "medium", "slow", "slowest"]
COMMITS = "durable with each batch"
ROCKSDB = {"stateStore": "RocksDB", "changelogCheckpointing": "true", "trackTotalNumberOfRows": "false"}
FLINK = {
    "state.backend.type": "rocksdb",
    "incremental": "true",
    "parallelism": "2",
    "managed memory": "512 mb",
}


@dataclass(frozen=True)
class Group:
    """Contestants of one program in one environment; they use its process one after the other.

    ``package`` is what the environment is there for. ``goes_on``: whether one process can start a contestant twice.
    """

    name: str
    program: str
    environment: str
    package: str
    goes_on: bool = False


@dataclass(frozen=True)
class Alternative:
    """A contestant: ``told`` is its name in the program. ``pace`` sets the number of batches that it gets in a turn.

    ``fed_twice``: it takes all waiting input as one batch, so the measured rows are given to it after the warm-up.
    """

    name: str
    group: Group
    told: str
    label: str
    pace: Pace
    durable: str = "a checkpoint a second"
    settings: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False
    fed_twice: bool = False


OURS_42 = Group("ours", "spark_program", "spark42", "pyspark", goes_on=True)
OURS_FILE = Group("ours, file", "spark_program", "spark42", "pyspark", goes_on=True)
OURS_35 = Group("ours on 3.5", "spark_program", "spark35", "pyspark", goes_on=True)
SPARK_42 = Group("Spark", "spark_program", "spark42", "pyspark", goes_on=True)
SPARK_35 = Group("Spark 3.5", "spark_program", "spark35", "pyspark", goes_on=True)
PYFLINK = Group("Flink", "flink_program", "flink", "apache-flink")
BYTEWAX = Group("Bytewax", "bytewax_program", "bytewax", "bytewax")
PATHWAY = Group("Pathway", "pathway_program", "pathway", "pathway")


def _ours(group: Group, ending: str, provider: str, backend: str) -> list[Alternative]:
    forms: list[tuple[str, str, Pace]] = [
        ("aggregate", "aggregate", "fast"),
        ("arrow", "transform_with_state_in_arrow", "fast"),
        ("rows", "transform_with_state", "medium"),
        ("pandas", "transform_with_state_in_pandas", "medium"),
    ]
    where = {"executors": "2 of one core", "provider": backend}
    return [
        Alternative(f"{form}{ending}", group, f"{form} {provider}", f"{label}, RayDP", pace, COMMITS, where, True)
        for form, label, pace in forms
    ]


def _spark(group: Group, name: str, told: str, label: str, pace: Pace) -> Alternative:
    return Alternative(name, group, told, f"Spark {label}, local[2]", pace, COMMITS, ROCKSDB)


def _flink(name: str, told: str, label: str, pace: Pace, **settings: str) -> Alternative:
    return Alternative(name, PYFLINK, told, f"PyFlink {label}", pace, settings={**FLINK, **settings})


ALTERNATIVES = {
    a.name: a
    for a in (
        *_ours(OURS_42, "", "rocksdb", "RocksDB"),
        *_ours(OURS_FILE, "-file", "file", "file"),
        _ours(OURS_35, "-3.5", "rocksdb", "RocksDB")[0],
        _spark(SPARK_42, "spark-native", "native", "groupBy().agg()", "fast"),
        _spark(SPARK_42, "spark-pandas-state", "spark_pandas_state", "applyInPandasWithState", "slow"),
        _spark(SPARK_42, "spark-pandas", "spark_pandas", "transformWithStateInPandas", "slow"),
        _spark(SPARK_42, "spark-rows", "spark_rows", "transformWithState", "slow"),
        _spark(SPARK_35, "spark-native-3.5", "native", "groupBy().agg()", "fast"),
        _spark(SPARK_35, "spark-pandas-state-3.5", "spark_pandas_state", "applyInPandasWithState", "slow"),
        _flink("flink-process", "process", "KeyedProcessFunction, mode process", "slowest", cache="100,000 keys"),
        _flink("flink-thread", "thread", "KeyedProcessFunction, mode thread", "slowest"),
        _flink("flink-table", "table", "Table API, GROUP BY", "medium"),
        _flink(
            "flink-table-mini-batch",
            "table mini-batch",
            "Table API, GROUP BY, mini-batches",
            "medium",
            **{"mini-batch.size": "5000", "mini-batch.allow-latency": "1 s"},
        ),
        Alternative("bytewax", BYTEWAX, "bytewax", "Bytewax stateful_map", "medium", settings={"processes": "2"}),
        Alternative(
            "pathway",
            PATHWAY,
            "pathway",
            "Pathway groupby().reduce()",
            "medium",
            settings={"threads": "2"},
            fed_twice=True,
        ),
    )
}
