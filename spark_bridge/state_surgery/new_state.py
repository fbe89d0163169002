"""Writes the state of a new checkpoint: both stages, the manifest, Spark's files."""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import pyarrow as pa
from msgspec import Struct

from backends.conf import StateStoreConf
from backends.encoding.operator_schema import OperatorSchema
from backends.engines.engine import backend_of
from backends.exceptions import InvalidStateStoreArgument
from backends.formats.manifest import OperatorEntry
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.durable.records import AuditRecord, append_audit_record, caller
from coordinator_actor.reading.stored_versions import StatePlace
from coordinator_actor.savepoints.export import SparkFiles
from coordinator_actor.savepoints.new_checkpoint import NewCheckpoint
from spark_bridge.state_surgery.shuffle import (
    BuiltPartition,
    CopiedState,
    NewPartition,
    OperatorVariable,
    ReadJob,
    Routing,
    RowCounts,
    RowSource,
    RunName,
    Target,
    TargetColumns,
)

# Runs the tasks of both stages on Ray.
#
# A task of the first stage is a generator: finished runs go to Ray's object store while it reads the next rows, and to
# disk if the store is full. The driver has references, and the counts of the tasks. Ray runs a task again if its worker
# dies, and if its objects are lost: so the functions of users must return the same rows for the same rows.


log = logging.getLogger(__name__)

WORKER_WAIT_SECONDS = 10.0
"""Seconds between two progress messages while no task ends."""
END_SECONDS = 600.0
"""Tasks that still write when another one has failed are waited for at most this many seconds."""
TASKS_PER_CPU = 2
"""The most tasks submitted to Ray at once: rows that a driver still has to make are not made long before."""
MIN_TASKS = 8


@dataclass
class CutRows:
    """The result of the first stage: runs of rows by variable, in the order of the jobs, and counts.

    A run is a reference, or the equivalent of the workers that made it.
    """

    runs: dict[OperatorVariable, list[tuple[RunName, Any]]] = field(default_factory=dict)
    counts: RowCounts = field(default_factory=RowCounts)

    def record_run(self, name: RunName, run: Any) -> None:
        self.runs.setdefault(name.name, []).append((name, run))

    def take_runs_of(self, partition: NewPartition) -> dict[OperatorVariable, list[Any]]:
        """Return the runs that have rows of a partition. Those that no later partition needs are held no more."""
        number, runs_by_target = partition.meta.partition, {}
        for target in partition.targets:
            runs = self.runs.get(target.name, [])
            runs_by_target[target.name] = [run for name, run in runs if name.first <= number <= name.last]
            self.runs[target.name] = [(name, run) for name, run in runs if name.last > number]
        return runs_by_target


class Workers(Protocol):
    """Runs the tasks of both stages."""

    def columns_of(self, jobs: Sequence[ReadJob], say: Callable[[str], None]) -> TargetColumns | None:
        """Return the columns that the function of the jobs makes of the first rows; None if it makes none."""

    def cut(self, jobs: Iterable[ReadJob], say: Callable[[str], None]) -> CutRows:
        """Run the first stage. Raises the errors of tasks."""

    def build(
        self, partitions: Sequence[NewPartition], cut: CutRows, say: Callable[[str], None]
    ) -> list[BuiltPartition]:
        """Run the second stage, in the order of ``partitions``; those of an operator ascend. Raises as ``cut``."""


