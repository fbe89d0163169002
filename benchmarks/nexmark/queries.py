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

``identity`` gives the rows of our ``aggregate`` the same shuffle and a Python stage that passes them on. It keeps no
state and answers no query: it is the floor of any operator in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from spark_bridge import aggregate, join
from spark_bridge import functions as S

from .generator import AUCTION, AUCTION_TYPE, BID, PERSON, NexmarkConf

WATERMARK_DELAY = "4 seconds"
WATERMARK_DELAY_MS = 4000
SESSION_GAP = WINDOW = "10 seconds"
WINDOW_MS = 10_000

_BID_COLUMNS = ["auction", "bidder", "price", "channel", "url"]
_AUCTION_COLUMNS = ["item_name", "description", "initial_bid", "reserve", "date_time", "expires", "seller", "category"]
_AUCTION_COLUMNS += ["extra"]
OUTPUTS = {
    "q4": ["category", "average_price", "auctions", "start_time", "end_time"],
    "q8": ["id", "name", "start_time", "end_time"],
    "q9": ["id", *_AUCTION_COLUMNS, "auction", "bidder", "price", "bid_date_time", "bid_extra"],
    "q11": ["bidder", "bid_count", "start_time", "end_time"],
    "q12": ["bidder", "bid_count", "start_time", "end_time"],
    "q18": [*_BID_COLUMNS, "date_time", "extra"],
    "q19": [*_BID_COLUMNS, "date_time", "extra", "rank_number"],
    "q20": [*_BID_COLUMNS, "bid_date_time", "bid_extra", *_AUCTION_COLUMNS],
}
Q20_CATEGORY = 10
CLOSES_BY_WATERMARK = frozenset({"q4", "q9", "q11"})
"""Queries that emit what the watermark has closed; the others emit what each batch has changed."""


def bids(events: DataFrame) -> DataFrame:
    return events.where(F.col("event_type") == BID).select("bid.*", "date_time")


def auctions(events: DataFrame) -> DataFrame:
    return events.where(F.col("event_type") == AUCTION).select("auction.*", "date_time")


def timed(events: DataFrame) -> DataFrame:
    return events.withWatermark("date_time", WATERMARK_DELAY)


TOP = 10
Make = Callable[[DataFrame, NexmarkConf], DataFrame]


@dataclass(frozen=True)
class NexmarkContestant:
    """One way to write a query: ``make`` from the stream of events, started with Spark's ``output_mode``.

    ``needs_spark_4``: Spark 3.5 lacks a function that the query uses. ``answers``: it gives the query's rows.
    """

    query: str
    name: str
    make: Make
    output_mode: str = "append"
    needs_spark_4: bool = False
    answers: bool = True


def passed_on(rows: DataFrame, *by: str) -> DataFrame:
    """Return the rows behind a shuffle by these columns and a Python stage that does nothing."""

    def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    return rows.repartition(*by).mapInArrow(same, rows.schema)


