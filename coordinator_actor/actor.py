"""The named, detached Ray actor around the coordinator. It only forwards."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from backends.formats.manifest import Lineage, PartitionEntry
from backends.ids import StateStoreProviderId
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.without_pandas import keep_pandas_out
from coordinator_actor.access_tokens import AccessTokens, IssuedToken
from coordinator_actor.cluster_store import ClusterStore
from coordinator_actor.coordinator import Coordinator, CoordinatorConf
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
    QueryRegistration,
    Refused,
    RegisteredQuery,
    RunningOperator,
    SavepointExported,
    SavepointStatus,
    SnapshotUploaded,
)
from coordinator_actor.priority import take_ordinary_priority

log = logging.getLogger(__name__)

NAMESPACE = "statestore"
NAME = "StateStoreCoordinator"
MAX_CONCURRENCY = 64
WATCH_SECONDS = 1.0
"""So often leases are looked at; who comes as late again has stood still."""


def open_storage(location: str, options: Mapping[str, str]) -> CheckpointStorage:
    """The real storage of a checkpoint."""
    return CheckpointStorage.open(location, options)


def steady_clock() -> Callable[[], float]:
    """Seconds since 1970 that never go back: leases must not hang on a clock that somebody sets."""
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()


class StateStoreCoordinator:
    """One per namespace; restarted by Ray, and then told again by hosts and drivers what they hold.

    ``token`` is the secret of this cluster unless an earlier coordinator of that name has left one.
    """

    def __init__(self, namespace: str, name: str, token: str, conf: CoordinatorConf) -> None:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("coordinator_actor").setLevel(logging.INFO)
        take_ordinary_priority()
        keep_pandas_out()
        self._namespace = namespace
        self._name = name
        store = ClusterStore(namespace, name)
        self._token = store.secret(token)
        self._node_ip = ray.util.get_node_ip_address()
        self._tokens = AccessTokens(self._token, store, time.time)
        self._coordinator = Coordinator(steady_clock(), open_storage, conf, tokens=self._tokens)
        tags = ("namespace",)
        self._hosts_gauge = Gauge("statestore_hosts", "Live state store hosts", tags)
        self._queries_gauge = Gauge("statestore_queries", "Registered streaming queries", tags)
        self._prepared_counter = Counter("statestore_prepared_versions", "Manifests written", tags)
        self._acknowledge_ms = Histogram(
            "statestore_acknowledge_ms",
            "Time to take an acknowledgement",
            [1, 2, 5, 10, 20, 50, 100, 500, 1000, 5000],
            tags,
        )
        threading.Thread(target=self._watch, name="statestore-leases", daemon=True).start()
        # Apart from the leases: removing files may take long.
        threading.Thread(target=self._maintain, name="statestore-maintenance", daemon=True).start()

    def _maintain(self) -> None:
        while True:
            time.sleep(1.0)
            try:
                self._coordinator.maintain()
            except Exception:  # the thread must go on
                log.exception("Maintenance failed")

    def _watch(self) -> None:
        tags = {"namespace": self._namespace}
        while True:
            slept = time.monotonic()
            time.sleep(WATCH_SECONDS)
            late = time.monotonic() - slept - WATCH_SECONDS
            try:
                self._coordinator.expire(late if late > WATCH_SECONDS else 0.0)
            except Exception:  # the thread must go on
                log.exception("Leases could not be looked at")
            described = self._coordinator.describe()
            self._hosts_gauge.set(len(described["hosts"]), tags)
            self._queries_gauge.set(len(described["queries"]), tags)
            if self._coordinator.is_idle():
                log.info("Nobody has needed this coordinator for a while; it ends")
                ray.kill(ray.get_actor(self._name, namespace=self._namespace), no_restart=True)

    def token(self) -> str:
        """The secret that tasks and clients show to hosts; whoever can call this actor may know it."""
        return self._token

    def issue_token(self, name: str, expires_in: float | None = None) -> str:
        """See ``AccessTokens.issue``."""
        return self._tokens.issue(name, expires_in)

    def list_tokens(self) -> tuple[IssuedToken, ...]:
        """See ``AccessTokens.list``."""
        return self._tokens.list()

    def revoke_token(self, id_or_name: str) -> IssuedToken:
        """See ``AccessTokens.revoke``. All hosts know it with their next heartbeat."""
        return self._tokens.revoke(id_or_name)

    def register_host(self, info: HostInfo, report: HostReport) -> None:
        """See ``Coordinator``."""
        self._coordinator.register_host(info, report)

    def heartbeat_host(self, host_id: str, incarnation: str, held: Mapping[str, int] | None = None) -> HostOrders:
        """See ``Coordinator``."""
        return self._coordinator.heartbeat_host(host_id, incarnation, held)

    def unregister_session(self, session_id: str) -> bool:
        """See ``Coordinator``."""
        return self._coordinator.unregister_session(session_id)

    def register_query(
        self, registration: QueryRegistration, initial: dict[str, dict[int, PartitionEntry]] | None = None
    ) -> RegisteredQuery:
        """See ``Coordinator``."""
        return self._coordinator.register_query(registration, initial)

    def driver_heartbeat(self, run_id: str, *, is_stopping: bool = False) -> bool:
        """See ``Coordinator``."""
        return self._coordinator.driver_heartbeat(run_id, is_stopping=is_stopping)

    def open_batch(self, request: OpenBatch) -> BatchGrant:
        """See ``Coordinator``."""
        return self._coordinator.open_batch(request)

    def open_for_read(self, run_id: str, operator: str, partition: int) -> OpenGrant:
        """See ``Coordinator``."""
        return self._coordinator.open_for_read(run_id, operator, partition)

    def lineage(self, run_id: str, operator: str, partition: int, version: int) -> Lineage:
        """See ``Coordinator``."""
        return self._coordinator.lineage(run_id, operator, partition, version)

    def snapshot_uploaded(self, message: SnapshotUploaded) -> bool:
        """See ``Coordinator``."""
        return self._coordinator.snapshot_uploaded(message)

    def acknowledge_many(
        self, run_id: str, host_id: str, incarnation: str, messages: tuple[Acknowledge, ...]
    ) -> tuple[Acknowledged | Refused, ...]:
        """See ``Coordinator``."""
        started = time.perf_counter()
        answers = self._coordinator.acknowledge_many(run_id, host_id, incarnation, messages)
        tags = {"namespace": self._namespace}
        self._acknowledge_ms.observe((time.perf_counter() - started) * 1e3, tags)
        if any(isinstance(a, Acknowledged) and a.manifest_id is not None for a in answers):
            self._prepared_counter.inc(1, tags)
        return answers

    def verify_instances(
        self, host_id: str, incarnation: str, run_ids: tuple[str, ...]
    ) -> dict[str, dict[str, list[int]]]:
        """See ``Coordinator``."""
        return self._coordinator.verify_instances(host_id, incarnation, run_ids)

    def batch_committed(self, run_id: str, batch_id: int) -> bool:
        """See ``Coordinator``."""
        return self._coordinator.batch_committed(run_id, batch_id)

    def rebalance(self, query: str | None = None) -> dict[str, int]:
        """See ``Coordinator``."""
        return self._coordinator.rebalance(query)

    def trigger_savepoint(
        self, request_id: str, query: str, path: str | None = None, *, stop: bool = False
    ) -> SavepointStatus:
        """See ``Coordinator``."""
        return self._coordinator.trigger_savepoint(request_id, query, path, stop=stop)

    def savepoint_status(self, request_id: str) -> SavepointStatus:
        """See ``Coordinator``."""
        return self._coordinator.savepoint_status(request_id)

    def savepoint_exported(self, message: SavepointExported) -> None:
        """See ``Coordinator``."""
        self._coordinator.savepoint_exported(message)

    def checkpoint_stats(self, query: str) -> dict[str, Any]:
        """See ``Coordinator``."""
        return self._coordinator.checkpoint_stats(query)

    def get_kv_state_location_oracle(self, job_id: str) -> KvStateLocationOracle | None:
        """See ``Coordinator``."""
        return self._coordinator.get_kv_state_location_oracle(job_id)

    def locate(self, operator: str, query: str | None = None) -> OperatorLocation:
        """See ``Coordinator``."""
        return self._coordinator.locate(operator, query)

    def operators(self) -> tuple[RunningOperator, ...]:
        """See ``Coordinator``."""
        return self._coordinator.operators()

    def completed(self, run_id: str, host_id: str) -> Completed:
        """See ``Coordinator``."""
        return self._coordinator.completed(run_id, host_id)

    def report_active_instance(
        self,
        provider_id: StateStoreProviderId,
        host: str,
        executor_id: str,
        other_provider_ids: tuple[StateStoreProviderId, ...] = (),
    ) -> list[StateStoreProviderId]:
        """See ``Coordinator``."""
        return self._coordinator.report_active_instance(provider_id, host, executor_id, other_provider_ids)

    def verify_if_instance_active(self, provider_id: StateStoreProviderId, executor_id: str) -> bool:
        """See ``Coordinator``."""
        return self._coordinator.verify_if_instance_active(provider_id, executor_id)

    def get_location(self, provider_id: StateStoreProviderId) -> str | None:
        """See ``Coordinator``."""
        return self._coordinator.get_location(provider_id)

    def get_locations(self, provider_ids: list[StateStoreProviderId]) -> list[str | None]:
        """See ``Coordinator``."""
        return self._coordinator.get_locations(provider_ids)

    def deactivate_instances(self, run_id: str) -> bool:
        """See ``Coordinator``."""
        return self._coordinator.deactivate_instances(run_id)

    def describe(self) -> dict[str, Any]:
        """What there is: hosts, queries, instances."""
        return {
            **self._coordinator.describe(),
            "namespace": self._namespace,
            "node_ip": self._node_ip,
            "pid": os.getpid(),
        }

    def __repr__(self) -> str:
        return f"StateStoreCoordinator({self._namespace} on {self._node_ip})"


def get_or_create_coordinator(namespace: str = NAMESPACE, name: str = NAME, conf: CoordinatorConf | None = None) -> Any:
    """The coordinator actor of a namespace; started if there is none. It outlives the driver that starts it."""
    return (
        ray.remote(StateStoreCoordinator)
        .options(
            name=name,
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            max_concurrency=MAX_CONCURRENCY,
        )
        .remote(namespace, name, secrets.token_hex(32), conf or CoordinatorConf())
    )
