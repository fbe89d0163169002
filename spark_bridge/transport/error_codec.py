"""Errors cross the network as class name and message; here they become what they were."""

from __future__ import annotations

from backends import exceptions as backend_errors
from coordinator_actor import exceptions as coordinator_errors
from spark_bridge import exceptions as bridge_errors
from spark_bridge.exceptions import SparkBridgeError


def rebuilt_error(name: str, message: str) -> Exception:
    """The error of that class name, ours, the coordinator's or the backends', else a ``SparkBridgeError`` naming it."""
    for module in (bridge_errors, coordinator_errors, backend_errors):
        kind = getattr(module, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            rebuilt = kind.__new__(kind)
            rebuilt.args = (message,)
            return rebuilt
    return SparkBridgeError(f"{name}: {message}")
