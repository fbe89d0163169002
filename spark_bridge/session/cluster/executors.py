"""The executors of a Spark session: on which machines they run, and with how many cores."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

DRIVER_ID = "driver"
EXECUTOR_SECONDS = 60.0
"""A session waits at its start at most this many seconds for the executors that it has asked for."""
EXECUTOR_POLL_SECONDS = 0.2


def executor_cores(spark: SparkSession) -> dict[str, int]:
    """Return the cores of the executors on each machine, by IP address, as Spark knows them now.

    None are left when Spark has been stopped. Of ``local[n]``, whose tasks run in the driver's process, the machine is
    this one.
    """
    context = spark.sparkContext
    if context._jsc is None:  # the program has stopped Spark, and is about to end
        return {}
    scala = context._jsc.sc()
    if scala.isLocal():
        return {own_address(): max(1, min(context.defaultParallelism, os.cpu_count() or 1))}
    cores: dict[str, int] = {}
    active = scala.statusStore().executorList(True)
    for i in range(active.size()):
        executor = active.apply(i)
        if executor.id() != DRIVER_ID:
            ip = address_of(machine_of(str(executor.hostPort())))
            cores[ip] = cores.get(ip, 0) + int(executor.totalCores())
    return cores


def await_executors(spark: SparkSession, count: int) -> None:
    """Wait until ``count`` executors are there; go on without them after ``EXECUTOR_SECONDS``."""
    store = spark.sparkContext._jsc.sc().statusStore()
    deadline = time.monotonic() + EXECUTOR_SECONDS
    while True:
        active = store.executorList(True)
        there = sum(active.apply(i).id() != DRIVER_ID for i in range(active.size()))
        if there >= count:
            return
        if time.monotonic() > deadline:
            log.warning("Of %d executors, %d are there; hosts follow the others when they come", count, there)
            return
        time.sleep(EXECUTOR_POLL_SECONDS)


def machine_of(host_port: str) -> str:
    """Return the machine of what Spark says of an executor, which has no port until the block manager registers."""
    machine, _, _ = host_port.rpartition(":")
    return host_port if not machine or host_port.endswith("]") else machine


def address_of(machine: str) -> str:
    """Return the IP address of a machine by which Ray knows it; a name that nobody knows stays as it is."""
    machine = machine.strip("[]")
    try:
        ip = socket.gethostbyname(machine)
    except OSError:
        return machine
    return own_address() if ip.startswith("127.") else ip


def own_address() -> str:
    """Return the IP address of this machine in the Ray cluster."""
    import ray

    return str(ray.util.get_node_ip_address())
