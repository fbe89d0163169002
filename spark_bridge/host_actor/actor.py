"""``StateStoreHost``, the Ray actor around a ``Host``: its process, its two servers, its heartbeat.

A host takes no CPU slot from RayDP's executors. It belongs to the driver that made it and ends with it.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError

from backends.conf import StateStoreConf
from backends.exceptions import StateStoreError
from backends.formats.manifest import Lineage
from backends.without_pandas import keep_pandas_out
from coordinator_actor.exceptions import CoordinatorError
from coordinator_actor.location_oracle import KvStateLocationOracle
from coordinator_actor.messages import (
    Acknowledge,
    Acknowledged,
    BatchGrant,
    Completed,
    HostInfo,
    HostOrders,
    HostReport,
    OpenBatch,
    OpenGrant,
    OperatorLocation,
    Refused,
    RunningOperator,
    SavepointExported,
    SnapshotUploaded,
)
from coordinator_actor.priority import take_ordinary_priority
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.host.host import Host
from spark_bridge.host_actor.flight_server import HostFlightServer
from spark_bridge.host_actor.ray_metrics import request_metrics
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.queryable.server.client_proxy import KvStateClientProxy
from spark_bridge.queryable.server.request_limits import RequestLimits
from spark_bridge.queryable.server.token_verifier import ClusterTokens
from spark_bridge.task.executor_transport import checked_call
from spark_bridge.transport.protocol import HostFile
from spark_bridge.transport.tls import TlsConf

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
LOCATE_SECONDS = 5.0
"""How long the proxy waits for the coordinator: what it knows of owners goes on serving meanwhile."""
SWITCH_SECONDS = 0.0005
"""How long a thread keeps the interpreter while others wait: a lookup must not wait for ten commits that compute."""


class RayCoordinatorPort:
    """The coordinator's messages as Ray actor calls; waits for an actor that is being restarted."""

    def __init__(self, namespace: str, name: str, timeout: float) -> None:
        self._namespace = namespace
        self._name = name
        self._timeout = timeout
        self._actor: Any = None
        self._closed = threading.Event()

    def close(self) -> None:
        """Wait for the coordinator no longer: the session is over."""
        self._closed.set()

    def call(self, method: str, *args: object, **kwargs: object) -> Any:
        """One message; the errors that the coordinator raises on purpose come as they are."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                if self._actor is None:
                    self._actor = ray.get_actor(self._name, namespace=self._namespace)
                return ray.get(getattr(self._actor, method).remote(*args, **kwargs), timeout=self._timeout)
            except RayTaskError as error:
                if isinstance(error.cause, CoordinatorError | StateStoreError):
                    raise error.cause from None
                raise
            except (RayError, ValueError) as error:
                # ValueError is what get_actor raises for a name that nobody has.
                self._actor = None
                if self._closed.wait(0.1) or time.monotonic() > deadline:
                    raise HostUnavailableError(
                        f"The coordinator {self._name!r} (namespace {self._namespace!r}) did not answer "
                        f"{method} within {self._timeout:.0f} s: {error}"
                    ) from error

    def register_host(self, info: HostInfo, report: HostReport) -> None:
        """See ``CoordinatorPort``."""
        self.call("register_host", info, report)

    def heartbeat_host(self, host_id: str, incarnation: str, held: Mapping[str, int] | None = None) -> HostOrders:
        """See ``CoordinatorPort``."""
        orders: HostOrders = self.call("heartbeat_host", host_id, incarnation, held)
        return orders

    def open_batch(self, request: OpenBatch) -> BatchGrant:
        """See ``CoordinatorPort``."""
        grant: BatchGrant = self.call("open_batch", request)
        return grant

    def open_for_read(self, run_id: str, operator: str, partition: int) -> OpenGrant:
        """See ``CoordinatorPort``."""
        grant: OpenGrant = self.call("open_for_read", run_id, operator, partition)
        return grant

    def lineage(self, run_id: str, operator: str, partition: int, version: int) -> Lineage:
        """See ``CoordinatorPort``."""
        lineage: Lineage = self.call("lineage", run_id, operator, partition, version)
        return lineage

    def snapshot_uploaded(self, message: SnapshotUploaded) -> bool:
        """See ``CoordinatorPort``."""
        return bool(self.call("snapshot_uploaded", message))

    def acknowledge_many(
        self, run_id: str, host_id: str, incarnation: str, messages: tuple[Acknowledge, ...]
    ) -> tuple[Acknowledged | Refused, ...]:
        """See ``CoordinatorPort``."""
        answers: tuple[Acknowledged | Refused, ...] = self.call(
            "acknowledge_many", run_id, host_id, incarnation, messages
        )
        return answers

    def verify_instances(
        self, host_id: str, incarnation: str, run_ids: tuple[str, ...]
    ) -> dict[str, dict[str, list[int]]]:
        """See ``CoordinatorPort``."""
        owned: dict[str, dict[str, list[int]]] = self.call("verify_instances", host_id, incarnation, run_ids)
        return owned

    def savepoint_exported(self, message: SavepointExported) -> None:
        """See ``CoordinatorPort``."""
        self.call("savepoint_exported", message)

    def locate(self, operator: str, query: str | None = None) -> OperatorLocation:
        """See ``CoordinatorPort``."""
        location: OperatorLocation = self.call("locate", operator, query)
        return location

    def get_kv_state_location_oracle(self, job_id: str) -> KvStateLocationOracle | None:
        """See ``OracleSource``."""
        oracle: KvStateLocationOracle | None = self.call("get_kv_state_location_oracle", job_id)
        return oracle

    def operators(self) -> tuple[RunningOperator, ...]:
        """See ``CoordinatorPort``."""
        operators: tuple[RunningOperator, ...] = self.call("operators")
        return operators

    def completed(self, run_id: str, host_id: str) -> Completed:
        """See ``CoordinatorPort``."""
        completed: Completed = self.call("completed", run_id, host_id)
        return completed


class StateStoreHost:
    """One named Ray actor per executor core; see ``Host`` for what it does."""

    def __init__(
        self,
        host_id: str,
        session_id: str,
        namespace: str,
        coordinator_name: str,
        token: str,
        conf: StateStoreConf,
        recovery_timeout: float,
        tls: TlsConf | None = None,
        query_port: int = 0,
        request_limits: RequestLimits | None = None,
    ) -> None:
        quiet_logging()
        keep_pandas_out()
        sys.setswitchinterval(SWITCH_SECONDS)
        take_ordinary_priority()
        self._namespace = namespace
        session_dir = Path(ray._private.worker._global_node.get_session_dir_path())
        self._host_file = host_files_dir(session_dir, namespace, session_id) / f"{host_id}.json"
        self._local_dir = session_dir / "statestore" / namespace / session_id / "data" / host_id
        self._coordinator = RayCoordinatorPort(namespace, coordinator_name, recovery_timeout)
        self._node_ip = ray.util.get_node_ip_address()
        self._stopping = threading.Event()
        # The first one is due at once: it brings what tokens have been revoked.
        self._last_heartbeat = time.monotonic() - HEARTBEAT_SECONDS
        self._server = HostFlightServer(self._get_host, self._node_ip, token, self._call_coordinator, tls=tls)
        self._locator = RayCoordinatorPort(namespace, coordinator_name, min(LOCATE_SECONDS, recovery_timeout))
        self._queries = KvStateClientProxy(
            self._get_reads,
            self._locator,
            ClusterTokens(token, lambda: self._host.revoked_tokens),
            token=token,
            ip=self._node_ip,
            port=query_port,
            limits=request_limits or RequestLimits(),
            tls=None if tls is None else tls.server_context(),
            client_tls=None if tls is None else tls.client_context(),
            host_id=host_id,
        )
        info = HostInfo(
            host_id=host_id,
            incarnation=uuid.uuid4().hex,
            address=self._server.address,
            node_id=ray.get_runtime_context().get_node_id(),
            session_id=session_id,
            query_address=self._queries.server_address,
        )
        self._host = Host(info, self._coordinator, self._local_dir, conf=conf)
        self._reads = HostReads(self._host)
        self._publish_requests = request_metrics(self._queries.statistics, namespace, host_id)
        # Before anybody is told of the address.
        self._queries.start()
        self._host.register()
        self._write_host_file(token)
        self._heartbeat = threading.Thread(target=self._run_heartbeat, name="statestore-heartbeat", daemon=True)
        self._heartbeat.start()
        self._maintenance = threading.Thread(
            target=self._run_maintenance,
            args=(conf.maintenance_interval,),
            name="state-store-maintenance-task",
            daemon=True,
        )
        self._maintenance.start()
        atexit.register(self._clean_up)

    def _get_host(self) -> Host:
        return self._host

    def _get_reads(self) -> HostReads:
        return self._reads

    def _call_coordinator(self, method: str, args: dict[str, object]) -> object:
        return self._coordinator.call(method, **checked_call(method, args))

    def _write_host_file(self, token: str) -> None:
        info = self._host.info
        directory = self._host_file.parent
        directory.mkdir(parents=True, exist_ok=True)
        draft = directory / f".{info.incarnation}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(HostFile(info.host_id, info.incarnation, info.address, token)))
        draft.replace(self._host_file)

    def _run_heartbeat(self) -> None:
        while not self._stopping.wait(self._until_heartbeat()):
            try:
                self._publish_requests()
            except Exception:  # the thread must go on
                log.warning("The request statistics of %s were not published", self._host.info.host_id, exc_info=True)
            if self._until_heartbeat() > 0:
                continue  # the driver has just caused one
            try:
                self._beat()
            except Exception:  # the thread must go on
                log.warning("The coordinator did not take the heartbeat of %s", self._host.info.host_id, exc_info=True)

    def _run_maintenance(self, interval: float) -> None:
        while not self._stopping.wait(interval):
            try:
                self._host.do_maintenance()
            except Exception:  # the thread must go on
                log.exception("Maintenance of %s failed", self._host.info.host_id)

    def on_progress(self) -> None:
        """A version is completed, as the driver has seen; saves waiting for the next heartbeat."""
        self._beat()

    def _until_heartbeat(self) -> float:
        return self._last_heartbeat + HEARTBEAT_SECONDS - time.monotonic()

    def _beat(self) -> None:
        # Before, and whether it succeeds or not: one that fails must not be tried again at once.
        self._last_heartbeat = time.monotonic()
        self._host.heartbeat()

    def address(self) -> str:
        """The Flight address of this incarnation."""
        return self._host.info.address

    def query_address(self) -> str:
        """Where this incarnation answers query clients: ``ip:port``."""
        return self._host.info.query_address

    def pid(self) -> int:
        """The process id of this incarnation."""
        return os.getpid()

    def describe(self) -> dict[str, object]:
        """What this host is and holds, and how it has answered queries."""
        return {
            **self._host.describe(),
            "pid": os.getpid(),
            "namespace": self._namespace,
            "query_address": self._host.info.query_address,
            "requests": self._queries.statistics.snapshot(),
        }

    def stop(self) -> None:
        """Unload everything and remove the local files; the actor is of no use afterwards."""
        self._stopping.set()
        self._locator.close()
        self._queries.shutdown()
        self._server.shutdown()
        self._host.close()
        self._clean_up()

    def _clean_up(self) -> None:
        self._host_file.unlink(missing_ok=True)
        shutil.rmtree(self._local_dir, ignore_errors=True)

    def __repr__(self) -> str:
        info = self._host.info
        return f"StateStoreHost({self._namespace}/{info.host_id} on {self._node_ip})"


def host_files_dir(session_dir: Path, namespace: str, session_id: str) -> Path:
    """Where the hosts of a session leave their addresses, on every node."""
    return session_dir / "statestore" / namespace / session_id / "hosts"


def quiet_logging() -> None:
    """Our own log lines go to the actor's log file from INFO on."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("backends", "coordinator_actor", "spark_bridge"):
        logging.getLogger(name).setLevel(logging.INFO)


def start_hosts(
    count: int,
    session_id: str,
    namespace: str,
    coordinator_name: str,
    token: str,
    conf: StateStoreConf,
    recovery_timeout: float,
    node_ids: Callable[[int], str | None],
    tls: TlsConf | None = None,
    query_port: int = 0,
    request_limits: RequestLimits | None = None,
) -> list[Any]:
    """Start ``count`` host actors, the i-th on the node ``node_ids(i)`` where that is possible.

    The i-th answers queries at ``query_port + i``, or, if that is 0, at any free port.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor_class = ray.remote(StateStoreHost)
    hosts = []
    for i in range(count):
        host_id = f"host-{session_id}-{i}"
        node_id = node_ids(i)
        strategy = None if node_id is None else NodeAffinitySchedulingStrategy(node_id, soft=True)
        hosts.append(
            actor_class.options(
                name=f"StateStoreHost-{session_id}-{i}",
                namespace=namespace,
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=4,
                scheduling_strategy=strategy,
            ).remote(
                host_id,
                session_id,
                namespace,
                coordinator_name,
                token,
                conf,
                recovery_timeout,
                tls,
                query_port and query_port + i,
                request_limits,
            )
        )
    ray.get([host.address.remote() for host in hosts], timeout=120)
    return hosts
