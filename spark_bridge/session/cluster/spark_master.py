"""RayDP's master: an actor without which a Spark application gets no executors, and which Ray does not start again.

Executors end with the master, and Spark waits for others for ever, without a word. So the queries of the session are
ended with an error, for whoever runs the program to start it again.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import ray

from spark_bridge.session.hosts.host_placement import is_dead
from spark_bridge.session.queries.query_refusal import end_with
from spark_bridge.session.shutdown import Shutdown, spark_is_over

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

MASTER_LOOK_SECONDS = 2.0
"""Seconds between two looks; a look is one message to Ray."""
MASTER_DIED = (
    "RayDP's master of this application has died, and its executors with it; Ray does not start them again. Nothing "
    "that was committed is lost: start the program again, and its queries go on from their checkpoints. "
    "`statestore run` does that by itself."
)


class SparkMasterWatch:
    """Looks whether the RayDP master of the application ``app_name`` lives; ends the queries of ``spark`` otherwise."""

    def __init__(self, spark: SparkSession, app_name: str, shutdown: Shutdown) -> None:
        from raydp.spark.ray_cluster_master import RAYDP_SPARK_MASTER_SUFFIX

        self._spark = spark
        self._shutdown = shutdown
        self._master = ray.get_actor(app_name + RAYDP_SPARK_MASTER_SUFFIX)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="statestore-spark-master", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(MASTER_LOOK_SECONDS) and not self._shutdown.is_over:
            if is_dead(self._master):
                break
        if self._closed.is_set() or self._shutdown.is_over or spark_is_over(self._spark):
            return  # the program has stopped Spark, and RayDP the master
        log.error("%s", MASTER_DIED)
        # Again and again: the program may start further queries, and Spark other jobs.
        while not self._closed.wait(MASTER_LOOK_SECONDS):
            try:
                self._end_queries()
            except Exception:  # the thread must go on
                level = self._shutdown.log_level
                log.log(level, "The queries of the application could not be ended", exc_info=True)

    def _end_queries(self) -> None:
        context = self._spark.sparkContext
        if context._jsc is None:  # the program has stopped Spark
            self._closed.set()
            return
        for query in self._spark.streams.active:
            end_with(self._spark._jvm, query._jsq.streamingQuery(), MASTER_DIED)
            query.stop()
        for job in context.statusTracker().getActiveJobsIds():
            context._jsc.sc().cancelJob(job, MASTER_DIED)
