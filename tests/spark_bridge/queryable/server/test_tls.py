"""TLS and mutual TLS of the query port and of Flight, over real sockets, with certificates of our own authorities."""

from __future__ import annotations

import dataclasses
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import HostInfo, OperatorFigures
from spark_bridge.exceptions import AccessDeniedError, HostUnavailableError, TlsError
from spark_bridge.flight_server import HostFlightServer
from spark_bridge.host.host import Host
from spark_bridge.queryable.client_connection import ClientConnection
from spark_bridge.queryable.protocol import DescribeRequest
from spark_bridge.queryable.server.server import KvStateServer
from spark_bridge.queryable.server.tokens import ClusterTokens
from spark_bridge.task import executor
from spark_bridge.task import task_store as task_client
from spark_bridge.task.executor import Endpoints
from spark_bridge.task.task_store import TaskStore
from spark_bridge.transport import flight_client
from spark_bridge.transport.flight_client import HostClient
from spark_bridge.transport.tls import TlsConf
from tests.coordinator_actor.coordinator_world import World
from tests.patience import PATIENCE
from tests.spark_bridge.certificates import Files
from tests.spark_bridge.host.host_steps import make_host, reg, task
from tests.spark_bridge.queryable.memory_reads import MemoryReads

SECRET = "5ec4e7" * 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@contextmanager
def query_server(tls: TlsConf | None) -> Iterator[str]:
    context = None if tls is None else tls.server_context()
    server = KvStateServer(MemoryReads(), ClusterTokens(SECRET, frozenset), ip="127.0.0.1", tls=context)
    server.start()
    try:
        yield server.server_address
    finally:
        server.shutdown()


@contextmanager
def flight_server(tls: TlsConf | None, root: Path) -> Iterator[str]:
    coordinator = Coordinator(time.time, CheckpointStorage.open)
    host = Host(HostInfo("h0", "a", "", "node", "s"), coordinator, root / "local")
    server = HostFlightServer(lambda: host, "127.0.0.1", SECRET, lambda method, args: None, tls=tls)
    try:
        yield server.address
    finally:
        server.shutdown()
        host.close()


def ask_query(address: str, tls: TlsConf | None, token: str = SECRET) -> Any:
    deadline = time.monotonic() + PATIENCE
    connection = ClientConnection(address, token, None if tls is None else tls.client_context(), deadline)
    connection.send(DescribeRequest(), b"", deadline)
    answer, _ = connection.receive(deadline)
    connection.close()
    return answer


def ask_flight(address: str, tls: TlsConf | None, token: str = SECRET) -> dict[str, Any]:
    client = HostClient(address, token, 10, tls)
    try:
        return client.describe()
    finally:
        client.close()


Ask = Callable[[TlsConf | None, TlsConf | None], Any]


@pytest.fixture(params=["query", "flight"])
def ask(request: pytest.FixtureRequest, tmp_path: Path) -> Ask:
    """A question of a client with the second ``TlsConf`` to a server with the first."""

    def asked(server: TlsConf | None, client: TlsConf | None) -> Any:
        if request.param == "query":
            with query_server(server) as address:
                return ask_query(address, client)
        with flight_server(server, tmp_path) as address:
            assert address.startswith("grpc+tls://" if server else "grpc://")
            return ask_flight(address, client)

    return asked


def test_a_client_that_knows_the_authority_is_answered(files: Files, ask: Ask) -> None:
    assert ask(TlsConf(files.ca, **files.by_ip), TlsConf(files.ca))


def test_a_host_of_another_authority_is_refused(files: Files, ask: Ask) -> None:
    with pytest.raises((TlsError, HostUnavailableError), match=r"(?i)certificate.verify.failed"):
        ask(TlsConf(files.ca, **files.by_ip), TlsConf(files.other_ca))


def test_a_certificate_must_have_the_address_or_the_name_that_is_expected(files: Files, ask: Ask) -> None:
    by_name = TlsConf(files.ca, **files.by_name)
    with pytest.raises((TlsError, HostUnavailableError), match=r"(?i)mismatch|peer name|verify"):
        ask(by_name, TlsConf(files.ca))
    assert ask(by_name, TlsConf(files.ca, server_name="hosts.example"))


def test_mutual_tls_answers_clients_with_a_certificate(files: Files, ask: Ask) -> None:
    mutual = TlsConf(files.ca, **files.by_ip, client_auth=True)
    assert ask(mutual, TlsConf(files.ca, **files.client))
    assert ask(mutual, mutual), "as tasks do, which have the files of the hosts"


