"""A machine with an executor and a state host is lost: how long the stream stalls, beyond Ray's own detection.

    python -m benchmarks.on_machines.recovery               ten minutes, root; writes benchmarks/results/recovery.json
    python -m benchmarks.on_machines.recovery --keys 100000 --turns 1 --no-write

On the lab of the tests: a stream over a million keys in 8 partitions, on two of three machines other than the head. One
of them is killed, loses power, or has its cable cut, in turns; it comes back some time later, and the next one follows.
The stream has recovered with the first batch that completes after the lost partitions have moved to other owners. The
stream may stall a second time, while an executor replaces the lost one. A client asks all the time; every answer is
checked, and at the end the whole state.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.on_machines.elasticity import RESULTS, check, status, within
from benchmarks.on_machines.programs import Shape
from benchmarks.on_machines.running import RunningStream
from tests.lab.lab import Lab
from tests.lab.ray_nodes import RAY, ray_environment, start_ray, start_ray_on

KINDS = ("killed", "without power", "cut off")
CPUS = [0, 2, 2, 2]
EXECUTORS = 2
BEYOND_RAY_SECONDS = 5.0
"""The limit: from where Ray takes the machine for dead to the next batch, beyond the time of a batch."""


def measured(shape: Shape, turns: int, settle: int) -> dict[str, Any]:
    losses = []
    with Lab(len(CPUS)) as lab:
        start_ray(lab, CPUS)
        stream = RunningStream(lab, shape, EXECUTORS)
        try:
            stream.wait(lambda: stream.of("batch"), "the first batch")
            stream.ask()
            stream.wait_for_batches(shape.keys // shape.rows + settle)
            for turn in range(turns):
                for kind in KINDS:
                    losses.append(one_loss(lab, stream, kind, settle))
                    print(json.dumps({"turn": turn, **losses[-1]}), flush=True)
            wrong, late = len(stream.of("wrong")), [e["error"] for e in stream.of("late")]
        finally:
            stream.end()
        check(stream.checkpoint, shape)
    return {"keys": shape.keys, "rows": shape.rows, "losses": losses, "wrong": wrong, "late": late}


def one_loss(lab: Lab, stream: RunningStream, kind: str, settle: int) -> dict[str, Any]:
    """Lose a machine that has an executor and owns partitions, let it come back, and return what was seen."""
    began = time.time()
    stream.wait_for_batches(settle)
    places = stream.places()
    address = next(ip for ip in lab.addresses[1:] if ip in places["owners"] and ip in places["executors"])
    k = lab.addresses.index(address)
    lost = time.time()
    if kind != "killed":
        lab.cut(k)
    if kind != "cut off":
        lab.kill(k)
    stream.wait(lambda: address not in stream.places()["nodes"], f"Ray takes {address} for dead")
    dead = stream.places()["at"]
    stream.wait_for_batches(settle)
    found = summary(stream, kind, address, began, lost, dead)
    if kind == "cut off":
        lab.mend(k)
    else:
        lab.start(k)
    lab.run(k, [RAY, "stop", "--force"], ray_environment(), check=False)
    start_ray_on(lab, k, CPUS[k])
    stream.wait(lambda: len(stream.places()["owners"]) == EXECUTORS, "owners on the machines of both executors")
    return found


def summary(stream: RunningStream, kind: str, address: str, began: float, lost: float, dead: float) -> dict[str, Any]:
    """Return the figures of the loss of the machine with that address."""
    before = [b["at"] for b in within(stream.of("batch"), began, lost)]
    usual = float(np.median([b - a for a, b in pairwise(before)]))
    moved = next(e["at"] for e in stream.of("places", lost) if address not in e["owners"])
    after = [b["at"] for b in stream.of("batch", moved)]
    again = after[0]
    answers = [a["seconds"] for a in within(stream.of("answer"), lost, again + 1)]
    counts = [(e["at"], len(e["executors"])) for e in stream.of("places", lost)]
    fewer = next((at for at, count in counts if count < EXECUTORS), time.time())
    replaced = next((at for at, count in counts if at > fewer and count == EXECUTORS), None)
    return {
        "kind": kind,
        "load": round(os.getloadavg()[0], 1),
        "usual_seconds": round(usual, 2),
        "moved_seconds": round(moved - lost, 2),
        "recovered_seconds": round(again - lost - usual, 2),
        "ray_seconds": round(dead - lost, 2),
        "beyond_ray_seconds": round(again - dead - usual, 2),
        "later_gap_seconds": round(max(b - a for a, b in pairwise(after)) - usual, 2),
        "new_executor_seconds": None if replaced is None else round(replaced - lost, 2),
        "slowest_answer_seconds": round(max(answers, default=again - lost), 2),
    }


def broken_limits(found: dict[str, Any]) -> list[str]:
    broken = [
        f"{loss['kind']}: the next batch came {loss['beyond_ray_seconds']} s behind Ray's detection"
        for loss in found["losses"]
        if loss["beyond_ray_seconds"] > BEYOND_RAY_SECONDS
    ]
    if found["wrong"]:
        broken.append(f"{found['wrong']} answers were wrong")
    return broken


def main() -> int:
    """Measure, print, and write the results; return 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=50_000, help="of a batch")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--settle", type=int, default=10, help="batches before and behind a loss")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    found = measured(Shape(options.keys, options.rows), options.turns, options.settle)
    if not options.no_write:
        (RESULTS / "recovery.json").write_text(json.dumps(found, indent=1) + "\n")
    return status(broken_limits(found))


if __name__ == "__main__":
    sys.exit(main())
