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
from coordinator_actor.messages import HostInfo, WarmUp
from coordinator_actor.run.owners import Assignment, NewOwners, assign
from coordinator_actor.run.state import QueryState

WARM_VERSIONS = 10
"""A copy that is at most this many versions behind is warm: their changelogs are read when the new owner opens the
partition.
"""


def assigned(
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
        after = _assigned(registries, run, moves=moves, rebalance=rebalance, waiting=waiting)
        if spans.is_on() and after is not before:
            _trace(run, began, before, after)
        return after


def _trace(run: QueryState, began: int, before: Assignment | None, after: Assignment) -> None:
    """Make the span of a new assignment, in the trace of the current or next batch."""
    moved = 0 if before is None else sum(before.find(*task) != after.find(*task) for task in run.tasks())
    trace = spans.batch(run.run_id, run.versions.completed + 1)
    planned = len(run.assignment.planned)
    spans.finished("coordinator.assign", trace, began, moved=moved, planned=planned, num_hosts=len(after.hosts))


def _assigned(
    registries: Registries, run: QueryState, *, moves: bool, rebalance: bool, waiting: Collection[TaskKey]
) -> Assignment:
    ownership = run.assignment
    with registries.lock:
        current, generation = ownership.current, registries.hosts.generation
        reporting = ownership.awaits_reports and registries.expects_reports()
        moving = {} if reporting or current is None or not moves else _ready(registries, run, current)
        if (
            current is not None
            and current.generation == generation
            and not moving
            and not (ownership.is_unbalanced and not reporting)
            and not (rebalance and ownership.planned)
            and not (current.is_partial and _may_be_completed(current, ownership.reports, waiting, reporting=reporting))
        ):
            return current
        nodes = registries.hosts.nodes_of_session(run.registration.session_id)
        if not nodes:
            raise UnknownHostError(f"No state store host of session {run.registration.session_id} is alive.")
        staying = registries.hosts.staying(run.registration.session_id)
        infos = [registries.hosts.leases[host_id].info for host_id in nodes]
        reported = registries.hosts.reported(run.run_id) if current is None or current.is_partial else ()
        owned = {**registries.hosts.holders(run.run_id), **ownership.reported}
    tasks = list(run.tasks())
    if current is not None:
        owned.update({t: owner.host_id for t in tasks if (owner := current.find(*t)) is not None})
        # The host that was to get the partition of a lost host may have loaded it.
        owned.update({t: receiver for t, receiver in ownership.planned.items() if owned.get(t) not in nodes})
    before = {task: host_id for task, host_id in owned.items() if host_id in nodes}
    names = {f"{operator}/{partition}": (operator, partition) for operator, partition in tasks}
    owner_of = {name: host_id for name, task in names.items() if (host_id := moving.get(task, before.get(task)))}
    # Only kept or awaited partitions are placed, so that each host has its share of those.
    wanted = set(waiting)
    placed = [name for name, task in names.items() if not reporting or name in owner_of or task in wanted]
    salt = run.registration.query_id
    at_once = rebalance and not reporting
    owners = _placed(placed, nodes, staying, owner_of, salt, rebalance=at_once)
    target = owners if reporting or at_once else assign(placed, staying, owners, rebalance=True, salt=salt)
    planned = {names[name]: host_id for name, host_id in target.items() if owners[name] != host_id}
    # Another coordinator, or this one after a restart, must not give the same number to another assignment.
    number = (run.manifests.epoch << 20) + 1 if current is None else current.number + 1
    by_task = {task: owners.get(name) for name, task in names.items()}
    assignment = Assignment.of(number, generation, infos, by_task, ownership.reports)
    location = run.registration.checkpoint_location
    new: dict[str, set[TaskKey]] = {}
    with registries.lock:
        for task in tasks:
            owner = assignment.find(*task)
            former = None if current is None else current.find(*task)
            if owner is None:
                continue
            if former is None or former.host_id != owner.host_id:
                instance = StateStoreProviderId(StateStoreId(location, *task), run.run_id)
                registries.instances.report_active_instance(instance, owner.ip, owner.host_id)
            # Another incarnation of a host has none of the partitions that the host has owned.
            has_it = before.get(task) == owner.host_id if former is None else _same(former, owner)
            if not has_it:
                new.setdefault(owner.host_id, set()).add(task)
    completed = run.versions.completed
    # If an earlier coordinator let several hosts hold a partition, all but the owner have given it away.
    givers = [*before.items(), *reported]
    givers_at = {host_id: completed for task, host_id in givers if by_task.get(task) not in (None, host_id)}
    ownership.givers = {**{host_id: at for host_id, at in ownership.givers.items() if at >= completed}, **givers_at}
    earlier = ownership.new_owners.of_host if ownership.new_owners.version == completed else {}
    ownership.new_owners = NewOwners(
        completed,
        {
            host_id: frozenset(new.get(host_id, set()) | earlier.get(host_id, frozenset()).intersection(owned_now))
            for host_id, owned_now in assignment.of_host.items()
        },
    )
    ownership.change(assignment, None if reporting else planned)
    return assignment


def _same(one: HostInfo, other: HostInfo) -> bool:
    return (one.host_id, one.incarnation) == (other.host_id, other.incarnation)


def _placed(
    partitions: Collection[str],
    nodes: Mapping[str, str],
    staying: Mapping[str, str],
    owner_of: Mapping[str, str],
    salt: str,
    *,
    rebalance: bool,
) -> dict[str, str]:
    """Return the owner of each partition: those that are free go to hosts that stay."""
    if rebalance:
        return assign(list(partitions), staying, owner_of, rebalance=True, salt=salt)
    leaving = {name: host_id for name, host_id in owner_of.items() if host_id not in staying and host_id in nodes}
    rest = assign([name for name in partitions if name not in leaving], staying, owner_of, salt=salt)
    return {name: leaving.get(name) or rest[name] for name in partitions}


def _ready(registries: Registries, run: QueryState, current: Assignment) -> dict[TaskKey, str]:
    """Return the planned moves that can be made now, each with its new owner. The registries are locked."""
    ready, leases, completed = {}, registries.hosts.leases, run.versions.completed
    for task, receiver in run.assignment.planned.items():
        owner = current.find(*task)
        giver = None if owner is None else leases.get(owner.host_id)
        lease = leases.get(receiver)
        if giver is None or lease is None or run.run_id not in giver.hand_over.giving:
            continue
        warm = lease.hand_over.warm.get(run.run_id, {}).get(task[0], {}).get(task[1])
        if warm is not None and warm >= completed - WARM_VERSIONS:
            ready[task] = receiver
    return ready


def plan_moves(registries: Registries, run: QueryState) -> None:
    """Take new and leaving hosts into account, and make moves if no batch is under way.

    Does not wait: a thread that works on the run may wait for storage. Plans nothing before all partitions have owners.
    """
    ownership = run.assignment
    if not ownership.is_made:
        return
    with suppress(UnknownHostError):  # the last host is just leaving
        if not _spread(registries, run):
            assigned(registries, run)
        if ownership.planned and run.lock.acquire(blocking=False):
            try:
                before = ownership.current
                is_idle = run.lifetime.is_current and run.machine.highest_opened < run.versions.completed
                if is_idle and assigned(registries, run, moves=True) is not before:
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
            assigned(registries, run, rebalance=True)
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


def _may_be_completed(current: Assignment, reports: int, waiting: Collection[TaskKey], *, reporting: bool) -> bool:
    """Return whether partitions without an owner can have one now."""
    return not reporting or current.reports != reports or any(current.find(*task) is None for task in waiting)
