"""Starting and ending a session of Spark with the state store: ``init_spark``, ``attach``, ``stop_spark``."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from backends.conf import StateStoreConf
from backends.tracing import set_up
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE, CoordinatorConf
from spark_bridge.exceptions import EnvironmentProblemError, SessionError
from spark_bridge.host_actor import DEFAULT_RECOVERY_TIMEOUT, SessionOptions, require_num_hosts
from spark_bridge.queryable.server.limits import RequestLimits
from spark_bridge.session import ray_cluster
from spark_bridge.session.current import Session, begin_session, current_cluster, end_session, require_no_session
from spark_bridge.session.executors import SessionExecutors, await_executors, placement_group_of
from spark_bridge.session.packages import MAVEN, is_jvm_failure, jar_settings, unresolved
from spark_bridge.transport.tls import TlsConf

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from ray.util.placement_group import PlacementGroup

    from spark_bridge.session.state_cluster import StateCluster

log = logging.getLogger(__name__)

LOG_LEVEL = "spark.log.level"
_WITHOUT_RAYDP = "start Spark without RayDP and call attach(spark)"
INCOMPATIBLE = (
    ("<1.7.dev0", ">=4", f"pip install 'ray-statestore[raydp-spark4]', or {_WITHOUT_RAYDP}"),
    (">=1.7.dev0", "<4", f"pip install 'ray-statestore[raydp]', or {_WITHOUT_RAYDP}"),
    ("<1.8.dev0", ">=4.3", _WITHOUT_RAYDP),
)
"""Versions of RayDP and of PySpark that are known not to work together, and the remedy."""


def init_spark(
    app_name: str,
    num_executors: int = 2,
    executor_cores: int = 1,
    executor_memory: str | int = "1g",
    *,
    configs: dict[str, str] | None = None,
    packages: Sequence[str] = (),
    ray_address: str | None = None,
    namespace: str = NAMESPACE,
    coordinator_name: str = COORDINATOR_NAME,
    num_hosts: int | None = None,
    state_location: str | None = None,
    conf: StateStoreConf | None = None,
    coordinator_conf: CoordinatorConf | None = None,
    recovery_timeout: float = DEFAULT_RECOVERY_TIMEOUT,
    keep_serving: float | None = None,
    tls: TlsConf | None = None,
    query_port: int = 0,
    request_limits: RequestLimits | None = None,
    **raydp_options: Any,
) -> SparkSession:
    """Start Spark on Ray with RayDP, and the state store on its executors' machines; return the Spark session.

    Ray: joins the cluster that this process is in, else the one that ``ray_address`` or ``RAY_ADDRESS`` names, else the
    one that runs on this machine; else starts a cluster, which ``stop_spark`` stops again.

    ``configs`` are Spark settings; ``raydp_options`` go to ``raydp.init_spark``. ``packages`` are jars for the driver
    and the executors, such as the connector of Kafka: paths of jars, directories of jars, or Maven coordinates
    (``"org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.7"``), which Spark resolves. ``num_hosts`` StateStoreHost actors
    are started (default: one per executor core), on all machines that have executors; they take no CPU slot. Hosts also
    start on the machines of executors that come later, and replace hosts that are lost with their machine.
    ``state_location`` puts the state of each query into ``<state_location>/<query id>`` instead of its checkpoint
    location. ``recovery_timeout`` (seconds) is how long a task waits for a new owner of its state partition, and how
    long for the next progress of a partition that is being loaded. ``keep_serving`` (seconds) is how long hosts keep
    answering from the last completed version of a query that has ended: None for as long as the session lives, 0 to
    stop at once. ``coordinator_conf`` has leases, timeouts and the placement of the coordinator (default: the head
    node); it applies if the session finds no coordinator in the namespace and so starts one. ``tls`` encrypts the
    messages between tasks, query clients and hosts. Host i answers queries at ``query_port + i``, also after a restart;
    with 0 it takes any free port, and clients outside need the new port after a restart. ``request_limits`` are the
    limits of these answers.

    Raises ``EnvironmentProblemError`` if Java is missing, packages cannot be resolved, or the versions of RayDP and
    PySpark do not fit together. Raises ``SessionError`` if this process has a session already, ``packages`` do not
    exist or do not fit this Spark, ``num_hosts`` is below 1 or ``keep_serving`` below 0.
    Raises ``TlsError`` if certificates do not fit, and ``InvalidRequestError`` if no node can take the coordinator.
    """
    require_no_session()
    options = SessionOptions(
        num_hosts=num_hosts,
        namespace=namespace,
        coordinator_name=coordinator_name,
        state_location=state_location,
        conf=conf or StateStoreConf(),
        coordinator_conf=coordinator_conf,
        recovery_timeout=recovery_timeout,
        keep_serving=keep_serving,
        tls=tls,
        query_port=query_port,
        request_limits=request_limits or RequestLimits(),
    )
    ray_cluster.ensure_java()
    _check_pair()
    user_configs = dict(configs or {})
    user_configs |= jar_settings(packages, user_configs, metadata.version("pyspark"))
    # Without these variables RayDP's workers run the python3 that is first on the PATH.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    began, cores = time.monotonic(), num_executors * executor_cores
    tell_step("joining or starting Ray")
    started_ray = ray_cluster.join_or_start_ray(ray_address, cores)
    import raydp

    ray_cluster.stop_raydp_at_exit()
    group: PlacementGroup | None = None
    cluster: StateCluster | None = None
    try:
        executors = SessionExecutors(cores)
        cluster = _start_cluster(options, executors)  # coordinator and hosts start while Spark does
        if (strategy := raydp_options.pop("placement_group_strategy", None)) is not None:
            group = placement_group_of(strategy, num_executors, executor_cores, executor_memory)
            raydp_options |= {"placement_group": group, "placement_group_bundle_indexes": None}
        tell_step("starting Spark, the coordinator and the hosts")
        spark = raydp.init_spark(
            app_name,
            num_executors,
            executor_cores,
            executor_memory,
            configs=_spark_configs(user_configs, cores),
            **raydp_options,
        )
        if LOG_LEVEL in user_configs:
            _set_log_level(spark, user_configs[LOG_LEVEL])
        tell_step(f"waiting for {num_executors} executors")
        await_executors(spark, num_executors)
        executors.spark = spark
        _join(spark, cluster, raydp_app=app_name, started_ray=started_ray, group=group)
    except BaseException as error:
        try:
            if cluster is not None:
                cluster.give_up()
        finally:
            ray_cluster.stop_raydp(group)
        if started_ray:
            ray_cluster.stop_ray()
        if MAVEN in user_configs and is_jvm_failure(error):
            raise unresolved(user_configs, error) from error
        raise
    tell_step(f"the session is ready after {time.monotonic() - began:.1f} s")
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
    keep_serving: float | None = None,
    tls: TlsConf | None = None,
    query_port: int = 0,
    request_limits: RequestLimits | None = None,
) -> SparkSession:
    """Give a Spark session made elsewhere (RayDP, ``local[n]``, any other) a state store in Ray; return that session.

    Joins or starts Ray as ``init_spark`` does, and sets on the live session the settings that stateful operators need.
    The options are those of ``init_spark``. ``stop_spark`` ends the state store and leaves the Spark session running.
    On Spark that runs Ray itself (``setup_ray_on_spark``) Ray must have left cores to Spark. Raises ``SessionError`` if
    this process has a session already, ``TlsError`` if certificates do not fit, ``EnvironmentProblemError`` if no cores
    are left to streams. Raises ``SessionError`` for a session of Spark Connect.
    """
    from spark_bridge.operators.map_in_arrow import CONNECT_REMEDY, is_connect  # not above: doctor runs without Spark

    require_no_session()
    options = SessionOptions(
        num_hosts=num_hosts,
        namespace=namespace,
        coordinator_name=coordinator_name,
        state_location=state_location,
        conf=conf or StateStoreConf(),
        coordinator_conf=coordinator_conf,
        recovery_timeout=recovery_timeout,
        keep_serving=keep_serving,
        tls=tls,
        query_port=query_port,
        request_limits=request_limits or RequestLimits(),
    )
    if is_connect(spark):
        raise SessionError(CONNECT_REMEDY)
    ray_cluster.require_cores(spark)
    started_ray = ray_cluster.join_or_start_ray(ray_address, 1)
    cluster: StateCluster | None = None
    try:
        executors = SessionExecutors()
        executors.spark = spark
        cluster = _start_cluster(options, executors)
        _join(spark, cluster, raydp_app=None, started_ray=started_ray)
    except BaseException:
        if cluster is not None:
            cluster.give_up()
        if started_ray:
            ray_cluster.stop_ray()
        raise
    return spark


def scale_hosts(num_hosts: int | None) -> None:
    """Set the number of hosts in this process's session to ``num_hosts``; None for one per executor core.

    Returns when further hosts are being started. Partitions move to them, and away from leaving hosts, while the
    streams run: the new owner loads each partition first, and takes it over between two batches. Raises
    ``SessionError`` if this process has no session or ``num_hosts`` is below 1.
    """
    require_num_hosts(num_hosts)
    current_cluster().placement.scale(num_hosts)


def stop_spark() -> None:
    """End this process's session: queries, hosts, Spark if ``init_spark`` made it, Ray if this process started it."""
    if (session := end_session()) is not None:
        session.stop()


