"""``StateStoreCoordinatorRef``: a reference to the coordinator, for a driver, a task or any Ray process.

It has the messages of Spark's ``StateStoreCoordinatorRef``. In a PySpark task the messages go through a state store
host, so that the worker need not join Ray. ``spark_bridge`` offers that transport as an entry point.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from backends.conf import StateStoreProviderId
from backends.exceptions import StateStoreError
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.direct_calls import DirectCalls, NotDirectError
from coordinator_actor.exceptions import CoordinatorError, CoordinatorStoppedError, HostUnavailableError

log = logging.getLogger(__name__)

Transport = Callable[[str, dict[str, Any]], Any]
"""Sends one message, given by method name and arguments, and returns the answer."""

ENTRY_POINT = "statestore.executor_transport"
RESTART_SECONDS = 60.0
"""How long messages wait, all together, for a coordinator that is being restarted."""
# One thread, so that reports and deactivations arrive in the order of the calls.
_reporters = ThreadPoolExecutor(max_workers=1, thread_name_prefix="statestore-report")


def executor_transport() -> Transport | None:
    """Return the transport for the task that this process runs, as installed packages offer it; None outside a task."""
    for entry_point in entry_points(group=ENTRY_POINT):
        transport: Transport | None = entry_point.load()()
        if transport is not None:
            return transport
    return None


class StateStoreCoordinatorRef:
    """Sends Spark's state store messages to the coordinator. Get one with ``for_driver`` or ``for_executor``."""

    def __init__(self, transport: Transport, stop: Callable[[], None]) -> None:
        self._transport = transport
        self._stop = stop

    @classmethod
    def for_driver(cls, namespace: str = NAMESPACE, name: str = COORDINATOR_NAME) -> StateStoreCoordinatorRef:
        """Return a reference for a process in the Ray cluster. Start the coordinator if there is none."""
        from coordinator_actor.actor import get_or_create_coordinator

        log.debug("Getting StateStoreCoordinatorRef")
        get_or_create_coordinator(namespace, name)
        return cls._over_ray(namespace, name)

    @classmethod
    def for_executor(cls, namespace: str = NAMESPACE, name: str = COORDINATOR_NAME) -> StateStoreCoordinatorRef:
        """Return a reference for an executor: in a PySpark task through a host, else through Ray.

        Raises ``CoordinatorStoppedError`` if there is no coordinator.
        """
        log.debug("Getting StateStoreCoordinatorRef")
        transport = executor_transport()
        if transport is not None:
            return cls(transport, _refuse_stop)
        reference = cls._over_ray(namespace, name)
        log.info("Retrieved reference to StateStoreCoordinator: %s/%s", namespace, name)
        return reference

    @classmethod
    def _over_ray(cls, namespace: str, name: str) -> StateStoreCoordinatorRef:
        if not ray.is_initialized():
            ray.init(address="auto", namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)

        def actor() -> Any:
            try:
                return ray.get_actor(name, namespace=namespace)
            except ValueError as error:
                raise CoordinatorStoppedError(
                    f"No StateStoreCoordinator {name!r} exists in the Ray namespace {namespace!r}: it was stopped or "
                    "never started. init_spark, attach or StateStoreCoordinatorRef.for_driver() start one."
                ) from error

        away_since: float | None = None

        def transport(method: str, args: dict[str, Any]) -> Any:
            nonlocal away_since
            while True:
                try:
                    answer = ask(actor(), method, **args)
                    away_since = None
                    return answer
                except RayTaskError:
                    raise
                except RayError as error:
                    # The coordinator may have received the message before it failed. Each message may be sent twice.
                    if isinstance(error, ActorUnavailableError):
                        away_since = away_since or time.monotonic()
                        if time.monotonic() < away_since + RESTART_SECONDS:
                            time.sleep(CALL_RETRY_SECONDS)
                            continue
                    raise CoordinatorStoppedError(
                        f"The coordinator {name!r} did not answer {method}: {error}"
                    ) from error

        def stop() -> None:
            ray.kill(actor(), no_restart=True)
            log.info("StateStoreCoordinator stopped")

        actor()
        return cls(transport, stop)

    def report_active_instance(
        self,
        provider_id: StateStoreProviderId,
        host: str,
        executor_id: str,
        other_provider_ids: tuple[StateStoreProviderId, ...] = (),
    ) -> Future[list[StateStoreProviderId]]:
        """Report a loaded provider. Return at once; ``result()`` is the list of other providers to unload."""
        return _reporters.submit(
            self._transport,
            "report_active_instance",
            {
                "provider_id": provider_id,
                "host": host,
                "executor_id": executor_id,
                "other_provider_ids": tuple(other_provider_ids),
            },
        )

    def verify_if_instance_active(self, provider_id: StateStoreProviderId, executor_id: str) -> bool:
        """Return whether that executor has the provider, as far as the coordinator knows."""
        args = {"provider_id": provider_id, "executor_id": executor_id}
        return bool(self._transport("verify_if_instance_active", args))

    def get_location(self, provider_id: StateStoreProviderId) -> str | None:
        """Return ``executor_<host>_<executor id>`` of the active instance, or None."""
        location: str | None = self._transport("get_location", {"provider_id": provider_id})
        return location

    def get_locations(self, provider_ids: Sequence[StateStoreProviderId]) -> list[str | None]:
        """Return ``get_location`` of many instances, in the order asked, in one call."""
        locations: list[str | None] = self._transport("get_locations", {"provider_ids": tuple(provider_ids)})
        return locations

    def deactivate_instances(self, run_id: str | uuid.UUID) -> bool:
        """Forget the instances of a run, including those in reports still in flight.

        Raises ``InvalidRequestError`` if ``run_id`` is neither a string nor a ``uuid.UUID``.
        """
        return bool(_reporters.submit(self._transport, "deactivate_instances", {"run_id": run_id}).result())

    def stop(self) -> None:
        """Stop the coordinator permanently."""
        self._stop()


