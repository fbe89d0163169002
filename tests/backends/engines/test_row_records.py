"""Rows of one width are kept as records, and read as those of a dict."""

import random

import pytest

from backends.encoding.columns import even_rows
from backends.engines import row_cache, row_cache_table
from backends.engines.row_cache_table import EvenRows, VaryingRows, hash_keys
from tests.backends.engines.cache_over_dict import MIB, Below, are_unique, binary, check_while_read, forced_hashes, used
from tests.effort import effort, only_thorough

pytestmark = pytest.mark.usefixtures("same_hashes_each_time", "few_rows_are_kept")


def user(i):
    """A key of 11 bytes, as those of one long column are."""
    return b"\x00\x07\x01" + i.to_bytes(8, "big")


@pytest.mark.parametrize("collisions", [None, only_thorough(1), 3, only_thorough(50)])
@pytest.mark.parametrize("limit", [3000, only_thorough(20_000), MIB])
@pytest.mark.parametrize("seed", range(effort(1, 3)))
def test_rows_of_one_width_are_read_as_those_of_a_dict(monkeypatch, limit, collisions, seed):
    """Also absent ones, keys of several widths in one request, and where rows of other widths come later."""
    if collisions is not None:
        monkeypatch.setattr(row_cache_table, "hash_keys", forced_hashes(collisions))
    rng = random.Random(f"{limit} {collisions} {seed}")
    below = Below(limit)
    keys = [user(i) for i in range(120)]
    others = [b"shorter %d" % i for i in range(20)]
    for step in range(effort(90, 150)):
        some = rng.choices(keys, k=rng.choice((1, 5, 40, 200)))
        if step == 30 and seed:  # values of one key in another width, or keys
            below.put({keys[0]: b"a longer value of another schema"})
            below.get(keys[:1] if seed == 1 else others)
        if rng.random() < 0.4:
            below.put({k: None if rng.random() < 0.3 else b"%04d" % step for k in some})
        else:
            asked = rng.choice((some, [*some, *others], others))
            assert below.get(asked) == [below.pairs.get(key) for key in asked]
        assert used(below.memory) <= limit
        assert are_unique(below.cache)


def test_rows_of_one_width_are_records_until_others_come():
    below = Below()
    keys = [user(i) for i in range(100)]
    below.get(keys[:10])
    assert below.cache.rows.widths == (11, None)
    below.put({key: b"%04d" % i for i, key in enumerate(keys[10:90])})
    below.get(keys[:50])
    below.put({keys[3]: b"here", keys[20]: None})
    assert isinstance(below.cache.rows, EvenRows) and below.cache.rows.widths == (11, 4)
    below.num_read = 0
    for asked in (keys[:50], keys[20:40], keys[3:4], keys[20:21], [keys[3], b"other", keys[30], keys[30]]):
        assert below.get(asked) == [below.pairs.get(key) for key in asked]
    assert below.num_read == 1
    assert isinstance(below.cache.rows, VaryingRows)  # because of the other key
    below.num_read = 0
    assert below.get(keys[:50]) == [below.pairs.get(key) for key in keys[:50]] and below.num_read == 0


@pytest.mark.parametrize("width", [32, only_thorough(200)])
def test_keys_that_are_looked_for_before_they_are_written_become_records(width):
    """Reads and writes as a stream's: a batch reads its keys, most of them new, and writes more than one step."""
    below, n = Below(limit=32 * MIB), 3 * row_cache.CACHE_STEP_ROWS
    for batch in range(3):
        keys = [b"key%09d" % i for i in range(n * batch, n * (batch + 1))]
        assert below.get(keys) == [None] * len(keys)
        below.put(dict.fromkeys(keys, b"x" * width))
        assert below.cache.rows.widths == (12, width)


def test_rows_are_records_again_when_the_others_are_gone():
    below = Below(limit=1 << 16)
    below.pairs = {user(i): b"%04d" % i for i in range(3000)}
    below.get([b"other"])
    for i in range(0, 3000, 50):
        asked = [user(j) for j in range(i, i + 50)]
        assert below.get(asked) == [below.pairs[key] for key in asked]
    assert below.cache.rows.widths == (11, 4)


@pytest.mark.parametrize(
    ("keys", "values", "widths"),
    [
        ([b"k"], [b"v"], (1, 1)),
        ([b"k", b"l"], [None, b"vw"], (1, 2)),
        ([b"k", b"l"], [None, None], (1, None)),
        ([b"k", b"lm"], [b"v", b"w"], None),
        ([b"k", b"l"], [b"v", b"ww"], None),
        ([b"k", b"l"], [b"v", b""], None),
        ([b"k"], [b""], None),
        ([b""], [b"v"], None),
        ([b"k" * row_cache_table.EVEN_BYTES], [None], (row_cache_table.EVEN_BYTES, None)),
        ([b"k" * row_cache_table.EVEN_BYTES], [b"v"], None),
        ([b"k" * (row_cache_table.EVEN_BYTES + 1)], [None], None),
    ],
)
def test_what_can_be_records(keys, values, widths):
    assert row_cache_table.widths_of(binary(keys), binary(values)) == widths
    below = Below()
    below.pairs = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
    for _ in range(2):
        assert below.get(keys) == values
    assert below.num_read == len(keys) and below.cache.rows.widths == widths


def test_a_row_that_is_not_complete_is_not_read():
    """As a reader sees the table that began before rows were added to it."""
    below = Below()
    keys = [user(i) for i in range(40)]
    below.pairs = {key: b"%04d" % i for i, key in enumerate(keys)}
    below.get(keys)
    asked = binary(keys)
    rows = below.cache.rows
    rows.count = 25
    reads = []

    def read_missing(missing):
        reads.append(missing.tolist())
        return binary([b"read"] * len(missing))

    values = rows.get(asked, even_rows(asked), hash_keys(asked), read_missing)
    assert reads == [list(range(25, 40))]
    assert values.to_pylist() == [*below.pairs.values()][:25] + [b"read"] * 15
    values.validate(full=True)


def test_a_tag_that_is_seen_at_two_places_counts_once():
    """See a bucket as a reader may whose copy begins before an entry moves within the bucket, and ends after that."""
    below = Below()
    keys = [user(i) for i in range(60)]
    below.pairs = {key: b"%04d" % i for i, key in enumerate(keys)}
    below.get(keys[:50])
    buckets = below.cache.rows.buckets
    at, ways = (buckets >= 0).nonzero()
    buckets[at, (ways + 1) % buckets.shape[1]] = buckets[at, ways]
    for asked in (keys[:50], keys, keys[40:], [keys[55], keys[3]], [keys[3], keys[3]]):
        assert below.cache.get_many(binary(asked), below.read, keep=False).to_pylist() == [
            below.pairs[k] for k in asked
        ]


@pytest.mark.parametrize("limit", [10_000, only_thorough(MIB)])
def test_readers_in_threads_while_rows_come_to_be_of_many_widths(limit):
    below, rng = Below(limit), random.Random(limit)
    keys = [user(i) for i in range(300)]
    below.put(dict.fromkeys(keys, b"%06d" % 0))

    def value_of(step):
        return b"%0*d" % (6 if step % 40 < 30 else rng.choice((6, 9)), step)

    def begin_anew(step):
        if step % 40 == 0:
            below.cache.clear()

    check_while_read(below, keys, rng, effort(90, 200), value_of, begin_anew)
