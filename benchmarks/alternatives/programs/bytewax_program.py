"""Bytewax: ``stateful_map`` over files of JSON lines, with recovery, in two processes of one worker each.

Python's threads would share one interpreter, so that Bytewax' documentation advises processes. This program starts the
two processes with ``python -m bytewax.run``, which imports the dataflow from here, and reads their counts.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import bytewax.operators as op
import protocol
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import init_db_dir

STOP = "stop"
PARTS = 2
LINES = 1000
"""Rows a batch, as in Bytewax' own file source."""
LOOK_FOR_FILES = timedelta(milliseconds=10)


class Part(StatefulSourcePartition):
    """Every second file of the input, in order. The position is the last file, and how many bytes of it are read."""

    def __init__(self, directory: Path, part: str, resume_state: tuple[str, int] | None) -> None:
        self._directory, self._part = directory, int(part)
        self._read, self._at = resume_state or ("", 0)
        self._file: Any = None
        if self._at:
            self._file = (directory / "input" / self._read).open("rb")
            self._file.seek(self._at)
        self._sleeps = False

    def next_batch(self) -> list[bytes]:
        self._sleeps = False
        if self._file is None and not self._open_next():
            if (self._directory / STOP).exists():
                raise StopIteration
            self._sleeps = True
            return []
        lines = [line for _, line in zip(range(LINES), self._file, strict=False)]
        self._at = self._file.tell() if lines else 0
        if not lines:
            self._file.close()
            self._file = None
        return lines

    def _open_next(self) -> bool:
        names = sorted(path.name for path in (self._directory / "input").glob("*.json"))
        mine = (name for name in names if name > self._read and int(name[: -len(".json")]) % PARTS == self._part)
        name = next(mine, None)
        if name is None:
            return False
        self._read, self._file = name, (self._directory / "input" / name).open("rb")
        return True

    def next_awake(self) -> datetime | None:
        return datetime.now(timezone.utc) + LOOK_FOR_FILES if self._sleeps else None

    def snapshot(self) -> tuple[str, int]:
        return self._read, self._at


class Source(FixedPartitionedSource):
    """The input in two parts, one for each worker."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def list_parts(self) -> list[str]:
        return [str(i) for i in range(PARTS)]

    def build_part(self, step_id: str, for_part: str, resume_state: tuple[str, int] | None) -> Part:
        return Part(self._directory, for_part, resume_state)


class Counted(StatelessSinkPartition):
    """Counts results where ``bytewax_program`` can read the count, and writes them if they are wanted."""

    def __init__(self, directory: Path | None) -> None:
        with Path(os.environ["COUNT"]).open("r+b") as file:
            self._count = mmap.mmap(file.fileno(), 8)
        self._results = None if directory is None else protocol.Results(directory)
        self._rows = 0

    def write_batch(self, items: list[tuple[str, tuple[int, int]]]) -> None:
        if self._results is not None:
            for user, (n, spent) in items:
                self._results.write(int(user), n, spent)
        self._rows += len(items)
        self._count[:] = self._rows.to_bytes(8, "little")


class Sink(DynamicSink):
    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def build(self, step_id: str, worker_index: int, worker_count: int) -> Counted:
        return Counted(self._directory)


def keyed(line: bytes) -> tuple[str, int]:
    """Return the key, which Bytewax wants as text, and the amount."""
    row = json.loads(line)
    return str(row["user"]), row["amount"]


def add(total: tuple[int, int] | None, amount: int) -> tuple[tuple[int, int], tuple[int, int]]:
    n, spent = total or (0, 0)
    total = (n + 1, spent + amount)
    return total, total


if "DIRECTORY" in os.environ:
    where = Path(os.environ["DIRECTORY"])
    flow = Dataflow("running_totals")
    rows = op.map("keyed", op.input("input", flow, Source(where)), keyed)
    totals = op.stateful_map("totals", rows, add)
    op.output("output", totals, Sink(where / "results" if os.environ["COLLECT"] else None))


# -- the program

PROCESSES = PARTS


class Bytewax(protocol.Program):
    def start(self, contestant: str, directory: Path, collect: bool, checkpoint_seconds: float) -> None:
        recovery = directory / "state"
        if not any(recovery.iterdir()):
            init_db_dir(recovery, PROCESSES)
        (directory / STOP).unlink(missing_ok=True)
        self._counts = [directory / f"rows-{i}" for i in range(PROCESSES)]
        for path in self._counts:
            path.write_bytes(bytes(8))
        addresses = ";".join(f"127.0.0.1:{port}" for port in _free_ports(PROCESSES))
        given = {"CONTESTANT": contestant, "DIRECTORY": str(directory), "COLLECT": "1" if collect else ""}
        self._directory = directory
        command = [sys.executable, "-m", "bytewax.run", "bytewax_program:flow", "-a", addresses]
        command += ["-r", str(recovery), "-s", f"{checkpoint_seconds:g}", "-b", "0"]
        self._processes = [
            subprocess.Popen(
                [*command, "-i", str(i)], cwd=Path(__file__).parent, env=os.environ | given | {"COUNT": str(count)}
            )
            for i, count in enumerate(self._counts)
        ]

    def rows(self) -> int:
        if ended := [process.args for process in self._processes if process.poll() is not None]:
            raise RuntimeError(f"A process has ended by itself: {ended[0]}; see its output above.")
        return sum(int.from_bytes(path.read_bytes(), "little") for path in self._counts)

    def stop(self) -> None:
        """Let the sources end: Bytewax writes a last snapshot then."""
        (self._directory / STOP).touch()
        if failed := [p.args for p in self._processes if p.wait(60)]:
            raise RuntimeError(f"A process has failed at the end: {failed[0]}; see its output above.")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


if __name__ == "__main__":
    protocol.serve(Bytewax())
