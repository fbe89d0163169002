"""How a PySpark task sends messages to the coordinator: through a state store host, without joining Ray.

``StateStoreCoordinatorRef.for_executor()`` finds ``find`` through the entry point
``statestore.executor_transport``, since ``coordinator_actor`` knows nothing of Spark.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from backends.decoders import convert
from backends.ids import StateStoreProviderId
from coordinator_actor.on_ray.reference import Transport
from spark_bridge.exceptions import HostUnavailableError, RequestError
from spark_bridge.task.state_task import local_endpoints
from spark_bridge.transport.flight_client import client_for, forget_client

METHODS = frozenset(
    {"report_active_instance", "verify_if_instance_active", "get_location", "get_locations", "deactivate_instances"}
)
SEVERAL = ("other_provider_ids", "provider_ids")
"""Arguments that are several provider ids."""


def find() -> Transport | None:
    """The way for the task that this process runs; None outside a task, or where the task knows no host."""
    from pyspark import TaskContext

    context = TaskContext.get()
    endpoints = None if context is None else local_endpoints(context.getLocalProperty)
    if endpoints is None:
        return None

    def send(method: str, args: dict[str, Any]) -> Any:
        failure: Exception | None = None
        for address, token in endpoints.candidates():
            try:
                answer = client_for(address, token, endpoints.tls).call_coordinator(method, to_wire(args))
            except HostUnavailableError as error:
                forget_client(address, token)
                failure = error
            else:
                return [from_wire(p) for p in answer] if method == "report_active_instance" else answer
        raise HostUnavailableError(f"No state store host passed on {method}; last failure: {failure}")

    return send


def to_wire(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments as JSON can carry them."""
    plain = dict(args)
    if "provider_id" in plain:
        plain["provider_id"] = asdict(plain["provider_id"])
    for name in SEVERAL:
        if name in plain:
            plain[name] = [asdict(p) for p in plain[name]]
    return plain


def from_wire(provider_id: Any) -> StateStoreProviderId:
    """A provider id as JSON brought it. Raises ``RequestError``."""
    try:
        return convert(provider_id, StateStoreProviderId)
    except msgspec.ValidationError as error:
        raise RequestError(f"{provider_id!r} is no provider id: {error}") from error


def checked_call(method: str, args: dict[str, Any]) -> dict[str, Any]:
    """In the host: the arguments of a task's message, typed. Raises ``RequestError`` for any other message."""
    if method not in METHODS:
        raise RequestError(
            f"A task may not send {method!r} to the coordinator; it may send {', '.join(sorted(METHODS))}."
        )
    typed = dict(args)
    if "provider_id" in typed:
        typed["provider_id"] = from_wire(typed["provider_id"])
    for name in SEVERAL:
        if name in typed:
            typed[name] = tuple(from_wire(p) for p in typed[name])
    return typed
