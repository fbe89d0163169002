"""A real Prometheus reads a running stream: each panel has data, and no alert fires while all is well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from spark_bridge import QueryableStateClient, aggregate
from spark_bridge import functions as S
from spark_bridge.grafana.panels import ROWS
from tests.patience import PATIENCE
from tests.prometheus import Prometheus, needs_prometheus, running_prometheus
from tests.spark_bridge.conftest import Stream, settle, wait_until

pytestmark = [
    pytest.mark.spark,
    pytest.mark.thorough,  # otherwise: promtool in tests/deploy/test_alerts.py, the names of metrics in grafana/
    needs_prometheus,
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


@pytest.fixture
def prometheus(spark: Any, tmp_path: Path) -> Iterator[Prometheus]:
    with running_prometheus(tmp_path, RULES) as made:
        yield made


def test_every_panel_has_data_and_no_alert_fires(make_stream: Callable[..., Stream], prometheus: Prometheus) -> None:
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
        return prometheus.query(asked)

    left: set[str] = set()

    def complete() -> bool:
        left.clear()
        left.update(missing())
        return not left

    try:
        wait_until(complete, PATIENCE)
    finally:
        print("without data:", sorted(left))
    firing = prometheus.query('ALERTS{alertstate="firing"}')
    assert [(alert["metric"]["alertname"], alert["metric"].get("query")) for alert in firing] == []
    query.stop()
