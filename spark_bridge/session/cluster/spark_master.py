"""RayDP's master: an actor without which a Spark application gets no executors, and which Ray does not start again.

Executors end with the master, and Spark waits for others for ever, without a word. So the queries of the session are
ended with an error, for whoever runs the program to start it again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import ray

from backends.background_loop import BackgroundLoop
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
        self._is_dead = False
        self._loop = BackgroundLoop(
            self.look,
            MASTER_LOOK_SECONDS,
            name="statestore-spark-master",
            what="look after RayDP's master: queries are not ended if it dies",
            remedy="Look at the log of the driver; if batches stand still, start the program again.",
            most_seconds=10 * MASTER_LOOK_SECONDS,
            is_ending=lambda: shutdown.is_ending,
        ).start()

    def close(self) -> None:
        """Look no more."""
        self._loop.close(timeout=None)

    def look(self) -> None:
        """End the queries if the master has died: again and again, since the program may start further ones."""
        if self._shutdown.is_ending or spark_is_over(self._spark):
            self._loop.close()  # the program has stopped Spark, and RayDP the master
        elif self._is_dead:
            self._end_queries()
        elif is_dead(self._master) and not self._loop.is_closed:
            self._is_dead = True
            log.error("%s", MASTER_DIED)

    def _end_queries(self) -> None:
        context = self._spark.sparkContext
        for query in self._spark.streams.active:
            end_with(self._spark._jvm, query._jsq.streamingQuery(), MASTER_DIED)
            query.stop()
        for job in context.statusTracker().getActiveJobsIds():
            context._jsc.sc().cancelJob(job, MASTER_DIED)
