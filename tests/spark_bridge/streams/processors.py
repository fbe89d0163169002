"""Processors for tests of ``transform_with_state``, and a plain model of their output.

A processor here has no base class: ``based_on`` adds one, so that the same code runs on this package's processor API
and on PySpark's. Its input rows are commands to its state variables and timers (``Command``), and its output rows are
their results. A test is a list of commands and expected results.

Streams of commands, and the answers of a processor to them.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, Row
from pyspark.sql.streaming import StreamingQuery

from spark_bridge import StatefulProcessor, transform_with_state, transform_with_state_in_pandas
from tests.spark_bridge.conftest import Stream

# The workers cannot import the tests, so the contents of this module are pickled with the query.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

INPUT = "seq long, k long, op string, g string, n long, s string, ts timestamp"
OUTPUT = "k long, g string, seq long, found string"
BY = ["g", "k"]  # neither first, nor side by side, nor in the order of the columns
INITIAL = "n long, g string, s string, k long"
DELAY_MS = 10_000

COMPOSITE = (
    "n long, s string, many array<struct<n: long, s: string>>, counts map<string, long>, "
    "inner struct<half: double, raw: binary>, amount decimal(12, 2), day date, at timestamp, yes boolean"
)
PLAIN = "n long, s string"
BRIEF_MS, LASTING_MS = 1, 3_600_000
NEVER_MS = 10**10


class Command(NamedTuple):
    """A row of input: ``op`` is ``<variable>.<method>`` of the processor API, ``n`` and ``s`` its arguments."""

    seq: int
    k: int | None
    op: str
    g: str | None
    n: int | None = None
    s: str | None = None
    ts: dt.datetime | None = None


def based_on(base: type, processor: type, **attributes: Any) -> Any:
    """An instance of a processor of this module whose base class is ``base``."""
    made = type(processor.__name__, (processor, base), {})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def composite(n: int | None, s: str | None) -> tuple[Any, ...]:
    """A value of ``COMPOSITE``, with nulls at every depth where an argument is null."""
    if n is None and s is None:
        return (None,) * 9
    small = None if n is None else n % 1000
    return (
        n,
        s,
        [Row(n=n, s=s), Row(n=None, s=None)],
        {} if s is None else {s: n},
        Row(half=None if n is None else n / 2, raw=None if s is None else s.encode()),
        None if small is None else Decimal(small * 25).scaleb(-2),
        None if small is None else dt.date(2020, 1, 1) + dt.timedelta(days=small),
        None if small is None else dt.datetime(2020, 1, 1, 12) + dt.timedelta(days=small, microseconds=7),
        None if n is None else n % 2 == 0,
    )


def shown(found: Any) -> str:
    """Return a result as a string; a long one as its size and digest."""
    text = repr(found)
    return text if len(text) < 400 else f"{text[:40]}... {len(text)} {hashlib.md5(text.encode()).hexdigest()}"


class Commands:
    """Does what its rows say, in the order of ``seq``; rows in, rows out."""

    time_mode = "none"
    fails_once: str | None = None
    """A file; the task that does not find it makes it and fails."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.variables = {
            "v": handle.getValueState("v", COMPOSITE),
            "l": handle.getListState("l", PLAIN),
            "m": handle.getMapState("m", "s string", PLAIN),
        }
        if self.time_mode == "processingTime":
            for name, ttl in (("brief", BRIEF_MS), ("lasting", LASTING_MS)):
                self.variables[f"{name}_v"] = handle.getValueState(f"{name}_v", PLAIN, ttl)
                self.variables[f"{name}_l"] = handle.getListState(f"{name}_l", PLAIN, ttl)
                self.variables[f"{name}_m"] = handle.getMapState(f"{name}_m", "s string", PLAIN, ttlDurationMs=ttl)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        if self.fails_once and not Path(self.fails_once).exists():
            Path(self.fails_once).touch()
            raise RuntimeError("This task was to fail.")
        assert type(key) is tuple and len(key) == 2
        for row in sorted(rows, key=lambda r: r.seq):
            assert (row.g, row.k) == key
            for found in self.do(row.op, row.n, row.s, timerValues):
                # In another order than the output's: rows go by name.
                yield Row(found=f"{row.op} {found}", seq=row.seq, g=row.g, k=row.k)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield Row(found=self.expire(timerValues, expiredTimerInfo), seq=-1, g=key[0], k=key[1])

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        assert (initialState.g, initialState.k) == key
        self.start_with(initialState.n, initialState.s, timerValues)

    def close(self) -> None:
        pass

    def start_with(self, n: int | None, s: str | None, times: Any) -> None:
        self.variables["v"].update(composite(n, s))
        self.variables["l"].appendValue((n, s))
        if self.time_mode != "none" and n is not None:
            self.handle.registerTimer(self._expiry(n, times))

    def expire(self, times: Any, info: Any) -> str:
        value, elements = self.variables["v"], self.variables["l"]
        expiry = info.getExpiryTimeInMs()
        found = shown((value.get(), list(elements.get())))
        listed = expiry in list(self.handle.listTimers())
        if elements.exists():
            value.clear()
        else:
            elements.appendValue((1, "expired"))
        if self.time_mode == "processingTime":
            return f"expired {listed} {found}"
        self.handle.registerTimer(expiry)  # too late: it goes once this returns
        self.handle.registerTimer(times.getCurrentWatermarkInMs() + NEVER_MS)
        return f"expired {expiry} at {times.getCurrentWatermarkInMs()} {listed} {found}"

    def do(self, op: str, n: int | None, s: str | None, times: Any) -> Iterator[str]:
        """Run one command and yield its results."""
        name, method = op.split(".")
        found = self._timer(method, n, times) if name == "timer" else self._variable(name, method, n, s)
        if found is not None:
            yield shown(found)

    def _expiry(self, n: int, times: Any) -> int:
        return n + times.getCurrentProcessingTimeInMs() if self.time_mode == "processingTime" else n

    def _timer(self, method: str, n: int | None, times: Any) -> Any:
        if method == "times":
            watermark, now = times.getCurrentWatermarkInMs(), times.getCurrentProcessingTimeInMs()
            return (watermark, now > 1_600_000_000_000 or now)
        if method == "listTimers":
            timers = sorted(self.handle.listTimers())
            return (len(timers),) if self.time_mode == "processingTime" else timers
        assert n is not None
        getattr(self.handle, method)(self._expiry(n, times))
        return None

    def _variable(self, name: str, method: str, n: int | None, s: str | None) -> Any:
        variable = self.variables[name]
        if method in ("exists", "clear"):
            return getattr(variable, method)()
        if name.endswith("v"):
            if method == "get":
                return (variable.get(),)
            return variable.update(composite(n, s) if name == "v" else (n, s))
        if name.endswith("l"):
            if method == "get":
                return list(variable.get())
            if method == "appendValue":
                return variable.appendValue((n, s))
            if method == "peek":  # two iterators at once, and one begun before something is appended
                first, second = variable.get(), variable.get()
                seen = [next(first, None), next(second, None), next(first, None)]
                variable.appendValue((n, s))
                return seen, list(second), list(first)
            return getattr(variable, method)([(i, s) for i in range(n or 1)])
        if method == "fill":
            for i in range(n or 0):
                variable.updateValue((f"{s}{i}",), (i, None))
            return None
        if method == "updateValue":
            return variable.updateValue((s,), (n, s))
        if method in ("iterator", "keys", "values"):
            return sorted(getattr(variable, method)(), key=repr)
        if method == "getValue":
            found = variable.getValue((s,))
            return (found if found is None else (found.n, found.s),)
        return getattr(variable, method)((s,))


