"""What a batch costs on object storage: requests, bytes, time and money."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suite.comparison import Comparison, Measured
from suite.model import Case, Contestant, Size
from suite.progress import Steps
from suite.ratios import Target

OURS = "ray-statestore"
BATCHES_A_MONTH = 30 * 24 * 3600
DOLLARS = {"PUT": 5e-6, "LIST": 5e-6, "GET": 4e-7, "HEAD": 4e-7, "DELETE": 0.0, "bulk DELETE": 0.0}
"""S3's prices in us-east-1 for one request; one that removes costs nothing."""
BUCKET = "bench"


def run(size: Size, steps: Steps) -> Measured:
    """Run the same batches on a local disk and on S3 at each delay, for each number of partitions."""
    from played_stream import Shape
    from s3_proxy import proxied_s3

    measured = Measured({OURS: Contestant("hosts and coordinator in one process, tasks played by threads", {}, True)})
    steps.expect(len(size["partitions"]) * (len(size["delays"]) + 1))
    with tempfile.TemporaryDirectory(prefix="object-storage-") as directory, proxied_s3(BUCKET) as s3:
        for partitions in size["partitions"]:
            shape = Shape(
                size["hosts"], partitions, size["operators"], size["keys"], size["slots"], retain=size["retain"]
            )
            for delay in (None, *size["delays"]):
                name = f"{partitions} partitions, " + ("local disk" if delay is None else f"S3 + {delay:g} ms")
                steps.now(name)
                _one(measured, name, Path(directory) / f"{partitions}-{delay}", shape, size, s3, delay)
                steps.advance()
    measured.notes += [
        f"{size['hosts']} hosts, {size['operators']} operator(s), {size['keys']} changed keys a partition; "
        f"{size['slots'] or 'all'} tasks of a batch run at once. moto serves S3; it and a proxy are processes on the "
        "same cores as the hosts, and what they take is in the times.",
        f"{size['batches']} batches a turn behind {size['warm_up']}; snapshots and removal come every 10 batches "
        "between batches: their requests are in the figures, their time is not.",
        "Dollars are for requests alone, at a batch a second for 30 days, at S3's prices in us-east-1 ($5 for a "
        "million PUT or LIST, $0.40 for a million GET or HEAD).",
    ]
    return measured


def _one(measured: Measured, name: str, where: Path, shape: Any, size: Size, s3: Any, delay: float | None) -> None:
    from played_stream import played_stream

    n = size["batches"]
    if delay is None:
        with played_stream(where, str(where / "ck"), shape) as stream:
            stream.run(size["warm_up"])
            _times(measured, name, stream.run(n))
        return
    s3.slow_down(delay / 1e3, size["tail"])
    with played_stream(where, f"s3://{BUCKET}/{where.name}", shape, s3.options(), s3.options(s3.direct)) as stream:
        stream.run(size["warm_up"])
        s3.traffic()
        taken = stream.run(n)
        traffic = s3.traffic()
    _times(measured, name, taken)
    a_batch = {kind: count / n for kind, count in traffic.requests.items()}
    for what, value, unit in (
        ("requests a batch", sum(a_batch.values()), "requests"),
        ("written a batch", traffic.sent / n / 1024, "KiB"),
        ("read a batch", traffic.received / n / 1024, "KiB"),
        ("requests at a batch a second", dollars_a_month(a_batch), "dollars a month"),
    ):
        measured.cases.append(Case(f"{name}: {what}", unit, {OURS: [[value]]}))
    kinds = ", ".join(f"{kind} {count:.1f}" for kind, count in sorted(a_batch.items()))
    measured.notes.append(f"{name}, requests a batch by kind: {kinds}.")


def dollars_a_month(a_batch: Mapping[str, float]) -> float:
    """Return what the requests of a batch cost in 30 days at a batch a second. Raises ``KeyError`` for other kinds."""
    return sum(DOLLARS[kind] * count for kind, count in a_batch.items()) * BATCHES_A_MONTH


def _times(measured: Measured, name: str, seconds: list[float]) -> None:
    ordered = sorted(s * 1e3 for s in seconds)
    measured.cases += [
        Case(f"{name}: batch p50", "ms", {OURS: [[statistics.median(ordered)]]}),
        Case(f"{name}: batch p99", "ms", {OURS: [[ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]]]}),
    ]


def _target(partitions: int) -> Target:
    what = f"{partitions} partitions on 2 hosts: requests a batch, snapshots and removal included"
    return Target(what, f"{partitions} partitions, S3 + 50 ms: requests a batch", OURS, 6, kind="value")


COMPARISONS = (
    Comparison(
        name="object-storage",
        title="Object storage",
        about="What a batch costs where each file is a request. A server that speaks S3 stands behind a proxy that "
        "counts the requests and makes each of them slower. Real hosts and a real coordinator run the batches, "
        "without Spark.",
        run=run,
        sizes={
            "full": {
                "hosts": 2,
                "partitions": [8, 50],
                "operators": 1,
                "keys": 100,
                "slots": 0,
                "delays": [0.0, 10.0, 50.0, 100.0],
                "tail": False,
                "warm_up": 40,
                "batches": 100,
                "retain": 10,
            },
            "smoke": {
                "hosts": 2,
                "partitions": [8],
                "operators": 1,
                "keys": 100,
                "slots": 0,
                "delays": [10.0],
                "tail": False,
                "warm_up": 40,
                "batches": 20,
                "retain": 10,
            },
        },
        minutes={"full": 60, "smoke": 10},
        targets=(_target(8), _target(50)),
        in_smoke=False,
    ),
)
