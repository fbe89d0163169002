"""A Ray of a test module's own, without Spark."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray

from tests.scratch import SCRATCH


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
