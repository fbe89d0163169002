"""Deliberate faults of the protocol. The simulation finds each, or the test that is named with a fault does.

A fault breaks one rule, as a mistake in the product could. The simulation tries the seeds of its range one after the
other until one fails. A change of the protocol gives each seed another course, so a range has at least eight times as
many seeds as it takes on average to find the fault. It begins where the fault is found soon today.

A fault that the simulation does not find, or not soon, has a ``test``: one that finds the fault without the
simulation. The simulation looks for such faults in a thorough run only.
That run also plants each fault and sees its ``test`` fail.

Two faults take away a protection that only a second mistake would need, so that no world shows them. stale-owner: a
host that has lost a partition is mostly refused as an incarnation that is not registered, and the host that opens the
next batch follows the manifest. any-base: a host applies changes only to the version that the manifest names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from tests.simulation.faults_of_coordinators import (
    blind_follower,
    early_follower,
    early_metadata,
    exchange_without_hold,
    first_attempt_stays,
    forgotten_changelog,
    forgotten_source,
    greedy_retention,
    hasty_commit,
    hasty_completion,
    hasty_repeat,
    kept_growth,
    kept_plan,
    last_speaker,
    late_fences,
    leapt_fences,
    long_leases,
    newest_of_each_partition,
    no_claim,
    no_fencing,
    no_floor,
    no_lookup_pin,
    no_lookup_record,
    old_files_stay,
    one_stage,
    overwriting_storage,
    prepared_is_completed,
    removal_beside_rewriting,
    returned_files_count,
    returned_files_stay,
    uncarried_record,
    unchecked_jobs,
    unfiltered_rewriting,
    unseen_duplicate,
    untold_hosts,
)
from tests.simulation.faults_of_hosts import (
    any_base,
    boastful_copies,
    cold_moves,
    early_look,
    evicted_in_use,
    first_part_counts,
    forgetful_eviction,
    hasty_group,
    kept_connection,
    kept_word,
    last_at_once,
    loads_pin_no_groups,
    lost_orders,
    mixed_runs,
    shared_threads,
    silent_first_member,
    skipped_changelog,
    stale_owner,
    swallowed_group,
    trusted_directory,
    trusting_givers,
    twice_promoted,
    uncommitted_reads,
    unheard_copies,
    unrenewed_uploads,
    wrong_offset,
)
from tests.simulation.searches import (
    STEPS,
    Prepare,
    as_it_is,
    in_which_copies_stand_by,
    in_which_forgetters_stall,
    in_which_hosts_come_and_go,
    in_which_hosts_fall_silent,
    in_which_jobs_look_up,
    in_which_keys_are_forgotten,
    in_which_local_files_go,
    in_which_plans_run_again,
    in_which_replaced_coordinators_live_on,
    in_which_state_is_rewritten,
    in_which_writes_come_late,
    on_failing_storage,
    restless_in_two_clusters,
)

Plant = Callable[[pytest.MonkeyPatch], None]
NO_SEEDS = range(0)
FORGETFUL = range(3, 403, 4)
"""Worlds that exchange files."""


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


_LOOKUPS = "tests/coordinator_actor/run/test_looked_up_versions.py"

FAULTS: Sequence[PlantedFault] = (
    PlantedFault(
        "no-lookup-record",
        "The version that a batch looks up is not recorded.",
        no_lookup_record,
        range(7000, 7040),
        None,
        f"{_LOOKUPS}::test_a_batch_gets_the_same_version_for_every_caller_and_after_any_crash",
    ),
    PlantedFault(
        "no-lookup-pin",
        "The version that a batch has looked up is not kept for its next attempt.",
        no_lookup_pin,
        range(7000, 7040),
        None,
        f"{_LOOKUPS}::test_only_versions_that_may_be_read_again_are_kept",
    ),
    PlantedFault(
        "unchecked-jobs",
        "A job reads the version that it has looked up from whichever run has made it last.",
        unchecked_jobs,
        range(7001, 7041),
        None,
        "tests/spark_bridge/test_lookup_task.py::test_a_version_in_hosts_that_is_made_again_during_a_job_is_an_error",
        in_which_jobs_look_up,
    ),
    PlantedFault(
        "no-fencing",
        "A coordinator that has lost the query continues to complete versions.",
        no_fencing,
        range(227, 367),
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
        "A registration claims no epoch, but continues under the newest one.",
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
        range(12, 112),
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
        "tests/coordinator_actor/test_hanging_storage.py::test_the_threads_and_waiting_calls_of_a_query_are_bounded",
    ),
    PlantedFault(
        "trusted-directory",
        "A host writes to the database that it finds, though another one was there when it read.",
        trusted_directory,
        range(2, 42),
        None,
        "tests/backends/engines/test_rocksdb.py::test_files_removed_under_a_database_that_was_only_read_lose_no_key",
        in_which_local_files_go,
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
        "Maintenance removes the snapshot that the oldest kept version begins with: one too many.",
        greedy_retention,
        range(178, 708),
    ),
    PlantedFault(
        "last-speaker",
        "Of two incarnations of a host, the one that spoke last is the host.",
        last_speaker,
        test="tests/coordinator_actor/handlers/test_replaced_hosts.py::"
        "test_a_replaced_host_learns_from_its_heartbeat_that_it_must_end",
    ),
    PlantedFault(
        "long-leases",
        "A host relies on its lease after the coordinator may have given it up for silence.",
        long_leases,
        range(5, 37),
        None,
        "tests/coordinator_actor/handlers/test_suspected_hosts.py::"
        "test_a_host_relies_on_its_lease_for_no_longer_than_the_coordinator_waits",
        prepare=in_which_hosts_fall_silent,
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
        range(242, 542),
        test="tests/coordinator_actor/handlers/test_repeated_batches.py::"
        "test_a_coordinator_that_restarts_in_a_repeat_continues_it",
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
        "A host that has loaded a partition for a duplicate attempt alone does not check for later commits of Spark.",
        unseen_duplicate,
        test="tests/spark_bridge/queryable/reads/test_prepared_versions.py::"
        "test_a_host_that_a_duplicate_attempt_has_opened_is_not_behind_spark",
    ),
    PlantedFault(
        "early-look",
        "A reader takes the look of an earlier one for its own.",
        early_look,
        test="tests/spark_bridge/queryable/reads/test_prepared_versions.py::"
        "test_readers_look_at_a_quick_disk_themselves",
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
        "test_one_more_request_at_most_aligns_the_versions",
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
        "tests/coordinator_actor/run/test_retention.py::test_a_group_stays_as_long_as_a_manifest_needs_one_of_its_parts",
    ),
    PlantedFault(
        "forgetful-eviction",
        "A host forgets the accepted commits to a partition that it evicts.",
        forgetful_eviction,
        range(104, 1000),
        None,
        "tests/spark_bridge/host/test_small_disk.py::"
        "test_a_commit_to_an_evicted_partition_counts_also_for_a_restarted_coordinator",
    ),
    PlantedFault(
        "evicted-in-use",
        "A partition is evicted although its task has not committed.",
        evicted_in_use,
        test="tests/spark_bridge/host/test_small_disk.py::test_a_partition_stays_until_its_task_has_committed",
    ),
    PlantedFault(
        "loads-pin-no-groups",
        "Maintenance removes groups that a load reads.",
        loads_pin_no_groups,
        test="tests/coordinator_actor/run/test_retention.py::test_no_group_is_removed_that_a_load_reads",
    ),
    PlantedFault(
        "kept-plan",
        "Behind an exchange of files, retention relies on snapshots that are gone.",
        kept_plan,
        test="tests/spark_bridge/state_surgery/test_running_queries.py::"
        "test_retention_does_not_rely_on_abandoned_snapshots",
    ),
    PlantedFault(
        "removal-beside-rewriting",
        "Files are removed that were rewritten for old versions, and that no manifest names yet.",
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
        "exchange-without-hold",
        "Files are exchanged under a hold that has lapsed since, without a check that they still exist.",
        exchange_without_hold,
        FORGETFUL,
        None,
        prepare=in_which_forgetters_stall,
    ),
    PlantedFault(
        "unfiltered-rewriting",
        "Rewritten files have the rows that are to be forgotten.",
        unfiltered_rewriting,
        FORGETFUL,
        None,
    ),
    PlantedFault(
        "kept-growth",
        "A rewritten changelog still says how many keys the one with the forgotten rows added.",
        kept_growth,
        FORGETFUL,
        None,
    ),
    PlantedFault(
        "old-files-stay",
        "Keys are reported as forgotten while files have them that no version needs any more.",
        old_files_stay,
        FORGETFUL,
        None,
    ),
    PlantedFault(
        "untold-hosts",
        "Keys are reported as forgotten while hosts answer with them.",
        untold_hosts,
        FORGETFUL,
        None,
        prepare=in_which_keys_are_forgotten,
    ),
    PlantedFault(
        "newest-of-each-partition",
        "A rewrite reads each partition at the version that is the newest when it comes to it.",
        newest_of_each_partition,
        range(400, 440),
        None,
        prepare=in_which_state_is_rewritten,
    ),
    PlantedFault(
        "early-metadata",
        "A rewrite makes its location a checkpoint before it has written the state.",
        early_metadata,
        range(400, 464),
        None,
        prepare=in_which_state_is_rewritten,
    ),
    PlantedFault(
        "returned-files-count",
        "A changelog that a late PUT brings back after an exchange counts again.",
        returned_files_count,
        range(800, 1000),
        None,
        prepare=in_which_writes_come_late,
    ),
    PlantedFault(
        "returned-files-stay",
        "Retention never looks for files that no manifest names.",
        returned_files_stay,
        range(800, 840),
        None,
        "tests/spark_bridge/state_surgery/test_forget_keys.py::"
        "test_files_recreated_by_late_writes_are_ignored_and_removed",
        prepare=in_which_writes_come_late,
    ),
    PlantedFault(
        "early-follower",
        "A follower takes up a version that Spark has not committed.",
        early_follower,
        range(2, 402, 4),
        None,
    ),
    PlantedFault(
        "blind-follower",
        "A follower does not look for a later manifest of the version that it serves.",
        blind_follower,
        test="tests/spark_bridge/test_followed_query.py::test_late_manifest_of_a_committed_batch_is_applied",
    ),
    PlantedFault(
        "unrenewed-uploads",
        "An upload that takes long counts as dead, so that files are exchanged during it.",
        unrenewed_uploads,
        test="tests/spark_bridge/host/test_snapshots_together.py::"
        "test_upload_counts_as_running_while_its_host_reports_it",
    ),
    PlantedFault(
        "silent-first-member",
        "The members of a group do not hear that its first member has failed to wait.",
        silent_first_member,
        test="tests/spark_bridge/host/test_group_commit.py::"
        "test_members_do_not_wait_for_a_first_member_whose_wait_has_failed",
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
        test="tests/coordinator_actor/run/test_moves.py::test_nothing_moves_to_a_host_that_has_not_loaded_it",
    ),
    PlantedFault(
        "trusting-givers",
        "A host whose partitions have moved takes the version that it knows for the newest.",
        trusting_givers,
        test="tests/coordinator_actor/run/test_moves.py::"
        "test_an_owner_that_has_given_partitions_away_never_answers_from_before_sparks_last_batch",
    ),
    PlantedFault(
        "last-at-once",
        "The user's call takes the last partition from a host that does not look at Spark's log yet.",
        last_at_once,
        test="tests/spark_bridge/queryable/reads/test_prepared_versions.py::"
        "test_host_that_gives_its_last_partition_away_without_waiting_is_not_behind_spark",
    ),
    PlantedFault(
        "kept-word",
        "A host's word that it looks at Spark's log counts after the answer that it need not look any more.",
        kept_word,
        test="tests/coordinator_actor/run/test_moves.py::"
        "test_a_move_that_is_cancelled_and_planned_again_waits_until_the_owner_looks_at_sparks_log_again",
    ),
    PlantedFault(
        "skipped-changelog",
        "A copy notes a version whose changelog it has not applied.",
        skipped_changelog,
        range(100, 140),
        prepare=in_which_copies_stand_by,
    ),
    PlantedFault(
        "twice-promoted",
        "A host with a copy answers like the owner, who still lives.",
        twice_promoted,
        range(119, 279),
        None,
        prepare=in_which_copies_stand_by,
    ),
    PlantedFault(
        "boastful-copies",
        "A copy gives its answer the version that its host has heard of.",
        boastful_copies,
        range(100, 180),
        None,
        prepare=in_which_copies_stand_by,
    ),
    PlantedFault(
        "kept-connection",
        "A host sends its heartbeats over a connection only, and so stays with a coordinator that was replaced.",
        kept_connection,
        range(100, 130),
        None,
        prepare=in_which_replaced_coordinators_live_on,
    ),
)
