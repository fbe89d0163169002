"""A program that runs on a machine of a lab, and the lines that it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.lab.lab import Lab
from tests.lab.ray_nodes import ray_address, ray_environment
from tests.spark_bridge.conftest import wait_until

START_SECONDS = 400.0


class ProgramOnLab:
    """A module of a package on a machine; ``RAY_ADDRESS`` names the cluster."""

    def __init__(self, lab: Lab, module: str, *arguments: str, machine: int = 0, package: str = "tests.lab") -> None:
        argv = [sys.executable, "-m", f"{package}.{module}", *arguments]
        self._log = lab.directory / f"{module}-{machine}.log"
        with self._log.open("w") as log:
            options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
            self._process = lab.popen(machine, argv, ray_environment() | {"RAY_ADDRESS": ray_address(lab)}, **options)

    def lines(self, first: str) -> list[list[str]]:
        """The lines so far that begin with a word, in words."""
        assert self._process.poll() is None, f"ended with status {self._process.returncode}:\n{self.log()[-5000:]}"
        return [line.split() for line in self.log().splitlines() if line.split()[:1] == [first]]

    def log(self) -> str:
        # Open the file again: reading through the program's own file object would move its write position.
        return self._log.read_text(errors="replace")

    def wait_for_more(self, first: str, count: int) -> None:
        """Wait for so many more lines that begin with a word."""
        goal = len(self.lines(first)) + count
        wait_until(lambda: len(self.lines(first)) >= goal, timeout=START_SECONDS)

    def signal(self, number: int) -> None:
        """Send a signal to the program."""
        os.killpg(self._process.pid, number)

    def end(self) -> None:
        """End the program, which may have ended with its machine."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
