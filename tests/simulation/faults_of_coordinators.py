"""Deliberate faults of coordinators: fencing, completion, records, retention. ``planted_faults.py`` has the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from backends.exceptions import FileExistsInStorageError, StorageError
from backends.formats import manifest_chain
from backends.formats.changelog import Changes, GroupMember, read_changelog, read_changelog_meta
from backends.formats.manifest import ChangelogRef, Manifest, OperatorEntry
from backends.formats.manifest_chain import Retention
from backends.partition.loading import Loading, state_after
from backends.partition.readable_versions import PendingChanges
from backends.storage.checkpoint_storage import CreateIfAbsentProofs
from backends.storage.locations import FileRef
from coordinator_actor import coordinator as coordinator_module
from coordinator_actor.checkpoints.pending_checkpoint import CheckpointIDCounter
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.durable.fencing import EPOCHS, FENCE, MANIFESTS, Epochs
from coordinator_actor.durable.manifests import ManifestLog, RewrittenFiles, manifest_path
from coordinator_actor.durable.records import LookupRecord, LookupRecords
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.handlers.queries import Queries
from coordinator_actor.handlers.registries import HostRegistry
from coordinator_actor.handlers.rewritings import Rewritings
from coordinator_actor.messages import Acknowledged
from coordinator_actor.reading.stored_versions import Piece, StateVersions
from coordinator_actor.rewriting import ForgottenKeys, Rewriting
from coordinator_actor.run.holds import Hold, KnownFiles, RewritingHold
from coordinator_actor.run.query_state import QueryState
from coordinator_actor.run.retention import remove_garbage
from coordinator_actor.run.state_machine import WriteManifest
from coordinator_actor.run.versions import LookedUpVersions, QueryVersions
from coordinator_actor.savepoints.new_checkpoint import NewCheckpoint
from spark_bridge.host.host import Host
from spark_bridge.host.instances import Instance
from spark_bridge.queryable.routing.router import SeenVersions
from spark_bridge.state_data.state_sources import StateSource
from tests.simulation.storage import SimulatedStorage


def last_speaker(monkeypatch: pytest.MonkeyPatch) -> None:
    register: Callable[..., None] = HostRegistry.register

    def forgetting(self: Any, *args: Any) -> None:
        self._newest.clear()
        register(self, *args)

    monkeypatch.setattr(HostRegistry, "register", forgetting)


def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoordinatorConf, "lease_seconds", property(lambda self: self.host_timeout))


def no_fencing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Epochs, "_fence", lambda self, last: last[1])


def leapt_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: Any, manifest: Manifest, counter: CheckpointIDCounter) -> Manifest:
        while True:
            placed = msgspec.structs.replace(manifest, epoch=self.epoch, sequence=self._sequence + 1)
            self._sequence += 1
            try:
                self._files.create(manifest_path(placed), placed)
            except FileExistsInStorageError:
                continue
            self.manifests[placed.id] = placed
            return placed

    monkeypatch.setattr(ManifestLog, "append", append)


def late_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    close: Callable[..., None] = Epochs._close

    def claim(self: Any, run_id: str, layouts: Any = (), schema_ids: Any = None) -> None:
        monkeypatch.setattr(Epochs, "_fence", lambda self, last: last[1])
        self.epochs.claim(run_id, layouts, schema_ids)
        self._sequence = 0
        self.refresh()
        monkeypatch.setattr(Epochs, "_close", close)
        close(self.epochs, range(1, self.epoch))

    monkeypatch.setattr(ManifestLog, "claim", claim)


def no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    claim: Callable[..., list[str]] = Epochs.claim

    def joining(self: Any, *args: Any, **more: Any) -> list[str]:
        claimed = self._files.numbers(EPOCHS)
        if not claimed:
            return claim(self, *args, **more)
        self.current = claimed[-1]
        return [path for path, size in self._files.storage.list(f"{MANIFESTS}/") if size != len(FENCE)]

    monkeypatch.setattr(Epochs, "claim", joining)


def overwriting_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    put_new: Callable[..., FileRef] = SimulatedStorage.put_new

    def put(self: Any, path: str, data: bytes) -> FileRef:
        self._disk.directory(self.location, path).pop(path, None)
        return put_new(self, path, data)

    monkeypatch.setattr(SimulatedStorage, "put_new", put)
    # Disable the check that refuses such a storage; other tests cover it.
    monkeypatch.setattr(CreateIfAbsentProofs, "require", lambda self, storage: None)


def hasty_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    commit: Callable[..., Any] = Host.commit

    def hasty(self: Any, *args: Any) -> Any:
        try:
            return commit(self, *args)
        except StorageError:
            return Acknowledged(0, None)

    monkeypatch.setattr(Host, "commit", hasty)


def hasty_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    settle: Callable[..., None] = QueryState._settle

    def hasty(self: QueryState, version: int) -> None:
        is_repeat = self.machine.acknowledged(version) and self.machine.named_by(version) is None
        try:
            settle(self, version)
        except StorageError:
            if not is_repeat:
                raise

    monkeypatch.setattr(QueryState, "_settle", hasty)


def hasty_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    perform: Callable[..., None] = QueryState.perform

    def hasty(self: QueryState, write: WriteManifest | None) -> None:
        is_repeat = write is not None and write.checkpoint is not None and self.machine.prepared is not None
        try:
            perform(self, write)
        except StorageError:
            if not is_repeat:
                raise

    monkeypatch.setattr(QueryState, "perform", hasty)


def greedy_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    needed_files: Callable[..., set[str]] = manifest_chain.needed_files

    def greedy(chain: Any, kept: Retention, *args: Any) -> set[str]:
        bases = [
            base._replace(snapshot=msgspec.structs.replace(base.snapshot, version=base.snapshot.version + 1))
            if base.snapshot is not None
            else base
            for base in kept.bases
        ]
        return needed_files(chain, Retention(kept.oldest, kept.chain_from, bases), *args)

    monkeypatch.setattr(manifest_chain, "needed_files", greedy)


def prepared_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    take_over: Callable[..., None] = QueryState.take_over

    def hasty(self: QueryState, **given: bool) -> None:
        take_over(self, **given)
        if self.machine.prepared is not None:
            self.complete(self.versions.completed + 1)

    monkeypatch.setattr(QueryState, "take_over", hasty)


def forgotten_changelog(monkeypatch: pytest.MonkeyPatch) -> None:
    replay: Callable[..., None] = Loading._replay

    def hasty(self: Any, changelogs: Iterable[tuple[ChangelogRef, bytes]]) -> None:
        given = list(changelogs)
        replay(self, given[:-1])
        if given:
            last, nothing = given[-1][0], Changes({})
            self._engine.prepare(nothing)(state_after(self._engine.state, last.version, last.file.path, None))
            self.version, self.head = last.version, last.file.path

    monkeypatch.setattr(Loading, "_replay", hasty)


def forgotten_source(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: Callable[..., range] = manifest_chain._sources

    def fewer(*args: Any) -> range:
        found = sources(*args)
        return found[:-1] if len(found) > 1 else found

    monkeypatch.setattr(manifest_chain, "_sources", fewer)


def unseen_duplicate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instance, "loaded_at", property(lambda self: -1, lambda self, version: None))


def one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OperatorEntry, "stage_of", lambda self, partition: self.stage)


def no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeenVersions, "floor", lambda self, run_id, at: at)


def first_attempt_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    accept: Callable[..., bool] = PendingChanges.accept

    def keeping(self: PendingChanges, version: int, attempt: str) -> bool:
        earlier = self._accepted.get(version)
        accepted = accept(self, version, attempt)
        if earlier is not None:
            self._accepted[version] = earlier
        return accepted

    monkeypatch.setattr(PendingChanges, "accept", keeping)


def no_lookup_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookupRecords, "find", lambda self, by, batch_id: None)
    monkeypatch.setattr(LookupRecords, "make", lambda self, by, batch_id, record: record)


def no_lookup_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookedUpVersions, "_keep", lambda self, by: None)


def unchecked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookupRecord, "require_made_by", lambda self, run_id: None)


def kept_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueryVersions, "drop_plan", lambda self: None)


def removal_beside_rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    def removing(run: QueryState, now: float) -> list[str]:
        held, run.machine.rewriting = run.machine.rewriting, RewritingHold()
        try:
            return remove_garbage(run, now)
        finally:
            run.machine.rewriting = held

    monkeypatch.setattr(coordinator_module, "remove_garbage", removing)


def exchange_without_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    hold_query: Callable[..., Any] = Rewritings.hold_query

    def forgiving(self: Any, query: str, holder: str, seconds: float, *, hold: str = "", **more: Any) -> Any:
        run = self._runs.running(query, or_ended=True)
        now = self._registries.clock()
        if hold and run.machine.rewriting.at(now) is None:
            run.machine.rewriting._hold = Hold(hold, holder, None, now + seconds)
        return hold_query(self, query, holder, seconds, hold=hold, **more)

    monkeypatch.setattr(Rewritings, "hold_query", forgiving)
    # What would find that out.
    monkeypatch.setattr(Rewriting, "missing", lambda self, sizes: [])


def unfiltered_rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForgottenKeys, "without", lambda self, family, pairs: pairs)


def kept_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    filtered: Callable[..., GroupMember] = Rewriting._filtered

    def hasty(self: Any, layout: Any, partition: int, data: bytes, base: Any) -> GroupMember:
        meta = filtered(self, layout, partition, data, base).meta
        kept = {f: self._forgotten.without(f, pairs) for f, pairs in read_changelog(data)[1].families.items()}
        growth = read_changelog_meta(data).key_growth
        member: GroupMember = self._member(layout, partition, replace(meta, key_growth=growth), Changes(kept))
        return member

    monkeypatch.setattr(Rewriting, "_filtered", hasty)


def old_files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rewriting, "obsolete", lambda self, paths, versions: iter(()))


def untold_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RewritingHold, "exchanged", lambda self, now: None)
    monkeypatch.setattr(RewritingHold, "is_clean", lambda self, host_id: True)


def returned_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    record: Callable[..., RewrittenFiles] = ManifestLog.record

    def trusting(self: Any, path: str) -> RewrittenFiles:
        held, location, disk = record(self, path), self.storage.location, self.storage._disk
        made = disk.born[location, path]
        new = {
            old: ref
            for old, ref in held.changelogs.items()
            if old not in disk.directory(location, old) or disk.born[location, old] <= made
        }
        return msgspec.structs.replace(held, changelogs=new)

    monkeypatch.setattr(ManifestLog, "record", trusting)


def returned_files_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    look: Callable[..., None] = KnownFiles.look

    def blind(self: KnownFiles, storage: Any, completed: int) -> None:
        known = self.paths
        look(self, storage, completed)
        self.paths = known

    monkeypatch.setattr(KnownFiles, "look", blind)


def newest_of_each_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: Callable[..., Any] = StateSource.batches

    def newest(self: StateSource, piece: Piece) -> Any:
        place, operator = self.reading.place, self.reading.operator
        now = StateVersions.look(place, open_storage=self.open_storage).reading(operator).pieces
        return batches(self, next((held for held in now if held.directory == piece.directory), piece))

    monkeypatch.setattr(StateSource, "batches", newest)


def early_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    finish: Callable[..., None] = NewCheckpoint.finish
    write_schemas: Callable[..., None] = NewCheckpoint.write_schemas

    def early(self: NewCheckpoint, schemas: Any) -> None:
        finish(self)
        write_schemas(self, schemas)

    monkeypatch.setattr(NewCheckpoint, "write_schemas", early)
    monkeypatch.setattr(NewCheckpoint, "finish", lambda self: None)


def blind_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ManifestLog, "has_news", lambda self: False)


def early_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    next_batch: Callable[..., int] = SparkCommits.next_batch

    def begun(self: Any) -> int:
        completed = next_batch(self)
        return completed + 1 if self.had_begun(completed) else completed

    take_up: Callable[..., Any] = Queries.take_up_versions

    def early(self: Any, *args: Any) -> Any:
        with monkeypatch.context() as while_it_looks:
            while_it_looks.setattr(SparkCommits, "next_batch", begun)
            return take_up(self, *args)

    monkeypatch.setattr(Queries, "take_up_versions", early)


def uncarried_record(monkeypatch: pytest.MonkeyPatch) -> None:
    append: Callable[..., Manifest] = ManifestLog.append

    def forgetting(self: Any, *args: Any) -> Manifest:
        self.rewritten = ()
        return append(self, *args)

    monkeypatch.setattr(ManifestLog, "append", forgetting)
