"""Joining Spark and the state store: ``init_spark``, ``attach``, ``stop_spark``."""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.conf import StateStoreConf
from spark_bridge.exceptions import EnvironmentProblemError, SessionError
from spark_bridge.session.java import ensure_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from coordinator_actor.coordinator import CoordinatorConf
    from spark_bridge.queryable.server.request_limits import RequestLimits
    from spark_bridge.session.listener import StateStoreQueryListener
    from spark_bridge.session.state_cluster import StateCluster
    from spark_bridge.transport.tls import TlsConf

log = logging.getLogger(__name__)

NAMESPACE = "statestore"
COORDINATOR_NAME = "StateStoreCoordinator"
DEFAULT_RECOVERY_TIMEOUT = 60.0
LOG_LEVEL = "spark.log.level"
PAIRS = {"1.6": "3.5", "1.7": "4.2"}
"""RayDP release line and the PySpark line it works with."""


@dataclass
class _Session:
    spark: SparkSession
    cluster: StateCluster
    listener: StateStoreQueryListener
    by_raydp: bool
    started_ray: bool


_current: _Session | None = None


def init_spark(
    app_name: str,
    num_executors: int = 2,
    executor_cores: int = 1,
    executor_memory: str | int = "1g",
    *,
    configs: dict[str, str] | None = None,
    ray_address: str | None = None,
    namespace: str = NAMESPACE,
    coordinator_name: str = COORDINATOR_NAME,
    num_hosts: int | None = None,
    state_location: str | None = None,
    conf: StateStoreConf | None = None,
    coordinator_conf: CoordinatorConf | None = None,
    recovery_timeout: float = DEFAULT_RECOVERY_TIMEOUT,
    tls: TlsConf | None = None,
    query_port: int = 0,
    request_limits: RequestLimits | None = None,
    **raydp_options: Any,
) -> SparkSession:
    """Start Spark on Ray with RayDP, and the state store beside its executors.

    Joins the Ray cluster that this process is in, or that ``ray_address`` or ``RAY_ADDRESS`` names,
    or that runs on this machine; else starts one, which ``stop_spark`` stops again. ``configs`` are
    Spark settings and ``raydp_options`` go to ``raydp.init_spark``. ``num_hosts`` StateStoreHost
    actors are started (default: one per executor core); they take no CPU slot.
    ``state_location`` puts the state of each query into ``<state_location>/<query id>`` instead of
    its checkpoint location. ``recovery_timeout`` (seconds) is how long a task waits for a state
    partition's new owner. ``coordinator_conf`` (its leases and timeouts) counts for the session that
    finds no coordinator in the namespace and so starts it. ``tls`` encrypts what tasks, query clients and hosts say to
    each other. Host i answers queries at ``query_port + i``, also after a restart (0: at any free port, which a client outside
    must be told of again); ``request_limits`` are what it allows.

    Raises ``EnvironmentProblemError`` if Java is missing or the versions of RayDP and PySpark do
    not fit, ``SessionError`` if this process has a session already, ``TlsError`` if certificates do not fit.
    """
    _require_no_session()
    if tls is not None:
        tls.check()
    ensure_java()
    _check_pair()
    # RayDP's workers otherwise run whatever python3 is first on the PATH.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    started_ray = _join_or_start_ray(ray_address, num_executors * executor_cores)
    import raydp

    try:
        spark = raydp.init_spark(
            app_name,
            num_executors,
            executor_cores,
            executor_memory,
            configs=_spark_configs(configs, num_executors * executor_cores),
            **raydp_options,
        )
        if configs is not None and LOG_LEVEL in configs:
            _set_log_level(spark, configs[LOG_LEVEL])
        _join(
            spark,
            namespace=namespace,
            coordinator_name=coordinator_name,
            num_hosts=num_hosts or num_executors * executor_cores,
            state_location=state_location,
            conf=conf or StateStoreConf(),
            coordinator_conf=coordinator_conf,
            recovery_timeout=recovery_timeout,
            tls=tls,
            query_port=query_port,
            request_limits=request_limits,
            by_raydp=True,
            started_ray=started_ray,
        )
    except BaseException:
        raydp.stop_spark()
        if started_ray:
            _stop_ray()
        raise
    return spark