def q18_aggregate(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    return _q18(aggregate(_last_bids(events), by=["bidder", "auction"], operator="last_bids", last=S.max("bid")))


def q18_identity(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    return passed_on(_last_bids(events), "bidder", "auction")


def q18_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    return _q18(bids(events).groupBy("bidder", "auction").agg(F.max(_last_bid()).alias("last")))


def _last_bids(events: DataFrame) -> DataFrame:
    return bids(events).select("bidder", "auction", _last_bid().alias("bid"))


def _last_bid() -> Column:
    return F.struct("date_time", "price", "channel", "url", "extra")


def _q18(df: DataFrame) -> DataFrame:
    return df.select("bidder", "auction", "last.*").select(*OUTPUTS["q18"])


def q19_aggregate(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    top = S.top_k(_RANKED, TOP)
    return _q19(aggregate(bids(events), by="auction", operator="top_bids", top=top))


def q19_identity(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    return passed_on(bids(events).select("auction", *_RANKED), "auction")


def q19_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    ranked = F.struct(*_RANKED)
    return _q19(bids(events).groupBy("auction").agg(F.max_by(ranked, ranked, TOP).alias("top")))


_RANKED = ["price", "date_time", "bidder", "channel", "url", "extra"]


def _q19(df: DataFrame) -> DataFrame:
    ranked = df.select("auction", F.posexplode("top").alias("place", "bid")).select("auction", "place", "bid.*")
    return ranked.withColumn("rank_number", F.col("place") + 1).select(*OUTPUTS["q19"])


def q11_aggregate(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    session = S.session_window("date_time", SESSION_GAP).alias("window")
    rows = bids(timed(events))
    return _windows(
        aggregate(rows, by=["bidder", session], operator="sessions", output_mode="append", bid_count=S.count())
    )


def q11_identity(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    return passed_on(bids(timed(events)).select("bidder", "date_time"), "bidder")


def q11_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    session = F.session_window("date_time", SESSION_GAP).alias("window")
    return _windows(bids(timed(events)).groupBy("bidder", session).agg(F.count(F.lit(1)).alias("bid_count")))


def q12_aggregate(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    window = S.window("p_time", WINDOW)
    return _windows(aggregate(_with_p_time(events), by=["bidder", window], operator="bids", bid_count=S.count()))


def q12_identity(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    return passed_on(_with_p_time(events), "bidder")


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


# The queries that join streams. In q4 and q9 only bids up to the end of their auction count, and the joins know the
# maximum duration of an auction. ``join`` applies ``best_bids`` to the bids on an auction that it has found together.

_AUCTION = [f.name for f in AUCTION_TYPE if f.name != "id"] + ["date_time"]
_BID = ["bidder", "price", "bid_date_time", "bid_extra"]
_BEST = ["low", "bid_date_time", "bidder", "bid_extra"]
"""The least of these is the winning bid: that of the highest price, then the earliest, then the lowest."""


def best_bids(auction: pa.Table, bid: pa.Table) -> pa.Table:
    """Return the best bid on each auction with the auction; row i of both tables is a bid and its auction."""
    in_time = pc.less_equal(bid["bid_date_time"], auction["expires"])
    auction, bid = auction.filter(in_time), bid.filter(in_time)
    ids, of_auctions = np.unique(auction["id"].to_numpy(), return_inverse=True)
    low = -bid["price"].to_numpy()
    lowest = np.full(len(ids), np.iinfo(np.int64).max)
    np.minimum.at(lowest, of_auctions, low)
    at = np.flatnonzero(low == lowest[of_auctions])  # only bids of the highest price need to be sorted
    contest = bid.append_column("low", pa.array(low)).take(pa.array(at)).append_column("of", pa.array(of_auctions[at]))
    names = [name for name in ("of", *_BEST) if name in contest.column_names]
    order = pc.sort_indices(contest, [(name, "ascending") for name in names]).to_numpy()
    chosen = order[np.unique(of_auctions[at][order], return_index=True)[1]]
    won = contest.take(pa.array(chosen)).drop_columns(["id", "of"])
    return pa.table({**_columns(auction.take(pa.array(at[chosen]))), **_columns(won)})


def _columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))


def _matched(events: DataFrame, conf: NexmarkConf, of_auction: list[str], of_bid: list[str]) -> DataFrame:
    """Return auctions with the best of the bids that were found together."""
    auction, bid = auctions(timed(events)).select("id", *of_auction), _bids_by_id(events).select("id", *of_bid)
    return join(
        auction,
        bid,
        on="id",
        within=("0 seconds", f"{longest_auction_ms(conf)} milliseconds"),
        operator="matched",
        apply=best_bids,
        output=T.StructType([*auction.schema.fields, T.StructField("low", T.LongType()), *bid.schema.fields[1:]]),
        event_time_column="date_time",
    )


def _bids_by_id(events: DataFrame) -> DataFrame:
    return bids(timed(events)).select(
        F.col("auction").alias("id"),
        "bidder",
        "price",
        F.col("date_time").alias("bid_date_time"),
        F.col("extra").alias("bid_extra"),
    )


def _matched_natively(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    """Return auctions with their bids. Spark drops bids only if it knows how long auctions last at most."""
    right = _bids_by_id(events).withColumnRenamed("id", "auction")
    return auctions(timed(events)).join(
        right,
        F.expr(
            "id = auction and bid_date_time >= date_time and bid_date_time <= expires "
            f"and bid_date_time <= date_time + interval {longest_auction_ms(conf)} milliseconds"
        ),
    )


def q4_join(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    matched = _matched(events, conf, ["category", "date_time", "expires"], ["price", "bid_date_time"])
    keys = ["id", "category", "date_time"]
    won = aggregate(matched, by=keys, operator="winning_prices", output_mode="append", low=S.min("low"))
    by = ["category", S.window("date_time", WINDOW).alias("w")]
    outputs = {"auctions": S.count(), "total": S.sum("low")}
    sums = aggregate(won, by=by, operator="prices", output_mode="append", **outputs)
    return _q4(sums.select("category", "w.start", "w.end", "auctions", -F.col("total")))


def q4_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    won = _matched_natively(events, conf).groupBy("id", "category", "date_time").agg(F.max("price").alias("price"))
    sums = won.groupBy("category", F.window("date_time", WINDOW).alias("w")).agg(
        F.count(F.lit(1)).alias("auctions"), F.sum("price").alias("total")
    )
    return _q4(sums.select("category", "w.start", "w.end", "auctions", "total"))


def _q4(sums: DataFrame) -> DataFrame:
    named = sums.toDF("category", "start_time", "end_time", "auctions", "total")
    return named.withColumn("average_price", F.expr("total div auctions")).select(*OUTPUTS["q4"])


def q9_join(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    bid = F.struct(*_BEST, *(c for c in _AUCTION if c != "date_time")).alias("bid")
    rows = _matched(events, conf, _AUCTION, _BID).select("id", "date_time", bid)
    best = aggregate(rows, by=["id", "date_time"], operator="winning_bids", output_mode="append", best=S.min("bid"))
    return q9_columns(best.select("id", "date_time", "best.*").withColumn("price", -F.col("low")))


def q9_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    # Only one column may keep its watermark.
    rows = _matched_natively(events, conf).withColumn("bid_us", F.expr("unix_micros(bid_date_time)"))
    best = F.struct((-F.col("price")).alias("low"), F.col("bid_us"), F.col("bidder"), F.col("bid_extra"))
    others = [c for c in _AUCTION if c != "date_time"]
    found = rows.drop("bid_date_time").groupBy("id", "date_time")
    rows = found.agg(F.min(best).alias("best"), *(F.first(c).alias(c) for c in others))
    time, price = F.timestamp_micros("best.bid_us").alias("bid_date_time"), (-F.col("best.low")).alias("price")
    return q9_columns(rows.select("id", "date_time", *others, "best.bidder", price, time, "best.bid_extra"))


def q9_columns(df: DataFrame) -> DataFrame:
    """Return the output of q9 from rows that have the auction's id as ``id``."""
    return df.withColumn("auction", F.col("id")).select(*OUTPUTS["q9"])


def q8_join(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    people, sellers = _people_and_sellers(events)
    return _q8(join(people, sellers, on=["id", "w"], how="left_semi", operator="new_sellers"))


def q8_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    people, sellers = _people_and_sellers(events)
    return _q8(people.join(sellers, ["id", "w"], "left_semi"))


def _people_and_sellers(events: DataFrame) -> tuple[DataFrame, DataFrame]:
    of_window = F.window("date_time", WINDOW).alias("w")
    people = timed(events).where(F.col("event_type") == PERSON).select("person.id", of_window, "person.name")
    return people, auctions(timed(events)).select(F.col("seller").alias("id"), of_window)


def _q8(df: DataFrame) -> DataFrame:
    return df.select("id", "name", F.col("w.start").alias("start_time"), F.col("w.end").alias("end_time"))


def q20_join(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    return join(*_bids_and_auctions(events), on="auction", operator="bids_of_category").select(*OUTPUTS["q20"])


def q20_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    of_bids, of_auctions = _bids_and_auctions(events)
    return of_bids.join(of_auctions, "auction").select(*OUTPUTS["q20"])


def _bids_and_auctions(events: DataFrame) -> tuple[DataFrame, DataFrame]:
    of_bids = bids(events).withColumnRenamed("date_time", "bid_date_time").withColumnRenamed("extra", "bid_extra")
    of_auctions = auctions(events).where(F.col("category") == Q20_CATEGORY).withColumnRenamed("id", "auction")
    return of_bids, of_auctions


def longest_auction_ms(conf: NexmarkConf) -> int:
    """Return how long an auction lasts at most, in milliseconds of event time."""
    events_ahead = conf.num_in_flight_auctions * conf.total_proportion // conf.auction_proportion
    start, end = conf.times(np.array([0, events_ahead], np.int64))
    return int((end - start) // 1000 + 1) * 2


CONTESTANTS = (
    NexmarkContestant("q4", "join", q4_join),
    NexmarkContestant("q4", "native", q4_native),
    NexmarkContestant("q8", "join", q8_join),
    NexmarkContestant("q8", "native", q8_native),
    NexmarkContestant("q9", "join", q9_join),
    NexmarkContestant("q9", "native", q9_native),
    NexmarkContestant("q11", "aggregate", q11_aggregate),
    NexmarkContestant("q11", "identity", q11_identity, answers=False),
    NexmarkContestant("q11", "native", q11_native),
    NexmarkContestant("q12", "aggregate", q12_aggregate),
    NexmarkContestant("q12", "identity", q12_identity, answers=False),
    NexmarkContestant("q12", "native", q12_native, "update"),
    NexmarkContestant("q18", "aggregate", q18_aggregate),
    NexmarkContestant("q18", "identity", q18_identity, answers=False),
    NexmarkContestant("q18", "native", q18_native, "update"),
    NexmarkContestant("q20", "join", q20_join),
    NexmarkContestant("q20", "native", q20_native),
    NexmarkContestant("q19", "aggregate", q19_aggregate),
    NexmarkContestant("q19", "identity", q19_identity, needs_spark_4=True, answers=False),
    NexmarkContestant("q19", "native", q19_native, "update", True),
)
