"""The contestants: each query by this project's operators, and in each way that Spark has for it.

All take the stream of events, of ``generator.SPARK_SCHEMA``, and give the same columns in the same order. Of Nexmark's
queries, which leave open what comes first among equals, these are the readings that are determined:

- q18, last bid per bidder and auction: of bids at one time, the greatest (price, channel, url, extra).
- q19, top 10 bids per auction: by price, then the greatest (date_time, bidder, channel, url, extra).
- q11, bids per bidder and session (10 seconds without a bid end one): emitted when the watermark has closed them.
- q12, bids per bidder and 10 seconds of processing time. Which bids share a window depends on when they come: a batch
  has one time, that in its entry in ``offsets/``. What never changes is the sum over the windows of a bidder.
- q9, auctions with their winning bid: the highest one from date_time to expires, both included, then the earliest, then
  the lowest (bidder, extra); emitted when the watermark has reached expires. Auctions without such a bid are left out.
- q20, bids with their auctions, of auctions of one category. No watermark: all bids and auctions are kept.

q18, q19 and q12 emit what has changed in each batch, q20 the pairs of which one row came in it. The watermark is
nexmark-flink's, 4 seconds behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from . import arrow_processors, pandas_functions, processors
from .generator import AUCTION, BID, NexmarkConf

WATERMARK_DELAY = "4 seconds"
WATERMARK_DELAY_MS = 4000
SESSION_GAP = WINDOW = "10 seconds"
WINDOW_MS = 10_000

OUTPUTS = {
    "q9": [
        "id",
        "item_name",
        "description",
        "initial_bid",
        "reserve",
        "date_time",
        "expires",
        "seller",
        "category",
        "extra",
        "auction",
        "bidder",
        "price",
        "bid_date_time",
        "bid_extra",
    ],
    "q11": ["bidder", "bid_count", "start_time", "end_time"],
    "q12": ["bidder", "bid_count", "start_time", "end_time"],
    "q18": ["auction", "bidder", "price", "channel", "url", "date_time", "extra"],
    "q19": ["auction", "bidder", "price", "channel", "url", "date_time", "extra", "rank_number"],
    "q20": [
        "auction",
        "bidder",
        "price",
        "channel",
        "url",
        "bid_date_time",
        "bid_extra",
        "item_name",
        "description",
        "initial_bid",
        "reserve",
        "date_time",
        "expires",
        "seller",
        "category",
        "extra",
    ],
}
Q20_CATEGORY = 10
CLOSES_BY_WATERMARK = frozenset({"q9", "q11"})
"""Queries that emit what the watermark has closed; the others emit what each batch has changed."""

Make = Callable[[DataFrame, NexmarkConf], DataFrame]


@dataclass(frozen=True)
class NexmarkContestant:
    """One way to write a query: ``make`` from the stream of events, started with Spark's ``output_mode``.

    ``needs_spark_4``: also where PySpark 3.5 has the interface, but fails with the Arrow of today
    (``applyInPandasWithState``). ``is_slow``: it goes through Python key by key, and is left out where a run is to be
    short.
    """

    query: str
    name: str
    label: str
    make: Make
    output_mode: str = "append"
    needs_spark_4: bool = False
    is_slow: bool = False


def bids(events: DataFrame) -> DataFrame:
    """Return the bids among the events."""
    return events.where(F.col("event_type") == BID).select("bid.*", "date_time")


def auctions(events: DataFrame) -> DataFrame:
    """Return the auctions among the events."""
    return events.where(F.col("event_type") == AUCTION).select("auction.*", "date_time")


def timed(events: DataFrame) -> DataFrame:
    """Return the events with Nexmark's watermark."""
    return events.withWatermark("date_time", WATERMARK_DELAY)


# q18: last bids


