"""A real Prometheus for tests, which scrapes the nodes of the running Ray cluster every two seconds.

``KeptMetrics`` keeps metrics as Prometheus would see them, and refuses what the table does not have.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from coordinator_actor.metrics import COUNTER, GAUGE, HISTOGRAM, METRICS
from spark_bridge.grafana import DASHBOARD_ROWS
from tests.patience import PATIENCE

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is missing: install Debian's package of that name."
)


class Prometheus:
    """Asks the API at ``address``."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, **given: str) -> Any:
        """Return the data of an answer of the API."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(given)}"
        with urllib.request.urlopen(url) as answer:
            return json.loads(answer.read())["data"]

    def query(self, expression: str) -> list[Any]:
        """Return the series of an expression now, without those whose value is NaN."""
        return [one for one in self.ask("query", query=expression)["result"] if one["value"][1] != "NaN"]

    def answers(self) -> bool:
        """Whether the process takes requests by now."""
        try:
            return bool(self.ask("status/buildinfo"))
        except (urllib.error.URLError, ConnectionError):
            return False


def panel_query(title: str, target: int = 0, query: str = ".*") -> str:
    """Return what a panel of the dashboard asks Prometheus, with its variables filled in."""
    (panel,) = (panel for row in DASHBOARD_ROWS.values() for panel in row if panel.title == title)
    asked = panel.targets[target][0].replace("$__rate_interval", "1m")
    return asked.replace("$namespace", ".*").replace("$query", query)


@contextmanager
def running_prometheus(directory: Path, rules: Path) -> Iterator[Prometheus]:
    """Run a Prometheus with a file of rules, which it evaluates once a second; its own files are in ``directory``."""
    nodes = [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in ray.nodes() if n["Alive"]]
    conf = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": nodes}]}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(conf))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        "prometheus",
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address={address}",
    ]
    made = Prometheus(address)
    with (directory / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            deadline = time.monotonic() + PATIENCE
            while not made.answers():
                said = (directory / "log").read_text()[-2000:]
                assert process.poll() is None and time.monotonic() < deadline, f"Prometheus does not answer: {said}"
                time.sleep(0.05)
            yield made
        finally:
            process.terminate()


Series = tuple[str, tuple[tuple[str, str], ...]]


class KeptMetrics:
    """``own`` are the labels of the process, as a ``RayMetrics`` has them, without the namespace."""

    def __init__(self, **own: str) -> None:
        self.own = own
        self.values: dict[Series, float] = {}
        self.observed: dict[Series, list[float]] = {}

    def _key(self, name: str, kind: str, labels: dict[str, str]) -> Series:
        metric = METRICS[name]
        assert metric.kind == kind, name
        whole = {**self.own, **labels}
        assert set(whole) - set(self.own) | set(metric.labels) & set(self.own) == set(metric.labels), (name, labels)
        return name, tuple(sorted(whole.items()))

    def set(self, name: str, value: float, **labels: str) -> None:
        self.values[self._key(name, GAUGE, labels)] = value

    def increase(self, name: str, more: float, **labels: str) -> None:
        assert more >= 0, (name, more)
        key = self._key(name, COUNTER, labels)
        if more:
            self.values[key] = self.values.get(key, 0) + more

    def observe(self, name: str, value: float, **labels: str) -> None:
        self.observed.setdefault(self._key(name, HISTOGRAM, labels), []).append(value)

    def get(self, name: str, **labels: str) -> float:
        return self.values[name, tuple(sorted({**self.own, **labels}.items()))]

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        """Return all values of a metric, keyed by its label values in the order of the label names."""
        return {
            tuple(v for k, v in labels if k not in self.own): value
            for (n, labels), value in self.values.items()
            if n == name
        }