def tell_step(step: str) -> None:
    """Tell the user what a start does now: in the log, or as a line of the terminal if the log does not show it."""
    if log.isEnabledFor(logging.INFO):
        log.info("Start of the session: %s", step)
    elif sys.stderr.isatty():
        print(f"ray-statestore: {step}", file=sys.stderr, flush=True)


def _start_cluster(options: SessionOptions, executors: SessionExecutors) -> StateCluster:
    """Start the coordinator and, on machines that have executors or will, the hosts; do not wait for them."""
    from spark_bridge.session.settings import Shutdown, spark_is_over
    from spark_bridge.session.state_cluster import StateCluster

    shutdown = Shutdown(lambda: executors.spark is not None and spark_is_over(executors.spark))
    return StateCluster(options, executors, shutdown)


def _join(
    spark: SparkSession,
    cluster: StateCluster,
    *,
    raydp_app: str | None,
    started_ray: bool,
    group: PlacementGroup | None = None,
) -> None:
    """Connect Spark with its state cluster, which answers then, and make the session this process's.

    ``raydp_app`` is the name of the application that ``init_spark`` has started by RayDP, and ``group`` the placement
    group that it has made for the executors.
    """
    from spark_bridge.session.executors import LostExecutors
    from spark_bridge.session.listener import StateStoreQueryListener
    from spark_bridge.session.ray_cluster import SparkMasterWatch
    from spark_bridge.session.settings import STATE_LOCATION_CONF, apply_settings, redact
    from spark_bridge.task import executor as local_properties

    options, shutdown = cluster.options, cluster.shutdown
    # After Ray's start, whose hook may have set a provider.
    set_up(options.tracing, {"role": "driver", "namespace": options.namespace})
    apply_settings(spark)
    redact(spark, local_properties.TOKEN)
    if options.state_location is not None:
        spark.conf.set(STATE_LOCATION_CONF, options.state_location)
    tell_step("waiting for the coordinator and the hosts")
    cluster.begin()
    listener = StateStoreQueryListener(spark, cluster)
    spark.streams.addListener(listener)
    listener.publish_endpoints()
    cluster.placement.publish = listener.publish_addresses
    lost_executors = LostExecutors(spark, shutdown, by_raydp=raydp_app is not None)
    master = SparkMasterWatch(spark, raydp_app, shutdown) if raydp_app is not None else None

    let_ray_start = ray_cluster.keep_ray_stopped()

    def stop() -> None:
        lost_executors.close()
        try:
            if master is not None:
                master.close()
            if spark.sparkContext._jsc is not None:
                for query in spark.streams.active:
                    query.stop()
                spark.streams.removeListener(listener)
            listener.close()
            cluster.stop()
        finally:
            shutdown.begin()
            let_ray_start()
            if raydp_app is not None:
                ray_cluster.stop_raydp(group)
            if started_ray:
                ray_cluster.stop_ray()

    begin_session(Session(spark, cluster, stop))


