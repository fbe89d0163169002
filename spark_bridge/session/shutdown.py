"""Whether the session of this process is being shut down, by ``stop_spark`` or without it.

A program may die of an error of its own, or stop Spark or Ray itself. Threads of the session then find Spark and Ray
half gone. Nothing is wrong that anybody could mend, and what they would log buries the program's own error.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import ray
from py4j.protocol import Py4JError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Shutdown:
    """The end of one session. ``is_spark_over`` says whether its Spark has been stopped, or is being stopped."""

    def __init__(self, is_spark_over: Callable[[], bool] = lambda: False) -> None:
        self._is_spark_over = is_spark_over
        self._has_begun = threading.Event()
        # Exit handlers run in reverse order: this one before those of RayDP and Ray, which were registered earlier.
        atexit.register(self.begin)

    def begin(self) -> None:
        """Record that the session ends now."""
        self._has_begun.set()
        atexit.unregister(self.begin)

    @property
    def is_over(self) -> bool:
        """Whether Ray must not be asked any more: its interface would start another cluster."""
        return self._has_begun.is_set() or not ray.is_initialized()

    @property
    def is_ending(self) -> bool:
        """Whether the session or its Spark ends: what fails then is no news."""
        return self.is_over or self._is_spark_over()

    @property
    def log_level(self) -> int:
        """The level for problems of the session's threads: a warning, or nothing to see during a shutdown."""
        return logging.INFO if self.is_ending else logging.WARNING


def spark_is_over(spark: SparkSession) -> bool:
    """Return whether a Spark session has been stopped, or is being stopped, or its JVM is gone."""
    context = spark.sparkContext._jsc
    try:
        return context is None or bool(context.sc().isStopped())
    except (Py4JError, OSError):
        return True
