"""``StateStoreHost``, the Ray actor around a ``Host``: its process, its two servers, its heartbeat.

A host takes no CPU slot from RayDP's executors. It belongs to the driver that started it, and ends with that driver.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import ray

from backends.background_loop import BackgroundLoop, failing_loops
from backends.conf import StateStoreConf
from backends.decoders import keep_pandas_out
from backends.storage.local_files import make_process_files_private
from backends.storage.requests import RequestCounts
from backends.tracing import setting_of_environment, try_set_up
from coordinator_actor.actor import RayMetrics, restarts_of_this_actor
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE, CoordinatorConf
from coordinator_actor.messages import WIRE_VERSION, HostInfo, other_version
from coordinator_actor.metrics import REQUEST_DURATION_BOUNDS, MetricSink, running_totals, storage_totals
from coordinator_actor.process import format_of_environment, set_up_logging, take_ordinary_priority
from coordinator_actor.reference import RayCoordinatorPort
from spark_bridge.exceptions import EnvironmentProblemError, SessionError
from spark_bridge.flight_server import HostFlightServer
from spark_bridge.host.host import Host
from spark_bridge.host.instances import in_columns
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.queryable.server.limits import RequestLimits, RequestStatistics
from spark_bridge.queryable.server.proxy import KvStateClientProxy, connections_to_hosts
from spark_bridge.queryable.server.tokens import ClusterTokens
from spark_bridge.transport.flight_client import checked_call
from spark_bridge.transport.protocol import HostFile
from spark_bridge.transport.tls import TlsConf

# ``SessionOptions``: the set-up of the state store of one Spark session, from ``init_spark`` to each host.


DEFAULT_RECOVERY_TIMEOUT = 60.0
"""A task waits at most this many seconds for a new owner of its partition."""


@dataclass(frozen=True)
class SessionOptions:
    """The options of ``init_spark`` and ``attach`` that concern the state store; see there for their meaning.

    ``session_id`` names the session among those that use the same coordinator. ``log_format`` is that of the hosts'
    logs (``coordinator_actor.process``). ``tracing`` is the destination of the spans of driver, tasks and hosts
    (``backends.tracing``). ``wire_version`` is the driver's. It is set with the object, so that it is
    missing if the driver's release has none.

    Raises ``SessionError`` for ``num_hosts`` below 1 and ``keep_serving`` below 0, and ``TlsError`` if certificates do
    not fit. Nothing is checked again in a host, which gets the object as the driver has made it.
    """

    num_hosts: int | None
    namespace: str = NAMESPACE
    coordinator_name: str = COORDINATOR_NAME
    state_location: str | None = None
    conf: StateStoreConf = field(default_factory=StateStoreConf)
    coordinator_conf: CoordinatorConf | None = None
    recovery_timeout: float = DEFAULT_RECOVERY_TIMEOUT
    keep_serving: float | None = None
    tls: TlsConf | None = None
    query_port: int = 0
    request_limits: RequestLimits = field(default_factory=RequestLimits)
    log_format: str = field(default_factory=format_of_environment)
    tracing: str | None = field(default_factory=setting_of_environment)
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    wire_version: int = field(default_factory=lambda: WIRE_VERSION)

    def __post_init__(self) -> None:
        require_num_hosts(self.num_hosts)
        if self.keep_serving is not None and not self.keep_serving >= 0:
            raise SessionError(
                f"keep_serving={self.keep_serving}: give seconds, 0 or more, or None for as long as the session lives."
            )
        if self.tls is not None:
            self.tls.check()


def require_num_hosts(num_hosts: int | None) -> None:
    """Raise ``SessionError`` for a number of hosts below 1; None means one host per executor core."""
    if num_hosts is not None and num_hosts < 1:
        raise SessionError(f"num_hosts={num_hosts}: give at least 1, or None for one host per executor core.")


def require_same_driver(options: SessionOptions) -> None:
    """Raise ``EnvironmentProblemError``, in a host, if the driver that starts the host speaks other messages."""
    problem = other_version("The driver", getattr(options, "wire_version", None), "the release on this host's machine")
    if problem is not None:
        raise EnvironmentProblemError(problem)


# A host's metrics, made of counts that the host keeps anyway; see ``coordinator_actor.metrics`` for the table.


MAX_PARTITIONS = 100
"""Operators of more partitions have one value for each host: the number of series must not follow the partitions."""
HOST_METRICS_SECONDS = 5.0
"""Seconds between two collections of a host's figures. A collection costs some microseconds per partition."""
_DISK_COUNTS = ("evictions", "evicted_bytes", "reread_bytes")
_COUNTS = ("loads", "commits", "snapshots", "keys_read", "keys_written")


