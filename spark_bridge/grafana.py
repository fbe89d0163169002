"""The dashboard as Grafana's JSON, as a file of Ray's Grafana set-up and as a ConfigMap for Kubernetes.

Ray has no plug-ins for its dashboard; Grafana shows every JSON file in the directory of Ray's own dashboards.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The panels of the dashboard: which queries Prometheus is asked, row by row.


QUERY_LABELS = 'namespace=~"$namespace", query=~"$query"'
HOST_LABELS = 'namespace=~"$namespace"'
"""The variables of the dashboard, as conditions on labels."""


@dataclass(frozen=True)
class Panel:
    """One graph. ``unit`` is Grafana's name; each target is a query with the legend of its series."""

    title: str
    unit: str
    targets: tuple[tuple[str, str], ...]
    description: str = ""


def _rate(metric: str, of: str, by: str) -> str:
    return f"sum by ({by}) (rate(ray_statestore_{metric}{{{of}}}[$__rate_interval]))"


def _max(metric: str, of: str, by: str) -> str:
    return f"max by ({by}) (ray_statestore_{metric}{{{of}}})"


def _sum(metric: str, of: str, by: str) -> str:
    return f"sum by ({by}) (ray_statestore_{metric}{{{of}}})"


def _quantile(share: float, buckets: str, of: str, by: str) -> str:
    return f"histogram_quantile({share}, {_rate(buckets, of, f'le, {by}')})"


DASHBOARD_ROWS: dict[str, tuple[Panel, ...]] = {
    "Is it healthy": (
        Panel(
            "Age of the newest completed version",
            "s",
            ((_max("freshness_seconds", QUERY_LABELS, "query"), "{{query}}"),),
            "The time since the batch of the newest completed version began to read. It grows while no rows come.",
        ),
        Panel(
            "Time of the running batch",
            "s",
            (
                (_max("batch_seconds", QUERY_LABELS, "query"), "{{query}}"),
                (f"3 * {_max('usual_interval_seconds', QUERY_LABELS, 'query')}", "three usual intervals of {{query}}"),
            ),
        ),
        Panel(
            "Watermark behind the clock", "s", ((_max("event_time_lag_seconds", QUERY_LABELS, "query"), "{{query}}"),)
        ),
        Panel(
            "Rows in and processed",
            "rowsps",
            (
                (_max("input_rows_per_second", QUERY_LABELS, "query"), "in: {{query}}"),
                (_max("processed_rows_per_second", QUERY_LABELS, "query"), "processed: {{query}}"),
            ),
            "A stream that takes fewer rows than come falls behind.",
        ),
    ),
    "Checkpoints": (
        Panel(
            "Duration of a checkpoint",
            "s",
            (
                (_quantile(0.5, "checkpoint_duration_seconds_bucket", QUERY_LABELS, "query"), "median: {{query}}"),
                (_quantile(0.99, "checkpoint_duration_seconds_bucket", QUERY_LABELS, "query"), "p99: {{query}}"),
            ),
        ),
        Panel(
            "Time of tasks by step",
            "s",
            ((_rate("checkpoint_step_seconds_total", QUERY_LABELS, "query, step"), "{{step}}: {{query}}"),),
            "Seconds of tasks in a second.",
        ),
        Panel(
            "Time by phase",
            "s",
            ((_rate("checkpoint_phase_seconds_total", QUERY_LABELS, "query, phase"), "{{phase}}"),),
        ),
        Panel(
            "Bytes of changelogs", "Bps", ((_rate("checkpoint_delta_bytes_total", QUERY_LABELS, "query"), "{{query}}"),)
        ),
        Panel(
            "Tasks tried again, checkpoints given up",
            "short",
            (
                (_rate("retried_tasks_total", QUERY_LABELS, "query"), "tasks: {{query}}"),
                (_rate("checkpoints_failed_total", QUERY_LABELS, "query"), "checkpoints: {{query}}"),
            ),
        ),
    ),
    "State": (
        Panel("Keys by operator", "short", ((_sum("keys", QUERY_LABELS, "query, operator"), "{{operator}}"),)),
        Panel(
            "Memory by operator",
            "bytes",
            ((_sum("partition_memory_bytes", QUERY_LABELS, "query, operator"), "{{operator}}"),),
        ),
        Panel(
            "Largest partition over the median one",
            "none",
            (
                (
                    f"{_max('largest_partition_keys', QUERY_LABELS, 'query, operator')} "
                    f"/ clamp_min({_max('median_partition_keys', QUERY_LABELS, 'query, operator')}, 1)",
                    "{{operator}}",
                ),
            ),
            "Above five the alert StatestoreSkew fires.",
        ),
        Panel(
            "Versions behind the newest snapshot",
            "short",
            ((_max("snapshot_lag_versions", QUERY_LABELS, "query, operator"), "{{operator}}"),),
        ),
        Panel(
            "Bytes to load a version", "bytes", ((_max("checkpoint_full_bytes", QUERY_LABELS, "query"), "{{query}}"),)
        ),
        Panel(
            "Rows dropped as late, and as duplicates",
            "rowsps",
            (
                (_rate("late_rows_total", QUERY_LABELS, "query"), "{{query}} late"),
                (_rate("duplicate_rows_total", QUERY_LABELS, "query"), "{{query}} duplicates"),
            ),
        ),
    ),
    "Hosts": (
        Panel("Memory by holder", "bytes", ((_sum("memory_bytes", HOST_LABELS, "kind"), "{{kind}}"),)),
        Panel("Restarts", "short", ((_max("host_restarts", HOST_LABELS, "host"), "{{host}}"),)),
        Panel("Partitions loaded", "ops", ((_rate("loads_total", HOST_LABELS, "host"), "{{host}}"),)),
        Panel(
            "Keys read and written",
            "ops",
            (
                (_rate("keys_read_total", HOST_LABELS, "host"), "read: {{host}}"),
                (_rate("keys_written_total", HOST_LABELS, "host"), "written: {{host}}"),
            ),
        ),
    ),
    "Checkpoint storage": (
        Panel("Requests by kind", "reqps", ((_rate("storage_requests_total", HOST_LABELS, "kind"), "{{kind}}"),)),
        Panel("Requests that failed", "reqps", ((_rate("storage_failures_total", HOST_LABELS, "kind"), "{{kind}}"),)),
        Panel(
            "Time of requests, p99",
            "s",
            ((_quantile(0.99, "storage_request_seconds_bucket_total", HOST_LABELS, "kind"), "{{kind}}"),),
        ),
    ),
    "Queries of state": (
        Panel(
            "Requests", "reqps", ((_rate("requests_total", HOST_LABELS, "operator, verb"), "{{verb}} {{operator}}"),)
        ),
        Panel("Failures", "reqps", ((_rate("request_failures_total", HOST_LABELS, "verb"), "{{verb}}"),)),
        Panel(
            "Latency",
            "s",
            (
                (_quantile(0.5, "request_seconds_bucket_total", HOST_LABELS, "verb"), "median: {{verb}}"),
                (_quantile(0.99, "request_seconds_bucket_total", HOST_LABELS, "verb"), "p99: {{verb}}"),
            ),
        ),
    ),
}


