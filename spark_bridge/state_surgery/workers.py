"""Runs the tasks of both stages on Ray.

A task of the first stage is a generator: what it has cut by partition goes to Ray's object store while it reads on,
and to disk where the store is full. The driver has references only, and the counts of the tasks. Ray runs a task again
if its worker dies, and if its objects are lost: so the functions of users must give the same rows for the same rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.state_surgery.exchange_tasks import BuiltPartition, Name, NewPartition, ReadJob, RowCounts

WAIT_SECONDS = 10.0
"""So often the progress is told while no task ends."""
NO_LIMIT = 1 << 31
CANCEL_SECONDS = 30.0
"""So long cancelled tasks are waited for."""


@dataclass
class CutRows:
    """What the first stage has made: runs of rows by target and partition, in the order of the jobs, and counts.

    A run is a reference, or whatever else the workers that made it take for one.
    """

    runs: dict[tuple[Name, int], list[Any]] = field(default_factory=dict)
    counts: RowCounts = field(default_factory=RowCounts)


Columns: TypeAlias = Mapping[Any, pa.Schema]
"""The columns of new rows, by target."""


class Workers(Protocol):
    """Where tasks run."""

    def columns_of(self, jobs: Sequence[ReadJob], say: Callable[[str], None]) -> Columns:
        """Return ``first_columns`` of the jobs, of which there is one at least."""
        ...

    def cut(self, jobs: Iterable[ReadJob], say: Callable[[str], None]) -> CutRows:
        """Run the first stage. Raises what a task raises."""
        ...

    def build(
        self, partitions: Sequence[NewPartition], cut: CutRows, say: Callable[[str], None]
    ) -> list[BuiltPartition]:
        """Run the second stage, in the order of ``partitions``. Raises what a task raises."""
        ...


def first_columns(jobs: Sequence[ReadJob], ask: Callable[[ReadJob, bool], Columns | None]) -> Columns:
    """Return what ``columns`` of the first job says whose rows the function makes rows of, else of no rows at all."""
    for job in jobs:
        if (found := ask(job, False)) is not None:
            return found
    return ask(jobs[0], True) or {}


def run_of(partition: NewPartition, cut: CutRows) -> dict[Name, list[Any]]:
    """Return the runs of a partition, which are its own from now on: whoever holds them no more frees them."""
    number = partition.meta.partition
    return {t.name: cut.runs.pop((t.name, number), []) for t in partition.targets}


class RayWorkers:
    """Tasks of the Ray that this process has joined, or that Ray starts; ``remote_args`` are for ``ray.remote``.

    ``concurrency`` is the most tasks at once; None: as many as there are CPUs for.
    """

    def __init__(self, remote_args: Mapping[str, Any] | None = None, concurrency: int | None = None) -> None:
        if concurrency is not None and concurrency < 1:
            raise InvalidStateStoreArgument(f"concurrency={concurrency} must be 1 or more.")
        self._args = {"num_cpus": 1, **(remote_args or {})}
        self._most = concurrency or NO_LIMIT

    def columns_of(self, jobs: Sequence[ReadJob], say: Callable[[str], None]) -> Columns:
        """See ``Workers``."""
        import ray

        task = ray.remote(_columns).options(**self._args)
        say(f"reading the first rows of operator {jobs[0].name[0]!r}")
        return first_columns(jobs, lambda job, of_no_rows: _result(task.remote(job, of_no_rows)))

    def cut(self, jobs: Iterable[ReadJob], say: Callable[[str], None]) -> CutRows:
        """See ``Workers``."""
        import ray

        task = ray.remote(_cut).options(num_returns="streaming", **self._args)
        cut, running, number = CutRows(), deque[Any](), 0
        try:
            for job in jobs:
                while len(running) >= self._most:
                    self._take(running[0], cut, say, f"read {number} sources")
                    running.popleft()
                    number += 1
                running.append(task.remote(job))
            while running:
                self._take(running[0], cut, say, f"read {number} sources")
                running.popleft()
                number += 1
        except BaseException:
            for stream in running:
                ray.cancel(stream, force=False)
            raise
        say(f"read {number} sources: {sum(cut.counts.read.values())} rows")
        return cut

    def _take(self, stream: Any, cut: CutRows, say: Callable[[str], None], done: str) -> None:
        """Take the references that one task gives: to the names of runs, then to the runs; to its counts at last."""
        names: list[tuple[Name, int]] = []
        last = None
        for ref in self._references(stream, say, done):
            if names:
                cut.runs.setdefault(names.pop(0), []).append(ref)
                last = ref
                continue
            given = _result(ref)
            if isinstance(given, RowCounts):
                cut.counts.add(given)
                return
            names = given
        _result(last)  # what was taken for a run is what the task has raised
        raise RuntimeError(f"A task of the first stage ended before its counts, behind {last}.")

    def _references(self, stream: Any, say: Callable[[str], None], done: str) -> Iterator[Any]:
        import ray

        while True:
            ready, _ = ray.wait([stream], timeout=WAIT_SECONDS, fetch_local=False)
            if not ready:
                say(f"{done}{_no_cpu()}")
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
        left, told = deque(enumerate(partitions)), 0
        try:
            while left or running:
                while left and len(running) < self._most:
                    number, partition = left.popleft()
                    running[task.remote(partition, run_of(partition, cut))] = number
                ready, _ = ray.wait(list(running), timeout=WAIT_SECONDS, fetch_local=False)
                for ref in ready:
                    built[running[ref]] = _result(ref)
                    del running[ref]
                if not ready or len(built) * 10 // len(partitions) > told * 10 // len(partitions):
                    say(f"built {len(built)} of {len(partitions)} partitions{'' if ready else _no_cpu()}")
                    told = len(built)
        except BaseException:
            for ref in running:
                ray.cancel(ref, force=False)
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=CANCEL_SECONDS, fetch_local=False)
            raise  # nobody writes any more, so that the caller can remove what was written
        return [built[number] for number in range(len(partitions))]


def _columns(job: ReadJob, of_no_rows: bool) -> Columns | None:
    return job.columns(of_no_rows)


def _cut(job: ReadJob) -> Iterator[Any]:
    """Give, for each flush, the names of its runs and then the runs; at last the counts."""
    counts = RowCounts()
    for routed in job.run(counts):
        yield list(routed)
        for run in routed.values():  # noqa: UP028 - Ray sends values, which ``yield from`` passes on to an iterator
            yield run
    yield counts


def _build(partition: NewPartition, runs: Mapping[Name, Sequence[Any]]) -> BuiltPartition:
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


def _no_cpu() -> str:
    """Return what to do where no task can run, or nothing."""
    import ray

    free = ray.available_resources().get("CPU", 0)
    if free >= 1:
        return ""
    return (
        "; no CPU of the Ray cluster is free: where Spark's executors have them all, wait, add a machine, or give "
        'ray_remote_args={"num_cpus": 0}'
    )
