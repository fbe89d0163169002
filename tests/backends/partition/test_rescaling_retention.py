"""Which files of an earlier layout are kept, and for how long."""

from __future__ import annotations

import pytest

from backends.formats import manifest_chain, snapshot
from backends.formats.manifest import version_in
from tests.backends.partition.partition_steps import everywhere, key

pytestmark = pytest.mark.in_turns("rocksdb", "file")


def test_the_old_layout_is_kept_until_every_new_partition_has_a_snapshot(query):
    q = query(4).commit(everywhere(b"1")).snapshots().commit({key(0): b"2"})
    q.rescale(3, "file").commit({key(1): b"3"}).snapshots(0, 2).commit({})
    kept, gone = q.retain(4)
    assert (kept.oldest, kept.chain_from) == (3, 1) and {b.segment.layout.num_partitions for b in kept.bases} == {3, 4}
    # Files below the snapshots of either layout are removed, except those that the second new partition is made from.
    assert {version_in(p) for p in gone if "/op/4/" in p} == {1}
    assert [p for p in gone if "/op/3/" in p and version_in(p) != 3] == []
    assert {p.split("/")[3] for p in gone if "/op/3/" in p} == {"0", "2"}
    for v in (3, 4):
        q.assert_right(v)
    q.snapshots(1).commit({key(31): b"5"})
    kept, gone = q.retain(5)
    assert (kept.oldest, kept.chain_from) == (4, 3)
    assert gone and q.files(4) == []
    for v in (4, 5):
        q.assert_right(v)
    q.commit({key(3): b"6"})
    q.assert_right()


def test_versions_below_the_change_are_kept_as_long_as_they_are_asked_for(query):
    q = query(4).commit(everywhere(b"1")).snapshots().commit({key(0): b"2"}).snapshots().commit({key(0): b"3"})
    q.rescale(16, "file").commit({key(0): b"4"}).snapshots().commit({key(0): b"5"})
    kept, gone = q.retain(2)  # below the change, though all have snapshots above it
    assert kept.oldest == 2 and any("/4/" in p for p in gone)
    assert all(version_in(p) <= 2 for p in gone)
    for v in (2, 3, 4, 5):
        q.assert_right(v)
    kept, gone = q.retain(3)
    assert (kept.oldest, gone) == (2, [])
    kept, gone = q.retain(4)
    assert (kept.oldest, q.files(4)) == (4, [])
    for v in (4, 5):
        q.assert_right(v)


def test_without_a_snapshot_of_the_new_layout_nothing_below_it_is_lost(query):
    q = query(4).commit(everywhere(b"1")).rescale(3, "file").commit({key(0): b"2"}).commit({key(1): b"3"})
    kept, gone = q.retain(3)
    assert (kept.oldest, gone) == (0, [])
    q.assert_right()


def test_changelogs_from_before_the_query_went_back_are_not_taken_for_another_layout(query):
    q = query(4).commit(everywhere(b"1")).snapshots()
    for value in (b"2", b"3", b"4", b"5"):
        q.commit({key(0): value})
    kept = manifest_chain.retain(q.chain, ["op"], 5, 0, lambda ref: True)
    assert kept.oldest == 1
    q.chain = {v: m for v, m in q.chain.items() if v <= 3}
    q.rescale(3, "file").commit({key(0): b"4 again"}).commit({key(1): b"5 again"})
    files = [path for path, _ in q.storage.list("operators")]
    needed = manifest_chain.needed_files(q.chain, kept, lambda ref: snapshot.read_descriptor(q.storage, ref).paths)
    gone = manifest_chain.garbage(files, needed, kept.oldest)
    assert gone and all("/1-" in path and path.endswith(".changelog") for path in gone)
    for path in gone:
        q.storage.delete(path)
    for v in (1, 3, 5):
        q.assert_right(v)


def test_four_three_four_loses_nothing_to_retention_and_keeps_no_litter(query):
    q = query(4).commit(everywhere(b"1")).snapshots().commit({key(0): b"2"})
    q.rescale(3, "file").commit({key(0): b"3"}).snapshots().commit({key(1): b"4"})
    q.rescale(4, "file").commit({key(0): b"5"}).commit({key(2): b"6"})
    kept, _ = q.retain(6)
    assert kept.oldest == 3  # the snapshots of the middle layout
    assert {version_in(p) for p in q.files(4)} == {5, 6}
    for v in (3, 4, 5, 6):
        q.assert_right(v)
    q.snapshots().commit({key(0): b"7"})
    q.retain(7)
    assert q.files(3) == []
    q.assert_right()
