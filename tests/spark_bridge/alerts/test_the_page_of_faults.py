"""The faults page shows the person on call the fault of a real stream, its location, and the remedy.

A screenshot of the page is saved in the directory of the test.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from coordinator_actor.reference import RayCoordinatorPort
from spark_bridge import QueryableStateClient, transform_with_state
from spark_bridge.overview.from_cluster import cluster_overview
from spark_bridge.session.current import current_cluster
from spark_bridge.ui.live import LiveSystem
from tests.backends.storage.s3_faults import Fault, FaultProxy
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.alerts.conftest import Feed, Start
from tests.spark_bridge.alerts.faulty_streams import OUTPUT, SCHEMA, Pages, counts, replace_text, rows, slowed
from tests.spark_bridge.conftest import wait_until
from tests.spark_bridge.ui.browser import WHY_NOT, Tab, chromium, served_page

pytestmark = [pytest.mark.spark, pytest.mark.thorough, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


class Front:
    """The first page, as a person sees it who waits for it to change."""

    def __init__(self, tab: Tab, directory: Path) -> None:
        self.tab = tab
        self._directory = directory

    def faults(self) -> list[str]:
        """Return the faults as strings, all read at once because the page refreshes itself."""
        return list(self.tab.page.locator(".fault").all_inner_texts())

    def says(self, *words: str) -> float:
        """Wait until one fault has all these words. Return after how many seconds."""
        begun = time.monotonic()
        try:
            wait_until(lambda: any(all(w in fault for w in words) for fault in self.faults()), PATIENCE, 0.5)
        finally:
            self.picture(words[0])
            print(f"{time.monotonic() - begun:.1f} s", *self.faults(), sep="\n")
        return time.monotonic() - begun

    def picture(self, name: str) -> None:
        self.tab.page.screenshot(path=str(self._directory / f"{name}.png"), full_page=True)

    def open(self, path: str) -> None:
        self.tab.open(path)


@pytest.fixture(scope="module")
def page(spark: Any) -> Iterator[str]:
    options = current_cluster().options
    calls = RayCoordinatorPort(options.namespace, options.coordinator_name, 10.0)
    system = LiveSystem(
        options.namespace,
        lambda: cluster_overview(options.namespace, options.coordinator_name, 3.0),
        lambda: QueryableStateClient.connect(options.namespace, options.coordinator_name),
        calls.call,
    )
    with served_page(system) as address:
        yield address
    calls.close()


@pytest.fixture
def front(page: str, tmp_path: Path) -> Iterator[Front]:
    with chromium() as browser:
        yield Front(Tab(browser, page).open("/"), tmp_path)


def runs(stream: Feed, batches: int = 5) -> None:
    begun = stream.batches()
    wait_until(lambda: stream.batches() > begun + batches)


def test_a_skewed_key(feed: Start, front: Front) -> None:
    hot = []

    def visits(n: int) -> list[tuple[Any, ...]]:
        many = [(7, n * 20_000 + page) for page in range(12_000)] if hot else []
        return [*((user, n) for user in range(200)), *many]

    def pages(df: DataFrame) -> DataFrame:
        return transform_with_state(df, "k", Pages(), OUTPUT, operator="pages", num_partitions=8)

    with (
        feed("visits", "k long, page long", visits, pages, mode="update") as stream,
        feed("healthy", SCHEMA, rows, counts("healthy")) as other,
    ):
        runs(stream), runs(other)
        assert not any("visits" in fault or "healthy" in fault for fault in front.faults())
        hot.append(True)
        front.says("operator pages of query visits", "skew")
        assert not any("healthy" in fault for fault in front.faults())
        front.tab.page.locator(".fault", has_text="skew").get_by_role("link").click()
        front.picture("operator")
        front.tab.page.get_by_role("link", name="hottest keys").first.click()
        front.picture("hottest")


def test_a_slow_disk(feed: Start, front: Front, s3: FaultProxy) -> None:
    with feed("orders", SCHEMA, rows, counts("orders")) as stream:
        runs(stream)
        s3.plan.append(Fault("delay", "PUT", seconds=2.0, times=10**9))
        front.says("query orders", "slow-storage")
        front.tab.page.locator(".fault", has_text="slow-storage").get_by_role("link").click()
        front.picture("query")


def test_storage_that_hangs(feed: Start, front: Front, s3: FaultProxy) -> None:
    with feed("held", SCHEMA, rows, counts("held")) as stream:
        runs(stream)
        s3.gate.clear()
        try:
            front.says("query held", "checkpoint-late")
        finally:
            s3.gate.set()
        front.tab.open("/query?query=held")
        front.picture("query")


def test_storage_that_refuses(feed: Start, front: Front, s3: FaultProxy) -> None:
    with feed("refused", SCHEMA, rows, counts("refused")) as stream:
        runs(stream)
        s3.plan.append(Fault("answer", "PUT", status=403, times=10**9))
        front.says("query refused", "query-failed", "privileges")


def test_a_source_that_stalls(feed: Start, front: Front, tmp_path: Path) -> None:
    held = tmp_path / "held"
    with feed("stalls", SCHEMA, rows, lambda df: counts("stalls")(df.mapInArrow(slowed(held), SCHEMA))) as stream:
        runs(stream)
        replace_text(held, str(HANG))
        try:
            front.says("query stalls", "checkpoint-late", "source")
        finally:
            held.unlink()


def a_host() -> dict[str, Any]:
    found: dict[str, Any] = current_cluster().describe_hosts()[0]
    return found


def test_a_host_that_is_killed(feed: Start, front: Front) -> None:
    with feed("goes-on", SCHEMA, rows, counts("goes-on")) as stream:
        runs(stream)
        host = a_host()
        os.kill(int(host["pid"]), signal.SIGKILL)
        front.says(f"host {host['host_id']}", "process-restarted")
        runs(stream)


def test_a_host_that_hangs(feed: Start, front: Front) -> None:
    with feed("waits", SCHEMA, rows, counts("waits")) as stream:
        runs(stream)
        host = a_host()
        os.kill(int(host["pid"]), signal.SIGSTOP)
        try:
            front.says(f"host {host['host_id']}", "host-silent")
            # When its lease is over the coordinator knows the host no more; Ray does.
            front.says(f"host {host['host_id']}", "host-lost", f"pid {host['pid']}")
            row = front.tab.page.locator("#queries tr", has_text="waits").first
            assert " ago" in row.inner_text(), "a host that hangs hides nothing else"
            front.tab.open("/hosts")
            front.picture("hosts")
        finally:
            os.kill(int(host["pid"]), signal.SIGCONT)
        runs(stream)


def test_a_coordinator_that_hangs(feed: Start, front: Front) -> None:
    with feed("halts", SCHEMA, rows, counts("halts")) as stream:
        runs(stream)
        pid = int(current_cluster().coordinator.call("describe")["pid"])
        os.kill(pid, signal.SIGSTOP)
        try:
            front.says("not up to date", "coordinator")
        finally:
            os.kill(pid, signal.SIGCONT)
        runs(stream)
