"""Run the suite in parts and print how long each took: ``python -m tests.run --help``.

``python -m tests.run --pythons .venv310 .venv312`` runs the part without clusters, and the demo, in other environments.

Tests of the product that need neither cluster nor browser run first, then those of everything around the product; the
tests on Spark 3.5, which wait most of their time, run beside both. Each part has its own directory for the files of its
tests and of Ray, which is removed with the part; its output is prefixed with its name. ``--slow`` runs the rest, which
a change must pass, too: the tests on Spark 4.2, and those marked ``slow``. Tests of behaviour that differs between the
lines of Spark run on both; other tests of clusters are distributed over them.

A thorough run does the rest: each test of clusters on the other line, the tests marked ``thorough`` on both, and the
part without clusters with many times as much random work. Without arguments of pytest, it also searches the simulation
for broken rules, over fresh seeds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from tests.scratch import SCRATCH

ROOT = Path(__file__).parents[1]
NOTHING_COLLECTED = 5
"""The status of pytest where its arguments have chosen no test of a part."""
SUMMARY = "short test summary info"
MOST_FAILURES = 20
COLUMNS = "160"
"""The report names so many failed tests, each on a line of pytest of so many columns."""


@dataclass(frozen=True)
class Part:
    """A part of the suite: its name and its command. It begins once the parts ``after`` of the same step have ended.

    A part with a number in ``core`` runs on one core alone, and shares it with parts of other numbers if cores are few.
    """

    name: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    core: int | None = None
    after: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """How a part ended: the status of its process, its time in seconds, and its last line, of pytest's if there is one.

    Libraries may also print while the process ends. ``failures`` are the lines of pytest's summary that name a test.
    """

    part: Part
    status: int
    seconds: float
    last_line: str
    failures: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether no test failed."""
        return self.status in (0, NOTHING_COLLECTED)


