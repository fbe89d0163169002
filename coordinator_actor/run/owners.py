"""Decides which host owns which partition: equal shares by rendezvous hashing, and few moves.

A partition stays where it is while its host lives. A free partition goes to the host with the highest score for it
among the hosts that have room (rendezvous hashing by Thaler and Ravishankar; the bound by Mirrokni et al.). Room is
counted twice: with P partitions on H hosts, a node with k of the hosts gets ``P * k / H`` partitions, and each host of
the node an equal part of them, both rounded down or up. So every host has ``P / H`` partitions, rounded down or up.

Standbys follow owners: all partitions of a host have their copies on the same other host, on the next node of a ring
that has room, in another zone if possible (consistent hashing with bounded loads by Mirrokni et al.). So a host reads
the changelogs that another host has stored in one object with one request, no host keeps many more copies than others,
and a host that comes or goes changes the standbys of few others.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from coordinator_actor.checkpoints.pending_checkpoint import TaskKey
from coordinator_actor.exceptions import UnknownHostError, UnknownRunError
from coordinator_actor.messages import NOBODY, HandOver, HostInfo

Hashes = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]

SCORED_PARTITIONS = 1024
"""Scores are computed for at most this many partitions at a time: with 200 hosts they fit the cache of a core."""
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
WARM_VERSIONS = 10
"""A copy that is at most this many versions behind is warm: their changelogs are read when the new owner opens the
partition.
"""


def assign(
    partitions: Sequence[str],
    hosts: Sequence[str] | Mapping[str, str],
    current: Mapping[str, str],
    *,
    rebalance: bool = False,
    salt: str = "",
) -> dict[str, str]:
    """Return the host of each partition. ``current`` owners are kept if they are among ``hosts``.

    ``hosts`` maps host id to node id; a sequence of host ids counts as the hosts of one node. With ``rebalance`` a host
    keeps no more than its share, so that a new host gets a share, with the fewest possible moves. ``salt``, for example
    a query id, keeps queries with the same operators and fewer partitions than hosts from using the same hosts. The
    order of partitions and hosts does not matter. Raises ``UnknownHostError`` if there are no hosts.
    """
    nodes = hosts if isinstance(hosts, Mapping) else dict.fromkeys(hosts, "")
    if not nodes:
        raise UnknownHostError(f"No live state store host exists to own the {len(partitions)} partitions; start one.")
    # In the order of hashes, so that no node is preferred among equals because of its name.
    seed = xxhash.xxh64_intdigest(salt.encode())
    host_hashes = {h: xxhash.xxh64_intdigest(h.encode(), seed) for h in nodes}
    names = sorted(nodes, key=lambda h: (host_hashes[h], h))
    kept: dict[str, list[str]] = {h: [] for h in names}
    free = []
    for partition in partitions:
        partitions_of_owner = kept.get(current.get(partition, ""))
        if partitions_of_owner is None:
            free.append(partition)
        else:
            partitions_of_owner.append(partition)
    if not free and not rebalance:
        return {p: current[p] for p in partitions}
    loads = np.array([len(kept[h]) for h in names], np.int64)
    room = shares(len(partitions), loads, [nodes[h] for h in names], keep=not rebalance) - loads
    hashes = np.array([host_hashes[h] for h in names], np.uint64)
    if rebalance:
        for host in np.flatnonzero(room < 0).tolist():
            free += _released(kept[names[host]], hashes[host : host + 1], int(-room[host]))
    owners = dict(current)
    for partition, host in zip(free, place(_hashes(free), hashes, np.maximum(room, 0)).tolist(), strict=True):
        owners[partition] = names[host]
    return {p: owners[p] for p in partitions}


def shares(total: int, loads: Counts, nodes: Sequence[str], *, keep: bool = False) -> Counts:
    """Return how many of ``total`` partitions each host should own.

    ``loads`` is how many each host owns now, ``nodes`` its node. If shares cannot be equal, the hosts that own most now
    get one more. Among all shares that are equal enough (see the module), these need the fewest moves. With ``keep`` no
    host gets less than its load; the shares may then exceed ``total``.
    """
    members: defaultdict[str, list[int]] = defaultdict(list)
    for host, node in enumerate(nodes):
        members[node].append(host)
    groups = list(members.values())
    parts = [total * len(group) // len(nodes) for group in groups]
    # The number of moves that a node's hosts save if its share is rounded up.
    savings = [
        _surplus(loads[group], part) - _surplus(loads[group], part + 1)
        for group, part in zip(groups, parts, strict=True)
    ]
    uneven = [g for g, group in enumerate(groups) if total * len(group) % len(nodes)]
    uneven.sort(key=lambda g: (-savings[g], loads[groups[g]].sum() - parts[g]))
    for g in uneven[: total - sum(parts)]:
        parts[g] += 1
    result = np.zeros(len(nodes), np.int64)
    for group, part in zip(groups, parts, strict=True):
        result[group] = _filled(loads[group], part) if keep else _even(loads[group], part)
    return result


def _filled(loads: Counts, share: int) -> Counts:
    """Return a node's share on top of what its hosts own: as equal as possible if no host gives anything up."""
    result: Counts = loads.copy()
    below = np.arange(len(loads))
    left = max(share, int(loads.sum()))
    while True:
        even = _even(loads[below], left)
        is_over = loads[below] > even
        if not is_over.any():
            result[below] = even
            return result
        left -= int(loads[below[is_over]].sum())
        below = below[~is_over]


