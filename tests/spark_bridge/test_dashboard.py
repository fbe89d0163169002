"""The dashboard asks for metrics that exist, in PromQL that is right, and stands where Grafana looks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from coordinator_actor.metrics import HISTOGRAM, METRICS
from spark_bridge.cli.main import app
from spark_bridge.grafana import DASHBOARD_ROWS, FILE_NAME, Panel, config_map, dashboard
from tests.command_line import CliRunner

PANELS = [panel for row in DASHBOARD_ROWS.values() for panel in row]
LABELS = {m.exported: {"namespace", *m.labels, *(("le",) if m.kind == HISTOGRAM else ())} for m in METRICS.values()}
LABELS |= {
    f"{m.exported}_{series}": LABELS[m.exported]
    for m in METRICS.values()
    if m.kind == HISTOGRAM
    for series in ("bucket", "sum", "count")
}


@pytest.mark.parametrize("panel", PANELS, ids=lambda p: p.title)
def test_a_panel_asks_for_metrics_and_labels_that_exist(panel: Panel) -> None:
    for legend, expr in panel.targets.items():
        found = re.findall(r"(ray_statestore_\w+)\{([^}]*)\}", expr)
        assert found and len(found) == expr.count("ray_statestore_"), expr
        by = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expr) for label in group.split(",")}
        for metric, conditions in found:
            asked = by | set(re.findall(r"(\w+)=~", conditions))
            assert asked <= LABELS[metric], (metric, asked - LABELS[metric])
        assert set(re.findall(r"{{(\w+)}}", legend)) <= by


@pytest.mark.skipif(shutil.which("promtool") is None, reason="There is no promtool: install Debian's prometheus.")
def test_the_queries_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"r{i}", "expr": expr.replace("$__rate_interval", "1m")}
        for i, expr in enumerate(expr for panel in PANELS for expr in panel.targets.values())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_do_not_overlap_and_have_unique_ids() -> None:
    panels = dashboard()["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    places = [
        (x, y)
        for p in panels
        for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
        for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
    ]
    assert len(set(places)) == len(places) and max(x for x, _ in places) < 24


def test_dashboard_file_is_in_rays_dashboard_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", str(tmp_path))
    for _ in range(2):
        result = CliRunner().invoke(app, ["grafana", "install", "--json"])
        assert result.exit_code == 0, result.output
    assert [p.name for p in tmp_path.iterdir()] == [FILE_NAME]
    assert json.loads((tmp_path / FILE_NAME).read_text()) == dashboard()
    assert json.loads(result.stdout) == {"path": str(tmp_path / FILE_NAME)}


def test_missing_directory_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", raising=False)
    for given, words in ((["install"], "Name the directory"), (["install", str(tmp_path / "x")], "is not a directory")):
        result = CliRunner().invoke(app, ["grafana", *given])
        assert result.exit_code == 2 and words in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_config_map_is_valid_for_kubernetes() -> None:
    kubernetes_validate.validate(config_map("monitoring"), "1.31", strict=True)
    result = CliRunner().invoke(app, ["grafana", "config-map", "--namespace", "monitoring"])
    assert json.loads(result.stdout) == config_map("monitoring")
    assert config_map(None)["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map(None)["data"][FILE_NAME]) == dashboard()
