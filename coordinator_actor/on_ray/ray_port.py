"""The coordinator's messages as calls of its Ray actor."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from backends.exceptions import StateStoreError
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.exceptions import CoordinatorError, HostUnavailableError

CALL_RETRY_SECONDS = 0.1


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
    """

    def __init__(self, namespace: str, name: str, timeout: float) -> None:
        self._namespace = namespace
        self._name = name
        self._timeout = timeout
        self._actor: Any = None
        self._closed = threading.Event()

    def close(self) -> None:
        """Stop waiting for the coordinator: the session is over."""
        self._closed.set()

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Send one message and return the answer. A message that gets no answer is sent again."""
        deadline = time.monotonic() + self._timeout
        while True:
            if not ray.is_initialized():  # another call would start a cluster
                raise HostUnavailableError(f"Ray has been shut down in this process: nobody is asked {method}.")
            try:
                if self._actor is None:
                    self._actor = ray.get_actor(self._name, namespace=self._namespace)
                return ask(self._actor, method, *args, timeout=self._timeout, **kwargs)
            except (RayTaskError, CoordinatorError, StateStoreError):
                raise  # the coordinator has answered; some of these errors are ValueErrors
            except (RayError, ValueError) as error:
                # ``get_actor`` raises ValueError for a name that no actor has.
                self._actor = None
                if self._closed.wait(CALL_RETRY_SECONDS) or time.monotonic() > deadline:
                    raise HostUnavailableError(
                        f"The coordinator {self._name!r} (namespace {self._namespace!r}) did not answer "
                        f"{method} within {self._timeout:.0f} s: {error}"
                    ) from error
