"""Giving up executors whose machine is gone or cut off, and getting others in their place.

A machine that loses its power or its cable sends no reset. Spark waits two minutes for the heartbeat of an executor,
since it may be collecting garbage, and so long a stream stands. So a thread of the driver connects to the ports of the
executors, which a machine's kernel answers however busy or stopped the executor is. Of a machine where nobody answers,
twice, Spark is told that its executors are lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray

from spark_bridge.session.executors import DRIVER, address_of, own_address
from spark_bridge.transport.silent_hosts import silent_places

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Seconds between two looks: one connection to each executor, side by side."""
FAILED_LOOKS = 2
"""After so many looks in a row without an answer an executor counts as lost."""
MISSING_SECONDS = 30.0
"""Executors that are missing so long, and that neither RayDP nor Ray is about to start, are asked for again."""
EXECUTOR_CLASS = "RayDPExecutor"
MESSAGES = "org.apache.spark.scheduler.cluster.CoarseGrainedClusterMessages"

Place = tuple[str, int]


class LostExecutors:
    """Looks after the executors of a session, in a thread of its own.

    ``wanted`` is how many executors RayDP is to keep; None for sessions that somebody else keeps: Spark's dynamic
    allocation, or another cluster manager, which is told of the loss and starts another one.
    """

    def __init__(self, spark: SparkSession, wanted: int | None) -> None:
        self._spark = spark
        self._wanted = wanted
        self._failed: dict[str, int] = {}
        self._complete_at = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="statestore-executors", daemon=True)
        if not spark.sparkContext._jsc.sc().isLocal():
            self._thread.start()

    def close(self) -> None:
        """Look after the executors no more."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception:  # the thread must go on
                if not self._closed.is_set():
                    log.warning("The executors could not be looked after", exc_info=True)

    def look(self) -> None:
        """Give up executors that do not answer, and ask for others."""
        executors = executor_places(self._spark)
        silent = silent_places(set(executors.values()), refusals=False) if executors else set()
        self._failed = {i: self._failed.get(i, 0) + 1 for i, place in executors.items() if place in silent}
        lost = {i: executors[i] for i, times in self._failed.items() if times >= FAILED_LOOKS}
        if lost and not is_cut_off(set(executors.values()), silent, own_address()):
            self._give_up(lost)
        if len(executors) - len(lost) >= (self._wanted or 0):
            self._complete_at = time.monotonic()
        elif time.monotonic() - self._complete_at > MISSING_SECONDS and len(_executor_actors()) < (self._wanted or 0):
            self._request()

    def _give_up(self, lost: Mapping[str, Place]) -> None:
        machines = {ip for ip, _ in lost.values()}
        log.warning(
            "Nobody answers at %s: executors %s are given up, and their tasks run elsewhere",
            ", ".join(sorted(machines)),
            ", ".join(sorted(lost)),
        )
        if self._wanted is not None:
            _end_executor_actors(machines)
        context = self._spark.sparkContext
        scala, jvm = context._jsc.sc(), context._jvm
        for executor_id, (ip, _) in lost.items():
            reason = jvm.org.apache.spark.scheduler.ExecutorProcessLost(
                f"Nobody answers at {ip}.", jvm.scala.Option.empty(), False
            )
            # Both as Spark does with an executor whose heartbeats stay away (HeartbeatReceiver.expireDeadHosts).
            scala.killAndReplaceExecutor(executor_id)
            remove = getattr(jvm, f"{MESSAGES}$RemoveExecutor")(executor_id, reason)
            scala.schedulerBackend().driverEndpoint().send(remove)
            self._failed.pop(executor_id, None)
        self._request()

    def _request(self) -> None:
        if self._wanted is not None:
            self._complete_at = time.monotonic()
            context = self._spark.sparkContext
            nowhere = context._jvm.org.apache.spark.api.python.PythonUtils.toScalaMap({})
            context._jsc.sc().requestTotalExecutors(self._wanted, 0, nowhere)


def executor_places(spark: SparkSession) -> dict[str, Place]:
    """Return the address and port of each executor that Spark has, by its id."""
    places = {}
    active = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    for i in range(active.size()):
        executor = active.apply(i)
        if executor.id() != DRIVER:
            machine, _, port = str(executor.hostPort()).rpartition(":")
            places[str(executor.id())] = address_of(machine), int(port)
    return places


def is_cut_off(places: Collection[Place], silent: Collection[Place], own: str) -> bool:
    """Return whether it is this machine that is cut off: executors are on several others, and no other one answers."""
    others = {place for place in places if place[0] != own}
    return len({ip for ip, _ in others}) > 1 and others <= set(silent)


def _executor_actors() -> list[tuple[Any, str]]:
    """Return the actors that are RayDP's executors of this session, with the address of each, or where it was last.

    Those that are being started are among them. Sessions in other namespaces may have actors of the same names.
    """
    namespace = ray.get_runtime_context().namespace
    found = []
    for actor in ray._private.state.actors().values():
        if actor["State"] != "DEAD" and actor["ActorClassName"].endswith(EXECUTOR_CLASS):
            with suppress(ValueError):  # it has ended meanwhile, or is of another namespace
                handle = ray.get_actor(actor["Name"], namespace=namespace)
                if handle._actor_id.hex() == actor["ActorID"]:
                    found.append((handle, str(actor["Address"]["IPAddress"])))
    return found


def _end_executor_actors(machines: Collection[str]) -> None:
    """End RayDP's executors on machines that do not answer: Ray would start them a second time elsewhere."""
    for actor, ip in _executor_actors():
        if ip in machines:
            ray.kill(actor, no_restart=True)
