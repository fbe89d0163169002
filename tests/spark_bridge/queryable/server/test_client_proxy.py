"""Proxies over real hosts: each answers for all hosts while these move, die and restart."""

from __future__ import annotations

import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import trustme
from msgspec.structs import replace

from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import (
    ConnectionClosedError,
    HostUnavailableError,
    NotOwnerError,
    QueryEndedError,
    UnknownOperatorError,
)
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.protocol import (
    At,
    AwaitRequest,
    CountReply,
    CountRequest,
    DescribeReply,
    DescribeRequest,
    EndOfRows,
    KeyRowsRequest,
    LocateOperatorRequest,
    LocateReply,
    LookupReply,
    LookupRequest,
    RowsReply,
    ScanRequest,
    StateAnswer,
    pack_bytes,
    pack_one,
    unpack_bytes,
    unpack_one,
)
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.queryable.routing.scatter_gather import Attempts, retrying
from spark_bridge.queryable.server import proxy as location_cache
from spark_bridge.queryable.server.proxy import ForwardingReads, KvStateClientProxy, connections_to_hosts
from spark_bridge.queryable.server.server import KvStateServer
from tests.effort import effort
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.client_world import TOKEN, Cluster
from tests.spark_bridge.queryable.memory_reads import MemoryReads, OneToken, eventually
from tests.spark_bridge.queryable.routing.router_world import (
    COMPLETED,
    FAMILY,
    asked,
    located,
    numbers,
    oracle_of,
    owned_by,
    soon,
    stored,
)

USERS = list(range(1000))
Q = "q"
"""The query id."""


@pytest.fixture
def connections() -> Iterator[KvConnections]:
    with KvConnections(TOKEN, timeout=PATIENCE) as made:
        yield made


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, hosts=3, partitions=7)
    made.batch(dict.fromkeys(USERS, (1, "a")))
    yield made
    made.close()


def look_up(
    connections: KvConnections, cluster: Cluster, host: int, users: list[int] = USERS, run: str | None = None, **at: Any
) -> tuple[int, set[int | None]]:
    """The version, and the numbers found, by way of a proxy."""
    request = LookupRequest(run or cluster.run, "totals", At(**at), FAMILY, forward=True)
    reply, body = connections.request(cluster.hosts[host].address, request, pack_bytes(stored(users)))
    assert type(reply) is LookupReply
    return reply.version, set(numbers(unpack_bytes(body)))


def patiently(call: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """As a client asks who has had answers."""
    return retrying(call, Attempts("A test", soon(seconds), had_answer=True))


def test_every_proxy_answers_for_all_hosts_if_forwarding_is_on(cluster: Cluster, connections: KvConnections) -> None:
    for host in cluster.hosts:
        address = host.address
        reply, body = connections.request(
            address, LookupRequest(cluster.run, "totals", forward=True), pack_bytes(stored([*USERS, 5000]))
        )
        assert reply == LookupReply(1)
        assert numbers(unpack_bytes(body)) == [1] * 1000 + [None]
        counted, _ = connections.request(address, CountRequest(ScanRequest(cluster.run, "totals", forward=True)))
        assert (counted.version, counted.count) == (1, 1000)  # type: ignore[union-attr]
        frames = list(connections.stream(address, ScanRequest(cluster.run, "totals", forward=True)))
        assert frames[-1][0].rows == 1000  # type: ignore[union-attr]
        rows = KeyRowsRequest(cluster.run, "totals", forward=True)
        frames = list(connections.stream(address, rows, pack_bytes(stored(USERS))))
        assert frames[-1][0].rows == 1000  # type: ignore[union-attr]
        with pytest.raises(NotOwnerError):
            connections.request(address, LookupRequest(cluster.run, "totals"), pack_bytes(stored(USERS)))
        located_there, body = connections.request(address, LocateOperatorRequest("totals"))
        assert type(located_there) is LocateReply
        assert msgspec.json.decode(body, type=OperatorLocation) == located(cluster)


def test_partitions_are_scanned_in_the_requested_order_across_owners(
    cluster: Cluster, connections: KvConnections
) -> None:
    def users(host: int, partitions: list[int], limit: int | None = None) -> list[int]:
        request = ScanRequest(cluster.run, "totals", partitions=partitions, forward=True, limit=limit)
        bodies = connections.stream(cluster.hosts[host].address, request)
        stream = b"".join(bytes(body) for reply, body in bodies if type(reply) is RowsReply)
        found: list[int] = pa.ipc.open_stream(stream).read_all()["user"].to_pylist()
        return found

    parts = [users(0, [p]) for p in range(7)]
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 2, 0, 5, 1, 4, 3]):
        expected = [u for p in order for u in parts[p]]
        assert users(0, order) == users(1, order) == users(2, order) == expected
        assert users(1, order, 333) == expected[:333]


