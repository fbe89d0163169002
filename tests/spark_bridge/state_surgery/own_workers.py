"""Tasks of a rewriting in the test's own process, one after the other, with small runs and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from spark_bridge.state_surgery.exchange_tasks import BuiltPartition, NewPartition, ReadJob
from spark_bridge.state_surgery.workers import Columns, CutRows, first_columns, run_of


class OwnWorkers:
    """``Workers`` without Ray."""

    def columns_of(self, jobs: Sequence[ReadJob], say: Callable[[str], None]) -> Columns:
        return first_columns(jobs, lambda job, of_no_rows: job.columns(of_no_rows))

    def cut(self, jobs: Iterable[ReadJob], say: Callable[[str], None]) -> CutRows:
        cut = CutRows()
        for job in jobs:
            for routed in job.run(cut.counts):
                for name, run in routed.items():
                    cut.runs.setdefault(name, []).append(run)
        return cut

    def build(
        self, partitions: Sequence[NewPartition], cut: CutRows, say: Callable[[str], None]
    ) -> list[BuiltPartition]:
        return [partition.build(run_of(partition, cut)) for partition in partitions]
