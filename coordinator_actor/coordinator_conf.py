"""The settings of a coordinator, and its name in a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from backends.tracing import checked_setting, setting_of_environment
from coordinator_actor.checkpoints.checkpoint_stats import SnapshotLagConf
from coordinator_actor.process import checked_format, format_of_environment

NAMESPACE = "statestore"
COORDINATOR_NAME = "StateStoreCoordinator"
"""The default Ray namespace, and the default name of the coordinator's actor in it."""
HEAD_NODE = "node:__internal_head__"
"""Ray's resource of the head node, whichever machine that is: a replaced head has it, too."""
HEAD_NODE_RESOURCES = MappingProxyType({HEAD_NODE: 0.001})


@dataclass(frozen=True)
class CoordinatorConf:
    """The settings of a coordinator. All times are in seconds.

    A host is lost after ``host_timeout`` without a heartbeat, and already after ``silent_timeout`` if its machine does
    not answer. A host whose process is dead is lost at once. A driver is gone after ``driver_timeout``. A coordinator
    ends itself after ``idle_timeout`` without a message from hosts or drivers. A savepoint fails after
    ``savepoint_timeout``. A micro-batch that takes longer than ``slow_checkpoint`` is logged as a warning.
    ``snapshot_lag`` says when a partition's snapshots lag behind. For ``report_timeout`` after its start, a coordinator
    expects reports from the hosts and drivers of the coordinator before it, and does not assign partitions that other
    hosts may hold.

    ``resources`` are the Ray resources that the coordinator's actor takes, and so determine its node: by default the
    head node, which is permanent. For another place, give some nodes a custom resource (``ray start
    --resources='{"coordinator": 1}'``), and name it here (``{"coordinator": 0.001}``).

    ``log_format`` is that of the coordinator's log, "text" or "json", by default the value of ``STATESTORE_LOG_FORMAT``
    in the driver's environment, else text. ``tracing`` says where its spans go (``backends.tracing``), by default the
    value of ``STATESTORE_TRACING`` there, else nowhere.
    """

    host_timeout: float = 10.0
    silent_timeout: float = 4.0
    driver_timeout: float = 60.0
    idle_timeout: float = 600.0
    savepoint_timeout: float = 600.0
    slow_checkpoint: float = 600.0
    report_timeout: float = 5.0
    snapshot_lag: SnapshotLagConf = field(default_factory=SnapshotLagConf)
    resources: Mapping[str, float] = field(default_factory=lambda: dict(HEAD_NODE_RESOURCES))
    log_format: str = field(default_factory=format_of_environment)
    tracing: str | None = field(default_factory=setting_of_environment)

    def __post_init__(self) -> None:
        checked_format(self.log_format)
        checked_setting(self.tracing)

    @property
    def lease_seconds(self) -> float:
        """Return how long a host may rely on its lease after a heartbeat: no longer than the coordinator waits."""
        return min(self.host_timeout, self.silent_timeout)