def _set_log_level(spark: SparkSession, level: str) -> None:
    """Set log4j's level, which Ray's start in the driver's JVM resets to INFO without Spark 4 noticing."""
    log4j = spark._jvm.org.apache.logging.log4j
    log4j.core.config.Configurator.setRootLevel(log4j.Level.toLevel(level))


def _spark_configs(user_configs: dict[str, str], cores: int) -> dict[str, str]:
    from spark_bridge.session.executors import SHUFFLE, MasterSettings, master_java_options, master_on_head
    from spark_bridge.session.settings import EXCLUDED_RULES, STATELESS_AQE, excluded_rules

    ours = {
        **master_on_head(user_configs),
        **SHUFFLE,
        "spark.sql.shuffle.partitions": str(max(cores, 1)),
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
        "spark.sql.session.timeZone": "UTC",
    }
    configs = MasterSettings({**ours, **user_configs, **master_java_options(user_configs)})
    configs[EXCLUDED_RULES] = excluded_rules(configs.get(EXCLUDED_RULES))
    configs[STATELESS_AQE] = "false"
    return configs


def _check_pair() -> None:
    try:
        raydp, pyspark = metadata.version("raydp"), metadata.version("pyspark")
    except metadata.PackageNotFoundError as error:
        raise EnvironmentProblemError(
            f"init_spark needs the package {error.name}, which is not installed: pip install 'ray-statestore[raydp]' "
            f"for Spark 3.5, or 'ray-statestore[raydp-spark4]' for Spark 4.0 to 4.2; or {_WITHOUT_RAYDP}."
        ) from error
    if (remedy := remedy_of_pair(raydp, pyspark)) is not None:
        raise EnvironmentProblemError(f"raydp {raydp} and pyspark {pyspark} do not work together: {remedy}.")


def remedy_of_pair(raydp: str, pyspark: str) -> str | None:
    """Return the remedy if these versions are known not to work together, else None."""
    for *specifiers, remedy in INCOMPATIBLE:
        pairs = zip(specifiers, (raydp, pyspark), strict=True)
        if all(SpecifierSet(one).contains(version, prereleases=True) for one, version in pairs):
            return remedy
    return None
