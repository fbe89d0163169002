"""Gives every partition of a run an owner among the live hosts. ``query/partition_owners.py`` decides which one."""

from __future__ import annotations

from backends.ids import StateStoreId, StateStoreProviderId
from coordinator_actor.exceptions import UnknownHostError
from coordinator_actor.handlers.registries import Registries
from coordinator_actor.query.current_assignment import Assignment
from coordinator_actor.query.partition_owners import assign
from coordinator_actor.query.query_state import QueryState


def assigned(registries: Registries, run: QueryState, *, rebalance: bool = False) -> Assignment:
    """Return the assignment of a run, a new one if hosts have come or gone. Waits for no storage.

    Partitions move away from a living host only with ``rebalance``, where a batch begins. Raises ``UnknownHostError``
    if the session has no live host.
    """
    with run.assignment.lock:
        return _assigned(registries, run, rebalance=rebalance)


def _assigned(registries: Registries, run: QueryState, *, rebalance: bool) -> Assignment:
    held = run.assignment
    with registries.lock:
        current, generation = held.current, registries.hosts.generation
        if current is not None and current.generation == generation and not (rebalance and held.is_unbalanced):
            return current
        nodes = registries.hosts.nodes_of_session(run.registration.session_id)
        if not nodes:
            raise UnknownHostError(f"No state store host of session {run.registration.session_id} is alive.")
        infos = [registries.hosts.leases[host_id].info for host_id in nodes]
    owned = held.reported if current is None else {t: current.owner(*t).host_id for t in run.tasks()}
    names = {f"{operator}/{partition}": (operator, partition) for operator, partition in run.tasks()}
    owners = assign(
        list(names),
        nodes,
        {name: owned[task] for name, task in names.items() if task in owned},
        rebalance=rebalance,
        salt=run.registration.query_id,
    )
    # Another coordinator, or this one after a restart, must not give the same number to another assignment.
    number = (run.manifests.epoch << 20) + 1 if current is None else current.number + 1
    assignment = Assignment.of(number, generation, infos, {names[name]: owners[name] for name in names})
    location = run.registration.checkpoint_location
    with registries.lock:
        for task in names.values():
            owner = assignment.owner(*task)
            if current is None or current.owner(*task).host_id != owner.host_id:
                instance = StateStoreProviderId(StateStoreId(location, *task), run.run_id)
                registries.instances.report(instance, owner.ip, owner.host_id)
    held.change(assignment, is_balanced=rebalance)
    return assignment
