"""Loading of partitions that requests read, in the background; partitions of other hosts are refused for a moment."""

from __future__ import annotations

import threading
import time

from backends.bounded_dict import BoundedDict
from spark_bridge.exceptions import NotOwnerError
from spark_bridge.host.held.instance import Instance, RunKey
from spark_bridge.host.host import Host
from spark_bridge.queryable.reads.operators.operator_plan import OperatorPlan
from spark_bridge.queryable.reads.versions.background_loads import BackgroundLoads

REFUSED_SECONDS = 0.1
"""A host believes for this many seconds that a partition is another host's."""
MAX_REFUSED = 1 << 14


class PartitionLoader:
    """Loads partitions of this host. Thread-safe; the lock guards changes of what was refused."""

    def __init__(self, host: Host, wait_seconds: float) -> None:
        self.loads = BackgroundLoads(wait_seconds)
        self._host = host
        self._refused: BoundedDict[RunKey, tuple[float, str]] = BoundedDict(MAX_REFUSED)
        self._lock = threading.Lock()

    def held(self, plan: OperatorPlan, partition: int) -> Instance:
        """Return a partition of this host; load it if it is not loaded. Raises as ``load`` does."""
        held = self._host.held.instance(plan.run_id, plan.operator, partition)
        return self.load(plan, partition) if held is None else held

    def load(self, plan: OperatorPlan, partition: int, *, again: bool = False) -> Instance:
        """Load a partition; with ``again`` also one that is loaded, because its changes are not those that count.

        Raises ``NotOwnerError`` for another host's partition, ``HostUnavailableError`` if loading takes longer.
        """
        key = (plan.run_id, plan.operator, partition)
        until, message = self._refused.get(key, (0.0, ""))
        if time.monotonic() < until:
            raise NotOwnerError(message)
        try:
            return self.loads.result(
                (*key, again),
                lambda: self._host.reads.load(*key, again=again),
                _name(plan.run_id, plan.operator, partition),
            )
        except NotOwnerError as error:
            with self._lock:
                self._refused[key] = (time.monotonic() + REFUSED_SECONDS, str(error))
            raise

    def wait_loaded(self, instance: Instance, seconds: float) -> None:
        """Wait a moment if another version is being loaded; a read itself would wait as long as the loading takes.

        Raises ``HostUnavailableError`` if the partition is not loaded after ``seconds``.
        """
        instance.is_read = True
        state = instance.state
        if state.is_loading:
            what = _name(*instance.run_key)
            with self.loads.waiting(what):
                if not state.wait_loaded(seconds):
                    raise self.loads.unavailable(what)


def _name(run_id: str, operator: str, partition: int) -> str:
    return f"Partition {partition} of operator {operator!r} (run {run_id})"