class RayWorkers:
    """Tasks of the Ray that this process has joined, or that Ray starts; ``remote_args`` are for ``ray.remote``.

    ``concurrency`` is the most tasks at once; None: as many as there are CPUs for.
    """

    def __init__(self, remote_args: Mapping[str, Any] | None = None, concurrency: int | None = None) -> None:
        if concurrency is not None and concurrency < 1:
            raise InvalidStateStoreArgument(f"concurrency={concurrency} must be 1 or more.")
        self._args = {"num_cpus": 1, **(remote_args or {})}
        self._concurrency = concurrency

    def columns_of(self, jobs: Sequence[ReadJob], say: Callable[[str], None]) -> TargetColumns | None:
        import ray

        task = ray.remote(_columns).options(**self._args)
        say(f"reading the first rows of operator {jobs[0].routing.name[0]!r}")
        for job in jobs:
            columns: TargetColumns | None = _result(task.remote(job.source, job.routing))
            if columns is not None:
                return columns
        return None

    def cut(self, jobs: Iterable[ReadJob], say: Callable[[str], None]) -> CutRows:
        import ray

        task = ray.remote(_cut).options(num_returns="streaming", **self._args)
        cut, running, number, most, is_full = CutRows(), deque[Any](), 0, self._most(), _has_no_cpu()
        put: dict[int, tuple[Routing, Any]] = {}  # a function may hold much: once for all its tasks
        remaining_jobs = iter(jobs)
        while True:
            while len(running) < most and (job := next(remaining_jobs, None)) is not None:
                if id(job.routing) not in put:
                    put[id(job.routing)] = job.routing, ray.put(job.routing)
                running.append(task.remote(job.source, put[id(job.routing)][1]))
            if not running:
                break
            self._take(running[0], cut, say, f"read {number} sources{_CPU if is_full and not number else ''}")
            running.popleft()
            number += 1
        say(f"read {number} sources: {sum(cut.counts.read.values())} rows")
        return cut

    def _most(self) -> int:
        import ray

        if self._concurrency is not None:
            return self._concurrency
        cpus = ray.cluster_resources().get("CPU", 1) if ray.is_initialized() else 1
        return max(MIN_TASKS, int(TASKS_PER_CPU * cpus))

    def _take(self, stream: Any, cut: CutRows, say: Callable[[str], None], done: str) -> None:
        """Take the references that one task yields: to the names of runs, then to the runs; to its counts at last."""
        names: deque[RunName] = deque()
        last = None
        for ref in self._references(stream, say, done):
            if names:
                cut.record_run(names.popleft(), ref)
                last = ref
                continue
            result = _result(ref)
            if isinstance(result, RowCounts):
                cut.counts.merge(result)
                return
            names.extend(result)
        _result(last)  # the error of the task was taken for a run
        raise RuntimeError(f"A task of the first stage ended before its counts, after {last}.")

    def _references(self, stream: Any, say: Callable[[str], None], done: str) -> Iterator[Any]:
        import ray

        while True:
            ready, _ = ray.wait([stream], timeout=WORKER_WAIT_SECONDS, fetch_local=False)
            if not ready:
                say(done)
                continue
            if (ref := next(stream, None)) is None:
                return
            yield ref

    def build(
        self, partitions: Sequence[NewPartition], cut: CutRows, say: Callable[[str], None]
    ) -> list[BuiltPartition]:
        import ray

        task = ray.remote(_build).options(**self._args)
        built: dict[int, BuiltPartition] = {}
        running: dict[Any, int] = {}
        waiting, reported, most, is_full = deque(enumerate(partitions)), 0, self._most(), _has_no_cpu()
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    number, partition = waiting.popleft()
                    running[task.remote(partition, cut.take_runs_of(partition))] = number
                ready, _ = ray.wait(list(running), timeout=WORKER_WAIT_SECONDS, fetch_local=False)
                for ref in ready:
                    built[running[ref]] = _result(ref)
                    del running[ref]
                if not ready or len(built) * 10 // len(partitions) > reported * 10 // len(partitions):
                    why = _CPU if is_full and not built else ""
                    say(f"built {len(built)} of {len(partitions)} partitions{why}")
                    reported = len(built)
        except BaseException:
            _await_end(list(running), say)
            raise
        return [built[number] for number in range(len(partitions))]


def _await_end(running: list[Any], say: Callable[[str], None]) -> None:
    """Wait for tasks that write, so that the caller can remove the written files.

    They are not cancelled: of a task that ends just then, Ray 2.60 ends the process that cancels.
    """
    import ray

    if running:
        say(f"waiting for {len(running)} tasks to end")
        _, unfinished = ray.wait(running, num_returns=len(running), timeout=END_SECONDS, fetch_local=False)
        if unfinished:
            notice = "%d tasks are still running: remove files that they write from now on manually"
            log.warning(notice, len(unfinished))


def _columns(source: RowSource, routing: Routing) -> TargetColumns | None:
    return routing.columns(source())


def _cut(source: RowSource, routing: Routing) -> Iterator[Any]:
    """Yield, for each flush, the names of its runs and then the runs; at last the counts."""
    counts = RowCounts()
    for runs in routing.cut(source(), counts):
        yield list(runs)
        for run in runs.values():  # noqa: UP028 - Ray sends values, which ``yield from`` passes on to an iterator
            yield run
    yield counts


def _build(partition: NewPartition, runs: Mapping[OperatorVariable, Sequence[Any]]) -> BuiltPartition:
    import ray

    return partition.build({name: ray.get(list(refs)) for name, refs in runs.items()})


def _result(ref: Any) -> Any:
    """Return a task's result, or raise its error."""
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Exception):
            raise cause from error
        raise


_CPU = (
    "; no CPU of the Ray cluster is free: where Spark's executors have them all, wait, add a machine, or give "
    'ray_remote_args={"num_cpus": 0} and concurrency='
)


def _has_no_cpu() -> bool:
    """Return whether others have all CPUs of the cluster, before any task of this call runs."""
    import ray

    return bool(ray.is_initialized() and ray.available_resources().get("CPU", 0) < 1)


@dataclass(frozen=True)
class NewOperator:
    """The new state of an operator: rows of some variables, and families that are copied."""

    name: str
    num_partitions: int
    backend: str
    schema: OperatorSchema
    targets: tuple[Target, ...]
    copied: CopiedState | None = None


class WrittenOperator(Struct, frozen=True):
    """One operator of the new checkpoint. ``pairs`` is the number of stored pairs, which lists and maps share."""

    name: str
    num_partitions: int
    backend: str
    pairs: int