@pytest.mark.parametrize("theirs", ["none", "foreign"])
def test_mutual_tls_refuses_clients_without_a_certificate_or_with_a_foreign_one(
    files: Files, ask: Ask, theirs: str
) -> None:
    mutual = TlsConf(files.ca, **files.by_ip, client_auth=True)
    # gRPC does not tell its client.
    with pytest.raises((TlsError, HostUnavailableError), match=r"needs a certificate= and key=|Socket closed"):
        ask(mutual, TlsConf(files.ca, **(files.foreign if theirs == "foreign" else {})))


def test_a_client_without_tls_is_not_answered_by_hosts_with_it(files: Files) -> None:
    with (
        query_server(TlsConf(files.ca, **files.by_ip)) as address,
        pytest.raises(TlsError, match="answers by TLS only"),
    ):
        ask_query(address, None)


def test_client_with_tls_learns_that_hosts_have_none(files: Files) -> None:
    with query_server(None) as address, pytest.raises(TlsError, match="Do the hosts use TLS"):
        ask_query(address, TlsConf(files.ca))


def test_the_remedies_of_connections_work(files: Files) -> None:
    by_ip, by_name = TlsConf(files.ca, **files.by_ip), TlsConf(files.ca, **files.by_name)
    mutual = dataclasses.replace(by_ip, client_auth=True)
    right = TlsConf(files.ca)
    cases: list[tuple[TlsConf | None, TlsConf | None, str, TlsConf | None]] = [
        (by_ip, None, "give tls= to connect", right),
        (None, right, r"Do the hosts use TLS\?", None),
        (by_ip, TlsConf(files.other_ca), r"is it signed by an authority in ca=", right),
        (by_name, right, "what server_name= says", dataclasses.replace(right, server_name="hosts.example")),
        (mutual, right, "needs a certificate= and key= signed by an authority", TlsConf(files.ca, **files.client)),
        (mutual, TlsConf(files.ca, **files.foreign), "an authority that the host knows", mutual),
    ]
    for server, client, message, remedied in cases:
        with query_server(server) as address:
            with pytest.raises(TlsError, match=message):
                ask_query(address, client)
            assert ask_query(address, remedied)


def test_flight_with_tls_needs_a_trusted_authority() -> None:
    with pytest.raises(TlsError, match="which certificates to trust"):
        HostClient("grpc+tls://127.0.0.1:1", SECRET)


def test_a_token_is_needed_with_tls_too(files: Files, tmp_path: Path) -> None:
    server = TlsConf(files.ca, **files.by_ip, client_auth=True)
    client = TlsConf(files.ca, **files.client)
    with query_server(server) as address, pytest.raises(AccessDeniedError, match="unknown"):
        ask_query(address, client, "wrong")
    with flight_server(server, tmp_path) as address, pytest.raises(AccessDeniedError, match="cluster's token"):
        ask_flight(address, client, "wrong")


def test_old_versions_of_tls_are_refused(files: Files) -> None:
    server = TlsConf(files.ca, **files.by_ip).server_context()
    client = TlsConf(files.ca).client_context()
    assert server.minimum_version == client.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_task_commits_over_mutual_tls(files: Files, tmp_path: Path) -> None:
    mutual = TlsConf(files.ca, **files.by_ip, client_auth=True)
    world = World(tmp_path)
    coordinator = world.coordinator(0)
    host = make_host(world, coordinator, 0, tmp_path, "a")
    server = HostFlightServer(lambda: host, "127.0.0.1", SECRET, lambda method, args: None, tls=mutual)
    assert coordinator.register_query(reg(world)).refusal is None
    endpoints = Endpoints((server.address,), SECRET, "", 10.0, mutual)
    try:
        store = TaskStore(task(0, 0), 2, 1024, endpoints)
        store.stage(pa.array([b"\0\0key"]), pa.array([b"value"]))
        store.commit(OperatorFigures())
        TaskStore(task(0, 1), 2, 1024, endpoints).commit(OperatorFigures())
        world.commit_spark(0)
        again = TaskStore(task(1, 0), 2, 1024, endpoints)
        assert again.get_many(pa.array([b"\0\0key"])).to_pylist() == [b"value"]
        forget(server.address)
        with pytest.raises(TlsError, match="which certificates to trust"):
            TaskStore(task(1, 1), 2, 1024, dataclasses.replace(endpoints, tls=None)).open()
    finally:
        forget(server.address)
        server.shutdown()


def forget(address: str) -> None:
    """What tasks of this process remember of hosts."""
    task_client._owners.clear()
    flight_client.forget_client(address, SECRET)


# -- files and settings ------------------------------------------------------------------------


