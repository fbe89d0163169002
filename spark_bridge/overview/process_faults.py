"""Faults of hosts, of the coordinator, and of the storage that both ask: rules, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backends.storage.sending.failures import for_people
from spark_bridge.overview.formats import duration
from spark_bridge.overview.model import CLUSTER, ERROR, WARNING, Fault, Overview
from spark_bridge.overview.processes import CoordinatorInfo, HostOverview, LocationTrouble, LoopFailures

SILENT_HOST_MS = 5_000
"""A host's heartbeats come every second, and its lease ends after ten."""
RECENT_RESTART_MS = 600_000
"""A process that was started again is reported for this long."""
LEAST_FAILURES = 3
"""Fewer requests within a minute that fail and are repeated say nothing: each store has some."""
LEAST_WAITING_MS = 10_000
HANGING_MS = 30_000
"""Storage that gives no answer for this long holds up batches."""
LONGEST_REASON = 300
COORDINATOR_PROCESS = "coordinator"
LEAST_LOOP_FAILURES = 2
"""A loop that fails once tries again at once, and nothing is lost."""
ALIVE = "ALIVE"
"""Ray's word for an actor whose process runs."""


def process_faults(overview: Overview) -> Iterator[Fault]:
    """Give the faults of hosts, coordinator and storage."""
    if overview.source == CLUSTER and overview.queries and not overview.hosts:
        yield Fault(
            ERROR,
            "no-hosts",
            "hosts",
            "No host is registered with the coordinator: no batch can go on.",
            "Look at the driver: hosts are started by init_spark and attach, and end with it.",
        )
    coordinator = overview.coordinator
    for problem in () if coordinator is None else coordinator.problems:
        yield Fault(
            WARNING,
            "placement",
            "hosts",
            problem,
            "Batches go on, and data goes further than it must until hosts stand beside executors again.",
        )
    if coordinator is not None:
        yield from _restarted(COORDINATOR_PROCESS, coordinator, "Queries go on from their manifests")
        for lost in coordinator.lost:
            yield Fault(
                ERROR,
                "driver-lost",
                f"query {lost.query}",
                f"Its driver has not been heard of for {duration(max(0, overview.taken_ms - lost.lost_ms))}, and was "
                "given up: the query does not run.",
                "Look for the driver's process and its machine, and start the program again: it goes on from its "
                f"checkpoint, {lost.checkpoint_location}. 'statestore run' starts programs again by itself.",
            )
        yield from _of_loops(coordinator.failing_loops)
    for host in overview.hosts:
        yield from _of_host(host)
        yield from _of_loops(host.failing_loops)
    yield from _of_storage(overview)


def _of_loops(loops: Sequence[LoopFailures]) -> Iterator[Fault]:
    for loop in loops:
        if loop.failures >= LEAST_LOOP_FAILURES:
            yield Fault(
                WARNING,
                "background-loop-fails",
                loop.process,
                f"A background loop has failed {loop.failures} times in a row, for {duration(loop.failing_ms)}, to "
                f"{loop.what}. The last error: {for_people(loop.error, LONGEST_REASON).rstrip('.')}.",
                loop.remedy or "Look at the log of that process.",
            )


def _of_host(host: HostOverview) -> Iterator[Fault]:
    subject = f"host {host.host_id}"
    if host.heartbeat_ms is not None and host.heartbeat_ms > SILENT_HOST_MS:
        yield Fault(
            ERROR,
            "host-silent",
            subject,
            f"The coordinator has heard nothing of it for {host.heartbeat_ms / 1000:.0f} s.",
            f"Look at its machine ({host.machine}) and at its actor's log; its partitions move when its lease is over.",
        )
    elif not host.answered and host.heartbeat_ms is None:
        yield _lost(host, subject)
    elif not host.answered:
        yield Fault(
            WARNING,
            "host-not-answering",
            subject,
            "It sends heartbeats and has not described itself in time.",
            "It may be loading state or be starved of CPU: look at its machine, and try again.",
        )
    elif host.heartbeat_ms is None:
        yield Fault(
            WARNING,
            "host-unknown",
            subject,
            "It is there, and the coordinator does not know it (yet).",
            "A host registers within seconds; if it stays so, look at its actor's log.",
        )
    yield from _restarted(subject, host, "Its partitions are loaded again, and batches go on")
    budget, held = host.memory.get("host_memory"), sum(n for name, n in host.memory.items() if name != "host_memory")
    if budget and held > budget:
        yield Fault(
            WARNING,
            "host-memory",
            subject,
            f"It holds {held:,} bytes of its {budget:,}.",
            "Give hosts more memory (host_memory), or spread the partitions over more hosts.",
        )


