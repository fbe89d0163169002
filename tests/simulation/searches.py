"""Searching seeds for a failure, and worlds in which some faults have much to spoil."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.world import Result, World, run

STEPS = 4000
"""So many of each seed: a whole run that finds nothing costs most."""
Prepare = Callable[[World], None]


def as_it_is(world: World) -> None:
    """Leave the world as its seed makes it."""


def restless_in_two_clusters(world: World) -> None:
    """Have something go wrong each second, and drivers that start again do so in the other cluster."""
    world.parted = world.restless = 1.0


def on_failing_storage(world: World) -> None:
    """Have storage fail now and then."""
    world.faults.storage_error = 0.02


def in_which_plans_run_again(world: World) -> None:
    """Have several partitions, most plans run again, whole or in part, and storage fail now and then."""
    world.repeated, world.faults.storage_error = 0.8, 0.02
    for stream in world.streams:
        stream.num_partitions = max(2, stream.num_partitions)


def in_which_hosts_come_and_go(world: World) -> None:
    """Have hosts come and go all the time, and little else go wrong, while many ask; messages are late or lost."""
    world.faults.heal()
    world.faults.message_lost = world.faults.message_late = 0.02
    world.troubles.only = [world.troubles.scale]
    world.restless, world.pace, world.num_clients, world.is_calm = 1.0, 0.5, 6, False
    for stream in world.streams:
        stream.most_seconds = None
        stream.num_partitions = max(3, stream.num_partitions)


def first_failure(seeds: range, max_steps: int | None = STEPS, prepare: Prepare = as_it_is) -> Result:
    """Return the result of the first of these seeds that fails. Raises ``AssertionError`` if none does."""
    for seed in seeds:
        result = run(seed, max_steps=max_steps, prepare=prepare)
        if result.failure is not None:
            return result
    raise AssertionError(f"None of {len(seeds)} seeds from {seeds.start} on has found anything.")
