"""``SessionOptions``: how the state store of one Spark session is set up, from ``init_spark`` down to each host."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from backends.conf import StateStoreConf
from backends.tracing.set_up import setting_of_environment
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE, CoordinatorConf
from coordinator_actor.process.log_lines import format_of_environment
from coordinator_actor.wire_version import WIRE_VERSION, other_version
from spark_bridge.exceptions import EnvironmentProblemError, SessionError
from spark_bridge.queryable.server.limits.request_limits import RequestLimits
from spark_bridge.transport.tls import TlsConf

DEFAULT_RECOVERY_TIMEOUT = 60.0
"""A task waits at most this many seconds for a new owner of its partition."""


@dataclass(frozen=True)
class SessionOptions:
    """The options of ``init_spark`` and ``attach`` that concern the state store; see there for their meaning.

    ``session_id`` names the session among those that use the same coordinator. ``log_format`` is that of the hosts'
    logs (``coordinator_actor.process.log_lines``). ``tracing`` says where the spans of driver, tasks and hosts go
    (``backends.tracing.set_up``). ``wire_version`` is the driver's: made with the object, so that none is
    there where the driver's release has none.

    Raises ``SessionError`` for ``num_hosts`` below 1 and ``keep_serving`` below 0, and ``TlsError`` if certificates do
    not fit. Nothing is checked again in a host, which gets the object as the driver has made it.
    """

    num_hosts: int | None
    namespace: str = NAMESPACE
    coordinator_name: str = COORDINATOR_NAME
    state_location: str | None = None
    conf: StateStoreConf = field(default_factory=StateStoreConf)
    coordinator_conf: CoordinatorConf | None = None
    recovery_timeout: float = DEFAULT_RECOVERY_TIMEOUT
    keep_serving: float | None = None
    tls: TlsConf | None = None
    query_port: int = 0
    request_limits: RequestLimits = field(default_factory=RequestLimits)
    log_format: str = field(default_factory=format_of_environment)
    tracing: str | None = field(default_factory=setting_of_environment)
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    wire_version: int = field(default_factory=lambda: WIRE_VERSION)

    def __post_init__(self) -> None:
        require_num_hosts(self.num_hosts)
        if self.keep_serving is not None and not self.keep_serving >= 0:
            raise SessionError(
                f"keep_serving={self.keep_serving}: give seconds, 0 or more, or None for as long as the session lives."
            )
        if self.tls is not None:
            self.tls.check()


def require_num_hosts(num_hosts: int | None) -> None:
    """Raise ``SessionError`` for a number of hosts below 1; None stands for one host per executor core."""
    if num_hosts is not None and num_hosts < 1:
        raise SessionError(f"num_hosts={num_hosts}: give at least 1, or None for one host per executor core.")


def require_same_driver(options: SessionOptions) -> None:
    """Raise ``EnvironmentProblemError``, in a host, if the driver that starts the host speaks other messages."""
    problem = other_version("The driver", getattr(options, "wire_version", None), "the release on this host's machine")
    if problem is not None:
        raise EnvironmentProblemError(problem)
