"""A bank whose only storage is HDFS on a machine of a lab: a NameNode that dies, a lost machine, a new driver."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.cluster.program_on_lab import ProgramOnLab
from tests.lab.lab import Lab
from tests.lab.ray_nodes import ray_address, start_ray
from tests.services.artifacts import jars

# Otherwise: tests/backends/storage/test_hdfs.py and tests/spark_bridge/streams/test_hdfs.py, on one machine.
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.ray,
    pytest.mark.spark,
    pytest.mark.service,
    pytest.mark.thorough,
]
STORAGE = 3
"""The machine of HDFS, without Ray."""


def test_state_and_checkpoint_are_on_hdfs_only(make_lab: Callable[[int], Lab]) -> None:
    jars("hadoop")
    lab = make_lab(4)
    command = [sys.executable, "-m", "tests.services.hadoop", lab.addresses[STORAGE], str(lab.shared / "hdfs")]
    hdfs = lab.popen(STORAGE, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert hdfs.stdin is not None
    assert hdfs.stdout is not None
    url = hdfs.stdout.readline().strip()
    checkpoint = f"{url}/bank/ck"
    start_ray(lab, [1, 2, 2])
    arguments = (ray_address(lab), checkpoint, "2", json.dumps({"configs": {"spark.hadoop.fs.defaultFS": url}}))
    running = {"bank": ProgramOnLab(lab, "bank", *arguments)}

    def tell(command: str) -> None:
        assert hdfs.stdin is not None
        assert hdfs.stdout is not None
        hdfs.stdin.write(f"{command}\n")
        hdfs.stdin.flush()
        assert hdfs.stdout.readline().strip() == command

    def progress() -> None:
        """Wait for more batches, and for answers that were asked for behind them."""
        try:
            running["bank"].wait_for_more("batch", 3)
            running["auditor"].wait_for_more("answer", 2)
        except AssertionError as error:
            raise AssertionError("\n".join(program.log()[-5000:] for program in running.values())) from error
        assert running["auditor"].lines("wrong") == []

    try:
        running["bank"].wait_for_more("batch", 2)
        running["auditor"] = ProgramOnLab(lab, "auditor", checkpoint)
        progress()
        lab.kill(1)
        progress()
        running.pop("auditor").end()  # it reads the commits from HDFS
        tell("kill")
        running.pop("bank").end()  # Spark's own checkpoint does not outlive its NameNode
        tell("start")
        running["bank"] = ProgramOnLab(lab, "bank", *arguments[:2], "1", arguments[3])
        running["bank"].wait_for_more("batch", 2)
        running["auditor"] = ProgramOnLab(lab, "auditor", checkpoint)
        progress()
    finally:
        for program in running.values():
            program.end()
        hdfs.stdin.close()
        hdfs.wait()
        hdfs.stdout.close()
