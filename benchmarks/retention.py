"""Whether the removal of files keeps up: 50 queries of 200 partitions with a batch a second each, by default.

    python benchmarks/retention.py                         two minutes
    python benchmarks/retention.py --queries 5 --seconds 60
    python benchmarks/retention.py --hang                  the storage of one query never answers a removal

The coordinator's class runs with the threads that its actor has. Players stand for hosts and driver: they open each
batch, store one object of changelogs for each host, acknowledge, and upload the snapshots of each partition once per
maintenance interval, together for each host. Files are on a memory disk, and each request takes ``--delay`` ms longer.
In the middle of the run the coordinator is replaced by a new one that takes over all queries. It removes nothing for
``--busy`` seconds (900 in earnest), and has to catch up.

Versions, intervals and times are shorter than in earnest, so that minutes show several rounds. ``files kept`` are
those of changelogs and snapshots of a query: the median and the most of all queries. CPU is that of the threads that
maintain.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from coordinator import SCHEMA, PlayedHost, acknowledged, console, directory
from rich.table import Table

from backends.formats.changelog import GROUPS_DIRECTORY
from backends.formats.local_state import LocalState
from backends.formats.manifest import SnapshotRef
from backends.formats.snapshot import PreparedSnapshot, store_together
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.messages import (
    HostInfo,
    HostReport,
    OpenBatch,
    OperatorSpec,
    QueryRegistration,
    SnapshotUploaded,
)
from coordinator_actor.run import holds
from coordinator_actor.threads import QueryThreads

T = TypeVar("T")
SESSION = "session"
PLAYERS = 16
"""Threads that play batches."""


class Watched:
    """Counts the requests to storage of the threads that maintain, and the CPU time of those. Thread-safe."""

    def __init__(self, delay: float, hangs: Callable[[str], bool]) -> None:
        self.delay, self.hangs = delay, hangs
        self.requests: Counter[str] = Counter()
        self.cpu, self.rounds = 0.0, [0.0]
        self._lock = threading.Lock()
        self._here = threading.local()

    def open(self, location: str, options: Mapping[str, str]) -> CheckpointStorage:
        """Open storage whose requests are counted and slow."""
        return SlowStorage.of(CheckpointStorage.open(location, options, fsync=False), self)

    def maintained(self, submit: Callable[[str, Callable[[], Any]], Future[Any]]) -> Any:
        """Wrap ``submit`` so that the CPU time and the duration of its work are recorded."""

        def watched(query: str, work: Callable[[], Any]) -> Future[Any]:
            def timed() -> None:
                self._here.maintains = True
                cpu, began = time.thread_time(), time.perf_counter()
                try:
                    work()
                finally:
                    with self._lock:
                        self.cpu += time.thread_time() - cpu
                        self.rounds.append(time.perf_counter() - began)

            return submit(query, timed if query.startswith("the maintenance") else work)

        return watched

    def ask(self, verb: str, path: str) -> None:
        """Take as long as a request does."""
        if getattr(self._here, "maintains", False):
            with self._lock:
                self.requests[verb] += 1
        if verb == "delete" and self.hangs(path):
            threading.Event().wait()
        time.sleep(self.delay)


class SlowStorage(CheckpointStorage):
    """A checkpoint's storage whose requests take longer. A bulk removal is one request for 1,000 files, as on S3."""

    watched: Watched

    @classmethod
    def of(cls, storage: CheckpointStorage, watched: Watched) -> SlowStorage:
        """Make a storage slow."""
        slow = cls.__new__(cls)
        slow.__dict__ = {**storage.__dict__, "watched": watched}
        return slow

    def delete_all(self, paths: Sequence[str]) -> None:
        for first in range(0, len(paths), 1000):
            self.watched.ask("delete", self.location)
            for path in paths[first : first + 1000]:
                Path(f"{self.location.removeprefix('file://')}/{path}").unlink(missing_ok=True)

    def list(self, prefix: str = "", *, after: str | None = None) -> list[tuple[str, int]]:
        found = super().list(prefix, after=after)
        for _ in range(len(found) // 1000):  # a page has a thousand names
            self.watched.ask("list", prefix)
        return found

    def _retrying(self, verb: str, path: str, call: Callable[[], T], **more: Any) -> T:
        self.watched.ask(verb, path)
        return super()._retrying(verb, path, call, **more)


class PlayedQuery:
    """A query, its part of the hosts, and Spark."""

    def __init__(self, number: int, root: Path, options: argparse.Namespace, infos: Sequence[HostInfo]) -> None:
        self.root = root / f"query-{number}"
        self.sizes = {"op": options.partitions}
        self.registration = QueryRegistration(
            query_id=str(uuid.uuid4()),
            run_id=str(uuid.uuid4()),
            name=self.root.name,
            session_id=SESSION,
            checkpoint_location=str(self.root),
            state_location=str(self.root / "statestore"),
            operators=(OperatorSpec("op", options.partitions, SCHEMA),),
            min_versions_to_retain=options.retain,
            maintenance_interval=options.maintenance_interval,
        )
        self.hosts = [PlayedHost(info) for info in infos]
        self.batch = 0
        self.late = 0
        self._rounds = round(options.maintenance_interval / options.interval)
        self._rng = random.Random(number)
        self._storage = CheckpointStorage.open(self.registration.state_location, fsync=False)
        for name in ("offsets", "commits"):
            (self.root / name).mkdir(parents=True)

    def play(self, coordinator: Coordinator) -> None:
        """Run one batch, and upload the snapshots that are due."""
        run, batch = self.registration.run_id, self.batch
        (self.root / "offsets" / str(batch)).write_text("v1\n{}")
        for host in self.hosts:
            host.take(coordinator.open_batch(OpenBatch(run, batch, *host.name, host.assignment)), batch)
        answers: list[Any] = []
        for host in self.hosts:
            grant = coordinator.open_batch(OpenBatch(run, batch, *host.name, host.assignment))
            made = acknowledged(host, grant, self.sizes, run, self._rng)
            within, offset, stored = f"{GROUPS_DIRECTORY}/{batch + 1}-{uuid.uuid4().hex}.changelogs", 0, []
            for one in made:
                file = FileRef(one.file.path, 10, one.file.digest, within, offset)
                stored.append(type(one)(**{**{f: getattr(one, f) for f in one.__struct_fields__}, "file": file}))
                offset += 10
            self._storage.put_new(within, bytes(offset))
            answers += coordinator.acknowledge_many(run, *host.name, tuple(stored))
        if not any(getattr(a, "manifest_id", None) is not None for a in answers):
            raise RuntimeError(f"Batch {batch} of {self.root.name} was not prepared: {answers[0]}")
        (self.root / "commits" / str(batch)).write_text("v1\n{}")
        coordinator.batch_committed(run, batch)
        self.batch += 1
        if batch % self._rounds == self._rng.randrange(self._rounds):
            self._upload(coordinator)

    def _upload(self, coordinator: Coordinator) -> None:
        for host in self.hosts:
            prepared = []
            for p in host.owned["op"]:
                head = host.heads["op", p]
                state = LocalState(self.batch, head, 1)
                prepared.append(PreparedSnapshot(head.rpartition("/")[0], "rocksdb", state, (), {"1.sst": b"x"}, 0))
            for p, stored in zip(host.owned["op"], store_together(self._storage, prepared), strict=True):
                ref: SnapshotRef = stored.ref
                coordinator.snapshot_uploaded(
                    SnapshotUploaded(self.registration.run_id, "op", p, *host.name, ref, None, stored.descriptor)
                )

    def files(self) -> int:
        """Return how many objects of changelogs and snapshots there are."""
        return sum(1 for directory in (GROUPS_DIRECTORY, "operators") for _ in self._storage.list(directory))


def begin(watched: Watched, queries: Sequence[PlayedQuery], infos: Sequence[HostInfo]) -> Coordinator:
    """Make a coordinator with its threads, and have it take all queries."""
    conf = CoordinatorConf(host_timeout=1e9, driver_timeout=1e9, report_timeout=0.0)
    coordinator = Coordinator(time.time, watched.open, conf, apart=watched.maintained(QueryThreads().submit))
    for info in infos:
        coordinator.register_host(info, HostReport())
    with ThreadPoolExecutor(PLAYERS) as pool:
        for answer in pool.map(lambda q: coordinator.register_query(q.registration), queries):
            if answer.refusal is not None:
                raise RuntimeError(answer.refusal)
    for query in queries:
        for host in query.hosts:
            host.assignment = 0
    return coordinator


def main() -> None:
    """Play, and print what there is every ten seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--partitions", type=int, default=200)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between batches")
    parser.add_argument("--maintenance-interval", type=float, default=10.0)
    parser.add_argument("--retain", type=int, default=20)
    parser.add_argument("--delay", type=float, default=50.0, help="ms that each request takes longer")
    parser.add_argument(
        "--busy", type=float, default=20.0, help="seconds during which a new coordinator removes no file"
    )
    parser.add_argument("--hang", action="store_true", help="removals of the first query never end")
    options = parser.parse_args()
    holds.BUSY_SECONDS = options.busy
    with directory() as root:
        infos = [
            HostInfo(f"host-{i}", uuid.uuid4().hex, f"grpc://10.0.0.1:{i}", f"node-{i}", SESSION)
            for i in range(options.hosts)
        ]
        queries = [PlayedQuery(i, root, options, infos) for i in range(options.queries)]
        hanging = queries[0].registration.state_location if options.hang else ""
        watched = Watched(options.delay / 1e3, lambda path: bool(hanging) and path == hanging)
        play(options, queries, infos, watched)


def play(
    options: argparse.Namespace, queries: Sequence[PlayedQuery], infos: Sequence[HostInfo], watched: Watched
) -> None:
    """Run the batches of all queries at their rate, with a change of coordinators in the middle, and print figures."""
    table = Table(title=f"{len(queries)} queries, {options.partitions} partitions each, {options.delay:g} ms a request")
    for heading in ("second", "batches", "files kept: median, most", "CPU", "longest round", "requests"):
        table.add_column(heading)
    coordinator = begin(watched, queries, infos)
    began = time.perf_counter()
    taken_over = False
    cpu, batches, shown = 0.0, 0, 0.0
    with ThreadPoolExecutor(PLAYERS) as pool:
        while (now := time.perf_counter() - began) < options.seconds:
            if not taken_over and now > options.seconds / 2:
                coordinator, taken_over = begin(watched, queries, infos), True
                table.add_row(f"{now:.0f}", "", "a new coordinator", "", "", "")
            for done in [pool.submit(query.play, coordinator) for query in queries]:
                done.result()
            batches += len(queries)
            coordinator.maintain()
            if now - shown >= 10:
                kept = [query.files() for query in (queries[1:] if options.hang else queries)]
                table.add_row(
                    f"{now:.0f}",
                    f"{batches / (now - shown):.0f} a second",
                    f"{statistics.median(kept):.0f}, {max(kept)}",
                    f"{(watched.cpu - cpu) / (now - shown):.3f} cores",
                    f"{max(watched.rounds[-len(queries) :]):.2f} s",
                    ", ".join(f"{kind} {n}" for kind, n in sorted(watched.requests.items())),
                )
                cpu, batches, shown = watched.cpu, 0, now
                watched.requests.clear()
            time.sleep(max(0.0, options.interval - (time.perf_counter() - began - now)))
    console.print(table)


if __name__ == "__main__":
    main()
