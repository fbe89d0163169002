"""A client of the stream, on machine 0: ``python -m benchmarks.on_machines.client CHECKPOINT KEYS ROWS``.

Asks for 100 random keys again and again, and prints for each answer, as JSON, the time of the request, its duration in
seconds, and its version. If an answer does not match the state of its keys at exactly one version, or is older than the
version that Spark had committed at the time of the request, it is an event ``wrong``; an error is an event ``late``.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from benchmarks.on_machines.expected import Shape
from benchmarks.on_machines.stream import OPERATOR
from spark_bridge import QueryableStateClient
from spark_bridge.exceptions import QueryableStateError
from tests.lab.auditor import committed

PAUSE = 0.1
AT_ONCE = 100


def ask(client: QueryableStateClient, shape: Shape, keys: np.ndarray, checkpoint: str) -> dict[str, object]:
    """Ask once; return the event."""
    least, began, at = committed(checkpoint), time.perf_counter(), time.time()
    try:
        rows = client.get_many(OPERATOR, keys)
    except QueryableStateError as error:
        return {"event": "late", "at": at, "seconds": time.perf_counter() - began, "error": repr(error)[:200]}
    seconds = time.perf_counter() - began
    counts, sums = (rows.column(name).fill_null(0).to_numpy() for name in ("n", "s"))
    version = shape.version_of(keys, counts, sums, range(least, committed(checkpoint) + 1))
    return {"event": "wrong" if version is None else "answer", "at": at, "seconds": seconds, "version": version}


def main(checkpoint: str, keys: int, rows: int) -> None:
    """Ask until the process is killed."""
    draws = np.random.default_rng(1)
    with QueryableStateClient.connect(timeout=60) as client:
        while True:
            drawn = draws.choice(keys, AT_ONCE, replace=False)
            print(json.dumps(ask(client, Shape(keys, rows), drawn, checkpoint)), flush=True)
            time.sleep(PAUSE)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
