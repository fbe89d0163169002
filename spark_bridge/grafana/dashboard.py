"""The dashboard as Grafana's JSON, as a file of Ray's Grafana set-up and as a ConfigMap for Kubernetes.

Ray has no plug-ins for its dashboard; Grafana shows every JSON file in the directory in which Ray keeps its own.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from spark_bridge.grafana.panels import DASHBOARD_ROWS, Panel

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