class PandasCommands(Commands):
    """The same with pandas DataFrames."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        frames = pd.concat(list(rows)).sort_values("seq")
        assert all(frames[name].isin([part]).all() or part is None for name, part in zip(BY, key, strict=True))
        for row in frames.itertuples():
            n = None if pd.isna(row.n) else int(row.n)
            results = [f"{row.op} {found}" for found in self.do(row.op, n, row.s, timerValues)]
            if results:
                # Several frames for a key, with columns in another order: they go by name.
                yield pd.DataFrame({"found": results, "seq": row.seq, "g": key[0], "k": [key[1]]})
        yield pd.DataFrame()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        found = self.expire(timerValues, expiredTimerInfo)
        yield pd.DataFrame({"found": [found], "seq": [-1], "g": [key[0]], "k": [key[1]]})

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        for row in initialState.itertuples():
            self.start_with(None if pd.isna(row.n) else int(row.n), row.s, timerValues)


# What they must give -----------------------------------------------------------------------------------------------


@dataclass
class ModelValue:
    """A state variable of one key in a dict: ``None`` is the only key of a value."""

    model: Model
    ttl: int | None
    items: dict[Any, tuple[Any, int | None]] = field(default_factory=dict)

    def live(self) -> dict[Any, Any]:
        now = self.model.now
        return {k: v for k, (v, expiry) in self.items.items() if expiry is None or expiry > now}

    def write(self, key: Any, value: Any) -> None:
        self.items[key] = (value, None if self.ttl is None else self.model.now + self.ttl)

    def exists(self) -> bool:
        return bool(self.live())

    def clear(self) -> None:
        self.items.clear()

    def get(self) -> Any:
        return self.live().get(None)

    def update(self, value: Any) -> None:
        self.write(None, value)


class ModelList(ModelValue):
    def get(self) -> Iterator[Any]:
        return iter(self.live().values())

    def appendValue(self, value: Any) -> None:
        self.write(self.model.next_number(), value)

    def appendList(self, values: Iterable[Any]) -> None:
        for value in values:
            self.appendValue(value)

    def put(self, values: Iterable[Any]) -> None:
        self.clear()
        self.appendList(values)


class ModelMap(ModelValue):
    def getValue(self, key: Any) -> Any:
        found = self.live().get(key)
        return None if found is None else Row(n=found[0], s=found[1])

    def containsKey(self, key: Any) -> bool:
        return key in self.live()

    def updateValue(self, key: Any, value: Any) -> None:
        self.write(key, value)

    def removeKey(self, key: Any) -> None:
        self.items.pop(key, None)

    def iterator(self) -> Iterator[Any]:
        return iter(self.live().items())

    def keys(self) -> Iterator[Any]:
        return iter(self.live())

    def values(self) -> Iterator[Any]:
        return iter(self.live().values())


class Times(NamedTuple):
    now: int
    watermark: int

    def getCurrentProcessingTimeInMs(self) -> int:
        return self.now

    def getCurrentWatermarkInMs(self) -> int:
        return self.watermark


class Expired(NamedTuple):
    expiry: int

    def getExpiryTimeInMs(self) -> int:
        return self.expiry


class Model:
    """The expected output of a stream of ``Commands``, from a handle over dicts, one per key.

    A batch's processing time is its number in steps of a minute: between ``BRIEF_MS`` and ``LASTING_MS``.
    """

    START = 1_700_000_000_000

    def __init__(self, time_mode: str) -> None:
        self.time_mode = time_mode
        self.batch = self.numbers = 0
        self.latest: int | None = None
        self.watermark = self.late_watermark = 0
        self.num_late = 0
        self.keys: dict[Any, tuple[Commands, set[int]]] = {}
        self.timers: set[int] = set()

    @property
    def now(self) -> int:
        return self.START + 60_000 * self.batch

    @property
    def times(self) -> Times:
        return Times(-1, -1) if self.time_mode == "none" else Times(self.now, self.watermark)

    def next_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def getValueState(self, name: str, schema: str, ttlDurationMs: int | None = None) -> ModelValue:
        return ModelValue(self, ttlDurationMs)

    def getListState(self, name: str, schema: str, ttlDurationMs: int | None = None) -> ModelList:
        return ModelList(self, ttlDurationMs)

    def getMapState(self, name: str, key: str, value: str, ttlDurationMs: int | None = None) -> ModelMap:
        return ModelMap(self, ttlDurationMs)

    def registerTimer(self, expiry: int) -> None:
        self.timers.add(expiry)

    def deleteTimer(self, expiry: int) -> None:
        self.timers.discard(expiry)

    def listTimers(self) -> Iterator[int]:
        return iter(sorted(self.timers))

    def processor(self, key: Any) -> Commands:
        """The processor of a key, its timers made the current ones."""
        if key not in self.keys:
            commands = Commands()
            commands.time_mode = self.time_mode
            commands.init(self)
            self.keys[key] = (commands, set())
        commands, self.timers = self.keys[key]
        return commands

    def start_with(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """An initial state, rows of ``INITIAL``."""
        for n, g, s, k in rows:
            self.processor((g, k)).start_with(n, s, self.times)

    def run(self, commands: Sequence[Command]) -> list[tuple[Any, ...]]:
        """One micro-batch with data; its output, sorted, and in ``num_late`` how many rows it dropped."""
        kept = [c for c in commands if not self._late(c)]
        self.num_late = len(commands) - len(kept)
        out: list[Row] = []
        for key in {(c.g, c.k) for c in kept}:
            out += self.processor(key).handleInputRows(key, iter([c for c in kept if (c.g, c.k) == key]), self.times)
        threshold = self.now if self.time_mode == "processingTime" else self.watermark
        for key in [] if self.time_mode == "none" else list(self.keys):
            commands_of_key = self.processor(key)
            for expiry in sorted(t for t in self.timers if t <= threshold):
                out += commands_of_key.handleExpiredTimer(key, self.times, Expired(expiry))
                self.timers.discard(expiry)
        self._advance(commands)
        return ordered((r.k, r.g, r.seq, r.found) for r in out)

    def _late(self, command: Command) -> bool:
        if self.time_mode != "eventTime" or command.ts is None:
            return False
        return milliseconds(command.ts) <= self.late_watermark

    def _advance(self, commands: Sequence[Command]) -> None:
        self.batch += 1
        seen = [milliseconds(c.ts) for c in commands if c.ts is not None]
        self.latest = max([*seen, *([] if self.latest is None else [self.latest])], default=None)
        self.late_watermark = self.watermark
        if self.latest is not None:
            self.watermark = max(self.watermark, self.latest - DELAY_MS)


def milliseconds(time: dt.datetime) -> int:
    return (time - dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)) // dt.timedelta(milliseconds=1)


def at(seconds: float) -> dt.datetime:
    """A time by its seconds since 1970."""
    return dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(seconds=seconds)


def ordered(rows: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return rows as tuples in a canonical order: a micro-batch has no order."""
    return sorted((tuple(r) for r in rows), key=repr)


