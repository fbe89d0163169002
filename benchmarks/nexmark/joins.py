"""The queries that join streams: by ``join``, and by Spark's own join with the same condition.

In q4 and q9 only bids up to the end of their auction count, and the joins know how long auctions last at most. ``join``
makes its output by a function here: of the bids on an auction that it has found together, the best one.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from .events import OUTPUTS, Q20_CATEGORY, WINDOW, auctions, bids, timed
from .generator import AUCTION_TYPE, PERSON, NexmarkConf

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
    from spark_bridge import join

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


# q4: average of the winning prices


def q4_join(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from spark_bridge import aggregate
    from spark_bridge import functions as S

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


# q9: winning bids


def q9_join(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from spark_bridge import aggregate
    from spark_bridge import functions as S

    bid = F.struct(*_BEST, *(c for c in _AUCTION if c != "date_time")).alias("bid")
    rows = _matched(events, conf, _AUCTION, _BID).select("id", "date_time", bid)
    best = aggregate(rows, by=["id", "date_time"], operator="winning_bids", output_mode="append", best=S.min("bid"))
    return q9_columns(best.select("id", "date_time", "best.*").withColumn("price", -F.col("low")))


def q9_native(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    """Join and then aggregate, in one query."""
    # Only one column may keep its watermark.
    rows = _matched_natively(events, conf).withColumn("bid_us", F.expr("unix_micros(bid_date_time)"))
    best = F.struct((-F.col("price")).alias("low"), F.col("bid_us"), F.col("bidder"), F.col("bid_extra"))
    others = [c for c in _AUCTION if c != "date_time"]
    found = rows.drop("bid_date_time").groupBy("id", "date_time")
    rows = found.agg(F.min(best).alias("best"), *(F.first(c).alias(c) for c in others))
    return q9_columns(
        rows.select(
            "id",
            "date_time",
            *others,
            F.col("best.bidder").alias("bidder"),
            (-F.col("best.low")).alias("price"),
            F.timestamp_micros("best.bid_us").alias("bid_date_time"),
            F.col("best.bid_extra").alias("bid_extra"),
        )
    )


def q9_columns(df: DataFrame) -> DataFrame:
    """Return the output of q9 from rows that have the auction's id as ``id``."""
    return df.withColumn("auction", F.col("id")).select(*OUTPUTS["q9"])


# q8: people and their auctions


def q8_join(events: DataFrame, conf: NexmarkConf) -> DataFrame:
    from spark_bridge import join

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


def longest_auction_ms(conf: NexmarkConf) -> int:
    """Return how long an auction lasts at most, in milliseconds of event time."""
    events_ahead = conf.num_in_flight_auctions * conf.total_proportion // conf.auction_proportion
    start, end = conf.times(np.array([0, events_ahead], np.int64))
    return int((end - start) // 1000 + 1) * 2
