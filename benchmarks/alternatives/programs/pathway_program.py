"""Pathway: ``groupby`` and ``reduce`` over a directory of JSON lines, with persistence, on two threads of its engine.

A query of Pathway runs until its process ends. So the query has its own process, and a stop kills that process once its
counts are in a snapshot. This module is the program of both processes.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import protocol

THREADS = 2
AUTOCOMMIT_MS = 100


class Pathway(protocol.Program):
    def start(self, contestant: str, directory: Path, collect: bool, checkpoint_seconds: float) -> None:
        self._count, self._checkpoint_seconds = directory / "rows", checkpoint_seconds
        before = self._count.read_bytes()[8:] if self._count.exists() else bytes(8)
        self._count.write_bytes(before + before)  # what earlier runs have counted, and what all have
        given = {"PATHWAY_THREADS": str(THREADS), "DIRECTORY": str(directory), "COLLECT": "1" if collect else ""}
        given["CHECKPOINT_SECONDS"] = str(checkpoint_seconds)
        self._process = subprocess.Popen([sys.executable, __file__, "query"], env=os.environ | given)

    def rows(self) -> int:
        if self._process.poll() is not None:
            raise RuntimeError(f"Pathway has ended with status {self._process.returncode}; see its output above.")
        data = self._count.read_bytes()
        return int.from_bytes(data[8:], "little") - int.from_bytes(data[:8], "little")

    def stop(self) -> None:
        time.sleep(3 * self._checkpoint_seconds)
        self._process.kill()
        self._process.wait()


def query() -> None:
    """Run until the process is killed. The sum of all counts says how far the query is."""
    import pathway as pw

    class Row(pw.Schema):
        user: int
        amount: int

    directory = Path(os.environ["DIRECTORY"])
    rows = pw.io.jsonlines.read(
        directory / "input", schema=Row, mode="streaming", autocommit_duration_ms=AUTOCOMMIT_MS, name="rows"
    )
    totals = rows.groupby(rows.user).reduce(rows.user, n=pw.reducers.count(), spent=pw.reducers.sum(rows.amount))
    if os.environ["COLLECT"]:
        results = protocol.Results(directory / "results")

        def write(key: pw.Pointer, row: dict[str, int], time: int, is_addition: bool) -> None:
            if is_addition:
                results.write(row["user"], row["n"], row["spent"])

        pw.io.subscribe(totals, on_change=write, name="results")
    else:
        pw.io.null.write(totals, name="results")
    with (directory / "rows").open("r+b") as file:
        count = mmap.mmap(file.fileno(), 16)

    def note(key: pw.Pointer, row: dict[str, int], time: int, is_addition: bool) -> None:
        if is_addition:
            count[8:] = int(row["rows"]).to_bytes(8, "little")

    pw.io.subscribe(totals.reduce(rows=pw.reducers.sum(totals.n)), on_change=note, name="count")
    pw.run(
        monitoring_level=pw.MonitoringLevel.NONE,
        persistence_config=pw.persistence.Config(
            pw.persistence.Backend.filesystem(directory / "state"),
            snapshot_interval_ms=round(1e3 * float(os.environ["CHECKPOINT_SECONDS"])),
        ),
    )


if __name__ == "__main__":
    query() if sys.argv[1:] == ["query"] else protocol.serve(Pathway())
