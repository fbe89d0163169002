"""Partitions that are made of the files of an earlier layout: other numbers of partitions, and the other backend."""

from __future__ import annotations

import pyarrow as pa
import pytest

from backends.encoding.key_groups import partition_of, partition_range
from backends.formats import manifest_chain as chains
from backends.formats.manifest_chain import Layout, Segment
from tests.backends.partition.partition_steps import OTHER, G, backends, everywhere, key
from tests.effort import only_thorough

pytestmark = pytest.mark.in_turns("rocksdb", "file")


@pytest.mark.parametrize(
    ("backend", "n", "change"),
    [
        ("file", 1, False),
        ("file", 3, False),
        ("file", 3, True),
        ("rocksdb", 3, False),
        only_thorough("rocksdb", 16, True),
        only_thorough("file", 1, True),
        only_thorough("file", 16, True),
        only_thorough("rocksdb", 1, False),
        only_thorough("rocksdb", 1, True),
        only_thorough("rocksdb", 3, True),
    ],
)
def test_new_partitions_take_over_their_key_groups_of_the_old_ones(query, backend, n, change):
    q = query(4, backend)
    q.commit(everywhere(b"one", "x", "y")).commit({key(g): None for g in range(0, G, 3)})
    q.rescale(n, OTHER[backend] if change else backend)
    q.assert_held()
    q.commit({**everywhere(b"three"), key(5, "x"): None})
    assert all(state.head.startswith(f"operators/op/{n}/{p}/default/3-") for p, state in q.states.items())
    q.assert_held()
    if n == 3:
        q.assert_right()


@backends
def test_another_backend_for_the_same_partitions(query, backend):
    q = query(4, backend).commit(everywhere(b"1")).commit({key(g): None for g in range(0, G, 3)})
    q.rescale(4, OTHER[backend])
    q.assert_held()
    assert [s.head for s in q.states.values()] != [q.chain[2].operators["op"].partitions.head(p) for p in range(4)]
    q.commit({key(1): b"3"}).snapshots().commit({key(2): b"4"})
    q.assert_right()


def test_earlier_versions_are_there_in_every_layout(query):
    """Where the query goes back some batches, whatever its partitions are then."""
    q = query(4).commit(everywhere(b"1")).commit({key(g): None for g in range(0, G, 3)})
    q.rescale(3, "file").commit({key(0): b"3"})
    for version in (1, 2, 3):
        for n in (3, 4, 5):
            q.assert_right(version, layout=Layout("op", n, "file"))
    q.assert_right(2, layout=Layout("op", 2, "rocksdb"))
    assert q.lineage(0, 0).is_empty


@backends
def test_there_and_back_again_the_first_layouts_files_are_not_taken_for_the_last_ones(query, backend):
    q = query(4, backend).commit(everywhere(b"1")).commit({key(0): b"2", key(31): None})
    q.rescale(3, backend).commit({key(0): b"3", key(31): b"3"})
    q.rescale(4, backend)
    q.assert_held()
    q.commit({key(7): b"4", key(0): None})
    q.assert_held()
    assert chains.segments(q.chain, "op") == [
        Segment(Layout("op", 4, backend), 4, 4),
        Segment(Layout("op", 3, backend), 3, 3),
        Segment(Layout("op", 4, backend), 1, 2),
    ]
    assert [s.first for s in chains.segments(q.chain, "op", 3)] == [3, 1]
    lineage = q.lineage(0)
    assert [ref.version for ref in lineage.changelogs] == [4]
    assert lineage.rescaled is not None and lineage.rescaled.version == 3
    below = lineage.rescaled.sources[0].lineage
    assert [ref.version for ref in below.changelogs] == [3] and below.rescaled is not None
    if backend == "file":
        for v in (1, 2, 3, 4):
            q.assert_right(v)


def test_a_layout_in_which_nothing_was_committed_leaves_no_trace(query):
    q = query(4).commit(everywhere(b"1"))
    head = q.states[2].head
    q.rescale(3, "rocksdb")
    assert q.files(3) == []
    q.rescale(4, "file")
    assert q.states[2].head == head and q.lineage(2).rescaled is None
    q.commit({key(1): b"2"})
    q.assert_right()


