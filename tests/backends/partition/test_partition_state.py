"""One partition's state: completed versions, pending changes, reads that stay exact while it advances."""

import threading
import time
import uuid
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from backends import FileStateStoreProvider
from backends.exceptions import (
    ConcurrentCommitError,
    DamagedFileError,
    HostMemoryError,
    InvalidStateStoreArgument,
    LineageMismatchError,
    MissingFileError,
    StoreClosedError,
    VersionNotFoundError,
)
from backends.formats.manifest import ChangelogRef, Lineage
from tests.backends.partition.partition_steps import CONF, binary, changes, commit, meta, stage
from tests.effort import effort
from tests.patience import HANG, PATIENCE

pytestmark = pytest.mark.in_turns("rocksdb", "file")


def lineage(chain):
    return Lineage(chain[-1][0] if chain else 0, tuple(ChangelogRef(v, ref) for v, ref in chain))


def everything(state, version=None, **kwargs):
    return {k: v for b in state.reads.scan(version, **kwargs) for k, v in zip(*(c.to_pylist() for c in b), strict=True)}


def test_a_version_becomes_visible_step_by_step(state):
    commit(state, {b"a": b"1", b"b": b"2"})
    ref = stage(state, {b"a": None, b"c": b"3"})
    keys = binary(b"c", b"a", b"b", b"a", b"zz")
    with pytest.raises(VersionNotFoundError, match=r"Version 2 .* held: 0, 1 "):
        state.reads.get_many(keys, 2)
    assert state.attempts.pending() == [(meta(2, state.head), ref, False)]
    state.attempts.accept(2, "a")
    assert state.attempts.pending()[0][2] is True
    old, new = [None, b"1", b"2", b"1", None], [b"3", None, b"2", None, None]
    assert state.reads.get_many(keys, 1).to_pylist() == old
    assert state.reads.get_many(keys).to_pylist() == old
    assert state.reads.get_many(keys, 2).to_pylist() == new
    assert everything(state, 1) == {b"a": b"1", b"b": b"2"}
    assert everything(state, 2) == {b"b": b"2", b"c": b"3"}
    state.complete(2, ref.path)
    state.complete(2, ref.path)
    assert (state.version, state.head, state.attempts.pending()) == (2, ref.path, [])
    assert state.reads.get_many(keys).to_pylist() == new
    assert state.reads.get_many(keys, 1).to_pylist() == old  # from what version 2 has replaced
    assert everything(state, 1) == {b"a": b"1", b"b": b"2"}
    for _ in range(CONF.max_versions_in_memory):
        commit(state, {})
    with pytest.raises(VersionNotFoundError, match=r"Version 1 .* held: 2, 3, 4"):
        state.reads.get_many(keys, 1)


def test_a_range_ends_where_it_should_however_memory_is_reused(state):
    commit(state, {b"%03d" % i: b"x" for i in range(1000)})
    for i in range(100):
        scan = state.reads.scan(start=b"%03d" % 100, end=b"%03d" % (200 + i))
        assert len([bytes([i]) * 3 for _ in range(200)]) == 200
        assert sum(len(batch) for batch in scan) == 100 + i


def test_the_last_accepted_attempt_counts(state):
    first = stage(state, {b"a": b"first", b"x": b"first"}, attempt="1")
    state.attempts.accept(1, "1")
    second = stage(state, {b"a": b"second"}, attempt="2")
    assert everything(state, 1) == {b"a": b"first", b"x": b"first"}
    state.attempts.accept(1, "2")
    assert everything(state, 1) == {b"a": b"second"}
    assert [(m.attempt, ref) for m, ref, _ in state.attempts.pending()] == [("2", second)]
    with pytest.raises(LineageMismatchError, match="Load it from storage"):
        state.complete(1, first.path)
    state.complete(1, second.path)
    assert everything(state) == {b"a": b"second"}


