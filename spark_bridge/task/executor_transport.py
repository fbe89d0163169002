"""The way of a PySpark task to the coordinator: through a state store host, without joining Ray.

``StateStoreCoordinatorRef.for_executor()`` finds ``find`` through the entry point ``statestore.executor_transport``,
since ``coordinator_actor`` knows nothing of Spark.
"""

from __future__ import annotations

from typing import Any

from coordinator_actor.on_ray.reference import Transport
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.task.local_properties import local_endpoints
from spark_bridge.transport.coordinator_calls import from_wire, to_wire
from spark_bridge.transport.flight_client import client_for, forget_client


def find() -> Transport | None:
    """Return the transport of the task that this process runs; None outside a task, or where the task knows no host."""
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
