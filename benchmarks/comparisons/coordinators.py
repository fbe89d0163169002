"""How many messages of many callers a coordinator answers, and its load in a large simulated cluster."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.machine import own_ray
from suite.model import Case, Comparison, Contestant, Measured, Size, Target, Turns
from suite.runner import Steps

if TYPE_CHECKING:
    from played_queries import PlayedQuery

    from coordinator_actor.messages import HostOrders

INTERVAL, MAINTENANCE_SECONDS = 1.0, 60.0
RETAINED, THREADS = 100, 4
OURS, DIRECT, EMPTY = "coordinator", "connection", "empty actor"
MIB = 1 << 20
CPU, MEMORY, LOCATE = "CPU of the coordinator", "its memory, at most", "locating all instances in one call"
RECORDS = "answers to the messages of a checkpoint"


def run(size: Size, steps: Steps) -> Measured:
    """Measure messages of callers first, then the cluster, each with its own coordinator in one Ray cluster."""
    measured = Measured(
        {
            OURS: Contestant("the coordinator's actor: a host's heartbeat", {}, True),
            DIRECT: Contestant("the same heartbeat over connections, as hosts send it", {"connections": "8"}, True),
            EMPTY: Contestant("a Ray actor whose method takes the same and returns nothing", {"max_concurrency": "64"}),
        }
    )
    steps.expect(sum(len(_names(c)) for c in size["callers"]) * size["turns"] + size["rounds"])
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


def _messages(size: Size, steps: Steps) -> dict[int, Turns]:
    """Measure messages a second of so many callers at once, in turns."""
    from played_queries import InActor, empty_actor, memory_directory

    from coordinator_actor.direct_calls import NotDirectError

    empty = empty_actor(64)
    found: dict[int, Turns] = {}
    with memory_directory() as root, closing(InActor("messages")) as link:
        hosts = [host.name for host in _query(link.call, root, size).hosts]
        direct = link.connections
        direct.follow(link.call("heartbeat_host", *hosts[0], {}).calls)

        def ours(i: int) -> None:
            check(i, link.call("heartbeat_host", *hosts[i % len(hosts)], {}))

        def over_connection(i: int) -> None:
            check(i, direct.call("heartbeat_host", (*hosts[i % len(hosts)], {}), {}, 60.0))

        def connect(i: int) -> None:
            with suppress(NotDirectError):  # a message makes another connection if none is free
                over_connection(i)

        def check(i: int, orders: HostOrders) -> None:
            if not orders.known:
                raise RuntimeError(f"The coordinator has forgotten host {hosts[i % len(hosts)]}.")

        def theirs(i: int) -> None:
            empty(*hosts[i % len(hosts)], {})

        contestants = {OURS: ours, DIRECT: over_connection, EMPTY: theirs}
        for callers in size["callers"]:
            found[callers] = {name: [] for name in _names(callers)}
            with ThreadPoolExecutor(callers) as pool:
                for name in steps.turns(f"{callers} callers", found[callers], size["turns"]):
                    for i in range(len(hosts)):
                        ours(i)  # none is forgotten while the others have their turn
                    while name == DIRECT and direct.num_connections < callers:
                        _calls(pool, callers, connect, 0.05)
                    _calls(pool, callers, contestants[name], 0.2)
                    found[callers][name].append([_calls(pool, callers, contestants[name], size["turn_seconds"])])
    return found


def _names(callers: int) -> list[str]:
    """Return the contestants: a host has a few connections, and its other messages go through Ray."""
    from coordinator_actor.direct_calls import MAX_DIRECT_CONNECTIONS

    return [name for name in (OURS, DIRECT, EMPTY) if name != DIRECT or callers <= MAX_DIRECT_CONNECTIONS]


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
    from played_queries import InActor, locate_seconds, memory_directory

    cpu, memory, answers, located = [], [], [], []
    for i in range(size["rounds"]):
        steps.now(f"playing a cluster, round {i + 1} of {size['rounds']}")
        with memory_directory() as root, closing(InActor(f"round-{i}")) as link, ThreadPoolExecutor(THREADS) as pool:
            query = _query(link.send, root, size, pool.map)
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
