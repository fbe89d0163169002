"""The progress of a query's operators in their last batch: the counterpart of Spark's ``StateOperatorProgress``.

Spark takes these operators for stateless, so its own progress says nothing of their state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from json import dumps
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.session.current import current_cluster

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

    from spark_bridge.session.hosts.state_cluster import StateCluster
    from spark_bridge.session.progress.checkpoint_progress import CheckpointProgress

log = logging.getLogger(__name__)

PROGRESS_WAIT_SECONDS = 10.0
PROGRESS_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class StateOperatorProgress:
    """One operator in one batch, over all its partitions; the names are those of Spark's JSON, in snake case.

    ``operator_name`` is the name that the user gave. ``custom_metrics`` has Spark's names where Spark has the figure
    (``numDroppedDuplicateRows``, ``numRegisteredTimers``, ``numValuesRemovedDueToTTLExpiry`` and others), and the
    milliseconds of each step under names of ours.
    ``num_rows_total`` counts the pairs of all column families after the batch; ``memory_used_bytes`` is the memory that
    the hosts use for them now. ``commit_time_ms`` is the sum over the partitions. ``num_state_store_instances`` counts
    the partitions that have reported the batch: fewer than ``num_shuffle_partitions`` if a host was lost since, or if
    the figures are asked for more than three batches later. Of the others ``num_rows_total`` has the pairs of now.
    ``num_rows_largest_partition`` and ``num_rows_median_partition`` say how evenly these pairs lie: they have no
    counterpart in Spark.
    """

    operator_name: str
    batch_id: int
    num_rows_total: int = 0
    num_rows_updated: int = 0
    num_rows_removed: int = 0
    num_rows_dropped_by_watermark: int = 0
    commit_time_ms: float = 0.0
    memory_used_bytes: int = 0
    num_shuffle_partitions: int = 0
    num_state_store_instances: int = 0
    num_rows_largest_partition: int = 0
    num_rows_median_partition: float = 0.0
    custom_metrics: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures under the names of Spark's JSON, such as ``numRowsTotal``, for JSON and for tables."""
        return {_camel_case(name): value for name, value in asdict(self).items()}

    @property
    def json(self) -> str:
        """The figures as JSON, as PySpark's ``StateOperatorProgress.json`` has them."""
        return dumps(self.as_dict(), separators=(",", ":"))


