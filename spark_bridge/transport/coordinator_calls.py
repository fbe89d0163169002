"""Messages of tasks to the coordinator that a host passes on, and their arguments as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from backends.decoders import convert
from backends.ids import StateStoreProviderId
from spark_bridge.exceptions import RequestError

METHODS = frozenset(
    {
        "deactivate_instances",
        "get_location",
        "get_locations",
        "locate",
        "look_up",
        "report_active_instance",
        "verify_if_instance_active",
    }
)
"""The messages that a task may send."""
SEVERAL = ("other_provider_ids", "provider_ids")
"""Arguments that are several provider ids; ``provider_id`` is one."""


def to_wire(args: dict[str, Any]) -> dict[str, Any]:
    """Return arguments as JSON can carry them."""
    plain = dict(args)
    if "provider_id" in plain:
        plain["provider_id"] = asdict(plain["provider_id"])
    for name in SEVERAL:
        if name in plain:
            plain[name] = [asdict(p) for p in plain[name]]
    return plain


def from_wire(provider_id: Any) -> StateStoreProviderId:
    """Return a provider id that came as JSON. Raises ``RequestError``."""
    try:
        return convert(provider_id, StateStoreProviderId)
    except msgspec.ValidationError as error:
        raise RequestError(f"{provider_id!r} is no provider id: {error}") from error


def checked_call(method: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a task's message with their types.

    Raises ``RequestError`` for a message that no task may send.
    """
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
