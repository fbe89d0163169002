"""How long a session takes to start, and to commit its first batch: Ray, Ray with RayDP, and ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from suite.machine import ray_directory
from suite.model import Case, Comparison, Contestant, Measured, Size, Target, Turns
from suite.runner import Steps

RAY, RAYDP, OURS = "ray", "raydp", "ours"
CONTESTANTS = {
    RAY: Contestant("`ray.init()` alone"),
    RAYDP: Contestant("`ray.init()` and `raydp.init_spark()`, then Spark's own aggregate in RocksDB"),
    OURS: Contestant("`init_spark()`, then `aggregate`; or `attach()` to RayDP's session", {}, True),
}
SESSION = "process start to the Spark session (`ray`: to Ray)"
EXECUTORS = "process start to the session with all its executors"
CPU = "CPU of all processes until then"
BATCH = "then to the first committed batch"
BATCH_CPU = "CPU of all processes in that time"
TOGETHER = "process start to the first committed batch"
ATTACH = "`attach` to running Ray and Spark"
TURN = Path(__file__).resolve().parents[1] / "startup_turn.py"


def run(size: Size, steps: Steps) -> Measured:
    """Start the contestants in turns, each in a separate process and Ray cluster."""
    turns: dict[str, Turns] = {}

    def add(case: str, contestant: str, figure: float) -> None:
        turns.setdefault(case, {}).setdefault(contestant, []).append([figure])

    steps.expect(len(CONTESTANTS) * size["turns"])
    for contestant in steps.turns("start", CONTESTANTS, size["turns"]):
        seconds, cpu = _turn(contestant, size)
        add(SESSION, contestant, seconds["session"])
        if contestant == RAY:
            continue
        until_executors = seconds["session"] + seconds["executors"]
        add(EXECUTORS, contestant, until_executors)
        add(CPU, contestant, cpu["session"] + cpu["executors"])
        add(BATCH, contestant, seconds["batch"])
        add(BATCH_CPU, contestant, cpu["batch"])
        add(TOGETHER, contestant, until_executors + seconds["batch"])
        if "attach" in seconds:
            add(ATTACH, OURS, seconds["attach"])
    units = {CPU: "CPU-s", BATCH_CPU: "CPU-s"}
    cases = [Case(case, units.get(case, "s"), figures) for case, figures in turns.items()]
    return Measured(
        CONTESTANTS,
        cases,
        [
            f"Each turn is a separate process, which starts Ray and {size['executors']} executors of one core. "
            f"{size['rows']:,} rows of a JSON file with 100 keys are the first batch; its totals are checked.",
            "`raydp.init_spark` returns before executors have registered; ours returns when they have, and hosts and "
            "coordinator answer.",
            "The files of all programs were in the page cache. Times depend on the load of the machine more than "
            "those of other comparisons: a start occupies all cores. CPU seconds depend on it less.",
        ],
    )


def _turn(contestant: str, size: Size) -> tuple[dict[str, float], dict[str, float]]:
    """Run one turn; return seconds and CPU seconds by the name of the mark."""
    command = [sys.executable, str(TURN), contestant, str(size["executors"]), str(size["rows"])]
    with ray_directory() as temporary:
        environment = os.environ | {"RAY_TMPDIR": str(temporary)}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{contestant} ended with status {ran.returncode}: {ran.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return answer["seconds"], answer["cpu"]


COMPARISONS = (
    Comparison(
        name="startup",
        title="Start of a session, and its first batch",
        about="A start loads and compiles code on all cores: of Ray, of RayDP's five JVMs, and of ours.",
        run=run,
        sizes={"full": dict(turns=3, executors=2, rows=1_000), "smoke": dict(turns=1, executors=1, rows=1_000)},
        minutes={"full": 30, "smoke": 10},
        targets=(
            Target("`init_spark` after Ray and RayDP", EXECUTORS, OURS, 3, "difference", against=RAYDP, unit="s"),
            Target.at_most("its first committed batch", BATCH, OURS, 4, "s"),
            Target.at_most("`attach`", ATTACH, OURS, 4, "s"),
        ),
        in_smoke=False,
    ),
)
