"""Checkpoints as tests of rewritten and forgotten state look at them, also for bytes that must not be there.

Rows of totals, and the program that begins with them. ``OwnWorkers`` runs tasks of a rewriting in the test's own
process, one after the other, with small runs and steps.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from coordinator_actor.messages import OperatorSpec
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from spark_bridge.state_data.frames import state_table
from spark_bridge.state_surgery.new_state import CutRows
from spark_bridge.state_surgery.shuffle import BuiltPartition, NewPartition, ReadJob, TargetColumns

DERIVED = ("key_group", "partition_id")


def versions_of(location: str) -> StateVersions:
    return StateVersions.look(find_state(location))


def variables(location: str) -> list[tuple[str, str]]:
    versions = versions_of(location)
    return [
        (name, v.name)
        for name, entry in sorted(versions.operators(versions.completed).items())
        for v in versions.schema(entry).in_use
    ]


def rows(location: str, operator: str, state: str | None = None, *, sort: bool = True) -> list[dict[str, Any]]:
    table = state_table(location, operator, state, state_columns=True).drop_columns(list(DERIVED))
    found: list[dict[str, Any]] = table.to_pylist()
    return sorted(found, key=repr) if sort else found


def tree(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def program_of(location: str, **changed: OperatorSpec) -> list[OperatorSpec]:
    """Return the declarations of a program with exactly this state."""
    versions = versions_of(location)
    operators = versions.operators(versions.completed)
    specs = {
        name: OperatorSpec(name, e.num_partitions, versions.schema(e).compacted().to_json(), e.backend)
        for name, e in operators.items()
    }
    return list({**specs, **changed}.values())


def patterns_of(name: str) -> list[bytes]:
    """Return the bytes of a name and their base64 forms: descriptors hold small files in base64."""
    made = [base64.b64encode(bytes(before) + name.encode())[4:-4] for before in range(3)]
    return [name.encode(), *made]


def files_with(location: str, name: str) -> list[str]:
    """Return the files that contain the bytes of a name."""
    patterns = patterns_of(name)
    return [
        str(path.relative_to(location))
        for path in sorted(Path(location).rglob("*"))
        if path.is_file() and any(pattern in path.read_bytes() for pattern in patterns)
    ]


KEYS = pa.schema([pa.field("user", pa.int64())])
TOTALS = StateSchema(
    KEYS, pa.schema([pa.field("n.count.count", pa.int64(), nullable=False), ("x.sum.sum", pa.float64())])
)
PROGRAM = [OperatorSpec("totals", 3, OperatorSchema.of_rows(TOTALS).to_json(), "file")]
GIVEN = pa.table({"user": [1, 2, 3, None], "n.count.count": [5, 6, 7, 8], "x.sum.sum": [0.5, None, 2.0, 1.0]})


class OwnWorkers:
    """``Workers`` without Ray."""

    def columns_of(self, jobs: Sequence[ReadJob], say: Callable[[str], None]) -> TargetColumns | None:
        found = (routing.columns(source()) for source, routing in jobs)
        return next((columns for columns in found if columns is not None), None)

    def cut(self, jobs: Iterable[ReadJob], say: Callable[[str], None]) -> CutRows:
        cut = CutRows()
        for source, routing in jobs:
            for runs in routing.cut(source(), cut.counts):
                for name, run in runs.items():
                    cut.record_run(name, run)
        return cut

    def build(
        self, partitions: Sequence[NewPartition], cut: CutRows, say: Callable[[str], None]
    ) -> list[BuiltPartition]:
        return [partition.build(cut.take_runs_of(partition)) for partition in partitions]
