"""``statestore run`` restarts a stream with exact results, whatever terminated its application."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_bridge.cli.jobs import NOT_REACHED, command_of, runtime_env_of
from spark_bridge.cli.main import app
from tests.command_line import CliRunner
from tests.patience import PATIENCE
from tests.spark_bridge.own_head import OwnHead, free_ports, own_head

PROGRAM = Path(__file__).with_name("counting_program.py")
REPOSITORY = Path(__file__).parents[3]


def test_the_program_runs_where_the_command_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my stream.py").touch()
    command = command_of(Path("my stream.py"), ["--in", "a b"], None)
    assert command == f"cd {tmp_path} && exec {sys.executable} '{tmp_path}/my stream.py' --in 'a b'"


def test_a_directory_that_is_sent_has_the_program(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "s.py").touch()
    assert command_of(tmp_path / "jobs" / "s.py", [], tmp_path) == "exec python jobs/s.py"
    assert runtime_env_of("s", tmp_path, ["A=b=c", "RAY_JOB_STOP_WAIT_TIME_S=5"]) == {
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "5", "A": "b=c"},
        "working_dir": str(tmp_path),
    }
    with pytest.raises(ValueError, match="is not in --working-dir"):
        command_of(tmp_path / "jobs" / "s.py", [], tmp_path / "else")


def test_invalid_options_are_rejected_before_a_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"The program .*gone.py does not exist"):
        command_of(tmp_path / "gone.py", [], None)
    with pytest.raises(ValueError, match="--name 'a/b'"):
        runtime_env_of("a/b", None, [])
    with pytest.raises(ValueError, match="--env: the name before") as raised:
        runtime_env_of("a", None, ["=secret"])
    assert "secret" not in str(raised.value)


def test_a_variable_may_be_inherited_so_that_no_process_list_has_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "a=b c")
    monkeypatch.delenv("ABSENT", raising=False)
    made = runtime_env_of("s", None, ["DB_PASSWORD", "EMPTY="])["env_vars"]
    assert (made["DB_PASSWORD"], made["EMPTY"]) == ("a=b c", "")
    with pytest.raises(ValueError, match="--env ABSENT: the environment of this command has no such variable"):
        runtime_env_of("s", None, ["ABSENT"])


def test_missing_cluster_has_its_own_message_and_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("spark_bridge.cli.jobs.CLUSTER_SECONDS", 0.0)
    argv = ["run", str(PROGRAM), "--address", f"http://127.0.0.1:{free_ports(1)[0]}"]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == NOT_REACHED, done.output
    assert "No cluster answers" in done.stderr


class Supervised:
    """A counting stream under ``statestore run``, and the counts that it should have."""

    def __init__(self, head: OwnHead, root: Path, *more: str) -> None:
        self.head, self.root = head, root
        self._counts: Counter[int] = Counter()
        for directory in ("in", "pids"):
            (root / directory).mkdir()
        self.add()
        argv = [sys.executable, "-m", "ray_statestore", "run", str(PROGRAM), "--address", head.url, "--"]
        argv += [str(root), *more]
        environment = {**head.environment(), "PYTHONPATH": str(REPOSITORY)}
        with (root / "said").open("wb") as said:
            self.process = subprocess.Popen(argv, env=environment, stdout=said, stderr=said, cwd=root)

    def add(self) -> None:
        """Write one file of input, which is one batch."""
        number = len(list((self.root / "in").iterdir()))
        keys = [(number + i) % 7 for i in range(20)]
        self._counts.update(keys)
        pq.write_table(pa.table({"k": keys}), self.root / f"draft{number}")
        (self.root / f"draft{number}").rename(self.root / "in" / f"{number:05d}.parquet")

    def said(self) -> str:
        return (self.root / "said").read_text()

    def await_(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + 2 * PATIENCE
        while not what():
            assert self.process.poll() is None, f"statestore run has ended: {self.said()[-5000:]}"
            assert time.monotonic() < deadline, self.said()[-5000:]
            time.sleep(0.1)

    def await_batches(self) -> None:
        """Wait until Spark has committed all input."""
        expected = len(list((self.root / "in").iterdir()))
        self.await_((self.root / "checkpoint" / "commits" / str(expected - 1)).exists)

    def driver(self, start: int) -> int:
        """Return the process of the driver's ``start``-th start, when its query runs."""
        pids = self.root / "pids"
        self.await_(lambda: len(list(pids.iterdir())) >= start)
        return int(max(pids.iterdir(), key=lambda file: file.stat().st_mtime_ns).name)

    def statestore(self, *args: str) -> list[Any]:
        """Run a command on the cluster; return its lines of JSON."""
        argv = [sys.executable, "-m", "spark_bridge.cli", *args, "--json", "--address", self.head.address]
        done = subprocess.run(argv, env=self.head.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def end(self) -> None:
        """Let the stream end by itself, and compare what it has counted."""
        (self.root / "end").touch()
        assert self.process.wait(2 * PATIENCE) == 0, self.said()[-5000:]
        counts = json.loads((self.root / "counts.json").read_text())
        assert {int(k): n for k, n in counts.items()} == dict(self._counts)


@pytest.fixture
def supervised(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Supervised]:
    with own_head() as head:
        supervised = Supervised(head, tmp_path, *getattr(request, "param", ()))
        try:
            yield supervised
        finally:
            supervised.process.kill()
            supervised.process.wait()


@pytest.mark.ray
@pytest.mark.spark
@pytest.mark.thorough  # otherwise: test_supervision.py restarts killed drivers, test_recovery.py recovers exact counts
@pytest.mark.parametrize("supervised", [("local",), ()], ids=["local", "raydp"], indirect=True)
def test_counts_are_exact_after_a_killed_driver(supervised: Supervised) -> None:
    driver = supervised.driver(1)
    supervised.await_batches()
    coordinator = supervised.head.named("ray::StateStoreCoordinator")
    coordinator.kill()
    supervised.add()
    supervised.await_batches()
    os.kill(driver, signal.SIGKILL)
    supervised.add()
    supervised.driver(2)
    supervised.await_batches()
    assert "the driver was killed by SIGKILL" in supervised.said()
    events = supervised.statestore("logs", "--all")
    assert {"coordinator", "driver"} < {event["source"].split()[0] for event in events}
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    (log,) = Path(supervised.head.directory, "session_latest", "logs").glob(f"worker-*-{coordinator.pid}.err")
    written = [line for line in log.read_text().splitlines() if "Registered query" in line]
    assert written and set(written) <= {event["text"] for event in events}, "by a process that was killed"
    supervised.end()
    assert "RayDP's master" not in supervised.said()  # which ends with the program


@pytest.mark.ray
@pytest.mark.spark
@pytest.mark.thorough  # the test above stands in
def test_counts_are_exact_after_raydp_loses_its_master(supervised: Supervised) -> None:
    supervised.driver(1)
    supervised.await_batches()
    supervised.head.named("RayDPSparkMaster").kill()
    supervised.driver(2)  # though the query waited for data
    supervised.add()
    supervised.await_batches()
    assert "RayDP's master of this application has died" in supervised.said()
    assert "the program has ended with exit code 1" in supervised.said()
    supervised.end()


@pytest.mark.ray
@pytest.mark.spark
@pytest.mark.thorough  # the test above stands in
def test_counts_are_exact_after_the_head_dies_with_its_jobs(supervised: Supervised) -> None:
    supervised.driver(1)
    supervised.await_batches()
    supervised.head.kill()
    supervised.await_(lambda: "No cluster answers" in supervised.said())
    supervised.add()
    supervised.head.start()
    supervised.driver(2)
    supervised.await_batches()
    assert "the head of the cluster has died" in supervised.said()
    supervised.end()


@pytest.mark.ray
@pytest.mark.spark
@pytest.mark.thorough  # test_supervision.py stands in
def test_a_supervisor_that_dies_leaves_the_job_and_a_signal_to_the_next_one_ends_it(supervised: Supervised) -> None:
    driver = supervised.driver(1)
    supervised.process.kill()
    supervised.process.wait()
    argv = supervised.process.args
    assert isinstance(argv, list)
    with (supervised.root / "said").open("wb") as said:
        environment = {**supervised.head.environment(), "PYTHONPATH": str(REPOSITORY)}
        supervised.process = subprocess.Popen(argv, env=environment, stdout=said, stderr=said, cwd=supervised.root)
    supervised.await_(lambda: "runs already" in supervised.said())
    assert psutil.pid_exists(driver)
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.process.wait(PATIENCE) == 128 + signal.SIGTERM, supervised.said()
    assert not psutil.pid_exists(driver)
