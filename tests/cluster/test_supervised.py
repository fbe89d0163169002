"""``statestore run`` on a machine that stays, while the head loses power: the stream recovers by itself, exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.program_on_lab import START_SECONDS, ProgramOnLab
from tests.lab import bank
from tests.lab.auditor import committed
from tests.lab.lab import ROOT, Lab
from tests.lab.ray_nodes import JOBS_PORT, RAY, WITH_JOBS, ray_address, ray_environment, start_ray
from tests.spark_bridge.conftest import wait_until

# Otherwise: tests/spark_bridge/cli/test_supervision.py, and test_run.py there on one machine.
pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.spark, pytest.mark.thorough]
CPUS = [0, 2, 2]
SUPERVISOR = 1


def test_a_stream_survives_a_power_loss_of_the_head(make_lab: Callable[[int], Lab]) -> None:
    lab = make_lab(len(CPUS))
    start_ray(lab, CPUS, head=WITH_JOBS)
    checkpoint = str(lab.shared / "ck")
    options = ("--name", "bank", "--address", f"http://{lab.addresses[0]}:{JOBS_PORT}", "--env", f"PYTHONPATH={ROOT}")
    program = (str(bank.__file__), *options, "--", ray_address(lab), checkpoint, "2")
    run = ProgramOnLab(lab, "cli", "run", *program, machine=SUPERVISOR, package="spark_bridge")
    programs = [run]
    try:
        run.wait_for_more("batch", 3)
        before = committed(checkpoint)
        lab.cut(0)
        lab.kill(0)
        wait_until(lambda: "No cluster answers" in run.log(), timeout=START_SECONDS)

        lab.start(0)
        for k in range(1, len(CPUS)):  # the new head does not know the nodes of the old one
            lab.run(k, [RAY, "stop", "--force"], ray_environment(), check=False)
        start_ray(lab, CPUS, head=WITH_JOBS)
        run.wait_for_more("batch", 3)
        assert "bank-1 is started" in run.log() and "the head of the cluster has died" in run.log()
        assert committed(checkpoint) > before, "committed batches are gone"
        programs.append(auditor := ProgramOnLab(lab, "auditor", checkpoint))
        auditor.wait_for_more("answer", 3)
        assert auditor.lines("wrong") == []
    except AssertionError as error:
        raise AssertionError("\n".join(program.log()[-5000:] for program in programs)) from error
    finally:
        for each in programs:
            each.end()