def _even(loads: Counts, share: int) -> Counts:
    """Divide a node's share among its hosts. If it cannot be equal, the most loaded hosts get one more."""
    each, more = divmod(share, len(loads))
    result = np.full(len(loads), each, np.int64)
    result[np.argsort(-loads, kind="stable")[:more]] += 1
    return result


def _surplus(loads: Counts, share: int) -> int:
    """Return how many partitions must leave the hosts of a node if the node may have ``share``."""
    return int(np.maximum(loads - _even(loads, share), 0).sum())


def place(partitions: Hashes, hosts: Hashes, room: Counts) -> Counts:
    """Return the index of the host of each partition, by hashes of both. No host gets more than its ``room``.

    The room of all hosts together must be enough. Works in rounds: each partition asks the host with its highest score
    among the hosts with room. A host with more askers than room takes the partitions that score highest with it. So the
    order of neither side matters.
    """
    result = np.full(len(partitions), -1, np.int64)
    left = room.copy()
    asking = np.arange(len(partitions))
    while len(asking):
        open_hosts = np.flatnonzero(left > 0)
        best, scores = _best(partitions[asking], hosts[open_hosts])
        wanted = open_hosts[best]
        # By host, the highest scores first: the rank among a host's askers decides which partitions are taken.
        order = np.lexsort((np.arange(len(asking)), ~scores, wanted))
        sorted_wanted = wanted[order]
        rank = np.arange(len(order)) - np.searchsorted(sorted_wanted, sorted_wanted)
        winners = order[rank < left[sorted_wanted]]
        result[asking[winners]] = wanted[winners]
        left -= np.bincount(wanted[winners], minlength=len(left))
        asking = np.delete(asking, winners)
    return result


def _best(partitions: Hashes, hosts: Hashes) -> tuple[Counts, Hashes]:
    """Return per partition the index of the host with the highest score for it, and that score."""
    best = np.empty(len(partitions), np.int64)
    highest = np.empty(len(partitions), np.uint64)
    for start in range(0, len(partitions), SCORED_PARTITIONS):
        scores = _scores(partitions[start : start + SCORED_PARTITIONS], hosts)
        top = scores.argmax(axis=1)
        best[start : start + SCORED_PARTITIONS] = top
        highest[start : start + SCORED_PARTITIONS] = scores[np.arange(len(top)), top]
    return best, highest


def _scores(partitions: Hashes, hosts: Hashes) -> Hashes:
    """Return the score of each partition with each host: both hashes mixed by two rounds of ``rrmxmx``."""
    mixed: Hashes = partitions[:, None] ^ hosts[None, :]
    for _ in range(2):
        mixed ^= mixed >> _SHIFT
        mixed *= _MULTIPLIER
    mixed ^= mixed >> _SHIFT
    return mixed


def _released(partitions: list[str], host: Hashes, count: int) -> list[str]:
    """Return the ``count`` partitions of a host that score lowest with it, independent of their order."""
    scores = _scores(_hashes(partitions), host)[:, 0]
    return [partitions[i] for i in np.argsort(scores, kind="stable")[:count].tolist()]


def _hashes(names: Sequence[str]) -> Hashes:
    return np.array([xxhash.xxh64_intdigest(name.encode()) for name in names], np.uint64)


