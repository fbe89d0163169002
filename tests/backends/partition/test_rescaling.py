"""Partitions that are made of the files of an earlier layout: other numbers of partitions, and the other backend."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from backends import fault_points
from backends.conf import StateStoreConf
from backends.encoding.key_groups import partition_of, partition_range
from backends.encoding.sorted_pairs import SortedPairs
from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats import manifest_chain as chains
from backends.formats import retention_rules, snapshot
from backends.formats.changelog import ChangelogMeta, Changes
from backends.formats.file_names import version_in
from backends.formats.manifest import Lineage, Manifest, OperatorEntry, PartitionEntry, SnapshotRef
from backends.formats.manifest_chain import Layout, Segment
from backends.formats.retention_rules import Retention
from backends.formats.sealed import seal, unseal
from backends.partition.partition_state import PartitionState, open_partition
from backends.storage.checkpoint_storage import CheckpointStorage
from tests.effort import only_thorough

pytestmark = pytest.mark.in_turns("rocksdb", "file")

G = 32
Pairs = dict[bytes, bytes | None]
Content = dict[str, dict[bytes, bytes]]


def key(group: int, name: str = "") -> bytes:
    return group.to_bytes(2, "big") + name.encode()


def group_of(stored: bytes) -> int:
    return int.from_bytes(stored[:2], "big")


def content_of(state: PartitionState, version: int | None = None) -> Content:
    found: Content = {}
    for family in state.column_families(version):
        pairs = found[family] = {}
        for batch in state.scan(version, column_family=family):
            pairs.update(zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True))
    return found


class Query:
    """One operator, as coordinator and hosts keep it: manifests in a chain, and the present partitions loaded.

    ``content`` is what each version should show.
    """

    def __init__(self, root: Path, n: int, backend: str) -> None:
        self.root = root
        self.storage = CheckpointStorage.open(str(root / "ck"), fsync=False)
        self.chain: dict[int, Manifest] = {}
        self.content: dict[int, Content] = {0: {"default": {}}}
        self.states: dict[int, PartitionState] = {}
        self.opened: list[PartitionState] = []
        self.oldest, self.chain_from = 0, 1
        self.next_id = 1
        self.unnamed: dict[int, tuple[SnapshotRef, ...]] = {}
        self.rescale(n, backend)

    @property
    def version(self) -> int:
        return max(self.chain, default=0)

    def lineage(self, p: int, version: int | None = None, layout: Layout | None = None) -> Lineage:
        return chains.lineage(self.chain, self.version if version is None else version, layout or self.layout, p, G)

    def open(self, p: int, local: Path | None = None, layout: Layout | None = None) -> PartitionState:
        layout = layout or self.layout
        conf = StateStoreConf(provider=layout.backend, fsync=False)
        local = local or self.root / "local" / uuid.uuid4().hex
        state = open_partition(local, self.storage, layout.directory(p), conf)
        self.opened.append(state)
        return state

    def load(self, p: int, version: int | None = None, layout: Layout | None = None) -> PartitionState:
        """What a host that has nothing yet makes of a partition."""
        state = self.open(p, layout=layout)
        state.load(self.lineage(p, version, layout))
        return state

    def rescale(self, n: int, backend: str) -> Query:
        self.close()
        self.layout = Layout("op", n, backend)
        self.unnamed = {}
        self.states = {p: self.load(p) for p in range(n)}
        return self

    def commit(self, pairs: Pairs, attempt: str = "a", **families: Pairs) -> Query:
        """One batch, as every partition takes part in it. ``attempt`` tells one that is repeated from the first."""
        n, version = self.layout.num_partitions, self.version + 1
        given = {"default": pairs, **families}
        entries = {}
        for p, state in self.states.items():
            own = {
                name: SortedPairs.from_dict({k: v for k, v in f.items() if partition_of(group_of(k), G, n) == p})
                for name, f in given.items()
            }
            meta = ChangelogMeta("run", "op", p, n, version, attempt, state.head)
            ref = state.stage(meta, Changes(own))
            state.accept(version, attempt)
            state.complete(version, ref.path)
            entries[p] = PartitionEntry(attempt, ref, self.unnamed.pop(p, ()))
        self.append(version, entries)
        after = {name: dict(held) for name, held in self.content[version - 1].items()}
        for name, changed in given.items():
            held = after.setdefault(name, {})
            for k, v in changed.items():
                held.pop(k, None)
                if v is not None:
                    held[k] = v
        self.content[version] = after
        return self

    def append(self, version: int, entries: Mapping[int, PartitionEntry]) -> None:
        held = OperatorEntry.of(self.layout.num_partitions, "schema", self.layout.backend, entries)
        manifest = Manifest(
            id=self.next_id,
            parent=self.chain[version - 1].id if version - 1 in self.chain else None,
            version=version,
            epoch=1,
            run_id="run",
            created_ms=0,
            operators={"op": held},
            oldest=self.oldest,
            chain_from=self.chain_from,
        )
        self.next_id += 1
        # As it comes out of the file.
        self.chain[version] = unseal(seal(manifest), Manifest, "a manifest")

    def snapshots(self, *partitions: int) -> Query:
        """Take snapshots of some partitions, or of all; the next commit's manifest names them."""
        for p in partitions or self.states:
            known = self.lineage(p).snapshots
            self.unnamed[p] = (self.states[p].snapshot(known[-1] if known else None),)
        return self

    def retain(self, target: int) -> tuple[Retention, list[str]]:
        """Keep versions from ``target`` on; returns what is removed."""
        kept = retention_rules.retain(self.chain, ["op"], target, self.oldest, lambda ref: True)
        self.oldest, self.chain_from = kept.oldest, kept.chain_from
        files = [path for path, _ in self.storage.list("operators")]
        needed = retention_rules.needed_files(
            self.chain, kept, lambda s: snapshot.read_descriptor(self.storage, s).paths
        )
        gone = retention_rules.garbage(files, needed, kept.oldest)
        for path in gone:
            self.storage.delete(path)
        self.chain = {v: m for v, m in self.chain.items() if v >= kept.chain_from}
        return kept, gone

    def assert_right(self, version: int | None = None, *, layout: Layout | None = None) -> None:
        """A host that has nothing yet finds, in every partition, what the version should show, and nothing else."""
        version = self.version if version is None else version
        layout = layout or self.layout
        states = [self.load(p, version, layout) for p in range(layout.num_partitions)]
        self._assert_shows(states, version, layout)
        for state in states:
            state.close()

    def assert_held(self) -> None:
        """The partitions that are loaded do."""
        self._assert_shows(list(self.states.values()), self.version, self.layout)

    def _assert_shows(self, states: list[PartitionState], version: int, layout: Layout) -> None:
        found: Content = {}
        for p, state in enumerate(states):
            lineage = self.lineage(p, version, layout)
            assert (state.version, state.head) == (version, lineage.head)
            assert lineage.head == chains.head_of(self.chain, version, layout, p, G)
            own = content_of(state)
            for name, pairs in own.items():
                assert {partition_of(group_of(k), G, layout.num_partitions) for k in pairs} <= {p}
                found.setdefault(name, {}).update(pairs)
            assert state.metrics().num_keys == sum(map(len, own.values()))
        assert found == self.content[version]

    def files(self, n: int) -> list[str]:
        return [path for path, _ in self.storage.list(f"operators/op/{n}")]

    def file(self, path: str) -> Path:
        return self.root / "ck" / path

    def close(self) -> None:
        for state in self.opened:
            state.close()
        self.opened.clear()


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Callable[..., Query]]:
    made: list[Query] = []

    def make(n: int = 4, backend: str = "file") -> Query:
        made.append(Query(tmp_path / str(len(made)), n, backend))
        return made[-1]

    yield make
    fault_points.set_hook(None)
    for one in made:
        one.close()


