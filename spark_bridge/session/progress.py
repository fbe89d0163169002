"""Reports of the driver about each batch: progress of operators, cost, spans and metrics.

Spark considers these operators stateless, so its own ``StateOperatorProgress`` does not describe their state.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from json import dumps
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from backends import spans
from backends.background_loop import BackgroundLoop
from backends.storage.requests import KINDS, RECEIVED, SENT, Prices
from coordinator_actor.messages import InputPace, QueryRegistration
from coordinator_actor.metrics import OPERATOR_FIGURES, MetricSink
from spark_bridge.exceptions import STATESTORE_ERRORS, HostUnavailableError
from spark_bridge.session.current import current_cluster
from spark_bridge.session.settings import STORAGE_PRICES_CONF, Shutdown

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

    from spark_bridge.operators.map_in_arrow import Lag
    from spark_bridge.session.state_cluster import StateCluster

log = logging.getLogger(__name__)

_CAMEL = re.compile("_([a-z])")
PROGRESS_WAIT_SECONDS = 10.0
PROGRESS_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class StateOperatorProgress:
    """One operator in one batch, over all its partitions; the names are those of Spark's JSON, in snake case.

    ``operator_name`` is the name that the user gave. ``custom_metrics`` has Spark's names if Spark has the figure
    (``numDroppedDuplicateRows``, ``numRegisteredTimers``, ``numValuesRemovedDueToTTLExpiry`` and others), and the
    milliseconds of each step under names of ours.
    ``num_rows_total`` counts the pairs of all column families after the batch; ``memory_used_bytes`` is the memory that
    the hosts use for them now. ``commit_time_ms`` is the sum over the partitions. ``num_state_store_instances`` counts
    the partitions that have reported the batch: fewer than ``num_shuffle_partitions`` if a host was lost since, or if
    the figures are asked for more than three batches later. ``num_rows_total`` has the current pairs of the others.
    ``num_rows_largest_partition`` and ``num_rows_median_partition`` show how evenly these pairs are distributed: they
    have no counterpart in Spark.
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
        return {_CAMEL.sub(lambda match: match[1].upper(), name): value for name, value in asdict(self).items()}

    @property
    def json(self) -> str:
        """The figures as JSON, as PySpark's ``StateOperatorProgress.json`` has them."""
        return dumps(self.as_dict(), separators=(",", ":"))


class StateOperatorListener(Protocol):
    """Receives every batch that Spark has committed, once and in order, as Spark's ``onQueryProgress`` does."""

    def on_state_operator_progress(self, run_id: str, progress: Sequence[StateOperatorProgress]) -> None:
        """Receive the progress of each operator in a committed batch. Errors that this raises are logged."""


@runtime_checkable
class CheckpointListener(Protocol):
    """A ``StateOperatorListener`` that receives checkpoints as well, after the operators of a batch."""

    def on_checkpoint_progress(self, run_id: str, progress: CheckpointProgress) -> None:
        """Receive the newest checkpoint: of the batch, or of a later one if there is one already."""


_listeners: list[StateOperatorListener] = []
_lock = threading.Lock()


def add_state_operator_listener(listener: StateOperatorListener) -> None:
    """Call a listener for every batch of every query of this driver."""
    with _lock:
        _listeners.append(listener)


def remove_state_operator_listener(listener: StateOperatorListener) -> None:
    """Remove a listener; does nothing if it was never added."""
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
    """Call all listeners for a batch; ``checkpoint`` is called if one of them wants checkpoints."""
    with _lock:
        listeners = list(_listeners)
    progress_now = None
    if any(isinstance(listener, CheckpointListener) for listener in listeners):
        try:
            progress_now = checkpoint()
        except STATESTORE_ERRORS as error:
            log.info("The newest checkpoint of run %s is unknown: %s", run_id, error)
        except Exception:  # the listeners must still get the operators of the batch
            log.exception("The newest checkpoint of run %s is unknown", run_id)
    for listener in listeners:
        try:
            listener.on_state_operator_progress(run_id, progress)
            if progress_now is not None and isinstance(listener, CheckpointListener):
                listener.on_checkpoint_progress(run_id, progress_now)
        except Exception:  # the other listeners must still be called
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
        is_late = time.monotonic() > deadline
        try:
            hosts = cluster.describe_hosts()
        except HostUnavailableError:
            if is_late:
                raise
        else:
            instances = [i for host in hosts for i in host["instances"] if i["run_id"] == run_id]
            if all(_has_applied(i, version) for i in instances):
                return [_sum(name, version, n, instances) for name, n in run["operators"].items()]
            if is_late:
                behind = sorted({i["version"] for i in instances if i["version"] < version})
                raise HostUnavailableError(f"Hosts are still at version {behind} of run {run_id}, not at {version}.")
        time.sleep(PROGRESS_POLL_SECONDS)