def run_part(part: Part, out: TextIO, prefix: str = "") -> Outcome:
    """Run a part; write its output line by line, each behind ``prefix``."""
    begun = time.monotonic()
    files = tempfile.mkdtemp(prefix="rs-", dir=SCRATCH)
    last, is_summary, failures = "", False, []
    try:
        with subprocess.Popen(
            part.command,
            env={
                **os.environ,
                "COLUMNS": COLUMNS,
                "RAY_TMPDIR": files,
                "PYTEST_DEBUG_TEMPROOT": files,
                **part.environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            keep_to_core(process.pid, part.core)
            for line in process.stdout:
                out.write(prefix + line)
                out.flush()
                if line.startswith("=") or not last.startswith("="):
                    last = line.strip() or last
                is_summary = is_summary or SUMMARY in line  # before it, logged errors may begin with the same word
                if is_summary and line.startswith(("FAILED ", "ERROR ")):
                    failures.append(line.strip())
    finally:
        # Tests leave tens of thousands of files: pytest's own way to remove those of earlier runs takes seconds.
        subprocess.run(["rm", "-rf", files], check=False)
    return Outcome(part, process.returncode, time.monotonic() - begun, last.strip(" ="), tuple(failures))


def keep_to_core(pid: int, core: int | None) -> None:
    """Have a process that has just begun, and all that it starts, run on one core, where the system can do that.

    Of the threads of one Python, one runs at a time. To wake the next one on another core takes a tenth of the time of
    the tests without clusters.
    """
    if core is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        with suppress(ProcessLookupError):  # it has ended already
            os.sched_setaffinity(pid, {cores[core % len(cores)]})


def run_steps(steps: Sequence[Sequence[Part]], out: TextIO) -> list[Outcome]:
    """Run step after step, the parts of a step side by side; stop after a step with a failure."""
    outcomes: list[Outcome] = []
    for step in steps:
        with ThreadPoolExecutor(len(step) or 1) as threads:
            running: dict[str, Future[Outcome]] = {}
            for part in step:
                earlier = [running[name] for name in part.after]
                running[part.name] = threads.submit(_run_after, earlier, part, out, is_alone=len(step) == 1)
            outcomes += [one.result() for one in running.values()]
        if not all(outcome.is_right for outcome in outcomes):
            break
    return outcomes


def _run_after(earlier: Sequence[Future[Outcome]], part: Part, out: TextIO, *, is_alone: bool) -> Outcome:
    wait(earlier)
    return run_part(part, out, "" if is_alone else f"{part.name} | ")


def spoken(seconds: float) -> str:
    """Return a time as it is read: ``48 s``, ``7 min 05 s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def report(outcomes: Sequence[Outcome], seconds: float, bound: float | None) -> str:
    """Return a table of the parts, their times and results: first all that failed, the time of all as the last line.

    Logs of CI are often cut to their end, so the names of failed tests belong there.
    """
    rows = [(o.part.name, spoken(o.seconds), o.last_line) for o in outcomes]
    most = "" if bound is None else f"(bound {spoken(bound)})  "
    rows.append(("in all", spoken(seconds), most + ("right" if all(o.is_right for o in outcomes) else "FAILED")))
    failures = [f"{o.part.name}: {line}" for o in outcomes for line in o.failures]
    table = [f"{name:18} {took:>12}  {said}" for name, took, said in rows]
    if len(failures) > MOST_FAILURES:
        failures[MOST_FAILURES:] = [f"and {len(failures) - MOST_FAILURES} more failed tests"]
    return "\n".join([*failures, *table])


LINES_AND_THEIR_REST = (
    (
        "(ray or spark) and not spark42_only and not service",
        "(ray or spark) and not service and (spark42_only or thorough)",
    ),
    (
        "(spark42 or spark42_only) and not service",
        "(ray or spark) and not service and (thorough or not (spark42 or spark42_only))",
    ),
)
"""The marks of the tests of clusters on Spark 3.5, and on Spark 4.2: all but those of a thorough run, and these."""
SERVICES = (
    "service and not (spark or ray)",
    "service and (spark or ray) and not spark42_only",
    "service and (spark42 or spark42_only)",
)
"""The marks of the tests that a run with services chooses: without clusters, for Spark 3.5, and for Spark 4.2."""
ALL_SERVICES = (SERVICES[0], *["service and (spark or ray)"] * 2)
SIMULATED_FOR = "10m"
"""A thorough run searches worlds of fresh seeds for broken rules for this long."""
NO_CLUSTER = "not ray and not spark and not service"
_STATE = [
    *(f"tests/backends/{name}" for name in ("engines", "formats", "partition", "providers", "storage")),
    "tests/spark_bridge/state_data",
]
_HOSTS = [f"tests/spark_bridge/{name}" for name in ("demo", "host", "session", "task")]
_OPERATORS = [
    *(f"tests/spark_bridge/{name}" for name in ("aggregates", "alerts", "operators")),
    *(f"tests/spark_bridge/{name}" for name in ("stateful", "streams", "test_dashboard.py", "test_pages.py")),
]
_QUERIES = ["tests/spark_bridge/queryable"]
_PROTOCOL = ["tests/spark_bridge/transport", "tests/coordinator_actor", "tests/simulation"]
_SURGERY = [
    *(f"tests/spark_bridge/{name}" for name in ("cli", "overview", "state_surgery")),
    *(f"tests/spark_bridge/test_{name}.py" for name in ("followed_query", "indexes", "lookup_task", "wrong_use")),
]
_CLIENTS = [
    f"tests/spark_bridge/queryable/{name}"
    for name in ("client", "server", "sql", "test_connections.py", "test_wire.py")
]
_PAGE = ["tests/spark_bridge/ui"]
_PLANTED = "tests/simulation/test_planted_faults.py"
_FEAST = ("feast", "feast_offline")
_OF_THE_TREE = [f"tests/test_{name}.py" for name in (*_FEAST, "imports", "names", "public_names", "run")]
_ABOUT = ["tests/benchmarks", "tests/deploy", "tests/docs", "tests/spark_bridge/state_http", *_OF_THE_TREE, _PLANTED]
WITHOUT_CLUSTERS = {
    "state": _STATE,
    "queries, protocol": [*_QUERIES, *_PROTOCOL, *(f"--ignore={path}" for path in (*_CLIENTS, _PLANTED))],
    "hosts, operators": [
        *(*_HOSTS, "tests/cluster", "tests/backends", *_OPERATORS),
        *(f"--ignore={path}" for path in _STATE),
    ],
    "surgery, clients": [*_SURGERY, *_CLIENTS],
}
"""The tests without clusters, in parts of about the same length: each process collects and imports its own alone.

They are twice as many as cores, since the tests of a part wait for a third of their time. Of two cores, the first and
the third part have one, the others have the other. Where two share a core, their waits come at different times: hosts
wait at first, clients at last, and what tests state has no waits to speak of.
"""
AROUND = {"around it": _ABOUT, "the page": _PAGE}
"""Tests without clusters of everything around the product: benchmarks, deployment, documentation, the suite, the page.

They start many processes, and a browser, which takes a core for half a minute. A usual run has them after the others,
so that mistakes in the product show sooner.
"""


def steps_of(is_thorough: bool, arguments: Sequence[str]) -> list[list[Part]]:
    """Return the steps of the suite; those of a thorough run are the rest of the usual ones."""
    given = {"STATESTORE_TEST_EFFORT": "thorough"} if is_thorough else {}

    def part(name: str, venv: str, *options: str) -> Part:
        return Part(name, [f"{venv}/bin/python", "-m", "pytest", *options, *arguments], environment=given)

    def without_clusters(parts: Mapping[str, Sequence[str]]) -> list[Part]:
        chosen = NO_CLUSTER if is_thorough else f"{NO_CLUSTER} and not slow"
        return [part(name, ".venv", *of, "-m", chosen) for name, of in parts.items()]

    (usual, rest), (_, rest_on_42) = LINES_AND_THEIR_REST
    if is_thorough:
        search = Part("simulation", [".venv/bin/python", "-m", "tests.simulation", "--for", SIMULATED_FOR])
        return [
            without_clusters(WITHOUT_CLUSTERS | AROUND),
            *([] if arguments else [[search]]),
            [part("Spark 3.5", ".venv", "-m", rest), part("Spark 4.2", ".venv42", "-m", rest_on_42)],
        ]
    on_spark = part("Spark 3.5", ".venv", "-m", f"{usual} and not slow")
    of_product = [replace(p, core=i) for i, p in enumerate(without_clusters(WITHOUT_CLUSTERS))]
    around = [replace(p, after=tuple(WITHOUT_CLUSTERS)) for p in without_clusters(AROUND)]
    return [[on_spark, *of_product, *around]]


def steps_of_slow(arguments: Sequence[str]) -> list[list[Part]]:
    """Return the step of the slow tests and those on Spark 4.2, which a usual run leaves out."""
    (on_35, _), (on_42, _) = LINES_AND_THEIR_REST
    return [
        [
            Part("without clusters", [".venv/bin/python", "-m", "pytest", "-m", f"{NO_CLUSTER} and slow", *arguments]),
            Part("Spark 3.5", [".venv/bin/python", "-m", "pytest", "-m", f"{on_35} and slow", *arguments]),
            Part("Spark 4.2", [".venv42/bin/python", "-m", "pytest", "-m", on_42, *arguments]),
        ]
    ]


ON_KAFKA = {
    ".venv": ("join", "windows_stream", "rolling_stream", "aggregation"),
    ".venv42": ("transform_time", "transform_with_state", "transform_restarts", "stream"),
}
"""Tests of streams that a thorough run with services repeats over a topic, by environment: every operator."""
LISTS_FILES = "not rescaled_restarted_saved_and_queried and not nearest_in_time_are_those_of_pandas"
"""Left out of these: tests that read the stream's files, or count on a batch for each file from the very first."""
LISTS_FILES += " and not over_all_rows_emits_the_same"


def steps_of_services(is_thorough: bool, arguments: Sequence[str]) -> list[list[Part]]:
    """Return the steps of the tests that need real services.

    A thorough run has all of them on both lines of Spark, and then every operator over Kafka.
    """
    environment = {"STATESTORE_TEST_EFFORT": "thorough"} if is_thorough else {}
    names, venvs = ("services", "Spark 3.5", "Spark 4.2"), (".venv", ".venv", ".venv42")
    parts = [
        Part(name, [f"{venv}/bin/python", "-m", "pytest", "-m", marks, *arguments], environment=environment)
        for name, venv, marks in zip(names, venvs, ALL_SERVICES if is_thorough else SERVICES, strict=True)
    ]
    on_kafka = [
        Part(
            f"{venv.removeprefix('.')}, Kafka",
            [f"{venv}/bin/python", "-m", "pytest", "-m", "spark and not thorough", "-k", LISTS_FILES]
            + [f"tests/spark_bridge/streams/test_{name}.py" for name in names],
            environment={"STATESTORE_TEST_SOURCE": "kafka"},
        )
        for venv, names in ON_KAFKA.items()
    ]
    return [parts, *([on_kafka] if is_thorough else [])]


def steps_of_pythons(venvs: Sequence[str]) -> list[list[Part]]:
    """Return the part without clusters and the demo for each environment, one after the other."""

    def part(venv: str, what: str, *options: str) -> Part:
        return Part(f"{venv.removeprefix('.')} {what}", [f"{venv}/bin/python", "-m", "pytest", *options])

    return [
        step
        for venv in venvs
        for step in (
            [part(venv, name, *of, "-m", NO_CLUSTER) for name, of in (WITHOUT_CLUSTERS | AROUND).items()],
            [part(venv, "demo", "tests/spark_bridge/demo/test_demo.py")],
        )
    ]


def main(arguments: Sequence[str]) -> int:
    """Run the suite; return 0 if all of it is right."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description="Other arguments are those of pytest.")
    parser.add_argument("--thorough", action="store_true", help="run what a usual run leaves out")
    parser.add_argument("--slow", action="store_true", help="run the slow tests, and those on Spark 4.2")
    parser.add_argument("--without-clusters", action="store_true", help="run only what needs neither Ray nor Spark")
    parser.add_argument("--services", action="store_true", help="run what needs the services of `make services`")
    parser.add_argument("--pythons", nargs="+", metavar="VENV", help="run in these environments: no cluster, the demo")
    given, rest = parser.parse_known_args(arguments)
    if given.pythons and given.without_clusters:
        parser.error("--pythons runs the tests without clusters and the demo: leave --without-clusters out.")
    begun = time.monotonic()
    steps = steps_of_pythons(given.pythons) if given.pythons else steps_of(given.thorough, rest)
    steps = steps_of_services(given.thorough, rest) if given.services else steps
    steps = steps_of_slow(rest) if given.slow else steps
    if given.without_clusters:
        steps = [[p for p in step if p.name in (WITHOUT_CLUSTERS | AROUND)] for step in steps]
    is_usual = not (given.thorough or given.pythons or given.without_clusters or given.services or given.slow)
    bound = 600.0 if is_usual else None
    outcomes = run_steps(steps, sys.stdout)
    print(f"\n{report(outcomes, time.monotonic() - begun, bound)}")
    return 0 if all(outcome.is_right for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
