"""A bank with its state on S3: the server has its own machine, and is killed, hangs or is slow from time to time."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.cluster.program_on_lab import ProgramOnLab
from tests.lab.auditor import committed
from tests.lab.lab import Lab
from tests.lab.ray_nodes import ray_address, start_ray
from tests.lab.s3_server import BUCKET, S3OnLab

# Otherwise: tests/backends/storage/test_s3.py and tests/coordinator_actor/test_hanging_storage.py, without a stream.
pytestmark = [pytest.mark.cluster, pytest.mark.ray, pytest.mark.spark, pytest.mark.thorough]
STORAGE = 3
"""The machine of the S3 server, without Ray."""


def test_the_state_is_exact_on_s3_whose_server_fails(make_lab: Callable[[int], Lab]) -> None:
    lab = make_lab(4)
    storage = S3OnLab(lab, STORAGE)
    start_ray(lab, [1, 2, 2])
    checkpoint = str(lab.shared / "ck")
    options = {"state_location": f"s3://{BUCKET}/state", "configs": storage.settings()}
    arguments = (ray_address(lab), checkpoint, "2", json.dumps(options))
    running = {"bank": ProgramOnLab(lab, "bank", *arguments)}

    def goes_on() -> None:
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
        goes_on()
        assert not (lab.shared / "ck" / "statestore").exists(), "the state is in Spark's checkpoint directory"

        for _ in range(2):
            before = committed(checkpoint)
            storage.kill()
            running["auditor"].wait_for_more("answer", 10)
            assert committed(checkpoint) <= before + 1, "a batch was committed without its changelogs"
            storage.start_again()
            goes_on()

        storage.hang()
        running["auditor"].wait_for_more("answer", 10)
        storage.go_on()
        goes_on()

        # What was on the lost machine is read from slow storage.
        lab.delay(STORAGE, 100)
        lab.kill(1)
        goes_on()
        lab.mend(STORAGE)

        # All that was in memory is gone.
        running.pop("auditor").end()
        running.pop("bank").end()
        version = committed(checkpoint)
        running["bank"] = ProgramOnLab(lab, "bank", *arguments[:2], "1", arguments[3])
        running["bank"].wait_for_more("batch", 2)
        running["auditor"] = ProgramOnLab(lab, "auditor", checkpoint)
        goes_on()
        assert int(running["auditor"].lines("answer")[-1][1]) > version
    finally:
        for program in running.values():
            program.end()
        storage.end()
