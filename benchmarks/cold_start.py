"""A large state in snapshots on a server that speaks S3, and its start on hosts whose local disks are empty.

The state is made without a stream: each partition's RocksDB files are written from sorted arrays, and their snapshot is
reported to the coordinator as the upload of the partition's owner.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from played import PlayedStream, Shape, binary, played_cluster
from slow_s3 import SlowS3

from backends.conf import DEFAULT_FAMILY, StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.rocksdb import LocalRocksDB
from backends.formats import snapshot
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from backends.formats.manifest import partition_directory
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.messages import SnapshotUploaded
from coordinator_actor.run.holds import UPLOAD

ROWS = 1 << 18
VALUE_BYTES = 20
"""With an 8-byte key, RocksDB's files have about 30 bytes for a pair of random values."""
BUCKET = "cold"
FILL_THREADS = 2


@dataclass(frozen=True)
class Filled:
    """A query that has ended, whose state is in snapshots of ``nbytes`` below ``root``."""

    root: Path
    stream: PlayedStream
    nbytes: int


@contextmanager
def filled(root: Path, keys: int, partitions: int, batch_keys: int, conf: StateStoreConf) -> Iterator[Filled]:
    """Make a state of ``keys`` keys for the block; a batch reads and writes ``batch_keys`` of them."""
    of_keys = keys // partitions
    shape = Shape(1, partitions, keys=batch_keys // partitions, of_keys=of_keys, maintenance=1 << 30, retain=100)
    with played_cluster(root / "first", 1, conf=conf) as cluster:
        stream = cluster.start(str(root / BUCKET), shape)
        stream.run(1)
        work = [(root / f"fill-{p}", root / BUCKET / "statestore", conf, of_keys, p) for p in range(partitions)]
        nbytes = 0
        run_id, lineage = stream.registration.run_id, cluster.coordinator.lineage
        heads = [lineage(run_id, "op0", p, stream.batch, UPLOAD).head for p in range(partitions)]
        with ProcessPoolExecutor(FILL_THREADS) as pool:
            uploads = list(pool.map(_uploaded, *zip(*work, strict=True), heads, [partitions] * partitions))
        (player,) = cluster.players
        for p, (stored, size) in enumerate(uploads):
            message = SnapshotUploaded(
                *(run_id, "op0", p, player.info.host_id, player.info.incarnation),
                *(stored.ref, None, stored.descriptor.without_content),
            )
            if not cluster.coordinator.snapshot_uploaded(message):
                raise RuntimeError(f"The coordinator refuses the snapshot of partition {p}.")
            nbytes += size
        stream.run(2)  # their manifests name the snapshots
    stream.shape = replace(shape, reads=True)
    yield Filled(root, stream, nbytes)


def _uploaded(
    directory: Path, location: Path, conf: StateStoreConf, keys: int, partition: int, head: str, partitions: int
) -> tuple[snapshot.StoredSnapshot, int]:
    """Write a snapshot of a partition with the keys from 0 to ``keys``; return it, and the bytes of its files."""
    engine = LocalRocksDB(directory / "engine", conf)
    rng = np.random.default_rng(partition)

    def parts() -> Iterator[tuple[str, SortedPairs]]:
        for at in range(0, keys, ROWS):
            rows = np.arange(at, min(at + ROWS, keys), dtype=">i8")
            values = binary(rng.bytes(VALUE_BYTES * len(rows)), VALUE_BYTES)
            yield DEFAULT_FAMILY, SortedPairs(binary(rows.tobytes(), 8), values)

    engine.load_sorted(parts(), LocalState.unfinished(head))
    state = LocalState(1, head, keys)
    engine.prepare(Changes({}))(state)
    captured = directory / "captured"
    captured.mkdir()
    engine.capture(captured)()
    storage = CheckpointStorage.open(str(location), fsync=False)
    with ThreadPoolExecutor(1) as pool:
        prepared = snapshot.prepare(
            *(storage, partition_directory("op0", partitions, partition), "rocksdb", captured, state),
            earlier=None,
            digests=snapshot.Digests(),
            pool=pool,
            is_cancelled=lambda: False,
        )
    stored = snapshot.store_alone(storage, prepared)
    engine.close()
    shutil.rmtree(directory)
    return stored, sum(f.file.size for f in stored.descriptor.files if f.file is not None)


@dataclass(frozen=True)
class Start:
    """The seconds of a start: until the coordinator has the query, and until all tasks have committed their batch."""

    registered: float
    first_batch: float
    requests: int
    received: int


def start(state: Filled, s3: SlowS3, where: Path, conf: StateStoreConf) -> Start:
    """Start the query on a new host with an empty disk, run its first batch, and remove the host's files.

    The batch is written into a copy of the checkpoint, so that each start finds the same files.
    """
    copy = state.root / f"{BUCKET}-{where.name}"
    shutil.copytree(state.root / BUCKET, copy, copy_function=os.link)
    with played_cluster(where, 1, conf=conf) as cluster:
        s3.traffic()
        began = time.perf_counter()
        stream = cluster.start(
            f"s3://{copy.name}", state.stream.shape, s3.options(), s3.options(), earlier=state.stream
        )
        registered = time.perf_counter() - began
        (batch,) = stream.run(1)
        traffic = s3.traffic()
    shutil.rmtree(where, ignore_errors=True)
    shutil.rmtree(copy)
    return Start(registered, registered + batch, traffic.requests.total(), traffic.received)
