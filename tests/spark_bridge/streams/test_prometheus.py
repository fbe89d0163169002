"""A real Prometheus reads a running stream: each panel has data, and no alert fires while all is well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from spark_bridge import QueryableStateClient, aggregate, deduplicate
from spark_bridge import functions as S
from spark_bridge.exceptions import StateVersionError
from spark_bridge.grafana import DASHBOARD_ROWS
from tests.patience import PATIENCE
from tests.prometheus import Prometheus, needs_prometheus, panel_query, running_prometheus
from tests.spark_bridge.conftest import Stream, settle, wait_until

pytestmark = [
    pytest.mark.spark,
    pytest.mark.thorough,  # otherwise: promtool in tests/deploy/test_alerts.py, the names of metrics in grafana/
    needs_prometheus,
]

RULES = Path(__file__).parents[3] / "deploy/prometheus/statestore.rules.yml"
FAULTS = {"Tasks tried again, checkpoints given up", "Requests that failed"}
"""Panels of problems of a stream. The tests of alerts, which cause such problems, check them (``alerts/``)."""


@pytest.fixture
def prometheus(spark: Any, tmp_path: Path) -> Iterator[Prometheus]:
    with running_prometheus(tmp_path, RULES) as made:
        yield made


def start(stream: Stream, name: str, made: DataFrame) -> StreamingQuery:
    query = (
        made.writeStream.queryName(name)
        .outputMode("append")
        .option("checkpointLocation", f"{stream.checkpoint}-{name}")
        .format("noop")
        .start()
    )
    settle(query)
    return query


def test_every_panel_has_data_and_no_alert_fires(make_stream: Callable[..., Stream], prometheus: Prometheus) -> None:
    stream = make_stream("k long, v double, t timestamp")

    def feed() -> None:
        now = datetime.now(timezone.utc)
        late = [(0, 0.0, now - timedelta(hours=1))] if stream.files > 1 else []
        stream.add([*((k, 1.0, now) for k in range(20)), *late])

    feed()
    rows = stream.read().withWatermark("t", "10 seconds")
    totals = aggregate(rows, by=["k", S.window("t", "1 minute")], operator="seen", num_partitions=2, n=S.count())
    once = deduplicate(stream.read(), by="k", operator="once", num_partitions=2)
    start(stream, "watched", totals).stop()
    feed()
    queries = [start(stream, "watched", totals), start(stream, "repeated", once)]  # the first one loads what it has
    client = QueryableStateClient.connect()

    def missing() -> set[str]:
        feed()
        for query in queries:
            settle(query)
        list(client.scan("seen", query="watched"))
        with pytest.raises(StateVersionError):
            client.get("once", 0, version=10**6)
        asked = {
            (panel.title, target): panel_query(panel.title, target)
            for row in DASHBOARD_ROWS.values()
            for panel in row
            for target in range(len(panel.targets))
            if panel.title not in FAULTS
        }
        return {f"{title}: {query}" for (title, _), query in asked.items() if not prometheus.query(query)}

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
    for query in queries:
        query.stop()