class HostMetrics:
    """Publishes a host's partitions, work, answered clients, and its ``requests`` to storage. For one thread.

    ``restarts`` is how many times Ray had started the host before.
    """

    def __init__(self, sink: MetricSink, statistics: RequestStatistics, requests: RequestCounts, restarts: int) -> None:
        self._sink = sink
        self._statistics = statistics
        self._requests = requests
        self._total = running_totals(sink)
        self._held: set[tuple[str, str, str]] = set()
        self._restarts = restarts

    def publish(self, described: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Publish a host's description of itself. ``names`` are the titles of queries by run id."""
        # Set repeatedly: a value set once, at the start of the process, was not exported.
        self._sink.set("statestore_host_restarts", self._restarts)
        for name in _COUNTS:
            self._total(f"statestore_{name}_total", described[name])
        storage_totals(self._requests, self._total)
        memory = dict(described["memory"])
        self._sink.set("statestore_memory_limit_bytes", memory.pop("host_memory"))
        for kind, nbytes in memory.items():
            self._sink.set("statestore_memory_bytes", nbytes, kind=kind)
        self._sink.set("statestore_loads_under_way", len(described["loading"]))
        self._sink.set("statestore_waiting_commits", described["waiting_commits"])
        for name in _DISK_COUNTS:
            self._total(f"statestore_disk_{name}_total", described["disk"][name])
        self._publish_partitions(described["instances"], names)
        self._publish_requests()

    def _publish_partitions(self, instances: list[dict[str, Any]], names: Mapping[str, str]) -> None:
        keys: dict[tuple[str, str, str], int] = {}
        nbytes: dict[tuple[str, str, str], int] = {}
        lags: dict[tuple[str, str], int] = {}
        for one in instances:
            query, operator = names.get(one["run_id"], one["query_id"]), one["operator"]
            # By the number of the partition itself: all hosts then give an operator's partitions the same labels.
            partition = str(one["partition"]) if one["num_partitions"] <= MAX_PARTITIONS else "all"
            at = (query, operator, partition)
            keys[at] = keys.get(at, 0) + one["keys"]
            nbytes[at] = nbytes.get(at, 0) + one["memory_bytes"]
            lag = max(0, one["version"] - one["snapshot_version"])
            lags[query, operator] = max(lag, lags.get((query, operator), 0))
        for gone in self._held - keys.keys():  # Ray forgets no series: set those that the host has dropped to 0
            keys[gone] = nbytes[gone] = 0
            lags.setdefault(gone[:2], 0)
        for (query, operator, partition), count in keys.items():
            labels = {"query": query, "operator": operator, "partition": partition}
            self._sink.set("statestore_keys", count, **labels)
            self._sink.set("statestore_partition_memory_bytes", nbytes[query, operator, partition], **labels)
        for (query, operator), lag in lags.items():
            self._sink.set("statestore_snapshot_lag_versions", lag, query=query, operator=operator)
        self._held = {at for at, count in nbytes.items() if count or keys[at]}

    def _publish_requests(self) -> None:
        for delta in self._statistics.deltas():
            labels = {"operator": delta.operator, "verb": delta.verb}
            self._sink.increase("statestore_requests_total", delta.requests, **labels)
            self._sink.increase("statestore_request_failures_total", delta.failures, **labels)
            counts = delta.latencies.counts_up_to(REQUEST_DURATION_BOUNDS)
            for bound, count in zip((*REQUEST_DURATION_BOUNDS, None), counts, strict=True):
                le = "+Inf" if bound is None else f"{bound:g}"
                self._sink.increase("statestore_request_seconds_bucket", count, **labels, le=le)


log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
ZONE_LABEL = "ray.io/availability-zone"
"""Ray's label of a node's zone, which KubeRay and the cluster launcher set."""
LOCATE_SECONDS = 5.0
"""How long the proxy waits for the coordinator, in seconds. In that time it answers from the owners that it knows."""
SWITCH_SECONDS = 0.0005
"""How long a thread keeps the interpreter while others wait, in seconds: a lookup must not wait for ten commits."""


class StateStoreHost:
    """One named Ray actor per executor core; see ``Host`` for its duties."""

    def __init__(self, host_id: str, token: str, options: SessionOptions, query_port: int) -> None:
        require_same_driver(options)
        self._node_ip = ray.util.get_node_ip_address()
        who = {"role": "host", "namespace": options.namespace, "node_ip": self._node_ip, "host": host_id}
        set_up_logging(options.log_format, who)
        try_set_up(options.tracing, {"role": "host", "namespace": options.namespace, "host": host_id})
        keep_pandas_out()
        sys.setswitchinterval(SWITCH_SECONDS)
        take_ordinary_priority()
        make_process_files_private()
        namespace, tls = options.namespace, options.tls
        self._namespace = namespace
        session_dir = Path(ray._private.worker._global_node.get_session_dir_path())
        self._host_file = host_files_dir(session_dir, options) / f"{host_id}.json"
        self._local_dir = session_dir / "statestore" / namespace / options.session_id / "data" / host_id
        self._coordinator = RayCoordinatorPort(
            namespace,
            options.coordinator_name,
            options.recovery_timeout,
            secret=token if tls is None else None,  # with TLS all messages go through Ray, which has its own
        )
        # The first heartbeat is due at once: its answer names the tokens that have been revoked.
        self._last_heartbeat = time.monotonic() - HEARTBEAT_SECONDS
        self._server = HostFlightServer(
            lambda: self._host,
            self._node_ip,
            token,
            lambda method, args: self._coordinator.call(method, **checked_call(method, args)),
            tls=tls,
        )
        self._locator = RayCoordinatorPort(
            namespace, options.coordinator_name, min(LOCATE_SECONDS, options.recovery_timeout)
        )
        self._queries = KvStateClientProxy(
            lambda: self._reads,
            self._locator,
            ClusterTokens(token, lambda: self._host.revoked_tokens, namespace=namespace),
            connections_to_hosts(token, None if tls is None else tls.client_context()),
            ip=self._node_ip,
            port=query_port,
            limits=options.request_limits,
            tls=None if tls is None else tls.server_context(),
            host_id=host_id,
        )
        info = HostInfo(
            host_id=host_id,
            incarnation=uuid.uuid4().hex,
            address=self._server.address,
            node_id=ray.get_runtime_context().get_node_id(),
            session_id=options.session_id,
            query_address=self._queries.server_address,
            restart=restarts_of_this_actor(),
            zone=ray.get_runtime_context().get_node_labels().get(ZONE_LABEL, ""),
        )
        self._host = Host(info, self._coordinator, self._local_dir, conf=options.conf)
        self._reads = HostReads(self._host)
        sink = RayMetrics({"namespace": namespace, "host": host_id})
        self._metrics = HostMetrics(sink, self._queries.statistics, self._host.files.requests, info.restart)
        # Before the coordinator, and so any client, learns the address.
        self._queries.start()
        self._host.register()
        self._write_host_file(token)
        log_remedy = "Look at the log of this host ('statestore logs')."
        self._loops = (
            BackgroundLoop(
                self._beat_if_due,
                self._until_heartbeat,
                name="statestore-heartbeat",
                what="send heartbeats: the coordinator gives the host up when its lease is over",
                remedy="Check whether the coordinator runs and can be reached from this host ('statestore status').",
                most_seconds=2 * HEARTBEAT_SECONDS,
            ),
            BackgroundLoop(
                self._publish_metrics,
                HOST_METRICS_SECONDS,
                name="statestore-metrics",
                what="publish the metrics of the host",
                remedy=f"See whether Ray's agent for metrics runs on this machine. {log_remedy}",
            ),
            BackgroundLoop(
                self._host.maintenance.do_maintenance,
                options.conf.maintenance_interval,
                name="state-store-maintenance-task",
                what="do the maintenance of the host: no snapshots are made, and loading takes ever longer",
                remedy=log_remedy,
                most_seconds=max(30.0, options.conf.maintenance_interval),
            ),
        )
        for loop in self._loops:
            loop.start()
        self._loops[1].wake()  # the metrics of a host exist as soon as the host does
        atexit.register(self._clean_up)

    def _write_host_file(self, token: str) -> None:
        info = self._host.info
        directory = self._host_file.parent
        directory.mkdir(parents=True, exist_ok=True)
        draft = directory / f".{info.incarnation}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(HostFile(info.host_id, info.incarnation, info.address, token)))
        draft.replace(self._host_file)

    def _beat_if_due(self) -> None:
        if self._until_heartbeat() > 0:
            return  # ``on_progress`` has just sent one
        try:
            self._beat()
        finally:
            if self._host.replaced is not None:
                self._end_process(self._host.replaced)

    def _publish_metrics(self) -> None:
        registrations = [instance.registration for instance in self._host.cache.all()]
        self._metrics.publish(self._host.describe(), {r.run_id: r.name or r.query_id for r in registrations})

    def _end_process(self, reason: str) -> None:
        """End this process at once: another incarnation is the host.

        Ray cannot do that. Its processes of this node have ended, or it considers the node dead. If Ray still considers
        this process the host, it starts another incarnation, with a higher number.
        """
        log.error("This process ends: %s", reason)
        self._clean_up()
        os._exit(1)

    def on_progress(self) -> None:
        """Send a heartbeat now: the driver has seen that a version is completed, and the answer will name it."""
        self._beat()

    def _until_heartbeat(self) -> float:
        return self._last_heartbeat + HEARTBEAT_SECONDS - time.monotonic()

    def _beat(self) -> None:
        # Before the call, and whether the call succeeds or not: a failed heartbeat must not be retried at once.
        self._last_heartbeat = time.monotonic()
        self._host.heartbeat()

    def address(self) -> str:
        return self._host.info.address

    def query_address(self) -> str:
        """Return the address at which this incarnation answers query clients: ``ip:port``."""
        return self._host.info.query_address

    def pid(self) -> int:
        return os.getpid()

    def describe(self) -> dict[str, object]:
        """Return the description of this host, of its partitions and of its answers to queries, as JSON types."""
        return {
            **self._host.describe(),
            "pid": os.getpid(),
            "namespace": self._namespace,
            "query_address": self._host.info.query_address,
            "requests": self._queries.statistics.snapshot(),
            "failing_loops": msgspec.to_builtins(failing_loops.now()),
        }

    def describe_in_columns(self) -> dict[str, object]:
        """Return the same for an overview, with the partitions in columns."""
        return in_columns(self.describe())

    def stop(self) -> None:
        """Unload everything and remove the local files; the actor answers nothing useful afterwards."""
        for loop in self._loops:
            loop.close()
        self._locator.close()
        self._queries.shutdown()
        self._server.shutdown()
        self._host.close()
        self._coordinator.close()
        self._clean_up()

    def _clean_up(self) -> None:
        self._host_file.unlink(missing_ok=True)
        shutil.rmtree(self._local_dir, ignore_errors=True)

    def __repr__(self) -> str:
        if not hasattr(self, "_host"):  # Ray shows it with the error of a failed start
            return "StateStoreHost(not started)"
        info = self._host.info
        tasks, queries = info.address.rpartition(":")[2], info.query_address.rpartition(":")[2]
        served = f"tasks at port {tasks}, queries at port {queries}"
        return f"StateStoreHost({self._namespace}/{info.host_id} on {self._node_ip}, {served})"


def host_files_dir(session_dir: Path, options: SessionOptions) -> Path:
    """Return the directory of the session's host addresses, the same on every node."""
    return session_dir / "statestore" / options.namespace / options.session_id / "hosts"


def start_host(options: SessionOptions, token: str, number: int, query_port: int, node_id: str) -> Any:
    """Start the host actor of a session with that number on a node; do not wait for it.

    It runs there or nowhere: with a soft affinity, Ray puts an actor without CPUs on any node. Ray
    restarts it there when its process dies, and gives it up with its node. ``query_port`` 0 is any free port.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(StateStoreHost).options(
        name=f"StateStoreHost-{options.session_id}-{number}",
        namespace=options.namespace,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=4,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
    )
    return actor.remote(host_id_of(options, number), token, options, query_port)


def host_id_of(options: SessionOptions, number: int) -> str:
    """Return the host id of the host of a session with that number."""
    return f"host-{options.session_id}-{number}"
