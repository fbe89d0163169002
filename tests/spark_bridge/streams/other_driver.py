"""Another driver in a separate process, on the checkpoint of a test's stream."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import ray

from spark_bridge import QueryableStateClient
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import Stream, driver_environment, wait_until

PARTITIONS = (3, 2)
DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
import ray
from pyspark.sql import SparkSession
from backends import StateStoreConf
from coordinator_actor.coordinator_conf import CoordinatorConf
from spark_bridge import attach, stop_spark
from spark_bridge.session.ray_cluster import ensure_java
from spark_bridge.session.current import current_cluster
from tests.services.artifacts import connector_jars
from tests.spark_bridge.conftest import Stream, settle
from tests.spark_bridge.streams.flow import SCHEMA, Flow

options = json.loads(sys.argv[1])
ensure_java()
ray_options = {"namespace": options["namespace"], "log_to_driver": False, "logging_level": "WARNING"}
if options["ray"] == "own":
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, **ray_options)
else:
    ray.init(address=options["ray"], **ray_options)
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
for name, value in {"spark.jars": ",".join(connector_jars()), **options["configs"]}.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
spark.sparkContext.setLogLevel("OFF")
conf = StateStoreConf(deltas_per_snapshot=2, maintenance_interval=0.5, min_versions_to_retain=3, **options["conf"])
coordinator_conf = CoordinatorConf(**options["coordinator_conf"])
attach(spark, num_hosts=2, namespace=options["namespace"], conf=conf, coordinator_conf=coordinator_conf)

def sink(batch, n):
    batch.collect()
    if n == options["die_in_batch"]:
        os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

stream = Stream(spark, Path(options["root"]), SCHEMA, checkpoint=options["checkpoint"])
if options["broker"] is not None:
    from tests.services.kafka_stream import KafkaStream

    stream = KafkaStream(spark, Path(options["root"]), SCHEMA, address=options["broker"])
writer = Flow(stream).frame(*options["partitions"]).writeStream.option("checkpointLocation", stream.checkpoint)
query = writer.foreachBatch(sink).start()
settle(query)
cluster = current_cluster()
ready = Path(options["ready"])
ready.with_suffix(".draft").write_text(json.dumps({"address": cluster.query_addresses()[0], "token": cluster.token}))
ready.with_suffix(".draft").rename(ready)
while not Path(options["end"]).exists():
    if query.exception() is not None:
        raise query.exception()
    time.sleep(0.05)
stop_spark()
spark.stop()
ray.shutdown()
"""


class Driver:
    """Another driver in a separate process, which runs the query of a ``Flow`` on plain local Spark.

    ``ray`` is "own" or the "same" cluster as this process's; with ``die_in_batch`` its sink kills it, Spark included,
    when it has that batch. ``with`` ends it, and whatever it has started.
    """

    def __init__(
        self,
        stream: Stream,
        scratch: Path,
        *,
        ray: str,
        partitions: tuple[int, int] = PARTITIONS,
        die_in_batch: int = -1,
        namespace: str = "statestore",
        coordinator_conf: dict[str, float] | None = None,
        configs: dict[str, str] | None = None,
        conf: dict[str, int] | None = None,
    ) -> None:
        self._ready, self._end, self._log = scratch / "ready.json", scratch / "end", scratch / "driver.log"
        options = {
            "root": str(stream.root),
            "checkpoint": stream.checkpoint,
            "broker": getattr(stream, "address", None),
            "ray": "own" if ray == "own" else ray_address(),
            "partitions": partitions,
            "die_in_batch": die_in_batch,
            "namespace": namespace,
            "coordinator_conf": coordinator_conf or {},
            "configs": configs or {},
            "conf": conf or {},
            "ready": str(self._ready),
            "end": str(self._end),
        }
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(DRIVER), json.dumps(options)],
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[3],
                env=driver_environment(scratch),
            )

    def wait_until_ready(self) -> QueryableStateClient:
        """Wait until it has processed all there is; a client of its hosts."""

        def ready() -> bool:
            assert self.process.poll() is None, self._log.read_text()[-3000:]
            return self._ready.exists()

        wait_until(ready, timeout=2 * PATIENCE)  # Ray and Spark are to be started
        said = json.loads(self._ready.read_text())
        return QueryableStateClient.connect(address=said["address"], token=said["token"])

    def wait_for_death(self) -> None:
        """Wait until its sink has killed it."""
        assert self.process.wait(2 * PATIENCE) == -signal.SIGKILL, self._log.read_text()[-3000:]

    def end(self) -> None:
        """Have it stop its query and its session."""
        self._end.touch()
        assert self.process.wait(PATIENCE) == 0, self._log.read_text()[-3000:]

    def kill(self) -> None:
        """It is gone from one moment to the next, Spark included."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        for process in started:
            if process.is_running():
                process.kill()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def ray_address() -> str:
    return str(ray.get_runtime_context().gcs_address)
