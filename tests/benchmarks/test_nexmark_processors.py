"""The processors of Nexmark's queries, run as tasks do without Spark, give what pandas computes from the same
events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from nexmark import expected
from nexmark.generator import AUCTION, BID, NexmarkConf, batches, bids_of, closing_events

from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.messages import BatchTimes
from spark_bridge import StatefulProcessor
from spark_bridge.stateful.arrow_task import ArrowLogic, Declaring
from spark_bridge.stateful.ddl import struct_of
from spark_bridge.stateful.process_task import ProcessLogic, ProcessorState, TaskInput
from spark_bridge.stateful.state_values import RowCodec
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.state_task import EventTime, Logic
from tests.benchmarks import nexmark_arrow_processors as arrow_processors
from tests.benchmarks import nexmark_processors as processors
from tests.effort import effort, only_thorough
from tests.spark_bridge.operators.operator_runs import OperatorRun

pytestmark = pytest.mark.thorough  # otherwise: make bench-smoke, which compares the results of all contestants

DELAY_MS = 4000
EVENTS, BATCHES = 300, effort(4, 5)
TINY = Limits(memory=20_000, step_rows=30, step_bytes=10_000, fan_in=2)
AUCTIONS_AND_BIDS = (
    "id long, date_time timestamp, item_name string, description string, initial_bid long, reserve long, "
    "expires timestamp, seller long, category long, extra string, bidder long, price long, bid_extra string"
)
BIDS = "auction long, bidder long, price long, channel string, url string, extra string, date_time timestamp, us long"
CONFS = [
    NexmarkConf(event_rate=100, num_in_flight_auctions=20),
    NexmarkConf(seed=1, event_rate=200, out_of_order_group_size=397, num_in_flight_auctions=20),
    NexmarkConf(seed=2, event_rate=50, hot_auction_ratio=1, num_in_flight_auctions=10),
]


def auctions_and_bids(events: pa.RecordBatch, *, in_us: bool) -> pa.RecordBatch:
    """Auctions and bids by the auction's id; a row without ``expires`` is a bid."""
    events = events.filter(pc.is_in(events.column("event_type"), pa.array([AUCTION, BID], pa.int32())))
    auction, bid = (dict(zip((c := events.column(n)).type.names, c.flatten(), strict=True)) for n in ("auction", "bid"))
    columns = {**auction, "bidder": bid["bidder"], "price": bid["price"], "bid_extra": bid["extra"]}
    columns |= {"id": pc.coalesce(auction["id"], bid["auction"]), "date_time": events.column("date_time")}
    if in_us:
        columns |= {"us": _us(columns["date_time"]), "expires_us": _us(columns["expires"])}
    schema = RowCodec(struct_of(AUCTIONS_AND_BIDS + (", us long, expires_us long" if in_us else ""))).schema
    return pa.RecordBatch.from_arrays([columns[n].cast(schema.field(n).type) for n in schema.names], schema=schema)


def bids(events: pa.RecordBatch) -> pa.RecordBatch:
    """The bids, with their times as numbers too."""
    table = bids_of(events)
    schema = RowCodec(struct_of(BIDS)).schema
    (batch,) = table.append_column("us", _us(table["date_time"])).cast(schema).combine_chunks().to_batches()
    return batch


def operator(logic: Logic, declaring: Any, keys: pa.Schema, time_mode: str) -> OperatorRun:
    driver = ProcessorState(keys, time_mode, None)
    declaring.init(driver.handle)
    return OperatorRun(logic, OperatorSchema(driver.declare()), keys.names, num_partitions=3)


def of_rows(
    make: Callable[[Any], Any], rows: str, keys: list[str], output: str, mode: str = "none", **given: Any
) -> OperatorRun:
    key_schema = pa.schema([(key, pa.int64()) for key in keys])
    event_time = EventTime("date_time") if mode == "eventtime" else None
    logic = ProcessLogic(
        make(StatefulProcessor),
        "rows",
        mode,
        TaskInput(struct_of(rows), key_schema, event_time),
        struct_of(output),
        **given,
    )
    return operator(logic, make(StatefulProcessor), key_schema, mode)


