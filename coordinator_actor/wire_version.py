"""The version of the messages between drivers, hosts, tasks and the coordinator, of one release or several.

Durable formats and the port of query clients have versions of their own. These messages are between processes of one
Ray cluster, mostly of one session; but a coordinator outlives the sessions that use it, and machines are upgraded one
by one. Whoever joins asks first, and is refused in plain words, where a message of another shape would fail somewhere.
"""

from __future__ import annotations

WIRE_VERSION = 2
"""Count up whenever a message or a record of one changes such that processes of the release before cannot take it.

``tests/fixtures/messages-<version>.txt`` has their shapes, and a test fails when these are not so any more.
"""


def other_version(who: str, theirs: object, ours: str) -> str | None:
    """Return why two processes cannot work together; None if they can. Theirs is None before there were versions."""
    if theirs == WIRE_VERSION:
        return None
    return (
        f"{who} speaks version {0 if theirs is None else theirs} of ray-statestore's messages, and {ours} version "
        f"{WIRE_VERSION}: two releases that cannot work together. Nothing was changed. Install the same release on all "
        "machines; where streams of the other release still run, stop them first, or use another namespace."
    )
