"""Bytewax: ``stateful_map`` over files of JSON lines, with recovery, in two processes of one worker each.

Python's threads would share one interpreter, so that Bytewax' documentation advises processes. This program starts the
two processes and is asked how far they are; ``bytewax_flow`` is the dataflow.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import bytewax_flow
import protocol
from bytewax.recovery import init_db_dir

PROCESSES = 2


class Bytewax:
    look_every = 0.01

    def start(self, contestant: str, directory: Path, collect: bool, checkpoint_seconds: float) -> None:
        recovery = directory / "state"
        if not any(recovery.iterdir()):
            init_db_dir(recovery, PROCESSES)
        (directory / bytewax_flow.STOP).unlink(missing_ok=True)
        self._counts = [directory / f"rows-{i}" for i in range(PROCESSES)]
        for path in self._counts:
            path.write_bytes(bytes(8))
        addresses = ";".join(f"127.0.0.1:{port}" for port in _free_ports(PROCESSES))
        given = {"CONTESTANT": contestant, "DIRECTORY": str(directory), "COLLECT": "1" if collect else ""}
        self._directory = directory
        command = [sys.executable, "-m", "bytewax.run", "bytewax_flow:flow", "-a", addresses]
        command += ["-r", str(recovery), "-s", f"{checkpoint_seconds:g}", "-b", "0"]
        self._processes = [
            subprocess.Popen(
                [*command, "-i", str(i)],
                cwd=Path(__file__).parent,
                env=os.environ | given | {"COUNT": str(count)},
            )
            for i, count in enumerate(self._counts)
        ]

    def rows(self) -> int:
        if ended := [process.args for process in self._processes if process.poll() is not None]:
            raise RuntimeError(f"A process has ended by itself: {ended[0]}; see its output above.")
        return sum(int.from_bytes(path.read_bytes(), "little") for path in self._counts)

    def sees(self, user: int) -> int:
        raise NotImplementedError("Bytewax has no queries of its state.")

    def stop(self) -> None:
        """Let the sources end: Bytewax writes a last snapshot then."""
        (self._directory / bytewax_flow.STOP).touch()
        if failed := [p.args for p in self._processes if p.wait(60)]:
            raise RuntimeError(f"A process has failed at the end: {failed[0]}; see its output above.")

    def close(self) -> None:
        """There is nothing to give back."""


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