def test_the_same_attempt_may_be_repeated(state):
    stage(state, {b"a": b"1"}, attempt="1")
    state.attempts.accept(1, "1")
    again = stage(state, {b"a": b"2"}, attempt="1")
    assert everything(state, 1) == {b"a": b"1"}
    state.attempts.discard(1, "1")  # only the repetition
    assert everything(state, 1) == {b"a": b"1"}
    again = stage(state, {b"a": b"3"}, attempt="1")
    state.attempts.accept(1, "1")
    state.attempts.accept(1, "1")
    state.complete(1, again.path)
    assert everything(state) == {b"a": b"3"}


def test_discarded_changes_leave_nothing(state):
    commit(state, {b"a": b"1"})
    stage(state, {b"a": b"2"})
    state.attempts.discard(2, "a")
    state.attempts.discard(2, "a")
    assert state.attempts.pending() == []
    with pytest.raises(LineageMismatchError, match="attempt 'a' to version 2"):
        state.attempts.accept(2, "a")
    stage(state, {b"a": b"2"})
    state.attempts.accept(2, "a")
    state.attempts.discard(2, "a")
    assert everything(state) == {b"a": b"1"} and state.attempts.pending() == []


def test_changes_of_another_lineage_are_refused(state):
    commit(state, {b"a": b"1"})
    for version, base in ((1, None), (2, None), (2, "elsewhere"), (3, state.head)):
        with pytest.raises(LineageMismatchError, match=f"version {version} .* version 1"):
            stage(state, {}, version=version, base=base)
    with pytest.raises(LineageMismatchError):
        state.complete(1, "elsewhere")
    with pytest.raises(LineageMismatchError):
        state.complete(7, state.head)
    with pytest.raises(LineageMismatchError):
        state.complete(0, None)
    assert everything(state) == {b"a": b"1"}


def test_several_pending_versions_stack_up(state):
    commit(state, {b"a": b"0", b"z": b"0"})
    two = stage(state, {b"a": b"2"})
    state.attempts.accept(2, "a")
    three = stage(state, {b"a": None, b"b": b"3"}, version=3, base=two.path)
    state.attempts.accept(3, "a")
    assert [everything(state, v).get(b"a") for v in (1, 2, 3)] == [b"0", b"2", None]
    state.complete(3, three.path)
    assert everything(state) == {b"b": b"3", b"z": b"0"} and state.attempts.pending() == []


def test_a_completed_attempt_orphans_changes_built_on_another(state):
    one = stage(state, {b"a": b"1"}, attempt="1")
    state.attempts.accept(1, "1")
    stage(state, {b"a": b"2"}, version=2, base=one.path)
    state.attempts.accept(2, "a")
    other = stage(state, {b"a": b"other"}, version=1, base=None, attempt="2")
    state.attempts.accept(1, "2")
    with pytest.raises(VersionNotFoundError):
        state.reads.get_many(binary(b"a"), 2)
    state.complete(1, other.path)
    assert state.attempts.pending() == [] and everything(state) == {b"a": b"other"}


def test_scans_cut_and_merge_in_key_order(state):
    commit(state, {bytes([i]): b"old" for i in range(0, 200, 2)})
    stage(state, {bytes([i]): b"new" if i % 3 else None for i in range(0, 250, 5)})
    state.attempts.accept(2, "a")
    expected = {bytes([i]): b"old" for i in range(0, 200, 2)}
    for i in range(0, 250, 5):
        expected.pop(bytes([i]), None)
        if i % 3:
            expected[bytes([i])] = b"new"
    for start, end in (
        (None, None),
        (b"\x05", b"\x64"),
        (b"\x07", None),
        (None, b"\x00"),
        (b"\xf0", None),
        (b"\x09", b"\x03"),
    ):
        found = everything(state, 2, start=start, end=end)
        inside = [k for k in sorted(expected) if (start is None or k >= start) and (end is None or k < end)]
        assert list(found) == inside
        assert found == {k: expected[k] for k in inside}


