"""Start a Prometheus with the scaled alerts next to the session's cluster, and streams that generate their input."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from tests.patience import PATIENCE
from tests.prometheus import Prometheus, running_prometheus
from tests.spark_bridge.alerts.scaled_rules import scaled
from tests.spark_bridge.conftest import Stream, wait_until

RULES = Path(__file__).parents[3] / "deploy/prometheus/statestore.rules.yml"
LONGEST_FOR = 15.0
"""So long a condition must hold in the quick rules before its alert fires, in seconds, at most."""
QUIET_SECONDS = 20
"""So long Prometheus must have known of no alert before a test begins."""
FEED_SECONDS = 0.5


@dataclass
class Alerts:
    """What Prometheus says of alerts. ``since`` is when the test began to look."""

    prometheus: Prometheus
    since: float = 0.0

    def begin(self) -> None:
        """Wait until nothing of earlier tests is left, and look from now on.

        One look is not enough: where a scrape fails on a busy machine, all series are gone for a moment.
        """
        wait_until(lambda: not self.prometheus.query(f"max_over_time(ALERTS[{QUIET_SECONDS}s])"), PATIENCE)
        self.since = time.time()

    def fired(self) -> set[tuple[str, str]]:
        """Return each alert that has fired since the beginning, with the query, host or namespace that it named."""
        seconds = int(time.time() - self.since) + 1
        found = self.prometheus.query(f'max_over_time(ALERTS{{alertstate="firing"}}[{seconds}s])')
        labels = [one["metric"] for one in found]
        return {(of["alertname"], of.get("query") or of.get("host") or of["namespace"]) for of in labels}

    def exactly(self, *expected: tuple[str, str], seconds: float = LONGEST_FOR) -> None:
        """Wait until all of these have fired, then as long as any other alert needs to fire; none may."""
        wait_until(lambda: self.fired() >= set(expected), PATIENCE)
        firing = {alert["labels"]["alertname"] for alert in self.prometheus.ask("alerts")["alerts"]}
        assert firing >= {name for name, _ in expected}
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            others = [a for a in self.prometheus.ask("alerts")["alerts"] if a["state"] == "firing"]
            others = [a for a in others if a["labels"]["alertname"] not in {name for name, _ in expected}]
            assert others == [], [(a["annotations"]["summary"], a["value"], self.storage()) for a in others]
            time.sleep(1)
        assert self.fired() == set(expected), self.storage()

    def storage(self) -> list[Any]:
        """Return the three figures of storage that an alert of it may be about: which was it on a busy machine?"""
        return [
            self.prometheus.query(asked)
            for asked in (
                "sum by (host, kind) (increase(ray_statestore_storage_failures_total[1m])) > 0",
                "histogram_quantile(0.99, sum by (le) (rate(ray_statestore_storage_request_seconds_bucket_total[1m])))",
                "sum by (query) (increase(ray_statestore_checkpoints_failed_total[1m])) > 0",
            )
        ]


@dataclass
class Feed:
    """A stream that receives a file of ``rows(n)`` at most twice a second, and the query that reads it.

    At most two files wait, so that a fault in the rows reaches the query soon.
    """

    stream: Stream
    query: StreamingQuery
    rows: Callable[[int], Sequence[tuple[Any, ...]]]
    paused: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Feed until it has ended."""
        while not self.ended.wait(FEED_SECONDS):
            if not self.paused.is_set() and self.stream.files < self.batches() + 2:
                self.stream.add(list(self.rows(self.stream.files)))

    def well(self, alerts: Alerts, seconds: float = 20.0, batches: int = 5) -> None:
        """Let the stream run well for some time and so many batches, which no alert disturbs."""
        begun = self.batches()
        deadline = time.monotonic() + seconds
        wait_until(lambda: time.monotonic() > deadline and self.batches() > begun + batches, PATIENCE + seconds)
        assert self.query.exception() is None
        assert alerts.fired() == set()

    def batches(self) -> int:
        """Return the number of batches that the query has completed. Each batch reads one file."""
        last = self.query.lastProgress
        return 0 if last is None else int(last["batchId"]) + 1


@pytest.fixture(scope="module")
def prometheus(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("prometheus")
    quick = directory / "quick.yml"
    quick.write_text(yaml.safe_dump(scaled(yaml.safe_load(RULES.read_text()))))
    with running_prometheus(directory, quick) as made:
        yield made


@pytest.fixture
def alerts(prometheus: Prometheus) -> Alerts:
    made = Alerts(prometheus)
    made.begin()
    return made


Start = Callable[..., Any]


@pytest.fixture
def feed(make_stream: Callable[..., Stream]) -> Start:
    """Start a query ``name`` over a stream of ``rows`` and keep feeding it, as a context."""

    @contextmanager
    def start(
        name: str,
        schema: str,
        rows: Callable[[int], Sequence[tuple[Any, ...]]],
        frame: Callable[[DataFrame], DataFrame],
        mode: str = "append",
    ) -> Iterator[Feed]:
        stream = make_stream(schema)
        stream.add(list(rows(0)))
        query = (
            frame(stream.read())
            .writeStream.queryName(name)
            .outputMode(mode)
            .option("checkpointLocation", stream.checkpoint)
            .format("noop")
            .start()
        )
        made = Feed(stream, query, rows)
        thread = threading.Thread(target=made.run, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            made.ended.set()
            thread.join()
            query.stop()

    return start
