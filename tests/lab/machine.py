"""A machine of a lab: its own network, host name, ``/tmp``, ``/dev/shm`` and processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.lab.namespaces import tool

INIT = Path(__file__).with_name("init.py")


@dataclass(frozen=True)
class Setup:
    """The setup of a machine: its host name, the directory of its ``/tmp``, its ``/etc/hosts``.

    ``visible`` are the directories below ``/tmp`` that the machine shares with the computer.
    """

    name: str
    directory: str
    hosts: str
    visible: tuple[str, ...]


class Machine:
    """A machine that runs. It ends with this object's process, however that ends."""

    def __init__(self, setup: Setup) -> None:
        self.name = setup.name
        Path(setup.directory).mkdir()
        said = Path(f"{setup.directory}.log")
        namespaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork")
        with said.open("w") as log:
            self._process = subprocess.Popen(
                [tool("unshare"), *namespaces, sys.executable, "-ISE", str(INIT), json.dumps(vars(setup))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the process that has made the lab
            )
        assert self._process.stdout is not None
        self._said = self._process.stdout
        line = self._said.readline()
        if not line:
            status = self._process.wait()
            raise RuntimeError(f"{setup.name} did not start (status {status}): {said.read_text().strip()}")
        self.pid = int(line)
        """The process id of the machine's first process, as this computer counts them."""

    def popen(
        self, argv: Sequence[str], environment: Mapping[str, str], directory: str, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a process on the machine. ``options`` are those of ``Popen``."""
        enter = ("--target", str(self.pid), "--net", "--mount", "--uts", "--ipc", "--pid", f"--wdns={directory}")
        return subprocess.Popen([tool("nsenter"), *enter, *argv], env=dict(environment), text=True, **options)

    def kill(self) -> None:
        """End all processes of the machine at once, and wait until they have ended."""
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._close()

    def shut_down(self) -> None:
        """Let the first process end, and all others with it."""
        self._close()

    def _close(self) -> None:
        stdin: IO[str] | None = self._process.stdin
        assert stdin is not None
        stdin.close()
        self._process.wait()
        self._said.close()
