"""The named, detached Ray actor around the coordinator."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import ray
from msgspec import to_builtins
from msgspec.structs import replace
from ray.experimental import internal_kv
from ray.util.metrics import Counter, Gauge, Histogram

from backends.background_loop import BackgroundLoop, failing_loops
from backends.decoders import keep_pandas_out
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.requests import RequestCounts
from backends.tracing import try_set_up
from coordinator_actor.access_tokens import AccessTokens
from coordinator_actor.coordinator import Coordinator, LeaseWatch
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE, CoordinatorConf
from coordinator_actor.coordinator_port import GROUPS, MESSAGES, CoordinatorPort, Group
from coordinator_actor.direct_calls import CallServer
from coordinator_actor.exceptions import InvalidRequestError
from coordinator_actor.handlers.suspicions import probe_address
from coordinator_actor.messages import Acknowledged
from coordinator_actor.metrics import COUNTER, DURATION_BOUNDS, GAUGE, HISTOGRAM, METRICS, QueryMetrics
from coordinator_actor.process import set_up_logging, take_ordinary_priority
from coordinator_actor.threads import QueryThreads

# The secret of a cluster, the registry of its tokens and its drained nodes, in Ray's own key-value store.
#
# The store lives as long as the Ray cluster. So these outlive coordinators, streams and drivers. Every process
# attached to the cluster can read it, just as it can ask the coordinator.


KV_NAMESPACE = "statestore"


class ClusterStore:
    """The store of one coordinator, by Ray namespace and name of the actor (a ``TokenStore``)."""

    def __init__(self, namespace: str, name: str) -> None:
        self._prefix = f"{namespace}/{name}"

    def secret(self, candidate: str) -> str:
        """Return the secret of this cluster: the first candidate that was ever offered."""
        key = f"{self._prefix}/secret"
        internal_kv._internal_kv_put(key, candidate, overwrite=False, namespace=KV_NAMESPACE)
        return str(internal_kv._internal_kv_get(key, namespace=KV_NAMESPACE), "ascii")

    def load(self) -> bytes | None:
        content: bytes | None = internal_kv._internal_kv_get(f"{self._prefix}/tokens", namespace=KV_NAMESPACE)
        return content

    def save(self, content: bytes) -> None:
        internal_kv._internal_kv_put(f"{self._prefix}/tokens", content, overwrite=True, namespace=KV_NAMESPACE)

    def drain(self, node_id: str) -> None:
        """Mark a node as draining: drivers make its hosts hand over their partitions, and start no hosts there."""
        internal_kv._internal_kv_put(f"{self._prefix}/drained/{node_id}", b"", namespace=KV_NAMESPACE)

    def keep(self, node_id: str) -> None:
        """Cancel the draining of a node."""
        internal_kv._internal_kv_del(f"{self._prefix}/drained/{node_id}", namespace=KV_NAMESPACE)

    def drained(self) -> frozenset[str]:
        """Return the ids of the draining nodes."""
        prefix = f"{self._prefix}/drained/"
        keys = internal_kv._internal_kv_list(prefix, namespace=KV_NAMESPACE)
        return frozenset(str(key, "utf-8").removeprefix(prefix) for key in keys)


# Watches which nodes Ray has declared dead: a process that keeps running there, cut off, must not act.


NODE_WATCH_SECONDS = 1.0
"""Seconds between two requests to Ray. A request is one message, and grows with the nodes."""


class NodeWatch:
    """Asks Ray for its nodes in a separate thread, so that no message waits while Ray does not answer.

    ``dead`` has the ids of the dead nodes, as far as Ray remembers them (1,000 by default).
    """

    def __init__(self) -> None:
        self.dead: frozenset[str] = _dead_nodes()
        BackgroundLoop(
            self._look,
            NODE_WATCH_SECONDS,
            name="statestore-nodes",
            what="ask Ray which nodes are dead: hosts there are given up only when their leases are over",
            remedy="See whether Ray's head answers ('ray status').",
        ).start()

    def _look(self) -> None:
        self.dead = _dead_nodes()


def _dead_nodes() -> frozenset[str]:
    return frozenset(str(node["NodeID"]) for node in ray.nodes() if not node["Alive"])


# The number of restarts of this process's actor by Ray.


def restarts_of_this_actor() -> int:
    """Return how many times Ray had restarted this process's actor: of two incarnations, the higher one counts."""
    actor_id = ray.get_runtime_context().get_actor_id()
    assert actor_id is not None, "only an actor has restarts"
    return int(ray._private.state.actors(actor_id)["NumRestarts"])


