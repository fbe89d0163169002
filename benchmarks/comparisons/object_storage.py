"""The cost of a batch on object storage in requests, bytes, time and money, and the time of a cold start there."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.machine import directory
from suite.model import Case, Comparison, Contestant, Measured, Part, Size, Table, Target, amount
from suite.runner import Steps

if TYPE_CHECKING:
    from played import PlayedStream
    from slow_s3 import SlowS3

OURS, APART = "ray-statestore", "a file a partition"
BATCHES_A_MONTH = 30 * 24 * 3600
DOLLARS = {"PUT": 5e-6, "LIST": 5e-6, "GET": 4e-7, "HEAD": 4e-7, "DELETE": 0.0, "bulk DELETE": 0.0}
"""S3's prices in us-east-1 for one request; one that removes costs nothing."""
LOCAL = "local"
REQUESTS, P50, P99, MORE = "requests a batch", "batch p50", "batch p99", "more than on a local disk"
WRITTEN, READ, COST = "written a batch", "read a batch", "requests at a batch a second"
COLD = "cold start"
MORE_REQUESTS, MORE_MS, COLD_SECONDS = 4, 130.0, 3.0
"""The targets: requests a batch beyond a host's one, ms at 50 ms a request beyond a local disk, seconds of a start."""


@dataclass(frozen=True)
class Row:
    """One row of the table, as it is given: ``partitions/hosts/where``.

    ``where`` is ``local``, or the ms that each request takes longer, with a ``t`` behind for a heavy tail.
    """

    partitions: int
    hosts: int
    where: str

    @classmethod
    def of(cls, text: str) -> Row:
        try:
            partitions, hosts, where = text.split("/")
            row = cls(int(partitions), int(hosts), where)
            if where != LOCAL:
                _ = row.delay
        except ValueError as error:
            raise ValueError(
                f"--rows takes partitions/hosts/ms, such as 50/2/10, 50/2/50t (heavy tail) or 8/2/local, not {text!r}."
            ) from error
        return row

    @property
    def delay(self) -> float:
        """Return the seconds that each request takes longer."""
        return float(self.where.removesuffix("t")) / 1e3

    @property
    def has_tail(self) -> bool:
        """Return whether one request of 200 takes ten times as long."""
        return self.where.endswith("t")

    @property
    def storage(self) -> str:
        if self.where == LOCAL:
            return "local disk"
        return f"S3 + {self.where.removesuffix('t')} ms" + (", heavy tail" if self.has_tail else "")

    @property
    def name(self) -> str:
        return f"{self.partitions} partitions, {self.hosts} hosts, {self.storage}"


@dataclass
class Played:
    row: Row
    contestant: str
    stream: PlayedStream
    bucket: str
    batches: int = 0
    seconds: list[list[float]] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0

    def run(self, batches: int, s3: SlowS3, *, counts: bool) -> None:
        """Run batches; they count, or only warm up."""
        if self.bucket:
            s3.traffic(self.bucket)
        taken = self.stream.run(batches)
        if counts:
            self.batches += batches
            self.seconds.append(taken)
            if self.bucket:
                traffic = s3.traffic(self.bucket)
                self.requests += traffic.requests
                self.sent += traffic.sent
                self.received += traffic.received

    def figures(self, local: Played) -> Iterator[tuple[str, str, list[list[float]]]]:
        """Yield what is measured, its unit, and its figures of each turn. ``local`` ran on a local disk."""
        turns = [sorted(s * 1e3 for s in turn) for turn in self.seconds]
        yield P50, "ms", [[statistics.median(turn)] for turn in turns]
        yield P99, "ms", [[_p99([ms for turn in turns for ms in turn])]]
        if self.bucket:
            more = zip(self.seconds, local.seconds, strict=True)
            yield MORE, "ms", [[(statistics.median(a) - statistics.median(b)) * 1e3] for a, b in more]
            a_batch = {kind: count / self.batches for kind, count in self.requests.items()}
            yield REQUESTS, "requests", [[sum(a_batch.values())]]
            yield WRITTEN, "KiB", [[self.sent / self.batches / 1024]]
            yield READ, "KiB", [[self.received / self.batches / 1024]]
            yield COST, "dollars a month", [[dollars_a_month(a_batch)]]


