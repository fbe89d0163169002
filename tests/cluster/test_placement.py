"""A stream over machines: hosts stand beside its executors, on every machine that has some, also behind a loss."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.lab import Lab
from tests.lab.ray_nodes import ray_address, ray_environment, start_ray
from tests.spark_bridge.conftest import wait_until

# Otherwise: tests/spark_bridge/session/test_host_placement.py, on the nodes of a Ray cluster on one machine.
pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.spark, pytest.mark.thorough]
STATESTORE = str(Path(sys.executable).with_name("statestore"))


class StreamOnLab:
    """``tests.lab.stream`` on machine 0, and what it says."""

    def __init__(self, lab: Lab, executors: int) -> None:
        argv = [sys.executable, "-m", "tests.lab.stream", ray_address(lab), str(lab.shared / "ck"), str(executors)]
        self._log = (lab.directory / "stream.log").open("w+")
        options = {"stdout": self._log, "stderr": subprocess.STDOUT, "start_new_session": True}
        self._process = lab.popen(0, argv, ray_environment(), **options)

    def lines(self, first: str) -> list[list[str]]:
        """The lines so far that begin with a word, in words."""
        assert self._process.poll() is None, self.log()
        return [line.split() for line in self.log().splitlines() if line.split()[:1] == [first]]

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def await_batches(self, count: int) -> None:
        """Wait for so many more batches."""
        goal = len(self.lines("batch")) + count
        wait_until(lambda: len(self.lines("batch")) >= goal, timeout=400)

    def end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def seen(lab: Lab) -> list[Any]:
    """The address of the coordinator, those of the hosts, and what ``statestore status`` says of their places."""
    argv = [STATESTORE, "status", "--address", ray_address(lab), "--json"]
    said = lab.run(0, argv, ray_environment(), check=False).stdout
    found = [line for line in said.splitlines() if line.startswith("{")]
    if not found:
        return [said]
    told = json.loads(found[0])
    hosts = sorted(host["address"].rpartition("//")[2].rpartition(":")[0] for host in told["hosts"])
    return [told["coordinator"]["node_ip"], hosts, told["coordinator"]["problems"]]


def test_hosts_stand_where_executors_run(make_lab: Callable[[int], Lab]) -> None:
    lab = make_lab(4)
    start_ray(lab, [1, 2, 2, 2])
    stream = StreamOnLab(lab, 3)
    try:
        ((_, *executors),) = wait_until(lambda: stream.lines("executors"), timeout=400)
        stream.await_batches(2)
        coordinator, hosts, problems = seen(lab)
        assert coordinator == lab.addresses[0]
        assert len(hosts) == 3 and set(hosts) == set(executors) and problems == []

        lost = next(k for k in (1, 2, 3) if lab.addresses[k] in executors)
        lab.kill(lost)
        stream.await_batches(2)

        def is_right() -> bool:
            _, *rest = seen(lab)
            return len(rest) == 2 and len(rest[0]) == 3 and lab.addresses[lost] not in rest[0] and rest[1] == []

        wait_until(is_right, timeout=200)
        stream.await_batches(2)

        # Hosts of a machine that is to go hand over while the stream runs.
        drained = next(a for a in seen(lab)[1] if a != lab.addresses[0])
        said = lab.run(0, [STATESTORE, "drain", drained, "--address", ray_address(lab)], ray_environment(), timeout=300)
        assert f"No host stands on {drained} any more" in said.stdout
        stream.await_batches(2)
        assert drained not in seen(lab)[1]
    finally:
        stream.end()
