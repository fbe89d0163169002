"""The driver's metrics: Spark's figures of a batch, and those of each operator under the names of Spark's progress."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.background_loop import BackgroundLoop
from backends.exceptions import StateStoreError
from coordinator_actor.exceptions import CoordinatorError
from coordinator_actor.messages import InputPace
from coordinator_actor.metrics import OPERATOR_FIGURES, MetricSink
from spark_bridge.exceptions import SparkBridgeError
from spark_bridge.session.progress.operator_progress import StateOperatorProgress
from spark_bridge.session.shutdown import Shutdown

log = logging.getLogger(__name__)

STREAM_METRICS_SECONDS = 10.0
"""Seconds between two looks at the operators. A look asks each host once for each query, beside the batches."""


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
        """Begin with a run; ``title`` is the name or the id of its query."""
        with self._lock:
            self._titles[run_id] = title

    def remove(self, run_id: str) -> None:
        """End with a run: its rates and the sizes of its partitions are 0 from now on."""
        with self._lock:
            title = self._titles.pop(run_id, None)
            self._batches.pop(run_id, None)
            if title is not None and title not in self._titles.values():
                self._rates(title, 0.0, 0.0)
                for operator in self._operators.pop(title, ()):
                    self._sizes(title, operator, 0, 0)

    def batch(self, run_id: str, progress: str) -> None:
        """Publish what Spark's progress of a batch, as JSON, says of the whole query."""
        told: Mapping[str, Any] = json.loads(progress)
        with self._lock:
            title = self._titles.get(run_id)
            if title is None:
                return
            rates = _number(told.get("inputRowsPerSecond")), _number(told.get("processedRowsPerSecond"))
            made = self._batches[run_id] = _Batch(*rates, told.get("durationMs") or {}, backlog_rows(told))
            self._publish_batch(title, made)

    def pace(self, run_id: str) -> InputPace | None:
        """Return the pace of the input in the last batch of a run; None before its first batch."""
        batch = self._batches.get(run_id)
        return None if batch is None else InputPace(batch.of_input, batch.processed, batch.backlog_rows)

    def close(self) -> None:
        """Publish no more."""
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

        Ray forgets a gauge that is not set for 20 s, and a batch may take longer.
        """
        with self._lock:
            titles = dict(self._titles)
            for run_id, batch in self._batches.items():
                self._publish_batch(titles[run_id], batch)
        for run_id, title in titles.items():
            try:
                found = self._progress_of(run_id)
            except (CoordinatorError, StateStoreError, SparkBridgeError) as error:
                log.info("The operators of run %s have no figures now: %s", run_id, error)
                continue
            with self._lock:
                if run_id in self._titles:  # otherwise it has ended meanwhile
                    for one in found:
                        self._publish(title, one)

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
    """Return the rows that the sources of a progress have beyond the batch; None where no source says so.

    Sources with offsets by topic and partition, as Kafka's, report the latest ones too.
    """
    known = [
        sum(max(0, offset - ended[topic][partition]) for topic, partition, offset in _offsets(latest))
        for source in progress.get("sources") or ()
        if (ended := _by_partition(source.get("endOffset"))) and (latest := _by_partition(source.get("latestOffset")))
        if all(partition in ended.get(topic, {}) for topic, partition, _ in _offsets(latest))
    ]
    return sum(known) if known else None


def _by_partition(offsets: Any) -> dict[str, dict[str, int]]:
    """Return offsets by topic and partition; {} for offsets of another kind."""
    if not isinstance(offsets, dict) or not all(isinstance(of_topic, dict) for of_topic in offsets.values()):
        return {}
    is_known = all(isinstance(offset, int) for of_topic in offsets.values() for offset in of_topic.values())
    return offsets if is_known else {}


def _offsets(by_partition: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str, int]]:
    return [(topic, p, offset) for topic, of_topic in by_partition.items() for p, offset in of_topic.items()]


def _number(value: Any) -> float:
    """Return a rate of Spark's, which is NaN, Infinity or missing where there was nothing to divide."""
    return float(value) if isinstance(value, int | float) and 0 <= value < float("inf") else 0.0