def test_ranges_in_turn_are_cut_and_merged(state):
    """Changes between two ranges are of neither, and those behind the last pair of a range come in their place."""
    commit(state, {bytes([i]): b"old" for i in range(0, 200, 2)})
    stage(state, {bytes([i]): b"new" if i % 3 else None for i in range(0, 250, 5)})
    state.attempts.accept(2, "a")
    for ranges in (
        [(b"\x05", b"\x64")],
        [(b"\x00", b"\x06"), (b"\x0a", b"\x0b"), (b"\x0b", b"\x10"), (b"\x62", b"\x6f")],
        [(b"\x00", b"\x01"), (b"\xc6", b"\xcd"), (b"\xf0", None)],
        [],
    ):
        for version in (1, 2):
            alone = {k: v for s, e in ranges for k, v in everything(state, version, start=s, end=e).items()}
            found = [(r["key"], r["value"]) for b in state.reads.scan_in_turn(ranges, version) for r in b.to_pylist()]
            assert found == list(alone.items())


def test_scans_of_more_than_one_batch(state):
    keys = [i.to_bytes(4, "big") for i in range(40_000)]
    commit(state, dict.fromkeys(keys, b"v"))
    stage(state, {keys[0]: None, keys[39_999]: b"w", b"\xff": b"x"})
    state.attempts.accept(2, "a")
    batches = list(state.reads.scan(2))
    assert len(batches) > 2
    got = [k for b in batches for k in b.column(0).to_pylist()]
    assert got == [*keys[1:], b"\xff"]


def test_a_scan_shows_its_version_however_long_it_takes(state):
    commit(state, {i.to_bytes(4, "big"): b"1" for i in range(20_000)})
    scan = state.reads.scan(1)
    first = next(scan)
    commit(state, {i.to_bytes(4, "big"): None for i in range(0, 20_000, 2)})
    rest = [v for b in (first, *scan) for v in b.column(1).to_pylist()]
    assert rest == [b"1"] * 20_000


def test_column_families_are_separate(state):
    commit(state, {b"k": b"default"}, other={b"k": b"other"}, empty={})
    assert state.reads.column_families() == {"default", "other", "empty"}
    assert state.reads.get_many(binary(b"k"), column_family="other").to_pylist() == [b"other"]
    assert everything(state, column_family="empty") == {}
    with pytest.raises(InvalidStateStoreArgument, match=r"'nope'.*default, empty, other"):
        state.reads.get_many(binary(b"k"), column_family="nope")
    stage(state, {}, pending={b"k": b"p"})
    state.attempts.accept(2, "a")
    assert state.reads.get_many(binary(b"k"), 2, "pending").to_pylist() == [b"p"]
    with pytest.raises(InvalidStateStoreArgument, match="pending"):
        state.reads.scan(1, column_family="pending")


@pytest.mark.parametrize("keys", [[], [b"a"], [b"b", b"a", b"b", b"", b"c"]])
def test_bulk_gets_take_keys_in_any_form(state, keys):
    commit(state, {b"a": b"1", b"b": b"", b"": b"empty"})
    expected = [{b"a": b"1", b"b": b"", b"": b"empty"}.get(k) for k in keys]
    array = pa.array(keys, pa.binary())
    parts = pa.chunked_array([array[:1], array[1:]])
    for form in (array, pa.chunked_array([array]), parts, array.cast(pa.large_binary()),
                 pa.concat_arrays([binary(b"x"), array]).slice(1)):  # fmt: skip
        assert state.reads.get_many(form).to_pylist() == expected
    with pytest.raises(InvalidStateStoreArgument, match="1 of 1 keys are null"):
        state.reads.get_many(binary(None))


