"""Gives up executors whose machine is gone or cut off, and gets others in their place.

A machine that loses its power or its cable sends no reset. Spark waits two minutes for the heartbeat of an executor,
since the executor may be collecting garbage, and the stream stands still meanwhile. So a thread of the driver connects
to the ports of the executors, which a machine's kernel answers however busy or stopped the executor is. Where nobody
answers twice, Spark is told that the executors of that machine are lost.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import ray

from backends.background_loop import BackgroundLoop
from spark_bridge.session.cluster.executors import DRIVER_ID, address_of, machine_of, own_address
from spark_bridge.session.shutdown import Shutdown
from spark_bridge.transport.silent_hosts import silent_places

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

EXECUTOR_LOOK_SECONDS = 1.0
"""Seconds between two looks: one connection to each executor, side by side."""
FAILED_LOOKS = 2
"""After this many looks in a row without an answer an executor counts as lost."""
EXECUTOR_CLASS = "RayDPExecutor"
SPARK_MESSAGES = "org.apache.spark.scheduler.cluster.CoarseGrainedClusterMessages"

Place = tuple[str, int]


class LostExecutors:
    """Looks after the executors of a session, in a thread of its own.

    With ``by_raydp`` the executors are RayDP's, which must be asked for others. Other cluster managers are told of the
    loss, and start another one themselves.
    """

    def __init__(self, spark: SparkSession, shutdown: Shutdown, *, by_raydp: bool) -> None:
        self._spark = spark
        self._shutdown = shutdown
        self._by_raydp = by_raydp
        self._failed: dict[str, int] = {}
        self._loop = BackgroundLoop(
            self.look,
            EXECUTOR_LOOK_SECONDS,
            name="statestore-executors",
            what="look after the executors: Spark waits minutes for those whose machine is gone",
            remedy="Look at the log of the driver.",
            is_ending=lambda: shutdown.is_ending,
        )
        if not spark.sparkContext._jsc.sc().isLocal():
            self._loop.start()

    def close(self) -> None:
        """Look after the executors no more."""
        self._loop.close(timeout=None)

    def look(self) -> None:
        """Give up executors that do not answer, and ask for others."""
        if self._shutdown.is_ending:
            return
        all_executors = executor_places(self._spark)
        executors = {i: place for i, place in all_executors.items() if place is not None}
        silent = silent_places(set(executors.values()), refusals=False) if executors else set()
        self._failed = {i: self._failed.get(i, 0) + 1 for i, place in executors.items() if place in silent}
        lost = {i: executors[i] for i, times in self._failed.items() if times >= FAILED_LOOKS}
        if lost and not is_cut_off(set(executors.values()), silent, own_address()):
            self._give_up(lost, len(all_executors))

    def _give_up(self, lost: Mapping[str, Place], total: int) -> None:
        machines = {ip for ip, _ in lost.values()}
        log.warning(
            "Nobody answers at %s: executors %s are given up, and their tasks run elsewhere",
            ", ".join(sorted(machines)),
            ", ".join(sorted(lost)),
        )
        if self._by_raydp:
            _end_executor_actors(machines)
        context = self._spark.sparkContext
        scala, jvm = context._jsc.sc(), context._jvm
        for executor_id, (ip, _) in lost.items():
            reason = jvm.org.apache.spark.scheduler.ExecutorProcessLost(
                f"Nobody answers at {ip}.", jvm.scala.Option.empty(), False
            )
            # Both as Spark does with an executor whose heartbeats stay away (HeartbeatReceiver.expireDeadHosts).
            scala.killAndReplaceExecutor(executor_id)
            remove = getattr(jvm, f"{SPARK_MESSAGES}$RemoveExecutor")(executor_id, reason)
            scala.schedulerBackend().driverEndpoint().send(remove)
            self._failed.pop(executor_id, None)
        if self._by_raydp:
            # RayDP's master has those that are left, and starts as many as are missing from the total.
            default_profile_only = jvm.org.apache.spark.api.python.PythonUtils.toScalaMap({})
            scala.requestTotalExecutors(total, 0, default_profile_only)


def executor_places(spark: SparkSession) -> dict[str, Place | None]:
    """Return the address and port of each executor that Spark has, by its id; None for an executor whose port is not
    known yet.
    """
    places = {}
    active = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    for i in range(active.size()):
        executor = active.apply(i)
        if executor.id() != DRIVER_ID:
            places[str(executor.id())] = place_of(str(executor.hostPort()))
    return places


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
            with suppress(ValueError):  # it has ended meanwhile, or is of another namespace
                handle = ray.get_actor(actor["Name"], namespace=namespace)
                if handle._actor_id.hex() == actor["ActorID"]:  # and not the one of that name in our namespace
                    ray.kill(handle, no_restart=True)
