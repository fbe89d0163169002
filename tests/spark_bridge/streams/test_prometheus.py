"""A real Prometheus reads a running stream: each panel has data, and no alert fires while all is well."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from spark_bridge import QueryableStateClient, aggregate
from spark_bridge import functions as S
from spark_bridge.grafana.panels import ROWS
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import Stream, settle, wait_until

pytestmark = [
    pytest.mark.spark,
    pytest.mark.thorough,  # otherwise: promtool in tests/deploy/test_alerts.py, the names of metrics in grafana/
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="There is no Prometheus: install Debian's package."),
]

RULES = Path(__file__).parents[3] / "deploy/prometheus/statestore.rules.yml"
WITHOUT_EVENTS = {
    "Partitions loaded",
    "Tasks tried again, checkpoints given up",
    "Requests that failed",
    "Failures",
    "Rows dropped as late",
}
"""Counters of what has not happened have no series."""
Ask = Callable[..., Any]


@pytest.fixture
def prometheus(spark: Any, tmp_path: Path) -> Iterator[Ask]:
    """Ask the API of a Prometheus that scrapes every node of the Ray cluster once a second."""
    nodes = [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in ray.nodes() if n["Alive"]]
    conf = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "ray", "static_configs": [{"targets": nodes}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(conf))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]

    def ask(path: str, **given: str) -> Any:
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(given)}") as answer:
            return json.loads(answer.read())["data"]

    def answers() -> bool:
        try:
            return bool(ask("status/buildinfo"))
        except (urllib.error.URLError, ConnectionError):
            return False

    with subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(answers, PATIENCE)
            yield ask
        finally:
            process.terminate()


def test_every_panel_has_data_and_no_alert_fires(make_stream: Callable[..., Stream], prometheus: Ask) -> None:
    stream = make_stream("k long, v double, t timestamp")
    batch = iter(range(10_000))

    def feed() -> None:
        n = next(batch)
        now = datetime.now(timezone.utc)
        stream.add([(k, float(n), now) for k in range(20)])

    feed()
    rows = stream.read().withWatermark("t", "10 seconds")
    totals = aggregate(rows, by=["k", S.window("t", "1 minute")], operator="seen", num_partitions=2, n=S.count())
    query = (
        totals.writeStream.queryName("watched")
        .outputMode("append")
        .option("checkpointLocation", stream.checkpoint)
        .format("noop")
        .start()
    )
    settle(query)
    client = QueryableStateClient.connect()

    def missing() -> set[str]:
        feed()
        settle(query)
        list(client.scan("seen", query="watched"))
        return {
            f"{panel.title}: {expr}"
            for row in ROWS.values()
            for panel in row
            for expr, _ in panel.targets
            if panel.title not in WITHOUT_EVENTS and not found(expr)
        }

    def found(expr: str) -> list[Any]:
        asked = expr.replace("$__rate_interval", "1m").replace("$namespace", ".*").replace("$query", "watched")
        results: list[Any] = prometheus("query", query=asked)["result"]
        return [one for one in results if one["value"][1] != "NaN"]

    left: set[str] = set()

    def complete() -> bool:
        left.clear()
        left.update(missing())
        return not left

    try:
        wait_until(complete, PATIENCE)
    finally:
        print("without data:", sorted(left))
    firing = prometheus("query", query='ALERTS{alertstate="firing"}')["result"]
    assert [(alert["metric"]["alertname"], alert["metric"].get("query")) for alert in firing] == []
    query.stop()