def test_keys_are_counted_exactly(state):
    commit(state, {b"a": b"1", b"b": b"2"}, f={b"a": b"1"})
    assert state.metrics().num_keys == 3
    commit(state, {b"a": b"3", b"b": None, b"c": b"4", b"gone": None})
    assert state.metrics().num_keys == 3
    for i in range(5):
        commit(state, {b"a": str(i).encode()})
    assert state.metrics().num_keys == 3
    assert state.metrics().memory_bytes > 0


@pytest.mark.parametrize("read", [[b"a", b"b", b"x", b"y"], [b"a", b"b"], [b"y", b"x", b"b", b"a"], [b"a"] * 4])
def test_keys_are_counted_exactly_whatever_was_read_before(state, read):
    commit(state, {b"a": b"1", b"b": b"2", b"c": b"3"})
    state.reads.get_many(binary(*read))
    commit(state, {b"a": b"2", b"b": None, b"x": b"new", b"y": None})
    assert state.metrics().num_keys == len(everything(state)) == 3
    commit(state, {b"a": b"2", b"b": None, b"x": b"new", b"y": None})
    assert state.metrics().num_keys == len(everything(state)) == 3


@pytest.mark.parametrize("read", [[b"a", b"b", b"x", b"y"], [b"a", b"b"]])
@pytest.mark.parametrize("how", ["load", "follow"])
def test_replaced_pairs_are_looked_up_only_if_the_writer_did_not_know_them(
    tmp_path, storage, state, open_state, monkeypatch, read, how
):
    chain = [commit(state, {b"a": b"1", b"b": b"2", b"c": b"3"})]
    copy = open_state(tmp_path / "copy")
    copy.load(lineage(chain))
    looked_up = []
    get_many = copy._engine.get_many

    def noted(keys, family="default", **options):
        looked_up.extend(keys.to_pylist())
        return get_many(keys, family, **options)

    monkeypatch.setattr(copy._engine, "get_many", noted)
    state.reads.get_many(binary(*read))
    chain.append(commit(state, {b"a": b"2", b"b": None, b"x": b"new", b"y": None}))
    if how == "load":
        copy.load(lineage(chain))
    else:
        copy.follow(ChangelogRef(*chain[1]), storage.read(chain[1][1]))
    assert looked_up == ([] if len(read) == 4 else [b"a", b"b", b"x", b"y"])
    assert copy.metrics().num_keys == state.metrics().num_keys == len(everything(copy)) == 3


def test_a_commit_that_found_no_memory_still_knows_what_its_task_has_read(state, monkeypatch):
    commit(state, {b"a": b"1"})
    state.reads.get_many(binary(b"a", b"b"))
    begun = meta(2, state.head), changes({b"a": None, b"b": b"2"})
    with monkeypatch.context() as full, pytest.raises(HostMemoryError):
        full.setattr(state.attempts._memory, "claim", Mock(side_effect=HostMemoryError("full")))
        state.attempts.encode(*begun)
    assert state.attempts.encode(*begun).meta.key_growth == 0


# -- loading -----------------------------------------------------------------------------------


def history(state, n=6):
    chain, seen = [], {}
    for v in range(1, n + 1):
        chain.append(commit(state, {b"v": str(v).encode(), b"k%d" % v: b"x", b"k%d" % (v - 2): None}))
        seen[v] = everything(state)
    return chain, seen


def test_any_version_can_be_loaded_from_the_files_alone(tmp_path, state, open_state):
    chain, seen = history(state)
    for v in (3, 6, 1, 4):
        fresh = open_state(tmp_path / f"at{v}")
        fresh.load(lineage(chain[:v]))
        assert (fresh.version, fresh.head) == (v, chain[v - 1][1].path)
        assert everything(fresh) == seen[v] and fresh.metrics().num_keys == len(seen[v])
        fresh.destroy()
        assert not (tmp_path / f"at{v}").exists()
    state.load(lineage(chain[:2]))  # back ...
    assert everything(state) == seen[2]
    state.load(lineage(chain))  # ... and forth
    assert everything(state) == seen[6]
    state.load(lineage([]))
    assert everything(state) == {} and (state.version, state.head) == (0, None)


