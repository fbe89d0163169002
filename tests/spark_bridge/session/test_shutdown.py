"""Programs that end without ``stop_spark``: with an error, or on a signal while they wait."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.effort import only_thorough
from tests.patience import HANG
from tests.scratch import SCRATCH
from tests.spark_bridge.conftest import driver_environment

pytestmark = pytest.mark.spark

PROGRAM = """
import threading
import pandas as pd
from spark_bridge import aggregate, functions as S, init_spark
from spark_bridge.session import executors, ray_cluster, state_cluster

executors.EXECUTOR_LOOK_SECONDS = state_cluster.PLACEMENT_LOOK_SECONDS = 0.02
ray_cluster.MASTER_LOOK_SECONDS = 0.02
looks = threading.Semaphore(0)
look = state_cluster.HostPlacement.look

def counted(placement):
    try:
        look(placement)
    finally:
        looks.release()

state_cluster.HostPlacement.look = counted
settings = {"spark.log.level": "OFF", "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1"}
spark = init_spark("ends", num_executors=1, executor_cores=1, executor_memory="512m", configs=settings)
pd.DataFrame({"k": [1, 2]}).to_parquet("clicks.parquet")
clicks = spark.readStream.schema("k long").option("pathGlobFilter", "*.parquet").parquet(".")
counts = aggregate(clicks, by="k", operator="counts", n=S.count())
query = counts.writeStream.format("noop").option("checkpointLocation", "ck").start()
query.processAllAvailable()
STOPS
raise RuntimeError("the program's own error")
"""
STOPS = {
    "dies": "",
    "stops Spark first": "spark.stop()\nfor _ in range(20):\n    assert looks.acquire(timeout=60)",
    "leaves Ray first": "import ray\nray.shutdown()",
    "leaves Ray and stops": """
import ray, spark_bridge
from spark_bridge.session.current import current_cluster

(host,) = current_cluster().hosts
ray.shutdown()
try:
    host.on_progress.remote()  # as a thread of the session may do at any moment
except (ray.exceptions.RayError, AttributeError):
    spark_bridge.stop_spark()
""",
}


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="rs-", dir=SCRATCH))  # short, for Ray's sockets
    yield made
    shutil.rmtree(made, ignore_errors=True)


# Each starts a cluster. The ways to end share their code; a thorough run tries all of them on both lines of Spark.
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("leaves Ray first", marks=pytest.mark.spark42_only),
        *map(only_thorough, ("dies", "stops Spark first", "leaves Ray and stops")),
    ],
)
def test_failing_program_shows_only_its_own_error(how: str, directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("STOPS", STOPS[how])],
        cwd=directory,
        env={**driver_environment(directory), "RAY_TMPDIR": str(directory), "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert "RuntimeError: the program's own error" in done.stderr
    assert "Started a local Ray instance" not in done.stderr, "Ray's interface or RayDP's exit handler starts it again"
    for ours in ("looked after", "not be reported", "not renewed", "not taken", "not published", "is lost with node"):
        assert ours not in done.stderr, done.stderr


HOLDS_THE_CPU = """
import ray
address = ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False).address_info["gcs_address"]

@ray.remote(num_cpus=1)
class Trainer:
    def ping(self):
        return 1

trainer = Trainer.options(name="model").remote()
ray.get(trainer.ping.remote())
print(address, flush=True)
input()
"""
WAITS = """
from spark_bridge import init_spark
from spark_bridge.session import executors

executors.WAIT_NOTICE_SECONDS, executors.EXECUTOR_SECONDS = 0.0, 3600.0
settings = {"spark.ui.enabled": "false"}
init_spark("waits", num_executors=1, executor_cores=1, executor_memory="512m", configs=settings, OPTIONS)
"""
WAITS_FOR = {
    "executors": ("", "Of 1 executors, 0 are there."),
    "a placement group": (
        'placement_group_strategy="PACK"',
        "The placement group of 1 executors (PACK, each with 1 CPUs and 512 MiB of memory) is not there.",
    ),
}


@pytest.mark.parametrize("what", map(only_thorough, ("executors", "a placement group")))
def test_session_waiting_for_cpus_names_their_holders_and_ends_on_a_signal(what: str, directory: Path) -> None:
    options_of_session, notice = WAITS_FOR[what]
    program = WAITS.replace("OPTIONS", options_of_session)
    environment = {**driver_environment(directory), "RAY_TMPDIR": str(directory), "PYTHONPATH": str(Path.cwd())}
    environment["RAY_AUTH_MODE"] = "disabled"  # one process makes the token of a cluster, and the other has none
    options: dict[str, Any] = {"cwd": directory, "stdin": subprocess.PIPE, "text": True}
    holder = [sys.executable, "-c", HOLDS_THE_CPU]
    with subprocess.Popen(holder, env=environment, stdout=subprocess.PIPE, **options) as held:
        assert held.stdout is not None
        there = {**environment, "RAY_ADDRESS": next(line.strip() for line in held.stdout if ":" in line)}
        with subprocess.Popen([sys.executable, "-c", program], env=there, stderr=subprocess.PIPE, **options) as waiting:
            assert waiting.stderr is not None
            lines = []
            for line in waiting.stderr:
                lines.append(line)
                if notice in line:
                    break
            held_by = "has 1 CPUs; 0 are free. Held are 1 by actor Trainer 'model' of job "
            assert notice in lines[-1] and held_by in lines[-1], "".join(lines)
            waiting.send_signal(signal.SIGTERM)
            waiting.communicate(timeout=HANG)
            assert waiting.returncode != 0
        held.communicate("\n", timeout=HANG)