def _has_applied(instance: dict[str, Any], version: int) -> bool:
    """Return whether a partition has reached a version, its keys included.

    Hosts learn of a completed version a moment later, and show the version before they have written its changes.
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


# The cost of a batch's checkpoint: time, bytes, requests to storage and their price.


@dataclass(frozen=True)
class CheckpointProgress:
    """The checkpoint of one batch, of all operators.

    ``duration_ms`` is from the first open to the durable manifest, None if no coordinator has seen both. ``requests``
    are those of hosts and coordinator to storage since the checkpoint before, by kind (put, get, head, list, delete);
    ``sent_bytes`` and ``received_bytes`` are the bytes of their files. ``dollars`` is their cost according to the
    setting ``spark.statestore.storagePrices``.
    """

    batch_id: int
    duration_ms: int | None
    delta_bytes: int
    requests: dict[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0
    dollars: float = 0.0

    @property
    def json(self) -> str:
        return dumps(asdict(self), separators=(",", ":"))


def checkpoint_progress(query: StreamingQuery) -> CheckpointProgress | None:
    """Return the newest completed checkpoint of a query; None before the first."""
    prices = prices_of(query._jsq.sparkSession().conf())
    return newest_checkpoint(current_cluster(), str(query.runId), prices)


def newest_checkpoint(cluster: StateCluster, run_id: str, prices: Prices) -> CheckpointProgress | None:
    """Return the newest completed checkpoint of a run; None before the first."""
    run = next((q for q in cluster.coordinator.describe()["queries"] if q["run_id"] == run_id), None)
    record = None if run is None else run["last_checkpoint"]
    return None if record is None else progress_of_record(record, prices)


def progress_of_record(record: Mapping[str, Any], prices: Prices) -> CheckpointProgress:
    """Return the progress in a ``CheckpointRecord``, as plain data."""
    used = record["storage"]
    return CheckpointProgress(
        batch_id=record["version"] - 1,
        duration_ms=record["duration_ms"],
        delta_bytes=record["delta_bytes"],
        requests={kind: used.get(kind, 0) for kind in KINDS.values()},
        sent_bytes=used.get(SENT, 0),
        received_bytes=used.get(RECEIVED, 0),
        dollars=prices.dollars(used),
    )


def prices_of(conf: Any) -> Prices:
    """Return the prices in the settings of a session, of PySpark or of the JVM.

    Raises ``InvalidStateStoreArgument`` for an invalid setting.
    """
    return Prices.parse(str(conf.get(STORAGE_PRICES_CONF, "") or ""))


# The driver's spans: the root of each batch's trace, and Spark's steps below, made when Spark reports the batch.


FIRST_STEPS = ("latestOffset", "walCommit", "getBatch", "queryPlanning")
LAST_STEPS = ("addBatch", "commitOffsets")
"""Spark's steps of a batch in their order. Spark reports how long each took, but not when it began: the first ones are
placed end to end from the beginning of the batch on, the last ones up to its end."""


class BatchTraces:
    """The batches of one driver's queries. Thread-safe: ``_lock`` guards the table of runs."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[QueryRegistration, int, int]] = {}
        self._lock = threading.Lock()

    def add(self, registration: QueryRegistration, version: int) -> None:
        """Add a run; its first batch continues from ``version``."""
        if spans.is_on():
            with self._lock:
                self._runs[registration.run_id] = registration, version + 1, spans.now()

    def batch(self, run_id: str, batch_id: int, progress: str) -> None:
        """Make the root of a batch's trace from Spark's progress of that batch, as JSON."""
        if not spans.is_on():
            return
        told: Mapping[str, Any] = json.loads(progress)
        took: Mapping[str, int] = told.get("durationMs") or {}
        if "addBatch" not in took:
            return  # nothing was run
        version = batch_id + 1
        timestamp = datetime.fromisoformat(str(told["timestamp"]).replace("Z", "+00:00"))  # in ms
        began = round(timestamp.timestamp() * 1000) * 1_000_000
        ended = began + took.get("triggerExecution", sum(took.values())) * 1_000_000
        with self._lock:
            if (of_run := self._runs.get(run_id)) is None:
                return
            self._runs[run_id] = of_run[0], version + 1, ended
        trace = spans.batch(run_id, version)
        _root(of_run[0], trace, began, ended, rows=int(told.get("numInputRows") or 0))
        first, last = began, ended
        for step in (s for s in FIRST_STEPS if s in took):
            spans.finished(f"spark.{step}", trace, first, first + took[step] * 1_000_000)
            first += took[step] * 1_000_000
        for step in reversed([s for s in LAST_STEPS if s in took]):
            spans.finished(f"spark.{step}", trace, last - took[step] * 1_000_000, last)
            last -= took[step] * 1_000_000

    def end(self, run_id: str, exception: str | None) -> None:
        """Remove a run. ``exception`` is the error of its last batch; the trace of that batch gets a root too."""
        with self._lock:
            of_run = self._runs.pop(run_id, None)
        if of_run is None or exception is None:
            return
        registration, version, since = of_run
        failure = exception.partition(":")[0].rpartition(".")[2].strip() or "StreamingQueryException"
        _root(registration, spans.batch(run_id, version), since, 0, failure=failure)