def test_records_of_older_versions_are_forgotten_when_another_is_loaded(tmp_path, state, open_state):
    chain, seen = history(state)
    late = open_state(tmp_path / "late")
    late.load(lineage(chain[:2]))
    late.attempts.store_alone(meta(3, late.head), changes({b"v": b"3", b"k3": b"x", b"k1": None}))
    late.attempts.accept(3, "a")
    late.complete(3, late.attempts.pending()[0][1].path)
    assert everything(late, 2) == seen[2]
    late.load(lineage(chain[:3]))  # the same version, made by another attempt
    late.load(lineage(chain))
    assert everything(late) == seen[6]
    for version in (2, 3, 5):
        with pytest.raises(VersionNotFoundError):
            everything(late, version)


def test_pending_changes_outlive_a_load_from_a_snapshot(tmp_path, state, open_state):
    first = stage(state, {b"a": b"1", b"b": b"1"})
    state.attempts.accept(1, "a")
    second = state.attempts.store_alone(meta(2, first.path), changes({b"a": b"2"}))
    other = open_state(tmp_path / "other")
    chain = lineage([(1, first)])
    other.load(chain)
    state.load(Lineage(1, chain.changelogs, (other.snapshots.store(None),)))
    assert (state.version, state.metrics().custom["load_ms"] > 0) == (1, True)
    assert (other.changelog_bytes, state.changelog_bytes) == (first.size, 0), "the snapshot has the changelog"
    state.attempts.accept(2, "a")
    state.complete(2, second.path)
    assert state.changelog_bytes == second.size
    assert everything(state) == {b"a": b"2", b"b": b"1"} and everything(state, 1) == {b"a": b"1", b"b": b"1"}


def test_a_snapshot_of_another_lineage_is_not_used(tmp_path, state, open_state):
    chain, seen = history(state, 3)
    other = open_state(tmp_path / "other")
    for _ in range(2):
        commit(other, {b"foreign": b"1"})
    fresh = open_state(tmp_path / "fresh")
    fresh.load(Lineage(3, lineage(chain).changelogs, (other.snapshots.store(None),)))
    assert everything(fresh) == seen[3]


def test_loading_reads_only_what_is_missing(tmp_path, storage, state, provider, open_state):
    if provider is FileStateStoreProvider:
        pytest.skip("keeps nothing on local disk")
    chain, seen = history(state)
    late = open_state(tmp_path / "late")
    late.load(lineage(chain[:4]))
    late.close()
    for _, ref in chain[:4]:
        storage.delete(ref.path)
    late = open_state(tmp_path / "late")
    assert (late.version, late.head) == (4, chain[3][1].path)
    late.load(lineage(chain))
    assert everything(late) == seen[6]
    late.close()


def test_a_local_directory_of_another_lineage_is_not_used(tmp_path, state, open_state):
    chain, seen = history(state, 3)
    other = open_state(tmp_path / "other")
    commit(other, {b"foreign": b"1"})
    other.close()
    other = open_state(tmp_path / "other")
    other.load(lineage(chain))
    assert everything(other) == seen[3]
    other.close()


def test_a_broken_local_directory_is_thrown_away(tmp_path, state, provider, open_state):
    if provider is FileStateStoreProvider:
        pytest.skip("keeps nothing on local disk")
    chain, seen = history(state, 3)
    state.close()
    for file in (tmp_path / "local" / "engine").iterdir():
        if file.name.startswith(("MANIFEST", "CURRENT")):
            file.write_bytes(b"garbage")
    again = open_state(tmp_path / "local")
    assert again.version == 0
    again.load(lineage(chain))
    assert everything(again) == seen[3]
    again.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "swap"])
