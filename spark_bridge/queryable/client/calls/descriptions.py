"""The answer of ``describe``: a client's own facts about an operator, and the reports of the operator's hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from spark_bridge.queryable.client.cluster.known_operators import KnownOperator

_OF_HOST = ("host_id", "incarnation", "query_address", "node_id", "failure")


def operator_description(known: KnownOperator, hosts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the description of an operator, ready for JSON. ``hosts`` are the answers of all hosts.

    ``requests`` are those of all hosts together, by verb; each host has its own, with percentiles.
    """
    location = known.location
    views = [known.view(v.name) for v in known.schema.in_use]
    of_hosts = [_described_host(location.operator.name, host) for host in hosts]
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
        "hosts": of_hosts,
        "requests": merged_requests([host["requests"] for host in of_hosts]),
    }


def _described_host(operator: str, host: dict[str, Any]) -> dict[str, Any]:
    """Return one host's part in an operator."""
    (of_operator, *_) = [o for o in host.get("operators", ()) if o.get("operator") == operator] or [{}]
    return {
        **{name: host[name] for name in _OF_HOST if name in host},
        **{name: of_operator[name] for name in ("completed_version_here", "oldest_version") if name in of_operator},
        "held": of_operator.get("held", []),
        "requests": host.get("requests", {}).get(operator, {}),
    }


def merged_requests(of_hosts: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return requests and failures of all hosts by verb, and the slowest latency.

    Percentiles of several hosts cannot be merged.
    """
    merged: dict[str, dict[str, Any]] = {}
    for requests in of_hosts:
        for verb, figures in requests.items():
            of_verb = merged.setdefault(verb, {"requests": 0, "failures": 0, "max_ms": 0.0})
            of_verb["requests"] += figures["requests"]
            of_verb["failures"] += figures["failures"]
            of_verb["max_ms"] = max(of_verb["max_ms"], figures["max_ms"])
    return merged


def _columns(fields: Sequence[pa.Field]) -> list[dict[str, str]]:
    return [{"name": f.name, "type": str(f.type)} for f in fields]
