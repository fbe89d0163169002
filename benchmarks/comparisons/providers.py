"""The providers alone, compared with raw rocksdict and the state of Quix Streams, and the eviction of rows of joins."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from suite.machine import directory
from suite.model import Case, Comparison, Contestant, Measured, Size, T, Target
from suite.runner import EnvironmentMissingError, Steps, made_environment

QUIX = "Quix Streams"
QUIX_VERSION = "quixstreams==3.28.1"
QUIX_REQUIREMENTS = f"{QUIX_VERSION}\nredis>=5\n"
QUIX_ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-quix"


def _contestants(documented: dict[str, Any]) -> dict[str, Contestant]:
    settings = {name: str(value) for name, value in documented.items()}
    arrow, lists = "Arrow arrays to bytes and back", "lists of bytes, ready before"
    return {
        "rocksdb provider": Contestant("RocksDBStateStoreProvider", {}, True),
        "file provider": Contestant("FileStateStoreProvider", {}, True),
        "raw, Arrow": Contestant(f"rocksdict, raw_mode, as written; {arrow}", settings),
        "raw, lists": Contestant(f"the same; {lists}", settings),
        "raw flushed, Arrow": Contestant(f"rocksdict with its memory table flushed; {arrow}", settings),
        "raw flushed, lists": Contestant(f"the same; {lists}", settings),
        "raw synced, Arrow": Contestant(f"one write batch, its log synced as our commits are; {arrow}", settings),
        "raw synced, lists": Contestant(f"the same; {lists}", settings),
        "raw not synced, lists": Contestant(f"its log not synced; {lists}", settings),
        QUIX: Contestant(
            "set_bytes and get_bytes in a transaction, without a changelog topic; not synced", {QUIX_VERSION: ""}
        ),
    }


def run(size: Size, steps: Steps) -> Measured:
    import numpy as np
    import store

    count, rng = size["keys"], np.random.default_rng(20130101)
    measured = Measured()

    def in_turns(what: str, contestants: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
        def take(name: str) -> T:
            gc.collect()
            return contestants[name]()

        steps.expect(len(contestants) * size["turns"])
        return steps.take_turns(what, contestants, size["turns"], take)

    def add(name: str, seconds: Mapping[str, list[float]]) -> None:
        measured.cases.append(Case(name, "ms", {who: [[s * 1e3] for s in its] for who, its in seconds.items()}))

    with directory() as root:
        held = store.Loaded(root / "held", count, rng)
        values = store.random_values(count, rng)
        try:
            columns = [held.keys, held.values, values]
            with _quix(root, columns, measured, steps) if size["quix"] else nullcontext() as quix:
                getters, putters = store.getters(held), store.putters(root / "put", held.keys, [held.values, values])
                if quix is not None:
                    quix("fill 0")
                    getters[QUIX] = lambda: quix("get")
                    # All in one transaction into an empty store; "get" has checked what "fill" writes so.
                    putters[QUIX] = lambda: [quix("put 0")]
                add(f"bulk get of {count:,} sorted keys", in_turns("bulk get", getters))
                add("full scan in key order", in_turns("full scan", store.scanners(held)))
                puts = in_turns("bulk put", putters)
                for i, case in enumerate(store.PUTS):
                    its = {name: [turn[i] for turn in turns] for name, turns in puts.items() if i < len(turns[0])}
                    add(f"bulk put and commit, {case}", its)
        finally:
            held.close()
    used = {name for case in measured.cases for name in case.turns}
    measured.contestants |= {n: c for n, c in _contestants(store.DOCUMENTED).items() if n in used}
    measured.notes.append(
        "8-byte keys, 24-byte values. Results of all were compared before they were timed, and puts after each turn. A "
        "commit of ours is durable: its changelog is synced."
    )
    return measured


@contextmanager
def _quix(root: Path, columns: list[Any], measured: Measured, steps: Steps) -> Iterator[Callable[[str], float] | None]:
    """Give a process that takes commands on the state of Quix Streams; None, and a note why, if it cannot be made."""
    steps.now(f"making {QUIX_ENVIRONMENT.name} with {QUIX_VERSION}")
    try:
        python = made_environment(QUIX_ENVIRONMENT, QUIX_REQUIREMENTS)
    except EnvironmentMissingError as error:
        measured.notes.append(f"{QUIX} is left out: {error}")
        yield None
        return
    pairs = root / "pairs"
    pairs.write_bytes(b"".join(_bytes(column) for column in columns))
    expected = hashlib.sha256(_bytes(columns[1])).hexdigest()
    script = Path(__file__).resolve().parents[1] / "quix_state.py"
    command = [str(python), "-W", "ignore", str(script), str(pairs), str(root / "quix")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None

    def tell(line: str) -> float:
        assert process.stdin is not None and process.stdout is not None
        print(line, file=process.stdin, flush=True)
        answer = process.stdout.readline().split()
        if not answer:
            raise RuntimeError(f"{QUIX} has ended at {line!r}; see its output above.")
        if line == "get" and answer[1] != expected:
            raise AssertionError(f"What {QUIX} has is not what it was given.")
        return float(answer[0])

    try:
        (root / "quix").mkdir()
        measured.notes.append(
            f"{QUIX} ({QUIX_VERSION}) runs in a separate environment, for orientation: it is made for single keys, "
            "not bulk."
        )
        yield tell
    finally:
        process.stdin.close()
        process.wait(60)


def _bytes(column: Any) -> bytes:
    return b"".join(column.to_pylist())


PROVIDERS = Comparison(
    name="provider",
    title="Providers alone and raw rocksdict",
    about="One partition's state in one process, without Spark and Ray: bulk reads and scans of all keys, and bulk "
    "puts with a durable commit.",
    run=run,
    sizes={"full": dict(keys=1_000_000, turns=5, quix=True), "smoke": dict(keys=50_000, turns=5, quix=False)},
    minutes={"full": 15, "smoke": 6},
    targets=(
        Target.times(
            "`rocksdb` provider, put with changelog, against raw rocksdict that syncs its log",
            *("bulk put and commit, empty state", "rocksdb provider", 0.8, "raw synced, lists"),
        ),
        Target.times("`rocksdb` provider, scan", "full scan in key order", "rocksdb provider", 0.9, "raw, lists"),
    ),
)

# -- the cost of a batch when a join's watermark removes some of many waiting rows; no cluster

FILL_ROWS = 500_000
GROUPS = 1024
ROW_US = 100
"""Event time between two rows, so that 10,000 rows are a second."""
START_US = 1_700_000_000_000_000


class Buffered:
    """A left join whose left rows wait, each of another key; rows have numbers, which say key and time."""

    def __init__(self, backend: str, root: Path) -> None:
        import pyarrow as pa

        from backends import FileStateStoreProvider, RocksDBStateStoreProvider, StateStoreConf, StateStoreId
        from spark_bridge.operators.join_sides import Bounds
        from spark_bridge.operators.join_task import join_logic
        from spark_bridge.task.state_task import EventTime

        kind = pa.timestamp("us", "UTC")
        key = pa.schema([("k", pa.int64())])
        sides = (pa.schema([("lt", kind), ("a", pa.int64())]), pa.schema([("rt", kind), ("b", pa.int64())]))
        left, right = EventTime("lt"), EventTime("rt")
        output = pa.schema([*key, *sides[0], *sides[1]])
        self.logic = join_logic(key, sides, "left", Bounds(left, right, left, right, 0, 0), output)
        provider = {"rocksdb": RocksDBStateStoreProvider, "file": FileStateStoreProvider}[backend]
        conf = StateStoreConf(provider=backend, fsync=False, track_total_number_of_rows=False)
        self.provider = provider(StateStoreId(str(root), "waiting", 0), conf)
        self.held = self.gone = self.watermark_ms = 0

    def batch(self, new: int, leaves: int) -> float:
        """Add so many rows and let the watermark pass so many; return the seconds, with the commit.

        Raises ``AssertionError`` unless the rows that leave come without a match.
        """
        import numpy as np
        import pyarrow as pa

        from coordinator_actor.messages import BatchTimes
        from spark_bridge.operators.join_sides import LEFT_ROW, SIDE, slot_name
        from spark_bridge.task.executor import StepTimer

        numbers = np.arange(self.held, self.held + new)
        keys = (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
        columns: dict[str, Any] = {SIDE: np.full(new, LEFT_ROW, np.int8), "k": keys}
        for i, kind in enumerate(self.logic.slots):
            is_time = pa.types.is_timestamp(kind)
            columns[slot_name(i)] = pa.array(START_US + numbers * ROW_US if is_time else numbers).cast(kind)
        rows = pa.record_batch(columns)
        self.held, self.gone = self.held + new, self.gone + leaves
        # A row is done once the watermark is a millisecond behind its time.
        last = (START_US + (self.gone - 1) * ROW_US) // 1000 + 2 if self.gone else 0
        times = BatchTimes(0, last, self.watermark_ms)
        self.watermark_ms = last
        started = time.perf_counter()
        store = _as_hosts(self.provider, self.logic.schema, times)
        found = sum(b.num_rows for b in self.logic.process([rows] if new else [], store, StepTimer()))
        seconds = time.perf_counter() - started
        assert abs(found - leaves) <= 2 * 1000 // ROW_US, f"{found:,} rows came, not about {leaves:,}"
        return seconds


def _as_hosts(provider: Any, schema: Any, times: Any) -> Any:
    """Return the state of a batch, whose ranges are scanned as hosts scan them."""
    from spark_bridge.stateful.testing import LocalStateAccess

    class Store(LocalStateAccess):
        def scan(self, ranges: Any, column_family: str = "default", limit: int | None = None) -> Any:
            assert limit is None
            return provider.main.reads.scan_in_turn(ranges, self.batch_id, column_family) if self.batch_id else iter(())

    return Store(provider, schema, times, (0, GROUPS), GROUPS)


def run_eviction(size: Size, steps: Steps) -> Measured:
    """Fill both backends to one size after another, and remove some of the rows in turns."""
    sizes, leaves = sorted(size["rows"]), size["leave"]
    measured = Measured({name: Contestant(f"backend `{name}`", {}, True) for name in size["contestants"]})
    measured.notes.append(
        f"A batch without new rows, whose watermark passes {leaves:,} rows of a left join: they are found by time, "
        "read, removed and given without a match. Each is of another key. One partition, on a local disk, no fsync."
    )
    with directory() as root:
        buffered = {name: Buffered(name, root / name) for name in size["contestants"]}
        steps.expect(len(buffered) * len(sizes) * (size["turns"] + 1))
        for count in sizes:
            for name, one in buffered.items():
                steps.now(f"{count:,} rows: filling {name}")
                wanted = one.gone + count + leaves * (size["turns"] + 1) * size["batches"]
                while one.held < wanted:
                    one.batch(min(FILL_ROWS, wanted - one.held), 0)
                for _ in range(size["batches"]):
                    one.batch(0, leaves)
                steps.advance()

            def take(name: str) -> list[float]:
                return [buffered[name].batch(0, leaves) for _ in range(size["batches"])]

            turns = steps.take_turns(f"{count:,} rows", buffered, size["turns"], take)
            measured.cases.append(Case(f"{count:,} rows wait", "s a batch", turns, x=count))
        for one in buffered.values():
            one.provider.close()
    return measured


EVICTION = Comparison(
    name="eviction",
    title="Joins: batch time as more rows wait",
    about="Rows of a join wait for the watermark, which removes a fixed number in each batch.",
    run=run_eviction,
    sizes={
        "full": dict(rows=[10**6, 3 * 10**6, 10**7], leave=10_000, contestants=["rocksdb", "file"], turns=3, batches=5),
        "smoke": dict(rows=[20_000, 100_000], leave=2_000, contestants=["rocksdb", "file"], turns=3, batches=2),
    },
    minutes={"full": 40, "smoke": 3},
    targets=tuple(
        Target(
            f"eviction from 10^6 to 10^7 rows, {name}",
            *("10,000,000 rows wait", name, 1.3, "growth"),
            since="1,000,000 rows wait",
        )
        for name in ("rocksdb", "file")
    ),
    picture="lines",
    x_label="rows that wait",
)
COMPARISONS = (EVICTION, PROVIDERS)
