"""The size of a version of the state in bytes: those that its batch has added, and those of a load."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from backends.formats import manifest_chain as chains
from backends.formats.manifest import Manifest, SnapshotRef
from backends.formats.manifest_chain import Chain


def delta_bytes(manifest: Manifest) -> int:
    """Return the bytes of the changelogs that a version has added."""
    return sum(sum(operator.partitions.stored.size) for operator in manifest.operators.values())


def full_bytes(chain: Chain, version: int, snapshot_bytes: Callable[[SnapshotRef], int | None]) -> int | None:
    """Return the bytes of the files from which a version is loaded: of each partition a snapshot and what follows it.

    Partitions without a snapshot of their own are loaded from the changelogs since the first version, or since an
    earlier layout; of that, all files count. ``snapshot_bytes`` says how many bytes a snapshot has, None if that is not
    known; then neither is the sum. Goes over the versions of the chain a column at a time.
    """
    total = 0
    for operator in chain[version].operators:
        for held in chains.segments(chain, operator, version):
            newest = {partition: refs[-1] for partition, refs in chains.snapshots(chain, held).items()}
            sizes = [snapshot_bytes(ref) for ref in newest.values()]
            known = [size for size in sizes if size is not None]
            if len(known) < len(sizes):
                return None
            total += sum(known)
            start = np.zeros(held.layout.num_partitions, np.int64)
            for partition, ref in newest.items():
                start[partition] = ref.version
            for v in range(held.first, held.last + 1):
                entries = chain[v].operators[operator].partitions
                numbers = np.fromiter(entries, np.int64, len(entries))
                added = np.asarray(entries.stored.size, np.int64)
                total += int(added[start[numbers] < v].sum())
            if len(newest) == held.layout.num_partitions:
                break
    return total