FILE_NAME = "ray_statestore_grafana_dashboard.json"
UID = "ray-statestore"
_WIDTH, _HEIGHT, _IN_A_ROW = 8, 8, 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard: a row of graphs for each of ``panels.ROWS``."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in DASHBOARD_ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        y += 1
        for i, panel in enumerate(row):
            at = {"x": i % _IN_A_ROW * _WIDTH, "y": y + i // _IN_A_ROW * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append(_panel(len(panels) + 1, panel, at))
        y += -(-len(row) // _IN_A_ROW) * _HEIGHT
    return {
        "uid": UID,
        "title": "State of streams (ray-statestore)",
        "tags": ["ray", "ray-statestore"],
        "schemaVersion": 36,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable("namespace", "Namespace", "label_values(ray_statestore_hosts, namespace)"),
                _variable(
                    "query", "Query", 'label_values(ray_statestore_query_running{namespace=~"$namespace"}, query)'
                ),
            ]
        },
        "panels": panels,
    }


def _panel(number: int, panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(panel.targets)
        ],
    }


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def written(directory: Path) -> Path:
    """Write the dashboard into a directory, which must exist, and return its path. Readers see the old or the new one.

    Raises ``OSError``.
    """
    path = directory / FILE_NAME
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix=".", suffix=".tmp", delete=False) as draft:
        try:
            draft.write(json.dumps(dashboard(), indent=2) + "\n")
            draft.flush()
            Path(draft.name).chmod(0o644)  # Grafana runs as another user
            Path(draft.name).replace(path)
        except BaseException:
            Path(draft.name).unlink(missing_ok=True)
            raise
    return path


def config_map(namespace: str | None) -> dict[str, Any]:
    """Return a ConfigMap with the dashboard. Grafana's sidecar looks for the label ``grafana_dashboard``."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "ray-statestore-dashboard",
            **({} if namespace is None else {"namespace": namespace}),
            "labels": {"grafana_dashboard": "1", "app.kubernetes.io/name": "ray-statestore"},
        },
        "data": {FILE_NAME: json.dumps(dashboard())},
    }
