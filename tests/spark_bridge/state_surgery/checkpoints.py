"""Checkpoints as tests of rewritten state look at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coordinator_actor.messages import OperatorSpec
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from spark_bridge.state_data.frames import state_table

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
