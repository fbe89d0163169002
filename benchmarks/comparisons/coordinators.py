"""How many messages of many callers a coordinator answers, and its load in a large simulated cluster."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.model import Case, Comparison, Contestant, Measured, Size, Target
from suite.runner import Steps

if TYPE_CHECKING:
    from played_queries import PlayedQuery

INTERVAL, MAINTENANCE_SECONDS = 1.0, 60.0
RETAINED, THREADS = 100, 4
OURS, EMPTY = "coordinator", "empty actor"
MIB = 1 << 20
CPU, MEMORY, LOCATE = "CPU of the coordinator", "its memory, at most", "locating all instances in one call"
RECORDS = "answers to the messages of a checkpoint"


def run(size: Size, steps: Steps) -> Measured:
    """Measure messages of callers first, then the cluster, each with its own coordinator in one Ray cluster."""
    from suite.machine import own_ray

    measured = Measured(
        {
            OURS: Contestant("the coordinator's actor: a host's heartbeat", {}, True),
            EMPTY: Contestant("a Ray actor whose method takes the same and returns nothing", {"max_concurrency": "64"}),
        }
    )
    steps.expect(len(size["callers"]) * size["turns"] * 2 + size["rounds"])
    with own_ray(1):
        for callers, turns in _messages(size, steps).items():
            name = f"messages, {callers} caller{'s' if callers > 1 else ''}"
            measured.cases.append(Case(name, "messages/s", turns, more_is_better=True))
        measured.cases += _simulation(size, steps)
    measured.notes += [
        "Callers are threads of one process, each with one message under way; every answer is checked. The coordinator "
        f"has a query with {size['partitions']:,} partitions on {size['hosts']} hosts registered.",
        f"Then {size['hosts']} hosts with {size['partitions']:,} partitions are played to a real actor, with a "
        "checkpoint a second, every acknowledgement checked.",
    ]
    return measured


def _query(call: Any, root: Path, size: Size, each: Any = map) -> PlayedQuery:
    from played_queries import PlayedHost, PlayedQuery, played_hosts, registration_of

    from coordinator_actor.messages import HostReport

    hosts = [PlayedHost(info) for info in played_hosts(size["hosts"])]
    registration = registration_of("load", root, size["partitions"], RETAINED, MAINTENANCE_SECONDS)
    query = PlayedQuery(registration, hosts, call, INTERVAL, each)
    query.send_all("register_host", [(host.info, HostReport()) for host in hosts])
    query.register()
    return query


def _messages(size: Size, steps: Steps) -> dict[int, dict[str, list[list[float]]]]:
    """Measure messages a second of so many callers at once, in turns."""
    import ray
    from played_queries import actor, memory_directory

    from coordinator_actor.process import take_ordinary_priority

    class Empty:
        def __init__(self) -> None:
            take_ordinary_priority()

        def heartbeat_host(self, host_id: str, incarnation: str, versions: dict[str, int]) -> None:
            """Do nothing."""

    empty = ray.remote(num_cpus=0, max_concurrency=64)(Empty).remote()
    found: dict[int, dict[str, list[list[float]]]] = {}
    with memory_directory() as root, actor("messages") as link:
        hosts = [host.name for host in _query(link.call, root, size).hosts]

        def ours(i: int) -> None:
            order = link.call("heartbeat_host", *hosts[i % len(hosts)], {})
            if not order.known:
                raise RuntimeError(f"The coordinator has forgotten host {hosts[i % len(hosts)]}.")

        def theirs(i: int) -> None:
            ray.get(empty.heartbeat_host.remote(*hosts[i % len(hosts)], {}))

        contestants = {OURS: ours, EMPTY: theirs}
        for callers in size["callers"]:
            found[callers] = {name: [] for name in contestants}
            with ThreadPoolExecutor(callers) as pool:
                for name in steps.turns(f"{callers} callers", contestants, size["turns"]):
                    for i in range(len(hosts)):
                        ours(i)  # none is forgotten while the others have their turn
                    _calls(pool, callers, contestants[name], 0.2)
                    found[callers][name].append([_calls(pool, callers, contestants[name], size["turn_seconds"])])
    return found


def _calls(pool: ThreadPoolExecutor, callers: int, call: Any, seconds: float) -> float:
    end = time.perf_counter() + seconds

    def caller(first: int) -> int:
        count = 0
        while time.perf_counter() < end:
            call(first + count)
            count += 1
        return count

    began = time.perf_counter()
    calls = sum(pool.map(caller, range(callers)))
    return calls / (time.perf_counter() - began)


def _simulation(size: Size, steps: Steps) -> list[Case]:
    """Measure some rounds of the simulated cluster, each with its own coordinator."""
    from played_queries import actor, locate_seconds, memory_directory

    cpu, memory, answers, located = [], [], [], []
    for i in range(size["rounds"]):
        steps.now(f"playing a cluster, round {i + 1} of {size['rounds']}")
        with memory_directory() as root, actor(f"round-{i}") as link, ThreadPoolExecutor(THREADS) as pool:
            query = _query(link.call, root, size, pool.map)
            taken, peak, used = [], link.resident(), link.cpu_seconds()
            count = max(1, round(size["seconds"] / INTERVAL))
            started = time.perf_counter()
            for batch in range(count):
                waited = query.waited
                query.checkpoint()
                taken.append((query.waited - waited) * 1e3)
                query.upload_snapshots()
                if not link.call("driver_heartbeat", query.run):
                    raise RuntimeError("The coordinator has forgotten the run.")
                query.beat()
                time.sleep(max(0.0, started + (batch + 1) * INTERVAL - time.perf_counter()))
                peak = max(peak, link.resident())
            # Per interval, not per second: a coordinator that makes fewer checkpoints than it should would look idle.
            cpu.append([(link.cpu_seconds() - used) / count / INTERVAL])
            memory.append([peak / MIB])
            answers.append(taken)
            located.append([locate_seconds(query) * 1e3])
        steps.advance()
    return [
        Case(CPU, "cores", {OURS: cpu}),
        Case(MEMORY, "MiB", {OURS: memory}),
        Case(RECORDS, "ms", {OURS: answers}),
        Case(LOCATE, "ms", {OURS: located}),
    ]


COMPARISONS = (
    Comparison(
        name="coordinator",
        title="The coordinator",
        about="One actor per namespace answers all hosts and drivers. An empty actor shows the cost of Ray's calls "
        "alone.",
        run=run,
        sizes={
            "full": dict(callers=[1, 8, 64], turns=5, turn_seconds=2.0, hosts=200, partitions=10_000)
            | dict(seconds=30.0, rounds=1),
            "smoke": dict(callers=[8], turns=3, turn_seconds=0.5, hosts=20, partitions=1_000, seconds=3.0, rounds=1),
        },
        minutes={"full": 10, "smoke": 6},
        targets=(
            Target.at_most("coordinator of 10,000 partitions, a checkpoint a second: CPU", CPU, OURS, 1, "cores"),
            Target.at_most("the same: memory", MEMORY, OURS, 1e9 / MIB, "MiB"),
            Target.at_most("the same: locating all instances in one call", LOCATE, OURS, 1000, "ms"),
        ),
    ),
)
