"""Nexmark's events: the same for a seed however they are cut into batches, and in Nexmark's proportions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from lanes import write_batch
from nexmark.generator import (
    AUCTION,
    BID,
    FIRST_AUCTION_ID,
    FIRST_PERSON_ID,
    PERSON,
    SCHEMA,
    NexmarkConf,
    auctions_of,
    batches,
    bids_of,
    closing_events,
    events,
    last_auction,
    last_person,
    people_of,
)

from tests.effort import effort, only_thorough

CONF = NexmarkConf()
MANY = events(CONF, 0, 50_000)
DAY_MS = 86_400_000


def times_ms(table: pa.Table | pa.RecordBatch, name: str = "date_time") -> np.ndarray:
    return table.column(name).cast(pa.int64()).to_numpy() // 1000


@pytest.mark.parametrize("conf", [only_thorough(CONF), NexmarkConf(seed=7, out_of_order_group_size=40)])
def test_events_are_the_same_however_they_are_cut(conf: NexmarkConf) -> None:
    many = effort(700, 3000)
    whole = pa.Table.from_batches([events(conf, 0, many)])
    for size in (1, 7, many // 3):
        count = many // size if size > 1 else 50
        parts = pa.Table.from_batches(list(batches(conf, size, count)), SCHEMA)
        assert parts.equals(whole.slice(0, size * count))
    assert pa.Table.from_batches([events(conf, 234, 400)]).equals(whole.slice(234, 400))


def test_a_seed_makes_its_own_events() -> None:
    one, other = (bids_of(events(NexmarkConf(seed=s), 0, 5000)) for s in (0, 1))
    assert one["date_time"] == other["date_time"]
    for name in ("auction", "bidder", "price", "channel", "extra"):
        assert one[name] != other[name]


def test_events_never_change() -> None:
    """Kept results are of these very events."""
    bid = bids_of(events(CONF, 0, 1000)).slice(700, 1).to_pylist()[0]
    assert (bid["auction"], bid["bidder"], bid["price"], bid["channel"]) == (1005, 1021, 60526190, "Apple")


def test_one_person_three_auctions_46_bids_of_fifty() -> None:
    assert Counter(MANY.column("event_type").to_pylist()) == {PERSON: 1000, AUCTION: 3000, BID: 46_000}
    assert MANY.column("event_type").slice(0, 50).to_pylist() == [PERSON] + [AUCTION] * 3 + [BID] * 46
    for i, column in enumerate(("person", "auction", "bid")):
        assert MANY.column(column).is_valid() == pc.equal(MANY.column("event_type"), i)


def test_ids_go_up_one_by_one() -> None:
    assert people_of(MANY)["id"].to_pylist() == [*range(FIRST_PERSON_ID, FIRST_PERSON_ID + 1000)]
    assert auctions_of(MANY)["id"].to_pylist() == [*range(FIRST_AUCTION_ID, FIRST_AUCTION_ID + 3000)]


def test_the_last_person_and_auction_of_an_event() -> None:
    numbers = np.array([0, 1, 3, 4, 49, 50, 51, 53, 99])
    assert last_person(CONF, numbers).tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert last_auction(CONF, numbers).tolist() == [-1, 0, 2, 2, 2, 2, 3, 5, 5]
    two_people = NexmarkConf(person_proportion=2, auction_proportion=1, bid_proportion=1)
    assert last_person(two_people, np.arange(8)).tolist() == [0, 1, 1, 1, 2, 3, 3, 3]
    assert last_auction(two_people, np.arange(8)).tolist() == [-1, -1, 0, 0, 0, 0, 1, 1]


def test_time_advances_by_the_event_rate() -> None:
    assert times_ms(MANY)[[0, 9, 10, 49_999]].tolist() == [(b := CONF.base_time_us // 1000), b, b + 1, b + 4999]
    slow = NexmarkConf(event_rate=4)
    assert np.diff(times_ms(events(slow, 0, 10))).tolist() == [250] * 9


def test_hot_auctions_bidders_and_sellers_have_their_share() -> None:
    bids, auctions = bids_of(MANY), auctions_of(MANY)
    numbers = np.flatnonzero(MANY.column("event_type").to_numpy() == BID)
    hot_auction = last_auction(CONF, numbers) // 100 * 100 + FIRST_AUCTION_ID
    hot_bidder = last_person(CONF, numbers) // 100 * 100 + 1 + FIRST_PERSON_ID
    assert np.mean(bids["auction"].to_numpy() == hot_auction) == pytest.approx(0.5, abs=0.02)
    assert np.mean(bids["bidder"].to_numpy() == hot_bidder) == pytest.approx(0.75, abs=0.02)
    sellers = auctions["seller"].to_numpy()
    assert np.mean(sellers % 100 == FIRST_PERSON_ID % 100) == pytest.approx(0.75, abs=0.03)
    # No further behind than the auctions in flight, no further ahead than the lead.
    behind = last_auction(CONF, numbers) + FIRST_AUCTION_ID - bids["auction"].to_numpy()
    assert (behind.min(), behind.max()) == (-10, 100)
    assert 850 < np.unique(bids["bidder"].to_numpy()).size <= 1010


def test_prices_have_all_numbers_of_digits() -> None:
    prices = bids_of(MANY)["price"].to_numpy()
    assert 100 <= prices.min() <= prices.max() <= 10**8
    assert np.mean(prices < 10**5) == pytest.approx(0.5, abs=0.02)


def test_auctions_last_as_long_as_it_takes_to_open_a_hundred_on_average() -> None:
    auctions = auctions_of(MANY)
    lengths = times_ms(auctions, "expires") - times_ms(auctions)
    horizon = 100 * 50 // 3 // 10
    assert 1 <= lengths.min() <= lengths.max() <= 2 * horizon + 2
    assert lengths.mean() == pytest.approx(horizon, rel=0.05)
    assert (pc.min(pc.subtract(auctions["reserve"], auctions["initial_bid"])).as_py()) >= 100


@pytest.mark.parametrize(
    ("table", "columns", "fixed", "average"),
    [
        (people_of(MANY), ("name", "email_address", "credit_card", "city", "state", "extra"), 8, 200),
        (auctions_of(MANY), ("item_name", "description", "extra"), 48, 500),
        (bids_of(MANY), ("extra",), 32, 100),
    ],
    ids=["person", "auction", "bid"],
)
def test_events_have_their_size_on_average(table: pa.Table, columns: tuple[str, ...], fixed: int, average: int) -> None:
    size = fixed + sum(pc.mean(pc.binary_length(table[c])).as_py() for c in columns)
    assert size == pytest.approx(average, rel=0.02)


def test_random_strings_have_their_letters() -> None:
    person = people_of(MANY).to_pylist()[17]
    first, last = person["name"].split(" ")
    assert first.isalpha() and last.isalpha()
    assert "@" in person["email_address"] and person["email_address"].endswith(".com")
    assert [len(block) for block in person["credit_card"].split(" ")] == [4] * 4
    bids = bids_of(MANY).to_pandas()
    hot = bids["channel"].isin(["Google", "Facebook", "Baidu", "Apple"])
    assert hot.mean() == pytest.approx(0.5, abs=0.02)
    assert (bids.groupby("channel")["url"].nunique() == 1).all()
    assert not bids[hot]["url"].str.contains("channel_id").any()
    assert bids[~hot]["url"].str.contains("channel_id").mean() == pytest.approx(0.9, abs=0.02)


def test_out_of_order_groups_are_shuffled_and_no_event_is_lost() -> None:
    ordered, shuffled = (events(NexmarkConf(out_of_order_group_size=n), 0, 1000) for n in (1, 100))
    assert shuffled != ordered
    times = times_ms(shuffled)
    assert (np.diff(times) < 0).any()
    assert [sorted(times[i : i + 100]) for i in range(0, 1000, 100)] == [
        times_ms(ordered)[i : i + 100].tolist() for i in range(0, 1000, 100)
    ]
    assert sorted(bids_of(shuffled)["extra"].to_pylist()) == sorted(bids_of(ordered)["extra"].to_pylist())


@pytest.mark.parametrize(
    "wrong", [{"event_rate": 0}, {"out_of_order_group_size": 0}, {"out_of_order_group_size": 1906}]
)
def test_a_conf_that_makes_no_stream_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        NexmarkConf(**wrong)


@pytest.mark.parametrize("group", [1, 397])
def test_closing_events_are_a_day_later_and_have_no_bidder(group: int) -> None:
    closing = closing_events(NexmarkConf(out_of_order_group_size=group), 50_000)
    (auction,), (bid,) = auctions_of(closing).to_pylist(), bids_of(closing).to_pylist()
    assert (auction["id"], bid["auction"], bid["bidder"]) == (-1, -1, -1)
    last = times_ms(events(CONF, 50_000, 1))[0]
    assert times_ms(closing).tolist() == [last + DAY_MS] * 2
    assert times_ms(auctions_of(closing), "expires").tolist() == [last + 2 * DAY_MS]


def test_files_of_a_batch_have_its_events_between_them(tmp_path: Path) -> None:
    batch = events(CONF, 100, 51)
    write_batch(pa.Table.from_batches([batch]), tmp_path / "000003", 2)
    files = sorted((tmp_path / "000003").iterdir())
    read = [pq.read_table(path) for path in files]
    assert [path.name for path in files] == ["0.parquet", "1.parquet"]
    assert [table.num_rows for table in read] == [26, 25]
    assert read[1].equals(pa.Table.from_batches([batch]).take(list(range(1, 51, 2))))
    assert {path.stat().st_mtime for path in files} == {1_700_000_003}