OTHER = {"file": "rocksdb", "rocksdb": "file"}
backends = pytest.mark.parametrize("backend", ["rocksdb", "file"])


def everywhere(value: bytes, *names: str) -> Pairs:
    """A key or more in every key group, those at the borders of the partitions included."""
    return {key(g, name): value + b"%d" % g for g in range(G) for name in ("", *names)}


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
def test_every_column_family_comes_along_the_empty_ones_too(query, backend):
    q = query(4, backend)
    q.commit(everywhere(b"1"), timers={key(3, "t"): b"t", key(30, "t"): b"u"}, gone={key(8): b"x"})
    q.commit({}, gone={key(8): None})
    q.rescale(3, OTHER[backend])
    assert {s.column_families() for s in q.states.values()} == {frozenset({"default", "timers", "gone"})}
    assert q.states[0].get_many(pa.array([key(3, "t")]), column_family="gone").to_pylist() == [None]
    q.commit({}, timers={key(3, "t"): None, key(4, "t"): b"v"})
    q.assert_held()


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
def test_whoever_dies_half_way_leaves_nothing_that_is_taken_for_the_state(query, backend, point, nth, tmp_path):
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
    # A query that goes back to the beginning meanwhile, and one that goes on.
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


def test_what_was_made_once_is_not_made_again_by_the_next_process(query, tmp_path):
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
def test_what_was_made_of_other_files_is_made_anew(query, backend, tmp_path):
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


def test_another_backend_does_not_take_up_what_the_first_one_left(query, tmp_path):
    """The heads of both must differ: a host finds what it holds by them."""
    q = query(4).commit(everywhere(b"1"))
    heads = {
        chains.head_of(q.chain, 1, Layout("op", n, backend), 0, G) for n in (1, 3, 4) for backend in ("file", "rocksdb")
    }
    assert len(heads) == 6 and None not in heads
    assert chains.head_of(q.chain, 0, Layout("op", 3, "file"), 0, G) is None
    assert chains.head_of(q.chain, 7, Layout("op", 3, "file"), 0, G) is None
    assert chains.head_of(q.chain, 1, Layout("other", 3, "file"), 0, G) is None


# -- retention ---------------------------------------------------------------------------------


def test_the_old_layout_is_kept_until_every_new_partition_has_a_snapshot(query):
    q = query(4).commit(everywhere(b"1")).snapshots().commit({key(0): b"2"})
    q.rescale(3, "file").commit({key(1): b"3"}).snapshots(0, 2).commit({})
    kept, gone = q.retain(4)
    assert (kept.oldest, kept.chain_from) == (3, 1) and {b.segment.layout.num_partitions for b in kept.bases} == {3, 4}
    # What lies below the snapshots of either layout goes, but nothing from which the second new partition is made.
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


def test_what_was_planned_before_the_query_went_back_is_not_taken_for_another_layout(query):
    q = query(4).commit(everywhere(b"1")).snapshots()
    for value in (b"2", b"3", b"4", b"5"):
        q.commit({key(0): value})
    kept = retention_rules.retain(q.chain, ["op"], 5, 0, lambda ref: True)
    assert kept.oldest == 1
    q.chain = {v: m for v, m in q.chain.items() if v <= 3}
    q.rescale(3, "file").commit({key(0): b"4 again"}).commit({key(1): b"5 again"})
    files = [path for path, _ in q.storage.list("operators")]
    needed = retention_rules.needed_files(q.chain, kept, lambda ref: snapshot.read_descriptor(q.storage, ref).paths)
    gone = retention_rules.garbage(files, needed, kept.oldest)
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