def _lost(host: HostOverview, subject: str) -> Fault:
    if host.actor_state is None:
        return Fault(
            WARNING,
            "host-lost",
            subject,
            "The coordinator has given it up, and Ray does not say how its actor is.",
            "'ray list actors' shows it. Other hosts have its partitions meanwhile.",
        )
    if host.actor_state != ALIVE:
        return Fault(
            WARNING,
            "host-starting",
            subject,
            f"Its process has ended, and Ray has not started it again yet (state: {host.actor_state}).",
            "Other hosts have its partitions meanwhile. If it stays so, Ray finds no place for it: 'ray status' shows "
            "what is asked for and what there is.",
        )
    return Fault(
        ERROR,
        "host-lost",
        subject,
        f"Its process (pid {host.pid} on {host.machine}) runs and does not answer. The coordinator has given it up: "
        "its partitions go to other hosts.",
        "It hangs, or its machine is cut off: look at the machine. A process that hangs may be killed: Ray starts it "
        "again, and nothing is lost.",
    )


def _restarted(subject: str, process: HostOverview | CoordinatorInfo, goes_on: str) -> Iterator[Fault]:
    if not process.restarts or process.up_ms is None or process.up_ms > RECENT_RESTART_MS:
        return
    times = "once" if process.restarts == 1 else f"{process.restarts} times"
    yield Fault(
        WARNING,
        "process-restarted",
        subject,
        f"Its process has ended, and Ray started it again {duration(process.up_ms)} ago ({times} so far).",
        f"{goes_on} by themselves. Look for why it ended: Ray's memory monitor or the system's out-of-memory killer "
        "(dmesg), a machine that went away, the last lines of its log ('statestore logs').",
    )


# -- storage -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """Faults of storage that the processes of a system have met at one location."""

    location: str
    by: list[str]
    troubles: list[LocationTrouble]

    @property
    def failures(self) -> int:
        return sum(t.failures for t in self.troubles)

    @property
    def waiting_ms(self) -> int:
        return max(t.waiting_ms for t in self.troubles)

    @property
    def stands_still(self) -> bool:
        """Whether no process whose requests fail has had one of the same kind answered since, or a request hangs."""
        failing = [t for t in self.troubles if t.failures]
        return self.waiting_ms > HANGING_MS or (bool(failing) and not any(t.is_over for t in failing))


def _of_storage(overview: Overview) -> Iterator[Fault]:
    seen: dict[str, _Seen] = {}
    for name, troubles in _processes(overview):
        for one in troubles:
            at = seen.setdefault(one.location, _Seen(one.location, [], []))
            at.by.append(name)
            at.troubles.append(one)
    for met in seen.values():
        if met.failures >= LEAST_FAILURES or met.waiting_ms >= LEAST_WAITING_MS:
            yield Fault(
                ERROR if met.stands_still else WARNING,
                "storage-fails" if met.failures >= LEAST_FAILURES else "storage-hangs",
                _subject(overview, met.location),
                " ".join(_told(met)),
                "Look at that storage: is it up, full, slowed down, are the credentials and permissions right, is the "
                "network? Requests are repeated for a time; batches go on by themselves once storage answers, and a "
                "query that has ended of the errors is to be started again.",
            )


def _processes(overview: Overview) -> Iterator[tuple[str, Sequence[LocationTrouble]]]:
    if overview.coordinator is not None:
        yield "the coordinator", overview.coordinator.storage_trouble
    for host in overview.hosts:
        yield host.host_id, host.storage_trouble


def _told(seen: _Seen) -> Iterator[str]:
    yield f"Requests to {seen.location} fail or get no answer."
    if seen.failures:
        last = min((t for t in seen.troubles if t.failures), key=lambda t: t.failed_ms)
        yield (
            f"{_number(seen.failures, 'request')} failed within the last minute, the last {duration(last.failed_ms)} "
            f"ago: {last.error}."
        )
    waiting = sum(t.waiting for t in seen.troubles)
    if waiting:
        yield f"{_number(waiting, 'request')} without an answer so far, the longest for {duration(seen.waiting_ms)}."
    others = f" and {len(seen.by) - 3} more" if len(seen.by) > 3 else ""
    yield f"Those who ask: {', '.join(seen.by[:3])}{others}."


def _number(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def _subject(overview: Overview, location: str) -> str:
    """Return the query whose location it is, which has a page, or the location itself."""
    for query in overview.queries:
        if location.rstrip("/") in (query.state_location.rstrip("/"), query.checkpoint_location.rstrip("/")):
            return f"query {query.title}"
    return f"storage {location}"
