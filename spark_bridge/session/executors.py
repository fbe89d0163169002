"""The executors of a Spark session: their machines and cores, and the replacement of lost ones."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray

from backends.background_loop import BackgroundLoop
from coordinator_actor.coordinator_conf import HEAD_NODE
from spark_bridge.session.settings import Shutdown
from spark_bridge.transport.flight_client import silent_places

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from ray.util.placement_group import PlacementGroup

log = logging.getLogger(__name__)

DRIVER_ID = "driver"
EXECUTOR_SECONDS = 60.0
"""A session waits at its start at most this many seconds for the executors that it has asked for."""
EXECUTOR_POLL_SECONDS = 0.2
WAIT_NOTICE_SECONDS = 10.0
"""After this many seconds a waiting session logs the reason and the holders of the CPUs."""


def spark_executors(spark: SparkSession) -> list[Any]:
    """Return the executors of a session as Spark describes them in its JVM, without the driver."""
    active = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    executors = [active.apply(i) for i in range(active.size())]
    return [executor for executor in executors if executor.id() != DRIVER_ID]


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
    for executor in spark_executors(spark):
        ip = address_of(machine_of(str(executor.hostPort())))
        cores[ip] = cores.get(ip, 0) + int(executor.totalCores())
    return cores


class SessionExecutors:
    """The cores of a session's executors on each machine, by IP address; while Spark is starting, those expected.

    Where the executors will run is known if the Ray cluster has one node: Spark asks for ``cores`` there. Otherwise
    none are expected. ``spark`` is set when Spark has started.
    """

    def __init__(self, cores: int = 0) -> None:
        self.spark: SparkSession | None = None
        self._expected = expected_executors(ray.nodes(), cores) if cores else {}

    def __call__(self) -> Mapping[str, int]:
        return self._expected if self.spark is None else executor_cores(self.spark)


def expected_executors(nodes: Sequence[Mapping[str, Any]], cores: int) -> dict[str, int]:
    """Return the cores of the executors to come, by IP address: of a cluster's only node if it has so many CPUs.

    A node with fewer CPUs, such as a head without any, gets others by autoscaling, or the executors wait.
    """
    alive = [node for node in nodes if node["Alive"]]
    if len(alive) != 1 or alive[0]["Resources"].get("CPU", 0.0) < cores:
        return {}
    return {str(alive[0]["NodeManagerAddress"]): cores}


def await_executors(spark: SparkSession, count: int) -> None:
    """Wait until ``count`` executors have registered; continue without them after ``EXECUTOR_SECONDS``."""
    began = time.monotonic()
    is_told = False
    while (num_up := len(spark_executors(spark))) < count:
        waited = time.monotonic() - began
        if not is_told and waited > WAIT_NOTICE_SECONDS:
            log.warning("Of %d executors, %d are there. %s", count, num_up, cpus_in_words())
            is_told = True
        if waited > EXECUTOR_SECONDS:
            log.warning("Of %d executors, %d are there; hosts follow the others when they come", count, num_up)
            return
        time.sleep(EXECUTOR_POLL_SECONDS)


def placement_group_of(strategy: str, count: int, cores: int, memory: str | int) -> PlacementGroup:
    """Reserve Ray's resources for ``count`` executors, as RayDP does for ``placement_group_strategy=``.

    Waits as long as it takes, like RayDP, and logs the reason after ``WAIT_NOTICE_SECONDS``. Raises
    ``ValueError`` for a strategy that Ray does not have.
    """
    from raydp.utils import parse_memory_size

    nbytes = parse_memory_size(memory) if isinstance(memory, str) else memory
    group = ray.util.placement_group([{"CPU": cores, "memory": nbytes}] * count, strategy=strategy)
    try:
        if not group.wait(WAIT_NOTICE_SECONDS):
            size = f"{count} executors ({strategy}, each with {cores} CPUs and {mib(nbytes)} of memory)"
            log.warning("The placement group of %s is not there. %s", size, cpus_in_words())
            ray.get(group.ready())
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return group


def mib(nbytes: float) -> str:
    """Return a number of bytes in MiB."""
    return f"{nbytes / (1 << 20):.0f} MiB"


def cpus_in_words() -> str:
    """Describe the CPUs of the Ray cluster and their holders, for users who wait for executors."""
    resources, available = ray.cluster_resources(), ray.available_resources()
    total, free = (of_cluster.get("CPU", 0.0) for of_cluster in (resources, available))
    memory, free_memory = (mib(of_cluster.get("memory", 0.0)) for of_cluster in (resources, available))
    holders = _actors_with_cpus()
    others = total - free - sum(cpus for cpus, _ in holders)
    told = [f"{cpus:g} by {who}" for cpus, who in sorted(holders, reverse=True)[:MAX_HOLDERS]]
    if len(holders) > MAX_HOLDERS:
        told.append(f"{sum(c for c, _ in sorted(holders, reverse=True)[MAX_HOLDERS:]):g} by further actors")
    if others > 0:
        told.append(f"{others:g} by tasks and placement groups")
    in_words = f" Held are {', '.join(told)}." if told else ""
    return (
        f"The Ray cluster has {total:g} CPUs; {free:g} are free.{in_words} Of {memory} of memory, {free_memory} "
        "are free. Executors start when enough CPUs and memory are free: end the holders, add a node, or ask for "
        "fewer executors, fewer cores or less executor_memory."
    )


MAX_HOLDERS = 5
"""The most actors that are named."""


def _actors_with_cpus() -> list[tuple[float, str]]:
    """Return the CPUs that each living actor holds, and its class, name and job."""
    from ray.core.generated.gcs_pb2 import ActorTableData

    accessor = ray._private.state.state._connect_and_get_accessor()
    entrypoints = {job["JobID"]: job.get("Entrypoint", "") for job in ray._private.state.jobs()}
    actors = []
    for serialized in accessor.get_actor_table(None, None):
        actor = ActorTableData.FromString(serialized)
        cpus = actor.required_resources.get("CPU", 0.0)
        if cpus > 0 and actor.state == ActorTableData.ALIVE:
            job = actor.job_id.hex()
            program = entrypoints.get(job)
            name = f" {actor.name!r}" if actor.name else ""
            actors.append((cpus, f"actor {actor.class_name}{name} of job {job}{f' ({program})' if program else ''}"))
    return actors


def machine_of(host_port: str) -> str:
    """Return the machine of Spark's address of an executor, which has no port until the block manager registers."""
    machine, _, _ = host_port.rpartition(":")
    return host_port if not machine or host_port.endswith("]") else machine


