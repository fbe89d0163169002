"""The demo's stream process: the Spark driver, and at the end the comparison with pandas.

Run as ``python -m spark_bridge.demo.stream <StreamOptions as JSON>`` by ``app``.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec
import pandas as pd
import psutil
import pyarrow as pa
import ray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from ray.util.placement_group import PlacementGroup

from backends import StateStoreConf
from backends.decoders import json_decoder
from coordinator_actor.coordinator_conf import NAMESPACE
from spark_bridge import QueryableStateClient, aggregate, init_spark, stop_spark
from spark_bridge import functions as S
from spark_bridge.demo import events
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.session.current import current_cluster
from spark_bridge.session.ray_cluster import ensure_java, system_config

# Child processes that leave no process behind, however they end.
#
# Ray and Spark start processes in separate groups, so a kill of the child's group would miss them. Every
# descendant inherits a mark in its environment instead, which identifies it.


log = logging.getLogger(__name__)

MARK = "STATESTORE_DEMO_MARK"
Ended = tuple[str, int]
"""A child's name and exit code, queued after its last event."""


class Children:
    """The demo's child processes: starts them, gathers their events, and ends them and all their descendants."""

    def __init__(self, log_path: Path, environment: Mapping[str, str]) -> None:
        self.messages: queue.Queue[events.DemoEvent | Ended] = queue.Queue()
        self._mark = uuid.uuid4().hex
        self._environment = {**os.environ, **environment, MARK: self._mark}
        self._log_path = log_path
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, options: Callable[[int], msgspec.Struct]) -> None:
        """Run ``python -m module <options as JSON>``; ``options`` gets the file descriptor for its events."""
        read_fd, write_fd = os.pipe()
        try:
            with self._log_path.open("ab") as log_file:
                arguments = msgspec.json.encode(options(write_fd)).decode()
                process = subprocess.Popen(
                    [sys.executable, "-m", module, arguments],
                    stdin=subprocess.PIPE,  # its end tells the child that this process is gone
                    stdout=log_file,
                    stderr=log_file,
                    pass_fds=[write_fd],
                    env=self._environment,
                    start_new_session=True,  # Ctrl-C reaches this process alone, which ends the children in order
                )
        finally:
            os.close(write_fd)
        self._processes[name] = process
        threading.Thread(target=self._read, args=(name, process, read_fd), daemon=True).start()

    def _read(self, name: str, process: subprocess.Popen[bytes], fd: int) -> None:
        with os.fdopen(fd, "rb") as lines:
            for line in lines:
                self.messages.put(events.decode_event(line))
        self.messages.put((name, process.wait()))

    def stop(self, name: str, patience_s: float) -> None:
        """Ask one child to end (SIGTERM), wait for it, and kill it if it does not end."""
        process = self._processes.get(name)
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self, patience_s: float = 20.0) -> None:
        """End all children, the last one first, then every process that carries the mark."""
        for name in reversed(self._processes):
            self.stop(name, patience_s)
        deadline = time.monotonic() + 10.0
        grace_until = time.monotonic() + 2.0  # Ray's own processes end soon after their driver
        looks_without_one = 0
        while looks_without_one < 2:  # one look may miss a process: /proc shows no environment for a moment after exec
            marked = marked_processes(self._mark)
            looks_without_one = 0 if marked else looks_without_one + 1
            if time.monotonic() > deadline and marked:
                raise RuntimeError(f"these processes do not die: {[process.pid for process in marked]}")
            if time.monotonic() > grace_until:
                for process in marked:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            time.sleep(0.1)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return all living processes of this user, except this one, whose environment carries ``mark``."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended since, or is another user's
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                processes.append(process)
    return processes


def end_with_parent() -> None:
    """End this child process by ``SystemExit`` on SIGTERM, and when its parent ends (at the end of standard input)."""

    def leave(_signum: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not disturb the clean-up
        raise SystemExit(128 + signal.SIGTERM)

    def watch() -> None:
        # Not through sys.stdin: this thread would still hold its lock when the interpreter shuts down.
        while os.read(0, 1024):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=watch, daemon=True).start()


Options = TypeVar("Options", bound=events.ChildOptions)


