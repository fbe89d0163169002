"""The executors of a Spark session: on which machines they run, and with how many cores."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from ray.util.placement_group import PlacementGroup

log = logging.getLogger(__name__)

DRIVER_ID = "driver"
EXECUTOR_SECONDS = 60.0
"""A session waits at its start at most this many seconds for the executors that it has asked for."""
EXECUTOR_POLL_SECONDS = 0.2
WAIT_NOTICE_SECONDS = 10.0
"""After this many seconds a session says what it waits for, and who holds the CPUs."""


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
    began = time.monotonic()
    deadline = began + EXECUTOR_SECONDS
    is_told = False
    while True:
        active = store.executorList(True)
        there = sum(active.apply(i).id() != DRIVER_ID for i in range(active.size()))
        if there >= count:
            return
        if not is_told and time.monotonic() - began > WAIT_NOTICE_SECONDS:
            log.warning("Of %d executors, %d are there. %s", count, there, cpus_in_words())
            is_told = True
        if time.monotonic() > deadline:
            log.warning("Of %d executors, %d are there; hosts follow the others when they come", count, there)
            return
        time.sleep(EXECUTOR_POLL_SECONDS)


def placement_group_of(strategy: str, count: int, cores: int, memory: str | int) -> PlacementGroup:
    """Reserve Ray's resources for ``count`` executors, as RayDP does for ``placement_group_strategy=``.

    Waits as long as it takes, like RayDP, and says after ``WAIT_NOTICE_SECONDS`` what it waits for. Raises
    ``ValueError`` for a strategy that Ray does not have.
    """
    import ray
    from raydp.utils import parse_memory_size

    nbytes = parse_memory_size(memory) if isinstance(memory, str) else memory
    group = ray.util.placement_group([{"CPU": cores, "memory": nbytes}] * count, strategy=strategy)
    try:
        if not group.wait(WAIT_NOTICE_SECONDS):
            log.warning(
                "The placement group of %d executors (%s, each with %d CPUs and %s of memory) is not there. %s",
                count,
                strategy,
                cores,
                mib(nbytes),
                cpus_in_words(),
            )
            ray.get(group.ready())
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return group


def mib(nbytes: float) -> str:
    """Return a number of bytes in MiB."""
    return f"{nbytes / (1 << 20):.0f} MiB"


def cpus_in_words() -> str:
    """Return how many CPUs the Ray cluster has and who holds them, in words for whoever waits for executors."""
    import ray

    resources, available = ray.cluster_resources(), ray.available_resources()
    total, free = (found.get("CPU", 0.0) for found in (resources, available))
    memory, free_memory = (mib(found.get("memory", 0.0)) for found in (resources, available))
    holders = _actors_with_cpus()
    others = total - free - sum(cpus for cpus, _ in holders)
    told = [f"{cpus:g} by {who}" for cpus, who in sorted(holders, reverse=True)[:MOST_HOLDERS]]
    if len(holders) > MOST_HOLDERS:
        told.append(f"{sum(c for c, _ in sorted(holders, reverse=True)[MOST_HOLDERS:]):g} by further actors")
    if others > 0:
        told.append(f"{others:g} by tasks and placement groups")
    held = f" Held are {', '.join(told)}." if told else ""
    return (
        f"The Ray cluster has {total:g} CPUs, of which {free:g} are free.{held} Of {memory} of memory, {free_memory} "
        "are free. Executors come when enough CPUs and memory are free: end what holds them, add a node, or ask for "
        "fewer executors, fewer cores or less executor_memory."
    )


MOST_HOLDERS = 5
"""The most actors that are named."""


def _actors_with_cpus() -> list[tuple[float, str]]:
    """Return the CPUs that each living actor holds, and its class, name and job."""
    import ray
    from ray.core.generated.gcs_pb2 import ActorTableData

    accessor = ray._private.state.state._connect_and_get_accessor()
    entrypoints = {job["JobID"]: job.get("Entrypoint", "") for job in ray._private.state.jobs()}
    found = []
    for serialized in accessor.get_actor_table(None, None):
        actor = ActorTableData.FromString(serialized)
        cpus = actor.required_resources.get("CPU", 0.0)
        if cpus > 0 and actor.state == ActorTableData.ALIVE:
            job = actor.job_id.hex()
            program = entrypoints.get(job)
            name = f" {actor.name!r}" if actor.name else ""
            found.append((cpus, f"actor {actor.class_name}{name} of job {job}{f' ({program})' if program else ''}"))
    return found


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
