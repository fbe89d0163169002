"""A host's partitions for an overview, in columns, since there may be thousands of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INSTANCE_COLUMNS = (
    "run_id",
    "operator",
    "partition",
    "version",
    "keys",
    "memory_bytes",
    "snapshot_version",
    "dropped_elements",
)


def in_columns(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer of ``Host.describe`` with ``partitions`` in place of ``instances``.

    These are columns of one length: ``INSTANCE_COLUMNS`` as in the instances, ``rows`` of the last commit, and by name
    the ms of its ``steps``. None stands for what a partition does not have.
    """
    instances = described["instances"]
    last = [instance["last_commit"] for instance in instances]
    steps = dict.fromkeys(name for commit in last for name in commit if name != "version")
    columns: dict[str, Any] = {name: [instance[name] for instance in instances] for name in INSTANCE_COLUMNS}
    columns["rows"] = [
        instance["commits"].get(commit.get("version"), {}).get("num_rows")
        for instance, commit in zip(instances, last, strict=True)
    ]
    columns["steps"] = {name: [commit.get(name) for commit in last] for name in steps}
    return {**{name: value for name, value in described.items() if name != "instances"}, "partitions": columns}
