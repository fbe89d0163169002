"""Changelogs: reading returns the written changes, and damage never gives a wrong value."""

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding.sorted_pairs import SortedPairs
from backends.exceptions import DamagedFileError, InvalidStateStoreArgument, StateStoreError
from backends.formats.changelog import ChangelogMeta, Changes, read_changelog, read_changelog_meta, write_changelog
from backends.formats.manifest import changelog_path, seal, unseal
from backends.storage.checkpoint_storage import CheckpointStorage
from tests.effort import examples

META = ChangelogMeta("run", "op", 1, 4, 3, "attempt", "operators/op/4/1/default/2-x.changelog")
PAIRS = st.dictionaries(st.binary(max_size=4), st.none() | st.binary(max_size=4), max_size=8)


def changes_of(**families):
    return Changes({name: SortedPairs.from_dict(pairs) for name, pairs in families.items()})


def as_dicts(changes):
    return {
        name: dict(zip(p.keys.to_pylist(), p.values.to_pylist(), strict=True)) for name, p in changes.families.items()
    }


@settings(deadline=None, max_examples=examples(60))
@given(st.dictionaries(st.sampled_from(["default", "a", "ü"]), PAIRS), st.sampled_from(["none", "lz4", "zstd"]))
def test_changes_round_trip(families, compression):
    data = write_changelog(changes_of(**families), META, compression)
    meta, changes = read_changelog(data)
    assert meta == META == read_changelog_meta(data)
    assert as_dicts(changes) == families
    assert changes.num_changes == sum(map(len, families.values()))


def test_slices_are_written_without_the_rest_of_their_array():
    keys, values = pa.array([b"a", b"b", b"c", b"d"]), pa.array([b"1", None, b"3", b"4"])
    changes = Changes.of(keys.slice(1, 2), values.slice(1, 2))
    assert as_dicts(read_changelog(write_changelog(changes, META))[1]) == {"default": {b"b": None, b"c": b"3"}}


def test_unsorted_changes_are_sorted_and_wrong_ones_refused():
    made = Changes.of(pa.chunked_array([[b"b"], [b"a"]], pa.binary()), pa.array([None, b"1"]))
    assert made.families["default"].keys.to_pylist() == [b"a", b"b"]
    assert Changes.of(pa.chunked_array([], pa.binary()), pa.array([], pa.binary())).num_changes == 0
    with pytest.raises(InvalidStateStoreArgument, match="given twice"):
        Changes.of(pa.array([b"b", b"a", b"b"]), pa.array([b"1", b"2", b"3"]))
    with pytest.raises(InvalidStateStoreArgument, match="1 of 2 keys are null"):
        Changes.of(pa.array([b"b", None]), pa.array([b"1", b"2"]))
    with pytest.raises(InvalidStateStoreArgument, match="2 keys came with 1"):
        Changes.of(pa.array([b"a", b"b"]), pa.array([b"1"]))
    with pytest.raises(InvalidStateStoreArgument, match="binary, not of int64"):
        Changes.of(pa.array([1]), pa.array([b"1"]))


def test_paths_name_operator_layout_and_version():
    assert changelog_path("op", 4, 1, "default", 3, "u") == "operators/op/4/1/default/3-u.changelog"


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_no_damage_gets_past_the_storage(tmp_path, compression):
    """Every bit flip of every byte, and every truncation, is found, and the error names the file."""
    storage = CheckpointStorage.open(str(tmp_path), fsync=False)
    ref = storage.put_new("1.changelog", write_changelog(changes_of(default={b"k": b"v"}), META, compression))
    good = storage.read(ref)
    damaged = [good[:i] for i in range(0, len(good), 7)]
    damaged += [good[:i] + bytes([good[i] ^ (1 << (i % 8))]) + good[i + 1 :] for i in range(len(good))]
    damaged += [good + b"\x00"]
    for bad in damaged:
        (tmp_path / "1.changelog").write_bytes(bad)
        with pytest.raises(DamagedFileError, match=f"{tmp_path}/1.changelog is damaged"):
            storage.read(ref)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_damaged_changelog_without_its_digest_never_crashes_the_process(compression):
    good = write_changelog(changes_of(default={b"key": b"value", b"q": None}), META, compression)
    for i in range(len(good)):
        bad = good[:i] + bytes([good[i] ^ 0x41]) + good[i + 1 :]
        try:
            read_changelog(bad, "the-file")
        except StateStoreError as error:
            assert "the-file" in str(error)


def test_other_files_are_refused_as_changelogs():
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("x", pa.int64())])) as writer:
        writer.write_table(pa.table({"x": [1]}))
    for data in (b"", b"ARROW1", b"x" * 1000, bytes(sink.getvalue())):
        with pytest.raises(DamagedFileError, match="the-file"):
            read_changelog(data, "the-file")
        with pytest.raises(DamagedFileError, match="the-file"):
            read_changelog_meta(data, "the-file")


def test_unsorted_keys_in_a_file_are_damage():
    wrong = Changes({"default": SortedPairs(pa.array([b"b", b"a"]), pa.array([b"1", b"2"]))})
    with pytest.raises(DamagedFileError, match="not sorted"):
        read_changelog(write_changelog(wrong, META), "f")


def test_sealed_records_show_every_damage():
    good = seal(META)
    assert unseal(good, ChangelogMeta, "f") == META
    for i in range(len(good)):
        for bad in (good[:i], good[:i] + bytes([good[i] ^ 0x04]) + good[i + 1 :]):
            with pytest.raises(DamagedFileError, match="the-file"):
                unseal(bad, ChangelogMeta, "the-file")


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.tuples(st.binary(max_size=2), st.none() | st.binary(max_size=2))),
    PAIRS,
    st.lists(st.binary(max_size=2)),
)
def test_sorted_pairs_are_a_dict(written, newer, asked):
    keys = pa.array([k for k, _ in written], pa.binary())
    pairs = SortedPairs.last_wins(keys, pa.array([v for _, v in written], pa.binary()))
    expected = dict(written)
    merged = pairs.under(SortedPairs.from_dict(newer))
    both = {**expected, **newer}
    assert merged.keys.to_pylist() == sorted(both)
    assert merged.values.to_pylist() == [both[k] for k in sorted(both)]
    for key in asked:
        assert pairs.get(key) == (key in expected, expected.get(key))
    below = pa.array([b"below"] * len(asked), pa.binary())
    laid = pairs.overlay(pa.array(asked, pa.binary()), below).to_pylist()
    assert laid == [expected.get(k, b"below") for k in asked]
    for start, end in ((None, b"\x80"), (b"\x01", None), (b"\x02", b"\x01")):
        inside = [k for k in sorted(expected) if (start is None or k >= start) and (end is None or k < end)]
        assert pairs.between(start, end).keys.to_pylist() == inside
    assert pairs.present().keys.to_pylist() == sorted(k for k, v in expected.items() if v is not None)
