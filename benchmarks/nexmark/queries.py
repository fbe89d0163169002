"""The contestants: each query by this project's operators, and in each way that Spark has for it.

All take the stream of events, of ``generator.SPARK_SCHEMA``, and return the same columns in the same order. Nexmark's
queries leave the order of equal rows open; these definitions are deterministic:

- q18, last bid per bidder and auction: of bids at one time, the greatest (price, channel, url, extra).
- q19, top 10 bids per auction: by price, then the greatest (date_time, bidder, channel, url, extra).
- q11, bids per bidder and session (10 seconds without a bid end one): emitted when the watermark has closed them.
- q12, bids per bidder and 10 seconds of processing time. Which bids share a window depends on when they come: a batch
  has one time, that in its entry in ``offsets/``. What never changes is the sum over the windows of a bidder.
- q9, auctions with their winning bid: the highest one from date_time to expires, both included, then the earliest, then
  the lowest (bidder, extra); emitted when the watermark has reached expires. Auctions without such a bid are left out.
- q4, the average winning price per category and 10-second window of the auctions' opening, rounded down, with the
  number of auctions; emitted when the watermark guarantees that none of them can get another bid.
- q8, people who open an auction within the 10-second window (event time) of their registration: a semi join, each
  person once, with the batch of their first auction.
- q20, bids with their auctions, of auctions of one category. No watermark: all bids and auctions are kept.

In each batch, q18, q19 and q12 emit the changed rows, and q20 the pairs with at least one new row. The watermark is
nexmark-flink's, 4 seconds behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from . import arrow_processors, pandas_functions, processors
from .events import OUTPUTS, SESSION_GAP, WINDOW, bids, timed
from .generator import AUCTION, BID, NexmarkConf
from .joins import q4_join, q4_native, q8_join, q8_native, q9_columns, q9_join, q9_native, q20_join, q20_native

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
    """Return the bidders with the time of their batch, and a watermark that removes closed windows."""
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
    return q9_columns(
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


def _in_us(df: DataFrame) -> DataFrame:
    """Return times as microseconds since 1970; the event time column stays too, for its watermark."""
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
        return q9_columns(df)
    return df.select(*OUTPUTS[query])


_SPARK_ROWS = "Spark transformWithState"
_SPARK_PANDAS = "Spark applyInPandasWithState"
CONTESTANTS = (
    NexmarkContestant("q4", "join", "join and aggregate", q4_join),
    NexmarkContestant("q4", "native", "Spark join and groupBy().agg()", q4_native),
    NexmarkContestant("q8", "join", "join", q8_join),
    NexmarkContestant("q8", "native", "Spark join", q8_native),
    NexmarkContestant("q9", "join", "join and aggregate", q9_join),
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
        raise ValueError(f"Unknown query {query!r}; the queries are {', '.join(OUTPUTS)}.")
    return [c for c in CONTESTANTS if c.query == query and (has_spark_4 or not c.needs_spark_4)]
