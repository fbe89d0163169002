"""Who owns which partition: rendezvous hashing with bounded load.

A partition stays where it is while its host lives. A free one goes to the host with the highest
score for it among those that have room, so that hosts get equal shares and few partitions move
(Thaler and Ravishankar's rendezvous hashing; Mirrokni et al. for the bound).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import xxhash


def score(key: str, host_id: str) -> int:
    """The rendezvous score of a host for a partition."""
    return xxhash.xxh64_intdigest(f"{key}|{host_id}".encode())


def assign(
    partitions: Sequence[str], hosts: Sequence[str], current: Mapping[str, str], *, rebalance: bool = False
) -> dict[str, str]:
    """Host per partition. ``current`` owners are kept if they are among ``hosts``, which must not be empty.

    With ``rebalance`` a host keeps no more than an equal share, so that a new host gets its own.
    """
    bound = -(-len(partitions) // len(hosts))
    owners: dict[str, str] = {}
    load: Counter[str] = Counter()
    for partition in partitions:
        host = current.get(partition)
        if host is not None and host in hosts and (not rebalance or load[host] < bound):
            owners[partition] = host
            load[host] += 1
    for partition in partitions:
        if partition not in owners:
            free = [h for h in hosts if load[h] < bound] or list(hosts)
            owners[partition] = max(free, key=lambda h: (score(partition, h), h))
            load[owners[partition]] += 1
    return owners