# Streams ----------------------------------------------------------------------------------------------------------


class Writer:
    """Makes the commands of a batch, numbering them."""

    def __init__(self) -> None:
        self.seq = 0

    def __call__(self, *lines: tuple[Any, ...], ts: dt.datetime | None = None) -> list[Command]:
        """``lines`` are ``(g, k, op)``, ``(g, k, op, n)`` or ``(g, k, op, n, s)``."""
        made = []
        for g, k, op, *arguments in lines:
            n, s = [*arguments, None, None][:2]
            made.append(Command(self.seq, k, op, g, n, s, ts))
            self.seq += 1
        return made


def random_starts(time_mode: str, *, null_keys: bool = True) -> list[tuple[Any, ...]]:
    """An initial state: keys that ``random_batches`` has and has not, twice the same, timers that have expired or not.

    Here it is made when the query starts, in Spark during the first batch: with processing time, nothing may depend
    on the moments between.
    """
    later = 10**9 if time_mode == "processingTime" else 7
    absent = None if null_keys else 99
    return [(later, "a", "x", 1)] * 2 + [(-9, None, "y", -2), (0, "b", "z", 1), (None, "other", "x", absent)]


def random_batches(
    seed: int, time_mode: str, count: int, *, size: int = 120, null_keys: bool = True
) -> list[list[Command]]:
    """Batches of random commands to a dozen keys; their times advance, and some are late, equal to the limit or null.

    The last batch, and the one in the middle, leave nothing to be done by a batch without data: they do not
    advance the watermark, and no timer of theirs expires in the next batch. There a query can be stopped, or
    compared with another one that runs other batches without data.
    """
    rng = random.Random(seed)
    keys = [(g, k) for g in ("a", "b", None) for k in (1, -2, None if null_keys else 0, 2**40)]
    texts = ["x", "y", "z", "", "naïve", None]
    kinds = {"v": "v", "l": "l", "m": "m"}
    if time_mode == "processingTime":
        kinds |= {f"{ttl}_{kind}": kind for ttl in ("brief", "lasting") for kind in "vlm"}
    methods = {
        "v": ["update", "update", "get", "exists", "clear"],
        "l": ["appendValue", "appendValue", "appendList", "put", "get", "peek", "exists", "clear"],
        "m": ["updateValue"] * 3
        + ["fill", "getValue", "containsKey", "removeKey", "iterator", "keys", "values", "exists", "clear"],
    }
    if time_mode != "none":
        kinds["timer"] = "timer"
        methods["timer"] = ["registerTimer"] * 3 + ["deleteTimer", "listTimers", "times"]
    elif seed % 2:
        kinds["timer"] = "timer"
        methods["timer"] = ["times"]

    batches: list[list[Command]] = []
    seq = latest = 0
    limits = [0, 0]  # watermarks of the batch before and of this one
    for number in range(count):
        quiet = number in (count // 2 - 1, count - 1)
        new = latest + 1_000 + rng.randrange(30_000)
        batch = []
        for _ in range(size):
            g, k = rng.choice(keys)
            name = rng.choice(list(kinds))
            method = rng.choice(methods[kinds[name]])
            n: int | None = rng.randrange(1, 90)
            if name == "timer" and time_mode == "eventTime":
                n = rng.choice([limits[1], limits[1] + 1, latest, new - DELAY_MS, new, 0, -5, 10**9 + rng.randrange(5)])
                if quiet:
                    n = rng.choice([limits[1], -7, 10**9 + rng.randrange(9)])
            elif name == "timer":
                n = rng.choice([0, -60_000, 10**9] if quiet else [0, -60_000, 1, 10**9])
            elif method in ("update", "updateValue", "appendValue") and rng.random() < 0.2:
                n = None
            s = rng.choice(texts)
            ms = rng.choice([limits[0], limits[0] + 1, limits[1] + 1, None] + [rng.randrange(latest + 1)] * 3)
            batch.append(Command(seq, k, f"{name}.{method}", g, n, s, None if ms is None else at(ms / 1000)))
            seq += 1
        if not quiet:
            batch[rng.randrange(size)] = batch[0]._replace(seq=seq, ts=at(new / 1000))
            seq += 1
            latest = new
        batches.append(batch)
        limits = [limits[1], max(limits[1], latest - DELAY_MS)]
    return batches


def gather(df: DataFrame, checkpoint: str, output_mode: str = "update") -> tuple[StreamingQuery, dict[int, list[Any]]]:
    """Start a query; what its batches gave, by their number, fills as it runs."""
    found: dict[int, list[Any]] = {}
    query = (
        df.writeStream.outputMode(output_mode)
        .option("checkpointLocation", checkpoint)
        .foreachBatch(lambda batch, number: found.update({number: batch.collect()}))
        .start()
    )
    return query, found


def drain(query: StreamingQuery, checkpoint: str, files: int, timeout: float = 240.0) -> None:
    """Wait until as many files have been processed, one in a batch; raises what the query fails with.

    ``processAllAvailable`` would also wait for a trigger without any data, and a query with timers has few.
    """
    deadline = time.monotonic() + timeout
    while True:
        done = max((int(p.name) for p in Path(checkpoint, "commits").glob("[0-9]*")), default=None)
        if done is not None:
            lines = Path(checkpoint, "offsets", str(done)).read_text().splitlines()[2:]
            if files in [_files_read(json.loads(line)) for line in lines if line.startswith("{")]:
                return
        if (error := query.exception()) is not None:
            raise error
        assert time.monotonic() < deadline, f"{files} files are not processed after {timeout} s: {query.lastProgress}"
        time.sleep(0.05)


def _files_read(offset: dict[str, Any]) -> int | None:
    """Return how many files, or records of a topic with one partition, a source has read; None for ticks."""
    if "logOffset" in offset:
        return int(offset["logOffset"]) + 1
    partitions = [ends for ends in offset.values() if isinstance(ends, dict)]
    return int(partitions[0]["0"]) if partitions else None


def native_of(processor: type) -> Any:
    """The processor as one of Spark's own class."""
    from pyspark.sql.streaming import StatefulProcessor as Native

    methods = {name: method for name, method in vars(processor).items() if not name.startswith("__")}
    return type(f"Native{processor.__name__}", (Native,), methods)()


def commands_on(stream: Stream, processor: type = Commands, time_mode: str = "none", **options: Any) -> DataFrame:
    """A stream of commands, watermark included, through their processor."""
    transform = transform_with_state_in_pandas if issubclass(processor, PandasCommands) else transform_with_state
    return transform(
        stream.read().withWatermark("ts", f"{DELAY_MS} milliseconds"),
        BY,
        based_on(StatefulProcessor, processor, time_mode=time_mode),
        OUTPUT,
        operator="commands",
        time_mode=time_mode,
        **{"num_partitions": 3, **options},
    )


def process_all(df: DataFrame, stream: Stream) -> list[list[tuple[Any, ...]]]:
    """Run until all is processed, and stop; the output of each batch that gave some."""
    query, found = gather(df, stream.checkpoint)
    drain(query, stream.checkpoint, stream.files)
    query.stop()
    return [ordered(found[n]) for n in sorted(found) if found[n]]


def error_of(df: DataFrame, stream: Stream) -> str:
    """Run a query and return the error that ends it."""
    with pytest.raises(Exception) as raised:
        process_all(df, stream)
    return str(raised.value)


def answers(rows: list[tuple[Any, ...]]) -> list[tuple[int, str]]:
    return sorted((seq, found) for _, _, seq, found in rows)
