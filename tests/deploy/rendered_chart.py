"""The chart of ``deploy/helm``, rendered by Go's own templates: ``make manifests`` writes ``deploy/kubernetes``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from spark_bridge.grafana import FILE_NAME, dashboard

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/ray-statestore"
MANIFESTS = ROOT / "deploy/kubernetes"
RULES = ROOT / "deploy/prometheus/statestore.rules.yml"
GO_LIBRARIES = "/usr/share/gocode"
MISSING = "rendering the chart needs Debian's golang-go and golang-github-masterminds-sprig-dev"


def can_render() -> bool:
    """Return whether Go and sprig are installed as Debian does."""
    return shutil.which("go") is not None and Path(GO_LIBRARIES, "src/github.com/Masterminds/sprig").is_dir()


@cache
def renderer() -> Path:
    """Return the program that renders, built for this process."""
    directory = Path(tempfile.gettempdir(), f"statestore-chart-renderer-{os.getpid()}")
    subprocess.run(
        ["go", "build", "-o", directory / "render", "."],
        cwd=Path(__file__).parent / "chart_renderer",
        env={**os.environ, "GO111MODULE": "off", "GOPATH": GO_LIBRARIES},
        check=True,
    )
    return directory / "render"


def render(*values: Path, release: str = "clicks") -> str:
    """Return the chart's documents with these files of values. Raises ``RuntimeError`` with the templates' message."""
    done = subprocess.run([renderer(), CHART, release, *values], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def documents(text: str) -> list[dict[str, Any]]:
    """Return the documents of a stream of YAML."""
    return [document for document in yaml.safe_load_all(text) if document is not None]


def manifests() -> dict[str, str]:
    """Return the content of ``deploy/kubernetes`` by name of file: one for each file of values there."""
    heading = "# Made by `make manifests` from deploy/helm/ray-statestore and {}; change those.\n"
    return {
        path.name.removesuffix(".values.yaml") + ".yaml": heading.format(path.name) + render(path, release="statestore")
        for path in sorted(MANIFESTS.glob("*.values.yaml"))
    }


def chart_files() -> dict[Path, str]:
    """Return the content of the chart's ``files``: Grafana's dashboard, and the alerts for Prometheus."""
    return {
        CHART / "files" / FILE_NAME: json.dumps(dashboard(), indent=2) + "\n",
        CHART / "files" / RULES.name: RULES.read_text(),
    }


if __name__ == "__main__":
    if not can_render():
        raise SystemExit(MISSING)
    for path, text in chart_files().items():
        path.write_text(text)
        print(f"Wrote {path}")
    for name, text in manifests().items():
        (MANIFESTS / name).write_text(text)
        print(f"Wrote {MANIFESTS / name}")
    shutil.rmtree(renderer().parent)
