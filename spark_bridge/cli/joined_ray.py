"""Joining a Ray cluster for the time of one ``statestore`` command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spark_bridge.exceptions import EnvironmentProblemError


@contextmanager
def joined_ray(address: str | None, namespace: str) -> Iterator[None]:
    """Join the Ray cluster at ``address`` (None: the one that this machine has on record), and leave it at the end.

    Raises ``EnvironmentProblemError`` if no Ray cluster answers.
    """
    import ray

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