def test_oracles_are_kept_given_and_taken_away(cluster: Cluster, connections: KvConnections) -> None:
    proxy = cluster.hosts[0].proxy
    assert isinstance(proxy, KvStateServer)
    assert proxy.get_kv_state_location_oracle(Q) is None
    look_up(connections, cluster, 0)
    oracle = proxy.get_kv_state_location_oracle(Q)
    assert oracle is not None and oracle == cluster.c.get_kv_state_location_oracle(Q)
    assert proxy.get_kv_state_location_oracle("another") is None
    # One that is wrong is found out at once, and put right.
    turned = replace(oracle, hosts=tuple(reversed(oracle.hosts)))
    proxy.update_kv_state_location_oracle(Q, turned)
    assert proxy.get_kv_state_location_oracle(Q) is turned
    assert look_up(connections, cluster, 0) == (1, {1})
    assert proxy.get_kv_state_location_oracle(Q) == oracle
    proxy.update_kv_state_location_oracle(Q, None)
    assert proxy.get_kv_state_location_oracle(Q) is None
    proxy.update_kv_state_location_oracle(Q, None)
    assert look_up(connections, cluster, 0) == (1, {1})
    assert proxy.get_kv_state_location_oracle(Q) == oracle


def test_oracles_may_change_under_busy_threads(cluster: Cluster, connections: KvConnections) -> None:
    look_up(connections, cluster, 0)
    proxy = cluster.hosts[0].proxy
    oracle = proxy.get_kv_state_location_oracle(Q)
    assert oracle is not None
    turned = replace(oracle, hosts=tuple(reversed(oracle.hosts)))
    failures: list[BaseException] = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(effort(6, 12)):
                proxy.update_kv_state_location_oracle(Q, rng.choice([None, oracle, turned]))
                proxy.get_kv_state_location_oracle(Q)
                assert patiently(lambda: look_up(connections, cluster, 0, rng.sample(USERS, 50))) == (1, {1})
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not failures, failures


def test_all_proxies_agree_while_versions_advance(cluster: Cluster, connections: KvConnections) -> None:
    """Each batch writes the same number everywhere: other numbers in one answer are of other versions."""
    failures: list[BaseException] = []
    done = threading.Event()

    def look(router: StateRouter, rng: random.Random) -> tuple[int, set[int | None]]:
        if rng.random() < 0.8:
            users = stored(rng.sample(USERS, 200))
            version, values = router.lookup(located(cluster), FAMILY, users, COMPLETED, soon())
            return version, set(numbers(values))
        answer = router.scan(located(cluster), ScanRequest("", "totals"), soon())
        return answer.version, {n for b in answer.batches for n in b["n"].to_pylist()}

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        seen = 0
        try:
            while not done.is_set():
                host = rng.randrange(3)
                via = cluster.hosts[host].address if rng.random() < 0.7 else None
                router = StateRouter(connections, via=via)
                router.seen.note(cluster.run, seen)
                version, found = patiently(partial(look, router, rng))
                assert found == {version}
                assert version >= seen
                seen = version
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(effort(3, 6))]
    for thread in threads:
        thread.start()
    rng = random.Random(0)
    try:
        for version in range(2, effort(6, 14)):
            cluster.batch(dict.fromkeys(USERS, (version, "b")), complete=False)
            if rng.random() < 0.7:
                cluster.c.batch_committed(cluster.run, version - 1)
            for host in rng.sample(cluster.hosts, rng.randrange(4)):
                host.host.heartbeat()
            time.sleep(0.02)
    finally:
        done.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not failures, failures


