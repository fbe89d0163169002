"""One Ray cluster and one RayDP session for all tests that need Spark, and streams that tests can steer."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import pytest
from pyspark.sql import DataFrame, SparkSession

from backends import StateStoreConf
from backends.encoding.columns import from_spark_type
from backends.storage.checkpoint_storage import CheckpointStorage
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.session.settings import STATE_LOCATION_CONF, storage_settings
from tests.backends.storage.s3_faults import FaultProxy, S3Server
from tests.patience import HANG, PATIENCE
from tests.scratch import SCRATCH
from tests.services.artifacts import connector_jars

ROOT = Path(__file__).parents[2]

# Java processes live for minutes here and spend most of their time on loading and compiling code that runs a few
# times. Cold code also needs more stack: a regular expression within Spark 4.2 has overflowed it once. For each file of
# a checkpoint, Java starts processes (chmod), by default through a helper process.
_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote -Xss4m"
_JVM += " -Djdk.lang.Process.launchMechanism=VFORK"
os.environ["JAVA_TOOL_OPTIONS"] = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} {_JVM}".strip()

# Spark finds the format ``ray_statestore`` among the packages in a Python process that its JVM starts, which knows this
# directory from the environment alone: an editable install does not list its packages.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

# Ray would start a Python worker per CPU for tasks, each with seconds of imports. The tests run no tasks.
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112, the name is Ray's

_FILE_MANAGER = "FileSystemBasedCheckpointFileManager"
_STREAMING = "org.apache.spark.sql.execution.streaming"
_QUICK = {
    # Generated code pays off behind thousands of rows; here each plan runs over a few.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.ui.explainMode": "simple",
    # A query that has nothing to do lists its directory a hundred times a second otherwise.
    "spark.sql.streaming.pollingDelay": "50ms",
    # Spark's other manager starts a process (readlink) at each step of a rename on a local disk.
    "spark.sql.streaming.checkpointFileManagerClass": f"{_STREAMING}.{_FILE_MANAGER}"
    if pyspark.__version__ < "4.1"
    else f"{_STREAMING}.checkpointing.{_FILE_MANAGER}",
}
"""Settings that make short streams cheap without changing their results."""


SOURCE = os.environ.get("STATESTORE_TEST_SOURCE", "files")
"""Where the streams of tests come from: "files", or "kafka"."""
IS_ATTACHED = os.environ.get("STATESTORE_TEST_SESSION") == "attach"
CONFIGS = {
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.task.maxFailures": "4",
    "spark.log.level": "ERROR",
    **_QUICK,
    "spark.python.authenticate.socketTimeout": f"{HANG:.0f}s",  # PySpark waits 15 s for itself
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """Spark with two one-core executors, and two hosts.

    RayDP starts Spark. With ``STATESTORE_TEST_SESSION=attach`` the test starts a cluster of Spark's own processes, and
    attaches it: ``make test-matrix`` does that where no RayDP works with the version of Spark.
    """
    import ray

    from spark_bridge import attach, init_spark, stop_spark

    ray_dir = tempfile.mkdtemp(prefix="rs-", dir=SCRATCH)
    ray.init(
        address="local",
        num_cpus=4,
        namespace="statestore",
        log_to_driver=False,
        logging_level="WARNING",
        include_dashboard=False,
        _temp_dir=ray_dir,
        object_store_memory=200 << 20,
    )
    options: dict[str, Any] = {
        "recovery_timeout": HANG,
        # Small and frequent, so that snapshots and removals run concurrently with every test.
        "conf": StateStoreConf(deltas_per_snapshot=2, maintenance_interval=0.5, min_versions_to_retain=3),
    }
    if IS_ATTACHED:
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        builder = SparkSession.builder.master("local-cluster[2,1,1024]").appName("tests")
        jars = {"spark.jars": ",".join(connector_jars())}
        for name, value in {**CONFIGS, **jars, "spark.sql.session.timeZone": "UTC"}.items():
            builder = builder.config(name, value)
        session = attach(builder.getOrCreate(), num_hosts=2, **options)
    else:
        session = init_spark("tests", 2, 1, "1g", configs=CONFIGS, packages=connector_jars(), **options)
    yield session
    stop_spark()
    session.stop()
    ray.shutdown()
    shutil.rmtree(ray_dir, ignore_errors=True)


@dataclass
class Stream:
    """A file stream that a test feeds batch by batch: one file is one micro-batch."""

    spark: SparkSession
    root: Path
    schema: str
    files: int = 0
    frames: list[pd.DataFrame] = field(default_factory=list)
    checkpoint: str = ""
    """By default a directory in ``root``."""

    def __post_init__(self) -> None:
        self.checkpoint = self.checkpoint or str(self.root / "checkpoint")

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The schema of the files; Spark is asked once, which takes it longer than to write one."""
        schema = self.spark.createDataFrame([], self.schema).schema
        return pa.schema([pa.field(f.name, from_spark_type(f.dataType.jsonValue())) for f in schema.fields])

    def add(self, rows: list[tuple[Any, ...]] | pd.DataFrame) -> None:
        """Write one file; files are read in the order they were added."""
        arrow = self.arrow_schema
        if isinstance(rows, pd.DataFrame):
            table = pa.Table.from_pandas(rows, schema=arrow, preserve_index=False)
        else:
            table = pa.table([pa.array([r[i] for r in rows], f.type) for i, f in enumerate(arrow)], schema=arrow)
        (self.root / "in").mkdir(parents=True, exist_ok=True)
        draft = self.root / f".{self.files}.parquet"
        pq.write_table(table, draft)
        target = self.root / "in" / f"{self.files:05d}.parquet"
        draft.rename(target)
        moment = 1_600_000_000 + self.files * 10
        os.utime(target, (moment, moment))
        self.files += 1

    def read(self, name: str | None = None) -> DataFrame:
        """Return the stream; Spark 4.2 takes the ``name`` of its source, if sources have names."""
        reader = self.spark.readStream.schema(self.schema).option("maxFilesPerTrigger", 1)
        reader = reader.option("maxFileAge", "36500d")
        return (reader if name is None else reader.name(name)).parquet(str(self.root / "in"))


