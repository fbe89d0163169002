"""The commit of a task: first a durable changelog, then the coordinator's answer, then an accepted version.

A task sends its changes to the owner of its partition (``spark_bridge.task.task_store``), whose Flight server calls
``TaskCommits.commit``. The coordinator accepts or refuses (``coordinator_actor.coordinator``: ``acknowledge_many``). An
accepted version is completed, for readers to see, when Spark has committed the batch (``PartitionLoading.complete``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from backends.bounded_dict import BoundedDict
from backends.exceptions import LineageMismatchError, StoreClosedError
from backends.formats.changelog import ChangelogMeta, Changes
from backends.storage.file_ref import FileRef
from backends.storage.sending.request_counts import COUNTED_LOCATIONS, used_since
from backends.tracing import spans
from coordinator_actor.exceptions import CoordinatorError
from coordinator_actor.messages import (
    DROPPED_ELEMENTS,
    DUPLICATES,
    MOST_STEPS,
    Acknowledge,
    Acknowledged,
    CommitFigures,
    HostInfo,
    OperatorFigures,
)
from spark_bridge.exceptions import not_open
from spark_bridge.host.commits.acknowledgements import Acknowledgements
from spark_bridge.host.commits.group_commit import GroupCommits
from spark_bridge.host.coordination.prepared_versions import PreparedVersions
from spark_bridge.host.coordination.registration import HostRegistration
from spark_bridge.host.counters import Counters
from spark_bridge.host.held.held_partitions import HeldPartitions
from spark_bridge.host.held.instance import REMEMBERED_COMMITS, Instance
from spark_bridge.transport.protocol import TaskIdentity


class TaskCommits:
    """Commits the changes of tasks, each under its partition's ``commit_lock``."""

    def __init__(
        self,
        registration: HostRegistration,
        held: HeldPartitions,
        prepared: PreparedVersions,
        counters: Counters,
        groups: GroupCommits,
    ) -> None:
        self._registration = registration
        self._held = held
        self._prepared = prepared
        self._counters = counters
        self._groups = groups
        self._asking = threading.Lock()
        self._used: BoundedDict[str, dict[str, int]] = BoundedDict(COUNTED_LOCATIONS)
        info = registration.info
        self._acknowledgements = Acknowledgements(
            lambda run_id, messages: registration.coordinator.acknowledge_many(
                run_id, info.host_id, info.incarnation, messages
            )
        )

    def commit(
        self, task: TaskIdentity, changes: Changes, timings: Mapping[str, float], figures: OperatorFigures | None = None
    ) -> Acknowledged:
        """Make a task's changes durable and acknowledge them; return when the coordinator has accepted.

        ``timings`` are the task's milliseconds by step. The changelog is durable before the coordinator hears of it, so
        that no manifest names a file that is not there. If the coordinator refuses, nothing has changed. Raises
        ``NotOwnerError`` if the partition is not open here at the task's batch, and what the coordinator refuses with.
        """
        info = self._registration.info
        instance = self._held.instance(task.run_id, task.operator, task.partition)
        if instance is None or instance.state.version != task.batch_id:
            raise not_open(info.host_id, task.run_id, task.operator, task.partition, task.batch_id)
        started = time.perf_counter()
        version = task.batch_id + 1
        with instance.commit_lock:
            meta = ChangelogMeta(
                query_run_id=task.run_id,
                operator=task.operator,
                partition=task.partition,
                num_partitions=instance.spec.num_partitions,
                version=version,
                attempt=task.attempt,
                base=instance.state.head,
            )
            try:
                with spans.step("host.changelog"):
                    file = instance.state.attempts.stage(meta, changes, self._groups.put)
                if instance.key_windows is not None:
                    instance.key_windows.add(meta.base, file.path, changes)
            except (LineageMismatchError, StoreClosedError) as error:
                raise not_open(info.host_id, task.run_id, task.operator, task.partition, task.batch_id) from error
            durable = time.perf_counter()
            done_by_task = self._figures(instance, timings, figures or OperatorFigures(), durable - started)
            message = _acknowledgement(info, meta, file, durable - started, task.stage, done_by_task)
            under = self._registration.number
            try:
                with spans.step("host.acknowledge"):
                    answer = self._registration.call(lambda: self._acknowledgements.acknowledge(message))
            except CoordinatorError:
                instance.state.attempts.discard(version, task.attempt)
                raise
            instance.state.attempts.accept(version, task.attempt)
            instance.acknowledged[version] = message
            self._prepared.accepted(instance.registration, version, under)
        done = time.perf_counter()
        self._counters.add("commits")
        self._counters.add("keys_written", changes.num_changes)
        milliseconds = {
            **timings,
            "changelog_ms": (durable - started) * 1e3,
            "acknowledge_ms": (done - durable) * 1e3,
        }
        with self._held.lock:
            _count_dropped(instance, version, figures or OperatorFigures())
            earlier = {v: c for v, c in instance.commits.items() if version - REMEMBERED_COMMITS < v < version}
            instance.commits = {**earlier, version: (milliseconds, figures or OperatorFigures())}
        return answer

    def _figures(
        self, instance: Instance, timings: Mapping[str, float], figures: OperatorFigures, seconds: float
    ) -> CommitFigures:
        """Return the figures of a task for the history of checkpoints; its changelog took ``seconds``."""
        location = instance.registration.state_location
        with self._asking:
            used = instance.state.storage_used
            before = self._used.get(location, {})
            self._used[location] = used
        steps = {name: round(ms, 3) for name, ms in (*timings.items(), ("changelog_ms", seconds * 1e3))}
        return CommitFigures(
            figures.num_rows,
            figures.num_rows_updated,
            figures.num_rows_removed,
            figures.num_rows_dropped_by_watermark,
            used_since(used, before),
            dict(list(steps.items())[-MOST_STEPS:]),
            int(figures.custom.get(DUPLICATES, 0)),
        )


def _count_dropped(instance: Instance, version: int, figures: OperatorFigures) -> None:
    """Count the elements that the limits of lists have dropped: of the attempts at a version, those of the last."""
    dropped = figures.custom.get(DROPPED_ELEMENTS)
    if dropped is None:
        return
    _, earlier = instance.commits.get(version, ({}, OperatorFigures()))
    counted = (instance.dropped_elements or 0) - earlier.custom.get(DROPPED_ELEMENTS, 0)
    instance.dropped_elements = int(counted + dropped)


def _acknowledgement(
    info: HostInfo, meta: ChangelogMeta, file: FileRef, duration: float, stage: int | None, figures: CommitFigures
) -> Acknowledge:
    """Return the message for a durable changelog of a task of that stage, which took ``duration`` seconds."""
    return Acknowledge(
        run_id=meta.query_run_id,
        operator=meta.operator,
        partition=meta.partition,
        version=meta.version,
        attempt=meta.attempt,
        host_id=info.host_id,
        incarnation=info.incarnation,
        file=file,
        base=meta.base,
        duration=duration,
        stage=stage,
        figures=figures,
    )
