"""The commit of a task: first a durable changelog, then the coordinator's answer, then an accepted version.

A task sends its changes to the owner of its partition (``spark_bridge.task.task_store``), whose Flight server calls
``TaskCommits.commit``. The coordinator accepts or refuses (``coordinator_actor.coordinator``: ``acknowledge_many``). An
accepted version is completed, for readers to see, when Spark has committed the batch (``PartitionLoader.complete``).
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from backends import spans
from backends.exceptions import LineageMismatchError, StoreClosedError
from backends.formats.changelog import ChangelogMeta, Changes, GroupMember, group_path, write_group
from backends.host_memory import CHANGELOGS, BoundedDict, HostMemory
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from backends.storage.requests import COUNTED_LOCATIONS, used_since
from coordinator_actor import messages
from coordinator_actor.exceptions import CoordinatorError
from spark_bridge.exceptions import not_open, rebuilt_error
from spark_bridge.host.instances import REMEMBERED_COMMITS, Counters, Instance
from spark_bridge.host.partition_cache import PartitionCache
from spark_bridge.host.prepared_versions import PreparedVersions
from spark_bridge.host.registration import HostRegistration
from spark_bridge.transport.protocol import TaskIdentity

# Counts the running tasks of an operator on a host: they have opened the batch and have no answer yet.
#
# The tasks of a batch start together if each has a slot, but open one after the other. Without a wait, the first
# ones would commit before the last ones have opened. The number of concurrent tasks changes little from batch to
# batch: it is the number of slots. Memory grows with the partitions of the host.

VAIN_WAITS = 3
"""After this many consecutive waits in which no task opened, the host stops waiting for tasks to open,"""
RETRY_BATCHES = 32
"""for this many batches."""


@dataclass
class _Operator:
    """One operator in one batch. ``came`` have opened it, ``at_work`` have no answer; ``most`` were so at once."""

    came: set[int] = field(default_factory=set)
    at_work: set[int] = field(default_factory=set)
    most: int = 0


class TasksAtWork:
    """The tasks of one batch of a run on this host, and the counts of the batch before. Not thread-safe."""

    def __init__(self) -> None:
        self._operators: dict[str, _Operator] = {}
        self._before: dict[str, _Operator] = {}
        self._vain = 0
        self._without = 0

    def next_batch(self) -> TasksAtWork:
        """Return the tasks of the next batch, with the counts of this one."""
        new = TasksAtWork()
        new._before = self._operators
        new._vain, new._without = self._vain, self._without
        if new._vain >= VAIN_WAITS:
            new._without += 1
            if new._without >= RETRY_BATCHES:
                new._vain = new._without = 0
        return new

    def opened(self, operator: str, partition: int) -> None:
        tasks = self._operators.setdefault(operator, _Operator())
        tasks.came.add(partition)
        tasks.at_work.add(partition)
        tasks.most = max(tasks.most, len(tasks.at_work))

    def answered(self, operator: str, partition: int) -> None:
        """Record that a task has freed its slot: its changes are durable, or could not be stored."""
        tasks = self._operators.get(operator)
        if tasks is not None:
            tasks.at_work.discard(partition)

    def expects_more(self) -> bool:
        """Return whether other tasks of a running operator are about to open.

        They are if fewer tasks are running, and fewer have opened, than in the batch before.
        """
        if self._vain >= VAIN_WAITS:
            return False
        for name, now in self._operators.items():
            before = self._before.get(name)
            if before is not None and 0 < len(now.at_work) < before.most and len(now.came) < len(before.came):
                return True
        return False

    def waited(self, *, in_vain: bool) -> None:
        """Record whether a wait for tasks ended without any of them opening (``in_vain``)."""
        self._vain = self._vain + 1 if in_vain else 0


# Group commit: changelogs that a host commits at about the same time go to storage in one object.
#
# On object storage each write is a request, which costs money and takes 30 to 100 ms however small it is. On a local
# disk each file is synced with its directory. So the number of writes of a batch should follow the hosts, not the
# partitions. A host knows which of its partitions have opened the batch and have not committed. It waits for these,
# for a bounded time. On object storage it also waits for as many tasks as ran at once in the batch before
# (``TasksAtWork``): tasks that start together open one after the other. On a local disk it waits only for groups of
# several members: a few tasks at once sync their own files as fast. Waiting pays only as long as a write takes, so no
# commit waits longer than recent writes have taken, or than ``OBJECT_SECONDS``. A partition that is being loaded for
# minutes, or whose task has died, misses two waits of a batch and is then no longer waited for. The format is in
# ``backends/formats/changelog.py``.


LARGE_BYTES = 4 << 20
"""A changelog of at least this many bytes goes alone: its transfer takes longer than a request, and the others would
wait for it.
"""
COMMIT_GROUP_BYTES = 16 << 20
"""A group of at least this many bytes does not wait for more members."""
LOCAL_SECONDS = 0.01
"""The longest wait on a local disk, however slow its recent writes are: a write there costs only its time."""
OBJECT_SECONDS = 0.03
"""On object storage a wait of this many seconds pays however fast storage is: there each write costs money."""
LOCAL_MEMBERS = 4
"""The smallest group worth waiting for on a local disk: fewer tasks sync their own files as fast as one for all."""
FIRST_WRITE_SECONDS = 0.01
"""The assumed duration of a write before the first one of a run."""
MISSED_WAITS = 2
"""A partition that has not come in this many waits of a batch is not waited for until one such partition comes."""
NEWEST_WRITE_SHARE = 0.25
"""The weight of the last write in the estimated duration of writes."""


class GroupCommit:
    """One group, from its first member on until it is stored. The lock of ``GroupCommits`` guards everything here.

    The thread of the first member stores the group for all: ``refs`` then has each member's part, or ``error`` the
    reason why there is none.
    """

    def __init__(self) -> None:
        self.members: list[GroupMember] = []
        self.nbytes = 0
        self.is_closed = False
        self.refs: list[FileRef] | None = None
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.refs is not None or self.error is not None


@dataclass
class _Batch:
    """The newest batch of a run that this host has opened, which makes ``version``.

    ``about_to_commit`` are the partitions that tasks have asked for in the batch and that have not committed since.
    ``missed`` is the number of waits that each of them has missed. ``group`` is the one that still takes members.
    ``write_seconds`` is how long the run's recent writes have taken.
    """

    version: int
    at_work: TasksAtWork
    write_seconds: float
    about_to_commit: set[tuple[str, int]] = field(default_factory=set)
    missed: Counter[tuple[str, int]] = field(default_factory=Counter)
    group: GroupCommit | None = None

    @property
    def num_awaited(self) -> int:
        """How many of those that are about to commit are waited for."""
        return sum(self.missed[partition] < MISSED_WAITS for partition in self.about_to_commit)

    def came(self, partition: tuple[str, int]) -> None:
        """Record a commit. A partition that had been given up has come, so wait for the other given-up ones again."""
        self.about_to_commit.discard(partition)
        if self.missed.pop(partition, 0) >= MISSED_WAITS:
            self.missed.clear()


class GroupCommits:
    """The groups of one host. Thread-safe: ``_changed`` guards everything, and is free while storage is written.

    A group is stored once it has every awaited partition, or after ``linger`` seconds or the time of a write, or at
    ``COMMIT_GROUP_BYTES``; also while an earlier group is still being stored. Memory: one batch for
    each run of the host.
    """

    def __init__(self, linger: float, memory: HostMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self._linger = linger
        self._memory = memory
        self._clock = clock
        self._changed = threading.Condition()
        self._batches: dict[str, _Batch] = {}

    def opened(self, run_id: str, version: int, operator: str, partition: int) -> None:
        """Record that a task asks for a partition, which may have to be loaded, and will commit ``version`` of it."""
        with self._changed:
            batch = self._batches.get(run_id)
            if batch is None:
                batch = self._batches[run_id] = _Batch(version, TasksAtWork(), FIRST_WRITE_SECONDS)
            elif batch.version < version:
                batch = self._batches[run_id] = _Batch(version, batch.at_work.next_batch(), batch.write_seconds)
            if batch.version == version:
                batch.about_to_commit.add((operator, partition))
                batch.at_work.opened(operator, partition)

    def forget(self, run_id: str | None) -> None:
        """Forget a run that is over; None: all of them. Groups that have members are still stored."""
        with self._changed:
            if run_id is None:
                self._batches.clear()
            else:
                self._batches.pop(run_id, None)

    def write_changelog(self, storage: CheckpointStorage, meta: ChangelogMeta, path: str, data: bytes) -> FileRef:
        """Store a changelog, alone or with others; return when it is durable.

        ``path`` is its name. Raises the errors of storing it, for every member of a group.
        """
        member = GroupMember(meta, path, data)
        with self._changed:
            batch, group, number = self._joined(member, is_object_storage=not storage.is_local)
            if batch is None or group is None:
                pass
            elif number == 0:
                self._wait_and_close(batch, group, meta, is_local=storage.is_local)
            else:
                with spans.step("host.group_commit.join"):  # the first member's span has the write for all
                    self._changed.wait_for(lambda: group.is_over)
        try:
            if group is None:
                return storage.put_unique(path, data)
            if number == 0:
                self._store(storage, group)
            if group.error is not None:
                raise group.error
            assert group.refs is not None
            return group.refs[number]
        finally:
            if batch is not None:
                with self._changed:
                    batch.at_work.answered(meta.operator, meta.partition)

    def _wait_and_close(self, batch: _Batch, group: GroupCommit, meta: ChangelogMeta, *, is_local: bool) -> None:
        try:
            with spans.step("host.group_commit.wait"):
                self._wait(batch, group, is_local=is_local)
        except BaseException as error:
            # This thread would have stored the group. The other members must not wait for it.
            group.error = error
            batch.at_work.answered(meta.operator, meta.partition)
            raise
        finally:
            self._close(group, meta)

    def _wait(self, batch: _Batch, group: GroupCommit, *, is_local: bool) -> None:
        """Wait for other members: as long as a write takes, again after each that joins, at most for ``linger``."""
        members, only_starts, awaited = len(group.members), not batch.num_awaited, set(batch.about_to_commit)
        until = self._clock() + (min(self._linger, LOCAL_SECONDS) if is_local else self._linger)
        came = 0
        while not group.is_closed and len(group.members) > came:
            came = len(group.members)
            pays = batch.write_seconds if is_local else max(batch.write_seconds, OBJECT_SECONDS)
            self._changed.wait_for(lambda: group.is_closed, min(pays, max(0.0, until - self._clock())))
            if is_local or self._clock() >= until:
                break
        if group.is_closed:
            return
        batch.missed.update(awaited & batch.about_to_commit)
        if only_starts:
            batch.at_work.waited(in_vain=len(group.members) == members)

    def _joined(self, member: GroupMember, *, is_object_storage: bool) -> tuple[_Batch | None, GroupCommit | None, int]:
        """Return the batch and the group that a changelog has joined, and its number there.

        The batch is None for a changelog of another batch than the newest, the group for one that is stored alone.
        ``is_object_storage``: a group also waits for tasks that have not opened the batch, and however few they are.
        """
        meta = member.meta
        batch = self._batches.get(meta.query_run_id)
        if batch is None or batch.version != meta.version:
            return None, None, 0  # late: no other task commits that version
        batch.came((meta.operator, meta.partition))
        group, number = batch.group, 0
        is_alone = not self._linger or len(member.data) >= LARGE_BYTES
        if not is_alone:
            group = batch.group = group or GroupCommit()
            number = len(group.members)
            group.members.append(member)
            group.nbytes += len(member.data)
        if group is not None:
            if is_object_storage:
                is_awaited = batch.num_awaited > 0 or batch.at_work.expects_more()
            else:
                num_awaited = batch.num_awaited
                is_awaited = num_awaited > 0 and len(group.members) + num_awaited >= LOCAL_MEMBERS
            if not is_awaited or group.nbytes >= COMMIT_GROUP_BYTES:
                self._close(group, meta)
        return batch, None if is_alone else group, number

    def _close(self, group: GroupCommit, meta: ChangelogMeta) -> None:
        """Close a group to further members."""
        group.is_closed = True
        batch = self._batches.get(meta.query_run_id)
        if batch is not None and batch.group is group:
            batch.group = None
        self._changed.notify_all()

    def _store(self, storage: CheckpointStorage, group: GroupCommit) -> None:
        """Store a closed group, and report the outcome to its members."""
        refs: list[FileRef] | None = None
        error: BaseException | None = None
        began = self._clock()
        try:
            refs = self._stored(storage, group.members)
        except BaseException as failed:  # noqa: BLE001 - every member raises it
            error = failed
        seconds = max(0.0, self._clock() - began)
        with self._changed:
            group.refs, group.error = refs, error
            batch = self._batches.get(group.members[0].meta.query_run_id)
            if batch is not None and error is None:
                batch.write_seconds += NEWEST_WRITE_SHARE * (seconds - batch.write_seconds)
            self._changed.notify_all()

    def _stored(self, storage: CheckpointStorage, members: list[GroupMember]) -> list[FileRef]:
        if len(members) == 1:
            return [storage.put_new(members[0].path, members[0].data)]
        path = group_path(members[0].meta.version)
        data, refs = write_group(path, members)
        written = self._memory.note(CHANGELOGS, len(data))
        storage.put_new(path, data)
        del written
        return refs


# Acknowledgements of tasks that commit at the same time, sent to the coordinator in one message.
#
# A thread that comes while a message is under way waits; then one of the waiting threads sends for all. So the number
# of messages follows the number of hosts, not of partitions, and a single acknowledgement is sent at once.


AcknowledgeMany = Callable[[str, tuple[messages.Acknowledge, ...]], Sequence[messages.Acknowledged | messages.Refused]]
"""Sends messages of one run to the coordinator, and returns an answer for each."""


@dataclass(eq=False)
class _Waiting:
    message: messages.Acknowledge
    answer: messages.Acknowledged | messages.Refused | BaseException | None = None


class Acknowledgements:
    """Collects the acknowledgements of one host.

    Thread-safe: ``_changed`` guards both tables, and is free during a message.
    """

    def __init__(self, acknowledge_many: AcknowledgeMany) -> None:
        self._acknowledge_many = acknowledge_many
        self._waiting: dict[str, list[_Waiting]] = {}
        self._sending: set[str] = set()
        self._changed = threading.Condition()

    def acknowledge(self, message: messages.Acknowledge) -> messages.Acknowledged:
        """Send a message, perhaps together with others.

        Raises the error with which the coordinator rejects the message.
        """
        run_id, own = message.run_id, _Waiting(message)
        with self._changed:
            self._waiting.setdefault(run_id, []).append(own)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: own.answer is not None or run_id not in self._sending)
                if own.answer is not None:
                    break
                self._sending.add(run_id)
                together = self._waiting.pop(run_id)
            answers: Sequence[messages.Acknowledged | messages.Refused | BaseException]
            try:
                answers = self._acknowledge_many(run_id, tuple(w.message for w in together))
                if len(answers) != len(together):
                    raise ValueError(f"{len(together)} acknowledgements of run {run_id} got {len(answers)} answers")
            except BaseException as error:  # noqa: BLE001 - all waiting threads must raise it
                answers = [error] * len(together)
            with self._changed:
                for waiting, answer in zip(together, answers, strict=True):
                    waiting.answer = answer
                self._sending.discard(run_id)
                self._changed.notify_all()
        if isinstance(own.answer, messages.Refused):
            raise rebuilt_error(own.answer.error, own.answer.message, CoordinatorError)
        if isinstance(own.answer, BaseException):
            raise own.answer
        return own.answer


@dataclass(eq=False, repr=False)
class TaskCommits:
    """Commits the changes of tasks, each under its partition's ``commit_lock``. ``on_commit`` is called after each."""

    _registration: HostRegistration
    _cache: PartitionCache
    _prepared: PreparedVersions
    _counters: Counters
    _groups: GroupCommits
    _on_commit: Callable[[], None]

    def __post_init__(self) -> None:
        self._asking = threading.Lock()
        self._used: BoundedDict[str, dict[str, int]] = BoundedDict(COUNTED_LOCATIONS)
        info, coordinator = self._registration.info, self._registration.coordinator
        self._acknowledgements = Acknowledgements(
            lambda run_id, several: coordinator.acknowledge_many(run_id, info.host_id, info.incarnation, several)
        )

    def commit(
        self,
        task: TaskIdentity,
        changes: Changes,
        timings: Mapping[str, float],
        figures: messages.OperatorFigures | None = None,
    ) -> messages.Acknowledged:
        """Make a task's changes durable and acknowledge them; return when the coordinator has accepted.

        ``timings`` are the task's milliseconds by step. The changelog is durable before the coordinator learns of it,
        so that no manifest names a missing file. If the coordinator rejects the commit, nothing has changed. Raises
        ``NotOwnerError`` if the partition is not open here at the task's batch, and the coordinator's error if it
        rejects.
        """
        info = self._registration.info
        instance = self._cache.instance(task.run_id, task.operator, task.partition)
        figures = figures or messages.OperatorFigures()
        if instance is None or instance.state.version != task.batch_id:
            raise not_open(info.host_id, task.run_id, task.operator, task.partition, task.batch_id)
        started = time.perf_counter()
        version = task.batch_id + 1
        attempts = instance.state.attempts
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
                    encoded = attempts.encode(meta, changes)
                    file = self._groups.write_changelog(encoded.storage, encoded.meta, encoded.path, encoded.changelog)
                    attempts.record(encoded, file)
                    del encoded  # its bytes are not needed during the acknowledgement
                if instance.key_windows is not None:
                    instance.key_windows.follow_changes(meta.base, file.path, changes)
            except (LineageMismatchError, StoreClosedError) as error:
                raise not_open(info.host_id, task.run_id, task.operator, task.partition, task.batch_id) from error
            durable = time.perf_counter()
            message = messages.Acknowledge(
                run_id=task.run_id,
                operator=task.operator,
                partition=task.partition,
                version=version,
                attempt=task.attempt,
                host_id=info.host_id,
                incarnation=info.incarnation,
                file=file,
                base=meta.base,
                duration=durable - started,
                stage=task.stage,
                figures=self._figures(instance, timings, figures, durable - started),
            )
            under = self._registration.number_of(task.run_id)
            try:
                with spans.step("host.acknowledge"):
                    answer = self._registration.call(task.run_id, lambda: self._acknowledgements.acknowledge(message))
            except CoordinatorError:
                attempts.discard(version, task.attempt)
                raise
            attempts.accept(version, task.attempt)
            instance.acknowledged[version] = message
            self._prepared.accepted(instance.registration, version, under)
            instance.in_use_until = -math.inf  # its changes are in storage
        self._on_commit()
        done = time.perf_counter()
        self._counters.count("commits")
        self._counters.count("keys_written", changes.num_changes)
        milliseconds = {**timings, "changelog_ms": (durable - started) * 1e3, "acknowledge_ms": (done - durable) * 1e3}
        with self._cache.lock:
            _count_dropped(instance, version, figures)
            earlier = {v: c for v, c in instance.commits.items() if version - REMEMBERED_COMMITS < v < version}
            instance.commits = {**earlier, version: (milliseconds, figures)}
        return answer

    def _figures(
        self, instance: Instance, timings: Mapping[str, float], figures: messages.OperatorFigures, seconds: float
    ) -> messages.CommitFigures:
        """Return the figures of a task for the history of checkpoints; its changelog took ``seconds``."""
        location = instance.registration.state_location
        with self._asking:
            used = instance.state.storage_used
            before = self._used.get(location, {})
            self._used[location] = used
        steps = {name: round(ms, 3) for name, ms in (*timings.items(), ("changelog_ms", seconds * 1e3))}
        return messages.CommitFigures(
            figures.num_rows,
            figures.num_rows_updated,
            figures.num_rows_removed,
            figures.num_rows_dropped_by_watermark,
            used_since(used, before),
            dict(list(steps.items())[-messages.MAX_STEPS :]),
            int(figures.custom.get(messages.DUPLICATES, 0)),
        )


def _count_dropped(instance: Instance, version: int, figures: messages.OperatorFigures) -> None:
    """Count the elements that the limits of lists have dropped: of the attempts at a version, those of the last."""
    dropped = figures.custom.get(messages.DROPPED_ELEMENTS)
    if dropped is None:
        return
    _, earlier = instance.commits.get(version, ({}, messages.OperatorFigures()))
    counted = (instance.dropped_elements or 0) - earlier.custom.get(messages.DROPPED_ELEMENTS, 0)
    instance.dropped_elements = int(counted + dropped)
