"""Ray on Spark: a Ray cluster within a Spark application (``ray.util.spark``), with the settings that state needs.

Each Ray worker is a Spark job of one task that never ends, and keeps the cores of that task. The stream's tasks need
cores beside them.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_bridge.exceptions import EnvironmentProblemError
from spark_bridge.session.cluster.executors import DRIVER_ID, EXECUTOR_POLL_SECONDS, EXECUTOR_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AUTH_MODE = "RAY_AUTH_MODE"
SETTLED_SECONDS = 5.0
"""Executors that have not come within this many seconds after the last ones are not on their way."""
RAY_JOB_GROUP = "ray-cluster-"
"""With this begin the job groups of the Spark jobs that are Ray's workers."""


@dataclass(frozen=True)
class CoreUse:
    """The cores of all executors of a Spark application, and those that Ray's workers keep."""

    all: int
    of_ray: int


def setup_ray_on_spark(spark: SparkSession, num_workers: int, cpus_per_worker: int = 1, **options: Any) -> str:
    """Start a Ray cluster on a Spark cluster, for ``attach(spark)``; return its address.

    The head runs beside Spark's driver, and ``num_workers`` Ray workers within Spark's executors, each in
    ``cpus_per_worker`` of their cores. ``options`` go to ``ray.util.spark.setup_ray_cluster``;
    ``ray.util.spark.shutdown_ray_cluster()`` ends the cluster.

    Raises ``EnvironmentProblemError``, before anything is started, if Ray's token authentication is on, with which Ray
    cannot start on Spark. Raises the same if no cores would be left for streams, if the program ``ray`` is not on the
    PATH, or if the session is ``local[n]``.
    """
    require_no_token()
    if shutil.which("ray") is None:
        raise EnvironmentProblemError(
            f"The program 'ray' is not on the PATH ({os.environ.get('PATH', '')}), by which Ray starts its nodes. Put "
            f"the directory of the environment there, probably {Path(sys.executable).parent}, on the machines of "
            "executors too (spark.executorEnv.PATH), and start Spark again."
        )
    if spark.sparkContext._jsc.sc().isLocal():
        raise EnvironmentProblemError(
            f"Spark runs as {spark.sparkContext.master}, which has no executors for Ray's workers. Call attach(spark) "
            "alone, which starts Ray on this machine; or use a Spark cluster."
        )
    require_cores(spark, num_workers * cpus_per_worker)
    from ray.util.spark import setup_ray_cluster

    setup_ray_cluster(
        min_worker_nodes=num_workers,
        max_worker_nodes=num_workers,
        num_cpus_worker_node=cpus_per_worker,
        **{"num_gpus_worker_node": 0, **options},  # Ray takes both numbers or none
    )
    return os.environ["RAY_ADDRESS"]


def require_no_token() -> None:
    """Raise ``EnvironmentProblemError`` unless Ray's token authentication is switched off for this process."""
    mode = os.environ.get(AUTH_MODE)
    if mode is None or mode.lower() != "disabled":
        raise EnvironmentProblemError(
            f"Ray does not start on Spark with its token authentication, which is on by default ({AUTH_MODE} is "
            f"{'not set' if mode is None else repr(mode)}): Ray's workers fail with InvalidAuthToken. Set "
            f"{AUTH_MODE}=disabled in the environment of this program before Python starts, and let nobody but the "
            "cluster's machines reach Ray's ports."
        )


def require_cores(spark: SparkSession, more: int = 0) -> None:
    """Raise ``EnvironmentProblemError`` if Ray's workers leave no core of Spark's executors to streams.

    ``more`` are cores that further Ray workers are going to take. Executors that are still on their way are waited for.
    Applications with dynamic allocation get executors when they need some, and are not looked at, nor are those that
    have no Ray workers.
    """
    context = spark.sparkContext
    if context._jsc.sc().isLocal() or context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        return
    task_cpus = int(context.getConf().get("spark.task.cpus", "1"))
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
    """Return why streams would wait for ever beside Ray's workers, or None if they would not."""
    taken = use.of_ray + more
    if not taken or use.all - taken >= task_cpus:
        return None
    return (
        f"Ray's workers take {taken} of the {use.all} cores that Spark's executors have, and so the tasks of streams, "
        f"which need {task_cpus} each, would wait for ever. Give Ray fewer workers or fewer CPUs each "
        "(max_worker_nodes, num_cpus_worker_node), or Spark more executors."
    )


def core_use(spark: SparkSession) -> CoreUse:
    """Return how many cores the executors have and how many of them run Ray's workers, as Spark knows now."""
    scala = spark.sparkContext._jsc.sc()
    store = scala.statusStore()
    executors = store.executorList(True)
    cores = 0
    for i in range(executors.size()):
        executor = executors.apply(i)
        cores += 0 if executor.id() == DRIVER_ID else int(executor.totalCores())
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
            of_ray += stage.numActiveTasks() * _task_cpus(spark, profile)
    return CoreUse(cores, of_ray)


def _task_cpus(spark: SparkSession, profile: Any) -> int:
    cpus = profile.getTaskCpus()
    return int(cpus.get()) if cpus.isDefined() else int(spark.sparkContext.getConf().get("spark.task.cpus", "1"))
