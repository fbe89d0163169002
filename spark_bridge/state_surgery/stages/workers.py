"""Runs the tasks of both stages on Ray.

A task of the first stage is a generator: what it has cut goes to Ray's object store while it reads on, and to disk
where the store is full. The driver has references, and the counts of the tasks. Ray runs a task again if its worker
dies, and if its objects are lost: so the functions of users must give the same rows for the same rows.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.state_surgery.stages.first_stage import (
    OperatorVariable,
    ReadJob,
    Routing,
    RowCounts,
    RowSource,
    RunName,
    TargetColumns,
)
from spark_bridge.state_surgery.stages.second_stage import BuiltPartition, NewPartition

log = logging.getLogger(__name__)

WORKER_WAIT_SECONDS = 10.0
"""So often the progress is told while no task ends."""
END_SECONDS = 600.0
"""Tasks that still write when another one has failed are waited for at most this many seconds."""
TASKS_PER_CPU = 2
"""At most this many tasks are given to Ray at once: rows that a driver still has to make are not made long before."""
FEWEST_TASKS = 8


@dataclass
class CutRows:
    """The result of the first stage: runs of rows by variable, in the order of the jobs, and counts.

    A run is a reference, or whatever else the workers that made it take for one.
    """

    runs: dict[OperatorVariable, list[tuple[RunName, Any]]] = field(default_factory=dict)
    counts: RowCounts = field(default_factory=RowCounts)

    def add(self, name: RunName, run: Any) -> None:
        """Add a run."""
        self.runs.setdefault(name.name, []).append((name, run))

    def of(self, partition: NewPartition) -> dict[OperatorVariable, list[Any]]:
        """Return the runs that have rows of a partition. Those that no later partition needs are held no more."""
        number, found = partition.meta.partition, {}
        for target in partition.targets:
            runs = self.runs.get(target.name, [])
            found[target.name] = [run for name, run in runs if name.first <= number <= name.last]
            self.runs[target.name] = [(name, run) for name, run in runs if name.last > number]
        return found


class Workers(Protocol):
    """Runs the tasks of both stages."""

    def columns_of(self, jobs: Sequence[ReadJob], say: Callable[[str], None]) -> TargetColumns | None:
        """Return the columns that the function of the jobs makes of the first rows; None if it makes none."""
        ...

    def cut(self, jobs: Iterable[ReadJob], say: Callable[[str], None]) -> CutRows:
        """Run the first stage. Raises what a task raises."""
        ...

    def build(
        self, partitions: Sequence[NewPartition], cut: CutRows, say: Callable[[str], None]
    ) -> list[BuiltPartition]:
        """Run the second stage, in the order of ``partitions``; those of an operator ascend. Raises as ``cut``."""
        ...


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
        """See ``Workers``."""
        import ray

        task = ray.remote(_columns).options(**self._args)
        say(f"reading the first rows of operator {jobs[0].routing.name[0]!r}")
        for job in jobs:
            found: TargetColumns | None = _result(task.remote(job.source, job.routing))
            if found is not None:
                return found
        return None

    def cut(self, jobs: Iterable[ReadJob], say: Callable[[str], None]) -> CutRows:
        """See ``Workers``."""
        import ray

        task = ray.remote(_cut).options(num_returns="streaming", **self._args)
        cut, running, number, most, is_full = CutRows(), deque[Any](), 0, self._most(), _has_no_cpu()
        put: dict[int, tuple[Routing, Any]] = {}  # a function may hold much: once for all its tasks
        left = iter(jobs)
        while True:
            while len(running) < most and (job := next(left, None)) is not None:
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
        return max(FEWEST_TASKS, int(TASKS_PER_CPU * cpus))

    def _take(self, stream: Any, cut: CutRows, say: Callable[[str], None], done: str) -> None:
        """Take the references that one task gives: to the names of runs, then to the runs; to its counts at last."""
        names: deque[RunName] = deque()
        last = None
        for ref in self._references(stream, say, done):
            if names:
                cut.add(names.popleft(), ref)
                last = ref
                continue
            given = _result(ref)
            if isinstance(given, RowCounts):
                cut.counts.add(given)
                return
            names.extend(given)
        _result(last)  # what was taken for a run is what the task has raised
        raise RuntimeError(f"A task of the first stage ended before its counts, after {last}.")

    def _references(self, stream: Any, say: Callable[[str], None], done: str) -> Iterator[Any]:
        import ray

        while True:
            ready, _ = ray.wait([stream], timeout=WORKER_WAIT_SECONDS, fetch_local=False)
            if not ready:
                say(done)
                continue
            try:
                ref = next(stream)
            except StopIteration:
                return
            yield ref

    def build(
        self, partitions: Sequence[NewPartition], cut: CutRows, say: Callable[[str], None]
    ) -> list[BuiltPartition]:
        """See ``Workers``."""
        import ray

        task = ray.remote(_build).options(**self._args)
        built: dict[int, BuiltPartition] = {}
        running: dict[Any, int] = {}
        left, told, most, is_full = deque(enumerate(partitions)), 0, self._most(), _has_no_cpu()
        try:
            while left or running:
                while left and len(running) < most:
                    number, partition = left.popleft()
                    running[task.remote(partition, cut.of(partition))] = number
                ready, _ = ray.wait(list(running), timeout=WORKER_WAIT_SECONDS, fetch_local=False)
                for ref in ready:
                    built[running[ref]] = _result(ref)
                    del running[ref]
                if not ready or len(built) * 10 // len(partitions) > told * 10 // len(partitions):
                    why = _CPU if is_full and not built else ""
                    say(f"built {len(built)} of {len(partitions)} partitions{why}")
                    told = len(built)
        except BaseException:
            _await_end(list(running), say)
            raise
        return [built[number] for number in range(len(partitions))]


def _await_end(running: list[Any], say: Callable[[str], None]) -> None:
    """Wait for tasks that write, so that the caller can remove what was written.

    They are not cancelled: of a task that ends just then, Ray 2.60 ends the process that cancels.
    """
    import ray

    if running:
        say(f"waiting for {len(running)} tasks to end")
        _, left = ray.wait(running, num_returns=len(running), timeout=END_SECONDS, fetch_local=False)
        if left:
            log.warning("%d tasks go on: files that they write from now on have to be removed by hand", len(left))


def _columns(source: RowSource, routing: Routing) -> TargetColumns | None:
    return routing.columns(source.batches())


def _cut(source: RowSource, routing: Routing) -> Iterator[Any]:
    """Give, for each flush, the names of its runs and then the runs; at last the counts."""
    counts = RowCounts()
    for runs in routing.cut(source.batches(), counts):
        yield list(runs)
        for run in runs.values():  # noqa: UP028 - Ray sends values, which ``yield from`` passes on to an iterator
            yield run
    yield counts


def _build(partition: NewPartition, runs: Mapping[OperatorVariable, Sequence[Any]]) -> BuiltPartition:
    import ray

    return partition.build({name: ray.get(list(refs)) for name, refs in runs.items()})


def _result(ref: Any) -> Any:
    """Return a task's result, or raise what the task has raised."""
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
