"""Queries whose hosts answer clients, all in the test's own process: real coordinator, hosts, proxies, connections.

``HeardPort`` is a port to a coordinator in the test's process, whose hosts have no heartbeat threads.
"""

from __future__ import annotations

import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import StateStoreConf
from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats.changelog import Changes
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import HostInfo, OperatorSpec
from spark_bridge.host.host import Host
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.queryable.server.limits import RequestLimits
from spark_bridge.queryable.server.proxy import KvStateClientProxy, connections_to_hosts
from spark_bridge.queryable.server.tokens import ClusterTokens
from spark_bridge.transport.protocol import TaskIdentity
from spark_bridge.transport.tls import TlsConf
from tests.coordinator_actor.coordinator_world import World
from tests.patience import PATIENCE
from tests.spark_bridge.host.host_steps import opened

if TYPE_CHECKING:
    from tests.spark_bridge.state_flows import Query

TOKEN = "the-cluster's"
G = 64
KEYS = pa.schema([("user", pa.int64())])
STATE = pa.schema([("n.count.count", pa.int64()), ("name.last.value", pa.string())])
TOTALS = StateSchema(KEYS, STATE)


class Port:
    """The coordinator as hosts and proxies reach it; tests put another one in its place."""

    def __init__(self, c: Coordinator) -> None:
        self.c = c

    def __getattr__(self, name: str) -> Any:
        return getattr(self.c, name)


def proxy_of(
    host: Any,
    port: Any,
    limits: RequestLimits | None = None,
    send_buffer: int | None = None,
    tls: TlsConf | None = None,
) -> KvStateClientProxy:
    """Return the client proxy of a host. It calls ``host`` only on the first request."""
    proxy = KvStateClientProxy(
        lambda: HostReads(host(), wait_seconds=0.5),
        port,
        ClusterTokens(TOKEN, lambda: ()),
        connections_to_hosts(TOKEN, None if tls is None else tls.client_context()),
        ip="127.0.0.1",
        limits=limits or RequestLimits(),
        tls=None if tls is None else tls.server_context(),
    )
    if send_buffer is not None:
        listener = proxy._listener
        assert listener is not None
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # all that it accepts have it
    proxy.start()
    return proxy


class QueryHost:
    """A host and its proxy."""

    def __init__(self, cluster: Cluster, i: int, incarnation: str = "a", limits: RequestLimits | None = None) -> None:
        self.proxy = proxy_of(lambda: self.host, cluster.port, limits, cluster.send_buffer, cluster.tls)
        self.address = self.proxy.server_address
        info: HostInfo = msgspec.structs.replace(cluster.world.host(i, incarnation), query_address=self.address)
        local = cluster.root / f"local{i}{incarnation}"
        conf = StateStoreConf(provider="file", fsync=False, deltas_per_snapshot=1)
        self.host = Host(info, cluster.port, local, conf=conf, open_storage=cluster.world.storage)
        self.host.register()

    def kill(self) -> None:
        """Simulate the death of its process: it no longer answers."""
        self.proxy.shutdown()

    def close(self) -> None:
        self.proxy.shutdown()
        self.host.close()