def test_a_proxy_whose_host_has_nothing_of_the_query_gives_no_old_answers(
    tmp_path: Path, connections: KvConnections
) -> None:
    cluster = Cluster(tmp_path, hosts=3, partitions=2)
    try:
        cluster.batch(dict.fromkeys(USERS, (1, "a")))
        owners = {o.host_id for o in located(cluster).owners}
        (idle,) = [h for h in cluster.hosts if h.host.info.host_id not in owners]
        router = StateRouter(connections, via=idle.address)
        reply, _ = connections.request(idle.address, AwaitRequest(cluster.run, 0, 0.0))
        assert type(reply) is CountReply and reply.count <= 1, "from now on it knows one version and learns of no other"
        for version in range(2, 6):
            cluster.batch(dict.fromkeys(USERS, (version, "b")), complete=False)
            cluster.c.batch_committed(cluster.run, version - 1)
        for host in cluster.hosts:
            if host is not idle:
                host.host.heartbeat()
        answer = router.scan(located(cluster), ScanRequest("", "totals"), soon())
        assert (answer.version, {n for b in answer.batches for n in b["n"].to_pylist()}) == (5, {5})
        frames = list(connections.stream(idle.address, ScanRequest(cluster.run, "totals", forward=True)))
        assert frames[-1][0] == EndOfRows(5, 1000)
        assert StateRouter(connections, via=idle.address).count(
            located(cluster), ScanRequest("", "totals"), soon()
        ) == (
            5,
            1000,
        )
    finally:
        cluster.close()


