"""Asks for the accounts of the bank again and again, and reports wrong answers.

``python -m tests.lab.auditor CHECKPOINT``, on machine 0, with ``RAY_ADDRESS`` set. Prints ``answer VERSION`` for a
correct answer: it has exactly the accounts of its version, and the version is at least as new as the one that Spark had
committed at the time of the request, and as all that the client has seen. Prints ``late ERROR`` if no answer came in
time, and ``wrong ...`` otherwise.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from spark_bridge import QueryableStateClient
from spark_bridge.exceptions import QueryableStateError
from tests.lab.accounts import ACCOUNTS, OPERATOR, postings

PAUSE = 0.2
STALENESS = 3


def committed(checkpoint: str) -> int:
    """Return the version that Spark has committed; the checkpoint may be on HDFS."""
    if checkpoint.startswith("hdfs:"):
        import hdfs_native

        listed = hdfs_native.Client(checkpoint).list_status(f"{urlsplit(checkpoint).path}/commits")
        names = [Path(status.path).name for status in listed]
    else:
        names = [p.name for p in Path(checkpoint, "commits").glob("[0-9]*")]
    return max((int(name) + 1 for name in names if name.isdecimal()), default=0)


def audit(client: QueryableStateClient, at_least: int) -> str:
    """Ask once, and compare all accounts."""
    with client.scan(OPERATOR, columns=["k", "n", "money"]) as scan:
        rows = scan.to_arrow()
        version = scan.version
    if version < at_least:
        return f"wrong version {version}, though {at_least} was committed"
    return compared(rows, version) or f"answer {version}"


def audit_copies(client: QueryableStateClient, seen: int) -> str:
    """Ask once, of owners or copies, whoever answers first, and compare all accounts."""
    rows = client.get_many(OPERATOR, np.arange(ACCOUNTS), staleness=STALENESS)
    version = client.answered_version
    if version < seen - STALENESS:
        return f"wrong version {version} of a copy, though {seen} was seen"
    return compared(rows.filter(rows.column("n").is_valid()), version) or f"stale {version}"


def compared(rows: pa.Table, version: int) -> str:
    """Return what is wrong with the accounts of a version; "" if nothing is."""
    keys = rows.column("k").to_numpy()
    money, count = np.zeros(ACCOUNTS, np.int64), np.zeros(ACCOUNTS, np.int64)
    money[keys], count[keys] = rows.column("money").to_numpy(), rows.column("n").to_numpy()
    expected_money, expected_count = postings(version)
    off = np.flatnonzero((money != expected_money) | (count != expected_count))
    if len(off) or len(keys) != np.count_nonzero(expected_count):
        return (
            f"wrong at version {version}: {len(off)} accounts, {off[:5]}; {money.sum()} made or lost; {len(keys)} rows"
        )
    return ""


def main(checkpoint: str) -> None:
    """Ask until the process receives a signal to end."""
    with QueryableStateClient.connect(timeout=60) as client:
        seen = 0
        while True:
            try:
                said = audit(client, max(seen, committed(checkpoint)))
                seen = max(seen, int(said.split()[1])) if said.startswith("answer") else seen
            except QueryableStateError as error:
                said = f"late {type(error).__name__}: {error}"
            print(said, flush=True)
            time.sleep(PAUSE)


if __name__ == "__main__":
    main(sys.argv[1])
