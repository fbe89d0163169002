"""The cost of a batch when a join's watermark removes some of many waiting rows; no cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from suite.comparison import Comparison, Measured
from suite.model import Case, Contestant, Size
from suite.progress import Steps
from suite.ratios import Target

from comparisons.streams import directory

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


def run(size: Size, steps: Steps) -> Measured:
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
            turns: dict[str, list[list[float]]] = {name: [] for name in buffered}
            names = list(buffered)
            for turn in range(size["turns"]):
                for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                    steps.now(f"{count:,} rows: turn {turn + 1} of {size['turns']}: {name}")
                    turns[name].append([buffered[name].batch(0, leaves) for _ in range(size["batches"])])
                    steps.advance()
            measured.cases.append(Case(f"{count:,} rows wait", "s a batch", turns, x=count))
        for one in buffered.values():
            one.provider.close()
    return measured


COMPARISONS = (
    Comparison(
        name="eviction",
        title="Joins: batch time as more rows wait",
        about="Rows of a join wait for the watermark, which removes a fixed number in each batch.",
        run=run,
        sizes={
            "full": {
                "rows": [1_000_000, 3_000_000, 10_000_000],
                "leave": 10_000,
                "contestants": ["rocksdb", "file"],
                "turns": 3,
                "batches": 5,
            },
            "smoke": {
                "rows": [20_000, 100_000],
                "leave": 2_000,
                "contestants": ["rocksdb", "file"],
                "turns": 3,
                "batches": 2,
            },
        },
        minutes={"full": 40, "smoke": 3},
        targets=tuple(
            Target(
                f"eviction from 10^6 to 10^7 rows, {name}",
                "10,000,000 rows wait",
                name,
                1.3,
                kind="growth",
                since="1,000,000 rows wait",
            )
            for name in ("rocksdb", "file")
        ),
        picture="lines",
        x_label="rows that wait",
    ),
)
