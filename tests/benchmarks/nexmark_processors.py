"""The queries' logic as processors of rows, with an API that PySpark 4.2 and this project share, and in columns.

Times are microseconds since 1970 in the processors of rows, which so need no time zone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row

TOP = 10
LAST_BID = "us long, price long, channel string, url string, extra string"
LAST_BID_OUTPUT = f"bidder long, auction long, {LAST_BID}"
RANKED_BID = "price long, us long, bidder long, channel string, url string, extra string"
TOP_BIDS_OUTPUT = f"auction long, {RANKED_BID}, rank_number int"
AUCTION = (
    "item_name string, description string, initial_bid long, reserve long, us long, expires_us long, seller long, "
    "category long, extra string"
)
BID = "price long, us long, bidder long, extra string"
WINNING_BID_OUTPUT = f"id long, {AUCTION}, bidder long, price long, bid_us long, bid_extra string"
OPENED, EXPIRES = 4, 5
"""The places of the times in ``AUCTION``."""


def last_bid(base: Any) -> Any:
    """Return the processor of q18: the last bid of a bidder for an auction; of several at one time the greatest."""

    class LastBid(base):  # type: ignore[misc]
        def init(self, handle: Any) -> None:
            self.last = handle.getValueState("last", LAST_BID)

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            last = max((row.us, row.price, row.channel, row.url, row.extra) for row in rows)
            before = self.last.get()
            if before is None or last > tuple(before):
                self.last.update(last)
            else:
                last = before
            us, price, channel, url, extra = last
            yield Row(bidder=key[0], auction=key[1], us=us, price=price, channel=channel, url=url, extra=extra)

        def close(self) -> None:
            pass

    return LastBid()


def top_bids(base: Any) -> Any:
    """Return the processor of q19: an auction's ten bids of the highest price, of equal ones by their other fields."""

    class TopBids(base):  # type: ignore[misc]
        def init(self, handle: Any) -> None:
            self.top = handle.getListState("top", RANKED_BID)

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            bids = [(row.price, row.us, row.bidder, row.channel, row.url, row.extra) for row in rows]
            bids += map(tuple, self.top.get())
            top = sorted(bids, reverse=True)[:TOP]
            self.top.put(top)
            for i, (price, us, bidder, channel, url, extra) in enumerate(top):
                yield Row(
                    auction=key[0],
                    price=price,
                    us=us,
                    bidder=bidder,
                    channel=channel,
                    url=url,
                    extra=extra,
                    rank_number=i + 1,
                )

        def close(self) -> None:
            pass

    return TopBids()


def winning_bid(base: Any) -> Any:
    """Return the processor of q9: the highest bid made while the auction was open, when the watermark reaches its end.

    Of bids of one price the earliest wins, then the bidder with the lower id, then the lesser extra. A bid that
    comes before its auction waits until no auction can come that was open at its time.
    """

    class WinningBid(base):  # type: ignore[misc]
        def init(self, handle: Any) -> None:
            self.handle = handle
            self.auction = handle.getValueState("auction", AUCTION)
            self.best = handle.getValueState("best", BID)
            self.waiting = handle.getListState("waiting", BID)

        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            auction, bids = self.auction.get(), []
            for row in rows:
                if row.expires_us is None:
                    bids.append((row.price, row.us, row.bidder, row.bid_extra))
                    continue
                auction = (
                    row.item_name,
                    row.description,
                    row.initial_bid,
                    row.reserve,
                    row.us,
                    row.expires_us,
                    row.seller,
                    row.category,
                    row.extra,
                )
                self.auction.update(auction)
                self.handle.registerTimer(to_ms(row.expires_us))
                bids += map(tuple, self.waiting.get())
                self.waiting.clear()
            if auction is None:
                bids = [bid for bid in bids if to_ms(bid[1]) > timerValues.getCurrentWatermarkInMs()]
                if bids:
                    self.waiting.appendList(bids)
                    self.handle.registerTimer(max(to_ms(bid[1]) for bid in bids))
                return
            best = winner(bids, auction[OPENED], auction[EXPIRES], self.best.get())
            if best is not None:
                self.best.update(best)
            yield from ()

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
            auction, watermark_ms = self.auction.get(), timerValues.getCurrentWatermarkInMs()
            if auction is None:
                waiting = [tuple(bid) for bid in self.waiting.get() if to_ms(bid[1]) > watermark_ms]
                if waiting:
                    self.waiting.put(waiting)
                else:
                    self.waiting.clear()
                return
            if to_ms(auction[EXPIRES]) > watermark_ms:
                return
            best = self.best.get()
            self.auction.clear()
            self.best.clear()
            if best is not None:
                yield winning_row(key[0], auction, best)

        def close(self) -> None:
            pass

    return WinningBid()


def winner(bids: list[Any], opened_us: int, expires_us: int, best: Any = None) -> Any:
    """Return the winner of the bids (``BID``) within the time and of the best bid before."""
    valid = [bid for bid in bids if opened_us <= bid[1] <= expires_us]
    if best is not None:
        valid.append(tuple(best))
    return min(valid, key=lambda bid: (-bid[0], *bid[1:]), default=None)


def winning_row(auction_id: int, auction: Any, best: Any) -> Row:
    """Return a row of ``WINNING_BID_OUTPUT``."""
    item_name, description, initial_bid, reserve, us, expires_us, seller, category, extra = auction
    price, bid_us, bidder, bid_extra = best
    return Row(
        id=auction_id,
        item_name=item_name,
        description=description,
        initial_bid=initial_bid,
        reserve=reserve,
        us=us,
        expires_us=expires_us,
        seller=seller,
        category=category,
        extra=extra,
        bidder=bidder,
        price=price,
        bid_us=bid_us,
        bid_extra=bid_extra,
    )


def to_ms(us: int) -> int:
    """Return the first millisecond not before a time."""
    return -(-us // 1000)
