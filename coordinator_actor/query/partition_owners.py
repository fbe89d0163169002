"""Who owns which partition: equal shares by rendezvous hashing, and few moves.

A partition stays where it is while its host lives. A free one goes to the host with the highest score for it among
those that have room (Thaler and Ravishankar's rendezvous hashing; Mirrokni et al. for the bound). Room is counted twice:
with P partitions on H hosts, a node with k of the hosts gets ``P * k / H`` partitions and each host of a node an equal part
of those, both rounded down or up. So every host also has ``P / H``, rounded down or up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from coordinator_actor.exceptions import UnknownHostError

Hashes = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]

ROWS = 1024
"""Scores are made for so many partitions at a time: with 200 hosts they fit a core's cache."""
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)


def assign(
    partitions: Sequence[str],
    hosts: Sequence[str] | Mapping[str, str],
    current: Mapping[str, str],
    *,
    rebalance: bool = False,
    salt: str = "",
) -> dict[str, str]:
    """Host per partition. ``current`` owners are kept if they are among ``hosts``.

    ``hosts`` maps host id to node id; given as a sequence, they count as hosts of one node. With ``rebalance`` a host
    keeps no more than its share, so that a new one gets its own, and no more partitions move than that takes. ``salt``, a
    query id for instance, keeps queries with the same operators and fewer partitions than hosts from the same hosts.
    The order of partitions and hosts does not matter. Raises ``UnknownHostError`` if there are no hosts.
    """
    nodes = hosts if isinstance(hosts, Mapping) else dict.fromkeys(hosts, "")
    if not nodes:
        raise UnknownHostError(f"There is no live state store host to own the {len(partitions)} partitions; start one.")
    # By hash, so that among equals no node is preferred for its name.
    seed = xxhash.xxh64_intdigest(salt.encode())
    host_hashes = {h: xxhash.xxh64_intdigest(h.encode(), seed) for h in nodes}
    names = sorted(nodes, key=lambda h: (host_hashes[h], h))
    kept: dict[str, list[str]] = {h: [] for h in names}
    free = []
    for partition in partitions:
        held = kept.get(current.get(partition, ""))
        if held is None:
            free.append(partition)
        else:
            held.append(partition)
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
    """How many of ``total`` partitions each host should own; the hosts that own most now get what cannot be divided.

    ``loads`` is what each host owns now, ``nodes`` its node. Of all shares that are as equal as the head of this file says,
    these are reached with the fewest moves. With ``keep`` no host's is less than its load; they may then exceed ``total``.
    """
    members: defaultdict[str, list[int]] = defaultdict(list)
    for host, node in enumerate(nodes):
        members[node].append(host)
    groups = list(members.values())
    parts = [total * len(group) // len(nodes) for group in groups]
    # To round a node up costs nothing, and saves so many moves out of its hosts.
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
    """A node's share on top of what its hosts own: as equal as it can be if none gives anything up."""
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
    """A node's share divided among its hosts; the most loaded ones get one more where it cannot be equal."""
    each, more = divmod(share, len(loads))
    result = np.full(len(loads), each, np.int64)
    result[np.argsort(-loads, kind="stable")[:more]] += 1
    return result


def _surplus(loads: Counts, share: int) -> int:
    """How many partitions must leave the hosts of a node if it may have ``share``."""
    return int(np.maximum(loads - _even(loads, share), 0).sum())


def place(partitions: Hashes, hosts: Hashes, room: Counts) -> Counts:
    """Host (its index) per partition, by hashes of both: no host gets more than its ``room``, which must be enough in all.

    In rounds: each partition asks the host with its highest score among those with room; a host with more askers
    than room takes those that score highest with it. So the order of neither side matters.
    """
    result = np.full(len(partitions), -1, np.int64)
    left = room.copy()
    asking = np.arange(len(partitions))
    while len(asking):
        open_hosts = np.flatnonzero(left > 0)
        best, scores = _best(partitions[asking], hosts[open_hosts])
        wanted = open_hosts[best]
        # By host, the highest scores first: the rank within a host's askers says who is taken.
        order = np.lexsort((np.arange(len(asking)), ~scores, wanted))
        sorted_wanted = wanted[order]
        rank = np.arange(len(order)) - np.searchsorted(sorted_wanted, sorted_wanted)
        taken = order[rank < left[sorted_wanted]]
        result[asking[taken]] = wanted[taken]
        left -= np.bincount(wanted[taken], minlength=len(left))
        asking = np.delete(asking, taken)
    return result


def _best(partitions: Hashes, hosts: Hashes) -> tuple[Counts, Hashes]:
    """Per partition the index of the host with the highest score for it, and that score."""
    best = np.empty(len(partitions), np.int64)
    highest = np.empty(len(partitions), np.uint64)
    for start in range(0, len(partitions), ROWS):
        scores = _scores(partitions[start : start + ROWS], hosts)
        top = scores.argmax(axis=1)
        best[start : start + ROWS] = top
        highest[start : start + ROWS] = scores[np.arange(len(top)), top]
    return best, highest


def _scores(partitions: Hashes, hosts: Hashes) -> Hashes:
    """Score per partition and host: both hashes mixed (two rounds of multiply and shift, as in ``rrmxmx``)."""
    mixed: Hashes = partitions[:, None] ^ hosts[None, :]
    for _ in range(2):
        mixed ^= mixed >> _SHIFT
        mixed *= _MULTIPLIER
    mixed ^= mixed >> _SHIFT
    return mixed


def _released(held: list[str], host: Hashes, count: int) -> list[str]:
    """The ``count`` partitions of a host that score lowest with it, whatever their order."""
    scores = _scores(_hashes(held), host)[:, 0]
    return [held[i] for i in np.argsort(scores, kind="stable")[:count].tolist()]


def _hashes(names: Sequence[str]) -> Hashes:
    return np.array([xxhash.xxh64_intdigest(name.encode()) for name in names], np.uint64)
