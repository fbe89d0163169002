"""A machine with an executor and a state host is lost: how long the stream stalls, without and with standbys.

    python -m benchmarks.on_machines.recovery               half an hour, root; writes benchmarks/results/recovery*
    python -m benchmarks.on_machines.recovery --keys 100000 --turns 1 --no-write

On the lab of the tests: a stream over ten million keys in 8 partitions, on two of three machines other than the head.
One of them is killed, loses power, or has its cable cut, in turns; it comes back some time later, and the next one
follows. With standbys, the state host's process alone is killed as well: without them, its partitions wait for its
restart, which ``host-kill`` measures. The stream has recovered with the first batch that completes after the lost
partitions have moved to other owners. The stream may stall a second time, while an executor replaces the lost one. Two
clients ask all the time, one of them with a staleness; every answer is checked, and at the end the whole state.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.on_machines.elasticity import check, within
from benchmarks.on_machines.programs import PARTITIONS, Shape
from benchmarks.on_machines.running import RESULTS, RunningStream, finish, parser_of
from tests.lab.lab import Lab
from tests.lab.ray_nodes import RAY, ray_environment, start_ray, start_ray_on

HOST_PROCESS = "host process killed"
KINDS = (HOST_PROCESS, "killed", "without power", "cut off")
CPUS = [0, 2, 2, 2]
EXECUTORS = 2
STANDBYS = (0, 1)
LIMITS = {HOST_PROCESS: 1.0, "killed": 6.0, "without power": 6.0, "cut off": 6.0}
"""The goals with standbys: seconds from the loss to the next batch, beyond the time of a batch."""
CALM_AFTER_SECONDS = 90.0
"""So long after a loss, its consequences are not counted as calm."""
PLOTTED_SECONDS = (15.0, 45.0)
"""What is plotted before and after each loss."""


def measured(shape: Shape, turns: int, settle: int, standbys: int) -> dict[str, Any]:
    losses = []
    with Lab(len(CPUS)) as lab:
        start_ray(lab, CPUS)
        stream = RunningStream(lab, shape, EXECUTORS, standbys)
        try:
            stream.wait(lambda: stream.of("batch"), "the first batch")
            stream.ask()
            stream.wait_for_batches(shape.keys // shape.rows + settle)
            for turn in range(turns):
                for kind in KINDS if standbys else KINDS[1:]:
                    losses.append(one_loss(lab, stream, kind, settle, standbys))
                    shown = {name: value for name, value in losses[-1].items() if name != "events"}
                    print(json.dumps({"standbys": standbys, "turn": turn, **shown}), flush=True)
            wrong, late = len(stream.of("wrong")), [e["error"] for e in stream.of("late")]
            quiet = quiet_answers(stream, losses)
        finally:
            stream.end()
        check(stream.checkpoint, shape)
    return {"standbys": standbys, "losses": losses, "quiet_answers": quiet, "wrong": wrong, "late": late}


def quiet_answers(stream: RunningStream, losses: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the quantiles of answers, exact and stale ones, while the stream runs and no machine is being lost."""
    calm = [
        answer
        for answer in stream.of("answer")
        if not any(loss["lost_at"] - 1 < answer["at"] < loss["lost_at"] + CALM_AFTER_SECONDS for loss in losses)
    ]
    return {
        name: {
            "answers": len(seconds),
            "p50_ms": round(1e3 * float(np.quantile(seconds, 0.5)), 2),
            "p99_ms": round(1e3 * float(np.quantile(seconds, 0.99)), 2),
        }
        for name, is_stale in (("exact", False), ("stale", True))
        if (seconds := [answer["seconds"] for answer in calm if answer["stale"] is is_stale])
    }


def one_loss(lab: Lab, stream: RunningStream, kind: str, settle: int, standbys: int) -> dict[str, Any]:
    """Lose a machine that has an executor and owns partitions, let it come back, and return what was seen."""
    stream.wait(lambda: stream.places()["copies"] == standbys * PARTITIONS, "all copies")
    began = time.time()
    stream.wait_for_batches(settle)
    places = stream.places()
    address = next(ip for ip in lab.addresses[1:] if ip in places["owners"] and ip in places["executors"])
    k = lab.addresses.index(address)
    lost = time.time()
    dead = None
    if kind == HOST_PROCESS:
        lab.run(k, ["pkill", "-KILL", "-f", "^ray::StateStoreHost"])
    else:
        if kind in ("without power", "cut off"):
            lab.cut(k)
        if kind in ("killed", "without power"):
            lab.kill(k)
        stream.wait(lambda: address not in stream.places()["nodes"], f"Ray takes {address} for dead")
        dead = stream.places()["at"]
    stream.wait_for_batches(settle)
    figures = summary(stream, kind, address, began, lost, dead)
    if kind != HOST_PROCESS:
        lab.mend(k) if kind == "cut off" else lab.start(k)
        lab.run(k, [RAY, "stop", "--force"], ray_environment(), check=False)
        start_ray_on(lab, k, CPUS[k])
    stream.wait(lambda: len(stream.places()["owners"]) == EXECUTORS, "owners on the machines of both executors")
    return figures


