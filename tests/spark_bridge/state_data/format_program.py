"""The program that stored the state in ``tests/fixtures/format-1``, its input, and a plain model of its state.

``tests/fixtures/format-1/make.py`` ran this program once, and tests continue from the stored state. The behaviour of
the program must not change, or the fixtures would no longer match it.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

import spark_bridge
from spark_bridge import StatefulProcessor, aggregate, state_changes_table, state_table, transform_with_state
from spark_bridge import functions as S

# The workers cannot import the tests, so the contents of this module are pickled with the query.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# The function, also while a module of the package has the same name.
_found: Any = spark_bridge.deduplicate
deduplicate = getattr(_found, "deduplicate", _found)

FIRST_BATCHES = 4
"""So many batches of the fixtures are of the program's first form; the others and all that follow are of the second."""
STORED_BATCHES = 5
"""So many batches the fixtures have."""

SCHEMA = "seq long, k string, g int, v double, ts timestamp"
SECOND = 1_000_000
BASE_US = 1_704_067_200 * SECOND  # 2024-01-01, a multiple of all windows
STEP_US = 20 * SECOND
DELAY_US = 10 * SECOND
WINDOW_US = 30 * SECOND
GAP_US = 5 * SECOND
WITHIN_US = 30 * SECOND
REMIND_US = 25 * SECOND
TTL_MS = 100 * 365 * 86_400_000
LATER_MS = 4_000_000_000_000
MANY = 9
"""The value of ``g`` that makes a list of several chunks and a large map of a key."""
ELEMENTS, ENTRIES = 270, 70


class Row(NamedTuple):
    """A row of input; ``ts`` in microseconds since 1970."""

    seq: int
    k: str | None
    g: int
    v: float | None
    ts: int


# The input ---------------------------------------------------------------------------------------------------------


def input_rows(batch: int) -> list[Row]:
    """Return the rows of one batch. Some sequence numbers repeat in the next batch; later batches have a late row."""
    start = BASE_US + batch * STEP_US
    rows = []
    for j in range(12):
        k = ("a", "b", "é", None)[(j * j + batch) % 4]
        v = None if j == 7 else ((batch * 7 + j * 3) % 10) / 2
        rows.append(Row(batch * 8 + j, k, (batch * j) % 3, v, start + j * 1_500_000 + 250_000))
    if batch in (1, 4, 5):
        rows.append(Row(900 + batch, "many", MANY, 1.0, start + 125_000))
    if batch >= 3:
        rows.append(Row(950 + batch, "a", 1, 64.0, start - 100 * SECOND))
    return rows


