"""Searching seeds for a failure, and the worlds to search in: some worlds give a fault more chances to do damage."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.simulation.engine import backends
from tests.simulation.outsiders import ALL_OUTSIDERS, Forgetter, Forker, Rewriter
from tests.simulation.world import Constants, Result, World, is_calm, run

STEPS = 4000
"""So many of each seed: a whole run that finds nothing costs most."""
Prepare = Callable[[World], None]
FOUND = Path(__file__).with_name("found.txt")
"""Seeds that have failed, each with its world. The suite runs them."""


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
    """Have hosts come and go all the time, and little else go wrong, while many ask; messages are late or lost.

    In half of the worlds, hosts that were to go stay, and the user has the partitions spread.
    """
    world.faults.heal()
    world.faults.message_lost = world.faults.message_late = 0.02
    world.troubles.only = [world.troubles.scale]
    if world.seed % 2 == 0:
        world.troubles.only += [world.troubles.stay, world.troubles.rebalance]
    world.restless, world.pace, world.num_clients, world.is_calm = 1.0, 0.5, 6, False
    for stream in world.streams:
        stream.most_seconds = None
        stream.num_partitions = max(3, stream.num_partitions)


def in_which_copies_stand_by(world: World) -> None:
    """Have copies of all partitions, clients that take answers of copies, and hosts that are lost for long or in pairs.

    In one of three worlds, keys are forgotten as well.
    """
    world.standby_replicas, world.num_hosts = 1 + world.seed % 2, 3
    troubles = world.troubles
    troubles.only = [troubles.kill_host, troubles.kill_for_long, troubles.kill_with_a_copy, troubles.kill_coordinator]
    troubles.only += [troubles.cut_off, troubles.pause, troubles.scale, troubles.kill_driver, troubles.ask_to_go_back]
    world.is_calm, world.restless, world.num_clients = False, 5.0, 4
    world.outsiders = [Forgetter(world)] if world.seed % 3 == 0 else []
    for stream in world.streams:
        stream.most_seconds = None
        stream.num_partitions = max(3, stream.num_partitions)


def in_which_replaced_coordinators_live_on(world: World) -> None:
    """Have coordinators cut off from Ray that live on for minutes beside their successors, and little else go wrong."""
    world.faults.heal()
    world.troubles.only = [world.troubles.cut_off]
    world.restless, world.is_calm, world.outlives = 10.0, False, 1000.0
    world.streams[0].most_seconds = None


def in_which_hosts_fall_silent(world: World) -> None:
    """Have hosts cut off from the coordinator all the time, while tasks and clients reach them, and many ask."""
    world.faults.heal()
    world.troubles.only = [world.troubles.sever]
    world.restless, world.pace, world.num_clients, world.is_calm = 8.0, 0.5, 6, False
    world.num_hosts = max(2, world.num_hosts)
    for stream in world.streams:
        stream.most_seconds = None
        stream.num_partitions = max(3, stream.num_partitions)


def in_which_local_files_go(world: World) -> None:
    """Have local files of RocksDB removed under hosts all the time, between restarts that load them again."""
    world.backends = backends(is_rocksdb=True)
    world.troubles.only = [world.troubles.clean_local_files, world.troubles.kill_host]
    world.restless, world.is_calm = 1.0, False
    for stream in world.streams:
        stream.most_seconds, stream.backend = None, world.backends[0]


def in_which_jobs_look_up(world: World) -> None:
    """Have jobs look up, while the query rolls back all the time."""
    world.faults.heal()
    world.troubles.only = [world.troubles.ask_to_go_back]
    world.restless, world.is_calm, world.num_jobs, world.pace = 5.0, False, 4, 0.5
    world.streams[0].most_seconds, world.troubled_for = None, 80.0


def in_which_keys_are_forgotten(world: World) -> None:
    """Have keys forgotten all the time, and little else go wrong."""
    world.troubles.only = [world.troubles.kill_coordinator, world.troubles.unload_all, world.troubles.kill_host]
    world.restless, world.is_calm, world.outsiders = 10.0, False, [Forgetter(world)]
    world.streams[0].most_seconds = None


def in_which_writes_come_late(world: World) -> None:
    """Have writes carried out again after their answer, or long after their sender has given up.

    Keys are forgotten at the same time: late writes have rows of them.
    """
    in_which_keys_are_forgotten(world)
    world.faults.late_write = 0.3


def in_which_forgetters_stall(world: World) -> None:
    """Have those who forget keys stand still in the middle of it, while few versions are retained."""
    in_which_keys_are_forgotten(world)
    world.faults.heal()
    world.troubles.only, world.restless = [world.troubles.kill_host], 60.0
    world.outsiders[0].always_stalls = True
    world.streams[0].keep, world.pace, world.troubled_for = 1, 2.0, 200.0


def with_all_outsiders(world: World) -> None:
    """Have everybody work on the query from outside at once."""
    world.is_calm, world.outsiders = False, [outsider(world) for outsider in ALL_OUTSIDERS]
    world.streams[0].most_seconds = None


def in_which_checkpoints_are_forked(world: World) -> None:
    """Have checkpoints forked all the time, between batches that take long."""
    world.is_calm, world.outsiders, world.pace = False, [Forker(world)], 20.0
    world.streams[0].most_seconds = None


def in_which_state_is_rewritten(world: World) -> None:
    """Have state rewritten all the time, in half of the worlds while keys are forgotten, and few versions kept.

    One of three rewriters stands still between its steps, and the others die, too.
    """
    world.is_calm, world.outsiders = False, [Rewriter(world), Rewriter(world), Rewriter(world)]
    world.outsiders[0].always_stalls = True
    if world.seed % 2:
        world.outsiders.append(Forgetter(world))
    world.streams[0].most_seconds = None
    world.streams[0].keep = min(2, world.streams[0].keep)


def with_drawn_constants(world: World) -> None:
    """Have holds, leases, waits and groups of other lengths and sizes than the product has, and few versions kept."""
    draw = random.Random(world.seed)
    world.constants = Constants.drawn(draw)
    world.streams[0].keep = draw.randint(1, 3)
    world.standby_replicas = draw.choice((0, 1, 2))
    with_all_outsiders(world)


WORLDS: dict[str, Prepare] = {
    prepare.__name__.replace("_", "-"): prepare
    for prepare in (
        as_it_is,
        restless_in_two_clusters,
        on_failing_storage,
        in_which_plans_run_again,
        in_which_hosts_come_and_go,
        in_which_copies_stand_by,
        in_which_hosts_fall_silent,
        in_which_local_files_go,
        in_which_jobs_look_up,
        in_which_keys_are_forgotten,
        in_which_writes_come_late,
        in_which_forgetters_stall,
        with_all_outsiders,
        in_which_checkpoints_are_forked,
        in_which_state_is_rewritten,
        with_drawn_constants,
    )
}
"""By name, what may be done to a world before anything happens in it."""


def first_failure(seeds: Iterable[int], max_steps: int | None = STEPS, prepare: Prepare = as_it_is) -> Result:
    """Return the result of the first of these seeds that fails. Raises ``AssertionError`` if none does."""
    tried = 0
    for seed in seeds:
        tried += 1
        result = run(seed, max_steps=max_steps, prepare=prepare)
        if result.failure is not None:
            return result
    raise AssertionError(f"None of {tried} seeds has found anything.")


def fresh(first: int) -> Iterator[tuple[int, str]]:
    """Give seeds without end, each with the name of a world: half of them as they are, the rest in all others.

    A calm world stays as it is.
    """
    draw, others = random.Random(first), [name for name in WORLDS if WORLDS[name] is not as_it_is]
    seed = first
    while True:
        yield seed, draw.choice(others) if draw.random() < 0.5 and not is_calm(seed) else "as-it-is"
        seed += 1


def search(
    worlds: Iterable[tuple[int, str]],
    *,
    seconds: float | None = None,
    steps: int | None = None,
    keep_going: bool = False,
    say: Callable[[str], None] = print,
) -> Found:
    """Run seeds in their worlds until ``seconds`` or ``steps`` are over, or one fails, unless ``keep_going``."""
    found = Found()
    begun = told = time.perf_counter()
    for seed, name in worlds:
        result = run(seed, prepare=WORLDS[name])
        found.add(result, name)
        if result.failure is not None:
            say(f"{result}\nIts world is {name}.")
            if not keep_going:
                break
        now = time.perf_counter()
        if now > told + TELL_SECONDS:
            told = now
            say(f"{found.seeds} seeds, {found.steps} steps so far; failed: {found.failed or 'none'}")
        if (seconds is not None and now >= begun + seconds) or (steps is not None and found.steps >= steps):
            break
    return found


TELL_SECONDS = 30.0
"""How often a search says how far it is."""


class Found:
    """The findings of a search: seeds that failed, by their worlds, and how often each situation was reached."""

    def __init__(self) -> None:
        self.seeds = 0
        self.steps = 0
        self.failed: list[tuple[int, str]] = []
        self.reached: Counter[str] = Counter()

    def add(self, result: Result, world: str) -> None:
        """Add one run."""
        self.seeds += 1
        self.steps += result.steps
        self.reached += result.reached
        if result.failure is not None:
            self.failed.append((result.seed, world))


def kept(file: Path = FOUND) -> list[tuple[int, str]]:
    """Return the seeds that have failed once, with their worlds."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [
        (int(seed), world) for seed, world in (line.split()[:2] for line in lines if line.strip()[:1] not in ("", "#"))
    ]


def keep(failed: Iterable[tuple[int, str]], file: Path = FOUND) -> None:
    """Add seeds that have failed."""
    known = kept(file)
    with file.open("a") as out:
        for seed, world in failed:
            if (seed, world) not in known:
                out.write(f"{seed} {world}\n")