def test_the_sources_are_those_that_have_some_of_the_key_groups_and_no_others(query):
    q = query(4).commit(everywhere(b"1"))
    for n in (1, 3, 5, 16, G):
        for p in range(n):
            rescaled = q.lineage(p, layout=Layout("op", n, "file")).rescaled
            assert rescaled is not None
            first, end = partition_range(p, n, G)
            wanted = sorted({partition_of(g, G, 4) for g in range(first, end)})
            assert [s.directory for s in rescaled.sources] == [f"operators/op/4/{s}/default" for s in wanted]
            assert (rescaled.start, rescaled.end) == (key(first), key(end))


@pytest.mark.parametrize(
    ("backend", "counts"),
    [
        ("file", (3, 16)),
        ("file", (2, 1)),
        only_thorough("rocksdb", (2, 1)),
        only_thorough("rocksdb", (3, 16)),
        *(only_thorough(backend, counts) for backend in ("file", "rocksdb") for counts in ((G, 5), (1, 7))),
    ],
    ids=str,
)
def test_sources_of_sources_give_only_the_key_groups_that_are_wanted_in_the_end(query, backend, counts):
    """Two changes in a row, before the first new partitions have snapshots."""
    middle, n = counts
    q = query(4, backend).commit(everywhere(b"1", "x"))
    q.rescale(middle, backend).commit({key(g): None for g in range(0, G, 3)}).commit(
        {key(g): b"3" for g in range(0, G, 5)}
    )
    for p in range(n):
        rescaled = q.lineage(p, layout=Layout("op", n, backend)).rescaled
        assert rescaled is not None
        first, end = partition_range(p, n, G)
        groups = []
        for source in rescaled.sources:
            below = source.lineage.rescaled
            assert below is not None and [ref.version for ref in source.lineage.changelogs] == [2, 3]
            own = [g for g in range(first, end) if key(g) >= below.start and (below.end is None or key(g) < below.end)]
            assert [s.directory for s in below.sources] == [
                f"operators/op/4/{s}/default" for s in sorted({partition_of(g, G, 4) for g in own})
            ]
            assert (below.start, below.end) == (key(own[0]), key(own[-1] + 1))
            groups += own
        assert groups == list(range(first, end)), "all of them, and each once"
    q.rescale(n, backend)
    q.assert_held()
    q.commit({key(1): b"4"})
    q.assert_right()


def test_the_last_of_65536_key_groups_has_no_end(query):
    q = query(4).commit({})
    ranges = [chains.lineage(q.chain, 1, Layout("op", 2, "file"), p, 1 << 16).rescaled for p in (0, 1)]
    assert [(r.start, r.end) for r in ranges] == [(b"\0\0", b"\x80\0"), (b"\x80\0", None)]


@backends
def test_partitions_without_a_key_are_empty_and_can_be_written(query, backend):
    q = query(4, backend).commit({key(9): b"only"})
    q.rescale(8, backend)
    assert [s.metrics().num_keys for s in q.states.values()] == [int(p == 2) for p in range(8)]
    q.commit({key(31): b"last", key(9): None})
    q.assert_held()


@backends
def test_every_column_family_is_taken_over_the_empty_ones_too(query, backend):
    q = query(4, backend)
    q.commit(everywhere(b"1"), timers={key(3, "t"): b"t", key(30, "t"): b"u"}, gone={key(8): b"x"})
    q.commit({}, gone={key(8): None})
    q.rescale(3, OTHER[backend])
    assert {s.reads.column_families() for s in q.states.values()} == {frozenset({"default", "timers", "gone"})}
    assert q.states[0].reads.get_many(pa.array([key(3, "t")]), column_family="gone").to_pylist() == [None]
    q.commit({}, timers={key(3, "t"): None, key(4, "t"): b"v"})
    q.assert_held()
