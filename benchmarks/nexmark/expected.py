"""The expected output of the queries, computed from the same events with pandas, without Spark and this project.

Each function returns Arrow tables with the columns of ``events.OUTPUTS`` in their order; ``queries`` defines the order
of equal rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pandas as pd
import pyarrow as pa

from .generator import TIME, auctions_of, bids_of, people_of
from .queries import OUTPUTS, Q20_CATEGORY, WINDOW_MS

TOP = 10
SESSION_GAP = pd.Timedelta(seconds=10)
_WIDTH = pd.Timedelta(milliseconds=WINDOW_MS)
_TYPES = {
    **dict.fromkeys(("name", "item_name", "description", "channel", "url", "extra", "bid_extra"), pa.string()),
    **dict.fromkeys(("date_time", "expires", "bid_date_time", "start_time", "end_time"), TIME),
    "rank_number": pa.int32(),
}
"""The types of output columns; those that are not here are 64-bit integers."""


def output_schema(query: str) -> pa.Schema:
    return pa.schema([pa.field(name, _TYPES.get(name, pa.int64())) for name in OUTPUTS[query]])


def last_bids(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Return q18, batch by batch: the pairs with bids in the batch, with their last bid so far."""
    keys, order = ["bidder", "auction"], ["date_time", "price", "channel", "url", "extra"]
    last = _bids(batches[0]).iloc[:0]
    for batch in batches:
        bids = _bids(batch)
        both = pd.concat([last, bids])
        latest = both[both["date_time"] == both.groupby(keys)["date_time"].transform("max")]
        is_tied = latest.duplicated(keys, keep=False)
        decided = latest[is_tied].sort_values(order).drop_duplicates(keys, keep="last")
        last = pd.concat([latest[~is_tied], decided])
        touched = last.merge(bids[keys].drop_duplicates(), on=keys)
        yield _table("q18", touched)


def top_bids(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Return q19, batch by batch: the auctions with bids in the batch, with their top bids so far."""
    order = ["price", "date_time", "bidder", "channel", "url", "extra"]
    top = _bids(batches[0]).iloc[:0]
    for batch in batches:
        bids = _bids(batch)
        both = pd.concat([top, bids])
        near = both[both.groupby("auction")["price"].rank(method="min", ascending=False) <= TOP]
        ranked = near.sort_values(order, ascending=False)
        ranked = ranked.assign(rank_number=ranked.groupby("auction").cumcount() + 1)
        ranked = ranked[ranked["rank_number"] <= TOP]
        yield _table("q19", ranked[ranked["auction"].isin(bids["auction"].unique())])
        top = ranked.drop(columns="rank_number")


def sessions(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """Return q11: all sessions of all bidders."""
    bids = pd.concat([_bids(batch)[["bidder", "date_time"]] for batch in batches]).sort_values(["bidder", "date_time"])
    # A bid at the very end of a session belongs to the session, as in Spark.
    is_first = (bids["bidder"] != bids["bidder"].shift()) | (bids["date_time"].diff() > SESSION_GAP)
    groups = bids.groupby(is_first.cumsum())
    found = groups.agg(
        bidder=("bidder", "first"),
        bid_count=("bidder", "size"),
        start_time=("date_time", "min"),
        last=("date_time", "max"),
    )
    return _table("q11", found.assign(end_time=found["last"] + SESSION_GAP))


def processing_time_counts(batches: Sequence[pa.RecordBatch], times_ms: Sequence[int]) -> Iterator[pa.Table]:
    """Return q12, batch by batch: the bidders with bids in it, and their bids so far in the batch's window."""
    counts: dict[tuple[int, int], int] = {}
    for batch, time_ms in zip(batches, times_ms, strict=True):
        start = time_ms // WINDOW_MS * WINDOW_MS
        new = Counter[int](_bids(batch)["bidder"].tolist())
        for bidder, count in new.items():
            counts[bidder, start] = counts.get((bidder, start), 0) + count
        rows = pd.DataFrame({"bidder": list(new), "bid_count": [counts[bidder, start] for bidder in new]})
        times = {
            "start_time": pd.Timestamp(start, unit="ms", tz="UTC"),
            "end_time": pd.Timestamp(start + WINDOW_MS, unit="ms", tz="UTC"),
        }
        yield _table("q12", rows.assign(**times))


def winning_bids(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """Return q9: all auctions that have a winning bid."""
    auctions = pd.concat([auctions_of(batch).to_pandas() for batch in batches])
    bids = pd.concat([_bids(batch) for batch in batches])
    bids = bids[["auction", "bidder", "price", "date_time", "extra"]]
    bids = bids.rename(columns={"date_time": "bid_date_time", "extra": "bid_extra"})
    both = auctions[["id", "date_time", "expires"]].merge(bids, left_on="id", right_on="auction")
    valid = both[(both["bid_date_time"] >= both["date_time"]) & (both["bid_date_time"] <= both["expires"])]
    ranked = valid.sort_values(
        ["id", "price", "bid_date_time", "bidder", "bid_extra"], ascending=[True, False, True, True, True]
    )
    best = ranked.drop_duplicates("id").drop(columns=["date_time", "expires"])
    return _table("q9", auctions.merge(best, on="id"))


def winning_prices(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """Return q4: all categories and windows with a winning bid."""
    won = winning_bids(batches).to_pandas()[["category", "date_time", "price"]]
    won["start_time"] = won["date_time"].dt.floor(_WIDTH)
    found = won.groupby(["category", "start_time"])["price"].agg(auctions="size", total="sum").reset_index()
    found = found.assign(average_price=found["total"] // found["auctions"], end_time=found["start_time"] + _WIDTH)
    return _table("q4", found)


def new_sellers(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Return q8, batch by batch: people and their window, with the first auction of theirs in it."""
    people, sellers = pd.DataFrame(), pd.DataFrame()
    for number, batch in enumerate(batches):
        new = people_of(batch).to_pandas()[["id", "name", "date_time"]]
        opened = auctions_of(batch).to_pandas()[["seller", "date_time"]].rename(columns={"seller": "id"})
        new, opened = (f.assign(start_time=f.pop("date_time").dt.floor(_WIDTH), batch=number) for f in (new, opened))
        people = pd.concat([people, new])
        sellers = pd.concat([sellers, opened]).drop_duplicates(["id", "start_time"])
        both = people.merge(sellers, on=["id", "start_time"])
        found = both[both[["batch_x", "batch_y"]].max(axis=1) == number]
        yield _table("q8", found.assign(end_time=found["start_time"] + _WIDTH))


def bids_of_category(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Return q20, batch by batch: pairs of a bid and its auction; the bid, the auction or both are new in the batch."""
    all_bids, all_auctions = [], []
    for number, batch in enumerate(batches):
        bids = _bids(batch).rename(columns={"date_time": "bid_date_time", "extra": "bid_extra"})
        auctions = auctions_of(batch).to_pandas().rename(columns={"id": "auction"})
        all_bids.append(bids.assign(bid_batch=number))
        all_auctions.append(auctions[auctions["category"] == Q20_CATEGORY].assign(auction_batch=number))
        both = pd.concat(all_bids).merge(pd.concat(all_auctions), on="auction")
        yield _table("q20", both[both[["bid_batch", "auction_batch"]].max(axis=1) == number])


def _bids(batch: pa.RecordBatch) -> pd.DataFrame:
    bids: pd.DataFrame = bids_of(batch).to_pandas()
    return bids


def _table(query: str, rows: pd.DataFrame) -> pa.Table:
    return pa.Table.from_pandas(rows[OUTPUTS[query]], schema=output_schema(query), preserve_index=False)
