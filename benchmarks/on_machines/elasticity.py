"""2 to 4 to 1 machines during a stream: how soon hosts follow, what moves, and what batches and clients notice.

    python -m benchmarks.on_machines.elasticity             ten minutes, root; writes benchmarks/results/elasticity*
    python -m benchmarks.on_machines.elasticity --keys 100000 --no-write

On the lab of the tests: a stream over a million keys in 8 partitions runs on two machines, with an executor and a state
host on each. Two machines join, Spark is asked for an executor on each, and hosts follow. Then three machines are
drained, their executors are ended, and the machines with them. A client asks all along; every answer is checked, and at
the end the whole state.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.on_machines.programs import OPERATOR, Shape
from benchmarks.on_machines.running import RESULTS, RunningStream, finish, parser_of
from tests.lab.lab import Lab
from tests.lab.ray_nodes import ray_environment, start_ray, start_ray_on

MACHINES = 4
HOST_SECONDS, WAIT_SECONDS, TIMES_THE_MINIMUM = 10.0, 2.0, 2
"""Limits: seconds from an executor to its host, seconds that a batch waits for a move, and moved partitions."""
QUIET_PROCESS_SECONDS = 1.0
"""So long takes a process on two quiet cores that imports what a host does."""
PROBES = 3


def measured(shape: Shape, settle: int) -> dict[str, Any]:
    marks: dict[str, float] = {}
    with Lab(MACHINES) as lab:
        start_ray(lab, [1, 1])
        stream = RunningStream(lab, shape, 2)
        try:
            stream.wait(lambda: stream.of("batch"), "the first batch")
            stream.ask()
            stream.wait_for_batches(shape.keys // shape.rows)
            began = time.time()
            stream.wait_for_batches(settle)
            for k in (2, 3):
                start_ray_on(lab, k, 1)
            process_seconds = float(np.median([process_time(lab) for _ in range(PROBES)]))
            marks["four"] = stream.tell("executors 4")
            stream.wait(lambda: sorted(stream.places()["owners"].values()) == [2] * 4, "four owners")
            stream.wait_for_batches(settle)
            marks["one"] = time.time()
            for address in lab.addresses[1:]:
                stream.tell(f"drain {address}")
            stream.wait(lambda: set(stream.places()["hosts"]) == {lab.addresses[0]}, "one host")
            marks["released"] = time.time()
            for address in lab.addresses[1:]:
                stream.tell(f"end {address}")
            stream.wait(lambda: set(stream.places()["executors"]) == {lab.addresses[0]}, "one executor")
            for k in range(1, MACHINES):
                lab.kill(k)
            stream.wait_for_batches(settle)
            stream.tell("steps")
        finally:
            stream.end()
        check(stream.checkpoint, shape)
        return {"process_seconds": round(process_seconds, 2), **summary(stream, shape, began, marks)}


def process_time(lab: Lab) -> float:
    """Return how long a process takes on machine 0 that imports what a host does."""
    began = time.perf_counter()
    lab.run(0, [sys.executable, "-c", "import spark_bridge.host_actor"], ray_environment())
    return time.perf_counter() - began


def check(checkpoint: str, shape: Shape) -> None:
    """Compare all keys of the last version. Raises ``RuntimeError`` if any differs."""
    from spark_bridge import state_table
    from tests.lab.auditor import committed

    version = committed(checkpoint)
    table = state_table(checkpoint, OPERATOR, version=version)
    keys, counts, sums = (table.column(name).to_numpy() for name in ("k", "n", "s"))
    expected = shape.totals(keys, version)
    if len(keys) != shape.keys or (expected[0] != counts).any() or (expected[1] != sums).any():
        raise RuntimeError(f"The state is wrong at version {version}: {len(keys)} keys")


def summary(stream: RunningStream, shape: Shape, began: float, marks: dict[str, float]) -> dict[str, Any]:
    """Return the figures, with moments in seconds since the measurement began."""
    places = stream.of("places", began)
    before = stream.of("places")[: -len(places) or None][-1:] + places
    batches, answers = stream.of("batch", began), stream.of("answer", began)
    steps = dict(stream.of("steps")[-1]["steps"])
    phases = {"still": (began, marks["four"]), "2 to 4": (marks["four"], marks["one"])}
    phases |= {"4 to 1": (marks["one"], marks["released"]), "executors end": (marks["released"], batches[-1]["at"])}
    first_executor, first_host = first_seen(before, "executors"), first_seen(before, "hosts")
    return {
        "keys": shape.keys,
        "rows": shape.rows,
        "load": os.getloadavg()[0],
        "host_seconds": [round(first_host[ip] - at, 2) for ip, at in first_executor.items() if at > marks["four"]],
        "drain_seconds": round(marks["released"] - marks["one"], 2),
        "moved": {"2 to 4": moved(before, *phases["2 to 4"]), "4 to 1": moved(before, *phases["4 to 1"])},
        "must_move": {"2 to 4": 4, "4 to 1": 6},
        "batch_seconds": {n: spread([b["seconds"] for b in within(batches, *p)]) for n, p in phases.items()},
        "read_seconds": {
            n: spread([read_of(steps[b["batch"] + 1]) for b in within(batches, *p) if b["batch"] + 1 in steps])
            for n, p in phases.items()
        },
        "answer_seconds": {n: spread([a["seconds"] for a in within(answers, *p)]) for n, p in phases.items()},
        "wrong": len(stream.of("wrong")),
        "late": [e["error"] for e in stream.of("late")],
        "marks": {name: round(at - began, 1) for name, at in marks.items()},
        "batches": [[round(b["at"] - began, 2), b["seconds"]] for b in batches],
        "answers": slowest(answers, began),
        "places": [
            [round(p["at"] - began, 2), len(p["executors"]), sum(p["hosts"].values()), len(p["owners"])] for p in places
        ],
    }


def read_of(steps: dict[str, float]) -> float:
    """Return the seconds that the slowest task took to open its partition and read the old values of its keys."""
    return (steps.get("open_ms", 0.0) + steps.get("get_ms", 0.0)) / 1e3


def first_seen(places: list[dict[str, Any]], what: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for event in places:
        for ip in event[what]:
            found.setdefault(ip, event["at"])
    return found


def moved(places: list[dict[str, Any]], since: float, until: float) -> int:
    """Return how many partitions changed their owners between two moments."""
    then = [event["moved"] for event in places if event["at"] <= since][-1:] or [0]
    return int([event["moved"] for event in places if event["at"] <= until][-1] - then[0])


def within(events: list[dict[str, Any]], since: float, until: float) -> list[dict[str, Any]]:
    return [event for event in events if since <= event["at"] <= until]


def spread(values: list[float]) -> dict[str, float]:
    """Return how many there are, the median and the most."""
    return {"count": len(values), "median": round(float(np.median(values)), 3), "most": round(max(values), 3)}


def slowest(answers: list[dict[str, Any]], began: float) -> list[list[float]]:
    """Return the slowest answer of each second that has answers."""
    found: dict[int, float] = {}
    for answer in answers:
        second = int(answer["at"] - began)
        found[second] = max(found.get(second, 0.0), answer["seconds"])
    return [[second, round(seconds, 4)] for second, seconds in sorted(found.items())]


def broken_limits(found: dict[str, Any]) -> list[str]:
    """Return in words which limits are broken. A wait is what opening and reading take beyond the still times' median.

    Hosts are given as many times longer as the computer needs to start a process, beyond a quiet one.
    """
    slower = max(1.0, found["process_seconds"] / QUIET_PROCESS_SECONDS)
    broken = [f"a host came after {s} s" for s in found["host_seconds"] if s > HOST_SECONDS * slower]
    for phase, count in found["moved"].items():
        if count > TIMES_THE_MINIMUM * found["must_move"][phase]:
            broken.append(f"{phase}: {count} partitions moved, {found['must_move'][phase]} must")
        wait = found["read_seconds"][phase]["most"] - found["read_seconds"]["still"]["median"]
        if wait > WAIT_SECONDS:
            broken.append(f"{phase}: a task waited {wait:.1f} s for its partition")
    if found["wrong"] or found["late"]:
        broken.append(f"{found['wrong']} answers were wrong, {len(found['late'])} late: {found['late'][:1]}")
    return broken


def pictures(found: dict[str, Any]) -> dict[str, str]:
    """Return SVGs by name: batches and answers over time; executors, hosts and owners over time."""
    sys.path.append(str(RESULTS.parent))
    from suite.model import Spread
    from suite.report import lines

    def points_of(rows: list[Any]) -> list[tuple[float, Spread]]:
        return [(x, Spread.of([y])) for x, y in rows]

    def steps(column: int) -> list[tuple[float, float]]:
        points: list[tuple[float, float]] = []
        for row in found["places"]:
            if points and points[-1][1] != row[column]:
                points.append((row[0] - 1e-3, points[-1][1]))
            points.append((row[0], row[column]))
        return [*points, (found["batches"][-1][0], points[-1][1])]

    marks = found["marks"]
    told = f"to 4 machines at {marks['four']:.0f} s, to 1 at {marks['one']:.0f} s"
    across = "seconds since the start"
    times = {"batches": points_of(found["batches"]), "slowest answers": points_of(found["answers"])}
    names = ("with executors", "hosts", "owning partitions")
    counts = {name: points_of(steps(i)) for i, name in enumerate(names, 1)}
    return {
        "elasticity-times": lines(f"{found['keys']:,} keys, {told}", "seconds", across, times, is_time=True),
        "elasticity-machines": lines(f"The same: {told}", "machines; hosts of all", across, counts, is_time=True),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=50_000, help="of a batch")
    parser.add_argument("--settle", type=int, default=40, help="batches between two changes")
    options = parser.parse_args()
    began = time.time()
    found = measured(Shape(options.keys, options.rows), options.settle)
    print(f"measured in {time.time() - began:.0f} s")
    print(json.dumps({n: v for n, v in found.items() if n not in ("batches", "answers", "places")}, indent=1))
    status = finish(options, "elasticity", json.dumps(found), broken_limits(found))
    if not options.no_write:
        for name, drawn in pictures(found).items():
            (RESULTS / f"{name}.svg").write_text(drawn)
    return status


if __name__ == "__main__":
    sys.exit(main())
