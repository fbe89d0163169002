"""What all queries share: the columns that they give, and the streams of events that they read."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from .generator import AUCTION, BID

WATERMARK_DELAY = "4 seconds"
WATERMARK_DELAY_MS = 4000
SESSION_GAP = WINDOW = "10 seconds"
WINDOW_MS = 10_000

OUTPUTS = {
    "q4": ["category", "average_price", "auctions", "start_time", "end_time"],
    "q8": ["id", "name", "start_time", "end_time"],
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
CLOSES_BY_WATERMARK = frozenset({"q4", "q9", "q11"})
"""Queries that emit what the watermark has closed; the others emit what each batch has changed."""


def bids(events: DataFrame) -> DataFrame:
    """Return the bids among the events."""
    return events.where(F.col("event_type") == BID).select("bid.*", "date_time")


def auctions(events: DataFrame) -> DataFrame:
    """Return the auctions among the events."""
    return events.where(F.col("event_type") == AUCTION).select("auction.*", "date_time")


def timed(events: DataFrame) -> DataFrame:
    """Return the events with Nexmark's watermark."""
    return events.withWatermark("date_time", WATERMARK_DELAY)
