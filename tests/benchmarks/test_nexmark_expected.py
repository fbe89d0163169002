"""What Nexmark's queries must give, on cases that can be worked out by hand."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from nexmark import expected
from nexmark.generator import AUCTION, AUCTION_TYPE, BID, BID_TYPE, PERSON, SCHEMA, NexmarkConf, events
from nexmark.lanes import Check, check_of, expected_batches
from nexmark.queries import OUTPUTS, best_bids

START = dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc)


def at(seconds: float) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


def bid(auction: int, bidder: int, price: int, seconds: float, extra: str = "") -> dict[str, Any]:
    own = {"auction": auction, "bidder": bidder, "price": price, "channel": "c", "url": "u", "extra": extra}
    return {"event_type": BID, "bid": own, "date_time": at(seconds)}


def auction(number: int, opened: float, expires: float) -> dict[str, Any]:
    own: dict[str, Any] = {f.name: f"{f.name} {number}" if pa.types.is_string(f.type) else 7 for f in AUCTION_TYPE}
    own |= {"id": number, "expires": at(expires)}
    return {"event_type": AUCTION, "auction": own, "date_time": at(opened)}


def batch(*given: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(given), schema=SCHEMA)


def rows(table: pa.Table, *names: str) -> set[tuple[Any, ...]]:
    found = [tuple(row[n] for n in names) for row in table.to_pylist()]
    assert len(set(found)) == len(found)
    return set(found)


def test_last_bids_are_those_of_the_pairs_touched_with_the_greatest_at_one_time() -> None:
    first = batch(bid(1, 5, 10, 0), bid(1, 5, 30, 1, "a"), bid(1, 5, 30, 1, "b"), bid(1, 6, 99, 0), bid(2, 5, 1, 0))
    second = batch(bid(1, 5, 20, 0.5), bid(2, 5, 2, 0), bid(2, 6, 1, 3))
    one, other = expected.last_bids([first, second])
    names = ("bidder", "auction", "price", "extra", "date_time")
    assert rows(one, *names) == {(5, 1, 30, "b", at(1)), (6, 1, 99, "", at(0)), (5, 2, 1, "", at(0))}
    assert rows(other, *names) == {(5, 1, 30, "b", at(1)), (5, 2, 2, "", at(0)), (6, 2, 1, "", at(3))}


def test_people_come_once_with_the_first_auction_of_their_window() -> None:
    def person(number: int, seconds: float) -> dict[str, Any]:
        return {"event_type": PERSON, "person": {"id": number, "name": f"n{number}"}, "date_time": at(seconds)}

    def opened(number: int, seller: int, seconds: float) -> dict[str, Any]:
        one = auction(number, seconds, 99)
        one["auction"]["seller"] = seller
        return one

    first = batch(person(1, 2), person(2, 3), person(3, 9), opened(1, 1, 4), opened(2, 1, 5), opened(3, 3, 11))
    second = batch(opened(4, 2, 9), opened(5, 1, 9), person(4, 12))
    one, other = expected.new_sellers([first, second])
    names = ("id", "name", "start_time", "end_time")
    assert rows(one, *names) == {(1, "n1", at(0), at(10))}
    assert rows(other, *names) == {(2, "n2", at(0), at(10))}


def test_bids_come_with_their_auction_in_the_batch_of_the_later_one() -> None:
    def of_category(number: int, category: int) -> dict[str, Any]:
        one = auction(number, 0, 9)
        one["auction"]["category"] = category
        return one

    first = batch(of_category(1, 10), of_category(2, 11), bid(1, 5, 10, 0), bid(2, 5, 11, 0), bid(3, 5, 12, 0))
    second = batch(of_category(3, 10), bid(1, 6, 13, 1), bid(4, 6, 14, 1))
    one, other = expected.bids_of_category([first, second])
    names = ("auction", "price", "item_name")
    assert rows(one, *names) == {(1, 10, "item_name 1")}
    assert rows(other, *names) == {(3, 12, "item_name 3"), (1, 13, "item_name 1")}


def test_top_bids_are_ten_and_the_later_of_equal_prices_comes_first() -> None:
    first = batch(*(bid(1, i, 100 + i, 0) for i in range(9)), bid(2, 1, 5, 0), bid(2, 1, 5, 1))
    second = batch(bid(1, 50, 104, 1), bid(1, 51, 1, 0), bid(3, 1, 1, 0))
    one, other = expected.top_bids([first, second])
    names = ("auction", "rank_number", "price", "bidder")
    assert rows(one, *names) == {(1, 9 - i, 100 + i, i) for i in range(9)} | {(2, 1, 5, 1), (2, 2, 5, 1)}
    assert rows(one, "auction", "rank_number", "date_time") >= {(2, 1, at(1)), (2, 2, at(0))}
    after = [(108, 8), (107, 7), (106, 6), (105, 5), (104, 50), (104, 4), (103, 3), (102, 2), (101, 1), (100, 0)]
    assert rows(other, *names) == {(1, i + 1, *pair) for i, pair in enumerate(after)} | {(3, 1, 1, 1)}


def test_the_tenth_of_equal_prices_is_the_latest() -> None:
    highest = [bid(1, i, 1000 + i, 0) for i in range(9)]
    (found,) = expected.top_bids([batch(*highest, bid(1, 20, 5, 1), bid(1, 21, 5, 3), bid(1, 22, 5, 2))])
    assert found.num_rows == 10
    assert rows(found, "rank_number", "bidder") >= {(10, 21)}


def test_sessions_end_ten_seconds_after_their_last_bid_and_touching_ones_are_one() -> None:
    first = batch(bid(1, 5, 1, 0), bid(1, 5, 1, 4), bid(1, 6, 1, 9), bid(2, 5, 1, 30))
    second = batch(bid(1, 5, 1, 14), bid(1, 6, 1, 19.001))
    found = expected.sessions([first, second])
    assert rows(found, *OUTPUTS["q11"]) == {
        (5, 3, at(0), at(24)),
        (5, 1, at(30), at(40)),
        (6, 1, at(9), at(19)),
        (6, 1, at(19.001), at(29.001)),
    }


def test_counts_grow_within_a_window_of_processing_time() -> None:
    given = [batch(bid(1, 5, 1, 0), bid(2, 5, 1, 0), bid(1, 6, 1, 0)), batch(bid(1, 5, 1, 0)), batch(bid(1, 5, 1, 0))]
    one, two, three = expected.processing_time_counts(given, [20_000, 29_999, 30_000])
    counts = ("bidder", "bid_count")
    assert (rows(one, *counts), rows(two, *counts), rows(three, *counts)) == ({(5, 2), (6, 1)}, {(5, 3)}, {(5, 1)})
    start, end = three["start_time"][0].as_py(), three["end_time"][0].as_py()
    assert (start.timestamp(), end.timestamp()) == (30, 40)


def test_counts_of_a_bidder_sum_up_to_the_same_however_batches_fall_into_windows() -> None:
    given = [events(NexmarkConf(), i * 500, 500) for i in range(4)]
    totals = []
    for times in ([0, 1, 2, 3], [0, 10_000, 10_001, 35_000], [9_999, 20_000, 30_000, 40_000]):
        last: dict[tuple[int, Any], int] = {}
        for table in expected.processing_time_counts(given, times):
            last |= {(row["bidder"], row["start_time"]): row["bid_count"] for row in table.to_pylist()}
        sums: dict[int, int] = {}
        for (bidder, _), count in last.items():
            sums[bidder] = sums.get(bidder, 0) + count
        totals.append(sums)
    assert totals[0] == totals[1] == totals[2]
    assert sum(totals[0].values()) == 4 * 460


@pytest.mark.parametrize(
    ("given", "winner"),
    [
        ([(5, 10, 3, ""), (6, 20, 4, "")], (6, 20, 4, "")),
        ([(5, 20, 3, ""), (6, 20, 2, "")], (6, 20, 2, "")),
        ([(7, 20, 3, ""), (6, 20, 3, "")], (6, 20, 3, "")),
        ([(6, 20, 3, "b"), (6, 20, 3, "a")], (6, 20, 3, "a")),
        ([(5, 10, 1, ""), (6, 99, 0.999, "")], (5, 10, 1, "")),
        ([(5, 10, 9, ""), (6, 99, 9.001, "")], (5, 10, 9, "")),
        ([(6, 99, 10, "")], None),
        ([], None),
    ],
    ids=["highest", "earliest", "bidder", "extra", "opening", "closing", "only_late", "none"],
)
def test_the_winning_bid(given: list[tuple[int, int, float, str]], winner: tuple[int, int, float, str] | None) -> None:
    own = [bid(1, *g) for g in given]
    for order in (own, own[::-1]):
        found = expected.winning_bids([batch(*order, bid(2, 5, 1000, 3)), batch(auction(1, 1, 9), auction(3, 1, 9))])
        names = ("id", "auction", "bidder", "price", "bid_date_time", "bid_extra", "item_name", "expires")
        must = set() if winner is None else {(1, 1, *winner[:2], at(winner[2]), winner[3], "item_name 1", at(9))}
        assert rows(found, *names) == must


def test_average_prices_are_of_the_auctions_that_opened_in_a_window_and_were_sold() -> None:
    bids = [bid(1, 5, 10, 2), bid(1, 6, 30, 3), bid(1, 7, 99, 12), bid(2, 5, 25, 9), bid(4, 5, 8, 12)]
    given = [batch(auction(1, 1, 9), auction(2, 8, 30), auction(3, 2, 9)), batch(*bids, auction(4, 10, 20))]
    names = ("category", "average_price", "auctions", "start_time", "end_time")
    must = {(7, 27, 2, at(0), at(10)), (7, 8, 1, at(10), at(20))}
    assert rows(expected.winning_prices(given), *names) == must


def test_of_the_bids_that_a_join_has_found_together_the_best_one_counts() -> None:
    """The earliest of the highest price, then the lowest bidder; bids behind the end of their auction do not count."""
    auctions = pa.table({"id": [2, 1, 1, 1, 1, 3], "expires": [50, 9, 9, 9, 9, 4], "name": ["b", *"aaaa", "c"]})
    found = pa.table(
        {
            "id": auctions["id"],
            "price": [3, 20, 30, 30, 99, 7],
            "bid_date_time": [8, 1, 5, 4, 10, 5],
            "bidder": [1, 1, 1, 2, 1, 1],
            "bid_extra": ["", "", "", "x", "", ""],
        }
    )
    best = best_bids(auctions, found).select(["id", "name", "price", "bidder", "bid_extra", "low"]).to_pylist()
    assert [tuple(row.values()) for row in best] == [(1, "a", 30, 2, "x", -30), (2, "b", 3, 1, "", -3)]
    assert best_bids(auctions.slice(0, 0), found.slice(0, 0)).num_rows == 0


@pytest.mark.parametrize("query", OUTPUTS)
def test_every_query_gives_its_columns(query: str) -> None:
    given = [events(NexmarkConf(event_rate=300), i * 1000, 1000) for i in range(3)]
    tables = expected_batches(query, given, [0, 10_000, 10_000])
    assert all(t.schema.names == OUTPUTS[query] and t.num_rows for t in tables)
    check = sum((check_of(t) for t in tables), Check())
    assert check.rows == sum(t.num_rows for t in tables)
    # A value that is wrong is seen.
    table = tables[0]
    wrong = table.set_column(1, table.column_names[1], table.column(1).take(pa.array([*range(1, len(table)), 0])))
    assert check_of(wrong) != check_of(table)


def test_the_bids_of_a_type_have_all_fields() -> None:
    assert OUTPUTS["q18"] == ["auction", "bidder", "price", "channel", "url", "date_time", "extra"]
    assert {f.name for f in BID_TYPE} | {"date_time"} == set(OUTPUTS["q18"])