class NewStateReport(Struct, frozen=True):
    """The state written to ``checkpoint_location`` (with ``dry_run``: not written). The query continues from
    ``version``.

    ``batch_id`` is the last batch that Spark takes as committed; None if a new query begins with the state. By
    variable, as (operator, variable): ``rows_read``, ``rows_made`` by the function, and ``rows_written``, which are
    fewer if rows were combined; ``samples_before`` and ``samples_after`` are the first rows, as tables.
    """

    checkpoint_location: str
    query_id: str
    version: int
    batch_id: int | None
    operators: tuple[WrittenOperator, ...]
    rows_read: dict[OperatorVariable, int]
    rows_made: dict[OperatorVariable, int]
    rows_written: dict[OperatorVariable, int]
    samples_before: dict[OperatorVariable, pa.Table] = msgspec.field(default_factory=dict)
    samples_after: dict[OperatorVariable, pa.Table] = msgspec.field(default_factory=dict)
    dry_run: bool = False


@dataclass(frozen=True)
class NewState:
    """The state to be written at ``new``. ``spark_files`` None: a new query begins with this state.

    ``staging`` is a directory of the state that ``jobs`` write to, and which is removed before the state counts.
    ``what`` is the function named in the audit log, ``details`` its note on the source.
    """

    new: NewCheckpoint
    options: Mapping[str, str]
    operators: Sequence[NewOperator]
    jobs: Iterable[ReadJob]
    origin: str
    what: str
    details: Mapping[str, str]
    reference: str | None = None
    spark_files: SparkFiles | None = None
    open_storage: OpenStorage = CheckpointStorage.open
    staging: str | None = None

    def write(
        self,
        workers: Workers,
        say: Callable[[str], None],
        *,
        dry_run: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> NewStateReport:
        """Run both stages, and write everything unless ``dry_run``. If anything fails, nothing is left at the new
        location.

        Spark's files are copied first of all: the old query may run at the same time, and remove its own.
        """
        new = self.new
        for operator in self.operators:
            backend_of(self._conf(operator))  # raises before anything is written if the backend does not exist
        if self.spark_files is not None:
            self.spark_files.check()  # raises as well
        with nullcontext() if dry_run else new.made(say):
            if not dry_run:
                new.write_schemas(o.schema for o in self.operators)
                if self.spark_files is not None:
                    self.spark_files.copy_to(new.checkpoint)
            cut = workers.cut(self.jobs, say)
            place = None if dry_run else StatePlace(new.checkpoint.location, new.state.location, self.options)
            partitions = [p for o in self.operators for p in self._partitions(o, place)]
            built = workers.build(partitions, cut, say)
            written: dict[OperatorVariable, int] = {t.name: 0 for o in self.operators for t in o.targets}
            for one in built:
                for name, rows in one.rows.items():
                    written[name] += rows
            pairs = {o.name: sum(b.pairs for b in built if b.operator == o.name) for o in self.operators}
            report = self._report(cut.counts, written, pairs, dry_run)
            if dry_run:
                return report
            entries = {}
            for o in self.operators:
                of_partitions = {b.partition: b.entry for b in built if b.operator == o.name and b.entry is not None}
                entries[o.name] = OperatorEntry.of(o.num_partitions, o.schema.id, o.backend, of_partitions)
            if self.staging is not None:
                new.state.delete_all([path for path, _ in new.state.list(self.staging)])
            now_ms = round(clock() * 1000)
            self._note(report, now_ms)
            new.append(entries, now_ms)
        log.info("Wrote state to %s as query %s", new.checkpoint.location, new.query_id)
        return report

    def _conf(self, operator: NewOperator) -> StateStoreConf:
        return StateStoreConf(provider=operator.backend, storage_options=dict(self.options))

    def _partitions(self, operator: NewOperator, place: StatePlace | None) -> list[NewPartition]:
        n = operator.num_partitions
        return [
            NewPartition(
                self.new.changelog_meta(operator.name, p, n, self.origin),
                tuple(operator.schema.families),
                self._conf(operator),
                place,
                self.new.key_groups,
                operator.targets,
                operator.copied,
                self.open_storage,
            )
            for p in range(n)
        ]

    def _report(
        self, counts: RowCounts, written: dict[OperatorVariable, int], pairs: Mapping[str, int], dry_run: bool
    ) -> NewStateReport:
        samples = {what: {n: t for (w, n), t in counts.samples.items() if w == what} for what in ("before", "after")}
        return NewStateReport(
            self.new.checkpoint.location,
            self.new.query_id,
            self.new.version,
            None if self.spark_files is None else self.new.version - 1,
            tuple(WrittenOperator(o.name, o.num_partitions, o.backend, pairs[o.name]) for o in self.operators),
            counts.read,
            counts.made,
            written,
            samples["before"],
            samples["after"],
            dry_run,
        )

    def _note(self, report: NewStateReport, now_ms: int) -> None:
        counts = {"rows_read": sum(report.rows_read.values()), "rows_written": sum(report.rows_written.values())}
        names = tuple(sorted({name for name, _ in (*report.rows_read, *report.rows_written)}))
        record = AuditRecord(
            self.what, "done", now_ms, caller(), names, self.new.version, counts, self.reference, dict(self.details)
        )
        append_audit_record(self.new.state, record)


def new_query_id() -> str:
    """Return an id in the form of Spark's query ids."""
    return str(uuid.uuid4())
