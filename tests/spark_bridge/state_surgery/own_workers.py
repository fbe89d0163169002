"""Tasks of a rewriting in the test's own process, one after the other, with small runs and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from spark_bridge.state_surgery.exchange_tasks import BuiltPartition, NewPartition, ReadJob
from spark_bridge.state_surgery.workers import CutRows, run_of


class OwnWorkers:
    """``Workers`` without Ray."""

    def columns_of(self, jobs: Sequence[ReadJob], say: Callable[[str], None]) -> Mapping[Any, pa.Schema]:
        return next((found for found in (job.columns() for job in jobs) if found is not None), {})

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
