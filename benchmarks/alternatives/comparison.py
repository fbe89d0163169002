"""Updates a second and core of stateful Python: ours, Spark's own, Flink, Bytewax and Pathway."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from suite.machine import directory
from suite.model import VENV, VENV42, Case, Comparison, Contestant, Measured, Part, Size, Spread, Table, ratio
from suite.runner import Steps, interpreter, made_environment

if TYPE_CHECKING:
    from alternatives.turns import Course

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
# Each other engine has its own environment with pinned packages, outside of Git.

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements"
ENVIRONMENTS = HERE.parent / ".environments"
SPARK = {"spark35": VENV, "spark42": VENV42}


def python_of(name: str) -> Path:
    """Return the Python of an environment, which is made if needed. Raises ``EnvironmentMissingError``."""
    if name in SPARK:
        return interpreter(SPARK[name])
    return made_environment(ENVIRONMENTS / name, (REQUIREMENTS / f"{name}.txt").read_text())


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


# -- the comparison


def chosen(names: list[str]) -> list[Alternative]:
    """Return contestants by name. Raises ``ValueError`` for an unknown one."""
    if unknown := [name for name in names if name not in ALTERNATIVES]:
        raise ValueError(f"Unknown contestant {', '.join(unknown)}; the contestants are {', '.join(ALTERNATIVES)}.")
    return [ALTERNATIVES[name] for name in names]


def run(size: Size, steps: Steps) -> Measured:
    """Give all contestants the same rows, in turns; compare the whole state of each, then give the figures."""
    from alternatives import turns

    wanted = chosen(size["contestants"])
    sizes = turns.Sizes(size["turns"], size["events"], size["checkpoint_seconds"], size["share"])
    steps.expect(len(wanted) * (sizes.turns + 1))
    pythons, versions, left_out = _environments(wanted, steps)
    with directory() as root:
        steps.now("making the input")
        slices = max(turns.slices_of(a.pace, sizes.share)[0] for a in wanted) * sizes.turns
        made = turns.make(root / "given", size["rows"] // turns.SLICES, size["keys"], slices)
        runner = turns.Courses(root, pythons, made, sizes, steps, left_out)
        courses = runner.run([a for a in wanted if a.name not in left_out])
    described = {(a := c.alternative).name: _described(a, versions[a.group.environment]) for c in courses}
    notes = [
        "The whole state of each was compared at the end: counts and sums of all users were equal to what numpy "
        f"computes of the same rows. Each was started {sizes.turns + 1} times, from its own state.",
        "An update is a row that is counted. Per core: of a second of CPU time of all processes of the contestant, "
        "which are bound to two cores.",
        *(f"`{name}` is left out: {why}" for name, why in left_out.items()),
    ]
    return Measured(described, _cases(courses), notes)


def _environments(wanted: list[Alternative], steps: Steps) -> tuple[dict[str, Path], dict[str, str], dict[str, str]]:
    """Return Pythons and versions by environment, and by contestant why one that has none is left out."""
    pythons, versions, left_out = dict[str, Path](), dict[str, str](), dict[str, str]()
    for group in dict.fromkeys(a.group for a in wanted):
        steps.now(f"making the environment of {group.name}")
        try:
            pythons[group.environment] = python_of(group.environment)
            versions[group.environment] = version_of(group.package, pythons[group.environment])
        except RuntimeError as error:
            steps.say(f"{group.name} is left out: {error}")
            left_out |= {a.name: str(error) for a in wanted if a.group == group}
    return pythons, versions, left_out


def _described(alternative: Alternative, version: str) -> Contestant:
    settings = {alternative.group.package: version, **alternative.settings, alternative.durable: ""}
    return Contestant(alternative.label, settings, alternative.is_ours)


def _cases(courses: list[Course]) -> list[Case]:
    cases = []
    for (case, unit), figure in zip(UNITS.items(), ("per_core", "per_second", "to_result", "to_query"), strict=True):
        turns = {c.alternative.name: [[v] for v in values] for c in courses if (values := getattr(c, figure))}
        if turns:
            cases.append(Case(case, unit, turns, more_is_better=unit != "ms"))
    return cases


COMPARISONS = (
    Comparison(
        name="alternatives",
        title="What people would pick instead",
        about="A running count and sum by user, durable and restarted from its state between turns: this project, "
        "PySpark's own ways, PyFlink, Bytewax and Pathway, each set up as its documentation says. "
        "`docs/explanation/alternatives.md` says how.",
        run=run,
        sizes={
            "full": dict(contestants=list(ALTERNATIVES), rows=500_000, keys=20_000, turns=2, events=5)
            | dict(checkpoint_seconds=1.0, share=1.0),
            "smoke": dict(contestants=["aggregate-3.5", "spark-native-3.5", "bytewax"], rows=40_000, keys=4_000)
            | dict(turns=2, events=2, checkpoint_seconds=1.0, share=0.25),
        },
        minutes={"full": 60, "smoke": 6},
        in_smoke=False,
        table=Table(HEADING, rows),
    ),
)