def q18_aggregate(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from spark_bridge import aggregate
    from spark_bridge import functions as S

    rows = bids(events).select("bidder", "auction", _last_bid().alias("bid"))
    return _q18(aggregate(rows, by=["bidder", "auction"], operator="last_bids", last=S.max("bid")))


def q18_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    return _q18(bids(events).groupBy("bidder", "auction").agg(F.max(_last_bid()).alias("last")))


def q18_rows(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from spark_bridge import StatefulProcessor, transform_with_state

    processor = processors.last_bid(StatefulProcessor)
    keys = ["bidder", "auction"]
    return _of_us(
        "q18",
        transform_with_state(_in_us(bids(events)), keys, processor, processors.LAST_BID_OUTPUT, operator="last_bids"),
    )


def q18_spark_rows(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from pyspark.sql.streaming import StatefulProcessor

    grouped = _in_us(bids(events)).groupBy("bidder", "auction")
    processor = processors.last_bid(StatefulProcessor)
    return _of_us("q18", grouped.transformWithState(processor, processors.LAST_BID_OUTPUT, "Update", "none"))


def q18_spark_pandas(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    grouped = _in_us(bids(events)).groupBy("bidder", "auction")
    function = pandas_functions.WithNewArrow(pandas_functions.last_bid)
    return _of_us(
        "q18",
        grouped.applyInPandasWithState(
            function, processors.LAST_BID_OUTPUT, processors.LAST_BID, "update", "NoTimeout"
        ),
    )


def _last_bid() -> Column:
    return F.struct("date_time", "price", "channel", "url", "extra")


def _q18(df: DataFrame) -> DataFrame:
    return df.select("bidder", "auction", "last.*").select(*OUTPUTS["q18"])


# q19: top bids


def q19_aggregate(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from spark_bridge import aggregate
    from spark_bridge import functions as S

    top = S.top_k(_RANKED, processors.TOP)
    return _q19(aggregate(bids(events), by="auction", operator="top_bids", top=top))


def q19_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    ranked = F.struct(*_RANKED)
    return _q19(bids(events).groupBy("auction").agg(F.max_by(ranked, ranked, processors.TOP).alias("top")))


def q19_rows(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from spark_bridge import StatefulProcessor, transform_with_state

    processor = processors.top_bids(StatefulProcessor)
    rows = _in_us(bids(events))
    return _of_us(
        "q19", transform_with_state(rows, "auction", processor, processors.TOP_BIDS_OUTPUT, operator="top_bids")
    )


def q19_spark_rows(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from pyspark.sql.streaming import StatefulProcessor

    processor = processors.top_bids(StatefulProcessor)
    grouped = _in_us(bids(events)).groupBy("auction")
    return _of_us("q19", grouped.transformWithState(processor, processors.TOP_BIDS_OUTPUT, "Update", "none"))


def q19_spark_pandas(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    grouped = _in_us(bids(events)).groupBy("auction")
    function = pandas_functions.WithNewArrow(pandas_functions.top_bids)
    return _of_us(
        "q19",
        grouped.applyInPandasWithState(
            function, processors.TOP_BIDS_OUTPUT, pandas_functions.TOP_STATE, "update", "NoTimeout"
        ),
    )


_RANKED = ["price", "date_time", "bidder", "channel", "url", "extra"]


def _q19(df: DataFrame) -> DataFrame:
    ranked = df.select("auction", F.posexplode("top").alias("place", "bid")).select("auction", "place", "bid.*")
    return ranked.withColumn("rank_number", F.col("place") + 1).select(*OUTPUTS["q19"])


# q11: sessions


def q11_aggregate(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from spark_bridge import aggregate
    from spark_bridge import functions as S

    session = S.session_window("date_time", SESSION_GAP).alias("window")
    rows = bids(timed(events))
    return _windows(
        aggregate(rows, by=["bidder", session], operator="sessions", output_mode="append", bid_count=S.count())
    )


def q11_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    session = F.session_window("date_time", SESSION_GAP).alias("window")
    return _windows(bids(timed(events)).groupBy("bidder", session).agg(F.count(F.lit(1)).alias("bid_count")))


# q12: windows of processing time


def q12_aggregate(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from spark_bridge import aggregate
    from spark_bridge import functions as S

    window = S.window("p_time", WINDOW)
    return _windows(aggregate(_with_p_time(events), by=["bidder", window], operator="bids", bid_count=S.count()))


def q12_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    window = F.window("p_time", WINDOW)
    return _windows(_with_p_time(events).groupBy("bidder", window).agg(F.count(F.lit(1)).alias("bid_count")))


def _with_p_time(events: DataFrame) -> DataFrame:
    """Return the bidders with the time of their batch, and a watermark by which windows that are over are removed."""
    return bids(events).select("bidder", F.current_timestamp().alias("p_time")).withWatermark("p_time", "0 seconds")


def _windows(df: DataFrame) -> DataFrame:
    return df.select(
        "bidder", "bid_count", F.col("window.start").alias("start_time"), F.col("window.end").alias("end_time")
    )


# q9: winning bids


def q9_arrow(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from spark_bridge import transform_with_state_in_arrow

    processor = arrow_processors.WinningBids()
    rows = _auctions_and_bids(events)
    return _q9(
        transform_with_state_in_arrow(
            rows,
            "id",
            processor,
            arrow_processors.WINNING_BID_OUTPUT,
            operator="winning_bids",
            output_mode="append",
            time_mode="eventTime",
        )
    )


def q9_rows(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from spark_bridge import StatefulProcessor, transform_with_state

    processor = processors.winning_bid(StatefulProcessor)
    rows = _in_us(_auctions_and_bids(events))
    return _of_us(
        "q9",
        transform_with_state(
            rows,
            "id",
            processor,
            processors.WINNING_BID_OUTPUT,
            operator="winning_bids",
            output_mode="append",
            time_mode="eventTime",
        ),
    )


def q9_spark_rows(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from pyspark.sql.streaming import StatefulProcessor

    processor = processors.winning_bid(StatefulProcessor)
    grouped = _in_us(_auctions_and_bids(events)).groupBy("id")
    return _of_us("q9", grouped.transformWithState(processor, processors.WINNING_BID_OUTPUT, "Append", "eventTime"))


def q9_spark_pandas(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    grouped = _in_us(_auctions_and_bids(events)).groupBy("id")
    function = pandas_functions.WithNewArrow(pandas_functions.winning_bid)
    return _of_us(
        "q9",
        grouped.applyInPandasWithState(
            function, processors.WINNING_BID_OUTPUT, pandas_functions.WINNING_STATE, "append", "EventTimeTimeout"
        ),
    )


def q9_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    """Join and then aggregate, in one query. Spark drops bids only if it knows how long auctions last at most."""
    left = auctions(timed(events)).alias("a")
    right = bids(timed(events)).select(
        "auction", "bidder", "price", F.col("date_time").alias("bid_date_time"), F.col("extra").alias("bid_extra")
    )
    longest_ms = int(_longest_auction_ms(conf))
    joined = left.join(
        right,
        F.expr(
            "id = auction and bid_date_time >= date_time and bid_date_time <= expires "
            f"and bid_date_time <= date_time + interval {longest_ms} milliseconds"
        ),
    )
    # Only one column may keep its watermark.
    best = F.struct((-F.col("price")).alias("low"), F.col("bid_us"), F.col("bidder"), F.col("bid_extra"))
    rows = joined.withColumn("bid_us", F.expr("unix_micros(bid_date_time)")).drop("bid_date_time")
    others = [c for c in OUTPUTS["q9"][: OUTPUTS["q9"].index("auction")] if c not in ("id", "date_time")]
    found = rows.groupBy("id", "date_time").agg(F.min(best).alias("best"), *(F.first(c).alias(c) for c in others))
    return _q9(
        found.select(
            "id",
            "date_time",
            *others,
            F.col("best.bidder").alias("bidder"),
            (-F.col("best.low")).alias("price"),
            F.timestamp_micros("best.bid_us").alias("bid_date_time"),
            F.col("best.bid_extra").alias("bid_extra"),
        )
    )


# q20: bids with their auctions


def q20_join(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from spark_bridge import join

    return join(*_bids_and_auctions(events), on="auction", operator="bids_of_category").select(*OUTPUTS["q20"])


def q20_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    of_bids, of_auctions = _bids_and_auctions(events)
    return of_bids.join(of_auctions, "auction").select(*OUTPUTS["q20"])


def _bids_and_auctions(events: DataFrame) -> tuple[DataFrame, DataFrame]:
    of_bids = bids(events).withColumnRenamed("date_time", "bid_date_time").withColumnRenamed("extra", "bid_extra")
    of_auctions = auctions(events).where(F.col("category") == Q20_CATEGORY).withColumnRenamed("id", "auction")
    return of_bids, of_auctions


def _longest_auction_ms(conf: NexmarkConf) -> int:
    events_ahead = conf.num_in_flight_auctions * conf.total_proportion // conf.auction_proportion
    start, end = conf.times(np.array([0, events_ahead], np.int64))
    return int((end - start) // 1000 + 1) * 2


def _auctions_and_bids(events: DataFrame) -> DataFrame:
    """Return auctions and bids by the auction's id; a row without ``expires`` is a bid."""
    return (
        timed(events)
        .where(F.col("event_type").isin(AUCTION, BID))
        .select(
            F.coalesce("auction.id", "bid.auction").alias("id"),
            "date_time",
            *(F.col(f"auction.{c}").alias(c) for c in arrow_processors.AUCTION if c != "date_time"),
            "bid.bidder",
            "bid.price",
            F.col("bid.extra").alias("bid_extra"),
        )
    )


def _q9(df: DataFrame) -> DataFrame:
    return df.withColumn("auction", F.col("id")).select(*OUTPUTS["q9"])


def _in_us(df: DataFrame) -> DataFrame:
    """Return times as microseconds since 1970; the event time stays besides, for its watermark."""
    df = df.withColumn("us", F.expr("unix_micros(date_time)"))
    return (
        df.withColumn("expires_us", F.expr("unix_micros(expires)")).drop("expires") if "expires" in df.columns else df
    )


def _of_us(query: str, df: DataFrame) -> DataFrame:
    """Return the output of a query from that of its processor of rows."""
    for column, name in (("us", "date_time"), ("expires_us", "expires"), ("bid_us", "bid_date_time")):
        if column in df.columns:
            df = df.withColumn(name, F.timestamp_micros(column))
    if query == "q9":
        return _q9(df)
    return df.select(*OUTPUTS[query])


_SPARK_ROWS = "Spark transformWithState"
_SPARK_PANDAS = "Spark applyInPandasWithState"
CONTESTANTS = (
    NexmarkContestant("q9", "arrow", "transform_with_state_in_arrow", q9_arrow),
    NexmarkContestant("q9", "rows", "transform_with_state", q9_rows),
    NexmarkContestant("q9", "native", "Spark join and groupBy().agg()", q9_native),
    NexmarkContestant("q9", "spark_rows", _SPARK_ROWS, q9_spark_rows, "append", True, True),
    NexmarkContestant("q9", "spark_pandas", _SPARK_PANDAS, q9_spark_pandas, "append", True, True),
    NexmarkContestant("q11", "aggregate", "aggregate", q11_aggregate),
    NexmarkContestant("q11", "native", "Spark groupBy(session_window).agg()", q11_native),
    NexmarkContestant("q12", "aggregate", "aggregate", q12_aggregate),
    NexmarkContestant("q12", "native", "Spark groupBy(window).agg()", q12_native, "update"),
    NexmarkContestant("q18", "aggregate", "aggregate", q18_aggregate),
    NexmarkContestant("q18", "rows", "transform_with_state", q18_rows),
    NexmarkContestant("q18", "native", "Spark groupBy().agg()", q18_native, "update"),
    NexmarkContestant("q18", "spark_rows", _SPARK_ROWS, q18_spark_rows, "update", True, True),
    NexmarkContestant("q18", "spark_pandas", _SPARK_PANDAS, q18_spark_pandas, "update", True, True),
    NexmarkContestant("q20", "join", "join", q20_join),
    NexmarkContestant("q20", "native", "Spark join", q20_native),
    NexmarkContestant("q19", "aggregate", "aggregate", q19_aggregate),
    NexmarkContestant("q19", "rows", "transform_with_state", q19_rows),
    NexmarkContestant("q19", "native", "Spark groupBy().agg(max_by(..., 10))", q19_native, "update", True),
    NexmarkContestant("q19", "spark_rows", _SPARK_ROWS, q19_spark_rows, "update", True, True),
    NexmarkContestant("q19", "spark_pandas", _SPARK_PANDAS, q19_spark_pandas, "update", True, True),
)


def contestants_of(query: str, *, has_spark_4: bool) -> list[NexmarkContestant]:
    """Return the contestants of a query that this Spark can run; raises ``ValueError`` for an unknown query."""
    if query not in OUTPUTS:
        raise ValueError(f"There is no query {query!r}; there are {', '.join(OUTPUTS)}.")
    return [c for c in CONTESTANTS if c.query == query and (has_spark_4 or not c.needs_spark_4)]