def attach(
    spark: SparkSession,
    *,
    ray_address: str | None = None,
    namespace: str = NAMESPACE,
    coordinator_name: str = COORDINATOR_NAME,
    num_hosts: int | None = None,
    state_location: str | None = None,
    conf: StateStoreConf | None = None,
    coordinator_conf: CoordinatorConf | None = None,
    recovery_timeout: float = DEFAULT_RECOVERY_TIMEOUT,
    tls: TlsConf | None = None,
    query_port: int = 0,
    request_limits: RequestLimits | None = None,
) -> SparkSession:
    """Give a Spark session made elsewhere (RayDP, ``local[n]``, any other) a state store in Ray.

    Finds or starts Ray as ``init_spark`` does, sets what stateful operators need on the live
    session, and returns it. ``stop_spark`` ends the state store and leaves the session running.
    Raises ``SessionError`` if this process has a session already, ``TlsError`` if certificates do not fit.
    """
    _require_no_session()
    if tls is not None:
        tls.check()
    started_ray = _join_or_start_ray(ray_address, 1)
    try:
        _join(
            spark,
            namespace=namespace,
            coordinator_name=coordinator_name,
            num_hosts=num_hosts or max(1, min(spark.sparkContext.defaultParallelism, os.cpu_count() or 1)),
            state_location=state_location,
            conf=conf or StateStoreConf(),
            coordinator_conf=coordinator_conf,
            recovery_timeout=recovery_timeout,
            tls=tls,
            query_port=query_port,
            request_limits=request_limits,
            by_raydp=False,
            started_ray=started_ray,
        )
    except BaseException:
        if started_ray:
            _stop_ray()
        raise
    return spark


def stop_spark() -> None:
    """End this process's session: queries, hosts, Spark if ``init_spark`` made it, Ray if we started it."""
    global _current
    session, _current = _current, None
    if session is None:
        return
    try:
        if session.spark.sparkContext._jsc is not None:
            for query in session.spark.streams.active:
                query.stop()
            session.spark.streams.removeListener(session.listener)
        session.listener.close()
        session.cluster.stop()
    finally:
        if session.by_raydp:
            import raydp

            raydp.stop_spark()
        if session.started_ray:
            _stop_ray()


def current_cluster() -> StateCluster:
    """The state cluster of this process's session. Raises ``SessionError`` if there is none."""
    if _current is None:
        raise SessionError("This process has no state store session; call init_spark or attach first.")
    return _current.cluster


def current_spark() -> SparkSession | None:
    """The Spark session of this process's session; None if there is none."""
    return None if _current is None else _current.spark


def _require_no_session() -> None:
    if _current is not None:
        raise SessionError("This process has a state store session already; call stop_spark() before another one.")


def _join(
    spark: SparkSession,
    *,
    namespace: str,
    coordinator_name: str,
    num_hosts: int,
    state_location: str | None,
    conf: StateStoreConf,
    coordinator_conf: CoordinatorConf | None,
    recovery_timeout: float,
    tls: TlsConf | None,
    query_port: int,
    request_limits: RequestLimits | None,
    by_raydp: bool,
    started_ray: bool,
) -> None:
    from spark_bridge.session.listener import STATE_LOCATION_CONF, StateStoreQueryListener
    from spark_bridge.session.settings import apply_settings, redact
    from spark_bridge.session.state_cluster import StateCluster
    from spark_bridge.task import state_task

    global _current
    apply_settings(spark)
    redact(spark, state_task.TOKEN)
    if state_location is not None:
        spark.conf.set(STATE_LOCATION_CONF, state_location)
    cluster = StateCluster(
        session_id=uuid.uuid4().hex[:8],
        namespace=namespace,
        coordinator_name=coordinator_name,
        num_hosts=num_hosts,
        executor_ips=_executor_ips(spark),
        conf=conf,
        coordinator_conf=coordinator_conf,
        recovery_timeout=recovery_timeout,
        tls=tls,
        query_port=query_port,
        request_limits=request_limits,
    )
    listener = StateStoreQueryListener(spark, cluster)
    spark.streams.addListener(listener)
    listener.publish_endpoints()
    _current = _Session(spark, cluster, listener, by_raydp, started_ray)