@pytest.mark.parametrize("at", [1, 4])
def test_damage_names_the_file_and_never_gives_a_wrong_value(tmp_path, state, damage, at, open_state):
    chain, seen = history(state)
    path = tmp_path / "ck" / chain[at][1].path
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "delete":
        path.unlink()
    else:
        path.write_bytes((tmp_path / "ck" / chain[at - 1][1].path).read_bytes())
    fresh = open_state(tmp_path / "fresh")
    with pytest.raises(MissingFileError if damage == "delete" else DamagedFileError) as error:
        fresh.load(lineage(chain))
    assert str(path) in str(error.value)
    assert (fresh.version, everything(fresh)) == (at, seen[at])
    path.write_bytes(content if damage == "swap" else b"")
    fresh.close()


def test_exchanged_files_are_found_even_if_their_digests_fit(tmp_path, state, open_state):
    chain, _ = history(state)
    wrong = [chain[0], (2, chain[2][1]), *chain[2:]]
    fresh = open_state(tmp_path / "fresh")
    with pytest.raises(DamagedFileError, match=r"holds version 3 .* version 2 .* exchanged"):
        fresh.load(lineage(wrong))
    with pytest.raises(MissingFileError, match=r"No snapshot leads to version 6 .* begin with version 2"):
        fresh.load(lineage(chain[1:]))
    fresh.close()


def test_reads_wait_while_a_version_is_loaded(tmp_path, storage, state, monkeypatch, open_state):
    chain, seen = history(state)
    fresh = open_state(tmp_path / "fresh")
    reading, go = threading.Event(), threading.Event()
    real = storage.read

    def slow(ref):
        reading.set()
        go.wait(HANG)
        return real(ref)

    monkeypatch.setattr(storage, "read", slow)
    loader = threading.Thread(target=fresh.load, args=(lineage(chain),))
    loader.start()
    assert reading.wait(PATIENCE)
    found = []
    reader = threading.Thread(target=lambda: found.append(everything(fresh, 6)))
    reader.start()
    time.sleep(0.02)
    assert found == []
    go.set()
    reader.join(PATIENCE)
    loader.join(PATIENCE)
    assert found == [seen[6]]
    fresh.close()


# -- many at once ------------------------------------------------------------------------------


def test_readers_see_whole_versions_while_versions_complete(state):
    """Every key holds the version's number; a read that mixes two versions is caught."""
    n = 200
    keys = [i.to_bytes(4, "big") for i in range(n)]
    array = pa.array(keys)
    commit(state, dict.fromkeys(keys, b"1"))
    stop, wrong, reads, have_read = threading.Event(), [], [0], threading.Semaphore(0)

    def read():
        order = np.random.default_rng().permutation(n)
        while not stop.is_set():
            version = state.version
            try:
                if reads[0] % 5 == 0:
                    found = set(everything(state, version).values())
                else:
                    found = set(state.reads.get_many(array.take(pa.array(order)), version).to_pylist())
            except VersionNotFoundError:
                continue
            reads[0] += 1
            have_read.release()
            if found != {str(version).encode()}:
                wrong.append((version, found))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for r in readers:
        r.start()
    for v in range(2, effort(9, 15)):
        refused = stage(state, dict.fromkeys(keys, b"wrong"), attempt="refused")
        stage(state, dict.fromkeys(keys, b"replaced"), attempt="replaced")
        state.attempts.accept(v, "replaced")
        ref = stage(state, dict.fromkeys(keys, str(v).encode()))
        state.attempts.accept(v, "a")
        state.attempts.discard(v, "refused")
        assert refused.path != ref.path
        assert have_read.acquire(timeout=PATIENCE)
        state.complete(v, ref.path)
    stop.set()
    for r in readers:
        r.join()
    assert wrong == [] and reads[0] > 10


