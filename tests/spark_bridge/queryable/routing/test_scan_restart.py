"""Scans that are under way while their query is started again: the next run gives the rest of the same version, or
says that it cannot.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coordinator_actor.exceptions import RetiredRunError
from spark_bridge.exceptions import (
    HostUnavailableError,
    QueryEndedError,
    QueryTimeoutError,
    RequestError,
    StateVersionError,
)
from spark_bridge.host.prepared_versions import VersionRequests
from spark_bridge.queryable.client.scans import StateScan
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.protocol import At, ScanRequest, StateAnswer
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.queryable.routing.scans import RoutedScan
from tests.effort import only_thorough
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.client_world import TOKEN, Cluster, go_back

USERS = 8_000
WIDE = "x" * 4_000
"""So wide that no socket holds all rows: a host still has most of them when the query is restarted."""


BUFFER = 1 << 16


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    connect = socket.create_connection

    def connected(*args: Any, **kwargs: Any) -> socket.socket:
        """A reader that is slow for seconds must not take all rows into its buffer, which Linux lets grow."""
        made = connect(*args, **kwargs)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        return made

    monkeypatch.setattr(socket, "create_connection", connected)
    made = Cluster(tmp_path, hosts=2, partitions=4, send_buffer=BUFFER)
    made.batch(dict.fromkeys(range(USERS), (1, "narrow")))
    made.batch(dict.fromkeys(range(USERS), (2, WIDE)))
    yield made
    made.close()


@pytest.fixture
def runs_asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The runs whose rows hosts have been asked for."""
    found: set[str] = set()
    scan = HostReads.scan

    def noted(self: HostReads, request: ScanRequest) -> StateAnswer:
        found.add(request.run_id)
        return scan(self, request)

    monkeypatch.setattr(HostReads, "scan", noted)
    return found


def begun(cluster: Cluster, *, direct: bool) -> tuple[StateScan, list[pa.RecordBatch]]:
    """Return a scan and the rows that it has already given."""
    scan = cluster.client(direct=direct).scan("totals")
    return scan, [next(scan)]


def break_off(cluster: Cluster, incarnation: str) -> None:
    """Kill the second host with its connections and restart it. The first host, which may be the proxy, learns of
    the restart.
    """
    cluster.hosts[1].kill()
    cluster.replace_host(1, incarnation)
    for h in cluster.hosts:
        h.host.heartbeat()


@pytest.mark.parametrize("direct", [True, only_thorough(False)])
def test_the_next_run_gives_the_rest(cluster: Cluster, direct: bool, runs_asked: set[str]) -> None:
    scan, batches = begun(cluster, direct=direct)
    for run, incarnation in (("run2", "b"), ("run3", "c")):
        cluster.start(run)
        cluster.batch(dict.fromkeys(range(USERS), (9, "narrow")))
        break_off(cluster, incarnation)
        batches.append(next(scan))
    table = pa.Table.from_batches([*batches, *scan])
    assert sorted(table["user"].to_pylist()) == list(range(USERS)), "each once"
    assert table["n"].unique().to_pylist() == [2], "all of the version that the scan began with"
    assert scan.version == 2
    assert "run3" in runs_asked, "for the rest"


@pytest.mark.parametrize("direct", [True, only_thorough(False)])
def test_rewritten_version_is_rejected(cluster: Cluster, direct: bool) -> None:
    scan, _ = begun(cluster, direct=direct)
    go_back(cluster, 1, "run2")
    cluster.batch(dict.fromkeys(range(USERS), (20, WIDE)))
    break_off(cluster, "b")
    with pytest.raises(StateVersionError, match=r"rolled back: version 2.*remade by run run2.*Read the state again"):
        list(scan)


@pytest.mark.parametrize("direct", [only_thorough(True), False])
def test_rows_that_went_into_other_partitions_are_refused(cluster: Cluster, direct: bool) -> None:
    scan, _ = begun(cluster, direct=direct)
    cluster.partitions = 3
    cluster.start("run2")
    break_off(cluster, "b")
    with pytest.raises(RetiredRunError, match=r"run1.*run2.*scan it again"):
        list(scan)


@pytest.mark.parametrize("direct", [True, only_thorough(False)])
def test_a_query_that_does_not_come_back_is_waited_for(cluster: Cluster, direct: bool) -> None:
    scan, _ = begun(cluster, direct=direct)
    cluster.c.deactivate_instances(cluster.run)
    break_off(cluster, "b")
    began, waited = time.monotonic(), list[float]()
    rows = scan._answer.batches
    assert isinstance(rows, RoutedScan)
    # From now on only its waiting takes time.
    rows._plan = replace(rows._plan, timeout=2.0, clock=lambda: began + sum(waited), sleep=waited.append)
    with pytest.raises((QueryEndedError, QueryTimeoutError), match="ended"):
        list(scan)
    assert 1.0 < sum(waited) < 2.0, "a client has time"


@pytest.mark.parametrize("direct", [only_thorough(True), False])
def test_scan_of_an_ended_query_continues_after_its_restart(
    cluster: Cluster, direct: bool, runs_asked: set[str]
) -> None:
    scan, batches = begun(cluster, direct=direct)
    cluster.c.deactivate_instances(cluster.run)
    break_off(cluster, "b")
    rows = scan._answer.batches
    assert isinstance(rows, RoutedScan)

    def come_back(seconds: float) -> None:
        """The query comes back once it is waited for."""
        if cluster.run == "run1":
            cluster.start("run2")
        time.sleep(min(seconds, 0.01))

    rows._plan = replace(rows._plan, sleep=come_back)
    users = pa.Table.from_batches([*batches, *scan])["user"].to_pylist()
    assert sorted(users) == list(range(USERS))
    assert "run2" in runs_asked, "for the rest"


def test_a_proxy_leaves_it_to_the_client_to_wait_for_the_next_run(cluster: Cluster) -> None:
    proxy = cluster.hosts[0].proxy
    proxy._hosts.timeout = HANG  # that is how long it would wait: until then, nothing would come
    with KvConnections(TOKEN, timeout=PATIENCE) as connections:
        frames = connections.stream(proxy.server_address, ScanRequest(cluster.run, "totals", forward=True))
        next(frames)
        cluster.c.deactivate_instances(cluster.run)
        break_off(cluster, "b")
        with pytest.raises(RetiredRunError, match="ended"):
            list(frames)


def test_unresponsive_coordinator_is_awaited(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that does not know the version cannot tell whether the next run has rewritten it."""
    cluster.start("run2")
    reads = [HostReads(h.host, wait_seconds=0.2) for h in cluster.hosts]
    monkeypatch.setattr(VersionRequests, "completed_version", lambda *_: None)
    monkeypatch.setattr(VersionRequests, "has_asked_since", lambda *_: False)
    for r in reads:
        with pytest.raises(HostUnavailableError, match="The coordinator does not answer"):
            r.scan(ScanRequest("run2", "totals", at=At("version", 2), partitions=[0], previous_run="run1"))


def test_only_the_rest_of_a_version_comes_from_another_run(cluster: Cluster) -> None:
    with KvConnections(TOKEN) as connections, pytest.raises(RequestError, match="isolation version"):
        request = ScanRequest(cluster.run, "totals", at=At("completed"), previous_run="run0")
        list(connections.stream(cluster.hosts[0].address, request))
