"""Another Ray head on this machine, with a dashboard that takes jobs. A test kills it to simulate a dead machine.

``ray_of_its_own`` is a Ray of a test module's own, without Spark.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import ray

from spark_bridge.session.ray_cluster import ensure_java
from tests.patience import PATIENCE
from tests.scratch import SCRATCH

RAY = str(Path(sys.executable).with_name("ray"))


class OwnHead:
    """``ray start --head --block`` with separate ports and files. It has no token; ``--working-dir`` needs none."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._gcs, self._dashboard, *self._others = free_ports(6)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """The address that drivers use to join."""
        return f"127.0.0.1:{self._gcs}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._dashboard}"

    def environment(self) -> dict[str, str]:
        """Return the environment of Ray and of the programs that join it; no variable of the suite's own cluster."""
        home = ensure_java()
        ours = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_TMPDIR")}
        path = os.pathsep.join([str(home / "bin"), str(Path(sys.executable).parent), ours["PATH"]])
        return {
            **ours,
            "PATH": path,
            "JAVA_HOME": str(home),
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": self.directory,
        }

    def start(self) -> None:
        """Start, and return when the dashboard answers."""
        agent, client, metrics, agent_grpc = self._others
        argv = [RAY, "start", "--head", "--block", f"--port={self._gcs}", f"--dashboard-port={self._dashboard}"]
        argv += [f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"]
        argv += [f"--metrics-export-port={metrics}", f"--dashboard-agent-grpc-port={agent_grpc}"]
        argv += [
            "--node-ip-address=127.0.0.1",
            "--num-cpus=4",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
        ]
        argv += [f"--temp-dir={self.directory}"]
        with Path(self.directory, "start.log").open("ab") as log:
            self._process = subprocess.Popen(argv, env=self.environment(), stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            assert time.monotonic() < deadline and self._process.poll() is None, Path(log.name).read_text()[-3000:]
            time.sleep(0.2)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._dashboard), timeout=1):
            return True
        return False

    def processes(self) -> list[psutil.Process]:
        """Return all processes of this cluster: those below the head's, and drivers with their JVMs."""
        assert self._process is not None
        below = psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        seen = {p.pid for p in below}
        others = [p for p in psutil.process_iter() if p.pid not in seen and self._is_here(p)]
        return [*below, *others]

    def named(self, word: str) -> psutil.Process:
        """Return the process of this cluster that has a word in its command line."""
        for process in self.processes():
            with suppress(psutil.Error):
                if word in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"No process of the cluster is named {word}.")

    def _is_here(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.pid != os.getpid() and self.directory in " ".join(process.cmdline())
        return False

    def kill(self) -> None:
        """Kill everything at once, as if the machine had died."""
        if self._process is None:
            return
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self._process.kill()
        self._process.wait()
        self._process = None


@contextmanager
def own_head() -> Iterator[OwnHead]:
    """Start a head; nothing of the cluster is left at the end."""
    directory = tempfile.mkdtemp(prefix="rs-", dir=SCRATCH)
    head = OwnHead(directory)
    try:
        head.start()
        yield head
    finally:
        head.kill()
        shutil.rmtree(directory, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Return different ports that nothing listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


@contextmanager
def ray_of_its_own() -> Iterator[None]:
    """Start Ray with two CPUs, and end it."""
    ray_dir = tempfile.mkdtemp(prefix="rs-", dir=SCRATCH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", ray_dir)  # of workers: one that a test has die removes nothing itself
        ray.init(
            address="local",
            num_cpus=2,
            log_to_driver=False,
            logging_level="WARNING",
            include_dashboard=False,
            _temp_dir=ray_dir,
            object_store_memory=100 << 20,
        )
    yield
    ray.shutdown()
    shutil.rmtree(ray_dir, ignore_errors=True)
