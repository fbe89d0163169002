"""The contestants and their settings, their environments, and their table in the report."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from suite.model import VENV, VENV42, Part, Spread, ratio
from suite.runner import interpreter

Pace = Literal["fast", "medium", "slow", "slowest"]
COMMITS = "durable with each batch"
ROCKSDB = {"stateStore": "RocksDB", "changelogCheckpointing": "true", "trackTotalNumberOfRows": "false"}
FLINK = {"state.backend.type": "rocksdb", "incremental": "true", "parallelism": "2", "managed memory": "512 mb"}


@dataclass(frozen=True)
class Group:
    """Contestants of one program in one environment; they use its process one after the other.

    The environment exists for ``package``. ``restartable``: whether one process can start a contestant twice.
    """

    name: str
    program: str
    environment: str
    package: str
    restartable: bool = False


@dataclass(frozen=True)
class Alternative:
    """A contestant: ``mode`` is its name in the program. ``pace`` sets its number of batches in a turn.

    ``fed_twice``: it takes all waiting input as one batch, so the measured rows are given to it after the warm-up.
    """

    name: str
    group: Group
    mode: str
    label: str
    pace: Pace
    durable: str = "a checkpoint a second"
    settings: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False
    fed_twice: bool = False


OURS_42 = Group("ours", "spark_program", "spark42", "pyspark", restartable=True)
OURS_FILE = Group("ours, file", "spark_program", "spark42", "pyspark", restartable=True)
OURS_35 = Group("ours on 3.5", "spark_program", "spark35", "pyspark", restartable=True)
SPARK_42 = Group("Spark", "spark_program", "spark42", "pyspark", restartable=True)
SPARK_35 = Group("Spark 3.5", "spark_program", "spark35", "pyspark", restartable=True)
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


def _spark(group: Group, name: str, mode: str, label: str, pace: Pace) -> Alternative:
    return Alternative(name, group, mode, f"Spark {label}, local[2]", pace, COMMITS, ROCKSDB)


def _flink(name: str, mode: str, label: str, pace: Pace, **settings: str) -> Alternative:
    return Alternative(name, PYFLINK, mode, f"PyFlink {label}", pace, settings={**FLINK, **settings})


ALTERNATIVES = {
    a.name: a
    for a in (
        *_ours(OURS_42, "", "rocksdb", "RocksDB"),
        replace(
            _ours(OURS_42, "-partial", "rocksdb", "RocksDB")[0],
            mode="aggregate_partial rocksdb",
            label="aggregate(partial_aggregation=True), RayDP",
        ),
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
            *("flink-table-mini-batch", "table mini-batch", "Table API, GROUP BY, mini-batches"),
            pace="medium",
            **{"mini-batch.size": "5000", "mini-batch.allow-latency": "1 s"},
        ),
        Alternative("bytewax", BYTEWAX, "bytewax", "Bytewax stateful_map", "medium", settings={"processes": "2"}),
        Alternative(
            *("pathway", PATHWAY, "pathway", "Pathway groupby().reduce()", "medium"),
            settings={"threads": "2"},
            fed_twice=True,
        ),
    )
}

# -- the Pythons of the contestants
#
# Each other engine has its own environment with pinned packages, outside of Git. It is made again when its file of
# ``requirements`` has changed.

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements"
ENVIRONMENTS = HERE.parent / ".environments"
SPARK = {"spark35": VENV, "spark42": VENV42}


def python_of(name: str) -> Path:
    """Return the Python of an environment, which is made if needed. Raises ``RuntimeError`` if it cannot be made."""
    if name in SPARK:
        return interpreter(SPARK[name])
    directory, wanted = ENVIRONMENTS / name, (REQUIREMENTS / f"{name}.txt").read_text()
    python, made = directory / "bin" / "python", directory / ".made-of"
    if made.exists() and made.read_text() == wanted:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    _call([sys.executable, "-m", "venv", str(directory)])
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _call([*pip, "-r", str(REQUIREMENTS / f"{name}.txt")])
    made.write_text(wanted)
    return python


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise RuntimeError(f"{' '.join(command[1:])} ended with status {done.returncode}: {said[-1]}")


def version_of(package: str, python: Path) -> str:
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


# -- the table of the report: a contestant a line, the fastest first

PER_CORE = "updates a second and core"
PER_SECOND = "updates a second on two cores"
TO_RESULT = "one event, to its result"
TO_QUERY = "one event, to a value that can be queried"
UNITS = {PER_CORE: "updates/CPU s", PER_SECOND: "updates/s", TO_RESULT: "ms", TO_QUERY: "ms"}
AGAINST = "aggregate"
HEADING = (
    *("contestant", "what it is", PER_CORE, f"`{AGAINST}` is so many times as fast"),
    *("updates a second, 2 cores", "one event: ms to its result", "ms to a value that can be queried"),
)


def rows(part: Part) -> list[Sequence[str]]:
    """Return the lines of the table below ``HEADING``."""
    per_core = part.case(PER_CORE)
    if per_core is None:
        return []
    names = sorted(per_core.turns, key=lambda name: -Spread.of(per_core.figures(name)).median)
    made: list[Sequence[str]] = []
    for name in names:
        contestant = part.contestants[name]
        times = "" if name == AGAINST or AGAINST not in per_core.turns else str(ratio(per_core, AGAINST, name))
        label = f"**{name}**" if contestant.is_ours else name
        per_second, result, queried = (_figure(part, case, name) for case in (PER_SECOND, TO_RESULT, TO_QUERY))
        queried = queried or ("" if contestant.is_ours else "none")
        made.append((label, contestant.label, _figure(part, PER_CORE, name), times, per_second, result, queried))
    return made


def _figure(part: Part, case: str, name: str) -> str:
    found = part.case(case)
    return str(Spread.of(found.figures(name))) if found is not None and name in found.turns else ""
