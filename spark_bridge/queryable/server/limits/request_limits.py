"""``RequestLimits``: the bounds of a ``KvStateServer``, by which a greedy client cannot stop a stream.

After Envoy's overload settings and Redis' ``maxclients``, ``timeout`` and query-buffer limits: everything that a client
can make grow has a bound.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.queryable.protocol.messages import MAX_HEADER_BYTES

MAX_FRAME_BYTES = (1 << 32) - 1
"""The lengths in a frame are uint32."""


@dataclass(frozen=True)
class RequestLimits:
    """The limits of one server. Raises ``InvalidStateStoreArgument`` for a limit with which nothing could be answered.

    - ``max_request_bytes``: header and body of one request.
    - ``max_keys``: keys of one request.
    - ``scan_seconds``: the time that a scan, or another answer of many batches, may take, with the client's reading.
    - ``max_requests``: lookups that are worked on at once; separately as many that are forwarded to other hosts.
    - ``max_scans``: scans, counts and change feeds that are open at once; separately as many that are forwarded, and as
      many lookups of either kind that load an old version or answer with many rows.
    - ``max_connections``: connections at once of clients with a valid token.
    - ``idle_seconds``: a connection that asks for nothing for this long is closed.
    - ``max_buffered_bytes``: the bytes of all large requests that are arriving and all large answers that are leaving.
    - ``transfer_seconds``: the time in which a request must arrive once it has begun, and an answer of one frame must
      be taken.
    - ``wait_seconds``: the time that a request waits for admission before it fails with ``TooManyRequestsError``.
    """

    max_request_bytes: int = 64 << 20
    max_keys: int = 1_000_000
    scan_seconds: float = 600.0
    max_requests: int = 64
    max_scans: int = 8
    max_connections: int = 512
    idle_seconds: float = 900.0
    max_buffered_bytes: int = 1024 << 20
    transfer_seconds: float = 60.0
    wait_seconds: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_int = field.type == "int"
            if isinstance(value, bool) or not isinstance(value, int if is_int else (int, float)):
                raise InvalidStateStoreArgument(
                    f"RequestLimits.{field.name} must be {'an int' if is_int else 'a number of seconds'}, not "
                    f"{value!r}."
                )
            if not 0 < value < math.inf:
                raise InvalidStateStoreArgument(
                    f"RequestLimits.{field.name} must be positive and finite, not {value!r}."
                )
        if not 4096 <= self.max_request_bytes <= MAX_FRAME_BYTES:
            raise InvalidStateStoreArgument(
                f"RequestLimits.max_request_bytes must be from 4096 to {MAX_FRAME_BYTES} (a frame states its length "
                "in 32 bits), "
                f"not {self.max_request_bytes}."
            )
        if not self.max_request_bytes + MAX_HEADER_BYTES <= self.max_buffered_bytes:
            raise InvalidStateStoreArgument(
                f"RequestLimits.max_buffered_bytes ({self.max_buffered_bytes}) must have room for one request of "
                "max_request_bytes "
                f"({self.max_request_bytes}) and {MAX_HEADER_BYTES} more."
            )