def _refuse_stop() -> None:
    raise CoordinatorStoppedError("A task may not stop the coordinator; stop it from the driver (for_driver().stop()).")


# The coordinator's messages as calls of its Ray actor.


CALL_RETRY_SECONDS = 0.1
MIN_ASK_SECONDS = 0.1
"""The least time for one attempt to send a message, also right before the deadline."""


def ask(actor: Any, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
    """Call a method of the coordinator's actor once and return the answer. ``timeout`` is in seconds.

    Raises the errors that the coordinator raises on purpose as they are, and ``RayError`` for all others.
    """
    try:
        return ray.get(getattr(actor, method).remote(*args, **kwargs), timeout=timeout)
    except RayTaskError as error:
        if isinstance(error.cause, CoordinatorError | StateStoreError):
            raise error.cause from None
        raise


class RayCoordinatorPort(CoordinatorPort):
    """Sends messages to the coordinator of that Ray namespace and name. Waits for an actor that is being restarted.

    ``timeout``, in seconds, is for one message. A message without an answer by then raises ``HostUnavailableError``.
    With the ``secret`` of the cluster, some messages go over a connection to the coordinator (``direct_calls.py``).
    """

    def __init__(self, namespace: str, name: str, timeout: float, secret: str | None = None) -> None:
        self._namespace = namespace
        self._name = name
        self._timeout = timeout
        self._actor: Any = None
        self._closed = threading.Event()
        self._direct = None if secret is None else DirectCalls(secret)

    def close(self) -> None:
        """Stop waiting for the coordinator: the session is over."""
        self._closed.set()
        if self._direct is not None:
            self._direct.follow("")

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Send one message and return the answer. A message without an answer is sent again."""
        deadline = time.monotonic() + self._timeout
        if self._direct is not None and self._direct.takes(method):
            try:
                return self._direct.call(method, args, kwargs, self._timeout)
            except NotDirectError as error:
                log.debug("A message goes through Ray: %s", error)
            except TimeoutError as error:
                raise self._unanswered(method, error) from error
        while True:
            if not ray.is_initialized():  # another call would start a cluster
                raise HostUnavailableError(f"Ray has been shut down in this process: {method} is not sent.")
            try:
                if self._actor is None:
                    self._actor = ray.get_actor(self._name, namespace=self._namespace)
                left = max(MIN_ASK_SECONDS, deadline - time.monotonic())
                answer = ask(self._actor, method, *args, timeout=left, **kwargs)
            except (RayTaskError, CoordinatorError, StateStoreError):
                raise  # the coordinator has answered; some of these errors are ValueErrors
            except (RayError, ValueError) as error:
                # ``get_actor`` raises ValueError for a name that no actor has.
                self._actor = None
                if self._direct is not None:
                    self._direct.follow("")  # Ray may replace the coordinator that the connections lead to
                if self._closed.wait(CALL_RETRY_SECONDS) or time.monotonic() > deadline:
                    raise self._unanswered(method, error) from error
            else:
                if self._direct is not None and method == "heartbeat_host" and not self._closed.is_set():
                    self._direct.follow(answer.calls)
                return answer

    def _unanswered(self, method: str, error: Exception) -> HostUnavailableError:
        return HostUnavailableError(
            f"The coordinator {self._name!r} (namespace {self._namespace!r}) did not answer "
            f"{method} within {self._timeout:.0f} s: {error}"
        )
