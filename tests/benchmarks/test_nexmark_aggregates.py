"""The aggregates of Nexmark's queries, run as tasks do without Spark, give what pandas computes from the same
events.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from nexmark import expected
from nexmark.generator import NexmarkConf, batches, bids_of, closing_events

from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from coordinator_actor.messages import BatchTimes
from spark_bridge import functions as S
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.functions import AggregateFunction
from spark_bridge.operators.aggregate import output_of
from spark_bridge.operators.aggregate_task import AggregateLogic
from spark_bridge.operators.session_task import SessionLogic
from spark_bridge.state_format.layouts import session_schema
from spark_bridge.stateful.ddl import struct_of
from tests.effort import effort, only_thorough
from tests.spark_bridge.operators.operator_runs import TS, WINDOW, OperatorRun

pytestmark = pytest.mark.thorough  # otherwise: make bench-smoke, which compares the results of all contestants

BID = "date_time timestamp, price long, channel string, url string, extra string"
ROWS = (
    "auction long, bidder long, price long, channel string, url string, extra string, date_time timestamp, "
    f"bid struct<{BID}>"
)
RANKED = ["price", "date_time", "bidder", "channel", "url", "extra"]
CONFS = [
    NexmarkConf(event_rate=300),
    NexmarkConf(seed=1, event_rate=300, out_of_order_group_size=397),
    NexmarkConf(seed=2, hot_auction_ratio=50, hot_bidders_ratio=50),
]
SESSION_BATCHES = effort(7, 12)
in_every_conf = pytest.mark.parametrize(
    "conf",
    [
        only_thorough(CONFS[0], id="in order"),
        pytest.param(CONFS[1], id="out of order"),
        only_thorough(CONFS[2], id="hot"),
    ],
)


def rows_of(events: pa.RecordBatch) -> pa.RecordBatch:
    table = bids_of(events)
    names = [field.split()[0] for field in BID.split(", ")]
    bid = pa.StructArray.from_arrays([table[n].combine_chunks() for n in names], names)
    columns = [column.combine_chunks() for column in table.append_column("bid", bid).columns]
    return pa.RecordBatch.from_arrays(columns, [*table.column_names, "bid"])


def operator(keys: list[str], **outputs: AggregateFunction) -> OperatorRun:
    aggregator = Aggregator([output_of(struct_of(ROWS), name, f, None) for name, f in outputs.items()])
    key_schema = pa.schema([(key, pa.int64()) for key in keys])
    state = StateSchema(key_schema, aggregator.state_schema)
    logic = AggregateLogic(state, aggregator, pa.schema([*key_schema, *aggregator.result_fields]), "update", None)
    return OperatorRun(logic, OperatorSchema.of_rows(state), keys, num_partitions=3)


def in_order(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted(tuple(row[name] for name in sorted(row)) for row in rows)


@in_every_conf
def test_last_bids(conf: NexmarkConf) -> None:
    run, given = operator(["bidder", "auction"], last=S.max("bid")), [*batches(conf, 1000, 4)]
    for events, must in zip(given, expected.last_bids(given), strict=True):
        found = run.batch(rows_of(events), BatchTimes(), cuts=[100, 250])
        flat = [{"bidder": row["bidder"], "auction": row["auction"], **row["last"]} for row in found]
        assert in_order(flat) == in_order(must.to_pylist())


@in_every_conf
def test_top_bids(conf: NexmarkConf) -> None:
    run, given = operator(["auction"], top=S.top_k(RANKED, 10)), [*batches(conf, 1000, 4)]
    for events, must in zip(given, expected.top_bids(given), strict=True):
        found = run.batch(rows_of(events), BatchTimes(), cuts=[100, 250])
        flat = [
            {"auction": row["auction"], **bid, "rank_number": i + 1}
            for row in found
            for i, bid in enumerate(row["top"])
        ]
        assert in_order(flat) == in_order(must.to_pylist())


@in_every_conf
def test_sessions(conf: NexmarkConf) -> None:
    aggregator = Aggregator([output_of(struct_of(ROWS), "bid_count", S.count(), None)])
    keys = pa.schema([("bidder", pa.int64())])
    schema = session_schema(keys, TS, aggregator.state_schema)
    output = pa.schema([("bidder", pa.int64()), ("window", WINDOW), ("bid_count", pa.int64())])
    run = OperatorRun(SessionLogic(schema, aggregator, output, "window", "append"), schema, ["bidder"], 3)
    given = [*batches(conf, 1000, SESSION_BATCHES)]
    found, now, late = list[dict[str, Any]](), 0, 0
    for events in (*given, closing_events(conf, 1000 * SESSION_BATCHES), given[0].slice(0, 0)):
        rows = rows_of(events)
        ends = pc.add(rows["date_time"].cast(pa.int64()), 10_000_000).cast(TS)
        window = pa.StructArray.from_arrays([rows["date_time"], ends], fields=list(WINDOW))
        found += run.batch(rows.append_column("window", window), BatchTimes(0, now, late))
        latest = pc.max(rows["date_time"].cast(pa.int64())).as_py() or 0
        late, now = now, max(now, latest // 1000 - 4000)
    flat = [
        {
            "bidder": row["bidder"],
            "bid_count": row["bid_count"],
            "start_time": row["window"]["start"],
            "end_time": row["window"]["end"],
        }
        for row in found
    ]
    assert in_order(flat) == in_order(expected.sessions(given).to_pylist())
    assert run.size("default") == 1