def run_child(kind: type[Options], work: Callable[[Options, events.EventPipe], None], failed: str = "") -> None:
    """Do a child's work with the options of the command line; report an error to the parent and exit with 1.

    ``failed`` begins the report.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = json_decoder(kind).decode(sys.argv[1])
    pipe = events.EventPipe(options.events_fd)
    end_with_parent()
    try:
        work(options, pipe)
    except Exception as error:
        log.exception("%s failed", work.__name__)
        is_told = isinstance(error, events.DemoError)
        pipe.send(events.Failed(f"{failed}{error}" if is_told else f"{failed}{type(error).__name__}: {error}"))
        raise SystemExit(1) from error


# The Ray cluster of the demo: a new one on this machine, or one that runs on several machines.


MIB = 1 << 20
EXECUTOR_MEMORY = 1 << 30
ROOM_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RayForDemo:
    """A Ray cluster that is joined: its address, and the arguments of ``init_spark`` about executors."""

    address: str
    executors: dict[str, Any] = field(default_factory=lambda: {"num_executors": 2})


@contextmanager
def own_cluster(directory: Path) -> Iterator[RayForDemo]:
    """Start a cluster for this demo alone, with its files below ``directory``; end the cluster after the demo."""
    directory.mkdir(parents=True)
    context = ray.init(
        address="local",
        num_cpus=max(2, os.cpu_count() or 1),
        object_store_memory=256 * MIB,
        include_dashboard=False,
        log_to_driver=False,
        namespace=NAMESPACE,
        _temp_dir=str(directory),
        _system_config=system_config(),
    )
    try:
        yield RayForDemo(str(context.address_info["gcs_address"]))
    finally:
        ray.shutdown()


@contextmanager
def machines_of_cluster(count: int) -> Iterator[RayForDemo]:
    """Join the cluster at ``RAY_ADDRESS``, or that of this machine, and take a slot on each of ``count`` machines.

    Raises ``DemoError`` if there is no cluster, or not enough machines have room for an executor within a minute.
    """
    try:
        ray.init(address="auto", log_to_driver=False, namespace=NAMESPACE)
    except ConnectionError as error:
        raise events.DemoError(
            f"--machines needs a Ray cluster that runs, and none was found: {error} Start Ray on the machines (`ray "
            "start`), and run the demo on one of them, or with RAY_ADDRESS=<head>:6379"
        ) from error
    try:
        group = _room_on_machines(count)
        try:
            configs = {"spark.statestore.sharedFileSystem": "true"}
            executors = {"num_executors": count, "placement_group": group, "configs": configs}
            yield RayForDemo(ray.get_runtime_context().gcs_address, executors)
        finally:
            ray.util.remove_placement_group(group)
    finally:
        ray.shutdown()


def _room_on_machines(count: int) -> PlacementGroup:
    """Return a group with room for an executor on each of ``count`` machines."""
    cpus_by_machine = {n["NodeManagerAddress"]: n["Resources"].get("CPU", 0) for n in ray.nodes() if n["Alive"]}
    if sum(cpus >= 1 for cpus in cpus_by_machine.values()) >= count:
        bundles: list[dict[str, float]] = [{"CPU": 1, "memory": EXECUTOR_MEMORY}] * count
        group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        if group.wait(ROOM_TIMEOUT_S):
            return group
        ray.util.remove_placement_group(group)
    slots = ", ".join(f"{address} ({cpus:g})" for address, cpus in sorted(cpus_by_machine.items()))
    raise events.DemoError(
        f"--machines {count} needs {count} machines with a free CPU slot and 1 GiB of Ray's memory each; these are in "
        f"the cluster, with their slots, taken ones too: {slots}. Name fewer machines, add some, or end what uses them"
    )


def hosts_by_machine() -> dict[str, int]:
    """Return how many state hosts of this session each machine has, by its address."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return dict(sorted(Counter(addresses[host.node_id] for host in current_cluster().placement.hosts).items()))


UNKNOWN_KEYS = ["N00000", "", "no such aircraft", "n14228"]
STREAM_POLL_SECONDS = 0.05
BATCH_TIMEOUT_S = 120.0
COMPLETION_TIMEOUT_S = 120.0


