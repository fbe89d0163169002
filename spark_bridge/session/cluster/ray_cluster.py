"""Joining a Ray cluster, or starting one on this machine."""

from __future__ import annotations

import atexit
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError

from coordinator_actor.coordinator_conf import NAMESPACE
from spark_bridge.exceptions import EnvironmentProblemError

if TYPE_CHECKING:
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
    import ray
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
    running = running_ray()
    if running is not None:
        try:
            ray.init(address=running, **quiet)
            return False
        except ConnectionError:
            log.warning(
                "The Ray cluster at %s, which this machine remembers, does not answer; starting another",
                running,
            )
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
        f"Ray's client (ray://) does not do for Spark on Ray: {address} is the address of a proxy, and Spark's driver "
        "must run where its executors can reach it. Run the program in the cluster, by `ray job submit --address "
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
    """Put ``stop_raydp`` in the place of RayDP's own exit handler.

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
    import ray
    from raydp import context

    if ray.is_initialized():
        try:
            context.stop_spark()
        finally:
            if group is not None:
                ray.util.remove_placement_group(group)
        return
    with context._spark_context_lock:
        left, context._global_spark_context = context._global_spark_context, None
        if left is not None and left._spark_session is not None:
            with suppress(Py4JError, OSError):  # Spark's JVM has been in the cluster too, and may have ended with it
                left._spark_session.stop()
        context._reset_pyspark_singletons()


def stop_ray() -> None:
    """Leave the Ray cluster, and end it if this process has started it."""
    import ray

    ray.shutdown()