# Publishes metrics through Ray, whose metrics endpoint Prometheus and Ray's dashboard read.


class RayMetrics:
    """The sink of one process. ``own`` are the labels that all its values have. For one thread at a time.

    Ray's metrics are made when they get their first value. Names and labels are those of ``METRICS``; others are a
    ``KeyError`` or Ray's ``ValueError``.
    """

    def __init__(self, own: Mapping[str, str]) -> None:
        self._own = dict(own)
        self._by_name: dict[str, Counter | Gauge | Histogram] = {}

    def set(self, name: str, value: float, **labels: str) -> None:
        self._metric(name, GAUGE).set(value, {**self._own, **labels})

    def increase(self, name: str, more: float, **labels: str) -> None:
        metric = self._metric(name, COUNTER)
        if more:  # Ray refuses to add 0
            metric.inc(more, {**self._own, **labels})

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._metric(name, HISTOGRAM).observe(value, {**self._own, **labels})

    def _metric(self, name: str, kind: str) -> Any:
        metric = self._by_name.get(name)
        if metric is None:
            declared = METRICS[name]
            assert declared.kind == kind, name
            labels = tuple(dict.fromkeys((*self._own, *declared.labels)))
            if kind == HISTOGRAM:
                metric = Histogram(name, declared.help, list(DURATION_BOUNDS), labels)
            else:
                metric = (Counter if kind == COUNTER else Gauge)(name, declared.help, labels)
            self._by_name[name] = metric
        return metric


MAX_PENDING = 50_000
"""Messages that may wait at once in each concurrency group.

None of them holds a thread, and each query has a separate limit.
"""


def steady_clock() -> Callable[[], float]:
    """Return a clock of seconds since 1970 that never goes back.

    Leases must not depend on a system clock that may be set.
    """
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()


