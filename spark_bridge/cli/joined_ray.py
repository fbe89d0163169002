"""Joining a Ray cluster for the time of one ``statestore`` command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spark_bridge.exceptions import EnvironmentProblemError

if TYPE_CHECKING:
    from coordinator_actor.on_ray.ray_port import RayCoordinatorPort


@contextmanager
def joined_ray(address: str | None, namespace: str) -> Iterator[None]:
    """Join the Ray cluster at ``address`` (None: the one that this machine has on record), and leave it at the end.

    Raises ``EnvironmentProblemError`` if no Ray cluster answers.
    """
    import ray

    from spark_bridge.session.cluster.ray_cluster import check_listens

    if address is not None:
        check_listens(address)
    try:
        ray.init(address=address or "auto", namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError) as error:
        raise EnvironmentProblemError(
            f"No Ray cluster answers at {address or 'the address that this machine has on record'}; "
            f"name one with --address or RAY_ADDRESS. Ray says: {error}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def reachable_coordinator(
    address: str | None, namespace: str, coordinator: str, timeout: float
) -> Iterator[RayCoordinatorPort | None]:
    """Give the coordinator of the cluster at ``address``, or of the one on this machine; None if there is none.

    ``timeout`` is in seconds, for one message. Raises ``EnvironmentProblemError`` if no cluster answers at ``address``.
    """
    from spark_bridge.session.cluster.ray_cluster import running_ray

    known = address or running_ray()
    if known is None:
        yield None
        return
    import ray

    from coordinator_actor.on_ray.ray_port import RayCoordinatorPort

    with joined_ray(known, namespace):
        try:
            ray.get_actor(coordinator, namespace=namespace)
        except ValueError:
            yield None
            return
        yield RayCoordinatorPort(namespace, coordinator, timeout)