def run(size: Size, steps: Steps) -> Measured:
    """Run the same batches on a local disk and on S3, with changelogs stored together and with a file a partition."""
    from slow_s3 import proxied_s3

    measured = Measured(
        {
            OURS: Contestant("each host in a separate process, with threads that play its tasks", {}, True),
            APART: Contestant(
                "the same, but each partition's changes go to storage by themselves", {"commit_linger": "0"}, True
            ),
        }
    )
    rows = [Row.of(text) for text in size["rows"]]
    steps.expect(len(rows) + len({(row.partitions, row.hosts) for row in rows}) + len(size["cold"]))
    with directory() as root, proxied_s3() as s3:
        for (partitions, hosts), of_shape in groupby(rows, lambda row: (row.partitions, row.hosts)):
            places = [Row(partitions, hosts, LOCAL), *(row for row in of_shape if row.where != LOCAL)]
            _shape(measured, root / f"{partitions}-{hosts}", places, size, steps, s3)
        for text in size["cold"]:
            row = Row.of(text)
            steps.now(f"{COLD}: {row.name}")
            _cold(measured, root / f"cold-{text.replace('/', '-')}", row, size, s3)
            steps.advance()
    slots = f"{size['slots']} tasks of a batch run" if size["slots"] else "all tasks of a batch run"
    measured.notes += [
        f"{size['operators']} operator(s), {size['keys']} changed keys a partition; {slots} at once. moto serves S3; "
        "it and a proxy are processes on the same cores as the hosts and the coordinator, and their CPU time is in the "
        "times.",
        f"{size['turns']} turns of {size['batches'] // size['turns']} batches behind {size['warm_up']}, contestants "
        "and places in turns; a file a partition has half as many. Snapshots and removal come every 10 batches between "
        "batches: their requests are in the figures, their time is not.",
        "Dollars are for requests alone, at a batch a second for 30 days, at S3's prices in us-east-1 ($5 for a "
        "million PUT or LIST, $0.40 for a million GET or HEAD).",
        f"{COLD}: another coordinator takes the query up with hosts that hold nothing; from its first request until "
        "every partition has committed a batch, so that all have been loaded.",
    ]
    return measured


