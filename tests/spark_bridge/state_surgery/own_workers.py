"""Tasks of a rewriting in the test's own process, one after the other, with small runs and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from spark_bridge.state_surgery.new_state import CutRows
from spark_bridge.state_surgery.shuffle import BuiltPartition, NewPartition, ReadJob, TargetColumns


class OwnWorkers:
    """``Workers`` without Ray."""

    def columns_of(self, jobs: Sequence[ReadJob], say: Callable[[str], None]) -> TargetColumns | None:
        found = (routing.columns(source.batches()) for source, routing in jobs)
        return next((columns for columns in found if columns is not None), None)

    def cut(self, jobs: Iterable[ReadJob], say: Callable[[str], None]) -> CutRows:
        cut = CutRows()
        for source, routing in jobs:
            for runs in routing.cut(source.batches(), cut.counts):
                for name, run in runs.items():
                    cut.record_run(name, run)
        return cut

    def build(
        self, partitions: Sequence[NewPartition], cut: CutRows, say: Callable[[str], None]
    ) -> list[BuiltPartition]:
        return [partition.build(cut.take_runs_of(partition)) for partition in partitions]