def address_of(machine: str) -> str:
    """Return the IP address under which Ray knows a machine; return a name that does not resolve unchanged."""
    machine = machine.strip("[]")
    try:
        ip = socket.gethostbyname(machine)
    except OSError:
        return machine
    return own_address() if ip.startswith("127.") else ip


def own_address() -> str:
    """Return the IP address of this machine in the Ray cluster."""
    return str(ray.util.get_node_ip_address())


# Gives up executors whose machine is dead or cut off, and gets replacements.
#
# A machine that loses its power or its cable sends no reset. Spark waits two minutes for the heartbeat of an
# executor, since the executor may be collecting garbage, and the stream is blocked during that time. So a thread of the
# driver connects to the ports of the executors. A machine's kernel accepts connections even if the executor is busy or
# stopped. After three failed connections, the driver tells Spark that the executors of that machine are lost: 4 s after
# it has answered for the last time, which is when the coordinator gives the partitions of its host to others.


EXECUTOR_LOOK_SECONDS = 1.0
"""Seconds from one look to the next, if all answer: one connection to each executor, side by side."""
MIN_LOOK_PAUSE_SECONDS = 0.01
ANSWER_SECONDS, LEAST_ANSWER_SECONDS = 1.25, 0.5
"""An executor's machine has this many seconds to answer a connection: the first packet is sent again after 1 s. The
last look before it is given up may be shorter.
"""
EXECUTOR_SILENT_SECONDS = 4.0
FAILED_LOOKS = 3
"""An executor counts as lost so many seconds after the last look that it has answered, and after at least so many looks
without an answer.
"""
FORGOTTEN_LOOK_SECONDS = 5.0
"""If looks began further apart, the driver stood still, and earlier looks show nothing."""
EXECUTOR_CLASS = "RayDPExecutor"
SPARK_MESSAGES = "org.apache.spark.scheduler.cluster.CoarseGrainedClusterMessages"

Place = tuple[str, int]


