"""Sorted pairs, runs and maps against dicts, with chunks so small that they are cut, merged and joined all the time."""

import itertools

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding import sorted_pairs
from backends.encoding.sorted_pairs import SortedPairs, to_bytes_list
from backends.engines import sorted_map_engine
from backends.engines.sorted_map_engine import Run, SortedMap
from tests.effort import effort

KEYS = st.sampled_from(
    [b"", b"\x00", b"\x00\x00", b"\x00\xff", b"a", b"a\x00", b"ab", b"\xff", b"\xff\xff"]
) | st.binary(max_size=2)
VALUES = st.binary(max_size=4)
PRESENT = st.dictionaries(KEYS, VALUES, max_size=40)
CHANGES = st.dictionaries(KEYS, st.none() | VALUES, max_size=40)
LIMITS = st.none() | KEYS


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_map_engine, "MAP_CHUNK_ROWS", 8)
        patch.setattr(sorted_map_engine, "MAP_CHUNK_BYTES", 256)
        patch.setattr(sorted_map_engine, "MAP_SCAN_ROWS", 3)
        yield


@pytest.fixture(params=[True, False], ids=["search_sorted", "by sorting"], scope="module")
def search(request):
    """Both ways to search; without Arrow's own, the other one is tested twice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_pairs, "_HAS_SEARCH", request.param and sorted_pairs._HAS_SEARCH)
        yield


def examples(count):
    return settings(deadline=None, derandomize=True, max_examples=effort(count // 2, 10 * count))


def binary(values):
    return pa.array(list(values), pa.binary())


def changed(state, changes):
    """A dict with changes on top."""
    return {k: v for k, v in {**state, **changes}.items() if v is not None}


def inside(pairs, start, end):
    return sorted((k, v) for k, v in pairs.items() if (start is None or k >= start) and (end is None or k < end))


def items(pairs):
    return list(zip(pairs.keys.to_pylist(), pairs.values.to_pylist(), strict=True))


def rows(batches):
    found = []
    for batch in batches:
        assert len(batch)
        found += zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)
    return found


def sliced(pairs, before=3):
    """The same pairs in arrays that begin in the middle of others."""
    keys, values = (
        pa.concat_arrays([binary([b"zz"] * before), a, binary([b"zz"])]) for a in (pairs.keys, pairs.values)
    )
    return SortedPairs(keys.slice(before, len(pairs)), values.slice(before, len(pairs)))


def check_chunks(run, *, is_lowest):
    """Not empty, ascending, named by their first key, not too large; without removed keys at the bottom."""
    assert all(len(chunk) for chunk in run.chunks)
    assert run.firsts == tuple(chunk.keys[0].as_py() for chunk in run.chunks)
    keys = [key for chunk in run.chunks for key in chunk.keys.to_pylist()]
    assert keys == sorted(set(keys))
    assert all(len(chunk) <= 2 * sorted_map_engine.MAP_CHUNK_ROWS for chunk in run.chunks)
    if is_lowest:
        assert all(not chunk.values.null_count for chunk in run.chunks)


# -- sorted pairs --------------------------------------------------------------------------------


@given(CHANGES, st.lists(KEYS, max_size=20), st.booleans())
@examples(80)
def test_finding_keys(search, held, keys, cut):
    pairs = SortedPairs.from_dict(held)
    pairs, asked = (
        (sliced(pairs), sliced(SortedPairs(binary(keys), binary(keys))).keys) if cut else (pairs, binary(keys))
    )
    order = sorted(held)
    assert pairs.find(asked).tolist() == [order.index(k) if k in held else -1 for k in keys]
    assert [pairs.get(k) for k in keys] == [(k in held, held.get(k)) for k in keys]
    assert [pairs.lower_bound(k) for k in keys] == [sum(o < k for o in order) for k in keys]
    below = binary([b"below"] * len(keys))
    assert pairs.overlay(asked, below).to_pylist() == [held.get(k, b"below") for k in keys]


@given(CHANGES, CHANGES, st.booleans())
@examples(80)
def test_changes_under_newer_ones(search, older, newer, cut):
    a, b = SortedPairs.from_dict(older), SortedPairs.from_dict(newer)
    if cut:
        a, b = sliced(a), sliced(b)
    held = items(a), items(b)
    assert items(a.under(b)) == sorted({**older, **newer}.items())
    assert (items(a), items(b)) == held
    assert items(a.under(b).present()) == sorted(changed({}, {**older, **newer}).items())


@given(CHANGES, LIMITS, LIMITS)
@examples(60)
def test_changes_of_a_range(held, start, end):
    assert items(sliced(SortedPairs.from_dict(held)).between(start, end)) == inside(held, start, end)


@given(st.lists(st.tuples(KEYS, st.none() | VALUES), max_size=30))
@examples(60)
def test_of_equal_keys_the_last_counts(written):
    made = SortedPairs.last_wins(binary(k for k, _ in written), binary(v for _, v in written))
    assert items(made) == sorted(dict(written).items())


@given(
    st.lists(st.none() | VALUES, max_size=10) | st.lists(st.binary(min_size=2, max_size=2), max_size=10), st.booleans()
)
@examples(80)
def test_as_python_bytes(values, cut):
    array = binary(values)
    found = to_bytes_list(sliced(SortedPairs(array, array)).keys if cut else array)
    assert found == values
    assert all(v is None or type(v) is bytes for v in found)


# -- runs ----------------------------------------------------------------------------------------


@given(CHANGES, st.lists(KEYS, max_size=20), LIMITS, LIMITS)
@examples(60)
def test_a_run_reads_as_its_pairs(held, keys, start, end):
    run = Run.of(SortedPairs.from_dict(held))
    check_chunks(run, is_lowest=False)
    assert len(run) == len(held)
    if not held:
        return
    assert items(run.pairs()) == sorted(held.items())
    assert [pair for cut in run.between(start, end) for pair in items(cut)] == inside(held, start, end)
    asked = sorted(set(keys))
    if asked:
        assert run.overlay(binary(asked), binary(asked)).to_pylist() == [held.get(k, k) for k in asked]


@given(CHANGES.filter(bool), CHANGES.filter(bool), st.booleans())
@examples(80)
def test_runs_as_one(older, newer, is_lowest):
    older = changed({}, older) or {b"k": b"v"} if is_lowest else older
    below, above = Run.of(SortedPairs.from_dict(older)), Run.of(SortedPairs.from_dict(newer))
    merged = below.under(above, is_lowest=is_lowest)
    check_chunks(merged, is_lowest=is_lowest)
    expected = changed(older, newer) if is_lowest else {**older, **newer}
    assert [pair for chunk in merged.chunks for pair in items(chunk)] == sorted(expected.items())
    assert items(below.pairs()) == sorted(older.items())


def test_chunks_that_no_change_touches_are_shared():
    run = Run.of(SortedPairs.from_dict({b"%04d" % i: b"v" for i in range(200)}))
    changes = Run.of(SortedPairs.from_dict({b"0100": b"w", b"0101": None}))
    merged = run.under(changes, is_lowest=True)
    held = set(map(id, run.chunks))
    assert len(run.chunks) > 10
    assert sum(id(chunk) not in held for chunk in merged.chunks) <= 2


def test_chunks_left_small_by_removals_are_merged():
    pairs = {b"%04d" % i: b"v" for i in range(200)}
    removed = {key: None for key in pairs if not key.endswith(b"00")}
    run = Run.of(SortedPairs.from_dict(pairs)).under(Run.of(SortedPairs.from_dict(removed)), is_lowest=True)
    assert items(run.pairs()) == [(b"0000", b"v"), (b"0100", b"v")]
    assert len(run.chunks) == 1


def test_chunks_are_cut_by_bytes_as_well():
    run = Run.of(SortedPairs.from_dict({b"%d" % i: bytes(100) for i in range(8)}))
    assert len(run.chunks) > 2
    check_chunks(run, is_lowest=True)


# -- maps ----------------------------------------------------------------------------------------


def check_map(held, expected, keys, start, end):
    assert rows(held.scan(None, None)) == sorted(expected.items())
    assert rows(held.scan(start, end)) == inside(expected, start, end)
    assert [pair for part in held.flat() for pair in items(part)] == sorted(expected.items())
    asked = sorted(set(keys))
    assert held.get_many(binary(asked)).to_pylist() == [expected.get(k) for k in asked]
    for i, run in enumerate(held.runs):
        assert run.chunks
        check_chunks(run, is_lowest=i == 0)


@given(PRESENT, st.lists(CHANGES, max_size=6), st.lists(KEYS, max_size=20), LIMITS, LIMITS)
@examples(100)
def test_a_map_and_all_that_it_was_made_from(first, steps, keys, start, end):
    state = first
    held = SortedMap.of_sorted([SortedPairs.from_dict(first)])
    versions = [(held, state)]
    for changes in steps:
        held, state = held.with_changes(SortedPairs.from_dict(changes)), changed(state, changes)
        versions.append((held, state))
    for old, expected in versions:
        check_map(old, expected, keys, start, end)


@given(st.integers(0, 10_000), st.lists(st.integers(1, 30), min_size=1, max_size=25))
@examples(40)
def test_runs_stay_few_and_are_all_searched(seed, sizes):
    """Many changes of a few keys each: the runs below grow, and what lies deep is still found."""
    state, held, key = {}, SortedMap(), seed
    for i, size in enumerate(sizes):
        changes = {}
        for _ in range(size):
            key = (key * 1_103_515_245 + 12_345) % (1 << 31)
            changes[b"%03d" % (key % 500)] = None if key % 7 == 0 else b"%d" % i
        held, state = held.with_changes(SortedPairs.from_dict(changes)), changed(state, changes)
    check_map(held, state, [b"%03d" % i for i in range(500)], b"100", b"200")
    lengths = [len(run) for run in held.runs]
    assert all(below >= sorted_map_engine._GROWTH * above for below, above in itertools.pairwise(lengths))


def test_a_map_of_several_parts():
    parts = [SortedPairs.from_dict({b"%d%02d" % (part, i): b"v" for i in range(30)}) for part in range(3)]
    held = SortedMap.of_sorted(parts)
    assert rows(held.scan(None, None)) == [pair for part in parts for pair in items(part)]
    check_chunks(held.runs[0], is_lowest=True)


def test_removing_everything_leaves_an_empty_map():
    state = {b"%d" % i: b"v" for i in range(50)}
    held = SortedMap().with_changes(SortedPairs.from_dict(state))
    empty = held.with_changes(SortedPairs.from_dict(dict.fromkeys(state)))
    assert rows(empty.scan(None, None)) == []
    assert empty.nbytes == 0
    assert rows(held.scan(None, None)) == sorted(state.items())
    assert empty.with_changes(SortedPairs.from_dict({b"gone": None})).runs == ()


def test_a_scan_under_way_shows_the_map_it_began_on():
    state = {b"%02d" % i: b"v" for i in range(50)}
    held = SortedMap().with_changes(SortedPairs.from_dict(state))
    scan = held.scan(None, None)
    first = next(scan)
    held.with_changes(SortedPairs.from_dict(dict.fromkeys(state)))
    assert rows([first, *scan]) == sorted(state.items())