@pytest.fixture
def make_stream(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Callable[..., Stream]:
    made = 0

    def make(schema: str = "k long, v double") -> Stream:
        nonlocal made
        made += 1
        root = tmp_path / f"stream{made}"
        (root / "in").mkdir(parents=True)
        if SOURCE == "kafka":
            from tests.services.kafka_stream import KafkaStream

            return KafkaStream(spark, root, schema, address=request.getfixturevalue("kafka").address)
        return Stream(spark, root, schema)

    return make


@pytest.fixture
def stream(make_stream: Callable[..., Stream]) -> Stream:
    return make_stream()


@pytest.fixture
def s3(
    spark: SparkSession, servers: tuple[S3Server, FaultProxy], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultProxy]:
    """Route the state of new queries through the proxy. It outlives them: hosts keep sending requests for a while."""
    from spark_bridge.session.current import current_cluster

    cluster, (server, proxy) = current_cluster(), servers
    bucket = f"state-{uuid.uuid4().hex[:8]}"
    server.make_bucket(bucket)
    options = {
        "endpoint": proxy.endpoint,
        "endpoint.region": "us-east-1",
        "path.style.access": "true",
        "connection.ssl.enabled": "false",
        "access.key": server.account.access_key,
        "secret.key": server.account.secret_key,
    }
    given = {f"spark.hadoop.fs.s3a.{name}": value for name, value in options.items()}
    monkeypatch.setattr(cluster, "conf", replace(cluster.conf, storage_options=given))
    spark.conf.set(STATE_LOCATION_CONF, f"s3://{bucket}/state")
    try:
        yield proxy
    finally:
        proxy.plan.clear()
        spark.conf.unset(STATE_LOCATION_CONF)


@pytest.fixture(autouse=True)
def stop_queries(request: pytest.FixtureRequest) -> Iterator[None]:
    """No query of one test runs on into the next."""
    yield
    if "spark" in request.fixturenames:
        for query in request.getfixturevalue("spark").streams.active:
            query.stop()


def wait_until(what: Callable[[], Any], timeout: float = PATIENCE, every: float = 0.05) -> Any:
    """Poll until true; fails naming what it waited for."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if answer := what():
            return answer
        time.sleep(every)
    raise AssertionError(f"not true within {timeout} s: {what}")


def driver_environment(scratch: str | Path) -> dict[str, str]:
    """Return the environment of a driver in a separate process.

    A killed driver removes nothing, so its temporary files go to ``scratch``.
    """
    return {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_DIRS": str(scratch),
        "JAVA_TOOL_OPTIONS": f"{os.environ['JAVA_TOOL_OPTIONS']} -Djava.io.tmpdir={scratch}",
    }


def remove_checkpoint(path: str | Path) -> None:
    """Remove the checkpoint, or a part of it, of a query that has just been stopped.

    Spark tells its listeners of the end behind ``stop()``: the coordinator is perhaps naming the last snapshots, and a
    host uploading one. A directory that gets another file while it is being removed stays, so it is moved away first.
    """
    aside = Path(path).with_name(f"{Path(path).name}-removed")
    Path(path).rename(aside)
    shutil.rmtree(aside)


def held_instances() -> list[dict[str, Any]] | None:
    """What all hosts of the session hold; None while one of them, which a test has killed, is being restarted."""
    from spark_bridge.session.current import current_cluster

    try:
        return [i for h in current_cluster().describe_hosts() for i in h["instances"]]
    except HostUnavailableError:
        return None


def settle(query: Any) -> None:
    """Process all there is, and wait until hosts have heard that Spark has committed it.

    Queries of state see a version once it is completed; Spark tells its listeners a moment later.
    """
    from spark_bridge.session.current import current_cluster

    query.processAllAvailable()
    cluster, run_id = current_cluster(), str(query.runId)
    session = SparkSession.getActiveSession()
    options = {} if session is None else storage_settings(session)

    deadline = time.monotonic() + PATIENCE
    while True:
        run = next(q for q in cluster.coordinator.call("describe")["queries"] if q["run_id"] == run_id)
        held = held_instances()
        commits = CheckpointStorage.open(f"{run['checkpoint_location']}/commits", options)
        wanted = max((int(name) for name, _ in commits.list() if name.isdecimal()), default=-1) + 1
        is_completed = run["completed_version"] == wanted
        if is_completed and held is not None and all(i["version"] == wanted for i in held if i["run_id"] == run_id):
            return
        assert time.monotonic() < deadline, (
            f"Spark is at version {wanted}, the coordinator says {run}, hosts hold {held}"
        )
        time.sleep(0.05)