def standby_hosts(
    nodes: Mapping[str, str],
    zones: Mapping[str, str],
    replicas: int,
    *,
    staying: Collection[str] | None = None,
    salt: str = "",
) -> dict[str, tuple[str, ...]]:
    """Return for each host those that keep copies of its partitions, each on another node; fewer if nodes are missing.

    ``nodes`` maps host id to node id, ``zones`` node id to zone. Only the ``staying`` hosts (None: all) keep copies.

    The ring is the nodes in the order of their hashes. A host takes the next node if that is in another zone and has
    room. Else it tries all others by their scores, so that the hosts whose neighbours are full do not all ask the same
    node: one in another zone with room comes first, then any with room. A node has room if one of its hosts keeps the
    copies of no more hosts than the average, rounded up. With less room, a lost node would change the standbys of many
    hosts.
    """
    seed = xxhash.xxh64_intdigest(salt.encode())
    members: dict[str, list[str]] = {}
    for host in sorted(nodes, key=lambda h: (xxhash.xxh64_intdigest(h.encode(), seed), h)):
        members.setdefault(nodes[host], []).append(host)
    node_hashes = {node: xxhash.xxh64_intdigest(node.encode(), seed) for node in members}
    ring = sorted(members, key=lambda node: (node_hashes[node], node))
    preferred = np.argsort(~_scores(_hashes(ring), np.array([node_hashes[n] for n in ring], np.uint64)), kind="stable")
    keeping = {n: hosts for n in ring if (hosts := [h for h in members[n] if staying is None or h in staying])}
    all_zones = {zones.get(node, "") for node in keeping}
    loads = {host: 0 for hosts in keeping.values() for host in hosts}
    room = -(-len(nodes) * replicas // max(1, len(loads))) + 1
    standbys: dict[str, tuple[str, ...]] = {}
    for place, node in enumerate(ring):
        following = [other for other in (*ring[place + 1 :], *ring[:place]) if other in keeping][:replicas]
        by_score = [ring[other] for other in preferred[place].tolist() if other != place]
        others = [*following, *(other for other in by_score if other in keeping and other not in following)]
        for host in members[node]:
            chosen: dict[str, str] = {}
            used_zones = {zones.get(node, "")}
            while len(chosen) < min(replicas, len(others)):
                best, best_rank = "", (len(nodes) * replicas, True)
                for other in others:
                    excess = max(0, min(loads[h] for h in keeping[other]) - room + 1)
                    rank = (excess, zones.get(other, "") in used_zones)
                    if other not in chosen and rank < best_rank:
                        best, best_rank = other, rank
                        if rank == (0, all_zones <= used_zones):
                            break  # no node can be better
                standby = min(keeping[best], key=loads.__getitem__)
                loads[standby] += 1
                chosen[best] = standby
                used_zones.add(zones.get(best, ""))
            standbys[host] = tuple(chosen.values())
    return standbys


# An assignment: the owner of every partition of a run at one time. The functions above decide on the owners.


@dataclass(frozen=True)
class Assignment:
    """The owner of every partition of a run.

    ``number`` grows with every change in a run. ``generation`` is that of the set of hosts, ``reports`` the number of
    reports that were used. ``owners`` has, per operator, an index into ``hosts`` for each partition, or ``NOBODY``.
    ``of_host`` has the partitions of each host, by host id. ``is_partial``: some partitions have no owner yet, because
    the host that holds them may still report. ``standbys`` has, by host id, the hosts that keep copies of its
    partitions.
    """

    number: int
    generation: int
    hosts: tuple[HostInfo, ...]
    owners: Mapping[str, list[int]]
    of_host: Mapping[str, tuple[TaskKey, ...]]
    is_partial: bool = False
    reports: int = 0
    standbys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        number: int,
        generation: int,
        hosts: Sequence[HostInfo],
        owners: Mapping[TaskKey, str | None],
        reports: int = 0,
        standbys: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> Assignment:
        """Make an assignment from the host id of each partition, or None. Partitions must come in ascending order."""
        places = {host.host_id: i for i, host in enumerate(hosts)}
        by_operator: dict[str, list[int]] = {}
        by_host: dict[str, list[TaskKey]] = {host.host_id: [] for host in hosts}
        for task, host_id in owners.items():
            by_operator.setdefault(task[0], []).append(NOBODY if host_id is None else places[host_id])
            if host_id is not None:
                by_host[host_id].append(task)
        of_host = {h: tuple(t) for h, t in by_host.items()}
        is_partial = any(host_id is None for host_id in owners.values())
        return cls(number, generation, tuple(hosts), by_operator, of_host, is_partial, reports, standbys)

    def owner(self, operator: str, partition: int) -> HostInfo:
        """Return the owner of a partition. Raises ``UnknownRunError`` if its holder may still report."""
        owner = self.find(operator, partition)
        if owner is None:
            raise UnknownRunError(
                f"The owner of {operator}/{partition} is not known yet: this coordinator was just started, and hosts "
                "still report what they hold; ask again."
            )
        return owner

    def find(self, operator: str, partition: int) -> HostInfo | None:
        """Return the owner of a partition; None if there is none yet, or no such partition."""
        places = self.owners.get(operator, [])
        place = places[partition] if 0 <= partition < len(places) else NOBODY
        return None if place == NOBODY else self.hosts[place]

    def standbys_of(self, owners: Iterable[HostInfo]) -> dict[str, tuple[HostInfo, ...]]:
        """Return the hosts that keep copies of the partitions of these owners, by host id; empty without standbys."""
        if not self.standbys:
            return {}
        infos = {host.host_id: host for host in self.hosts}
        return {o.host_id: tuple(infos[h] for h in self.standbys.get(o.host_id, ())) for o in owners}

    @cached_property
    def copies_of_host(self) -> Mapping[str, Mapping[str, list[int]]]:
        """Return by host id and operator the partitions that a host keeps standby copies of, ascending."""
        kept: dict[str, dict[str, list[int]]] = {}
        for owner, standbys in self.standbys.items():
            for host_id in standbys:
                for operator, partition in self.of_host[owner]:
                    kept.setdefault(host_id, {}).setdefault(operator, []).append(partition)
        for of_operator in kept.values():
            for partitions in of_operator.values():
                partitions.sort()
        return kept


@dataclass(frozen=True)
class NewOwners:
    """The partitions that hosts own since the completed version became ``version``, and did not before, by host."""

    version: int = 0
    of_host: Mapping[str, frozenset[TaskKey]] = field(default_factory=dict)


class SessionHosts(NamedTuple):
    """The live hosts of a run's session at one moment, as an assignment needs them.

    ``generation`` is that of the set of hosts. ``infos`` are by host id, ascending. ``staying`` has the node of each
    host that is not leaving. ``reported`` has the partitions of the run that hosts held when they registered, each with
    its host. ``hand_overs`` has the last report of each host about copies.
    """

    generation: int
    infos: Mapping[str, HostInfo]
    staying: Mapping[str, str]
    reported: Sequence[tuple[TaskKey, str]]
    hand_overs: Mapping[str, HandOver] = MappingProxyType({})

    def copies(self, run_id: str) -> dict[TaskKey, str]:
        """Return the host with the newest copy of each partition that has one; hosts that stay come first."""
        newest: dict[TaskKey, tuple[bool, int, str]] = {}
        for host_id in self.infos:
            warm = self.hand_overs[host_id].warm.get(run_id, {}) if host_id in self.hand_overs else {}
            for operator, partitions in warm.items():
                for partition, version in partitions.items():
                    task, copy = (operator, partition), (host_id in self.staying, version, host_id)
                    newest[task] = max(newest.get(task, copy), copy)
        return {task: host_id for task, (_, _, host_id) in newest.items()}


class RunAssignment:
    """Decides on the owners of one run's partitions. Does no I/O, and waits for no storage.

    ``current`` is None until the first batch or request. ``reported`` has the hosts that acknowledgements of partitions
    came from; ``reports`` counts them. ``awaits_reports``: another coordinator has known the run, so hosts may hold
    partitions of it. ``is_unbalanced``: hosts may have more than their share, and the moves are not planned yet.

    ``planned`` has the new owner of each partition that is to move from one living host to another: the difference to
    the target assignment. ``givers`` has the completed version at the time when a host last gave partitions away. Until
    a later version is completed, that host does not know of it. ``new_owners`` load their partitions before tasks ask
    for them. ``salt`` keeps queries with the same operators from using the same hosts.

    ``lock`` guards all changes here. It is not held during requests to storage, so clients learn of owners while a
    query's storage hangs. It is taken after the lock of the run, and before that of the registries.
    """

    def __init__(self, run_id: str, tasks: Iterable[TaskKey], salt: str, standby_replicas: int = 0) -> None:
        self.lock = threading.RLock()
        self.current: Assignment | None = None
        self.is_unbalanced = False
        self.awaits_reports = False
        self.reported: dict[TaskKey, str] = {}
        self.reports = 0
        self.planned: Mapping[TaskKey, str] = {}
        self.givers: dict[str, int] = {}
        self.new_owners = NewOwners()
        self._run_id = run_id
        self._tasks = {f"{operator}/{partition}": (operator, partition) for operator, partition in tasks}
        self._salt = salt
        self._standby_replicas = standby_replicas

    @property
    def is_made(self) -> bool:
        """Return whether all partitions have had an owner, as far as this coordinator knows."""
        current = self.current
        return current is not None and not current.is_partial

    def report(self, task: TaskKey, host_id: str, *, overrides: bool = False) -> None:
        """Record that a host has a partition. The first report counts, unless this one ``overrides`` it."""
        with self.lock:
            if overrides or task not in self.reported:
                self.reported[task] = host_id
                self.reports += 1

    def unbalance(self) -> None:
        """Make the next batch give every host its share."""
        with self.lock:
            self.is_unbalanced = True

    # -- deciding, under the lock --------------------------------------------------------------

    def is_valid(
        self, generation: int, *, is_reporting: bool, rebalance: bool = False, waiting: Collection[TaskKey] = ()
    ) -> bool:
        """Return whether the current assignment stays, apart from moves that are ready.

        ``is_reporting``: hosts of an earlier coordinator may still report what they hold.
        """
        current = self.current
        if current is None or current.generation != generation:
            return False
        if (self.is_unbalanced and not is_reporting) or (rebalance and self.planned):
            return False
        has_news = not is_reporting or current.reports != self.reports
        return not (current.is_partial and (has_news or any(current.find(*task) is None for task in waiting)))

    def ready_moves(self, hand_overs: Mapping[str, HandOver], completed: int) -> dict[TaskKey, str]:
        """Return the planned moves that can be made now, each with its new owner: it has loaded a warm copy.

        ``hand_overs`` has the last report of each live host.
        """
        ready: dict[TaskKey, str] = {}
        for task, receiver in self.planned.items():
            owner = None if self.current is None else self.current.find(*task)
            giver, taker = hand_overs.get("" if owner is None else owner.host_id), hand_overs.get(receiver)
            if giver is None or taker is None or self._run_id not in giver.giving:
                continue
            warm = taker.warm.get(self._run_id, {}).get(task[0], {}).get(task[1])
            if warm is not None and warm >= completed - WARM_VERSIONS:
                ready[task] = receiver
        return ready

    def assign(
        self,
        hosts: SessionHosts,
        moves: Mapping[TaskKey, str],
        completed: int,
        epoch: int,
        *,
        is_reporting: bool,
        rebalance: bool = False,
        waiting: Collection[TaskKey] = (),
    ) -> Assignment:
        """Make and activate another assignment, with these ``moves``.

        With ``rebalance`` all planned moves happen, except those that take all partitions from a host that does not
        look at Spark's log yet.

        While hosts are reporting, only partitions with a known holder and those in ``waiting`` get owners, and nothing
        else moves.
        """
        current, infos, wanted = self.current, hosts.infos, set(waiting)
        owned = {**dict(reversed(hosts.reported)), **self.reported}  # of several holders, the first one counts
        if current is not None:
            owned.update({t: owner.host_id for t in self._tasks.values() if (owner := current.find(*t)) is not None})
        holders = {task: host_id for task, host_id in owned.items() if host_id in infos}
        # While hosts report, the owner of a partition that has none here may still come.
        lost = [t for t in self._tasks.values() if t not in holders and (not is_reporting or t in owned or t in wanted)]
        before = {**holders, **self._takers(lost, owned, hosts)}
        owner_of = {n: host_id for n, task in self._tasks.items() if (host_id := moves.get(task, before.get(task)))}
        # Only kept or awaited partitions are placed, so that each host has its share of those.
        placed = [n for n, task in self._tasks.items() if not is_reporting or n in owner_of or task in wanted]
        at_once = rebalance and not is_reporting
        owners = self._placed(placed, hosts, owner_of, rebalance=at_once)
        target = owners if is_reporting or at_once else self._target(placed, hosts, owners)
        if at_once:
            owners = self._made_at_once(target, owner_of, hosts)
        planned = {self._tasks[n]: host_id for n, host_id in target.items() if owners[n] != host_id}
        # Another coordinator, or this one after a restart, must not give the same number to another assignment.
        number = (epoch << 20) + 1 if current is None else current.number + 1
        by_task = {task: owners.get(n) for n, task in self._tasks.items()}
        standbys = self._standbys(hosts)
        after = Assignment.of(number, hosts.generation, tuple(infos.values()), by_task, self.reports, standbys)
        # If an earlier coordinator let several hosts hold a partition, all but the owner have given it away.
        reported = hosts.reported if current is None or current.is_partial else ()
        givers = {h: completed for t, h in (*before.items(), *reported) if by_task.get(t) not in (None, h)}
        self.givers = {**{host_id: at for host_id, at in self.givers.items() if at >= completed}, **givers}
        self.new_owners = self._new_owners(current, after, holders, completed)
        self.current, self.planned, self.is_unbalanced = after, {} if is_reporting else planned, is_reporting
        return after

    def _takers(
        self, lost: Collection[TaskKey], owned: Mapping[TaskKey, str], hosts: SessionHosts
    ) -> dict[TaskKey, str]:
        """Return the live host that has a copy of each lost partition; ``owned`` has the last owners, if known.

        The newest copy that hosts report counts. One that has not reported its copy yet may have it as well.
        """
        copies = hosts.copies(self._run_id) if lost else {}
        standbys = {} if self.current is None else self.current.standbys
        takers: dict[TaskKey, str] = {}
        for task in lost:
            possible = (copies.get(task), self.planned.get(task), *standbys.get(owned.get(task, ""), ()))
            taker = next((host_id for host_id in possible if host_id is not None and host_id in hosts.infos), None)
            if taker is not None:
                takers[task] = taker
        return takers

    def _placed(
        self, partitions: Sequence[str], hosts: SessionHosts, owner_of: Mapping[str, str], *, rebalance: bool
    ) -> dict[str, str]:
        """Return the owner of each partition: those that are free go to hosts that stay."""
        if rebalance:
            return assign(partitions, hosts.staying, owner_of, rebalance=True, salt=self._salt)
        leaving = {n: h for n, h in owner_of.items() if h not in hosts.staying and h in hosts.infos}
        rest = assign([n for n in partitions if n not in leaving], hosts.staying, owner_of, salt=self._salt)
        return {n: leaving.get(n) or rest[n] for n in partitions}

    def _made_at_once(
        self, target: Mapping[str, str], owner_of: Mapping[str, str], hosts: SessionHosts
    ) -> dict[str, str]:
        """Return the owners of ``target``, but leave all partitions to a host that would lose its last one.

        That host takes no part in the next version. Unless it looks at Spark's log already, it would answer from its
        own version until its next heartbeat.
        """
        looking = {host_id for host_id, said in hosts.hand_overs.items() if self._run_id in said.giving}
        unmoved = {*owner_of.values()} - {*target.values()} - looking
        return {n: owner_of[n] if owner_of.get(n) in unmoved else host_id for n, host_id in target.items()}

    def _target(self, partitions: Sequence[str], hosts: SessionHosts, owners: Mapping[str, str]) -> dict[str, str]:
        """Return the owner that each partition should have: equal shares. Hosts with copies relieve leaving hosts."""
        leaving = [n for n in partitions if owners[n] not in hosts.staying]
        copies = hosts.copies(self._run_id) if leaving else {}
        owner_of = {**owners, **{n: copies[self._tasks[n]] for n in leaving if self._tasks[n] in copies}}
        return assign(partitions, hosts.staying, owner_of, rebalance=True, salt=self._salt)

    def _standbys(self, hosts: SessionHosts) -> dict[str, tuple[str, ...]]:
        if not self._standby_replicas:
            return {}
        nodes = {host_id: info.node_id for host_id, info in hosts.infos.items()}
        zones = {info.node_id: info.zone for info in hosts.infos.values()}
        return standby_hosts(nodes, zones, self._standby_replicas, staying=hosts.staying, salt=self._salt)

    def _new_owners(
        self, current: Assignment | None, after: Assignment, holders: Mapping[TaskKey, str], completed: int
    ) -> NewOwners:
        earlier = self.new_owners.of_host if self.new_owners.version == completed else {}
        of_host: dict[str, frozenset[TaskKey]] = {}
        for host, (host_id, tasks) in zip(after.hosts, after.of_host.items(), strict=True):
            new = set(earlier.get(host_id, ())).intersection(tasks)
            for task in tasks:
                former = None if current is None else current.find(*task)
                # Another incarnation of a host has none of the partitions that the host has owned.
                has_it = holders.get(task) == host_id if former is None else _same(former, host)
                if not has_it:
                    new.add(task)
            of_host[host_id] = frozenset(new)
        return NewOwners(completed, of_host)


def _same(one: HostInfo, other: HostInfo) -> bool:
    return (one.host_id, one.incarnation) == (other.host_id, other.incarnation)
