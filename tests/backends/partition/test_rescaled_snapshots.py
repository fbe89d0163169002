"""Snapshots and damaged files of both layouts, where a partition is made of those of an earlier layout."""

from __future__ import annotations

import pytest

from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats import manifest_chain as chains
from backends.formats.manifest_chain import Layout
from tests.backends.partition.partition_steps import OTHER, backends, content_of, everywhere, group_of, key

pytestmark = pytest.mark.in_turns("rocksdb", "file")


@backends
def test_a_snapshot_of_the_old_layout_spares_its_changelogs(query, backend):
    q = query(4, backend).commit(everywhere(b"1")).snapshots().commit({key(0): b"2"})
    for path in q.files(4):
        if "/1-" in path and path.endswith(".changelog"):
            q.file(path).unlink()
    q.rescale(3, OTHER[backend])
    q.assert_held()


@backends
def test_a_snapshot_of_the_new_layout_spares_the_old_one(query, backend):
    q = query(4, backend).commit(everywhere(b"1")).rescale(3, OTHER[backend])
    q.commit({key(0): b"2"}).snapshots().commit({key(1): b"3"})
    for path in q.files(4):
        q.file(path).unlink()
    q.assert_right()


def test_a_snapshot_counts_in_its_own_layout_only(query):
    q = query(4).commit(everywhere(b"1")).snapshots().commit({key(0): b"2"})
    q.rescale(3, "file").commit({key(0): b"3"}).snapshots(1).commit({})
    q.rescale(4, "file").commit({key(0): b"5"}).snapshots(0).commit({})
    last, middle, first = chains.segments(q.chain, "op")
    named = [{p: [s.version for s in refs] for p, refs in chains.snapshots(q.chain, s).items()} for s in (last, middle)]
    assert named == [{0: [5]}, {1: [3]}]
    assert {p: [s.version for s in refs] for p, refs in chains.snapshots(q.chain, first).items()} == {
        p: [1] for p in range(4)
    }
    assert chains.snapshots(q.chain, last, of=1) == {}
    assert [s.version for s in q.lineage(0).snapshots] == [5] and q.lineage(1).snapshots == ()
    q.assert_right()


def test_a_damaged_snapshot_of_the_new_layout_is_made_up_for_by_the_old_one(query):
    q = query(4).commit(everywhere(b"1")).rescale(3, "rocksdb").commit({key(0): b"2"}).snapshots().commit({})
    for p in range(3):
        q.file(q.lineage(p).snapshots[-1].file.path).write_bytes(b"rubbish")
    q.assert_right()


def test_a_damaged_snapshot_of_the_old_layout_is_made_up_for_by_its_changelogs(query):
    q = query(4).commit(everywhere(b"1")).commit({key(0): b"2"}).snapshots().commit({})
    for p in range(4):
        q.file(q.lineage(p).snapshots[-1].file.path).write_bytes(b"rubbish")
    q.rescale(3, "rocksdb")
    q.assert_held()


@pytest.mark.parametrize("how", ["damaged", "missing", "exchanged"])
@backends
def test_a_source_file_that_is_not_right_is_named_and_no_state_is_made(query, backend, how):
    q = query(4, backend).commit(everywhere(b"1")).commit({key(9): b"2"})
    bad, other = (q.file(q.chain[1].operators["op"].partitions[p].changelog.path) for p in (1, 2))
    kept = bad.read_bytes()
    if how == "missing":
        bad.unlink()
    else:
        # As long as the other, and whole in itself.
        bad.write_bytes(other.read_bytes() if how == "exchanged" else kept[:-20] + bytes([kept[-20] ^ 1]) + kept[-19:])
    layout = Layout("op", 2, "file")
    state = q.open(0, layout=layout)
    with pytest.raises(MissingFileError if how == "missing" else DamagedFileError, match=bad.name):
        state.load(q.lineage(0, layout=layout))
    assert (state.version, state.head) != (2, q.lineage(0, layout=layout).head)
    q.load(1, layout=layout)  # has nothing of it
    bad.write_bytes(kept)
    state.load(q.lineage(0, layout=layout))
    assert content_of(state)["default"] == {k: v for k, v in q.content[2]["default"].items() if group_of(k) < 16}
