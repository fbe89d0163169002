"""How long a query with state takes to start anew on object storage, with hosts that hold nothing.

    python benchmarks/cold_start.py                    200 partitions on 4 hosts, 50 ms a request
    python benchmarks/cold_start.py --local /dev/shm   with the hosts' local files in memory

A played stream (``played_stream.py``) runs ``--batches`` batches with snapshots. Then another coordinator takes the
query up with other hosts. ``start``: until the query is registered. ``first batch``: from its first task's start to its
last one's end, so that every partition has been loaded. Requests are those of both, counted by the proxy.

All hosts are in this process. RocksDB is opened with Python's lock held, and syncs files some ten times meanwhile: here
one host waits for the others' syncs, which hosts with processes of their own do not.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from played_stream import Shape, played_stream
from s3_proxy import proxied_s3

BUCKET = "bench"


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
    shape = Shape(options.hosts, options.partitions, slots=options.slots)
    location = f"s3://{BUCKET}/cold"
    with tempfile.TemporaryDirectory(prefix="cold-start-", dir=options.local) as directory, proxied_s3(BUCKET) as s3:
        ways = (s3.options(), s3.options(s3.direct))
        with played_stream(Path(directory) / "first", location, shape, *ways) as stream:
            stream.run(options.batches)
        s3.slow_down(options.delay / 1e3)
        s3.traffic()
        began = time.perf_counter()
        with played_stream(Path(directory) / "second", location, shape, *ways, stream) as again:
            started = time.perf_counter() - began
            of_start = s3.traffic().requests
            (first,) = again.run(1)
            of_batch = s3.traffic().requests
            (second,) = again.run(1)
    print(f"{options.partitions} partitions on {options.hosts} hosts, {options.delay:g} ms a request")
    print(f"start        {started:6.2f} s  {dict(of_start)}")
    print(f"first batch  {first:6.2f} s  {dict(of_batch)}")
    print(f"both         {started + first:6.2f} s, the second batch {second:.2f} s")


if __name__ == "__main__":
    main()
