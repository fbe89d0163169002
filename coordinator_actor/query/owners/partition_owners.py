"""Decides which host owns which partition: equal shares by rendezvous hashing, and few moves.

A partition stays where it is while its host lives. A free partition goes to the host with the highest score for it
among the hosts that have room (rendezvous hashing by Thaler and Ravishankar; the bound by Mirrokni et al.). Room is
counted twice: with P partitions on H hosts, a node with k of the hosts gets ``P * k / H`` partitions, and each host of
the node an equal part of them, both rounded down or up. So every host has ``P / H`` partitions, rounded down or up.
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

SCORED_PARTITIONS = 1024
"""Scores are computed for at most this many partitions at a time: with 200 hosts they fit the cache of a core."""
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
    """Return the host of each partition. ``current`` owners are kept if they are among ``hosts``.

    ``hosts`` maps host id to node id; a sequence of host ids counts as the hosts of one node. With ``rebalance`` a host
    keeps no more than its share, so that a new host gets its own share, and no more partitions move than that takes.
    ``salt``, for example a query id, keeps queries with the same operators and fewer partitions than hosts from using
    the same hosts. The order of partitions and hosts does not matter. Raises ``UnknownHostError`` if there are no
    hosts.
    """
    nodes = hosts if isinstance(hosts, Mapping) else dict.fromkeys(hosts, "")
    if not nodes:
        raise UnknownHostError(f"There is no live state store host to own the {len(partitions)} partitions; start one.")
    # In the order of hashes, so that among equals no node is preferred for its name.
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
    """Return how many of ``total`` partitions each host should own.

    ``loads`` is how many each host owns now, ``nodes`` its node. Where shares cannot be equal, the hosts that own most
    now get one more. Of all shares that are as equal as the head of this file says, these take the fewest moves. With
    ``keep`` no host gets less than its load; the shares may then exceed ``total``.
    """
    members: defaultdict[str, list[int]] = defaultdict(list)
    for host, node in enumerate(nodes):
        members[node].append(host)
    groups = list(members.values())
    parts = [total * len(group) // len(nodes) for group in groups]
    # Rounding a node up costs nothing, and saves as many moves out of its hosts.
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
    """Divide a node's share among its hosts. Where it cannot be equal, the most loaded hosts get one more."""
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
        taken = order[rank < left[sorted_wanted]]
        result[asking[taken]] = wanted[taken]
        left -= np.bincount(wanted[taken], minlength=len(left))
        asking = np.delete(asking, taken)
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


def _released(held: list[str], host: Hashes, count: int) -> list[str]:
    """Return the ``count`` partitions of a host that score lowest with it, whatever their order."""
    scores = _scores(_hashes(held), host)[:, 0]
    return [held[i] for i in np.argsort(scores, kind="stable")[:count].tolist()]


def _hashes(names: Sequence[str]) -> Hashes:
    return np.array([xxhash.xxh64_intdigest(name.encode()) for name in names], np.uint64)