def summary(
    stream: RunningStream, kind: str, address: str, began: float, lost: float, dead: float | None
) -> dict[str, Any]:
    """Return the figures of the loss of the machine with that address."""
    before = [b["at"] for b in within(stream.of("batch"), began, lost)]
    usual = float(np.median([b - a for a, b in pairwise(before)]))
    moved = next(e["at"] for e in stream.of("places", lost) if address not in e["owners"])
    after = [b["at"] for b in stream.of("batch", moved)]
    again = after[0]
    answers = within(stream.of("answer"), lost, again + 1)
    exact = [a["seconds"] for a in answers if not a["stale"]]
    stale = [a["seconds"] for a in answers if a["stale"]]
    counts = [(e["at"], len(e["executors"])) for e in stream.of("places", lost)]
    fewer = next((at for at, count in counts if count < EXECUTORS), time.time())
    replaced = next((at for at, count in counts if at > fewer and count == EXECUTORS), None)
    first, last = lost - PLOTTED_SECONDS[0], lost + PLOTTED_SECONDS[1]
    return {
        "kind": kind,
        "lost_at": round(lost, 3),
        "load": round(os.getloadavg()[0], 1),
        "usual_seconds": round(usual, 2),
        "moved_seconds": round(moved - lost, 2),
        "recovered_seconds": round(again - lost - usual, 2),
        "ray_seconds": None if dead is None else round(dead - lost, 2),
        "later_gap_seconds": round(max(b - a for a, b in pairwise(after)) - usual, 2),
        "new_executor_seconds": None if replaced is None else round(replaced - lost, 2),
        "slowest_answer_seconds": round(max(exact, default=again - lost), 2),
        "slowest_stale_answer_seconds": round(max(stale, default=again - lost), 2),
        "versions_behind": max((a["behind"] for a in answers if a["stale"]), default=0),
        "events": {
            "batches": [[round(b["at"] - lost, 2), b["seconds"]] for b in within(stream.of("batch"), first, last)],
            "answers": [
                [round(a["at"] - lost, 2), round(a["seconds"], 4), a["stale"], a["behind"]]
                for a in within(stream.of("answer"), first, last)
            ],
        },
    }


def broken_limits(runs: list[dict[str, Any]]) -> list[str]:
    broken = [
        f"{loss['kind']}: the next batch came {loss['recovered_seconds']} s after the loss, beyond a batch's own time"
        for run in runs
        if run["standbys"]
        for loss in run["losses"]
        if loss["recovered_seconds"] > LIMITS[loss["kind"]]
    ]
    return broken + [f"{run['wrong']} answers were wrong" for run in runs if run["wrong"]]


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw batches, answers and staleness around the first loss of each kind: a column per kind, a colour per run."""
    from matplotlib.figure import Figure  # the measured programs do not need it

    figure = Figure(figsize=(14, 7), layout="constrained")
    axes = figure.subplots(3, len(KINDS), sharex=True, sharey="row")
    for run, color in zip(runs, ("tab:red", "tab:blue"), strict=False):
        name = "with standbys" if run["standbys"] else "without"
        for column, kind in enumerate(KINDS):
            events = next((loss["events"] for loss in run["losses"] if loss["kind"] == kind), None)
            if events is None:
                continue
            ends, seconds = zip(*events["batches"], strict=True)
            axes[0][column].plot(ends, seconds, ".-", color=color, markersize=3, label=name)
            for stale, style in ((False, "-"), (True, ":")):
                some = [a for a in events["answers"] if a[2] is stale]
                label = f"{name}, {'staleness=2' if stale else 'last completed'}"
                axes[1][column].plot([a[0] for a in some], [a[1] for a in some], style, color=color, label=label)
            stale_answers = [a for a in events["answers"] if a[2]]
            axes[2][column].plot([a[0] for a in stale_answers], [a[3] for a in stale_answers], color=color, label=name)
            axes[0][column].set_title(kind)
            axes[2][column].set_xlabel("seconds from the loss")
    for row, words in enumerate(("batch, seconds", "answer, seconds", "stale answers, versions behind")):
        axes[row][0].set_ylabel(words)
        axes[row][0].legend(fontsize="small")
    for column in range(len(KINDS)):
        axes[1][column].set_yscale("log")
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--rows", type=int, default=100_000, help="of a batch")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--settle", type=int, default=10, help="batches before and behind a loss")
    parser.add_argument("--standbys", type=int, nargs="+", default=STANDBYS, help="replicas, one run for each number")
    options = parser.parse_args()
    shape = Shape(options.keys, options.rows)
    runs = [measured(shape, options.turns, options.settle, standbys) for standbys in options.standbys]
    results = {"keys": shape.keys, "rows": shape.rows, "runs": runs}
    status = finish(options, "recovery", json.dumps(results), broken_limits(runs))
    if not options.no_write:
        draw(runs, RESULTS / "recovery.svg")
    return status


if __name__ == "__main__":
    sys.exit(main())
