"""The steps of a version of one partition's state.

A query whose partitions are rebuilt in other numbers and by other backends, without a host.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from backends import StateStoreConf
from backends.encoding.key_groups import partition_of
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats import manifest_chain, snapshot
from backends.formats.changelog import ChangelogMeta, Changes
from backends.formats.manifest import Lineage, Manifest, OperatorEntry, PartitionEntry, SnapshotRef, seal, unseal
from backends.formats.manifest_chain import Layout, Retention
from backends.partition.partition_state import PartitionState, open_partition
from backends.storage.checkpoint_storage import CheckpointStorage

CONF = StateStoreConf(fsync=False)


def binary(*values):
    return pa.array(values, pa.binary())


def changes(pairs=None, **families):
    return Changes({n: SortedPairs.from_dict(p) for n, p in {"default": pairs or {}, **families}.items()})


def meta(version, base, attempt="a"):
    return ChangelogMeta("run", "op", 0, 1, version, attempt, base)


def stage(state, pairs, *, version=None, base="head", attempt="a", **families):
    version = state.version + 1 if version is None else version
    base = state.head if base == "head" else base
    return state.attempts.store_alone(meta(version, base, attempt), changes(pairs, **families))


def commit(state, pairs, **families):
    """All steps of one version, as a host takes them."""
    version = state.version + 1
    ref = stage(state, pairs, **families)
    state.attempts.accept(version, "a")
    state.complete(version, ref.path)
    return version, ref


G = 32
Pairs = dict[bytes, bytes | None]
Content = dict[str, dict[bytes, bytes]]


def key(group: int, name: str = "") -> bytes:
    return group.to_bytes(2, "big") + name.encode()


def group_of(stored: bytes) -> int:
    return int.from_bytes(stored[:2], "big")


def content_of(state: PartitionState, version: int | None = None) -> Content:
    found: Content = {}
    for family in state.reads.column_families(version):
        pairs = found[family] = {}
        for batch in state.reads.scan(version, column_family=family):
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
        return manifest_chain.lineage(
            self.chain, self.version if version is None else version, layout or self.layout, p, G
        )

    def open(self, p: int, local: Path | None = None, layout: Layout | None = None) -> PartitionState:
        layout = layout or self.layout
        conf = StateStoreConf(provider=layout.backend, fsync=False)
        local = local or self.root / "local" / uuid.uuid4().hex
        state = open_partition(local, self.storage, layout.directory(p), conf)
        self.opened.append(state)
        return state

    def load(self, p: int, version: int | None = None, layout: Layout | None = None) -> PartitionState:
        """Load a partition as a host does that has no local state yet."""
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
            ref = state.attempts.store_alone(meta, Changes(own))
            state.attempts.accept(version, attempt)
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
        # As a reader gets it from the file.
        self.chain[version] = unseal(seal(manifest), Manifest, "a manifest")

    def snapshots(self, *partitions: int) -> Query:
        """Take snapshots of some partitions, or of all; the next commit's manifest names them."""
        for p in partitions or self.states:
            known = self.lineage(p).snapshots
            self.unnamed[p] = (self.states[p].snapshots.store(known[-1] if known else None),)
        return self

    def retain(self, target: int) -> tuple[Retention, list[str]]:
        """Keep versions from ``target`` on; returns what is removed."""
        kept = manifest_chain.retain(self.chain, ["op"], target, self.oldest, lambda ref: True)
        self.oldest, self.chain_from = kept.oldest, kept.chain_from
        files = [path for path, _ in self.storage.list("operators")]
        needed = manifest_chain.needed_files(
            self.chain, kept, lambda s: snapshot.read_descriptor(self.storage, s).paths
        )
        gone = manifest_chain.garbage(files, needed, kept.oldest)
        for path in gone:
            self.storage.delete(path)
        self.chain = {v: m for v, m in self.chain.items() if v >= kept.chain_from}
        return kept, gone

    def assert_right(self, version: int | None = None, *, layout: Layout | None = None) -> None:
        """Check that a new host finds in every partition exactly the content of the version."""
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
            assert lineage.head == manifest_chain.head_of(self.chain, version, layout, p, G)
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


OTHER = {"file": "rocksdb", "rocksdb": "file"}
backends = pytest.mark.parametrize("backend", ["rocksdb", "file"])


def everywhere(value: bytes, *names: str) -> Pairs:
    """A key or more in every key group, those at the borders of the partitions included."""
    return {key(g, name): value + b"%d" % g for g in range(G) for name in ("", *names)}