def _root(of: QueryRegistration, trace: spans.Trace, began: int, ended: int, **notes: Any) -> None:
    spans.finished(trace.kind, trace, began, ended, is_root=True, query_id=of.query_id, query_name=of.name, **notes)


# The driver's metrics: Spark's figures of a batch, and those of each operator under the names of Spark's progress.


STREAM_METRICS_SECONDS = 10.0
"""Seconds between two looks at the operators. A look asks each host once for each query, outside the batches."""


@dataclass(frozen=True)
class _Batch:
    """Spark's figures of a batch: rows a second, and milliseconds by step."""

    of_input: float
    processed: float
    duration_ms: Mapping[str, float]
    backlog_rows: int | None = None


class StreamMetrics:
    """Publishes for the queries of one driver. ``_lock`` guards the sink and the table of runs.

    ``progress_of(run_id)`` returns the progress of a run's operators in its newest batch, and may take long.
    """

    def __init__(
        self,
        sink: MetricSink,
        progress_of: Callable[[str], Sequence[StateOperatorProgress]],
        shutdown: Shutdown,
        seconds: float = STREAM_METRICS_SECONDS,
    ) -> None:
        self._sink = sink
        self._progress_of = progress_of
        self._titles: dict[str, str] = {}
        self._operators: dict[str, set[str]] = {}
        self._batches: dict[str, _Batch] = {}
        self._lock = threading.Lock()
        self._loop = BackgroundLoop(
            self.publish,
            seconds,
            name="statestore-stream-metrics",
            what="publish the figures of the driver's operators",
            remedy="Look at the log of the driver.",
            is_ending=lambda: shutdown.is_ending,
        ).start()

    def add(self, run_id: str, title: str) -> None:
        """Publish the figures of a run from now on; ``title`` is the name or the id of its query."""
        with self._lock:
            self._titles[run_id] = title

    def remove(self, run_id: str) -> None:
        """Stop publishing a run: its rates and the sizes of its partitions are 0 from now on."""
        with self._lock:
            title = self._titles.pop(run_id, None)
            self._batches.pop(run_id, None)
            if title is not None and title not in self._titles.values():
                self._rates(title, 0.0, 0.0)
                for operator in self._operators.pop(title, ()):
                    self._sizes(title, operator, 0, 0)

    def batch(self, run_id: str, progress: str) -> None:
        """Publish the figures of the whole query in Spark's progress of a batch, as JSON."""
        told: Mapping[str, Any] = json.loads(progress)
        with self._lock:
            if (title := self._titles.get(run_id)) is None:
                return
            rates = _number(told.get("inputRowsPerSecond")), _number(told.get("processedRowsPerSecond"))
            figures = self._batches[run_id] = _Batch(*rates, told.get("durationMs") or {}, backlog_rows(told))
            self._publish_batch(title, figures)

    def pace(self, run_id: str, lag: Lag | None = None) -> InputPace | None:
        """Return the pace of the input in the last batch of a run; None before its first batch, unless it has a lag."""
        batch = self._batches.get(run_id)
        seconds = None if lag is None else lag.seconds()
        if batch is None:
            return None if seconds is None else InputPace(behind_seconds=seconds)
        return InputPace(batch.of_input, batch.processed, batch.backlog_rows, seconds)

    def close(self) -> None:
        self._loop.close()

    def _publish_batch(self, title: str, batch: _Batch) -> None:
        self._rates(title, batch.of_input, batch.processed)
        for step, ms in batch.duration_ms.items():
            self._sink.set("statestore_spark_duration_seconds", ms / 1000, query=title, step=step)

    def _rates(self, title: str, of_input: float, processed: float) -> None:
        self._sink.set("statestore_input_rows_per_second", of_input, query=title)
        self._sink.set("statestore_processed_rows_per_second", processed, query=title)

    def _sizes(self, title: str, operator: str, largest: float, middle: float) -> None:
        self._sink.set("statestore_largest_partition_keys", largest, query=title, operator=operator)
        self._sink.set("statestore_median_partition_keys", middle, query=title, operator=operator)

    def publish(self) -> None:
        """Publish the newest figures of all operators, and those of the last batches again.

        Ray forgets a gauge that is not set for 20 s, and a batch may take longer. Raises an error that is not ours once
        the figures of the other runs are published.
        """
        with self._lock:
            titles = dict(self._titles)
            for run_id, batch in self._batches.items():
                self._publish_batch(titles[run_id], batch)
        unexpected: Exception | None = None
        for run_id, title in titles.items():
            try:
                progress = self._progress_of(run_id)
                with self._lock:
                    if run_id in self._titles:  # otherwise it has ended since
                        for one in progress:
                            self._publish(title, one)
            except STATESTORE_ERRORS as error:
                log.info("The operators of run %s have no figures now: %s", run_id, error)
            except Exception as error:  # the other runs have figures
                log.warning("The operators of run %s have no figures now", run_id, exc_info=True)
                unexpected = error
        if unexpected is not None:
            raise unexpected

    def _publish(self, title: str, one: StateOperatorProgress) -> None:
        labels = {"query": title, "operator": one.operator_name}
        told = one.as_dict()
        for name in OPERATOR_FIGURES:
            self._sink.set(f"statestore_operator_{name}", told[name], **labels)
        for name, value in one.custom_metrics.items():
            self._sink.set("statestore_operator_customMetrics", value, **labels, figure=name)
        self._operators.setdefault(title, set()).add(one.operator_name)
        self._sizes(title, one.operator_name, one.num_rows_largest_partition, one.num_rows_median_partition)