class SilentExecutors:
    """Counts the looks that executors have not answered. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._silences: dict[str, tuple[float, int]] = {}  # by id: the last answer, and the looks since then
        self._answered_at = 0.0
        self.looked_at = -math.inf
        """When the last look began."""

    def begin(self) -> float:
        """Begin a look; return the seconds that machines have for their answers."""
        before, self.looked_at = self.looked_at, self._clock()
        if self.looked_at - before > FORGOTTEN_LOOK_SECONDS:
            self.forget_all()
        self._answered_at = max(before, self.looked_at - EXECUTOR_LOOK_SECONDS)
        due = [since for since, looks in self._silences.values() if looks + 1 == FAILED_LOOKS]
        left = EXECUTOR_SILENT_SECONDS - (self.looked_at - min(due)) if due else ANSWER_SECONDS
        return max(LEAST_ANSWER_SECONDS, min(ANSWER_SECONDS, left))

    def end(self, silent: Collection[str]) -> set[str]:
        """End a look that these executors, by id, have not answered; return those that are lost, once each."""
        before = self._silences
        self._silences = {}
        for i in silent:
            since, looks = before.get(i, (self._answered_at, 0))
            self._silences[i] = since, looks + 1
        now = self._clock()
        lost = {i for i, (at, n) in self._silences.items() if n >= FAILED_LOOKS and now - at >= EXECUTOR_SILENT_SECONDS}
        for i in lost:
            del self._silences[i]
        return lost

    def forget_all(self) -> None:
        """Begin again: this process stood still, or its own machine was cut off."""
        self._silences.clear()


class LostExecutors:
    """Watches the executors of a session, in a separate thread.

    With ``by_raydp`` the executors are RayDP's, which must be asked for replacements. Other cluster managers start one
    themselves when they learn of the loss.
    """

    def __init__(self, spark: SparkSession, shutdown: Shutdown, *, by_raydp: bool) -> None:
        self._spark = spark
        self._shutdown = shutdown
        self._by_raydp = by_raydp
        self._silent = SilentExecutors()
        self._loop = BackgroundLoop(
            self.look,
            self._pause,
            name="statestore-executors",
            what="look after the executors: Spark waits minutes for those whose machine is dead",
            remedy="Look at the log of the driver.",
            is_ending=lambda: shutdown.is_ending,
        )
        if not spark.sparkContext._jsc.sc().isLocal():
            self._loop.start()

    def close(self) -> None:
        self._loop.close(timeout=None)

    def _pause(self) -> float:
        return max(MIN_LOOK_PAUSE_SECONDS, EXECUTOR_LOOK_SECONDS - (time.monotonic() - self._silent.looked_at))

    def look(self) -> None:
        """Give up executors that do not answer, and request replacements."""
        seconds = self._silent.begin()
        if self._shutdown.is_ending:
            return
        all_executors = executor_places(self._spark)
        executors = {i: place for i, place in all_executors.items() if place is not None}
        silent = silent_places(set(executors.values()), refusals=False, seconds=seconds) if executors else set()
        lost = {i: executors[i] for i in self._silent.end([i for i, place in executors.items() if place in silent])}
        if lost and is_cut_off(set(executors.values()), silent, own_address()):
            self._silent.forget_all()
        elif lost:
            self._give_up(lost, len(all_executors))

    def _give_up(self, lost: Mapping[str, Place], total: int) -> None:
        machines = {ip for ip, _ in lost.values()}
        log.warning(
            "No answer from %s: executors %s are given up, and their tasks run elsewhere",
            ", ".join(sorted(machines)),
            ", ".join(sorted(lost)),
        )
        if self._by_raydp:
            _end_executor_actors(machines)
        context = self._spark.sparkContext
        scala, jvm = context._jsc.sc(), context._jvm
        for executor_id, (ip, _) in lost.items():
            reason = jvm.org.apache.spark.scheduler.ExecutorProcessLost(
                f"No answer from {ip}.", jvm.scala.Option.empty(), False
            )
            # Both as Spark does with an executor whose heartbeats stop (HeartbeatReceiver.expireDeadHosts).
            scala.killAndReplaceExecutor(executor_id)
            remove = getattr(jvm, f"{SPARK_MESSAGES}$RemoveExecutor")(executor_id, reason)
            scala.schedulerBackend().driverEndpoint().send(remove)
        if self._by_raydp:
            # RayDP's master has those that are left, and starts as many as are missing from the total.
            default_profile_only = jvm.org.apache.spark.api.python.PythonUtils.toScalaMap({})
            scala.requestTotalExecutors(total, 0, default_profile_only)


def executor_places(spark: SparkSession) -> dict[str, Place | None]:
    """Return the address and port of each executor that Spark has, by its id; None for an executor whose port is not
    known yet.
    """
    return {str(executor.id()): place_of(str(executor.hostPort())) for executor in spark_executors(spark)}


def place_of(host_port: str) -> Place | None:
    """Return address and port of an executor, from the words of Spark; None for one whose port is not known yet.

    The place of an executor is that of its block manager, which registers after the executor itself.
    """
    machine = machine_of(host_port)
    return None if machine == host_port else (address_of(machine), int(host_port[len(machine) + 1 :]))


def is_cut_off(places: Collection[Place], silent: Collection[Place], own: str) -> bool:
    """Return whether it is this machine that is cut off: executors are on several others, and no other one answers."""
    others = {place for place in places if place[0] != own}
    return len({ip for ip, _ in others}) > 1 and others <= set(silent)


def _end_executor_actors(machines: Collection[str]) -> None:
    """End RayDP's executors on machines that do not answer: Ray would start them a second time elsewhere."""
    namespace = ray.get_runtime_context().namespace
    for actor in ray._private.state.actors().values():
        is_executor = actor["ActorClassName"].endswith(EXECUTOR_CLASS) and actor["State"] != "DEAD"
        if is_executor and actor["Address"]["IPAddress"] in machines:
            with suppress(ValueError):  # it has ended since, or is of another namespace
                handle = ray.get_actor(actor["Name"], namespace=namespace)
                if handle._actor_id.hex() == actor["ActorID"]:  # and not the one of that name in our namespace
                    ray.kill(handle, no_restart=True)


