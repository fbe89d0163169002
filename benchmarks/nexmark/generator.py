"""Nexmark's events: people who register, auctions that they open, and bids; deterministic, in columns.

Names, proportions, hot keys, sizes and times are those of the generators of Apache Beam and nexmark-flink
(``GeneratorConfig``, ``PersonGenerator``, ``AuctionGenerator``, ``BidGenerator``, ``PriceGenerator``), field names in
snake case. What differs: random numbers depend on the seed and the event's number alone (``Draws``), event ids
begin at 0, and bidders are those of Beam (nexmark-flink adds the first person's id twice).

An event is a row as in nexmark-flink's source: its type, a struct per type, two of them null, and ``date_time``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

PERSON, AUCTION, BID = 0, 1, 2
FIRST_PERSON_ID = FIRST_AUCTION_ID = 1000
FIRST_CATEGORY_ID = 10
PERSON_ID_LEAD = AUCTION_ID_LEAD = 10
HOT_SELLER_EVERY = HOT_AUCTION_EVERY = HOT_BIDDER_EVERY = 100
CATEGORIES = 5
CHANNELS = 10_000
SHUFFLE_FACTOR = 953

Longs = npt.NDArray[np.int64]
TIME = pa.timestamp("us", "UTC")
_PERSON = "id:long, name:string, email_address:string, credit_card:string, city:string, state:string, extra:string"
_AUCTION = (
    "id:long, item_name:string, description:string, initial_bid:long, reserve:long, expires:timestamp, seller:long, "
    "category:long, extra:string"
)
_BID = "auction:long, bidder:long, price:long, channel:string, url:string, extra:string"
SPARK_SCHEMA = (
    f"event_type int, person struct<{_PERSON}>, auction struct<{_AUCTION}>, bid struct<{_BID}>, date_time timestamp"
)


def _struct_type(fields: str) -> pa.StructType:
    kinds = {"long": pa.int64(), "string": pa.string(), "timestamp": TIME}
    return pa.struct([(name, kinds[kind]) for name, kind in (field.split(":") for field in fields.split(", "))])


PERSON_TYPE, AUCTION_TYPE, BID_TYPE = map(_struct_type, (_PERSON, _AUCTION, _BID))
_STRUCTS = [("person", PERSON_TYPE), ("auction", AUCTION_TYPE), ("bid", BID_TYPE)]
SCHEMA = pa.schema([("event_type", pa.int32()), *_STRUCTS, ("date_time", TIME)])

_STATES = pa.array(["AZ", "CA", "ID", "OR", "WA", "WY"])
_CITIES = pa.array(
    ["Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent", "Cheyenne"]
)
_FIRST_NAMES = pa.array(
    ["Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter"]
)
_LAST_NAMES = pa.array(["Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"])
_HOT_CHANNELS = pa.array(["Google", "Facebook", "Baidu", "Apple"])

# Random numbers and strings depend only on the seed and the event's number. A draw is a hash of (seed, event number,
# index of the draw in the event), so that an event is the same in any batch, and batches can be made in any order. The
# hash is the finalizer of SplittableRandom, which Nexmark uses.

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_DRAWS_PER_EVENT = np.uint64(64)
_POOL_BYTES = 1 << 20
_LONGEST_TEXT = 1 << 16
_SPECIAL_ONE_IN = 13


@dataclass
class Draws:
    """Random draws for the events with these numbers: each call is another draw, of one value per event."""

    seed: int
    numbers: Longs
    _count: int = field(default=0, init=False)

    def bits(self) -> npt.NDArray[np.uint64]:
        place = self.numbers.astype(np.uint64) * _DRAWS_PER_EVENT + np.uint64(self._count)
        self._count += 1
        if self._count > int(_DRAWS_PER_EVENT):
            raise ValueError(f"An event takes more than {_DRAWS_PER_EVENT} draws; raise _DRAWS_PER_EVENT.")
        return _mixed(_mixed(np.full(1, self.seed, np.uint64)) + place * _GAMMA)

    def below(self, bound: Longs | int) -> Longs:
        """Draw an integer from 0 to ``bound - 1``, all as likely."""
        # The upper 32 bits times the bound: a bound has to be small against 2**32.
        high = (self.bits() >> np.uint64(32)) * np.asarray(bound, np.uint64) >> np.uint64(32)
        values: Longs = high.astype(np.int64)
        return values

    def unit(self) -> npt.NDArray[np.float64]:
        """Draw a number from 0 to 1, without 1."""
        values: npt.NDArray[np.float64] = (self.bits() >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return values

    def one_of(self, values: pa.Array) -> pa.Array:
        return values.take(pa.array(self.below(len(values))))

    def letters(self, lengths: Longs) -> pa.StringArray:
        """Draw so many lower-case letters for each event."""
        return self._texts(_pool(0), lengths)

    def words(self, max_length: int, special: str = " ") -> pa.StringArray:
        """Draw 3 to ``max_length - 1`` letters, one in thirteen of them ``special``."""
        return self._texts(_pool(ord(special)), 3 + self.below(max_length - 3))

    def digits(self, count: int) -> pa.StringArray:
        wanted, digits = self.below(10**count), np.empty((len(self.numbers), count), np.uint8)
        for place in reversed(range(count)):
            wanted, digit = np.divmod(wanted, 10)
            digits[:, place] = digit + ord("0")
        return _strings(digits.reshape(-1), np.arange(len(self.numbers) + 1, dtype=np.int64) * count)

    def _texts(self, pool: npt.NDArray[np.uint8], lengths: Longs) -> pa.StringArray:
        if lengths.max(initial=0) > _LONGEST_TEXT:
            raise ValueError(f"A string may have at most {_LONGEST_TEXT} letters, not {lengths.max()}.")
        starts = self.below(len(pool) - _LONGEST_TEXT)
        ends = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        return _strings(pool[np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)], ends)


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


_POOLS: dict[int, npt.NDArray[np.uint8]] = {}


def _pool(special: int) -> npt.NDArray[np.uint8]:
    """Return a long random string, whose parts are the random strings of events; the same for every seed."""
    if special not in _POOLS:
        draws = Draws(special, np.arange(_POOL_BYTES, dtype=np.int64))
        letters = (ord("a") + draws.below(26)).astype(np.uint8)
        _POOLS[special] = (
            np.where(draws.below(_SPECIAL_ONE_IN) == 0, np.uint8(special), letters) if special else letters
        )
    return _POOLS[special]


def _strings(characters: npt.NDArray[np.uint8], ends: Longs) -> pa.StringArray:
    offsets = pa.py_buffer(ends.astype(np.int32))
    return pa.StringArray.from_buffers(len(ends) - 1, offsets, pa.py_buffer(np.ascontiguousarray(characters)))


# -- the events


@dataclass(frozen=True)
class NexmarkConf:
    """Nexmark's options, with its defaults. ``event_rate`` is events per second of event time.

    A hot ratio r makes 1 - 1/r of the auctions or bids go to the hot seller, auction or bidder of the moment.
    ``out_of_order_group_size``: within groups of so many events they come in pseudo-random order; 1 leaves them in
    order. ``base_time_us`` is the time of the first event, in microseconds since 1970.
    """

    seed: int = 0
    event_rate: int = 10_000
    person_proportion: int = 1
    auction_proportion: int = 3
    bid_proportion: int = 46
    hot_auction_ratio: int = 2
    hot_sellers_ratio: int = 4
    hot_bidders_ratio: int = 4
    num_in_flight_auctions: int = 100
    num_active_people: int = 1000
    avg_person_bytes: int = 200
    avg_auction_bytes: int = 500
    avg_bid_bytes: int = 100
    out_of_order_group_size: int = 1
    base_time_us: int = 1_436_918_400_000_000

    def __post_init__(self) -> None:
        if self.event_rate < 1 or self.out_of_order_group_size < 1:
            raise ValueError(
                f"event_rate={self.event_rate} and out_of_order_group_size={self.out_of_order_group_size} must be "
                "positive."
            )
        if self.out_of_order_group_size % SHUFFLE_FACTOR == 0:
            raise ValueError(
                f"out_of_order_group_size={self.out_of_order_group_size} is a multiple of {SHUFFLE_FACTOR}, the factor "
                "that shuffles a group: choose another."
            )

    @property
    def total_proportion(self) -> int:
        """Return after how many events the types repeat."""
        return self.person_proportion + self.auction_proportion + self.bid_proportion

    def times(self, numbers: Longs) -> Longs:
        """Return event times in whole milliseconds, as microseconds since 1970."""
        return self.base_time_us + numbers * 1000 // self.event_rate * 1000

    def adjusted(self, numbers: Longs) -> Longs:
        """Return the number of the event in each place of the stream."""
        size = self.out_of_order_group_size
        return numbers // size * size + numbers * SHUFFLE_FACTOR % size


def events(conf: NexmarkConf, first: int, count: int) -> pa.RecordBatch:
    """Return ``count`` events of the stream from place ``first``, of ``SCHEMA``; the same in every call."""
    numbers = conf.adjusted(np.arange(first, first + count, dtype=np.int64))
    rest = numbers % conf.total_proportion
    is_auction = (rest >= conf.person_proportion) & (rest < conf.person_proportion + conf.auction_proportion)
    types = np.where(rest < conf.person_proportion, PERSON, np.where(is_auction, AUCTION, BID)).astype(np.int32)
    columns = [pa.array(types)]
    for kind, make in ((PERSON, _people), (AUCTION, _auctions), (BID, _bids)):
        is_kind = types == kind
        made = make(conf, numbers[is_kind])
        places = pa.array(np.cumsum(is_kind) - 1, mask=~is_kind)
        columns.append(made.take(places))
    columns.append(_timestamps(conf.times(numbers)))
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def batches(conf: NexmarkConf, events_per_batch: int, count: int) -> Iterator[pa.RecordBatch]:
    for i in range(count):
        yield events(conf, i * events_per_batch, events_per_batch)


def closing_events(conf: NexmarkConf, after: int) -> pa.RecordBatch:
    """Return an auction and a bid a day after the first ``after`` events: the watermark then closes all before.

    No other event has their ids.
    """
    time = _timestamps(conf.times(np.array([after], np.int64)) + 86_400_000_000)
    expires = _timestamps(conf.times(np.array([after], np.int64)) + 2 * 86_400_000_000)
    ordered = replace(conf, out_of_order_group_size=1)
    auction, bid = events(ordered, conf.person_proportion, 1), events(ordered, conf.total_proportion - 1, 1)
    own = [_replaced(auction, AUCTION, id=pa.array([-1]), expires=expires)]
    own.append(_replaced(bid, BID, auction=pa.array([-1]), bidder=pa.array([-1])))
    table = pa.Table.from_batches(own)
    (batch,) = table.set_column(4, "date_time", pa.concat_arrays([time, time])).combine_chunks().to_batches()
    return batch.cast(SCHEMA)


def last_person(conf: NexmarkConf, numbers: Longs) -> Longs:
    """Return the number of the last person up to each event, counted from 0."""
    epoch, offset = np.divmod(numbers, conf.total_proportion)
    return epoch * conf.person_proportion + np.minimum(offset, conf.person_proportion - 1)


def last_auction(conf: NexmarkConf, numbers: Longs) -> Longs:
    """Return the number of the last auction up to each event, counted from 0; -1 before the first."""
    epoch, offset = np.divmod(numbers, conf.total_proportion)
    offset = np.minimum(offset - conf.person_proportion, conf.auction_proportion - 1).clip(-1)
    auctions: Longs = epoch * conf.auction_proportion + offset
    return auctions


def _people(conf: NexmarkConf, numbers: Longs) -> pa.StructArray:
    draws = Draws(conf.seed, numbers)
    names = pc.binary_join_element_wise(draws.one_of(_FIRST_NAMES), draws.one_of(_LAST_NAMES), " ")
    users, hosts = draws.words(7), draws.words(5)
    emails = pc.binary_join_element_wise(
        pc.utf8_trim_whitespace(users), pc.binary_join_element_wise(pc.utf8_trim_whitespace(hosts), ".com", ""), "@"
    )
    cards = pc.binary_join_element_wise(*(draws.digits(4) for _ in range(4)), " ")
    own = [names, emails, cards, draws.one_of(_CITIES), draws.one_of(_STATES)]
    sizes = 8 + np.sum([_lengths(column) for column in own], axis=0)
    extra = _extra(draws, sizes, conf.avg_person_bytes)
    return _struct(PERSON_TYPE, [last_person(conf, numbers) + FIRST_PERSON_ID, *own, extra])


def _auctions(conf: NexmarkConf, numbers: Longs) -> pa.StructArray:
    draws, times = Draws(conf.seed, numbers), conf.times(numbers)
    person = last_person(conf, numbers)
    is_hot = draws.below(conf.hot_sellers_ratio) > 0
    sellers = np.where(is_hot, person // HOT_SELLER_EVERY * HOT_SELLER_EVERY, _active_person(conf, draws, person))
    categories = FIRST_CATEGORY_ID + draws.below(CATEGORIES)
    initial = _prices(draws)
    # On average, the time until ``num_in_flight_auctions`` more auctions have opened.
    events_ahead = conf.num_in_flight_auctions * conf.total_proportion // conf.auction_proportion
    horizon_ms = (conf.times(numbers + events_ahead) - times) // 1000
    expires = times + (1 + draws.below(np.maximum(horizon_ms * 2, 1))) * 1000
    name, description = (pc.utf8_trim_whitespace(draws.words(size)) for size in (20, 100))
    reserve = initial + _prices(draws)
    extra = _extra(draws, 48 + _lengths(name) + _lengths(description), conf.avg_auction_bytes)
    ids = last_auction(conf, numbers) + FIRST_AUCTION_ID
    columns = [ids, name, description, initial, reserve, _timestamps(expires), sellers + FIRST_PERSON_ID]
    return _struct(AUCTION_TYPE, [*columns, categories, extra])


def _bids(conf: NexmarkConf, numbers: Longs) -> pa.StructArray:
    draws = Draws(conf.seed, numbers)
    auction, person = last_auction(conf, numbers), last_person(conf, numbers)
    is_hot = draws.below(conf.hot_auction_ratio) > 0
    oldest = np.maximum(auction - conf.num_in_flight_auctions, 0)
    any_auction = oldest + draws.below(auction - oldest + 1 + AUCTION_ID_LEAD)
    auctions = np.where(is_hot, auction // HOT_AUCTION_EVERY * HOT_AUCTION_EVERY, any_auction)
    is_hot = draws.below(conf.hot_bidders_ratio) > 0
    # The second person, so that hot bidders are not hot sellers.
    bidders = np.where(is_hot, person // HOT_BIDDER_EVERY * HOT_BIDDER_EVERY + 1, _active_person(conf, draws, person))
    prices = _prices(draws)
    names, urls = _channels()
    is_hot = draws.below(2) > 0
    which = pa.array(np.where(is_hot, CHANNELS + draws.below(len(_HOT_CHANNELS)), draws.below(CHANNELS)))
    extra = _extra(draws, np.full(len(numbers), 32), conf.avg_bid_bytes)
    ids = [auctions + FIRST_AUCTION_ID, bidders + FIRST_PERSON_ID]
    return _struct(BID_TYPE, [*ids, prices, names.take(which), urls.take(which), extra])


def _active_person(conf: NexmarkConf, draws: Draws, last: Longs) -> Longs:
    active = np.minimum(last + 1, conf.num_active_people)
    return last + 1 - active + draws.below(active + PERSON_ID_LEAD)


def _prices(draws: Draws) -> Longs:
    """Draw prices in cents; all numbers of digits are as likely."""
    # Powers of numpy may differ in the last bit from one processor to another; rounding the price hides this.
    return np.round(np.power(10.0, draws.unit() * 6.0) * 100.0).astype(np.int64)


def _extra(draws: Draws, sizes: Longs, average: int) -> pa.StringArray:
    """Draw letters that bring an event to its size on average."""
    wanted = np.maximum(average - sizes, 0)
    delta = np.round(wanted * 0.2).astype(np.int64)
    return draws.letters(wanted - delta + draws.below(2 * delta))


_CHANNEL_COLUMNS: list[pa.StringArray] = []


def _channels() -> tuple[pa.StringArray, pa.StringArray]:
    """Return names and addresses of the channels, the hot ones last; the same for every seed."""
    if not _CHANNEL_COLUMNS:
        numbers = np.arange(CHANNELS + len(_HOT_CHANNELS), dtype=np.int64)
        draws = Draws(0, numbers)
        parts = pc.binary_join_element_wise(*(draws.words(5, "_") for _ in range(3)), "/")
        urls = pc.binary_join_element_wise("https://www.nexmark.com/", parts, "/item.htm?query=1", "")
        has_id = (draws.below(10) > 0) & (numbers < CHANNELS)
        ids = pc.binary_join_element_wise(urls, pa.array(numbers).cast(pa.string()), "&channel_id=")
        names = [f"channel-{i}" for i in range(CHANNELS)]
        _CHANNEL_COLUMNS.append(pa.concat_arrays([pa.array(names), _HOT_CHANNELS]))
        _CHANNEL_COLUMNS.append(pc.if_else(pa.array(has_id), ids, urls))
    names_column, urls_column = _CHANNEL_COLUMNS
    return names_column, urls_column


def _lengths(texts: pa.StringArray) -> Longs:
    lengths: Longs = pc.binary_length(texts).to_numpy().astype(np.int64)
    return lengths


def _timestamps(times_us: Longs) -> pa.TimestampArray:
    return pa.array(times_us).cast(TIME)


def _struct(kind: pa.StructType, columns: list[Longs | pa.Array]) -> pa.StructArray:
    arrays = [pa.array(c) if isinstance(c, np.ndarray) else c for c in columns]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _replaced(batch: pa.RecordBatch, kind: int, **values: pa.Array) -> pa.RecordBatch:
    place = kind + 1
    struct_type = SCHEMA.field(place).type
    struct = batch.column(place)
    columns = [values.get(f.name, struct.field(i)) for i, f in enumerate(struct_type)]
    changed = list(batch.columns)
    changed[place] = pa.StructArray.from_arrays(
        [c.cast(f.type) for c, f in zip(columns, struct_type, strict=True)], fields=list(struct_type)
    )
    return pa.RecordBatch.from_arrays(changed, schema=SCHEMA)


def _of_type(kind: int, batch: pa.RecordBatch) -> pa.Table:
    """Return the events of a type, with a column for each field and ``date_time``."""
    rows = batch.filter(pc.equal(batch.column("event_type"), kind))
    struct = rows.column(_STRUCTS[kind][0])
    return pa.table(struct.flatten(), names=struct.type.names).append_column("date_time", rows.column("date_time"))


people_of, auctions_of, bids_of = (partial(_of_type, kind) for kind in (PERSON, AUCTION, BID))