def test_files_that_fit_pass_the_check(files: Files) -> None:
    TlsConf(files.ca, **files.by_ip).check()
    TlsConf(files.ca, **files.by_ip, client_auth=True).check()
    TlsConf(files.ca, **files.by_name, server_name="hosts.example").check()


def test_files_that_do_not_fit_are_named(files: Files, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    mixed = {"certificate": files.by_ip["certificate"], "key": files.client["key"]}
    expired = files.leaf("expired", files.authority.issue_cert("127.0.0.1", not_after=_long_ago()))
    wrong = [
        (TlsConf(files.ca), "needs a certificate"),
        (TlsConf(str(tmp_path / "none.pem"), **files.by_ip), r"none\.pem cannot be read"),
        (TlsConf(files.ca, str(tmp_path / "c"), str(tmp_path / "k")), "/c cannot be read"),
        (TlsConf(files.ca, files.by_ip["certificate"], str(tmp_path / "k")), "/k cannot be read"),
        (TlsConf(str(tmp_path / "empty"), **files.by_ip), "empty has no certificates of authorities"),
        (TlsConf(files.ca, **mixed), "not a certificate and its private key"),
        (TlsConf(files.other_ca, **files.by_ip), "signed by an authority in .*other-ca"),
        (TlsConf(files.ca, **expired), "expired"),
        (TlsConf(files.ca, **files.by_ip, server_name="other.example"), "(?i)mismatch"),
    ]
    for conf, message in wrong:
        with pytest.raises(TlsError, match=message):
            conf.check()
    with pytest.raises(TlsError, match="has no key="):
        TlsConf(files.ca, files.by_ip["certificate"])
    for made in ("flight_client_arguments", "client_context"):
        with pytest.raises(TlsError, match="cannot be read"):
            getattr(TlsConf(str(tmp_path / "none.pem")), made)()
    with pytest.raises(TlsError, match="needs a certificate"):
        TlsConf(files.ca).flight_server_arguments()


def test_the_remedies_of_files_work(files: Files, tmp_path: Path) -> None:
    with pytest.raises(TlsError, match="give TlsConf certificate= and key="):
        TlsConf(files.ca).check()
    with pytest.raises(TlsError, match="has no key=: certificate= and key= belong together"):
        TlsConf(files.ca, certificate=files.by_ip["certificate"])
    with pytest.raises(TlsError, match="are not a certificate and its private key"):
        TlsConf(files.ca, files.by_ip["certificate"], files.client["key"]).check()
    with pytest.raises(TlsError, match=f"signed by an authority in {files.other_ca}"):
        TlsConf(files.other_ca, **files.by_ip).check()
    TlsConf(files.ca, certificate=files.by_ip["certificate"], key=files.by_ip["key"]).check()
    missing = TlsConf(str(tmp_path / "ca.pem"), **files.by_ip)
    with pytest.raises(TlsError, match="TLS files must be there on every node"):
        missing.check()
    (tmp_path / "ca.pem").write_bytes(b"")
    with pytest.raises(TlsError, match="has no certificates of authorities"):
        missing.check()
    (tmp_path / "ca.pem").write_bytes(Path(files.ca).read_bytes())
    missing.check()


def _long_ago() -> Any:
    import datetime

    return datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)


def test_paths_do_not_hang_on_the_working_directory(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files.root)
    assert TlsConf("ca.pem") == TlsConf(Path("ca.pem")) == TlsConf(files.ca)  # type: ignore[arg-type]


def test_rays_own_files(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("RAY_USE_TLS", "RAY_TLS"))]:
        monkeypatch.delenv(name)
    with pytest.raises(TlsError, match="RAY_USE_TLS is not 1"):
        TlsConf.from_ray_environment()
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_CA_CERT", files.ca)
    with pytest.raises(TlsError, match="RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY not"):
        TlsConf.from_ray_environment()
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", files.by_ip["certificate"])
    monkeypatch.setenv("RAY_TLS_SERVER_KEY", files.by_ip["key"])
    assert TlsConf.from_ray_environment() == TlsConf(files.ca, **files.by_ip, client_auth=True)


def test_tasks_get_paths_and_no_keys(files: Files, tmp_path: Path) -> None:
    conf = TlsConf(files.ca, **files.by_ip, client_auth=True, server_name="x")
    properties = {executor.ADDRESSES: '["grpc+tls://127.0.0.1:1"]', executor.TOKEN: "t"}
    endpoints = executor.local_endpoints({**properties, executor.TLS: conf.to_json()}.get)
    assert endpoints is not None and endpoints.tls == conf
    assert "PRIVATE" not in conf.to_json()
    without = executor.local_endpoints(properties.get)
    assert without is not None and without.tls is None