def winning_in_rows(limits: Limits) -> OperatorRun:
    rows = AUCTIONS_AND_BIDS + ", us long, expires_us long"
    return of_rows(processors.winning_bid, rows, ["id"], processors.WINNING_BID_OUTPUT, "eventtime", limits=limits)


def winning_in_arrow(limits: Limits) -> OperatorRun:
    keys, struct = pa.schema([("id", pa.int64())]), struct_of(AUCTIONS_AND_BIDS)
    output = struct_of(arrow_processors.WINNING_BID_OUTPUT)
    task_input = TaskInput(struct, keys, EventTime("date_time"))
    logic = ArrowLogic(
        arrow_processors.WinningBids(), "eventtime", task_input, RowCodec(struct).schema, output, limits=limits
    )
    return operator(logic, Declaring(arrow_processors.WinningBids()), keys, "eventtime")


@pytest.mark.parametrize(
    ("form", "conf", "limits"),
    [
        only_thorough(winning_in_rows, CONFS[0], Limits(), id="rows, in order"),
        only_thorough(winning_in_rows, CONFS[1], Limits(), id="rows, out of order"),
        pytest.param(winning_in_rows, CONFS[1], TINY, id="rows, in little memory"),
        only_thorough(winning_in_rows, CONFS[2], Limits(), id="rows, hot"),
        only_thorough(winning_in_arrow, CONFS[0], Limits(), id="arrow, in order"),
        pytest.param(winning_in_arrow, CONFS[1], Limits(), id="arrow, out of order"),
        only_thorough(winning_in_arrow, CONFS[1], TINY, id="arrow, in little memory"),
        pytest.param(winning_in_arrow, CONFS[2], TINY, id="arrow, hot, in little memory"),
        only_thorough(winning_in_arrow, CONFS[2], Limits(), id="arrow, hot"),
    ],
)
def test_winning_bids(form: Callable[[Limits], OperatorRun], conf: NexmarkConf, limits: Limits) -> None:
    in_us = form is winning_in_rows
    given = [*batches(conf, EVENTS, BATCHES)]
    run, found, now, late = form(limits), list[dict[str, Any]](), 0, 0
    for events in (*given, closing_events(conf, BATCHES * EVENTS), given[0].slice(0, 0)):
        rows = auctions_and_bids(events, in_us=in_us)
        found += run.batch(rows, BatchTimes(0, now, late), cuts=[50, 200])
        times = events.column("date_time").cast(pa.int64()).to_numpy() // 1000
        late, now = now, max(now, int(times.max(initial=0)) - DELAY_MS)
    must = expected.winning_bids(given).to_pylist()
    assert len(must) > 30
    names = {"us": "date_time", "expires_us": "expires", "bid_us": "bid_date_time"}
    for row in found:
        for us, name in names.items():
            if us in row:
                row[name] = pa.scalar(row.pop(us), pa.timestamp("us", "UTC")).as_py()
        row["auction"] = row["id"]
    assert sorted(found, key=lambda r: r["id"]) == sorted(must, key=lambda r: r["id"])
    # What is left is the closing events' auction and its bid.
    assert run.size("auction" if in_us else "state") == 1
    assert run.size("timers.-keys") == 1


