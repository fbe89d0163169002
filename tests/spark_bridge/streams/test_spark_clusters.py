"""``attach`` on Spark clusters that RayDP did not start: with Ray inside them, and with a separate Ray."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest

from backends.storage.checkpoint_storage import CheckpointStorage
from spark_bridge.session.ray_cluster import ensure_java
from tests.effort import only_thorough
from tests.patience import PATIENCE
from tests.services.hadoop import Hdfs, running_yarn
from tests.spark_bridge.own_head import free_ports, own_head

PROGRAM = Path(__file__).with_name("spark_cluster_program.py")
REPOSITORY = Path(__file__).parents[3]
SPARK_CLASS = str(Path(pyspark.__file__).parent / "bin" / "spark-class")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.spark,
    pytest.mark.thorough,  # otherwise: session/test_ray_on_spark.py, and attach() to local[n] in test_failures.py
]


@pytest.fixture
def counts(tmp_path: Path) -> dict[str, int]:
    """Return the counts of the input in ``tmp_path/in``."""
    (tmp_path / "in").mkdir()
    found: Counter[str] = Counter()
    for number in range(3):
        keys = [(number + i) % 7 for i in range(20)]
        found.update(map(str, keys))
        pq.write_table(pa.table({"k": keys}), tmp_path / "in" / f"{number:05d}.parquet")
    return dict(found)


def environment() -> dict[str, str]:
    home = ensure_java()
    ours = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "SPARK_HOME")}
    return {
        **ours,
        "PATH": os.pathsep.join([str(home / "bin"), str(Path(sys.executable).parent), ours["PATH"]]),
        "JAVA_HOME": str(home),
        "PYTHONPATH": str(REPOSITORY),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "RAY_AUTH_MODE": "disabled",
    }


def run(tmp_path: Path, *arguments: str, **more: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env={**environment(), **more},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("tokens", ["on", only_thorough("off")])
def test_ray_on_spark(tmp_path: Path, counts: dict[str, int], tokens: str) -> None:
    """With tokens, which Ray has on by default, this process makes one and passes it to Ray's nodes."""
    more = {"RAY_AUTH_MODE": "token" if tokens == "on" else "disabled", "HOME": str(tmp_path)}
    result = run(tmp_path, "ray-on-spark", str(tmp_path), "local-cluster[2,2,1024]", RAY_TMPDIR="", **more)
    assert result["counts"] == counts
    assert (tmp_path / ".ray" / "auth_token").exists() == (tokens == "on")
    assert len(result["refused"]) == 2
    assert all("take 4 of the 4 cores" in refused for refused in result["refused"])


def test_standalone_spark_with_a_separate_ray(tmp_path: Path, counts: dict[str, int]) -> None:
    with own_head() as head, standalone_spark(tmp_path) as master:
        found = run(tmp_path, "beside", str(tmp_path), master, head.address, RAY_TMPDIR=head.directory)
    assert found["counts"] == counts


@pytest.mark.service
def test_yarn_with_a_separate_ray(tmp_path: Path, counts: dict[str, int], hdfs: Hdfs) -> None:
    """In client mode, with two executors in containers, and HDFS as the only storage of checkpoint and state."""
    conf = {
        "spark.yarn.jars": f"local:{Path(pyspark.__file__).parent}/jars/*",
        "spark.yarn.am.memory": "256m",
        "spark.executor.instances": "2",
        "spark.executorEnv.PYTHONPATH": str(REPOSITORY),
        "spark.executorEnv.JAVA_HOME": environment()["JAVA_HOME"],
        "spark.yarn.appMasterEnv.JAVA_HOME": environment()["JAVA_HOME"],
    }
    submit = " ".join([*(f"--conf {name}={value}" for name, value in conf.items()), "pyspark-shell"])
    checkpoint = f"{hdfs.url}/{tmp_path.name}/checkpoint"
    with own_head() as head, running_yarn(tmp_path / "yarn", hdfs) as yarn:
        more = {"HADOOP_CONF_DIR": str(yarn.conf), "PYSPARK_SUBMIT_ARGS": submit, "RAY_TMPDIR": head.directory}
        result = run(tmp_path, "beside", str(tmp_path), "yarn", head.address, checkpoint, **more)
        containers = sorted(path.name for path in (tmp_path / "yarn" / "containers").glob("*/container_*"))
    assert result["counts"] == counts
    assert len(containers) == 3, "of the application master and two executors"
    stored = CheckpointStorage.open(checkpoint)
    assert {"commits", "offsets", "statestore"} <= {path.partition("/")[0] for path, _ in stored.list()}
    assert not (tmp_path / "checkpoint").exists()


@contextmanager
def standalone_spark(root: Path) -> Iterator[str]:
    """Start a master of standalone Spark with one worker of two cores; give its URL."""
    port, page, worker_page = map(str, free_ports(3))
    master, here = f"spark://127.0.0.1:{port}", ("--host", "127.0.0.1")
    size = ("--cores", "2", "--memory", "1g", "--work-dir", str(root / "work"))
    commands = [
        ["org.apache.spark.deploy.master.Master", *here, "--port", port, "--webui-port", page],
        ["org.apache.spark.deploy.worker.Worker", *here, *size, "--webui-port", worker_page, master],
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for i, command in enumerate(commands):
            with (root / f"spark-{i}.log").open("wb") as log:
                started.append(
                    subprocess.Popen([SPARK_CLASS, *command], env=environment(), stdout=log, stderr=log, cwd=root)
                )
            words = "I have been elected leader|Successfully registered with master"
            deadline = time.monotonic() + PATIENCE
            while not re.search(words, (root / f"spark-{i}.log").read_text()):
                assert time.monotonic() < deadline, (root / f"spark-{i}.log").read_text()[-3000:]
                time.sleep(0.2)
        yield master
    finally:
        for process in started:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
            process.wait()
