"""Gives the partitions of a run owners among the live hosts. ``query/partition_owners.py`` decides which ones.

A coordinator that was just started knows no owner of the runs that were there before it. For a while it goes by what
hosts report that they hold, and leaves the other partitions without an owner: the host that reports first must not be
given what the others hold. Only a partition that a task waits for is given to whoever is there.
"""

from __future__ import annotations

from collections.abc import Collection

from backends.ids import StateStoreId, StateStoreProviderId
from coordinator_actor.checkpoints.tasks import TaskKey
from coordinator_actor.exceptions import UnknownHostError
from coordinator_actor.handlers.registries import Registries
from coordinator_actor.query.current_assignment import Assignment
from coordinator_actor.query.partition_owners import assign
from coordinator_actor.query.query_state import QueryState


def assigned(
    registries: Registries, run: QueryState, *, rebalance: bool = False, waiting: Collection[TaskKey] = ()
) -> Assignment:
    """Return the assignment of a run, a new one if hosts have come or gone. Waits for no storage.

    Partitions move away from a living host only with ``rebalance``, where a batch begins, and not while hosts still
    report. Tasks wait for the partitions in ``waiting``: these have owners, also while hosts still report. Raises
    ``UnknownHostError`` if the session has no live host.
    """
    with run.assignment.lock:
        return _assigned(registries, run, rebalance=rebalance, waiting=waiting)


def _assigned(registries: Registries, run: QueryState, *, rebalance: bool, waiting: Collection[TaskKey]) -> Assignment:
    held = run.assignment
    with registries.lock:
        current, generation = held.current, registries.hosts.generation
        reporting = held.awaits_reports and registries.expects_reports()
        balances = rebalance and not reporting
        if (
            current is not None
            and current.generation == generation
            and not (balances and held.is_unbalanced)
            and not (current.is_partial and _may_be_completed(current, held.reports, waiting, reporting=reporting))
        ):
            return current
        nodes = registries.hosts.nodes_of_session(run.registration.session_id)
        if not nodes:
            raise UnknownHostError(f"No state store host of session {run.registration.session_id} is alive.")
        infos = [registries.hosts.leases[host_id].info for host_id in nodes]
        owned = {**registries.hosts.holders(run.run_id), **held.reported}
    tasks = list(run.tasks())
    if current is not None:
        owned.update({t: owner.host_id for t in tasks if (owner := current.find(*t)) is not None})
    names = {f"{operator}/{partition}": (operator, partition) for operator, partition in tasks}
    known = {name: owned[task] for name, task in names.items() if owned.get(task) in nodes}
    # Only what is kept or waited for is placed, so that each host has its share of that.
    wanted = set(waiting)
    placed = [name for name, task in names.items() if not reporting or name in known or task in wanted]
    owners = assign(placed, nodes, known, rebalance=balances, salt=run.registration.query_id)
    # Another coordinator, or this one after a restart, must not give the same number to another assignment.
    number = (run.manifests.epoch << 20) + 1 if current is None else current.number + 1
    by_task = {task: owners.get(name) for name, task in names.items()}
    assignment = Assignment.of(number, generation, infos, by_task, held.reports)
    location = run.registration.checkpoint_location
    with registries.lock:
        for task in tasks:
            owner = assignment.find(*task)
            before = None if current is None else current.find(*task)
            if owner is not None and (before is None or before.host_id != owner.host_id):
                instance = StateStoreProviderId(StateStoreId(location, *task), run.run_id)
                registries.instances.report(instance, owner.ip, owner.host_id)
    held.change(assignment, is_balanced=balances)
    return assignment


def _may_be_completed(current: Assignment, reports: int, waiting: Collection[TaskKey], *, reporting: bool) -> bool:
    """Return whether partitions without an owner can have one now."""
    return not reporting or current.reports != reports or any(current.find(*task) is None for task in waiting)