# Settings of RayDP for a session that outlives its machines.


INSTANCES = "spark.executor.instances"
MASTER_RESOURCES = "spark.ray.raydp_spark_master.actor.resource."
SHUFFLE = {
    # A machine that is cut off sends no reset. Spark would wait two minutes for its part of a shuffle.
    "spark.shuffle.io.connectionTimeout": "5s",
    "spark.shuffle.io.connectionCreationTimeout": "3s",
    # Tasks still wait for a machine that hangs for half a minute.
    "spark.shuffle.io.retryWait": "1s",
    "spark.shuffle.io.maxRetries": "8",
}
"""How long tasks retry to fetch shuffle files from a machine. Once the driver knows that an executor is lost, they
stop.
"""


def master_on_head(resources: Mapping[str, str]) -> dict[str, str]:
    """Return settings that put RayDP's two master actors on Ray's head, unless the user has placed them.

    By default they request no resources, and Ray puts them on any node. Lost executors do not come back without
    them, so the loss of one machine could end the session.
    """
    if any(name.startswith(("spark.ray.raydp_spark_master.resource.", MASTER_RESOURCES)) for name in resources):
        return {}
    return {f"{MASTER_RESOURCES}CPU": "0", f"{MASTER_RESOURCES}{HEAD_NODE}": "0.001"}


MASTER_JAVA_OPTIONS = "spark.ray.raydp_app_master.extraJavaOptions"
QUICK_COMPILER = "-XX:TieredStopAtLevel=1"
"""RayDP's two master JVMs work for a moment at the start: Java's second compiler would cost more than it saves."""


def master_java_options(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the setting of the Java options of RayDP's masters: ours, then those of the user, which win."""
    return {MASTER_JAVA_OPTIONS: f"{QUICK_COMPILER} {settings.get(MASTER_JAVA_OPTIONS, '')}".strip()}


class MasterSettings(dict[str, str]):
    """Settings of a session, which reach RayDP's master without the number of executors.

    The master starts no executor if ``INSTANCES`` of them are registered or were ever restarted by Ray: it
    never subtracts the latter. A session of N executors that has lost N of them over time, and whose driver then
    asks for a replacement, would not get it. Without the setting the master starts the executors that the
    driver requests. RayDP hands its master a pickled copy, and adds the number to this object itself.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({name: value for name, value in self.items() if name != INSTANCES},)
