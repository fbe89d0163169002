"""How long each page takes that shows 50 queries with 10,000 partitions on 40 hosts.

    python benchmarks/large_page.py                 40 requests of each page, one after the other
    python benchmarks/large_page.py --rounds 10

A separate process (``tests.spark_bridge.ui.large_page``) serves the page, with real hosts that answer keys and scans.
It also renews the overview of the pages without a pause. Prints the median and the 95th percentile of the times from
the request to the last byte of the answer, and the load of the machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds: int = parser.parse_args().rounds
    sys.path.insert(0, str(ROOT))
    from tests.spark_bridge.ui.large_page import PATHS
    from tests.spark_bridge.ui.systems import ACT

    took: dict[str, list[float]] = {path: [] for path in PATHS}
    with tempfile.TemporaryDirectory(prefix="rs-") as directory:
        program = [sys.executable, "-m", "tests.spark_bridge.ui.large_page", directory]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT) as serving:
            assert serving.stdout is not None
            address = serving.stdout.readline().strip()
            with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {ACT}"}, timeout=60) as client:
                for path in PATHS:  # what is made once: templates, connections
                    client.get(path).raise_for_status()
                for _ in range(rounds):
                    for path in PATHS:
                        asked = time.perf_counter()
                        client.get(path).raise_for_status()
                        took[path].append(time.perf_counter() - asked)
            serving.terminate()
    table = Table("page", "median, ms", "95th percentile, ms")
    for path, times in took.items():
        last = sorted(times)[len(times) * 95 // 100]
        table.add_row(path, f"{median(times) * 1000:.0f}", f"{last * 1000:.0f}")
    Console().print(table)
    Console().print(f"{rounds} requests of each page, at a load of {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
