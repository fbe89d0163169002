"""What ``describe`` says of an operator: what a client knows of it, and what its hosts say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from spark_bridge.queryable.locations import KnownOperator


def described_operator(known: KnownOperator, hosts: dict[str, Any]) -> dict[str, Any]:
    """Ready for JSON. ``hosts`` is what a host answers for all of them."""
    location = known.location
    views = [known.view(v.name) for v in known.schema.variables if not v.deleted]
    return {
        "operator": location.operator.name,
        "kind": location.operator.kind,
        "query_name": location.query_name,
        "query_id": location.query_id,
        "run_id": location.run_id,
        "backend": location.operator.backend,
        "key_groups": location.key_groups,
        "completed_version": location.completed_version,
        "key": _columns(list(views[0].codec.schema)) if views else [],
        "states": [
            {"state": v.variable.name, "kind": v.kind, "ttl_ms": v.variable.ttl_ms, "columns": _columns(v.scan_fields)}
            for v in views
        ],
        "partitions": [
            {"partition": i, "host_id": owner.host_id, "address": owner.query_address}
            for i, owner in enumerate(location.owners)
        ],
        **{name: value for name, value in hosts.items() if name not in ("operator",)},
    }


def _columns(fields: Sequence[pa.Field]) -> list[dict[str, str]]:
    return [{"name": f.name, "type": str(f.type)} for f in fields]
