"""q9 in columns: the winning bids of all auctions of a partition at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_bridge import ArrowBatch, ArrowResult, ArrowStatefulProcessor

AUCTION = ["item_name", "description", "initial_bid", "reserve", "date_time", "expires", "seller", "category", "extra"]
BID = ["bidder", "price", "bid_date_time", "bid_extra"]
BID_FIELDS = "bidder: long, price: long, bid_date_time: timestamp, bid_extra: string"
STATE = (
    "item_name string, description string, initial_bid long, reserve long, date_time timestamp, expires timestamp, "
    "seller long, category long, extra string, bidder long, price long, bid_date_time timestamp, bid_extra string, "
    f"waiting array<struct<{BID_FIELDS}>>"
)
WINNING_BID_OUTPUT = f"id long, {STATE[: STATE.index(', waiting')]}"

Longs = npt.NDArray[np.int64]


class WinningBids(ArrowStatefulProcessor):
    """Keep the highest bid made while an auction was open, and emit it when the watermark reaches the auction's end.

    Of bids of one price the earliest wins, then the bidder with the lower id, then the lesser extra. A bid that comes
    before its auction waits until no auction can come that was open at its time.
    """

    def init(self, handle: Any) -> None:
        handle.declare_state(STATE)

    def process(self, batch: ArrowBatch) -> ArrowResult | None:
        m, rows, state = batch.num_keys, batch.rows, batch.state
        if not m:
            return None
        watermark_us = batch.timer_values.getCurrentWatermarkInMs() * 1000
        keys_of_rows, is_auction = batch.key_index.to_numpy(), _flags(rows["expires"])

        # The auctions, stored ones and new ones.
        places = np.arange(m)
        places[keys_of_rows[is_auction]] = m + np.flatnonzero(is_auction)
        auctions = pa.concat_tables([state.select(AUCTION), rows.select(AUCTION)]).take(pa.array(places))
        is_known = _flags(auctions["expires"])
        opened, expires = _us(auctions["date_time"]), _us(auctions["expires"])

        # All bids: the best ones so far, those that wait, and the new ones.
        has_best, is_bid = _flags(state["price"]), pa.array(~is_auction)
        waiting = state["waiting"].combine_chunks()
        bids = pa.concat_tables(
            [
                state.select(BID).filter(pa.array(has_best)),
                _fields(pc.list_flatten(waiting)),
                rows.select(["bidder", "price", "date_time", "bid_extra"]).rename_columns(BID).filter(is_bid),
            ]
        ).combine_chunks()
        keys = np.concatenate(
            [np.flatnonzero(has_best), pc.list_parent_indices(waiting).to_numpy(), keys_of_rows[~is_auction]]
        ).astype(np.int64)
        times = _us(bids["bid_date_time"])
        is_valid = is_known[keys] & (times >= opened[keys]) & (times <= expires[keys])
        best = _winners(bids, keys, is_valid, m)
        waits = ~is_known[keys] & (times > watermark_us)

        timed = np.zeros(m, np.bool_)
        timed[batch.expired_timers["key_index"].to_numpy()] = True
        closes = is_known & timed & (expires <= watermark_us)
        has_waiting = np.zeros(m, np.bool_)
        has_waiting[keys[waits]] = True
        new = pa.table({**_columns(auctions), **_columns(best), "waiting": _lists(bids, keys, waits, m)})
        sold = pa.array(closes & _flags(best["price"]))
        output = new.drop_columns(["waiting"]).add_column(0, "id", batch.keys["id"]).filter(sold)
        return ArrowResult(
            output=output,
            state=new,
            removed=closes | ~(is_known | has_waiting),
            timers=_timers(places >= m, expires, keys[waits], times[waits]),
        )


def _winners(bids: pa.Table, keys: Longs, is_valid: npt.NDArray[np.bool_], num_keys: int) -> pa.Table:
    """Return the best of the valid bids of each key, a row per key, of nulls where there is none."""
    valid = np.flatnonzero(is_valid)
    price, of_keys = bids["price"].to_numpy()[valid], keys[valid]
    # Only bids of the highest price need to be sorted.
    highest = np.full(num_keys, np.iinfo(np.int64).min)
    np.maximum.at(highest, of_keys, price)
    valid = valid[price == highest[of_keys]]
    contest = bids.take(pa.array(valid)).append_column("key", pa.array(keys[valid]))
    order = pc.sort_indices(contest, [(c, "ascending") for c in ("key", "bid_date_time", "bidder", "bid_extra")])
    ordered = valid[order.to_numpy()]
    found, first = np.unique(keys[ordered], return_index=True)
    places, is_missing = np.zeros(num_keys, np.int64), np.ones(num_keys, np.bool_)
    places[found], is_missing[found] = ordered[first], False
    return bids.take(pa.array(places, mask=is_missing))


def _lists(bids: pa.Table, keys: Longs, chosen: npt.NDArray[np.bool_], num_keys: int) -> pa.ListArray:
    """Return the chosen bids as a list per key."""
    places = np.flatnonzero(chosen)
    places = places[np.argsort(keys[places], kind="stable")]
    offsets = np.zeros(num_keys + 1, np.int32)
    np.cumsum(np.bincount(keys[places], minlength=num_keys), out=offsets[1:])
    rows = bids.take(pa.array(places)).combine_chunks()
    columns = [c.combine_chunks() for c in rows.columns]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.StructArray.from_arrays(columns, BID))


def _timers(is_opened: npt.NDArray[np.bool_], expires: Longs, waiting: Longs, times: Longs) -> pa.Table:
    """Return timers at the end of new auctions, and at the last of the bids that wait."""
    last = np.full(len(is_opened), np.iinfo(np.int64).min)
    np.maximum.at(last, waiting, times)
    opened, waits = np.flatnonzero(is_opened), np.unique(waiting)
    fires = np.concatenate([expires[opened], last[waits]])
    return pa.table({"key_index": np.concatenate([opened, waits]), "expiry_ms": -(-fires // 1000)})


def _flags(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    flags: npt.NDArray[np.bool_] = column.is_valid().to_numpy()
    return flags


def _us(column: pa.ChunkedArray) -> Longs:
    times: Longs = column.cast(pa.int64()).fill_null(0).to_numpy()
    return times


def _fields(structs: pa.StructArray) -> pa.Table:
    return pa.table(structs.flatten(), names=BID)


def _columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))
