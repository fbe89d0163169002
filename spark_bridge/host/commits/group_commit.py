"""Group commit: changelogs that a host commits at about the same time go to storage in one object.

On object storage each write is a request, which costs money and takes 30 to 100 ms however small it is. On a local disk
each file is synced with its directory. So the number of writes of a batch should follow the hosts, not the partitions.
A host knows which of its partitions have opened the batch and have not committed: these are waited for, for a bounded
time. On object storage it also waits for as many as were at work at once in the batch before (``tasks_at_work.py``):
tasks that start together open one after the other. On a local disk it waits for groups of some members only: few tasks
at once sync files of their own as fast. To wait pays only as long as a write takes, so nobody waits longer than writes
have taken lately, or than ``OBJECT_SECONDS``. A partition that is being loaded for minutes, or whose task has died, has
let two waits of a batch pass, and is waited for no more. The format is in ``backends/formats/changelog_group.py``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from backends.formats.changelog import ChangelogMeta
from backends.formats.changelog_group import GroupMember, group_path, write_group
from backends.host_memory import CHANGELOGS, HostMemory
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.file_ref import FileRef
from backends.tracing import spans
from spark_bridge.host.commits.tasks_at_work import TasksAtWork

LARGE_BYTES = 4 << 20
"""A changelog of at least this many bytes goes alone: its transfer takes longer than a request, and the others would
wait for it.
"""
COMMIT_GROUP_BYTES = 16 << 20
"""A group of at least this many bytes waits for no more."""
LOCAL_SECONDS = 0.01
"""Nobody waits longer on a local disk, however slow it is lately: there a write costs nothing but its time."""
OBJECT_SECONDS = 0.03
"""On object storage a wait of this many seconds pays however fast storage is: there each write costs money."""
LOCAL_MEMBERS = 4
"""On a local disk nobody waits for a smaller group: few tasks at once sync their own files as fast as one for all."""
FIRST_WRITE_SECONDS = 0.01
"""How long a write is taken to last before the first one of a run."""
MISSED_WAITS = 2
"""A partition that has not come in this many waits of a batch is not waited for until one such partition comes."""
NEWEST_WRITE_SHARE = 0.25
"""How much the last write counts in how long writes take."""


class GroupCommit:
    """One group, from its first member on until it is stored. The lock of ``GroupCommits`` guards everything here.

    The thread of the first member stores the group for all: ``refs`` has each member's part then, or ``error`` says why
    there is none.
    """

    def __init__(self) -> None:
        self.members: list[GroupMember] = []
        self.nbytes = 0
        self.is_closed = False
        self.refs: list[FileRef] | None = None
        self.error: BaseException | None = None

    def add(self, member: GroupMember) -> int:
        """Take a member in; return its number."""
        self.members.append(member)
        self.nbytes += len(member.data)
        return len(self.members) - 1

    @property
    def is_over(self) -> bool:
        """Whether it is known what has become of the group."""
        return self.refs is not None or self.error is not None


@dataclass
class _Batch:
    """The newest batch of a run that this host has opened, which makes ``version``.

    ``about_to_commit`` are the partitions for which tasks have asked in the batch and that have not committed since,
    ``missed`` how many waits each of them has let pass. ``group`` is the one that still takes members.
    ``write_seconds`` is how long the run's writes have taken lately.
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
        """Take note of a commit: if nobody waited for it any more, others that were given up may come as well."""
        self.about_to_commit.discard(partition)
        if self.missed.pop(partition, 0) >= MISSED_WAITS:
            self.missed.clear()


class GroupCommits:
    """The groups of one host. Thread-safe: ``_changed`` guards everything, and is free while storage is written.

    A group is stored once every partition is in it that is awaited, or has come to ``linger`` seconds, to as many as a
    write takes, or to ``COMMIT_GROUP_BYTES``; also while an earlier group is still being stored. Memory: one batch for
    each run of the host.
    """

    def __init__(self, linger: float, memory: HostMemory, clock: Callable[[], float] = time.monotonic) -> None:
        self._linger = linger
        self._memory = memory
        self._clock = clock
        self._changed = threading.Condition()
        self._batches: dict[str, _Batch] = {}

    def opened(self, run_id: str, version: int, operator: str, partition: int) -> None:
        """Take note that a task asks for a partition, perhaps one to be loaded, and will commit ``version`` of it."""
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
        """Forget a run that is over; None: all of them. Groups that have members are stored all the same."""
        with self._changed:
            if run_id is None:
                self._batches.clear()
            else:
                self._batches.pop(run_id, None)

    def put(self, storage: CheckpointStorage, meta: ChangelogMeta, path: str, data: bytes) -> FileRef:
        """Store a changelog, alone or with others; return when it is durable.

        ``path`` is its name. Raises what storing it raises; of a group every member does.
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
        """Wait for other members: as long as a write takes, and again while some have come, for ``linger`` at most."""
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

        The batch is None for a changelog of another batch than the newest, the group for one that is to go alone.
        ``is_object_storage``: a group also waits for tasks that have not opened the batch, and however few they are.
        """
        meta = member.meta
        batch = self._batches.get(meta.query_run_id)
        if batch is None or batch.version != meta.version:
            return None, None, 0  # late: nobody else commits that version
        batch.came((meta.operator, meta.partition))
        group = batch.group
        if not self._linger or len(member.data) >= LARGE_BYTES:
            number = -1
        else:
            group = batch.group = group or GroupCommit()
            number = group.add(member)
        if group is not None:
            if is_object_storage:
                is_awaited = batch.num_awaited > 0 or batch.at_work.expects_more()
            else:
                num_awaited = batch.num_awaited
                is_awaited = num_awaited > 0 and len(group.members) + num_awaited >= LOCAL_MEMBERS
            if not is_awaited or group.nbytes >= COMMIT_GROUP_BYTES:
                self._close(group, meta)
        return (batch, None, 0) if number < 0 else (batch, group, number)

    def _close(self, group: GroupCommit, meta: ChangelogMeta) -> None:
        """Let a group take no more members."""
        group.is_closed = True
        batch = self._batches.get(meta.query_run_id)
        if batch is not None and batch.group is group:
            batch.group = None
        self._changed.notify_all()

    def _store(self, storage: CheckpointStorage, group: GroupCommit) -> None:
        """Store a closed group, and tell its members what has become of it."""
        refs: list[FileRef] | None = None
        error: BaseException | None = None
        began = self._clock()
        try:
            refs = self._stored(storage, group.members)
        except BaseException as failed:  # noqa: BLE001 - every member raises it
            error = failed
        taken = max(0.0, self._clock() - began)
        with self._changed:
            group.refs, group.error = refs, error
            batch = self._batches.get(group.members[0].meta.query_run_id)
            if batch is not None and error is None:
                batch.write_seconds += NEWEST_WRITE_SHARE * (taken - batch.write_seconds)
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
