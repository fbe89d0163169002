"""How fast the state of a running stream is read, compared with Redis, in one run.

    python benchmarks/queries.py beside-stream           single lookups during a stream, and their cost for the stream
    python benchmarks/queries.py scan --keys 10000000    all rows of ten million keys, and the client's memory
    python benchmarks/queries.py features --keys 100000  50 features of a view at fixed rates, in open loop

The state is that of a running ``aggregate`` on RayDP with two executors of one core and two hosts: of each user a
count, a sum and the last time. Redis (``redis-server`` must be on the PATH; nothing is written to its disk) has the
same three values by msgpack under "totals:<user>". Contestants take turns; a turn is all client processes at once for a
few seconds. The clients are separate processes, which know an address and a token, and have neither Ray nor Spark.
Before anything is timed, the answers of both for some keys are compared.

Batched is 1,000 random keys a call: into a typed Arrow table from the state store, from Redis' ``MGET`` into a list of
unpacked lists. Async is one event loop with 64 lookups in flight. Both servers, all clients and the stream share the
machine's cores.

The features are 20 longs, 25 doubles and 5 strings of one key a request, by one asynchronous client process, or by one
client in each of two replicas of Ray Serve, which ask in open loop themselves. In turns with it, ``redis.asyncio``
reads the same values by msgpack, and a client that asks no server shows what the machine itself takes. A stream that
runs commits a batch of ``--rows`` keys every ``--every`` seconds, or without a pause. A rate is not sustained if less
than 98 % was answered.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from query_clients import OPERATOR, VIEW, features_key, features_of, open_loop, redis_key
from rich.console import Console
from suite.machine import directory, own_ray

ROWS_PER_FILE = 1_000_000
START_US = 1_700_000_000_000_000
console = Console(width=max(Console().width, 120), highlight=False)
Figures = dict[str, float]


def write_users(inbox: Path, users: Any, name: str) -> None:
    """Write one file with a row of each user, whose totals can be computed from the user; it appears at once."""
    times = pa.array(START_US + users, pa.timestamp("us", tz="UTC"))
    table = pa.table({"user": users, "amount": users * 0.5, "ts": times})
    draft = inbox.with_name(f"{name}.draft")
    pq.write_table(table, draft)
    draft.rename(inbox / f"{name}.parquet")


def totals_of_user() -> dict[str, Any]:
    from spark_bridge import functions as S

    return {"n": S.count(), "spent": S.sum("amount"), "last": S.max("ts")}


def fifty_features() -> dict[str, Any]:
    """Return 50 outputs: 20 longs, 25 doubles, 5 strings."""
    from spark_bridge import functions as S

    longs = {f"long_{i}": (S.count(), S.sum("user"), S.max("user"))[i % 3] for i in range(20)}
    doubles = {f"double_{i}": (S.sum, S.min, S.max, S.mean)[i % 4]("amount") for i in range(25)}
    return {**longs, **doubles, **{f"string_{i}": S.max("place") for i in range(5)}}


@contextmanager
def running_stream(
    keys: int,
    partitions: int,
    outputs: Callable[[], dict[str, Any]] = totals_of_user,
    in_rows: tuple[str, ...] | None = None,
) -> Iterator[tuple[Any, Path]]:
    """Give the query and its input directory, once it has so many keys. ``in_rows`` are the columns of its rows."""
    from spark_bridge import aggregate, init_spark, stop_spark

    with directory() as root, own_ray(3), ExitStack() as ended:
        (inbox := root / "in").mkdir()
        ended.callback(stop_spark)
        spark = init_spark("queries", num_executors=2, executor_cores=1, executor_memory="2g")
        given = spark.readStream.schema("user long, amount double, ts timestamp").option("maxFilesPerTrigger", 1)
        rows = given.parquet(str(inbox))
        if in_rows is not None:
            rows = rows.selectExpr(*in_rows)
        totals = aggregate(rows, by="user", operator=OPERATOR, num_partitions=partitions, **outputs())
        query = totals.writeStream.option("checkpointLocation", str(root / "ck")).format("noop").start()
        with console.status("Filling the state ...") as status:
            for first in range(0, keys, ROWS_PER_FILE):
                end = min(keys, first + ROWS_PER_FILE)
                write_users(inbox, np.arange(first, end, dtype=np.int64), f"users-{first}")
                query.processAllAvailable()
                status.update(f"Filling the state: {end:,} keys ...")
            await_keys(keys)
        yield query, inbox
        query.stop()


def await_keys(keys: int) -> None:
    """Wait for the last batch to be completed: hosts learn of it a moment after Spark has committed it."""
    from spark_bridge import QueryableStateClient

    with QueryableStateClient.connect() as client:
        while client.count(OPERATOR) < keys:
            time.sleep(0.05)


def totals_entry(user: int) -> tuple[bytes, Any]:
    """Return the key and the value that Redis has for the totals of a user."""
    return redis_key(user), [1, user * 0.5, START_US + user]


@contextmanager
def running_redis(keys: int, entry: Callable[[int], tuple[bytes, Any]] = totals_entry) -> Iterator[int]:
    """Give the port of a Redis server that has the entries of all users by msgpack."""
    import msgpack
    import redis

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.2), 50)
        client = redis.Redis(port=port, retry_on_error=[redis.ConnectionError], retry=retry)
        for first in range(0, keys, 10_000):
            pipe = client.pipeline(transaction=False)
            for user in range(first, min(keys, first + 10_000)):
                key, value = entry(user)
                pipe.set(key, msgpack.packb(value))
            pipe.execute()
        yield port
    finally:
        server.terminate()
        server.wait()


@contextmanager
def clients(
    contestant: str, work: str, address: str, count: int, seconds: float, keys: int, pace: float | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Give warm client processes, which take turns of so many seconds. Raises ``RuntimeError`` if one fails."""
    script = str(Path(__file__).with_name("query_clients.py"))
    extra = [] if pace is None else [str(pace)]
    processes = [
        subprocess.Popen(
            [sys.executable, script, contestant, work, address, str(seconds), str(keys), str(seed), *extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(count)
    ]
    try:
        for process in processes:
            heard(process)  # "ready"
        yield processes
    finally:
        for process in processes:
            with suppress(BrokenPipeError):
                process.communicate()  # no further line ends it
    if failed := [process.args for process in processes if process.returncode]:
        raise RuntimeError(f"{len(failed)} clients failed in the end; see above. The first was {failed[0]!r}.")


def heard(client: subprocess.Popen[str]) -> str:
    """Return the next line that a client prints. Raises ``RuntimeError`` if the client has ended."""
    assert client.stdout is not None
    if line := client.stdout.readline():
        return line
    raise RuntimeError(f"A client ended with status {client.wait()}; see above. It was {client.args!r}.")


def begin(processes: list[subprocess.Popen[str]]) -> None:
    """Let all clients take a turn at once."""
    for process in processes:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # ``heard`` says which one has ended
            process.stdin.write("begin\n")
            process.stdin.flush()


def turn(processes: list[subprocess.Popen[str]]) -> Figures:
    """A turn of all clients: keys a second of all, and latencies of the median and of the slowest client."""
    begin(processes)
    found = [json.loads(heard(process)) for process in processes]
    return {
        "keys_per_second": sum(f["keys_per_second"] for f in found),
        "p50_ms": statistics.median(f["p50_ms"] for f in found),
        "p99_ms": max(f["p99_ms"] for f in found),
        "cpu_us_per_key": statistics.mean(f["cpu_us_per_key"] for f in found),
    }


def address_for_clients() -> str:
    """Return any host's query address for clients that have no Ray, and let their environment have the token."""
    from spark_bridge.session.current import current_cluster

    os.environ["STATESTORE_TOKEN"] = current_cluster().token
    return current_cluster().query_addresses()[0]


def check_equal(port: int, keys: int) -> None:
    """Raise unless both contestants have the same values."""
    import msgpack
    import redis

    from spark_bridge import QueryableStateClient

    users = np.random.default_rng(7).integers(0, keys + 100, 2_000)
    with QueryableStateClient.connect() as client:
        table = client.get_many(OPERATOR, users)
    last = table.column("last").cast(pa.int64())
    ours = list(zip(*(c.to_pylist() for c in (table.column("n"), table.column("spent"), last)), strict=True))
    found = redis.Redis(port=port).mget([redis_key(user) for user in users.tolist()])
    theirs = [(None, None, None) if v is None else tuple(msgpack.unpackb(v)) for v in found]
    different = [(u, o, t) for u, o, t in zip(users.tolist(), ours, theirs, strict=True) if o != t]
    if different:
        raise AssertionError(
            f"{len(different)} of {len(ours)} keys do not have the same values in the state store and in Redis; (key, "
            f"ours, Redis'): {different[:3]}"
        )


def beside_stream(arguments: argparse.Namespace) -> None:
    """Measure single lookups while the stream commits 100,000 keys a batch, and the stream with and without them."""
    keys, rows = arguments.keys, 100_000
    rng = np.random.default_rng(3)
    with running_stream(keys, arguments.partitions) as (query, inbox):
        address, number = address_for_clients(), 0

        def batches(count: int) -> list[float]:
            nonlocal number
            for _ in range(count):
                write_users(inbox, np.sort(rng.choice(keys, rows, replace=False)), f"more-{number}")
                number += 1
            query.processAllAvailable()
            done = [p for p in query.recentProgress if p["numInputRows"] == rows][-count:]
            return [p["durationMs"]["triggerExecution"] / 1e3 for p in done]

        batches(5)
        alone, beside, latencies = list[float](), list[float](), list[Figures]()
        for _ in range(arguments.rounds):
            alone += batches(arguments.batches)
            expected = statistics.median(alone) * arguments.batches
            with clients("ours", "single", address, 1, expected, keys, arguments.pace) as readers:
                begin(readers)
                beside += batches(arguments.batches)
                latencies.append(json.loads(heard(readers[0])))
        without, with_them = statistics.median(alone), statistics.median(beside)
        console.print(
            f"A batch of {rows:,} keys: {without:.2f} s alone, {with_them:.2f} s with {arguments.pace:.0f} lookups/s "
            f"({(with_them / without - 1) * 100:+.0f} %), so {rows / with_them:,.0f} keys/s committed."
        )
        console.print(
            f"Single lookups during the batches: p50 {statistics.median(f['p50_ms'] for f in latencies):.2f} ms, "
            f"p99 {statistics.median(f['p99_ms'] for f in latencies):.2f} ms, longest "
            f"{max(f['max_ms'] for f in latencies):.1f} ms."
        )


def scan(arguments: argparse.Namespace) -> None:
    """Measure a scan of all rows, and how much the client's memory grows."""
    from spark_bridge import QueryableStateClient

    with running_stream(arguments.keys, arguments.partitions), QueryableStateClient.connect() as client:
        rates = []
        for _ in range(arguments.rounds):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            began = time.perf_counter()
            rows, users = 0, 0
            for batch in client.scan(OPERATOR):
                rows += batch.num_rows
                users += pa.compute.sum(batch.column("user")).as_py()
            seconds = time.perf_counter() - began
            if (rows, users) != (arguments.keys, arguments.keys * (arguments.keys - 1) // 2):
                raise AssertionError(f"The scan gave {rows:,} rows instead of {arguments.keys:,}, or others.")
            rates.append(rows / seconds)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            console.print(
                f"{rows:,} rows in {seconds:.1f} s: {rows / seconds:,.0f} rows/s; the client's peak memory grew by "
                f"{grown:.0f} MiB"
            )
        console.print(f"Median {statistics.median(rates):,.0f} rows/s")


# -- features in open loop ---------------------------------------------------------------------


class Batches:
    """Batches of some rows one after the other, in a thread; one begins each ``every`` seconds, or when it can."""

    def __init__(self, query: Any, inbox: Path, keys: int, rows: int, every: float) -> None:
        self._query, self._inbox, self._keys, self._rows, self._every = query, inbox, keys, rows, every
        self._rng = np.random.default_rng(3)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seconds: list[float] = []

    def __enter__(self) -> Batches:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            began = time.perf_counter()
            users = np.sort(self._rng.choice(self._keys, self._rows, replace=False))
            write_users(self._inbox, users, f"more-{time.time_ns()}")
            self._query.processAllAvailable()
            self.seconds.append(time.perf_counter() - began)
            self._is_over.wait(self._every - self.seconds[-1])


def open_loop_row(what: str, rate: float, figures: list[dict[str, Any]], more: str = "") -> None:
    answered = sum(f["rate"] for f in figures)
    failures = sum(sum(f["failures"].values()) for f in figures)
    kinds = sorted({kind for f in figures for kind in f["failures"]})
    kept = "" if answered > 0.98 * rate else f"NOT sustained, {answered:,.0f}/s answered; "
    console.print(
        f"{what}, {rate:,.0f}/s: {kept}p50 {statistics.median(f['p50_ms'] for f in figures):.2f} ms, p99 "
        f"{max(f['p99_ms'] for f in figures):.2f} ms, longest {max(f['max_ms'] for f in figures):,.1f} ms, "
        f"{failures} of {sum(f['asked'] for f in figures):,} failed {', '.join(kinds)}, "
        f"{sum(f['later_than_1_s'] for f in figures)} took more than 1 s; load {os.getloadavg()[0]:.1f}{more}"
    )


def features(arguments: argparse.Namespace) -> None:
    """Measure requests of 50 features at fixed rates: quiet, during a stream, during a kill, and from Ray Serve."""
    from ray_statestore import Feature, FeatureView, QueryableStateClient, declare_feature_view
    from spark_bridge.session.current import current_cluster

    keys, rates, seconds = arguments.keys, arguments.rates, arguments.seconds
    columns = ("user", "amount", "ts", "concat('place ', user) as place")
    console.print(f"Load before: {os.getloadavg()[0]:.1f}")
    with ExitStack() as ended:
        stream = running_stream(keys, arguments.partitions, fifty_features, columns)
        query, inbox = ended.enter_context(stream)
        names = list(fifty_features())
        declare_feature_view(FeatureView(VIEW, entity="user", features=[Feature(name, OPERATOR) for name in names]))
        address = address_for_clients()
        with QueryableStateClient.connect() as client:
            rows = client.features(VIEW, list(range(keys))).to_arrow().select(names).to_pylist()
        port = ended.enter_context(running_redis(keys, lambda user: (features_key(user), rows[user])))
        addresses = {"ours": address, "redis": str(port), "nothing": ""}

        def turn_of(
            contestant: str, rate: float, seconds: float, during: Callable[[], None] = lambda: None
        ) -> list[dict[str, Any]]:
            count = max(1, round(rate / arguments.per_client))
            at = addresses[contestant]
            with clients(contestant, "features", at, count, seconds, keys, rate / count) as readers:
                begin(readers)
                during()
                return [json.loads(heard(reader)) for reader in readers]

        def kill() -> None:
            time.sleep(seconds / 4)
            os.kill(int(current_cluster().describe_hosts()[1]["pid"]), signal.SIGKILL)

        with Batches(query, inbox, keys, arguments.rows, 0.0):
            time.sleep(arguments.warm_up)  # Java compiles the first batches for long
        for turn in range(arguments.rounds):
            for rate in rates:
                for contestant in sorted(addresses, reverse=bool(turn % 2)):
                    open_loop_row(f"{contestant}, quiet", rate, turn_of(contestant, rate, seconds))
                    with Batches(query, inbox, keys, arguments.rows, arguments.every) as batches:
                        figures = turn_of(contestant, rate, seconds)
                    more = f"; {len(batches.seconds)} batches of {statistics.median(batches.seconds):.2f} s"
                    open_loop_row(f"{contestant}, during a stream", rate, figures, more)
        for rate in rates[:2]:
            with Batches(query, inbox, keys, arguments.rows, arguments.every) as batches:
                figures = turn_of("ours", rate, 2 * seconds, kill)
            open_loop_row("a host is killed", rate, figures, f"; longest batch {max(batches.seconds):.1f} s")
            time.sleep(5)
        from_serve(arguments, os.environ["STATESTORE_TOKEN"])


def from_serve(arguments: argparse.Namespace, token: str) -> None:
    """Measure the requests of two replicas of Ray Serve."""
    from ray import serve

    @serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 0})
    class Replica:
        async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
            from spark_bridge import AsyncQueryableStateClient

            self.client = await AsyncQueryableStateClient.connect(token=token)
            self.replica = serve.get_replica_context().replica_id.unique_id

        async def ask(self, rate: float, seconds: float, keys: int) -> tuple[str, dict[str, Any]]:
            call, rng = features_of(self.client), random.Random(self.replica)
            await open_loop(call, min(rate, 200.0), 0.5, keys, rng)
            return self.replica, await open_loop(call, rate, seconds, keys, rng)

    serve.start(proxy_location="Disabled")
    try:
        handle = serve.run(Replica.options(max_ongoing_requests=1).bind(), name="features", route_prefix=None)
        for rate in arguments.rates:
            asked = [handle.ask.remote(rate / 2, arguments.seconds, arguments.keys) for _ in range(2)]
            answers = dict(answer.result() for answer in asked)
            assert len(answers) == 2, "both turns were of one replica"
            open_loop_row("from two replicas of Ray Serve", rate, list(answers.values()))
    finally:
        serve.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("beside-stream", "scan", "features"))
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant")
    parser.add_argument("--batches", type=int, default=8, help="of a turn of beside-stream")
    parser.add_argument("--pace", type=float, default=200.0, help="lookups a second during the stream")
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 1000.0, 5000.0], help="requests a second")
    parser.add_argument("--per-client", type=float, default=2500.0, help="of these, at most so many of one client")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a turn of features")
    parser.add_argument("--rows", type=int, default=10_000, help="of a batch during a turn of features")
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds of batches before the turns of features")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between the begins of two such batches")
    arguments = parser.parse_args()
    {"beside-stream": beside_stream, "scan": scan, "features": features}[arguments.what](arguments)


if __name__ == "__main__":
    main()