@pytest.mark.parametrize("form", [winning_in_rows, winning_in_arrow])
def test_bids_count_from_the_first_to_the_last_moment(form: Callable[[Limits], OperatorRun]) -> None:
    """Bids come so many ms after their auction has opened, which lasts 5000; bid i of an auction is of price i.

    The bids of auction 6 are of one price: the earliest wins.
    """
    bids_at_ms = {1: [0, 5000], 2: [1, 5000], 3: [5001], 4: [-1], 5: [-1, 0], 6: [30, 20, 10, 40]}
    winners = {1: (1, 1), 2: (1, 1), 5: (1, 1), 6: (7, 2)}
    opened = 1_600_000_000_000
    kind = RowCodec(struct_of(AUCTIONS_AND_BIDS)).schema.field("date_time").type

    def time(ms: int | None) -> Any:
        return None if ms is None else pa.scalar((opened + ms) * 1000, pa.int64()).cast(kind).as_py()

    def row(auction: int, ms: int, **others: Any) -> dict[str, Any]:
        us = {"us": (opened + ms) * 1000, "expires_us": (opened + 5000) * 1000 if others["price"] is None else None}
        return {"id": auction, "date_time": time(ms), **us, **others}

    own = []
    for auction, bids_ms in bids_at_ms.items():
        prices = [9] if not bids_ms[1:] else [7] * len(bids_ms) if auction == 6 else range(len(bids_ms))
        own += [row(auction, ms, price=prices[i], bidder=i) for i, ms in enumerate(bids_ms)]
        own.append(row(auction, 0, price=None, expires=time(5000), item_name=f"it {auction}"))
    in_us = form is winning_in_rows
    schema = RowCodec(struct_of(AUCTIONS_AND_BIDS + (", us long, expires_us long" if in_us else ""))).schema
    run = form(Limits())
    assert run.batch(pa.RecordBatch.from_pylist(own, schema=schema), BatchTimes(0, 0, 0)) == []
    nothing = pa.RecordBatch.from_pylist([], schema=schema)
    assert run.batch(nothing, BatchTimes(0, opened + 4999, 0)) == []
    found = run.batch(nothing, BatchTimes(0, opened + 5000, opened + 4999))
    assert {found_row["item_name"]: (found_row["price"], found_row["bidder"]) for found_row in found} == {
        f"it {auction}": winner for auction, winner in winners.items()
    }
    assert len(found) == len(winners)


def test_last_bids_of_a_processor() -> None:
    run = of_rows(processors.last_bid, BIDS, ["bidder", "auction"], processors.LAST_BID_OUTPUT)
    given = [*batches(CONFS[1], 400, 2)]
    for events, must in zip(given, expected.last_bids(given), strict=True):
        assert comparable(run.batch(bids(events), BatchTimes())) == comparable(must.to_pylist())


def test_top_bids_of_a_processor() -> None:
    run = of_rows(processors.top_bids, BIDS, ["auction"], processors.TOP_BIDS_OUTPUT)
    given = [*batches(CONFS[1], 400, 2)]
    for events, must in zip(given, expected.top_bids(given), strict=True):
        assert comparable(run.batch(bids(events), BatchTimes())) == comparable(must.to_pylist())


def comparable(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Rows in one order, with times as numbers, columns by name."""
    for row in rows:
        if "us" not in row:
            row["us"] = _us(pa.array([row.pop("date_time")], pa.timestamp("us", "UTC")))[0].as_py()
    return sorted(tuple(row[name] for name in sorted(row)) for row in rows)


def _us(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.cast(pa.int64())


def test_a_bid_waits_for_its_auction_no_longer_than_one_can_come() -> None:
    """A bid ahead of its auction counts; one whose auction can no more have been open is forgotten."""
    conf = NexmarkConf(event_rate=300)
    (events,) = batches(conf, 499, 1)
    for form, family in ((winning_in_rows, "waiting"), (winning_in_arrow, "state")):
        run = form(Limits())
        rows = auctions_and_bids(events, in_us=form is winning_in_rows)
        only_bids = rows.filter(pc.is_null(rows.column("expires")))
        run.batch(only_bids, BatchTimes(0, 0, 0))
        keys = len(set(only_bids.column("id").to_pylist()))
        assert run.size(family) == keys
        last_ms = int(np.max(only_bids.column("date_time").cast(pa.int64()).to_numpy()) // 1000)
        nothing = rows.slice(0, 0)
        run.batch(nothing, BatchTimes(0, last_ms - 1, 0))
        assert 0 < run.size(family) < keys
        run.batch(nothing, BatchTimes(0, last_ms, last_ms - 1))
        assert run.size(family) == run.size("timers.-keys") == 0
