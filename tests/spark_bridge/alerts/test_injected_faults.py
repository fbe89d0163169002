"""Each alert fires when its fault is there, alone, and none fires while all is well.

The faults are real ones, injected where they arise: in the source's rows, in tasks, in processes, and in the network
before an S3 server. A real Prometheus scrapes the cluster, with the project's rules made quick (``scaled_rules.py``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from spark_bridge import aggregate, transform_with_state
from spark_bridge import functions as S
from spark_bridge.session.current import current_cluster
from tests.backends.storage.s3_faults import Fault, FaultProxy
from tests.patience import HANG
from tests.prometheus import Prometheus, needs_prometheus, panel_query
from tests.spark_bridge.alerts.conftest import Alerts, Start
from tests.spark_bridge.alerts.faulty_streams import (
    OUTPUT,
    SCHEMA,
    Pages,
    counts,
    failing_once,
    replace_text,
    rows,
    slowed,
)
from tests.spark_bridge.conftest import Stream, settle, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.thorough, needs_prometheus]
RETRIED = "Tasks tried again, checkpoints given up"
"""A panel that has data only where something goes wrong."""


def test_an_hour_without_faults_raises_no_alert(feed: Start, alerts: Alerts) -> None:
    with feed("healthy", SCHEMA, rows, counts("healthy")) as stream:
        stream.well(alerts, 180.0)  # an hour of the quick rules


def test_a_source_that_stalls_in_the_midst_of_a_batch(feed: Start, alerts: Alerts, tmp_path: Path) -> None:
    held = tmp_path / "held"
    with feed("stalls", SCHEMA, rows, lambda df: counts("stalls")(df.mapInArrow(slowed(held), SCHEMA))) as stream:
        stream.well(alerts)
        replace_text(held, str(HANG))
        try:
            # Only briefly: after five minutes, here one, StatestoreNotFresh would fire too.
            alerts.exactly(("StatestoreCheckpointLate", "stalls"), seconds=5.0)
        finally:
            held.unlink()


def test_a_source_that_is_slower_than_its_rows_come(feed: Start, alerts: Alerts, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    replace_text(slow, "15")
    with feed("slow", SCHEMA, rows, lambda df: counts("slow")(df.mapInArrow(slowed(slow), SCHEMA))) as stream:
        stream.well(alerts, batches=3)
        replace_text(slow, "40")  # no batch takes three usual intervals
        try:
            alerts.exactly(("StatestoreNotFresh", "slow"))
        finally:
            slow.unlink()


def test_a_source_whose_rows_are_old(feed: Start, alerts: Alerts) -> None:
    def old(n: int) -> list[tuple[Any, ...]]:
        return [(k, v, t - timedelta(hours=2)) for k, v, t in rows(n)]

    def by_minute(name: str) -> Callable[[DataFrame], DataFrame]:
        return lambda df: aggregate(
            df.withWatermark("t", "10 seconds"),
            by=["k", S.window("t", "1 minute")],
            operator=name,
            num_partitions=2,
            n=S.count(),
        )

    with feed("timely", SCHEMA, rows, by_minute("timely")) as timely:
        timely.well(alerts)
        with feed("backlog", SCHEMA, old, by_minute("backlog")):
            alerts.exactly(("StatestoreNotFresh", "backlog"))


def test_tasks_that_fail(feed: Start, alerts: Alerts, prometheus: Prometheus, tmp_path: Path) -> None:
    flag = tmp_path / "failing"
    with feed(
        "fails", SCHEMA, rows, lambda df: counts("fails", 8)(df).mapInArrow(failing_once(flag), OUTPUT)
    ) as stream:
        stream.well(alerts)
        flag.touch()
        try:
            alerts.exactly(("StatestoreTasksRetried", "fails"))
            assert prometheus.query(panel_query(RETRIED, 0, "fails"))
        finally:
            flag.unlink()


def test_state_that_grows_without_end(feed: Start, alerts: Alerts) -> None:
    grows = []

    def keys(n: int) -> list[tuple[Any, ...]]:
        # Random bytes do not compress.
        more = [(n << 20 | k, os.urandom(2000).hex()) for k in range(200)] if grows else []
        return [*((k, "") for k in range(20)), *more]

    def newest(df: DataFrame) -> DataFrame:
        return aggregate(df, by="k", operator="grows", num_partitions=2, n=S.max("v"))

    with feed("grows", "k long, v string", keys, newest) as stream:
        stream.well(alerts, 60.0)  # a day of the quick rules
        grows.append(True)
        alerts.exactly(("StatestoreStateGrows", "grows"))


def test_a_key_with_most_of_the_state_in_more_than_a_hundred_partitions(feed: Start, alerts: Alerts) -> None:
    hot = []

    def visits(n: int) -> list[tuple[Any, ...]]:
        many = [(0, page) for page in range(11_000)] if hot and not hot.clear() else []
        return [*((user, n) for user in range(400)), *many]

    def pages(df: DataFrame) -> DataFrame:
        return transform_with_state(df, "k", Pages(), OUTPUT, operator="pages", num_partitions=101)

    with feed("skewed", "k long, page long", visits, pages, mode="update") as stream:
        stream.well(alerts)
        hot.append(True)
        alerts.exactly(("StatestoreSkew", "skewed"))


def test_storage_that_answers_with_errors(feed: Start, alerts: Alerts, prometheus: Prometheus, s3: FaultProxy) -> None:
    with feed("refused", SCHEMA, rows, counts("refused")) as stream:
        stream.well(alerts)
        s3.plan.append(Fault("answer", status=500, times=10**9, skip=2, recurs=True))
        alerts.exactly(("StatestoreStorage", current_cluster().options.namespace))
        assert prometheus.query(panel_query("Requests that failed"))


def test_storage_that_is_slow(feed: Start, alerts: Alerts, s3: FaultProxy) -> None:
    with feed("delayed", SCHEMA, rows, counts("delayed")) as stream:
        stream.well(alerts)
        s3.plan.append(Fault("delay", "PUT", "/manifests/", seconds=7.0, times=10**9))
        alerts.exactly(("StatestoreStorage", current_cluster().options.namespace))


def test_abandoned_checkpoint(feed: Start, alerts: Alerts, prometheus: Prometheus, s3: FaultProxy) -> None:
    """A single refused manifest does not raise the failure rate: only the last condition of the alert detects it."""
    with feed("given-up", SCHEMA, rows, counts("given-up")) as stream:
        stream.well(alerts)
        s3.plan.append(Fault("answer", "PUT", "/manifests/", status=403))
        storage = ("StatestoreStorage", current_cluster().options.namespace)
        alerts.exactly(storage)
        assert prometheus.query(panel_query(RETRIED, 1, "given-up"))
        # The failure rate is back to zero, and the query has continued.
        wait_until(lambda: not prometheus.query("rate(ray_statestore_storage_failures_total[15s]) > 0.05"))
        known = stream.batches()
        wait_until(lambda: stream.batches() > known + 2)


def test_storage_that_takes_no_snapshots(feed: Start, alerts: Alerts, s3: FaultProxy) -> None:
    """This fault has its own alert. A refused upload counts as a failed request, a hanging upload as a slow one."""
    with feed("no-snapshots", SCHEMA, rows, counts("lags")) as stream:
        stream.well(alerts)
        s3.plan.append(Fault("answer", "PUT", "snapshot", status=403, times=10**9))
        storage = ("StatestoreStorage", current_cluster().options.namespace)
        alerts.exactly(("StatestoreSnapshotsLag", "no-snapshots"), storage)


def test_a_coordinator_that_is_killed_again_and_again(feed: Start, alerts: Alerts, prometheus: Prometheus) -> None:
    with feed("goes-on", SCHEMA, rows, counts("goes-on")) as stream:
        stream.well(alerts)
        began = "max(max_over_time(ray_statestore_coordinator_start_timestamp_seconds[20s]))"
        for _ in range(3):
            known = float(prometheus.query(began)[0]["value"][1])
            stream.paused.set()
            settle(stream.query)
            os.kill(int(current_cluster().coordinator.call("describe")["pid"]), signal.SIGKILL)
            wait_until(lambda known=known: float(prometheus.query(began)[0]["value"][1]) > known)
            stream.paused.clear()
        alerts.exactly(("StatestoreRestartLoop", current_cluster().options.namespace))


def test_a_coordinator_that_hangs(feed: Start, alerts: Alerts) -> None:
    with feed("waits", SCHEMA, rows, counts("waits")) as stream:
        stream.well(alerts)
        pid = int(current_cluster().coordinator.call("describe")["pid"])
        os.kill(pid, signal.SIGSTOP)
        try:
            alerts.exactly(("StatestoreCoordinatorSilent", current_cluster().options.namespace))
        finally:
            os.kill(pid, signal.SIGCONT)
        known = stream.batches()
        wait_until(lambda: stream.batches() > known + 2)


def test_a_query_that_is_started_again_and_again(
    feed: Start, alerts: Alerts, prometheus: Prometheus, make_stream: Callable[..., Stream]
) -> None:
    """As by a supervisor whose program ends again and again."""
    with feed("well", SCHEMA, rows, counts("well")) as well:
        well.well(alerts)
        stream = make_stream(SCHEMA)
        epoch = 'max(max_over_time(ray_statestore_epoch{query="again"}[20s]))'

        def newest() -> float:
            return max((float(found["value"][1]) for found in prometheus.query(epoch)), default=0.0)

        for n in range(5):
            known = newest()
            stream.add(rows(n))
            query = (
                counts("again")(stream.read())
                .writeStream.queryName("again")
                .option("checkpointLocation", stream.checkpoint)
                .format("noop")
                .start()
            )
            query.processAllAvailable()
            wait_until(lambda known=known: newest() > known)
            query.stop()
        alerts.exactly(("StatestoreRestartLoop", "again"))


def test_a_host_that_is_killed_again_and_again(feed: Start, alerts: Alerts, prometheus: Prometheus) -> None:
    with feed("killed", SCHEMA, rows, counts("killed")) as stream:
        stream.well(alerts)
        host = str(current_cluster().describe_hosts()[0]["host_id"])
        restarts = f'max(max_over_time(ray_statestore_host_restarts{{host="{host}"}}[20s]))'
        known = float(prometheus.query(restarts)[0]["value"][1])
        for n in range(1, 4):
            stream.paused.set()
            settle(stream.query)
            os.kill(
                next(int(h["pid"]) for h in current_cluster().describe_hosts() if h["host_id"] == host), signal.SIGKILL
            )
            wait_until(lambda n=n: float(prometheus.query(restarts)[0]["value"][1]) >= known + n)
            stream.paused.clear()
        alerts.exactly(("StatestoreRestartLoop", host))