class StateStoreCoordinator:
    """The coordinator of one namespace as a Ray actor. Its methods are the messages of ``CoordinatorPort``.

    Each is a coroutine that waits for the threads of its concurrency group (``threads.py``). Ray restarts the actor.
    Hosts and drivers then report again what they hold. ``token`` is the secret of this cluster, unless an earlier
    coordinator of that name has left one.
    """

    def __init__(self, namespace: str, name: str, token: str, conf: CoordinatorConf) -> None:
        self._node_ip = ray.util.get_node_ip_address()
        who = {"role": "coordinator", "namespace": namespace, "node_ip": self._node_ip}
        set_up_logging(conf.log_format, who)
        try_set_up(conf.tracing, {"role": "coordinator", "namespace": namespace})
        take_ordinary_priority()
        keep_pandas_out()
        self._namespace = namespace
        self._name = name
        store = ClusterStore(namespace, name)
        tokens = AccessTokens(store.secret(token), store, time.time, namespace)
        queries = QueryThreads()
        nodes = NodeWatch()
        self._requests = RequestCounts()
        self._restarts, self._began = restarts_of_this_actor(), time.monotonic()
        clock = steady_clock()
        self._metrics = RayMetrics({"namespace": namespace})
        self._query_metrics = QueryMetrics(self._metrics, clock)
        self._coordinator = Coordinator(
            clock,
            partial(CheckpointStorage.open, requests=self._requests),
            conf,
            tokens=tokens,
            apart=queries.submit,
            dead_nodes=lambda: nodes.dead,
            probe=probe_address,
        )
        self._acknowledgements = RayMetrics({"namespace": namespace})
        self._acknowledging = threading.Lock()
        self._calls = CallServer(self._node_ip, tokens.token(), self._coordinator.submit, self._answered)
        LeaseWatch(self._coordinator, self._publish_counts, self._end).loop().start()
        # Apart from the leases, since removing files may take long.
        BackgroundLoop(
            self._coordinator.maintain,
            1.0,
            name="statestore-maintenance",
            what="begin the maintenance of queries: files that are no longer kept are not removed",
            remedy="Look at the coordinator's log ('statestore logs').",
        ).start()

    def _publish_counts(self, hosts: int, queries: int) -> None:
        self._query_metrics.publish(hosts, queries, self._coordinator.running(), self._requests)
        self._query_metrics.publish_losses(self._coordinator.lost_hosts())

    def _end(self) -> None:
        ray.kill(ray.get_actor(self._name, namespace=self._namespace), no_restart=True)

    async def _answer(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        started = time.perf_counter()
        future = self._coordinator.submit(method, args, kwargs)
        answer = future.result() if future.done() else await asyncio.wrap_future(future)
        self._answered(method, answer, time.perf_counter() - started)
        if method == "heartbeat_host":
            answer = replace(answer, calls=self._calls.address)
        elif method == "describe":
            answer = {**answer, **self._own_description()}
        return answer

    def _own_description(self) -> dict[str, Any]:
        return {
            "namespace": self._namespace,
            "node_ip": self._node_ip,
            "pid": os.getpid(),
            "restarts": self._restarts,
            "up_seconds": round(time.monotonic() - self._began, 1),
            "direct": {"address": self._calls.address, "messages": dict(self._calls.num_messages)},
            "storage_requests": self._requests.read(),
            "storage_trouble": self._requests.trouble.read(),
            "failing_loops": to_builtins(failing_loops.now()),
        }

    def _answered(self, method: str, answer: Any, seconds: float) -> None:
        """Publish how long acknowledgements took, with their time in the queue, and whether a version is prepared."""
        if method != "acknowledge_many":
            return
        with self._acknowledging:  # the actor's own thread, and that of the connections
            self._acknowledgements.observe("statestore_acknowledge_seconds", seconds)
            if any(isinstance(one, Acknowledged) and one.manifest_id is not None for one in answer):
                self._acknowledgements.increase("statestore_prepared_versions_total", 1)

    def __repr__(self) -> str:
        if not hasattr(self, "_namespace"):  # Ray shows it with the error of a failed start
            return "StateStoreCoordinator(not started)"
        return f"StateStoreCoordinator({self._namespace} on {self._node_ip})"


def _coroutine(message: str) -> Callable[..., Any]:
    """Return the method of the actor that answers a message."""

    @wraps(getattr(CoordinatorPort, message))
    async def answer(self: StateStoreCoordinator, *args: Any, **kwargs: Any) -> Any:
        return await self._answer(message, args, kwargs)

    group = GROUPS[message]
    return answer if group is Group.QUERIES else ray.method(concurrency_group=group.value)(answer)


for _message in MESSAGES:
    setattr(StateStoreCoordinator, _message, _coroutine(_message))


def get_or_create_coordinator(
    namespace: str = NAMESPACE, name: str = COORDINATOR_NAME, conf: CoordinatorConf | None = None
) -> Any:
    """Return the coordinator actor of a namespace. Start it if there is none; it outlives the driver that starts it.

    ``CoordinatorConf.resources`` determines its node. Raises ``InvalidRequestError`` if no node has these.
    """
    conf = conf or CoordinatorConf()
    total = ray.cluster_resources()
    missing = {name: amount for name, amount in conf.resources.items() if total.get(name, 0.0) < amount}
    if missing:
        raise InvalidRequestError(
            f"No node of the Ray cluster has the resources {missing}, which CoordinatorConf.resources asks for: the "
            f"coordinator {name!r} could not be started. Start a node with them (ray start --resources=...), or leave "
            "the option out: then the head node is taken."
        )
    return (
        ray.remote(concurrency_groups={g.value: MAX_PENDING for g in Group if g is not Group.QUERIES})(
            StateStoreCoordinator
        )
        .options(
            name=name,
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            max_concurrency=MAX_PENDING,
            resources=dict(conf.resources),
            # Each message is a task of Ray's. Reported, they cost a sixth of the coordinator's CPU, and heartbeats push
            # the user's own tasks out of Ray's list of tasks, which keeps the newest.
            enable_task_events=False,
        )
        .remote(namespace, name, secrets.token_hex(32), conf)
    )