class FlightStream:
    """One run of the demo's query, from its start to the comparison at its end."""

    def __init__(self, options: events.StreamOptions, pipe: events.EventPipe) -> None:
        self._options = options
        self._send = pipe.send
        self._directory = Path(options.directory)
        self._touched: dict[int, int] = {}
        self._seen: set[str | None] = set()
        self._hosts: dict[str, int] = {}

    def run(self) -> None:
        """Run the query over the flights and check its state. Raises ``DemoError`` if the state is wrong."""
        self._send(events.Progress("loading the flights"))
        flights = events.load_flights()
        batches = self._options.batches
        files, checkpoint = self._directory / "flights", self._directory / "checkpoint"
        done = highest_batch(checkpoint / "commits") + 1
        # A batch that was planned but not committed is the next to run, so the target is never lower.
        target = min(batches, done + (self._options.stop_after or batches))
        events.retract_files(files, batches, keep=target)
        events.release_files(flights, files, batches, target)

        self._send(events.Progress("starting Ray" if self._options.machines is None else "joining the Ray cluster"))
        machines, ray_directory = self._options.machines, Path(self._options.ray_directory)
        with own_cluster(ray_directory) if machines is None else machines_of_cluster(machines) as cluster:
            self._send(events.Progress("starting Spark on Ray"))
            conf = StateStoreConf(provider=self._options.backend)
            spark = init_spark("flights-demo", executor_memory=EXECUTOR_MEMORY, conf=conf, **cluster.executors)
            try:
                self._run_query(spark, flights, cluster.address, done, target)
            finally:
                stop_spark()

    def _run_query(self, spark: SparkSession, flights: pd.DataFrame, address: str, done: int, target: int) -> None:
        self._send(events.Progress("starting the query"))
        query = self._start(spark)
        try:
            self._send(events.Started(address, done, target))
            if done:
                self._seen.update(self._keys_in_state(flights))
            self._follow(query, done, target)
            self._send(events.Progress("comparing the state with pandas"))
            wait_until_completed(target)
            self._verify(flights.iloc[: events.batch_bounds(len(flights), self._options.batches)[target]], flights)
        finally:
            query.stop()

    def _start(self, spark: SparkSession) -> StreamingQuery:
        reader = spark.readStream.schema(events.SPARK_SCHEMA).option("maxFilesPerTrigger", 1)
        flights = reader.parquet(f"file://{self._directory}/flights")
        state = aggregate(
            flights,
            by=events.FLIGHT_KEY,
            operator=events.OPERATOR,
            num_partitions=self._options.partitions,
            flights=S.count(),
            air_time=S.sum("air_time"),
            mean_delay=S.mean("arr_delay"),
            worst_delay=S.max("arr_delay"),
            last_departure=S.max("departure"),
            last_dest=S.last("dest", by="departure"),
        )
        writer = state.writeStream.queryName("flights").foreachBatch(self._sink)
        return writer.option("checkpointLocation", f"file://{self._directory}/checkpoint").start()

    @staticmethod
    def _keys_in_state(flights: pd.DataFrame) -> list[str | None]:
        """Return the aircraft that earlier runs have left in the state."""
        candidates = [None, *flights[events.FLIGHT_KEY].dropna().unique().tolist()]
        with QueryableStateClient.connect() as client:
            answer: pa.Table = client.get_many(events.OPERATOR, candidates)
        counts = answer.column("flights").to_pylist()
        return [key for key, count in zip(candidates, counts, strict=True) if count is not None]

    def _sink(self, changed: DataFrame, batch_id: int) -> None:
        """Count the aircraft that the batch changed, in place of a real sink."""
        keys = [row[0] for row in changed.select(events.FLIGHT_KEY).collect()]
        self._touched[batch_id] = len(keys)
        self._seen.update(keys)

    def _follow(self, query: StreamingQuery, done: int, target: int) -> None:
        """Report each committed batch until ``target`` batches are committed."""
        kill_at = done + max(1, (target - done) // 2) if self._options.kill_host else None
        reported = done
        deadline = time.monotonic() + BATCH_TIMEOUT_S
        while reported < target:
            if (error := query.exception()) is not None:
                raise events.DemoError(f"the query failed: {error}")
            if not query.isActive:
                raise events.DemoError(f"the query stopped by itself after batch {reported}")
            for progress in query.recentProgress:
                number = progress["batchId"] + 1
                if number <= reported or progress["numInputRows"] == 0:
                    continue
                self._send(self._describe(progress))
                self._say_where_hosts_stand()
                reported = number
                deadline = time.monotonic() + BATCH_TIMEOUT_S
                if kill_at is not None and reported >= kill_at and reported < target:
                    kill_at = None
                    threading.Timer(0.1, self._kill_host, [reported + 1]).start()
            if time.monotonic() > deadline:
                raise events.DemoError(f"batch {reported + 1} was not committed within {BATCH_TIMEOUT_S:.0f} s")
            time.sleep(STREAM_POLL_SECONDS)

    def _describe(self, progress: Any) -> events.DemoEvent:
        batch_id = progress["batchId"]
        return events.BatchCommitted(
            number=batch_id + 1,
            rows=progress["numInputRows"],
            rows_per_second=progress["processedRowsPerSecond"],
            touched_keys=self._touched.get(batch_id),
            total_keys=len(self._seen),
            checkpoint=batch_id + 1,
            batch_ms=progress["durationMs"]["triggerExecution"],
            state_ms=state_milliseconds(batch_id + 1),
        )

    def _say_where_hosts_stand(self) -> None:
        if self._options.machines is not None and (stand := hosts_by_machine()) != self._hosts:
            self._hosts = stand
            self._send(events.HostsPlaced(stand))

    def _kill_host(self, number: int) -> None:
        pid = current_cluster().describe_hosts()[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        self._send(events.HostKilled(pid, number))

    def _verify(self, streamed: pd.DataFrame, all_flights: pd.DataFrame) -> None:
        """Compare the whole state with pandas. Raises ``DemoError`` naming the first difference."""
        expected = events.expected_state(streamed)
        flights = expected.column(events.FLIGHT_KEY).to_pylist()
        unseen = sorted(set(all_flights[events.FLIGHT_KEY].dropna()) - set(flights)) + UNKNOWN_KEYS
        with QueryableStateClient.connect() as client:
            started = time.perf_counter()
            answer: pa.Table = client.get_many(events.OPERATOR, flights + unseen)
            read_ms = (time.perf_counter() - started) * 1e3
        difference = events.first_difference(expected, answer.slice(0, len(flights)))
        if difference is not None:
            raise events.DemoError(f"the state is not what pandas computes: {difference}")
        for row in answer.slice(len(flights)).to_pylist():
            key = row.pop(events.FLIGHT_KEY)
            if any(value is not None for value in row.values()):
                raise events.DemoError(f"aircraft {key!r} has not flown yet, but the state has {row}")
        self._send(events.Verified(len(flights), len(streamed), len(unseen), read_ms))


def highest_batch(log_directory: Path) -> int:
    """Return the highest batch id in one of Spark's logs (``offsets``, ``commits``); -1 if there is none."""
    if not log_directory.is_dir():
        return -1
    return max((int(p.name) for p in log_directory.iterdir() if p.name.isdigit()), default=-1)


def wait_until_completed(version: int) -> None:
    """Wait until the hosts have applied ``version``: they learn of Spark's commit a moment later."""
    cluster = current_cluster()
    deadline = time.monotonic() + COMPLETION_TIMEOUT_S
    while True:
        partitions: list[int] | None = None
        with suppress(HostUnavailableError):  # a host that was killed is being restarted
            partitions = [i["version"] for host in cluster.describe_hosts() for i in host["instances"]]
        completed = cluster.coordinator.locate(events.OPERATOR).completed_version
        if completed == version and partitions is not None and all(v == version for v in partitions):
            return
        if time.monotonic() > deadline:
            raise events.DemoError(
                f"version {version} was not completed in {COMPLETION_TIMEOUT_S:.0f} s: the coordinator has "
                f"{completed}, the hosts have {partitions}"
            )
        time.sleep(STREAM_POLL_SECONDS)


def state_milliseconds(version: int) -> float | None:
    """Return the longest time, in ms, that a task worked on state for ``version``; None if hosts do not report it."""
    try:
        descriptions = current_cluster().describe_hosts()
    except HostUnavailableError:
        log.warning("the hosts did not describe themselves", exc_info=True)
        return None
    commits = [instance["last_commit"] for description in descriptions for instance in description["instances"]]
    times = [
        sum(value for name, value in commit.items() if name.endswith("_ms"))
        for commit in commits
        if commit and commit["version"] == version
    ]
    return max(times, default=None)


def run_stream(options: events.StreamOptions, pipe: events.EventPipe) -> None:
    """Run the query, and compare its state with pandas."""
    ensure_java()
    FlightStream(options, pipe).run()


if __name__ == "__main__":
    run_child(events.StreamOptions, run_stream)
