"""Assigns the partitions of a run to live hosts. ``run/owners.py`` decides which ones.

A coordinator that was just started knows no owners of earlier runs. For a while it relies on the partitions that hosts
report, and leaves the other partitions without an owner: the host that reports first must not get the partitions that
other hosts hold. Only a partition that a task waits for is assigned to a known host.

A new owner loads its partitions before tasks ask for them (``HostOrders.warm_up``): an executor with few cores runs its
tasks one after the other. A partition whose owner is lost gets another one at once. One whose owner is alive moves
warm: the new owner loads a copy while the old one keeps serving, and takes over between two batches. Before that, its
copy is nearly complete, and the old owner answers nothing without a look at Spark's log (``HostOrders.giving``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

from backends import spans
from backends.conf import StateStoreId, StateStoreProviderId
from coordinator_actor.checkpoints.pending_checkpoint import TaskKey
from coordinator_actor.exceptions import UnknownHostError
from coordinator_actor.handlers.registries import Registries
from coordinator_actor.messages import WarmUp
from coordinator_actor.run.owners import Assignment, SessionHosts
from coordinator_actor.run.state import QueryState


def assign_owners(
    registries: Registries,
    run: QueryState,
    *,
    moves: bool = False,
    rebalance: bool = False,
    waiting: Collection[TaskKey] = (),
) -> Assignment:
    """Return the assignment of a run, a new one if hosts have come or gone. Waits for no storage.

    With ``moves``, partitions whose new owners are warm move away from living hosts; with ``rebalance`` all planned
    moves happen now. Both are for moments between two batches, and nothing moves while hosts still report. Tasks wait
    for the partitions in ``waiting``: these get owners even while hosts still report. Raises ``UnknownHostError`` if
    the session has no live host.
    """
    with run.assignment.lock:
        began, before = spans.now(), run.assignment.current
        after = _assign_owners(registries, run, moves=moves, rebalance=rebalance, waiting=waiting)
        if spans.is_on() and after is not before:
            _trace(run, began, before, after)
        return after


def _trace(run: QueryState, began: int, before: Assignment | None, after: Assignment) -> None:
    """Make the span of a new assignment, in the trace of the current or next batch."""
    moved = 0 if before is None else sum(before.find(*task) != after.find(*task) for task in run.tasks())
    trace = spans.batch(run.run_id, run.versions.completed + 1)
    planned = len(run.assignment.planned)
    spans.finished("coordinator.assign", trace, began, moved=moved, planned=planned, num_hosts=len(after.hosts))


def _assign_owners(
    registries: Registries, run: QueryState, *, moves: bool, rebalance: bool, waiting: Collection[TaskKey]
) -> Assignment:
    ownership, before, completed = run.assignment, run.assignment.current, run.versions.completed
    with registries.lock:
        hosts, session_id = registries.hosts, run.registration.session_id
        is_reporting = ownership.awaits_reports and registries.expects_reports()
        ready: Mapping[TaskKey, str] = {}
        if moves and not is_reporting and ownership.planned:
            ready = ownership.ready_moves({h: lease.hand_over for h, lease in hosts.leases.items()}, completed)
        is_valid = ownership.is_valid(hosts.generation, is_reporting=is_reporting, rebalance=rebalance, waiting=waiting)
        if before is not None and is_valid and not ready:
            return before
        infos = {host_id: hosts.leases[host_id].info for host_id in hosts.nodes_of_session(session_id)}
        if not infos:
            raise UnknownHostError(f"No state store host of session {session_id} is alive.")
        session = SessionHosts(hosts.generation, infos, hosts.staying(session_id), hosts.reported(run.run_id))
    after = ownership.assign(
        session,
        ready,
        completed,
        run.manifests.epoch,
        is_reporting=is_reporting,
        rebalance=rebalance,
        waiting=waiting,
    )
    location = run.registration.checkpoint_location
    with registries.lock:
        for task in run.tasks():
            owner, former = after.find(*task), None if before is None else before.find(*task)
            if owner is not None and (former is None or former.host_id != owner.host_id):
                instance = StateStoreProviderId(StateStoreId(location, *task), run.run_id)
                registries.instances.report_active_instance(instance, owner.ip, owner.host_id)
    return after


def plan_moves(registries: Registries, run: QueryState) -> None:
    """Take new and leaving hosts into account, and make moves if no batch is under way.

    Does not wait: a thread that works on the run may wait for storage. Plans nothing before all partitions have owners.
    """
    ownership = run.assignment
    if not ownership.is_made:
        return
    with suppress(UnknownHostError):  # the last host is just leaving
        if not _spread(registries, run):
            assign_owners(registries, run)
        if ownership.planned and run.lock.acquire(blocking=False):
            try:
                before = ownership.current
                is_idle = run.lifetime.is_current and run.machine.highest_opened < run.versions.completed
                if is_idle and assign_owners(registries, run, moves=True) is not before:
                    run.announce()
            finally:
                run.lock.release()


def _spread(registries: Registries, run: QueryState) -> bool:
    """Give all hosts their share of a run that no host holds anything of yet: an immediate move loses nothing.

    Hosts may come between the registration of a run and its first batch. Return whether that was done.
    """
    with registries.lock:
        has_copies = any(
            warm
            for lease in registries.hosts.leases.values()
            for warm in lease.hand_over.warm.get(run.run_id, {}).values()
        )
    if has_copies or run.assignment.awaits_reports or not run.lock.acquire(blocking=False):
        return False
    try:
        is_untouched = run.machine.highest_opened < 0
        if is_untouched:
            assign_owners(registries, run, rebalance=True)
        return is_untouched
    finally:
        run.lock.release()


def warm_up(run: QueryState, host_id: str) -> WarmUp | None:
    """Return the partitions of a run that a host must load before tasks ask for them. Needs no lock of the run."""
    completed, new = run.versions.completed, run.assignment.new_owners
    wanted = [task for task, receiver in run.assignment.planned.items() if receiver == host_id]
    if completed and new.version == completed:
        wanted += sorted(new.of_host.get(host_id, ()))
    if not wanted:
        return None
    heads: dict[str, dict[int, str | None]] = {}
    for operator, partition in wanted:
        heads.setdefault(operator, {})[partition] = run.versions.head(completed, operator, partition)
    return WarmUp(run.registration, run.manifests.epoch, completed, heads)


def gives(run: QueryState, host_id: str) -> bool:
    """Return whether partitions of a host are to move, or have moved and the host knows no later version yet."""
    ownership, announced = run.assignment, run.announcement_to(host_id)
    with ownership.lock:
        current = ownership.current
        if announced is not None and ownership.givers.get(host_id, -1) >= announced.version:
            return True
        return current is not None and any(
            owner.host_id == host_id for task in ownership.planned if (owner := current.find(*task)) is not None
        )


def needed_by(run: QueryState) -> set[str]:
    """Return the hosts that own partitions of a run, or that tasks of the batch under way may ask for owners.

    These tasks know the hosts of the time when the batch began. Needs no lock of the run.
    """
    with run.assignment.lock:
        current, givers = run.assignment.current, dict(run.assignment.givers)
    owning = set() if current is None else {host_id for host_id, tasks in current.of_host.items() if tasks}
    completed = run.versions.completed
    asked = {host_id for host_id, at in givers.items() if at >= completed}
    return owning | asked if run.machine.highest_opened >= completed else owning