def _set_log_level(spark: SparkSession, level: str) -> None:
    """Ray's start in the driver's JVM puts log4j back to INFO, and Spark 4 then takes its own level for set."""
    log4j = spark._jvm.org.apache.logging.log4j
    log4j.core.config.Configurator.setRootLevel(log4j.Level.toLevel(level))


def _executor_ips(spark: SparkSession) -> list[str]:
    """Where the executors are, as IP addresses; the driver's own if there are none."""
    infos = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
    hosts = [str(info.host()) for info in infos]
    own = hosts[:1]
    return [socket.gethostbyname(h) for h in (hosts[1:] or own)]


def _spark_configs(given: dict[str, str] | None, cores: int) -> dict[str, str]:
    from spark_bridge.session.settings import EXCLUDED_RULES, STATELESS_AQE, excluded_rules

    ours = {
        "spark.sql.shuffle.partitions": str(max(cores, 1)),
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
        "spark.sql.session.timeZone": "UTC",
    }
    configs = {**ours, **(given or {})}
    configs[EXCLUDED_RULES] = excluded_rules(configs.get(EXCLUDED_RULES))
    configs[STATELESS_AQE] = "false"
    return configs


def _check_pair() -> None:
    versions = {}
    for package in ("raydp", "pyspark"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError as error:
            raise EnvironmentProblemError(
                f"The package {package} is not installed; install ray-statestore with pip."
            ) from error
    raydp_line = ".".join(versions["raydp"].split(".")[:2])
    pyspark_line = ".".join(versions["pyspark"].split(".")[:2])
    wanted = PAIRS.get(raydp_line)
    if wanted != pyspark_line:
        pairs = ", ".join(f"raydp {r}.* with pyspark {p}.*" for r, p in PAIRS.items())
        raise EnvironmentProblemError(
            f"raydp {versions['raydp']} and pyspark {versions['pyspark']} do not work together; install one of these pairs: {pairs}."
        )


def _join_or_start_ray(address: str | None, cpus: int) -> bool:
    """Join a Ray cluster or start one here; True if it was started."""
    import ray

    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, "namespace": NAMESPACE}
    named = address or os.environ.get("RAY_ADDRESS")
    if named:
        try:
            ray.init(address=named, **quiet)
        except ConnectionError as error:
            raise EnvironmentProblemError(f"No Ray cluster answers at {named!r}: {error}") from error
        return False
    running = _running_ray()
    if running is not None:
        try:
            ray.init(address=running, **quiet)
            return False
        except ConnectionError:
            log.warning(
                "The Ray cluster at %s, which this machine remembers, does not answer; starting another",
                running,
            )
    # Executors and their Python workers run as they do without Ray, not with Ray's niceness of 15.
    config = {"worker_niceness": int(os.environ.get("RAY_worker_niceness", "0"))}  # noqa: SIM112 - its name
    num_cpus = max(cpus, os.cpu_count() or 1)
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=None, _system_config=config, **quiet)
    return True


def _running_ray() -> str | None:
    """The cluster that ``ray start`` has left on record for this machine, if something listens there."""
    record = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        address = record.read_text().strip()
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return address
    except (OSError, ValueError):
        return None


def _stop_ray() -> None:
    import ray

    ray.shutdown()


__all__ = ["attach", "current_cluster", "init_spark", "stop_spark"]
