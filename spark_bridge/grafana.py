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


@dataclass(frozen=True)
class Panel:
    """One graph. ``unit`` is Grafana's name; ``targets`` are queries by the legend of their series."""

    title: str
    unit: str
    targets: dict[str, str]
    description: str = ""


def _series(metric: str, by: str) -> str:
    """Return a metric with the variables of the dashboard as conditions on its labels."""
    of_queries = ', query=~"$query"' if "query" in by else ""
    return f'ray_statestore_{metric}{{namespace=~"$namespace"{of_queries}}}'


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({_series(metric, by)}[$__rate_interval]))"


def _max(metric: str, by: str) -> str:
    return f"max by ({by}) ({_series(metric, by)})"


def _sum(metric: str, by: str) -> str:
    return f"sum by ({by}) ({_series(metric, by)})"


def _quantile(share: float, buckets: str, by: str) -> str:
    return f"histogram_quantile({share}, {_rate(buckets, f'le, {by}')})"


def _median_and_p99(buckets: str, by: str) -> dict[str, str]:
    return {f"{name}: {{{{{by}}}}}": _quantile(q, buckets, by) for name, q in (("median", 0.5), ("p99", 0.99))}


def _rates(by: str, **metrics: str) -> dict[str, str]:
    """Return the rates of metrics, each by the legend of its series."""
    return {f"{name}: {{{{{by}}}}}": _rate(metric, by) for name, metric in metrics.items()}


DASHBOARD_ROWS: dict[str, tuple[Panel, ...]] = {
    "Is it healthy": (
        Panel(
            "Age of the newest completed version",
            "s",
            {"{{query}}": _max("freshness_seconds", "query")},
            "The time since the batch of the newest completed version began to read. It grows while no rows come.",
        ),
        Panel(
            "Time of the running batch",
            "s",
            {
                "{{query}}": _max("batch_seconds", "query"),
                "three usual intervals of {{query}}": f"3 * {_max('usual_interval_seconds', 'query')}",
            },
        ),
        Panel("Watermark behind the clock", "s", {"{{query}}": _max("event_time_lag_seconds", "query")}),
        Panel(
            "Rows in and processed",
            "rowsps",
            {
                "in: {{query}}": _max("input_rows_per_second", "query"),
                "processed: {{query}}": _max("processed_rows_per_second", "query"),
            },
            "A stream that takes fewer rows than come falls behind.",
        ),
    ),
    "Checkpoints": (
        Panel("Duration of a checkpoint", "s", _median_and_p99("checkpoint_duration_seconds_bucket", "query")),
        Panel(
            "Time of tasks by step",
            "s",
            {"{{step}}: {{query}}": _rate("checkpoint_step_seconds_total", "query, step")},
            "Seconds of tasks in a second.",
        ),
        Panel("Time by phase", "s", {"{{phase}}": _rate("checkpoint_phase_seconds_total", "query, phase")}),
        Panel("Bytes of changelogs", "Bps", {"{{query}}": _rate("checkpoint_delta_bytes_total", "query")}),
        Panel(
            "Tasks tried again, checkpoints given up",
            "short",
            _rates("query", tasks="retried_tasks_total", checkpoints="checkpoints_failed_total"),
        ),
    ),
    "State": (
        Panel("Keys by operator", "short", {"{{operator}}": _sum("keys", "query, operator")}),
        Panel("Memory by operator", "bytes", {"{{operator}}": _sum("partition_memory_bytes", "query, operator")}),
        Panel(
            "Largest partition over the median one",
            "none",
            {
                "{{operator}}": f"{_max('largest_partition_keys', 'query, operator')} "
                f"/ clamp_min({_max('median_partition_keys', 'query, operator')}, 1)"
            },
            "Above five the alert StatestoreSkew fires.",
        ),
        Panel(
            "Versions behind the newest snapshot",
            "short",
            {"{{operator}}": _max("snapshot_lag_versions", "query, operator")},
        ),
        Panel(
            "Standby copies: versions behind, and partitions without",
            "short",
            {
                "{{query}} behind": _max("standby_lag_versions", "query"),
                "{{query}} without": _max("partitions_without_standby", "query"),
            },
        ),
        Panel("Bytes to load a version", "bytes", {"{{query}}": _max("checkpoint_full_bytes", "query")}),
        Panel(
            "Rows dropped as late, and as duplicates",
            "rowsps",
            _rates("query", late="late_rows_total", duplicates="duplicate_rows_total"),
        ),
    ),
    "Hosts": (
        Panel("Memory by holder", "bytes", {"{{kind}}": _sum("memory_bytes", "kind")}),
        Panel("Restarts", "short", {"{{host}}": _max("host_restarts", "host")}),
        Panel("Partitions loaded", "ops", {"{{host}}": _rate("loads_total", "host")}),
        Panel("Keys read and written", "ops", _rates("host", read="keys_read_total", written="keys_written_total")),
    ),
    "Checkpoint storage": (
        Panel("Requests by kind", "reqps", {"{{kind}}": _rate("storage_requests_total", "kind")}),
        Panel("Requests that failed", "reqps", {"{{kind}}": _rate("storage_failures_total", "kind")}),
        Panel(
            "Time of requests, p99", "s", {"{{kind}}": _quantile(0.99, "storage_request_seconds_bucket_total", "kind")}
        ),
    ),
    "Queries of state": (
        Panel("Requests", "reqps", {"{{verb}} {{operator}}": _rate("requests_total", "operator, verb")}),
        Panel("Failures", "reqps", {"{{verb}}": _rate("request_failures_total", "verb")}),
        Panel("Latency", "s", _median_and_p99("request_seconds_bucket_total", "verb")),
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
        at = {"x": 0, "y": y, "w": 24, "h": 1}
        row_of = {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": at}
        panels.append(row_of)
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
            for i, (legend, expr) in enumerate(panel.targets.items())
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
    with tempfile.TemporaryDirectory(dir=directory, prefix=".") as scratch:
        draft = Path(scratch) / "draft"
        draft.write_text(json.dumps(dashboard(), indent=2) + "\n")
        draft.chmod(0o644)  # Grafana runs as another user
        draft.replace(path)
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