def test_complete_waits_for_readers_of_the_version_below_and_lets_others_in(state, provider, monkeypatch):
    commit(state, {b"a": b"1", b"b": b"1"})
    ref = stage(state, {b"a": b"2", b"b": b"2"})
    state.attempts.accept(2, "a")
    inside, go = threading.Event(), threading.Event()
    real = provider.engine.get_many

    def slow(self, keys, column_family="default", **keep):
        if threading.current_thread().name == "slow":
            first = real(self, keys[:1], column_family, **keep)
            inside.set()
            go.wait(HANG)
            return pa.concat_arrays([first, real(self, keys[1:], column_family, **keep)])
        return real(self, keys, column_family, **keep)

    monkeypatch.setattr(provider.engine, "get_many", slow)
    found = []
    reader = threading.Thread(
        target=lambda: found.append(state.reads.get_many(binary(b"a", b"b"), 1).to_pylist()), name="slow"
    )
    reader.start()
    assert inside.wait(PATIENCE)
    completing = threading.Thread(target=state.complete, args=(2, ref.path))
    completing.start()
    deadline = time.monotonic() + PATIENCE
    while state.version == 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    # Not written yet, but version 2 is to be had already, and version 1 still is.
    assert state.reads.get_many(binary(b"a", b"b"), 2).to_pylist() == [b"2", b"2"]
    assert state.reads.get_many(binary(b"a", b"b"), 1).to_pylist() == [b"1", b"1"]
    assert completing.is_alive()
    go.set()
    reader.join(PATIENCE)
    completing.join(PATIENCE)
    assert found == [[b"1", b"1"]]
    assert everything(state) == {b"a": b"2", b"b": b"2"}


def test_a_failed_write_leaves_the_version_before(state, provider, monkeypatch):
    commit(state, {b"a": b"1"})
    ref = stage(state, {b"a": b"2"})
    state.attempts.accept(2, "a")

    def fail(*args):
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(provider.engine, "_apply", fail)
        with pytest.raises(OSError, match="disk full"):
            state.complete(2, ref.path)
    assert (state.version, everything(state), everything(state, 2)) == (1, {b"a": b"1"}, {b"a": b"2"})
    state.complete(2, ref.path)
    assert everything(state) == {b"a": b"2"}


def test_a_failed_changelog_changes_nothing(state, storage, monkeypatch):
    commit(state, {b"a": b"1"})
    with monkeypatch.context() as patched:
        patched.setattr(storage, "put_new", lambda *a: (_ for _ in ()).throw(OSError("broken")))
        with pytest.raises(OSError, match="broken"):
            stage(state, {b"a": b"2"})
    assert state.attempts.pending() == [] and everything(state) == {b"a": b"1"}
    commit(state, {b"a": b"3"})
    assert everything(state) == {b"a": b"3"}


def test_two_owners_of_one_directory_are_refused(tmp_path, state, open_state):
    commit(state, {b"a": b"1"})
    with pytest.raises(ConcurrentCommitError, match=r"/local is open in another provider"):
        open_state(tmp_path / "local")
    assert everything(state) == {b"a": b"1"}


def test_use_after_close_is_an_error(state):
    commit(state, {i.to_bytes(4, "big"): b"1" for i in range(20_000)})
    scan = state.reads.scan()
    next(scan)
    state.close()
    state.close()
    for use in (
        lambda: state.reads.get_many(binary(b"a")),
        state.reads.scan,
        lambda: stage(state, {}),
        lambda: state.load(lineage([])),
        lambda: state.complete(2, "x"),
        state.metrics,
        lambda: next(scan),
    ):
        with pytest.raises(StoreClosedError):
            use()


def test_many_states_share_memory_limits(tmp_path, open_state):
    states = [open_state(tmp_path / uuid.uuid4().hex) for _ in range(3)]
    for s in states:
        commit(s, {b"a": b"1"})
    assert [everything(s) for s in states] == [{b"a": b"1"}] * 3
    for s in states:
        s.destroy()
