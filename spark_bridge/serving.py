"""``serve_state``: Ray actors answer queries from a checkpoint or a savepoint, without Spark.

After Flink's State Processor API, which reads a savepoint without its job, and read replicas of databases.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import ray
from msgspec.structs import replace

from backends.background_loop import BackgroundLoop
from backends.conf import StateStoreConf
from backends.exceptions import InvalidStateStoreArgument
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator_conf import NAMESPACE, CoordinatorConf
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.messages import OperatorSpec, QueryRegistration
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from coordinator_actor.savepoints.savepoint_format import METADATA_FILE
from spark_bridge.exceptions import SessionError
from spark_bridge.host_actor import SessionOptions
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.server.limits import RequestLimits
from spark_bridge.session.ended_queries import EndedQueries
from spark_bridge.session.ray_cluster import join_or_start_ray, stop_ray
from spark_bridge.session.settings import Shutdown
from spark_bridge.session.state_cluster import StateCluster
from spark_bridge.state_data.checkpoint_client import query_in_storage
from spark_bridge.transport.tls import TlsConf

# Following a query that runs elsewhere: its completed versions are taken up as its storage shows them.


log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class FollowedQuery:
    """Keeps the served state at the last completed version of a query. A loop looks every ``interval`` seconds.

    A look takes four listings of storage and the manifests that are new. ``look_up`` returns the query as storage has
    it now: another run, with other operators perhaps, once the query has been started again. ``serve`` begins to serve
    that run in place of the last one. Each look tells the coordinator how old the last successful one is, so that
    answers can carry their possible lag. ``clock`` is monotonic, in seconds.
    """

    registration: QueryRegistration
    _coordinator: CoordinatorPort
    _look_up: Callable[[], QueryRegistration]
    _serve: Callable[[QueryRegistration], None]
    _interval: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._looked_at = self.clock()
        self._loop = BackgroundLoop(
            self.look,
            self._interval,
            name="statestore-follow",
            what=f"follow the query at {self.registration.state_location}: an old version is served",
            remedy="Look at the storage of the checkpoint, at its credentials, and at the log of the serving process. "
            "It retries by itself; answers carry their possible lag.",
        )

    def start(self) -> None:
        self._loop.start()

    def close(self) -> None:
        self._loop.close(timeout=5)

    def look(self) -> None:
        """Follow the versions completed since the last look. Raises the errors of storage and the coordinator."""
        began = self.clock()
        answer = self._coordinator.take_up_versions(self.registration.run_id, began - self._looked_at)
        if answer.refusal is not None:
            log.info("Run %s is followed no more: %s", self.registration.run_id, answer.refusal)
            self.registration = self._look_up()
            self._serve(self.registration)
        self._looked_at = began


FOLLOW_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def serve_state(
    location: str,
    operators: Sequence[str] | None = None,
    *,
    replicas: int = 1,
    name: str = "serving",
    follow: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    scratch: str | None = None,
    ray_address: str | None = None,
    namespace: str = NAMESPACE,
    conf: StateStoreConf | None = None,
    tls: TlsConf | None = None,
    query_port: int = 0,
    request_limits: RequestLimits | None = None,
) -> StateServing:
    """Serve the state at ``location``, a checkpoint or a savepoint, from Ray actors; return a handle, which ends them.

        with serve_state("s3://bucket/ck", replicas=2) as serving:
            serving.client().get("user_totals", 42)

    ``replicas`` hosts, spread over the nodes of the Ray cluster, share the partitions of the ``operators`` (default:
    all): each partition is loaded where it is first asked for, and if a host is lost the others load its partitions.
    The checkpoint is neither written nor locked, and its retention does not wait. With ``follow`` the hosts follow each
    version that a running query completes, about a second behind, and read from storage alone: so reads do not touch
    the stream. Its retention ignores them: versions that the query no longer keeps cannot be read here either.

    Clients find the state by ``name``: ``QueryableStateClient.connect(coordinator_name=serving.coordinator_name)`` in
    the cluster, or by ``serving.addresses`` and a token. A savepoint is restored to ``scratch`` first, a new directory
    that all nodes can read; by default, for a savepoint on a local disk, a temporary one. ``state_location`` is the
    value of ``spark.statestore.location`` when the query ran, if it was set. The other options are those of
    ``init_spark``. The actors end with ``stop``, or with this process.

    Raises ``InvalidStateStoreArgument`` for an unknown operator, a ``name`` that Ray cannot take and ``replicas`` below
    1; ``SessionError`` if the name is already in use; ``MissingFileError`` if the location has no state. Raises
    ``VersionNotFoundError`` if no version is completed, and ``EnvironmentProblemError`` if no Ray cluster answers at
    ``ray_address``.
    """
    if replicas < 1:
        raise InvalidStateStoreArgument(f"replicas={replicas}: give 1 or more.")
    if not _NAME.fullmatch(name):
        raise InvalidStateStoreArgument(f"name={name!r}: give letters, digits, '-', '_' and '.', at most 100.")
    options = SessionOptions(
        num_hosts=replicas,
        namespace=namespace,
        coordinator_name=f"StateServing-{name}",
        conf=conf or StateStoreConf(),
        coordinator_conf=CoordinatorConf(report_timeout=0.0),
        tls=tls,
        query_port=query_port,
        request_limits=request_limits or RequestLimits(),
    )
    with ExitStack() as undo:
        options_of_storage = dict(storage_options or {})
        if CheckpointStorage.open(location, options_of_storage).exists(METADATA_FILE):
            if follow:
                raise InvalidStateStoreArgument(f"follow=True: {location} is a savepoint, which has one version.")
            location, state_location = _restored(location, operators, scratch, options_of_storage, undo), None
        place = find_state(location, state_location, options_of_storage)

        def look_up() -> QueryRegistration:
            versions = StateVersions.look(place)
            newest = versions.resolve(None)
            registration = query_in_storage(versions, newest, name, options.session_id, is_followed=follow)
            return replace(registration, operators=_chosen(registration, operators))

        registration = look_up()
        if join_or_start_ray(ray_address, 1):
            undo.callback(stop_ray)
        _require_free(options)
        shutdown = Shutdown()
        undo.callback(shutdown.begin)
        cluster = StateCluster(options, _nodes, shutdown)
        cluster.begin()
        undo.callback(cluster.stop)
        served = EndedQueries(cluster.leases, cluster.coordinator, None, shutdown)
        undo.callback(served.close)
        refusal = cluster.coordinator.serve_ended(registration).refusal
        if refusal is not None:
            raise SessionError(f"{location} cannot be served: {refusal} Try again.")
        served.ended(registration)
        if follow:
            followed = FollowedQuery(registration, cluster.coordinator, look_up, served.ended, FOLLOW_SECONDS)
            undo.callback(followed.close)
            followed.start()
        serving = StateServing(cluster, registration, undo.pop_all())
    log.info("Serving %s from %d hosts", location, replicas)
    return serving


class StateServing:
    """State that is served by Ray actors of this process. A context manager; ``stop`` ends the actors."""

    def __init__(self, cluster: StateCluster, registration: QueryRegistration, undo: ExitStack) -> None:
        self._cluster = cluster
        self._undo = undo
        self.operators = tuple(o.name for o in registration.operators)
        """The names of the operators that are served."""

    @property
    def coordinator_name(self) -> str:
        """Return the ``coordinator_name`` that clients in the Ray cluster use to find the state."""
        return self._cluster.options.coordinator_name

    @property
    def addresses(self) -> list[str]:
        """Return the addresses at which the hosts answer query clients, ``ip:port`` each."""
        return self._cluster.query_addresses()

    @property
    def token(self) -> str:
        """Return the secret token, for ``token=`` of a client at one of the ``addresses``."""
        return self._cluster.token

    def client(self, **options: Any) -> QueryableStateClient:
        """Return a new query client of the served state; ``options`` are those of ``QueryableStateClient.connect``."""
        endpoints: dict[str, Any] = {
            "namespace": self._cluster.options.namespace,
            "coordinator_name": self.coordinator_name,
        }
        if self._cluster.options.tls is not None:
            endpoints["tls"] = self._cluster.options.tls
        return QueryableStateClient.connect(**{**endpoints, **options})

    def stop(self) -> None:
        """End the actors; nothing happens if they have ended."""
        self._undo.close()

    def __enter__(self) -> StateServing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def _restored(
    savepoint: str, operators: Sequence[str] | None, scratch: str | None, options: Mapping[str, str], undo: ExitStack
) -> str:
    """Restore a savepoint and return the new checkpoint's location."""
    if scratch is None:
        if not CheckpointStorage.open(savepoint, dict(options)).is_local:
            raise InvalidStateStoreArgument(
                f"{savepoint} is a savepoint, which is restored before it is served: give scratch=, a new directory "
                "that all nodes can read, such as one next to the savepoint."
            )
        directory = undo.enter_context(TemporaryDirectory(prefix="statestore-serving-"))
        scratch = str(Path(directory) / "checkpoint")
    log.info("Restoring the savepoint %s to %s", savepoint, scratch)
    restore_into_checkpoint(savepoint, scratch, operators=operators, storage_options=options)
    return scratch


def _chosen(registration: QueryRegistration, names: Sequence[str] | None) -> tuple[OperatorSpec, ...]:
    by_name = {o.name: o for o in registration.operators}
    unknown = sorted(set(names or ()) - set(by_name))
    if unknown or names == []:
        raise InvalidStateStoreArgument(
            f"operators={names}: give some of those that the checkpoint at {registration.checkpoint_location} has: "
            f"{', '.join(map(repr, by_name))}."
        )
    return registration.operators if names is None else tuple(by_name[name] for name in dict.fromkeys(names))


def _require_free(options: SessionOptions) -> None:
    """Raise ``SessionError`` if state is served by that name already."""
    try:
        ray.get_actor(options.coordinator_name, namespace=options.namespace)
    except ValueError:
        return
    raise SessionError(
        f"State is served under the name {options.coordinator_name.removeprefix('StateServing-')!r} in this cluster "
        "already: stop that first, or give name=."
    )


def _nodes() -> dict[str, int]:
    """Return the IP addresses of the nodes of the Ray cluster: a host may run on each."""
    return {str(node["NodeManagerAddress"]): 1 for node in ray.nodes() if node["Alive"]}
