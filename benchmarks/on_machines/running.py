"""The stream and its client on a lab, seen from outside: the events they print, and the commands they receive."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.on_machines.programs import Shape
from tests.lab.lab import Lab
from tests.lab.ray_nodes import ray_address, ray_environment

RESULTS = Path(__file__).resolve().parents[1] / "results"
WAIT_SECONDS = 600.0
Event = dict[str, Any]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-write", action="store_true", help="print only")
    return parser


def finish(options: argparse.Namespace, name: str, results: str, broken: list[str]) -> int:
    """Write the results if that is wanted, print the broken limits, and return the status of the process."""
    if not options.no_write:
        (RESULTS / f"{name}.json").write_text(f"{results}\n")
    for words in broken:
        print(f"BROKEN: {words}")
    return 1 if broken else 0


class RunningStream:
    """The stream on machine 0 with so many executors, and from ``ask`` on its client. ``events`` grows by some 20/s."""

    def __init__(self, lab: Lab, shape: Shape, executors: int, standbys: int = 0) -> None:
        self._lab, self._shape = lab, shape
        self.checkpoint = str(lab.shared / "ck")
        self.events: list[Event] = []
        self._programs: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        sizes = (str(shape.keys), str(shape.rows), str(standbys))
        self._stream = self._start("stream", ray_address(lab), self.checkpoint, str(executors), *sizes)

    def ask(self) -> None:
        self._start("client", self.checkpoint, str(self._shape.keys), str(self._shape.rows))

    def tell(self, command: str) -> float:
        """Tell the stream a command, wait until it is carried out, and return when that was."""
        assert self._stream.stdin is not None
        self._stream.stdin.write(f"{command}\n")
        self._stream.stdin.flush()
        done = self.wait(lambda: next((e for e in self.of("done") if e["command"] == command), None), command)
        self.events.remove(done)
        return float(done["at"])

    def of(self, kind: str, since: float = 0.0) -> list[Event]:
        """Return the events of a kind that have been said, in order, since a moment."""
        return [e for e in list(self.events) if e["event"] == kind and e["at"] >= since]

    def places(self) -> Event:
        return self.wait(lambda: self.of("places"), "places")[-1]  # type: ignore[no-any-return]

    def wait(self, what: Callable[[], Any], words: str) -> Any:
        """Wait until something is so, and return it. Raises ``RuntimeError`` with the programs' last words."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := what()):
            ended = next((p for p in self._programs if p.poll() is not None), None)
            if ended is not None or time.monotonic() > deadline:
                logs = [(self._lab.directory / f"{name}.log").read_text()[-3000:] for name in ("stream", "client")]
                raise RuntimeError(f"{words}: did not happen in time; {self.events[-3:]}\n" + "\n".join(logs))
            time.sleep(0.02)
        return found

    def wait_for_batches(self, count: int) -> None:
        since = time.time()
        self.wait(lambda: len(self.of("batch", since)) >= count, f"{count} batches")

    def end(self) -> None:
        for program in self._programs:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        for reader in self._readers:
            reader.join()

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "benchmarks.on_machines.programs", name, *arguments]
        environment = ray_environment() | {"RAY_ADDRESS": ray_address(self._lab)}
        (self._lab.directory / "client.log").touch()
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        with (self._lab.directory / f"{name}.log").open("w") as log:
            program = self._lab.popen(0, argv, environment, stderr=log, **pipes)
        self._programs.append(program)
        reader = threading.Thread(target=self._read, args=(program,), daemon=True)
        self._readers.append(reader)
        reader.start()
        return program

    def _read(self, program: subprocess.Popen[str]) -> None:
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith("{"):
                self.events.append(json.loads(line))