def _camel_case(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


class StateOperatorListener(Protocol):
    """Hears of every batch that Spark has committed, once and in order, as Spark's ``onQueryProgress`` does."""

    def on_state_operator_progress(self, run_id: str, progress: Sequence[StateOperatorProgress]) -> None:
        """Take the progress of each operator in a batch that is committed. An error that is raised here is logged."""


@runtime_checkable
class CheckpointListener(Protocol):
    """A ``StateOperatorListener`` that hears of checkpoints as well, after the operators of a batch."""

    def on_checkpoint_progress(self, run_id: str, progress: CheckpointProgress) -> None:
        """Take the newest checkpoint: of the batch, or of a later one if there is one already."""


_listeners: list[StateOperatorListener] = []
_lock = threading.Lock()


def add_state_operator_listener(listener: StateOperatorListener) -> None:
    """Have a listener called for every batch of every query of this driver."""
    with _lock:
        _listeners.append(listener)


def remove_state_operator_listener(listener: StateOperatorListener) -> None:
    """Call a listener no more; it is no error if it was never added."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)


def has_listeners() -> bool:
    """Return whether there is a listener."""
    with _lock:
        return bool(_listeners)


def tell_listeners(
    run_id: str, progress: Sequence[StateOperatorProgress], checkpoint: Callable[[], CheckpointProgress | None]
) -> None:
    """Call all listeners for a batch; ``checkpoint`` is asked for if one of them wants to hear of it."""
    with _lock:
        listeners = list(_listeners)
    found = checkpoint() if any(isinstance(listener, CheckpointListener) for listener in listeners) else None
    for listener in listeners:
        try:
            listener.on_state_operator_progress(run_id, progress)
            if found is not None and isinstance(listener, CheckpointListener):
                listener.on_checkpoint_progress(run_id, found)
        except Exception:  # the other listeners must be called all the same
            log.exception("A state operator listener failed at run %s", run_id)


def state_operator_progress(query: StreamingQuery) -> list[StateOperatorProgress]:
    """Return the progress of each stateful operator in the last batch that Spark has committed; [] before the first.

    Raises ``HostUnavailableError`` if the hosts do not report that batch within ``PROGRESS_WAIT_SECONDS``.
    """
    last = query.lastProgress
    return newest_progress(current_cluster(), str(query.runId), -1 if last is None else int(last["batchId"]))


def newest_progress(cluster: StateCluster, run_id: str, batch_id: int = -1) -> list[StateOperatorProgress]:
    """Return the progress of a run's operators in batch ``batch_id`` or later; see ``state_operator_progress``."""
    return _progress(cluster, run_id, lambda completed: max(completed, batch_id + 1))


def progress_of_batch(cluster: StateCluster, run_id: str, batch_id: int) -> list[StateOperatorProgress]:
    """Return the progress of a run's operators in a batch that Spark has committed, however many have followed.

    Raises as ``state_operator_progress``.
    """
    return _progress(cluster, run_id, lambda _: batch_id + 1)


def _progress(cluster: StateCluster, run_id: str, wanted: Callable[[int], int]) -> list[StateOperatorProgress]:
    """Return the progress in the batch that made the wanted version, which may depend on the completed one."""
    deadline = time.monotonic() + PROGRESS_WAIT_SECONDS
    while True:
        run = next((q for q in cluster.coordinator.describe()["queries"] if q["run_id"] == run_id), None)
        version = 0 if run is None else wanted(run["completed_version"])
        if run is None or not version:
            return []
        held = [i for host in cluster.describe_hosts() for i in host["instances"] if i["run_id"] == run_id]
        if all(_has_applied(i, version) for i in held):
            return [_sum(name, version, n, held) for name, n in run["operators"].items()]
        if time.monotonic() > deadline:
            behind = sorted({i["version"] for i in held if i["version"] < version})
            raise HostUnavailableError(f"Hosts are still at version {behind} of run {run_id}, not at {version}.")
        time.sleep(PROGRESS_POLL_SECONDS)


def _has_applied(instance: dict[str, Any], version: int) -> bool:
    """Return whether a partition has come to a version, its keys included.

    Hosts hear of a completed version a moment later, and show the version before they have written its changes.
    """
    commit = instance["commits"].get(version)
    reached: int = instance["version"]
    return reached > version or (reached == version and (commit is None or "keys" in commit))


def _sum(operator: str, version: int, num_partitions: int, instances: list[dict[str, Any]]) -> StateOperatorProgress:
    # A partition that has moved may still be held by its last host as well: the host that has made the version counts.
    ordered = sorted((i for i in instances if i["operator"] == operator), key=lambda i: version in i["commits"])
    own = list({i["partition"]: i for i in ordered}.values())
    told = [i["commits"][version] for i in own if version in i["commits"]]
    then = [i["commits"].get(version, {}).get("keys") for i in own]
    pairs = [i["keys"] if keys is None else keys for i, keys in zip(own, then, strict=True)]
    custom: dict[str, float] = {}
    for commit in told:
        for name, value in (*commit["custom"].items(), *commit["ms"].items()):
            custom[name] = custom.get(name, 0.0) + value

    def total(name: str) -> int:
        return sum(commit[name] for commit in told)

    return StateOperatorProgress(
        operator_name=operator,
        batch_id=version - 1,
        num_rows_total=sum(pairs),
        num_rows_updated=total("num_rows_updated"),
        num_rows_removed=total("num_rows_removed"),
        num_rows_dropped_by_watermark=total("num_rows_dropped_by_watermark"),
        commit_time_ms=sum(c["ms"]["changelog_ms"] + c["ms"]["acknowledge_ms"] for c in told),
        memory_used_bytes=sum(i["memory_bytes"] for i in own),
        num_shuffle_partitions=num_partitions,
        num_state_store_instances=len(told),
        num_rows_largest_partition=max(pairs, default=0),
        num_rows_median_partition=float(median(pairs)) if pairs else 0.0,
        custom_metrics=custom,
    )