class Cluster:
    """A query of an aggregate ``totals`` by ``user`` with outputs ``n`` and ``name``, on some hosts.

    Their sockets buffer at most ``send_buffer`` bytes for a client that does not read.
    """

    def __init__(
        self,
        root: Path,
        hosts: int = 2,
        partitions: int = 4,
        limits: RequestLimits | None = None,
        send_buffer: int | None = None,
        tls: TlsConf | None = None,
        **registration: Any,
    ) -> None:
        self.root = root
        self.send_buffer = send_buffer
        self.tls = tls
        self.limits = limits
        self.registration = registration
        self.world = World(root)
        self.port: Any = Port(self.world.coordinator(0))
        self.partitions = partitions
        self.checkpoint = "ck"
        self.hosts = [QueryHost(self, i, limits=limits) for i in range(hosts)]
        self.run = ""
        self.version = 0
        self.clients: list[QueryableStateClient] = []
        self.start("run1")

    @property
    def c(self) -> Coordinator:
        return self.port.c

    def start(self, run: str, operators: Mapping[str, OperatorSchema] | None = None) -> None:
        """The query starts, or starts again."""
        schemas = operators or {"totals": OperatorSchema.of_rows(TOTALS)}
        specs = tuple(OperatorSpec(name, self.partitions, s.to_json(), backend="file") for name, s in schemas.items())
        registration = self.world.registration(run, self.partitions, operators=specs, key_groups=G, **self.registration)
        answer = self.c.register_query(registration)
        assert answer.refusal is None, answer.refusal
        self.run, self.version = run, answer.completed_version

    def start_copy(self, run: str, checkpoint: str) -> None:
        """The checkpoint is copied, and the query starts on the copy: it has the query id of the original."""
        shutil.copytree(self.root / self.checkpoint, self.root / checkpoint)
        self.checkpoint = checkpoint
        location = str(self.root / checkpoint)
        self.registration |= {"checkpoint_location": location, "state_location": f"{location}/statestore"}
        self.start(run)

    def replace_coordinator(self) -> None:
        """Let another coordinator take over and learn its state from the hosts."""
        self.port.c = self.world.coordinator(0)
        for h in self.hosts:
            h.host.register()

    def replace_host(self, i: int, incarnation: str = "b") -> QueryHost:
        """Ray starts a killed host again."""
        self.hosts[i] = QueryHost(self, i, incarnation, self.limits)
        return self.hosts[i]

    def batch(
        self, rows: Mapping[int | None, tuple[int, str] | None], *, complete: bool = True, committed: bool = True
    ) -> int:
        """A micro-batch that writes users' totals, or removes them; returns the version.

        Without ``committed`` Spark has not written its commit when this returns: the version is prepared.
        """
        columns = pa.record_batch([pa.array(rows, pa.int64())], schema=KEYS)
        groups = key_groups(columns, G)
        keys = encode_keys(columns, groups)
        there = [v is not None for v in rows.values()]
        given = [v or (None, None) for v in rows.values()]
        states = pa.record_batch([pa.array([v[i] for v in given], f.type) for i, f in enumerate(STATE)], schema=STATE)
        values = TOTALS.encode_values(states)
        if not all(there):
            values = pc.if_else(pa.array(there, pa.bool_()), values, None)
        batch = self.version
        self.world.plan_spark(batch, self.checkpoint)
        for p in range(self.partitions):
            own = pa.array(groups * self.partitions // G == p)
            pairs = SortedPairs.last_wins(keys.filter(own), values.filter(own))
            self._run_task(p, batch, Changes({"default": pairs}))
        if not committed:
            return self.version
        self.world.commit_spark(batch, self.checkpoint)
        self.version += 1
        if complete:
            self.complete()
        return self.version

    def _run_task(self, p: int, batch: int, changes: Changes) -> None:
        task = TaskIdentity(self.run, "totals", p, batch, uuid.uuid4().hex[:6], uuid.uuid4().hex)
        for h in self.hosts:
            if opened(h.host, task).redirect is None:
                h.host.commit(task, changes, {})
                return
        raise AssertionError("no host owns the partition")

    def complete(self) -> None:
        """Commit the last batch, and inform the hosts with a heartbeat."""
        self.c.batch_committed(self.run, self.version - 1)
        for h in self.hosts:
            h.host.heartbeat()

    def remove_old_versions(self) -> None:
        """Take snapshots, and remove the versions that are not retained."""
        for h in self.hosts:
            for upload in h.host.maintenance.do_maintenance():
                upload.result()
        self.world.now += 2
        self.c.maintain()

    def client(
        self, *, direct: bool = False, timeout: float = PATIENCE, hosts: tuple[int, ...] = (0,), **changes: Any
    ) -> Any:
        """A client outside, of the proxies of some hosts."""
        address = [self.hosts[i].address for i in hosts]
        arguments = {"address": address, "token": TOKEN, "timeout": timeout, "direct": direct, **changes}
        client = QueryableStateClient.connect(**arguments)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for h in self.hosts:
            h.close()


@contextmanager
def served(query: Query, limits: RequestLimits | None = None) -> Iterator[QueryableStateClient]:
    """A client of a query that is run by ``state_flows``."""
    proxy = proxy_of(lambda: query.host, query.c, limits)
    query.host.info = query.host.registration.info = msgspec.structs.replace(
        query.host.info, query_address=proxy.server_address
    )
    query.host.register()
    query.host.heartbeat()
    client = QueryableStateClient.connect(address=proxy.server_address, token=TOKEN, timeout=PATIENCE)
    try:
        yield client
    finally:
        client.close()
        proxy.shutdown()


def go_back(c: Cluster, version: int, run: str) -> None:
    """The query is started again from an older version."""
    for batch in range(version, c.version):
        (c.world.root / f"ck/offsets/{batch}").unlink()
        (c.world.root / f"ck/commits/{batch}").unlink()
    c.start(run)
    assert c.version == version


class HeardPort:
    """Calls ``before`` and ``after`` around a message. Before it holds a query, all hosts send a heartbeat."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}

    def __getattr__(self, name: str) -> Any:
        def send(*args: Any, **kwargs: Any) -> Any:
            self.before.pop(name, lambda: None)()
            for h in self._cluster.hosts if name == "hold_query" else ():
                h.host.heartbeat()
            answer = getattr(self._cluster.c, name)(*args, **kwargs)
            self.after.pop(name, lambda: None)()
            return answer

        return send


class Grouping(Cluster):
    """A cluster whose tasks of a batch commit at once, so that their changelogs go into one object."""

    def __init__(self, root: Path, **more: Any) -> None:
        self.tasks: list[tuple[int, Changes]] = []
        super().__init__(root, partitions=8, **more)

    def _run_task(self, p: int, batch: int, changes: Changes) -> None:
        self.tasks.append((p, changes))
        if len(self.tasks) < self.partitions:
            return
        commits = []
        for partition, own in self.tasks:
            task = TaskIdentity(self.run, "totals", partition, batch, f"{partition}", f"{self.run}-{batch}")
            (host,) = [h.host for h in self.hosts if h.host.open(task).redirect is None]
            commits.append(partial(host.commit, task, own, {}))
        with ThreadPoolExecutor(len(commits)) as pool:
            for done in [pool.submit(commit) for commit in commits]:
                done.result()
        self.tasks = []


class TwoCoordinators(Cluster):
    """The coordinator and the hosts are restarted halfway through a batch: its manifest is never written."""

    restarts = False

    def between_coordinators(self) -> None:
        """Run before the second coordinator acknowledges anything."""

    def _run_task(self, p: int, batch: int, changes: Changes) -> None:
        if self.restarts and p == self.partitions // 2:
            for h in self.hosts:
                h.close()
            self.port.c = self.world.coordinator(0)
            for i in range(len(self.hosts)):
                self.replace_host(i)
            self.start(self.run)
            self.between_coordinators()
        super()._run_task(p, batch, changes)
