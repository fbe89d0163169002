"""Who dies while a partition is made of an earlier layout leaves nothing that is taken for the state."""

from __future__ import annotations

import pytest

from backends import fault_points
from backends.encoding.key_groups import partition_of
from backends.formats import manifest_chain as chains
from backends.formats.manifest import Lineage
from backends.formats.manifest_chain import Layout
from tests.backends.partition.partition_steps import OTHER, G, backends, content_of, everywhere, group_of, key

pytestmark = pytest.mark.in_turns("rocksdb", "file")


class Killed(BaseException):
    """The process dies."""


def kill_at(point: str, nth: int) -> list[str]:
    reached: list[str] = []

    def hook(name: str) -> None:
        if name == point:
            reached.append(name)
            if len(reached) == nth:
                raise Killed

    fault_points.set_hook(hook)
    return reached


@pytest.mark.parametrize(("point", "nth"), [("load:rescaling", 1), ("load:rescaling", 3), ("load:ingest", 1)])
@backends
def test_a_process_that_dies_half_way_leaves_nothing_that_is_taken_for_the_state(query, backend, point, nth, tmp_path):
    q = query(4, backend).commit(everywhere(b"1", "x"))
    layout, local = Layout("op", 1, "rocksdb" if point == "load:ingest" else OTHER[backend]), tmp_path / "host"
    lineage = q.lineage(0, layout=layout)
    first = q.open(0, local, layout)
    reached = kill_at(point, nth)
    with pytest.raises(Killed):
        first.load(lineage)
    assert len(reached) == nth
    fault_points.set_hook(None)
    first.close()
    # A query that goes back to the beginning in between, and one that continues.
    for wanted in (Lineage(0), lineage):
        state = q.open(0, local, layout)
        state.load(wanted)
        assert content_of(state) == q.content[wanted.version]
        state.close()


@backends
def test_a_load_that_failed_can_be_repeated_in_the_same_process(query, backend):
    q = query(4, backend).commit(everywhere(b"1", "x")).commit({key(2, "x"): None})
    layout = Layout("op", 1, backend)
    state = q.open(0, layout=layout)
    kill_at("load:rescaling", 2)
    with pytest.raises(Killed):
        state.load(q.lineage(0, layout=layout))
    assert state.head != q.lineage(0, layout=layout).head
    fault_points.set_hook(None)
    state.load(q.lineage(0, layout=layout))
    assert content_of(state) == q.content[2]
    assert state.metrics().num_keys == len(q.content[2]["default"])


def test_a_rescaled_partition_is_not_rebuilt_by_the_next_process(query, tmp_path):
    q = query(4).commit(everywhere(b"1"))
    layout, local = Layout("op", 3, "rocksdb"), tmp_path / "host"  # the file backend keeps nothing locally
    state = q.open(1, local, layout)
    state.load(q.lineage(1, layout=layout))
    state.close()
    q.rescale(3, "rocksdb").commit({key(12): b"2"})
    for path in q.files(4):
        q.file(path).unlink()
    for version in (1, 2):
        again = q.open(1, local, layout)
        again.load(q.lineage(1, version))
        held = q.content[version]["default"]
        expected = {k: v for k, v in held.items() if partition_of(group_of(k), G, 3) == 1}
        assert content_of(again)["default"] == expected and again.metrics().num_keys == len(expected)
        again.close()


@backends
def test_a_state_made_of_other_files_is_rebuilt(query, backend, tmp_path):
    """The same version, of a repeated attempt: its head says so, and the local directory is of no use."""
    q = query(4, backend).commit(everywhere(b"1"))
    base = q.chain.copy(), q.content[1]
    layout, local = Layout("op", 1, OTHER[backend]), tmp_path / "host"
    q.commit({key(0): b"first", key(1): b"first", key(1, "only then"): b"first"})
    old = q.lineage(0, layout=layout)
    state = q.open(0, local, layout)
    state.load(old)
    state.close()
    q.chain, q.content[1] = base
    q.rescale(4, backend).commit({key(0): b"second"}, attempt="b")
    new = q.lineage(0, layout=layout)
    assert (old.version, new.version) == (2, 2) and old.head != new.head
    state = q.open(0, local, layout)
    state.load(new)
    assert content_of(state) == q.content[2] and q.content[2]["default"][key(1)] == b"11"


def test_another_backend_does_not_use_the_remains_of_the_first_one(query, tmp_path):
    """The heads of both must differ: a host finds what it holds by them."""
    q = query(4).commit(everywhere(b"1"))
    heads = {
        chains.head_of(q.chain, 1, Layout("op", n, backend), 0, G) for n in (1, 3, 4) for backend in ("file", "rocksdb")
    }
    assert len(heads) == 6 and None not in heads
    assert chains.head_of(q.chain, 0, Layout("op", 3, "file"), 0, G) is None
    assert chains.head_of(q.chain, 7, Layout("op", 3, "file"), 0, G) is None
    assert chains.head_of(q.chain, 1, Layout("other", 3, "file"), 0, G) is None
