"""The version that a call asks for: its isolation level, or an exact version."""

from __future__ import annotations

from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.protocol.messages import At

COMPLETED = At()
ISOLATIONS = ("completed", "latest")


def requested_version(isolation: str, version: int | None) -> At:
    """Return the version that a call asks for. Raises ``RequestError`` for one that there cannot be."""
    if version is not None:
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise RequestError(f"version={version!r} is no version; they are numbers from 0 on.")
        if isolation != "completed":
            raise RequestError(f"version={version} says which version is read; leave isolation={isolation!r} out.")
        return At("version", version)
    if isolation == "completed":
        return COMPLETED
    if isolation == "latest":
        return At("latest")
    raise RequestError(f"isolation={isolation!r} is none; there are {', '.join(map(repr, ISOLATIONS))}, or version=.")


def check_limit(limit: int | None) -> None:
    """Raise ``RequestError`` for a value that cannot be a limit."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise RequestError(f"limit={limit!r} is no number of rows.")
