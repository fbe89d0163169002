"""Errors cross the network as class name and message; here they become again the errors that they were."""

from __future__ import annotations

from backends import exceptions as backend_errors
from coordinator_actor import exceptions as coordinator_errors
from spark_bridge import exceptions as bridge_errors
from spark_bridge.exceptions import SparkBridgeError


def rebuilt_error(name: str, message: str, unknown: type[Exception] = SparkBridgeError) -> Exception:
    """Return the error of that class name: of ``spark_bridge``, ``coordinator_actor`` or ``backends``.

    A name that none of them has becomes an error of the class ``unknown`` whose message names it.
    """
    for module in (bridge_errors, coordinator_errors, backend_errors):
        kind = getattr(module, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            # Not by its constructor, which may take other arguments than a message.
            rebuilt = kind.__new__(kind)
            rebuilt.args = (message,)
            return rebuilt
    return unknown(f"{name}: {message}")