def write_input(directory: Path, batch: int) -> None:
    """Write the file of one batch; files are read in the order of their batches."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for row in input_rows(batch):
        ts = dt.datetime.fromtimestamp(row.ts / SECOND, dt.timezone.utc).isoformat()
        lines.append(json.dumps({**row._asdict(), "ts": ts}))
    target = directory / f"{batch:05d}.json"
    draft = directory.with_name(f".{batch:05d}.json")
    draft.write_text("\n".join(lines) + "\n")
    draft.rename(target)
    moment = 1_704_067_200 + batch * 10
    os.utime(target, (moment, moment))


# The program -------------------------------------------------------------------------------------------------------


class Visits(StatefulProcessor):
    """Variables of every kind, two of them with a TTL, and timers that are far from due."""

    is_first = False
    """Whether the schema of ``last`` is the first one."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.last = handle.getValueState("last", "n int" if self.is_first else "n long, note string")
        self.seen = handle.getListState("seen", "seq long, v double")
        self.pages = handle.getMapState("pages", "g int", "n long, at timestamp")
        self.recent = handle.getValueState("recent", "seq long", TTL_MS)
        self.tags = handle.getMapState("tags", "tag string", "n long", TTL_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        of_key = sorted(rows, key=lambda row: row.seq)
        last = self.last.get()
        n = (0 if last is None else last[0]) + len(of_key)
        self.last.update((n,) if self.is_first else (n, f"{n} rows"))
        for row in of_key:
            self.seen.appendValue((row.seq, row.v))
            page = self.pages.getValue((row.g,))
            self.pages.updateValue((row.g,), (1 if page is None else page[0] + 1, row.ts))
            if row.v is None:
                self.pages.removeKey((row.g,))
            if row.g == MANY:
                self.seen.appendList([(i, i / 2) for i in range(ELEMENTS)])
                for i in range(ENTRIES):
                    self.pages.updateValue((100 + i,), (i, row.ts))
            self.tags.updateValue((f"tag{row.seq % 3}",), (row.seq,))
            self.recent.update((row.seq,))
        self.handle.registerTimer(LATER_MS + n)
        if n > len(of_key):
            self.handle.deleteTimer(LATER_MS + n - len(of_key))
        yield (f"{key[0]}: {n}",)


class Reminders(StatefulProcessor):
    """Event-time timers; some fire in each batch."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.fired = handle.getValueState("fired", "n long, at_ms long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            # Python may take the zone of the machine for a timestamp without one, as PySpark does.
            self.handle.registerTimer(round(row.ts.timestamp() * 1000) + REMIND_US // 1000)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        fired = self.fired.get()
        n = 1 if fired is None else fired[0] + 1
        self.fired.update((n, expiredTimerInfo.getExpiryTimeInMs()))
        yield (f"{key[0]}: {n}",)


def program(rows: DataFrame, *, is_first: bool = False) -> DataFrame:
    """Six operators side by side over the rows. The first form differs in partitions and in one variable's schema."""
    # No two operators have the same keys and as many partitions: Spark would shuffle the rows once for both, and the
    # watermark of the one that then sees no rows would stand still, and with it that of the query.
    rows = rows.withWatermark("ts", "10 seconds")
    totals = aggregate(
        rows,
        by=["k", "g"],
        operator="totals",
        num_partitions=1 if is_first else 2,
        n=S.count(),
        total=S.sum("v"),
        low=S.min("v"),
        top=S.max("v"),
        mean=S.mean("v"),
        spread=S.stddev_samp("v"),
        latest=S.last("v", by="seq"),
        all=S.collect_list("v", by="seq"),
        different=S.collect_set("v"),
        best=S.top_k("seq", 2),
        estimated=S.approx_count_distinct("seq"),
    )
    windows = aggregate(
        rows,
        by=["k", S.window("ts", "30 seconds")],
        operator="windows",
        num_partitions=1,
        n=S.count(),
        total=S.sum("v"),
    )
    sessions = aggregate(
        rows,
        by=["k", S.session_window("ts", "5 seconds")],
        operator="sessions",
        output_mode="append",
        num_partitions=1,
        n=S.count(),
        top=S.max("seq"),
    )
    firsts = deduplicate(rows, by="seq", operator="firsts", within="30 seconds", num_partitions=2)
    processor = Visits()
    processor.is_first = is_first
    visits = transform_with_state(
        rows, "k", processor, "text string", operator="visits", time_mode="processingTime", num_partitions=1
    )
    reminders = transform_with_state(
        rows, "k", Reminders(), "text string", operator="reminders", time_mode="eventTime", num_partitions=2
    )
    operators = (totals, windows, sessions, firsts, visits, reminders)
    # Each operator needs a separate stage: a union renumbers the partitions of an operator in its own stage.
    texts = [df.select(F.to_json(F.struct(*df.columns)).alias("text")).repartition(1) for df in operators]
    return functools.reduce(DataFrame.union, texts)


def start(
    spark: SparkSession,
    directory: Path,
    checkpoint: str,
    *,
    is_first: bool = False,
    sink: Callable[[DataFrame, int], None] = lambda batch, n: batch.collect() and None,
    **trigger: Any,
) -> StreamingQuery:
    """Start the program: a file of ``directory`` is a batch."""
    rows = (
        spark.readStream.schema(SCHEMA)
        .option("maxFilesPerTrigger", 1)
        .option("maxFileAge", "36500d")
        .json(str(directory))
    )
    writer = program(rows, is_first=is_first).writeStream.outputMode("append").foreachBatch(sink)
    return writer.option("checkpointLocation", checkpoint).trigger(**trigger).start()


# What its state must be --------------------------------------------------------------------------------------------

VARIABLES: dict[str, tuple[str | None, ...]] = {
    "totals": (None,),
    "windows": (None,),
    "sessions": (None,),
    "firsts": (None,),
    "visits": ("last", "seen", "pages", "recent", "tags", "timers"),
    "reminders": ("fired", "timers"),
}

Rows = list[list[Any]]
State = dict[str, Rows]
"""The rows of each state variable, called ``<operator>.<variable>``, as ``rows_of`` gives them."""


def named_variables() -> dict[str, tuple[str, str | None]]:
    """Operator and variable by the names of ``State``."""
    return {f"{o}.{v}" if v else o: (o, v) for o, names in VARIABLES.items() for v in names}


def read_tables(checkpoint: str, version: int | None = None) -> dict[str, pa.Table]:
    """The table of each state variable of a checkpoint, read from storage without Spark."""
    return {name: state_table(checkpoint, o, v, version) for name, (o, v) in named_variables().items()}


def read(checkpoint: str, version: int | None = None) -> State:
    """The whole state of a checkpoint, read from storage without Spark."""
    return {name: rows_of(table) for name, table in read_tables(checkpoint, version).items()}


def columns_of(table: pa.Table) -> dict[str, str]:
    """The columns of a table and their types."""
    return {f.name: str(f.type) for f in table.schema}


def changes(
    checkpoint: str, name: str
) -> list[tuple[int, str, list[Any], dict[str, Any] | None, dict[str, Any] | None]]:
    """All changes of a variable since version 0, read without Spark: version, kind, key, value before and after."""
    operator, variable = named_variables()[name]
    table = state_changes_table(checkpoint, operator, variable, from_version=0)
    known = ("version", "change_type", "before", "after", "key_group", "partition_id")
    keys = [n for n in table.column_names if n not in known]
    return [
        (
            row["version"],
            row["change_type"],
            [_plain(row[n]) for n in keys],
            _plain(row.get("before")),
            _plain(row.get("after")),
        )
        for row in table.to_pylist()
    ]


def rows_of(table: pa.Table) -> Rows:
    """Return rows in a canonical order, in JSON form (times in microseconds), without key group and partition."""
    names = [n for n in table.column_names if n not in ("key_group", "partition_id")]
    return in_order([[_plain(row[n]) for n in names] for row in table.to_pylist()])


def in_order(rows: Rows) -> Rows:
    """The rows sorted."""
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


def _plain(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        at = value if value.tzinfo else value.replace(tzinfo=dt.timezone.utc)
        return (at - dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)) // dt.timedelta(microseconds=1)
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, dict):
        return {n: _plain(v) for n, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value


@dataclass
class Visited:
    """The state of one key of ``Visits``."""

    n: int = 0
    has_note: bool = False
    seen: list[tuple[int, float | None]] = field(default_factory=list)
    pages: dict[int, tuple[int, int]] = field(default_factory=dict)
    recent: tuple[int, int] = (0, 0)
    tags: dict[str, tuple[int, int]] = field(default_factory=dict)


class Model:
    """The state after each batch, computed row by row."""

    def __init__(self) -> None:
        self.batches = 0
        self.watermarks = [0]
        self.rows: dict[tuple[str | None, int], list[Row]] = defaultdict(list)
        self.windows: dict[tuple[str | None, int], list[Row]] = defaultdict(list)
        self.sessions: list[tuple[str | None, list[Row]]] = []
        self.firsts: dict[int, int] = {}
        self.visits: dict[str | None, Visited] = defaultdict(Visited)
        self.fired: dict[str | None, tuple[int, int]] = {}
        self.reminders: set[tuple[str | None, int]] = set()

    @classmethod
    def after(cls, times_ms: Sequence[int]) -> Model:
        """After as many batches, with their processing times."""
        model = cls()
        for time_ms in times_ms:
            model.run(time_ms)
        return model

    def run(self, time_ms: int) -> None:
        """The next batch."""
        rows = input_rows(self.batches)
        late, now = self.watermarks[max(0, self.batches - 1)], self.watermarks[self.batches]
        for row in rows:
            self.rows[row.k, row.g].append(row)
        self._windows(rows, late, now)
        self._sessions(rows, late, now)
        self._firsts(rows, late, now)
        self._visits(rows, time_ms)
        self._reminders(rows, late, now)
        self.watermarks.append(max(now, max(r.ts for r in rows) - DELAY_US))
        self.batches += 1

    def _windows(self, rows: list[Row], late: int, now: int) -> None:
        for row in rows:
            begin = row.ts // WINDOW_US * WINDOW_US
            if begin + WINDOW_US > late:
                self.windows[row.k, begin].append(row)
        for key in [key for key in self.windows if key[1] + WINDOW_US <= now]:
            del self.windows[key]

    def _sessions(self, rows: list[Row], late: int, now: int) -> None:
        for row in rows:
            if row.ts + GAP_US <= late:
                continue
            joined = [row]
            for k, of_session in list(self.sessions):
                begin, end = session_bounds(of_session)
                if k == row.k and row.ts <= end and row.ts + GAP_US >= begin:
                    joined += of_session
                    self.sessions.remove((k, of_session))
            self.sessions.append((row.k, joined))
        self.sessions = [(k, held) for k, held in self.sessions if session_bounds(held)[1] > now]

    def _firsts(self, rows: list[Row], late: int, now: int) -> None:
        for row in sorted(rows, key=lambda r: r.ts):
            if row.ts > late:
                self.firsts.setdefault(row.seq, row.ts + WITHIN_US)
        self.firsts = {seq: expiry for seq, expiry in self.firsts.items() if expiry > now}

    def _visits(self, rows: list[Row], time_ms: int) -> None:
        for row in sorted(rows):
            of_key, expiry = self.visits[row.k], time_ms + TTL_MS
            of_key.n += 1
            of_key.has_note = self.batches >= FIRST_BATCHES
            of_key.seen.append((row.seq, row.v))
            of_key.pages[row.g] = (of_key.pages.get(row.g, (0, 0))[0] + 1, row.ts)
            if row.v is None:
                del of_key.pages[row.g]
            if row.g == MANY:
                of_key.seen += [(i, i / 2) for i in range(ELEMENTS)]
                of_key.pages.update({100 + i: (i, row.ts) for i in range(ENTRIES)})
            of_key.tags[f"tag{row.seq % 3}"] = (row.seq, expiry)
            of_key.recent = (row.seq, expiry)

    def _reminders(self, rows: list[Row], late: int, now: int) -> None:
        self.reminders |= {(r.k, (r.ts + REMIND_US) // 1000) for r in rows if r.ts > late}
        for k, at_ms in sorted((r for r in self.reminders if r[1] * 1000 <= now), key=lambda r: r[1]):
            self.fired[k] = (self.fired.get(k, (0, 0))[0] + 1, at_ms)
            self.reminders.remove((k, at_ms))

    def _notes(self, of: Visited) -> list[str | None]:
        """The second field of ``last``, which the first form does not have."""
        return [] if self.batches <= FIRST_BATCHES else [f"{of.n} rows" if of.has_note else None]

    def state(self) -> State:
        """The whole state."""
        visits = sorted(self.visits.items(), key=lambda item: str(item[0]))
        rows: State = {
            "totals": [[k, g, *totals_of(held)] for (k, g), held in self.rows.items()],
            "windows": [
                [k, {"start": at, "end": at + WINDOW_US}, len(held), sum_of(held)]
                for (k, at), held in self.windows.items()
            ],
            "sessions": [
                [k, dict(zip(("start", "end"), session_bounds(held), strict=True)), len(held), max(r.seq for r in held)]
                for k, held in self.sessions
            ],
            "firsts": [[seq, expiry] for seq, expiry in self.firsts.items()],
            "visits.last": [[k, of.n, *notes] for k, of in visits for notes in [self._notes(of)]],
            "visits.seen": [[k, *element] for k, of in visits for element in of.seen],
            "visits.pages": [[k, g, *page] for k, of in visits for g, page in of.pages.items()],
            "visits.recent": [[k, *of.recent] for k, of in visits],
            "visits.tags": [[k, tag, *held] for k, of in visits for tag, held in of.tags.items()],
            "visits.timers": [[k, LATER_MS + of.n] for k, of in visits],
            "reminders.fired": [[k, *held] for k, held in self.fired.items()],
            "reminders.timers": [[k, at_ms] for k, at_ms in self.reminders],
        }
        return {name: in_order(held) for name, held in rows.items()}


def session_bounds(rows: list[Row]) -> tuple[int, int]:
    """When a session begins and ends."""
    return min(r.ts for r in rows), max(r.ts for r in rows) + GAP_US


def sum_of(rows: list[Row]) -> float | None:
    """As SQL sums: null where all are."""
    values = [r.v for r in rows if r.v is not None]
    return sum(values) if values else None


def totals_of(rows: list[Row]) -> list[Any]:
    """The results of the operator ``totals`` for the rows of one key."""
    by_seq = sorted(rows)
    values = [r.v for r in by_seq if r.v is not None]
    return [
        len(rows),
        sum_of(rows),
        min(values, default=None),
        max(values, default=None),
        round(statistics.mean(values), 9) if values else None,
        round(statistics.stdev(values), 9) if len(values) > 1 else None,
        by_seq[-1].v,
        values,
        sorted(set(values)),
        sorted({r.seq for r in rows}, reverse=True)[:2],
        len({r.seq for r in rows}),
    ]


def processing_times(checkpoint: str) -> list[int]:
    """When Spark ran each of the batches of a checkpoint, in ms, as its own log of offsets says."""
    logs = sorted(Path(checkpoint, "offsets").glob("[0-9]*"), key=lambda log: int(log.name))
    return [json.loads(log.read_text().splitlines()[1])["batchTimestampMs"] for log in logs]
