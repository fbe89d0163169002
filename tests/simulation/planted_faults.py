"""Deliberate faults of the protocol: the simulation, or the test that is named beside a fault, finds each.

A fault breaks one rule, as a mistake in the product could. The simulation tries the seeds of its range one after the
other until one fails. A change of the protocol gives each seed another course, so a range has at least eight times as
many seeds as it takes on average to find the fault. It begins where the fault is found soon today.

A fault that the simulation does not find, or not soon, has a ``test`` beside it: one without a simulation that sees the
fault. The simulation looks for such faults in a thorough run only.
That run also plants each fault and sees its ``test`` fail.

Two faults take away what only a second mistake would need, so that no world shows them: stale-owner (a host that has
lost a partition is mostly refused as an incarnation that is not registered, and whoever opens the next batch goes by
what the manifest names) and any-base (a host applies changes to what the manifest names, and to nothing else).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from backends.exceptions import FileExistsInStorageError, StorageError
from backends.formats import manifest_chain, retention
from backends.formats.changelog import Changes
from backends.formats.changelog_group import group_path, write_group
from backends.formats.manifest import ChangelogRef, Manifest, OperatorEntry
from backends.formats.partition_entries import PartitionEntries
from backends.formats.retention import Retention
from backends.partition.before_images import state_after
from backends.partition.loading import Loading
from backends.partition.pending_changes import PendingChanges
from backends.storage.create_if_absent import CreateIfAbsentProofs
from backends.storage.file_ref import FileRef
from coordinator_actor import coordinator as coordinator_module
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.durable.fencing import EPOCHS, FENCE, MANIFESTS, Epochs
from coordinator_actor.durable.lookup_records import LookupRecords
from coordinator_actor.durable.manifests import ManifestLog, manifest_path
from coordinator_actor.handlers import batches, owners
from coordinator_actor.handlers.registries.host_registry import HostRegistry
from coordinator_actor.messages import Acknowledged
from coordinator_actor.query.batch.rewriting_hold import RewritingHold
from coordinator_actor.query.batch.running_batch import RunningBatch
from coordinator_actor.query.files.files_in_use import FilesInUse
from coordinator_actor.query.query_state import QueryState
from coordinator_actor.query.retention import remove_garbage
from coordinator_actor.query.versions import recovery
from coordinator_actor.query.versions.looked_up_versions import LookedUpVersions
from coordinator_actor.query.versions.query_versions import QueryVersions
from coordinator_actor.threads.query_threads import QueryThreads
from spark_bridge.host.commits import group_commit
from spark_bridge.host.commits.group_commit import GroupCommit, GroupCommits
from spark_bridge.host.held.instance import Instance
from spark_bridge.host.host import Host
from spark_bridge.host.loading.hand_overs import HandOvers
from spark_bridge.host.loading.partition_loading import PartitionLoading
from spark_bridge.queryable.reads.versions.answer_version import PartitionView, VersionedReader
from spark_bridge.queryable.routing.monotonic_reads import SeenVersions
from tests.simulation.searches import (
    STEPS,
    Prepare,
    as_it_is,
    in_which_hosts_come_and_go,
    in_which_plans_run_again,
    on_failing_storage,
    restless_in_two_clusters,
)
from tests.simulation.storage import SimulatedStorage

Plant = Callable[[pytest.MonkeyPatch], None]
NO_SEEDS = range(0)
FORGETFUL = range(3, 403, 4)
"""Worlds in which files are exchanged."""


@dataclass(frozen=True)
class PlantedFault:
    """``breaks`` says what goes wrong, ``plant`` makes it so until the monkeypatch is undone.

    ``seeds`` are those among which the simulation finds it, each run for ``max_steps`` (None: to its end) in a world
    that ``prepare`` has changed; none if it does not find it. ``test`` is the one without a simulation that finds it.
    """

    name: str
    breaks: str
    plant: Plant
    seeds: range = NO_SEEDS
    max_steps: int | None = STEPS
    test: str | None = None
    prepare: Prepare = as_it_is


def last_speaker(monkeypatch: pytest.MonkeyPatch) -> None:
    register: Callable[..., None] = HostRegistry.register

    def forgetting(self: Any, *args: Any) -> None:
        self._newest.clear()
        register(self, *args)

    monkeypatch.setattr(HostRegistry, "register", forgetting)


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

    def joining(self: Any, *args: Any) -> list[str]:
        claimed = self._files.numbers(EPOCHS)
        if not claimed:
            return claim(self, *args)
        self.current = claimed[-1]
        return [path for path, size in self._files.storage.list(f"{MANIFESTS}/") if size != len(FENCE)]

    monkeypatch.setattr(Epochs, "claim", joining)


def overwriting_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    put_new: Callable[..., FileRef] = SimulatedStorage.put_new

    def put(self: Any, path: str, data: bytes) -> FileRef:
        self._disk.directory(self.location, path).pop(path, None)
        return put_new(self, path, data)

    monkeypatch.setattr(SimulatedStorage, "put_new", put)
    # What refuses such a storage; it has tests of its own.
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
    end: Callable[..., None] = RunningBatch.end_repeat

    def hasty(self: RunningBatch) -> None:
        with suppress(StorageError):
            end(self)

    monkeypatch.setattr(RunningBatch, "end_repeat", hasty)


def hasty_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    again: Callable[..., bool] = RunningBatch._acknowledge_again

    def hasty(self: RunningBatch, *args: Any) -> bool:
        try:
            return again(self, *args)
        except StorageError:
            return True

    monkeypatch.setattr(RunningBatch, "_acknowledge_again", hasty)


def shared_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    submit: Callable[..., Any] = QueryThreads.submit
    monkeypatch.setattr(QueryThreads, "submit", lambda self, query, work: submit(self, "all queries", work))


def stale_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: Callable[..., Any] = batches._checked

    def lenient(run: Any, message: Any, assignment: Any) -> Any:
        owner = assignment.owner(message.operator, message.partition)
        return checked(run, msgspec.structs.replace(message, host_id=owner.host_id), assignment)

    monkeypatch.setattr(batches, "_checked", lenient)


def any_base(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: Callable[..., Any] = batches._checked

    def lenient(run: Any, message: Any, assignment: Any) -> Any:
        base = run.versions.head(message.version - 1, message.operator, message.partition)
        return checked(run, msgspec.structs.replace(message, base=base), assignment)

    monkeypatch.setattr(batches, "_checked", lenient)


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
        held = view(self, *args)
        version, head = held.state.newest()
        return replace(held, version=version, head=head)

    monkeypatch.setattr(VersionedReader, "_view", newest)


def greedy_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    needed_files: Callable[..., set[str]] = retention.needed_files

    def greedy(chain: Any, kept: Retention, *args: Any) -> set[str]:
        bases = [
            base._replace(snapshot=msgspec.structs.replace(base.snapshot, version=base.snapshot.version + 1))
            if base.snapshot is not None
            else base
            for base in kept.bases
        ]
        return needed_files(chain, Retention(kept.oldest, kept.chain_from, bases), *args)

    monkeypatch.setattr(retention, "needed_files", greedy)


def lost_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionLoading, "unload_run", lambda self, run_id: None)


def prepared_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    take_over: Callable[..., None] = QueryState.take_over

    def hasty(self: QueryState, **given: bool) -> None:
        take_over(self, **given)
        if self.batch.prepared is not None:
            self.complete(self.versions.completed + 1)

    monkeypatch.setattr(QueryState, "take_over", hasty)


def forgotten_changelog(monkeypatch: pytest.MonkeyPatch) -> None:
    replay: Callable[..., None] = Loading._replay

    def hasty(self: Any, changelogs: Iterable[tuple[ChangelogRef, bytes]]) -> None:
        given = list(changelogs)
        replay(self, given[:-1])
        if given:
            last, nothing = given[-1][0], Changes({})
            self._engine.prepare(nothing)(state_after(self._engine.state, last.version, last.file.path, nothing, None))
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
    write: Callable[..., tuple[bytes, list[FileRef]]] = group_commit.write_group

    def shifted(path: str, members: Any) -> tuple[bytes, list[FileRef]]:
        data, refs = write(path, members)
        return data, [msgspec.structs.replace(ref, offset=ref.offset + 1) if ref.offset else ref for ref in refs]

    monkeypatch.setattr(group_commit, "write_group", shifted)


def first_part_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stored_in: Callable[..., str] = PartitionEntries.stored_in

    def of_first(self: PartitionEntries, partition: int) -> str:
        return stored_in(self, partition) if partition == min(self) else self.head(partition)

    monkeypatch.setattr(PartitionEntries, "stored_in", of_first)


def loads_pin_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FilesInUse, "oldest", lambda self, now: math.inf)


def unheard_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionLoading, "warm_version", lambda self, registration, operator, partition: None)


def cold_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    ready: Callable[..., Any] = owners._ready

    def hasty(registries: Any, run: Any, current: Any) -> Any:
        planned = run.assignment.planned
        for receiver in planned.values():
            if (lease := registries.hosts.leases.get(receiver)) is not None:
                warm: dict[str, dict[int, int]] = {}
                for operator, partition in planned:
                    warm.setdefault(operator, {})[partition] = run.versions.completed
                lease.hand_over = msgspec.structs.replace(lease.hand_over, warm={run.run_id: warm})
        return ready(registries, run, current)

    monkeypatch.setattr(owners, "_ready", hasty)


def trusting_givers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandOvers, "gives", lambda self, run_id: False)


def no_lookup_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookupRecords, "find", lambda self, by, batch_id: None)
    monkeypatch.setattr(LookupRecords, "make", lambda self, by, batch_id, record: record)


def no_lookup_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookedUpVersions, "_keep", lambda self, by: None)


def kept_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueryVersions, "plan_anew", lambda self: None)


def removal_beside_rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    def removing(run: QueryState, now: float) -> list[str]:
        held, run.rewriting = run.rewriting, RewritingHold()
        try:
            return remove_garbage(run, now)
        finally:
            run.rewriting = held

    monkeypatch.setattr(coordinator_module, "remove_garbage", removing)


def uncarried_record(monkeypatch: pytest.MonkeyPatch) -> None:
    append: Callable[..., Manifest] = ManifestLog.append

    def forgetting(self: Any, *args: Any) -> Manifest:
        self.rewritten = ()
        return append(self, *args)

    monkeypatch.setattr(ManifestLog, "append", forgetting)


_LOOKUPS = "tests/coordinator_actor/query/versions/test_looked_up_versions.py"

FAULTS: Sequence[PlantedFault] = (
    PlantedFault(
        "no-lookup-record",
        "The version that a batch looks up is not recorded.",
        no_lookup_record,
        range(7000, 7040),
        None,
        f"{_LOOKUPS}::test_a_batch_is_told_the_same_version_whoever_asks_and_whatever_has_died",
    ),
    PlantedFault(
        "no-lookup-pin",
        "The version that a batch has looked up is not kept for its next attempt.",
        no_lookup_pin,
        range(7000, 7040),
        None,
        f"{_LOOKUPS}::test_what_may_be_read_again_is_kept_and_no_more",
    ),
    PlantedFault(
        "no-fencing",
        "A coordinator that has lost the query goes on completing versions.",
        no_fencing,
        range(152, 252),
        prepare=restless_in_two_clusters,
    ),
    PlantedFault(
        "leapt-fences",
        "A coordinator that meets a fence writes its manifest behind the fence.",
        leapt_fences,
        range(135, 235),
        prepare=restless_in_two_clusters,
    ),
    PlantedFault(
        "late-fences",
        "A claim reads the manifests before it closes the lower epochs.",
        late_fences,
        test="tests/coordinator_actor/durable/test_fencing.py::test_a_manifest_that_is_written_during_a_claim_is_read",
    ),
    PlantedFault(
        "no-claim",
        "A registration claims no epoch, but goes on under the newest one.",
        no_claim,
        range(205, 365),
        None,
        "tests/coordinator_actor/test_coordinator.py::test_of_two_coordinators_only_the_newer_completes_versions",
    ),
    PlantedFault(
        "overwriting-storage",
        "Storage ignores create-if-absent, and nothing has refused it.",
        overwriting_storage,
        range(114, 714),
        test="tests/coordinator_actor/durable/test_create_if_absent.py::"
        "test_a_query_on_storage_that_overwrites_is_refused_before_anything_is_written",
    ),
    PlantedFault(
        "hasty-commit",
        "A commit is answered though its changelog was not written.",
        hasty_commit,
        range(2, 102),
        prepare=on_failing_storage,
    ),
    PlantedFault(
        "hasty-completion",
        "A version completes though the manifest of its repeat failed, which may exist all the same.",
        hasty_completion,
        range(145, 545),
        test="tests/coordinator_actor/handlers/test_repeated_batches.py::"
        "test_a_version_is_not_completed_before_the_manifest_of_its_repeat_is_written",
        prepare=in_which_plans_run_again,
    ),
    PlantedFault(
        "hasty-repeat",
        "A repeat is answered though its manifest failed.",
        hasty_repeat,
        range(542, 642),
        prepare=in_which_plans_run_again,
    ),
    PlantedFault(
        "shared-threads",
        "All queries share the threads of one.",
        shared_threads,
        range(219, 1019, 10),  # calm worlds: elsewhere batches may be slow
        None,
        "tests/coordinator_actor/test_hanging_storage.py::test_a_query_has_so_many_threads_and_so_much_may_wait",
    ),
    PlantedFault(
        "stale-owner",
        "Changes are taken from a host that does not own the partition any more.",
        stale_owner,
        test="tests/coordinator_actor/test_coordinator.py::test_acknowledgements_count_only_from_the_owner_that_is_known",
    ),
    PlantedFault(
        "any-base",
        "Changes are taken that apply to something else than the head of the version below.",
        any_base,
        test="tests/coordinator_actor/test_coordinator.py::test_acknowledgements_count_only_from_the_owner_that_is_known",
    ),
    PlantedFault(
        "mixed-runs",
        "A version that no manifest names is put together from changes of two runs, which may have seen other rows.",
        mixed_runs,
        test="tests/coordinator_actor/test_coordinator.py::test_changes_of_two_runs_never_make_one_version",
    ),
    PlantedFault(
        "uncommitted-reads",
        "A query reads what tasks have prepared and Spark has not committed.",
        uncommitted_reads,
        range(121, 171),
    ),
    PlantedFault(
        "greedy-retention",
        "Maintenance removes the snapshot with which the oldest kept version begins: one too many.",
        greedy_retention,
        range(146, 246),
    ),
    PlantedFault(
        "last-speaker",
        "Of two incarnations of a host, the one that spoke last is the host.",
        last_speaker,
        test="tests/coordinator_actor/handlers/test_replaced_hosts.py::"
        "test_a_replaced_host_learns_from_its_heartbeat_that_it_must_end",
    ),
    PlantedFault(
        "lost-orders",
        "Hosts do not unload the runs that are over.",
        lost_orders,
        range(204, 220),
        None,
    ),
    PlantedFault(
        "prepared-is-completed",
        "Behind a restart of the coordinator a prepared version is completed without Spark's commit.",
        prepared_is_completed,
        range(8, 308),
        test="tests/coordinator_actor/handlers/test_repeated_batches.py::"
        "test_a_coordinator_that_restarts_in_a_repeat_goes_on_with_it",
    ),
    PlantedFault(
        "forgotten-changelog",
        "A load leaves out the last changelog, and says that it has come to its version.",
        forgotten_changelog,
        range(103, 153),
    ),
    PlantedFault(
        "forgotten-source",
        "A partition of a rescaled query takes over the keys of all earlier ones but the last.",
        forgotten_source,
        range(125, 325),
    ),
    PlantedFault(
        "unseen-duplicate",
        "A host that has loaded a partition for a duplicate attempt alone does not look whether Spark has gone on.",
        unseen_duplicate,
        test="tests/spark_bridge/queryable/reads/versions/test_prepared_versions.py::"
        "test_a_host_that_a_duplicate_attempt_has_opened_is_not_behind_spark",
    ),
    PlantedFault(
        "one-stage",
        "Behind a restart all changes that a manifest names count as of the highest stage that it names.",
        one_stage,
        test="tests/coordinator_actor/handlers/test_repeated_batches.py::"
        "test_a_task_that_is_tried_again_within_a_repeat_hides_no_later_one",
    ),
    PlantedFault(
        "no-floor",
        "A client does not say which version it has seen, and takes an older one.",
        no_floor,
        test="tests/spark_bridge/queryable/routing/test_routed_versions.py::"
        "test_at_most_one_more_question_levels_the_versions",
    ),
    PlantedFault(
        "first-attempt-stays",
        "The changes of the first accepted attempt stay in memory though another one was accepted.",
        first_attempt_stays,
        range(9, 169, 10),  # calm worlds: elsewhere state may be loaded again
        None,
    ),
    PlantedFault(
        "hasty-group",
        "The members of a group are answered before the group is stored.",
        hasty_group,
        range(264, 464),
        prepare=on_failing_storage,
    ),
    PlantedFault(
        "swallowed-group",
        "The members of a group do not hear that it could not be stored.",
        swallowed_group,
        range(159, 259),
        prepare=on_failing_storage,
    ),
    PlantedFault(
        "wrong-offset",
        "Manifests say that a part of a group begins a byte later than it does.",
        wrong_offset,
        range(100, 200),
    ),
    PlantedFault(
        "first-part-counts",
        "Maintenance removes a group although another part of it than the first partition's is needed.",
        first_part_counts,
        range(100, 300),
        None,
        "tests/coordinator_actor/query/test_retention.py::test_a_group_stays_as_long_as_a_manifest_needs_one_of_its_parts",
    ),
    PlantedFault(
        "loads-pin-no-groups",
        "Maintenance removes groups that a load reads.",
        loads_pin_no_groups,
        test="tests/coordinator_actor/query/test_retention.py::test_no_group_is_removed_that_a_load_reads",
    ),
    PlantedFault(
        "kept-plan",
        "Behind an exchange of files, retention relies on snapshots that are gone.",
        kept_plan,
        test="tests/spark_bridge/state_surgery/test_running_queries.py::"
        "test_what_retention_has_planned_does_not_rely_on_snapshots_that_are_given_up",
    ),
    PlantedFault(
        "removal-beside-rewriting",
        "Files are removed that were written anew for old versions, and that no manifest names yet.",
        removal_beside_rewriting,
        FORGETFUL,
        None,
    ),
    PlantedFault(
        "uncarried-record",
        "Manifests behind an exchange of files do not name its record.",
        uncarried_record,
        FORGETFUL,
        None,
    ),
    PlantedFault(
        "unheard-copies",
        "A new owner does not say that it has loaded what is to move, so that nothing moves.",
        unheard_copies,
        range(5, 45),
        None,
        prepare=in_which_hosts_come_and_go,
    ),
    PlantedFault(
        "cold-moves",
        "Partitions move to a host that has not loaded them.",
        cold_moves,
        test="tests/coordinator_actor/query/owners/test_moves.py::test_nothing_moves_to_a_host_that_has_not_loaded_it",
    ),
    PlantedFault(
        "trusting-givers",
        "A host whose partitions have moved takes the version that it knows for the newest.",
        trusting_givers,
        test="tests/coordinator_actor/query/owners/test_moves.py::"
        "test_an_owner_that_has_given_partitions_away_never_answers_from_before_sparks_last_batch",
    ),
)
