"""Deliberate faults of hosts: owners, reads, moves and group commit. ``planted_faults.py`` has the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.rocksdb import LocalRocksDB
from backends.exceptions import StorageError
from backends.formats.changelog import Changes, group_path, write_group
from backends.formats.manifest import PartitionEntries
from backends.partition import partition_state
from backends.storage.locations import FileRef
from coordinator_actor.direct_calls import DIRECT
from coordinator_actor.handlers.hosts import Hosts
from coordinator_actor.handlers.locations import Locations, gives
from coordinator_actor.run import recovery
from coordinator_actor.run.holds import FilesInUse
from coordinator_actor.run.owners import RunAssignment
from coordinator_actor.run.state_machine import RunMachine
from coordinator_actor.threads import QueryThreads
from spark_bridge.host import commits
from spark_bridge.host.commits import GroupCommit, GroupCommits
from spark_bridge.host.hand_overs import HandOvers
from spark_bridge.host.local_disk import DiskRoom
from spark_bridge.host.maintenance import Maintenance
from spark_bridge.host.partition_cache import PartitionCache
from spark_bridge.host.prepared_versions import PreparedVersions
from spark_bridge.queryable.reads.answer_version import PartitionView, VersionedReader
from tests.simulation import network


def unrenewed_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maintenance, "_renew_leases", lambda self: None)


def kept_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "goes_direct", lambda method, seconds: method in DIRECT)


def silent_first_member(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(self: Any, batch: Any, group: GroupCommit, meta: Any, *, is_local: bool) -> None:
        self._wait(batch, group, is_local=is_local)
        self._close(group, meta)

    monkeypatch.setattr(GroupCommits, "_wait_and_close", silent)


def shared_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    submit: Callable[..., Any] = QueryThreads.submit
    monkeypatch.setattr(QueryThreads, "submit", lambda self, query, work: submit(self, "all queries", work))


def trusted_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    opens: Callable[..., None] = LocalRocksDB._open
    monkeypatch.setattr(LocalRocksDB, "_open", lambda self, access=None, *, expected=None: opens(self, access))


def stale_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    check: Callable[..., Any] = RunMachine.check_acknowledgement

    def lenient(self: RunMachine, message: Any, owner: Any) -> Any:
        return check(self, msgspec.structs.replace(message, host_id=owner.host_id), owner)

    monkeypatch.setattr(RunMachine, "check_acknowledgement", lenient)


def any_base(monkeypatch: pytest.MonkeyPatch) -> None:
    check: Callable[..., Any] = RunMachine.check_acknowledgement

    def lenient(self: RunMachine, message: Any, owner: Any) -> Any:
        base = self.versions.head(message.version - 1, message.operator, message.partition)
        return check(self, msgspec.structs.replace(message, base=base), owner)

    monkeypatch.setattr(RunMachine, "check_acknowledgement", lenient)


def mixed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: Callable[..., Any] = recovery._stored_changelog

    def of_any_run(
        log: Any, versions: Any, layout: Any, partition: int, version: int, run_id: str, *found_in: Any
    ) -> Any:
        runs = [run_id, *log.epochs.runs()]
        found = (stored(log, versions, layout, partition, version, one, *found_in) for one in runs)
        return next((entry for entry in found if entry is not None), None)

    monkeypatch.setattr(recovery, "_stored_changelog", of_any_run)


def uncommitted_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    view: Callable[..., PartitionView] = VersionedReader._view

    def newest(self: Any, *args: Any) -> PartitionView:
        completed = view(self, *args)
        assert completed.instance is not None
        version, head = completed.instance.state.newest()
        return replace(completed, version=version, head=head)

    monkeypatch.setattr(VersionedReader, "_view", newest)


def lost_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionCache, "unload_run", lambda self, run_id: None)


def hasty_group(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Callable[..., None] = GroupCommits._store

    def hasty(self: Any, storage: Any, group: GroupCommit) -> None:
        if len(group.members) == 1:
            store(self, storage, group)
            return
        path = group_path(group.members[0].meta.version)
        data, refs = write_group(path, group.members)
        with self._changed:
            group.refs = refs
            self._changed.notify_all()
        with suppress(StorageError):
            storage.put_new(path, data)

    monkeypatch.setattr(GroupCommits, "_store", hasty)


def swallowed_group(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: Callable[..., list[FileRef]] = GroupCommits._stored

    def swallowing(self: Any, storage: Any, members: Any) -> list[FileRef]:
        try:
            return stored(self, storage, members)
        except StorageError:
            return write_group(group_path(members[0].meta.version), members)[1]

    monkeypatch.setattr(GroupCommits, "_stored", swallowing)


def wrong_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    write: Callable[..., tuple[bytes, list[FileRef]]] = commits.write_group

    def shifted(path: str, members: Any) -> tuple[bytes, list[FileRef]]:
        data, refs = write(path, members)
        return data, [msgspec.structs.replace(ref, offset=ref.offset + 1) if ref.offset else ref for ref in refs]

    monkeypatch.setattr(commits, "write_group", shifted)


def first_part_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stored_in: Callable[..., str] = PartitionEntries.stored_in

    def of_first(self: PartitionEntries, partition: int) -> str:
        return stored_in(self, partition) if partition == min(self) else self.head(partition)

    monkeypatch.setattr(PartitionEntries, "stored_in", of_first)


def loads_pin_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FilesInUse, "oldest", lambda self, now: math.inf)


def unheard_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    report: Callable[..., Any] = HandOvers.report
    monkeypatch.setattr(HandOvers, "report", lambda self: msgspec.structs.replace(report(self), warm={}))


def cold_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    ready_moves: Callable[..., Any] = RunAssignment.ready_moves

    def hasty(self: RunAssignment, hand_overs: Any, completed: int) -> Any:
        warm: dict[str, dict[int, int]] = {}
        for operator, partition in self.planned:
            warm.setdefault(operator, {})[partition] = completed
        receivers = set(self.planned.values())
        said = {
            host_id: msgspec.structs.replace(said, warm={self._run_id: warm}) if host_id in receivers else said
            for host_id, said in hand_overs.items()
        }
        return ready_moves(self, said, completed)

    monkeypatch.setattr(RunAssignment, "ready_moves", hasty)


def trusting_givers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandOvers, "gives", lambda self, run_id: False)


def last_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunAssignment, "_made_at_once", lambda self, target, owner_of, hosts: dict(target))


def kept_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(self: Hosts, run: Any, lease: Any, hand_over: Any) -> bool:
        with self._registries.lock:
            if hand_over is not None and hand_over.number == lease.hand_over.number:
                lease.hand_over = hand_over
        return gives(run, lease.info.host_id)

    monkeypatch.setattr(Hosts, "_gives", kept)


def skipped_changelog(monkeypatch: pytest.MonkeyPatch) -> None:
    read: Callable[..., Any] = partition_state.read_changelog

    def nothing(data: bytes, name: str) -> Any:
        meta, changes = read(data, name)
        skips = meta.version % 3 == 0
        return meta, Changes({f: SortedPairs.empty() for f in changes.families}) if skips else changes

    monkeypatch.setattr(partition_state, "read_changelog", nothing)


def twice_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    locate: Callable[..., Any] = Locations.locate
    view: Callable[..., PartitionView] = VersionedReader._view

    def either(self: Locations, *args: Any) -> Any:
        location = locate(self, *args)
        copies = [location.standbys.get(owner.host_id, ()) for owner in location.owners]
        both = (copy[0] if copy else owner for copy, owner in zip(copies, location.owners, strict=True))
        return msgspec.structs.replace(location, owners=tuple(both))

    def own_or_copy(self: Any, plan: Any, partition: int, completed: Any) -> PartitionView:
        copy = self._host.cache.copy(plan.run_id, plan.operator, partition)
        if copy is None:
            return view(self, plan, partition, completed)
        return PartitionView(partition, copy.state.reads, completed.version, None, copy)

    monkeypatch.setattr(Locations, "locate", either)
    monkeypatch.setattr(VersionedReader, "_view", own_or_copy)


def boastful_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    stale: Callable[..., Any] = VersionedReader._stale

    def boastful(self: Any, plan: Any, partitions: Any, at: Any, read: Any) -> Any:
        _, results = stale(self, plan, partitions, at, read)
        return self._host.completed.newest(plan.run_id).version, results

    monkeypatch.setattr(VersionedReader, "_stale", boastful)


def forgetful_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    evict: Callable[..., bool] = PartitionCache.evict

    def forgetful(self: PartitionCache, instance: Any, **how: bool) -> bool:
        is_evicted = evict(self, instance, **how)
        self._evicted.pop(instance.key, None)
        return is_evicted

    monkeypatch.setattr(PartitionCache, "evict", forgetful)


def evicted_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    evict: Callable[..., bool] = DiskRoom._evict_least_used

    def hasty(self: DiskRoom, key: Any = None) -> bool:
        for instance in self._cache.all():
            instance.in_use_until = -math.inf
        return evict(self, key)

    monkeypatch.setattr(DiskRoom, "_evict_least_used", hasty)


def early_look(monkeypatch: pytest.MonkeyPatch) -> None:
    is_open: Callable[..., bool] = PreparedVersions._is_open

    def remembered(self: PreparedVersions, prepared: Any) -> bool:
        self.open_versions = getattr(self, "open_versions", set())  # type: ignore[attr-defined]
        key = prepared.registration.run_id, prepared.version
        if key not in self.open_versions and is_open(self, prepared):  # type: ignore[attr-defined]
            self.open_versions.add(key)  # type: ignore[attr-defined]
        return key in self.open_versions  # type: ignore[attr-defined]

    monkeypatch.setattr(PreparedVersions, "_is_open", remembered)
