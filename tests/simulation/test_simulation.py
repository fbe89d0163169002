"""A fixed set of seeds of the simulation, and that it is worth something: runs repeat exactly, and broken rules are
found.

More seeds: ``python -m tests.simulation --steps 1000000``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from backends.exceptions import StorageError
from coordinator_actor.durable import fencing
from coordinator_actor.messages import Acknowledged
from coordinator_actor.query.running_batch import RunningBatch
from coordinator_actor.query_threads import QueryThreads
from spark_bridge.host import host
from tests.effort import effort
from tests.simulation.scheduler import Violation
from tests.simulation.world import Result, World, run

QUICK = effort(range(2, 4), range(8))


def check(result: Result) -> None:
    if result.failure is not None:
        pytest.fail(str(result), pytrace=False)


@pytest.mark.parametrize("seed", QUICK)
def test_a_troubled_world_keeps_the_rules(seed: int) -> None:
    check(run(seed))


def test_a_hanging_storage_of_one_query_is_not_felt_by_another() -> None:
    for seed in effort([9], range(9, 200, 10)):
        check(run(seed))


@pytest.mark.thorough  # otherwise: test_hanging_storage.py of the coordinator
@pytest.mark.long
def test_queries_that_share_their_threads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    submit: Callable[..., Any] = QueryThreads.submit
    monkeypatch.setattr(QueryThreads, "submit", lambda self, query, work: submit(self, "all queries", work))
    assert any(isinstance(run(seed).failure, Violation) for seed in range(9, 400, 10))


@pytest.mark.thorough  # otherwise: the seeds of test_a_troubled_world_keeps_the_rules
@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 1100, 5))
def test_many_troubled_worlds_keep_the_rules(first: int) -> None:
    for seed in range(first, first + 5):
        check(run(seed))


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = run(3, max_steps=3000, traced=True), run(3, max_steps=3000, traced=True)
    assert first.steps == 3000 and first.batches > 0
    assert (first.trace, first.batches, first.last_events) == (second.trace, second.batches, second.last_events)
    assert run(4, max_steps=3000, traced=True).trace != first.trace


def restless_in_two_clusters(world: World) -> None:
    world.parted = world.restless = 1.0


def on_failing_storage(world: World) -> None:
    world.faults.storage_error = 0.02


def in_which_plans_run_again(world: World) -> None:
    """Several partitions, most plans run again, whole or in part, and storage fails now and then."""
    world.repeated, world.faults.storage_error = 0.8, 0.02
    for stream in world.streams:
        stream.num_partitions = max(2, stream.num_partitions)


def first_failure(seeds: range, prepare: Callable[[World], None]) -> Result:
    """The first of these seeds that finds it in few steps: a whole run that finds nothing costs most.

    ``prepare`` makes the world one in which there is often something to find. One seed in ten
    finds it. A change of the protocol gives each seed another course, so the range is wide.
    """
    for seed in seeds:
        result = run(seed, max_steps=3000, prepare=prepare)
        if result.failure is not None:
            return result
    raise AssertionError("Nothing was found.")


def test_a_manifest_that_is_not_fenced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that has lost the query goes on completing versions."""
    monkeypatch.setattr(fencing.Epochs, "check", lambda self: None)
    found = first_failure(range(2026, 2126), restless_in_two_clusters)
    assert isinstance(found.failure, Violation), found
    assert f"--seed {found.seed}" in str(found) and len(found.last_events) > 10


def test_a_commit_that_is_answered_though_its_changelog_was_not_written_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commit: Callable[..., Any] = host.Host.commit

    def hasty(self: Any, *args: Any) -> Any:
        try:
            return commit(self, *args)
        except StorageError:
            return Acknowledged(0, None)

    monkeypatch.setattr(host.Host, "commit", hasty)
    assert isinstance(first_failure(range(2101, 2201), on_failing_storage).failure, Violation)


@pytest.mark.parametrize("seed", QUICK)
def test_a_world_in_which_plans_run_again_keeps_the_rules(seed: int) -> None:
    check(run(seed, prepare=in_which_plans_run_again))


def test_a_version_that_completes_though_the_manifest_of_its_repeat_failed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The manifest may exist all the same, and then what is completed changes with the next coordinator."""
    end: Callable[..., None] = RunningBatch.end_repeat

    def hasty(self: RunningBatch) -> None:
        with suppress(StorageError):
            end(self)

    monkeypatch.setattr(RunningBatch, "end_repeat", hasty)
    assert isinstance(first_failure(range(100, 300), in_which_plans_run_again).failure, Violation)


def test_a_repeat_that_is_answered_though_its_manifest_failed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    again: Callable[..., bool] = RunningBatch._acknowledge_again

    def hasty(self: RunningBatch, *args: Any) -> bool:
        try:
            return again(self, *args)
        except StorageError:
            return True

    monkeypatch.setattr(RunningBatch, "_acknowledge_again", hasty)
    assert isinstance(first_failure(range(100, 300), in_which_plans_run_again).failure, Violation)
