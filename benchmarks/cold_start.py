"""How long a cold start of a query with state takes on object storage, with hosts that hold nothing.

    python benchmarks/cold_start.py                    200 partitions on 4 hosts, 50 ms a request
    python benchmarks/cold_start.py --local /dev/shm   with the hosts' local files in memory

A played stream (``played_stream.py``) runs ``--batches`` batches with snapshots. Then another coordinator takes over
the query with other hosts, each in its own process. ``start``: until the query is registered. ``first batch``: from the
start of its first task to the end of its last one, so that every partition has been loaded. Requests are those of both,
counted by the proxy. ``snapshots``: from the end of a later batch until all partitions have their first snapshot, which
opens their databases for writing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from played_stream import PlayedStream, Shape, played_cluster
from s3_proxy import ProxiedS3, proxied_s3

BUCKET = "cold"


@dataclass(frozen=True)
class ColdStart:
    """The seconds of a cold start, and its requests to storage by kind. ``snapshots``: 0 if none were made."""

    start: float
    first_batch: float
    second_batch: float
    snapshots: float
    of_start: Counter[str]
    of_batch: Counter[str]

    @property
    def requests(self) -> Counter[str]:
        """Return all requests until the first batch had ended."""
        return self.of_start + self.of_batch


def grown(
    root: Path, bucket: str, partitions: int, hosts: int, batches: int, s3: ProxiedS3, slots: int = 0
) -> PlayedStream:
    """Return a stream that has run so many batches and has ended."""
    shape = Shape(hosts, partitions, slots=slots)
    with played_cluster(root, hosts) as cluster:
        stream = cluster.start(f"s3://{bucket}/cold", shape, s3.options(), s3.options(s3.direct))
        stream.run(batches)
    return stream


def started(
    root: Path, bucket: str, earlier: PlayedStream, s3: ProxiedS3, *, with_snapshots: bool = False
) -> tuple[ColdStart, PlayedStream]:
    """Restart a stream that has ended, with other hosts. Return the costs, and the new stream, which has ended too."""
    with played_cluster(root, earlier.shape.hosts) as cluster:
        s3.traffic(bucket)
        began = time.perf_counter()
        ways = (earlier.registration.checkpoint_location, earlier.shape, s3.options(), s3.options(s3.direct))
        stream = cluster.start(*ways, earlier=earlier)
        start = time.perf_counter() - began
        of_start = s3.traffic(bucket).requests
        (first,) = stream.run(1)
        of_batch = s3.traffic(bucket).requests
        (second,) = stream.run(1)
        snapshots = _first_snapshots(stream) if with_snapshots else 0.0
    return ColdStart(start, first, second, snapshots, of_start, of_batch), stream


def _first_snapshots(stream: PlayedStream) -> float:
    """Run batches until snapshots are made; return how long that took behind the last batch."""
    stream.run(stream.shape.maintenance - stream.batch % stream.shape.maintenance - 1)
    began = time.perf_counter()
    (batch,) = stream.run(1)
    return time.perf_counter() - began - batch


def main() -> None:
    """Play, start again, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--partitions", type=int, default=200)
    parser.add_argument("--batches", type=int, default=25)
    parser.add_argument("--slots", type=int, default=0, help="tasks that run at once; 0: all")
    parser.add_argument("--delay", type=float, default=50.0, help="ms that each request takes longer")
    parser.add_argument("--local", type=Path, help="where the hosts' local files are; by default in the usual place")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cold-start-", dir=options.local) as directory, proxied_s3() as s3:
        s3.make_bucket(BUCKET)
        given = (options.partitions, options.hosts, options.batches, s3, options.slots)
        stream = grown(Path(directory) / "first", BUCKET, *given)
        s3.slow_down(BUCKET, options.delay / 1e3)
        found, _ = started(Path(directory) / "second", BUCKET, stream, s3, with_snapshots=True)
    print(f"{options.partitions} partitions on {options.hosts} hosts, {options.delay:g} ms a request")
    print(f"start        {found.start:6.2f} s  {dict(found.of_start)}")
    print(f"first batch  {found.first_batch:6.2f} s  {dict(found.of_batch)}")
    print(f"both         {found.start + found.first_batch:6.2f} s, the second batch {found.second_batch:.2f} s")
    print(f"snapshots    {found.snapshots:6.2f} s")


if __name__ == "__main__":
    main()
