"""``Lab``: machines on one computer, each with its own address, joined by a switch.

A machine is a set of Linux namespaces. The namespaces have no names, and belong to the processes in them: nothing of a
lab is left when its processes have ended, and two labs on one computer never meet. Their addresses are the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.lab.cable import Cable, Direction
from tests.lab.machine import Machine, Setup
from tests.lab.namespaces import missing, tool

ROOT = Path(__file__).resolve().parents[2]
SUBNET = "10.77.0"
KEEPER = Path(__file__).with_name("keeper.py")
INHERITED = ("LANG", "TERM", "JAVA_HOME", "JAVA_TOOL_OPTIONS", "PYTHONPATH", "OPENBLAS_NUM_THREADS")
"""Variables of this process's environment that processes on a machine inherit, in addition to the PATH."""
RUN_SECONDS = 120.0


class Lab:
    """Machines 0 to n - 1, with the addresses 10.77.0.1 to 10.77.0.n and the names machine0 and so on.

    Use as a context manager, or call ``down``. ``shared`` is a directory that all machines and this process see under
    one path, like a shared file system. All else below ``/tmp`` is each machine's own.
    """

    def __init__(self, machines: int) -> None:
        reason = missing()
        if reason is not None:
            raise RuntimeError(f"No lab can be made here: {reason}")
        self.addresses = [f"{SUBNET}.{k + 1}" for k in range(machines)]
        self.names = [f"machine{k}" for k in range(machines)]
        self.directory = Path(tempfile.mkdtemp(prefix="statestore-lab-", dir="/tmp"))
        self.shared = self.directory / "shared"
        self._machines: dict[int, Machine] = {}
        self._cables: dict[int, Cable] = {}
        self._keeper = subprocess.Popen(
            [tool("unshare"), "--net", sys.executable, "-ISE", str(KEEPER), str(self.directory), tool("ip")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert self._keeper.stdout is not None
            if not self._keeper.stdout.readline():
                raise RuntimeError(f"The switch did not start: status {self._keeper.wait()}")
            self.shared.mkdir()
            hosts = "".join(f"{a} {n}\n" for a, n in zip(self.addresses, self.names, strict=True))
            (self.directory / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            for k in range(machines):
                self.start(k)
        except BaseException:
            self.down()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    def start(self, k: int) -> None:
        """Start a machine, for the first time or after it was killed: its disk is empty, its address is the same."""
        if k in self._machines:
            raise ValueError(f"{self.names[k]} runs already")
        home = self.directory / self.names[k]
        shutil.rmtree(home, ignore_errors=True)
        # A checkout below /tmp would be hidden by the machine's own /tmp.
        visible = [str(p) for p in dict.fromkeys((self.shared, ROOT, Path(sys.prefix))) if p.is_relative_to("/tmp")]
        machine = Machine(Setup(self.names[k], str(home), str(self.directory / "hosts"), tuple(visible)))
        self._machines[k] = machine
        self._cables[k] = Cable(k, machine.pid, self._keeper.pid, self.addresses[k])

    def kill(self, k: int) -> None:
        """End everything on a machine, at once. Its neighbours learn of it: their connections are reset.

        Cut the cable first for a machine that loses its power: its neighbours hear nothing then.
        """
        self.machine(k).kill()
        del self._machines[k]
        self._cables.pop(k).remove()

    def cut(self, k: int, direction: Direction | None = None) -> None:
        """Let nothing in or out of a machine any more, or only nothing ``"in"``, only nothing ``"out"``."""
        self._cable(k).cut(direction)

    def mend(self, k: int) -> None:
        """Make the cable of a machine whole and fast again."""
        self._cable(k).mend()

    def delay(self, k: int, milliseconds: float, loss: float = 0.0) -> None:
        """Let each packet take so long on its way into or out of a machine; drop a share ``loss`` (0 to 1) of them."""
        self._cable(k).delay(milliseconds, loss)

    def environment(self) -> dict[str, str]:
        """Return the environment of processes on the machines, with this Python first on the PATH."""
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
        return {"HOME": "/tmp", "PYTHONUNBUFFERED": "1", **inherited, "PATH": path}

    def popen(
        self, k: int, argv: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a process on a machine, in the directory of the project. ``options`` are those of ``Popen``."""
        return self.machine(k).popen(argv, {**self.environment(), **(environment or {})}, str(ROOT), **options)

    def run(
        self,
        k: int,
        argv: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        timeout: float = RUN_SECONDS,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine, and return its output. Raises ``RuntimeError`` if it fails, unless told not to.

        Raises ``subprocess.TimeoutExpired`` behind ``timeout`` seconds; the command is killed then.
        """
        with self.popen(
            k, argv, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            try:
                out, _ = process.communicate(timeout=timeout)
            except BaseException:
                os.killpg(process.pid, 9)
                raise
        if check and process.returncode:
            raise RuntimeError(f"{' '.join(argv)} on {self.names[k]} ended with status {process.returncode}:\n{out}")
        return subprocess.CompletedProcess(list(argv), process.returncode, out)

    def machine(self, k: int) -> Machine:
        """Return a machine that runs. Raises ``ValueError`` if it does not."""
        if k not in self._machines:
            raise ValueError(f"Machine {k} does not run; these do: {sorted(self._machines)}")
        return self._machines[k]

    def down(self) -> None:
        """End all machines and remove all that they have left. May be called twice."""
        for cable in self._cables.values():
            cable.close()
        for machine in self._machines.values():
            machine.shut_down()
        self._cables.clear()
        self._machines.clear()
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._keeper.stdin.close()
        status = self._keeper.wait()
        self._keeper.stdout.close()
        if status:
            raise RuntimeError(f"The directory {self.directory} of the lab was not removed: status {status}")

    def _cable(self, k: int) -> Cable:
        self.machine(k)
        return self._cables[k]