def _shape(measured: Measured, where: Path, places: Sequence[Row], size: Size, steps: Steps, s3: SlowS3) -> None:
    from played import Shape, played_cluster

    from backends.conf import StateStoreConf

    first = places[0]
    shape = Shape(first.hosts, first.partitions, size["operators"], size["keys"], size["slots"], retain=size["retain"])
    with ExitStack() as stack:
        played: list[Played] = []
        for contestant, linger in ((OURS, {}), (APART, {"commit_linger": 0.0})):
            own = where / contestant.replace(" ", "-")
            conf = StateStoreConf(host_memory=512 << 20, **linger)
            cluster = stack.enter_context(played_cluster(own, first.hosts, conf=conf))
            for row in places:
                bucket = "" if row.where == LOCAL else f"{where.name}-{row.where}-{len(played)}"
                if bucket:
                    s3.make_bucket(bucket)
                    s3.slow_down(bucket, row.delay, row.has_tail)
                    ways = (f"s3://{bucket}/ck", shape, s3.options(), s3.options(s3.direct))
                    stream = cluster.start(*ways, spark_seconds=row.delay)
                else:
                    stream = cluster.start(str(own / "ck"), shape)
                played.append(Played(row, contestant, stream, bucket))
        for one in played:
            steps.now(f"{one.row.name}: warming up {one.contestant}")
            one.run(size["warm_up"], s3, counts=False)
        for turn in range(size["turns"]):
            for row in places:
                for one in sorted(
                    (p for p in played if p.row == row), key=lambda p: p.contestant, reverse=turn % 2 == 0
                ):
                    steps.now(f"{row.name}: {one.contestant}, turn {turn + 1}")
                    one.run(size["batches"] // size["turns"] // (1 if one.contestant == OURS else 2), s3, counts=True)
                if turn == 0:
                    steps.advance()
    for row in places:
        cases: dict[str, Case] = {}
        for one in (p for p in played if p.row == row):
            local = next(p for p in played if p.row.where == LOCAL and p.contestant == one.contestant)
            for what, unit, turns in one.figures(local):
                name = f"{row.name}: {what}"
                cases.setdefault(name, Case(name, unit, {})).turns[one.contestant] = turns
            if one.bucket and one.contestant == OURS:
                kinds = (f"{kind} {count / one.batches:.1f}" for kind, count in sorted(one.requests.items()))
                measured.notes.append(f"{row.name}, requests a batch by kind: {', '.join(kinds)}.")
        measured.cases += cases.values()


def _cold(measured: Measured, where: Path, row: Row, size: Size, s3: SlowS3) -> None:
    """Restart a query with hosts that hold nothing, several times."""
    from played import Shape, played_cluster

    bucket = where.name
    s3.make_bucket(bucket)
    shape = Shape(row.hosts, row.partitions)
    ways = (f"s3://{bucket}/cold", shape, s3.options(), s3.options(s3.direct))
    with played_cluster(where / "first", row.hosts) as cluster:
        stream = cluster.start(*ways)
        stream.run(size["cold_batches"])
    s3.slow_down(bucket, row.delay, row.has_tail)
    seconds, requests = [], []
    for turn in range(size["cold_turns"]):
        with played_cluster(where / f"again-{turn}", row.hosts) as cluster:
            s3.traffic(bucket)
            began = time.perf_counter()
            stream = cluster.start(*ways, earlier=stream)
            start = time.perf_counter() - began
            (first_batch,) = stream.run(1)
            requests.append([float(s3.traffic(bucket).requests.total())])
            stream.run(1)
        seconds.append([start + first_batch])
    measured.cases += [
        Case(f"{row.name}: {COLD}", "s", {OURS: seconds}),
        Case(f"{row.name}: requests of a {COLD}", "requests", {OURS: requests}),
    ]


def dollars_a_month(a_batch: Mapping[str, float]) -> float:
    """Return what the requests of a batch cost in 30 days at a batch a second. Raises ``KeyError`` for other kinds."""
    return sum(DOLLARS[kind] * count for kind, count in a_batch.items()) * BATCHES_A_MONTH


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


# -- the table -----------------------------------------------------------------------------------

HEADING = (
    *("partitions", "hosts", "storage", "requests a batch", "at most", "batch p50", "p99"),
    *("p50 more than on a local disk", "KiB written, read a batch", "dollars a month", "targets"),
    *("a file a partition: requests", "p50", "dollars a month"),
)


def lines(part: Part) -> list[list[str]]:
    """Return a line for each row that was measured, and for each cold start."""
    found = []
    for text in _rows(part):
        row = Row.of(text)
        names = (REQUESTS, P50, P99, MORE, WRITTEN, READ, COST)
        ours, apart = ({what: _of(part, row, what, who) for what in names} for who in (OURS, APART))
        where = [str(row.partitions), str(row.hosts), row.storage]
        times, others = [f"{ours[P50]} ms", f"{ours[P99]} ms"], [apart[REQUESTS], f"{apart[P50]} ms", apart[COST]]
        if row.where == LOCAL:
            found.append([*where, "", "", *times, "", "", ours[COST], "", *others])
            continue
        more = f"{ours[MORE]} ms" + (f" (at most {MORE_MS:g})" if _has_time(row) else "")
        verdict = "reached" if _judged(row, ours) else "**not reached**"
        most, size = str(row.hosts + MORE_REQUESTS), f"{ours[WRITTEN]}, {ours[READ]}"
        found.append([*where, ours[REQUESTS], most, *times, more, size, ours[COST], verdict, *others])
    for text in part.size["cold"]:
        row = Row.of(text)
        seconds, requests = _median(part, f"{row.name}: {COLD}"), _median(part, f"{row.name}: requests of a {COLD}")
        verdict = "reached" if seconds <= COLD_SECONDS else "**not reached**"
        what = f"{COLD}: {amount(seconds)} s (at most {COLD_SECONDS:g}), {amount(requests)} requests"
        found.append([str(row.partitions), str(row.hosts), row.storage, what, *[""] * 6, verdict, "", "", ""])
    return found


def _rows(part: Part) -> list[str]:
    """Return the rows of a part, with a local disk before the others of the same partitions and hosts."""
    found: list[str] = []
    for text in part.size["rows"]:
        row = Row.of(text)
        found += [f"{row.partitions}/{row.hosts}/{LOCAL}", text]
    return list(dict.fromkeys(found))


def _has_time(row: Row) -> bool:
    return row.where == "50"


def _judged(row: Row, ours: Mapping[str, str]) -> bool:
    requests, more = float(ours[REQUESTS]), float(ours[MORE].replace(",", ""))
    return requests <= row.hosts + MORE_REQUESTS and (not _has_time(row) or more <= MORE_MS)


def _of(part: Part, row: Row, what: str, contestant: str) -> str:
    case = part.case(f"{row.name}: {what}")
    return "" if case is None else amount(statistics.median(case.figures(contestant)))


def _median(part: Part, name: str) -> float:
    case = part.case(name)
    if case is None:
        raise KeyError(f"{name} was not measured.")
    return statistics.median(case.figures(OURS))


# -- targets -------------------------------------------------------------------------------------

ROWS = [
    *(f"8/2/{where}" for where in ("0", "10", "50", "100", "50t")),
    *(f"50/2/{where}" for where in ("10", "50")),
    *(f"200/4/{where}" for where in ("50", "100")),
    "200/8/50",
]
COLD_ROWS = ["200/4/50"]


def _targets() -> Iterator[Target]:
    for text in ROWS:
        row = Row.of(text)
        most = row.hosts + MORE_REQUESTS
        name = f"{row.name}: {REQUESTS}"
        yield Target(f"{name}, snapshots and removal included", name, OURS, most, kind="value")
        if _has_time(row):
            yield Target(f"{row.name}: {P50}, {MORE}", f"{row.name}: {MORE}", OURS, MORE_MS, kind="value", unit="ms")
    for partitions, hosts in dict.fromkeys((Row.of(t).partitions, Row.of(t).hosts) for t in ROWS):
        name = f"{Row(partitions, hosts, LOCAL).name}: {P50}"
        yield Target(f"{name}, beside {APART}", name, OURS, 1.0, against=APART, at_least=True)
    for text in COLD_ROWS:
        name = f"{Row.of(text).name}: {COLD}"
        yield Target(name, name, OURS, COLD_SECONDS, kind="value", unit="s")


def _size(**other: Any) -> Size:
    usual = {"operators": 1, "keys": 100, "slots": 0, "retain": 10, "cold_batches": 25}
    return {**other, **usual}


COMPARISONS = (
    Comparison(
        name="object-storage",
        title="Object storage",
        about="The cost of a batch where each file is a request. A server that speaks S3 is behind a proxy that "
        "counts the requests and makes each of them slower. Real hosts, each in a separate process, and a real "
        "coordinator run the batches, without Spark.",
        run=run,
        sizes={
            "full": _size(rows=ROWS, cold=COLD_ROWS, warm_up=10, batches=50, turns=2, cold_turns=3),
            "smoke": _size(rows=["8/2/10"], cold=["8/2/10"], warm_up=20, batches=20, turns=1, cold_turns=1),
        },
        minutes={"full": 60, "smoke": 10},
        targets=tuple(_targets()),
        in_smoke=False,
        picture="",
        table=Table(HEADING, lines),
    ),
)