def test_forwarded_requests_are_not_forwarded_again(cluster: Cluster, connections: KvConnections) -> None:
    requests: list[Any] = []

    class Recording(MemoryReads):
        def lookup(self, request: LookupRequest, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
            requests.append(request)
            raise NotOwnerError("Not mine.")

        def scan(self, request: ScanRequest) -> StateAnswer:
            requests.append(request)
            raise NotOwnerError("Not mine.")

    other = KvStateServer(Recording(), OneToken({TOKEN}), ip="127.0.0.1")
    other.start()
    try:
        look_up(connections, cluster, 0)
        proxy = cluster.hosts[0].proxy
        oracle = proxy.get_kv_state_location_oracle(Q)
        assert oracle is not None
        wrong = replace(oracle, hosts=tuple(replace(h, query_address=other.server_address) for h in oracle.hosts))
        proxy.update_kv_state_location_oracle(Q, wrong)
        assert look_up(connections, cluster, 0) == (1, {1})
        proxy.update_kv_state_location_oracle(Q, wrong)
        frames = list(connections.stream(proxy.server_address, ScanRequest(cluster.run, "totals", forward=True)))
        assert frames[-1][0].rows == 1000  # type: ignore[union-attr]
        assert len(requests) == 2
        assert not any(request.forward for request in requests)
    finally:
        other.shutdown()


def test_restarted_host_is_found_at_its_new_port(cluster: Cluster, connections: KvConnections) -> None:
    assert look_up(connections, cluster, 0) == (1, {1})
    cluster.hosts[2].kill()
    with pytest.raises((HostUnavailableError, ConnectionClosedError, NotOwnerError)):
        look_up(connections, cluster, 0)
    mine = owned_by(cluster, 0) + owned_by(cluster, 1)
    cluster.hosts[0].proxy._reads.patience = HANG  # type: ignore[attr-defined]
    assert look_up(connections, cluster, 0, mine) == (1, {1}), "the others are served, and wait for nothing"
    before = cluster.hosts[2].address
    cluster.replace_host(2)
    assert cluster.hosts[2].address != before
    for host in range(3):
        assert patiently(lambda host=host: look_up(connections, cluster, host)) == (1, {1})


def test_partitions_of_a_lost_host_are_found_at_their_new_owners(cluster: Cluster, connections: KvConnections) -> None:
    for host in range(3):
        look_up(connections, cluster, host)
    cluster.hosts[2].kill()
    cluster.world.now += 11
    cluster.c.driver_heartbeat(cluster.run)
    for host in cluster.hosts[:2]:
        host.host.heartbeat()
    cluster.c.expire()
    for host in range(2):
        assert patiently(lambda host=host: look_up(connections, cluster, host)) == (1, {1})
    assert {o.host_id for o in located(cluster).owners} == {"h0", "h1"}


class Away:
    """A coordinator that does not answer."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise HostUnavailableError("The coordinator did not answer.")

        return call


def test_cached_locations_serve_while_the_coordinator_is_replaced(
    cluster: Cluster, connections: KvConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location_cache, "MAX_AGE_SECONDS", 0.02)
    for host in range(3):
        look_up(connections, cluster, host)
    cluster.port.c = Away()
    for _ in range(10):
        for host in range(3):
            assert look_up(connections, cluster, host) == (1, {1})
        time.sleep(0.01)
    # The next coordinator knows neither hosts nor runs at first.
    cluster.port.c = cluster.world.coordinator(0)
    for _ in range(10):
        for host in range(3):
            assert look_up(connections, cluster, host) == (1, {1})
        time.sleep(0.01)
    for h in cluster.hosts:
        h.host.register()
    cluster.start(cluster.run)
    cluster.batch(dict.fromkeys(USERS, (2, "b")))
    for host in range(3):
        assert patiently(lambda host=host: look_up(connections, cluster, host, version=2)) == (2, {2})


def test_ended_query_is_reported_as_ended(cluster: Cluster, connections: KvConnections) -> None:
    for host in range(3):
        look_up(connections, cluster, host)
    cluster.c.deactivate_instances(cluster.run)
    for h in cluster.hosts:
        h.host.heartbeat()
    for host in range(3):

        def has_ended(host: int = host) -> bool:
            with pytest.raises((QueryEndedError, RetiredRunError)) as raised:
                look_up(connections, cluster, host)
            return raised.type is QueryEndedError and "ended at" in str(raised.value)

        eventually(has_ended)
        assert cluster.hosts[host].proxy.get_kv_state_location_oracle(Q) is None
        with pytest.raises(QueryEndedError, match="ended at"):
            connections.request(cluster.hosts[host].address, LocateOperatorRequest("totals"))
    cluster.start("run2")
    for host in range(3):
        assert patiently(lambda host=host: look_up(connections, cluster, host)) == (1, {1})


@pytest.mark.parametrize("partitions", [7, 3, 11])
def test_a_query_that_is_restarted_is_located_again(
    cluster: Cluster, connections: KvConnections, partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location_cache, "MAX_AGE_SECONDS", 0.02)
    for host in range(3):
        look_up(connections, cluster, host)
    cluster.partitions = partitions
    cluster.start("run2")
    for host in range(3):

        def is_retired(host: int = host) -> bool:
            try:
                # What is held of it answers until the proxy has heard.
                assert look_up(connections, cluster, host, run="run1") == (1, {1})
            except RetiredRunError:
                return True
            return False

        eventually(is_retired)
        assert patiently(lambda host=host: look_up(connections, cluster, host)) == (1, {1})
        with pytest.raises(RetiredRunError, match="replaced by run run2"):
            look_up(connections, cluster, host, run="run1")
        oracle = cluster.hosts[host].proxy.get_kv_state_location_oracle(Q)
        assert oracle is not None and (oracle.run_id, oracle.num_partitions("totals")) == ("run2", partitions)


def test_unknown_runs_and_operators(cluster: Cluster, connections: KvConnections) -> None:
    with pytest.raises(RetiredRunError, match="run-x is not running"):
        look_up(connections, cluster, 0, run="run-x")
    look_up(connections, cluster, 0)
    with pytest.raises(UnknownOperatorError, match="'totals'"):
        connections.request(
            cluster.hosts[0].address, LookupRequest(cluster.run, "other", forward=True), pack_bytes(stored(USERS))
        )


def test_operator_description_of_all_hosts(
    cluster: Cluster, connections: KvConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_bridge.queryable.server.proxy.DESCRIBE_SECONDS", PATIENCE)

    def described(**request: Any) -> Any:
        reply, body = connections.request(cluster.hosts[1].address, DescribeRequest(**request))
        assert type(reply) is DescribeReply
        return msgspec.json.decode(body)

    def all_say() -> Any:
        return described(operator="totals", forward=True)

    look_up(connections, cluster, 0)
    assert described()["host_id"] == "h1"
    hosts = all_say()["hosts"]
    assert sorted(h["host_id"] for h in hosts) == ["h0", "h1", "h2"]
    # A host counts a request behind its answer.
    eventually(lambda: all("lookup" in h["requests"].get("totals", {}) for h in all_say()["hosts"]))
    cluster.hosts[2].kill()
    hosts = all_say()["hosts"]
    (dead,) = [h for h in hosts if "failure" in h]
    assert dead["query_address"] == cluster.hosts[2].address


def test_a_proxy_that_is_started_again_forwards_again(cluster: Cluster, connections: KvConnections) -> None:
    proxy = cluster.hosts[0].proxy
    for _ in range(3):
        assert look_up(connections, cluster, 0) == (1, {1})
        proxy.shutdown()
        proxy.start()
    eventually(lambda: asked(cluster, "lookup")[0] == 3)


def test_hosts_that_use_tls_forward_by_tls() -> None:
    authority = trustme.CA()
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(ours)
    authority.configure_trust(theirs)
    key = stored([1])[0].as_py()
    other = KvStateServer(MemoryReads({key: b"there"}), OneToken({TOKEN}), ip="127.0.0.1", tls=ours)
    proxy = KvStateClientProxy(
        lambda: MemoryReads({key: b"here"}),
        Away(),  # type: ignore[arg-type]
        OneToken({TOKEN}),
        connections_to_hosts(TOKEN, theirs),
        ip="127.0.0.1",
        tls=ours,
    )
    proxy.update_kv_state_location_oracle("q1", oracle_of("r1", other.server_address, operator="totals"))
    try:
        other.start()
        proxy.start()
        with KvConnections(TOKEN, theirs, timeout=PATIENCE) as connections:
            for forward, value in ((False, b"here"), (True, b"there")):
                request = LookupRequest("r1", "totals", forward=forward)
                reply, body = connections.request(proxy.server_address, request, pack_one(key))
                assert (reply, unpack_one(body)) == (LookupReply(7), value)
    finally:
        proxy.shutdown()
        other.shutdown()


def test_owners_are_looked_up_again_although_the_client_must_ask_again() -> None:
    """Patience counts from the first failure: a connection to a dead machine may take longer than all of it."""
    now, asked_again = [0.0], []
    none: Any = None
    reads = ForwardingReads(none, none, none, none, patience=1.0, clock=lambda: now[0], sleep=lambda seconds: None)

    def dead() -> None:
        now[0] += 1.5
        raise HostUnavailableError("no answer")

    with pytest.raises(HostUnavailableError):
        reads._retried(dead, asked_again.append)
    assert len(asked_again) == 2