def backlog_rows(progress: Mapping[str, Any]) -> int | None:
    """Return how many rows the sources of a progress still have after the batch; None if no source reports it.

    Sources with offsets by topic and partition, such as Kafka, report their latest offsets.
    """
    offsets = [
        sum(max(0, offset - ended[topic][partition]) for topic, partition, offset in _offsets(latest))
        for source in progress.get("sources") or ()
        if (ended := _by_partition(source.get("endOffset"))) and (latest := _by_partition(source.get("latestOffset")))
        if all(partition in ended.get(topic, {}) for topic, partition, _ in _offsets(latest))
    ]
    return sum(offsets) if offsets else None


def _by_partition(offsets: Any) -> dict[str, dict[str, int]]:
    """Return offsets by topic and partition; {} for offsets of another kind."""
    if not isinstance(offsets, dict) or not all(isinstance(of_topic, dict) for of_topic in offsets.values()):
        return {}
    is_known = all(isinstance(offset, int) for of_topic in offsets.values() for offset in of_topic.values())
    return offsets if is_known else {}


def _offsets(by_partition: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str, int]]:
    return [(topic, p, offset) for topic, of_topic in by_partition.items() for p, offset in of_topic.items()]


def _number(value: Any) -> float:
    """Return a rate of Spark's, which is NaN, Infinity or missing if there was nothing to divide."""
    return float(value) if isinstance(value, int | float) and 0 <= value < float("inf") else 0.0
