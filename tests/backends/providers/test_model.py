"""Random work on every provider against a plain dict per version: writes, commits, going back, maintenance, crashes."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from backends import StateStoreConf, StateStoreId
from backends.exceptions import VersionNotFoundError
from tests.backends.providers.provider_cases import PROVIDERS
from tests.effort import effort

pytestmark = pytest.mark.long

CONF = StateStoreConf(fsync=False, deltas_per_snapshot=2, min_versions_to_retain=3, max_versions_in_memory=1)
KEYS = st.sampled_from([b"", b"\x00", b"\x00\xff", b"\xff", b"\xff\xff", b"a", b"a\x00", b"ab", b"b"]) | st.binary(
    max_size=2
)
VALUES = st.binary(max_size=3)
FAMILY = st.sampled_from(["default", "other"])


def binary(values):
    return pa.array(list(values), pa.binary())


def elements_of(version):
    """How often each element is in each list."""
    return Counter((key, element) for key, elements in (version["list"] or {}).items() for element in elements)


class Model(RuleBasedStateMachine):
    """``versions[v]`` is what version v holds: a dict per column family, None for one that does not exist."""

    provider_class = None

    @initialize()
    def start(self):
        self.root = Path(tempfile.mkdtemp(prefix="statestore-model-"))
        self.lives = 0
        self.provider = None
        self.versions = [{"default": {}, "other": None, "list": None}]
        self.readers = []
        self.removed_below = 0
        self.reopen(self.root / "0")
        self.open(0)

    def reopen(self, directory, *, local="local"):
        self.directory, self.local = directory, local
        store_id = StateStoreId(str(directory / "ck"), "op", 0)
        self.provider = self.provider_class(store_id, CONF, local_dir=directory / local)
        assert self.provider.latest_version() == len(self.versions) - 1

    def open(self, version):
        self.store = self.provider.get_store(version)
        self.expected = {n: None if f is None else dict(f) for n, f in self.versions[version].items()}

    def oldest(self):
        """The oldest version that must be there."""
        return max(1, self.removed_below, len(self.versions) - 2 - CONF.min_versions_to_retain)

    def family(self, name):
        if self.expected[name] is None:
            self.store.create_column_family(name, use_multiple_values_per_key=name == "list")
            self.expected[name] = {}
        return self.expected[name]

    @rule(key=KEYS, value=VALUES, name=FAMILY)
    def put(self, key, value, name):
        self.family(name)[key] = value
        self.store.put(key, value, name)

    @rule(key=KEYS, name=FAMILY)
    def remove(self, key, name):
        self.family(name).pop(key, None)
        self.store.remove(key, name)

    @rule(pairs=st.lists(st.tuples(KEYS, VALUES), max_size=6), name=FAMILY)
    def put_many(self, pairs, name):
        self.family(name).update(pairs)
        self.store.put_many(binary(k for k, _ in pairs), binary(v for _, v in pairs), name)

    @rule(keys=st.lists(KEYS, max_size=4), name=FAMILY)
    def remove_many(self, keys, name):
        for key in keys:
            self.family(name).pop(key, None)
        self.family(name)
        self.store.remove_many(binary(keys), name)

    @rule(pairs=st.lists(st.tuples(KEYS, VALUES), max_size=4))
    def merge(self, pairs):
        family = self.family("list")
        for key, value in pairs:
            family[key] = (*family.get(key, ()), value)
        self.store.merge_many(binary(k for k, _ in pairs), binary(v for _, v in pairs), "list")

    @rule(key=KEYS, value=VALUES)
    def merge_one(self, key, value):
        family = self.family("list")
        family[key] = (*family.get(key, ()), value)
        self.store.merge(key, value, "list")

    @rule(key=KEYS, value=VALUES)
    def put_list(self, key, value):
        self.family("list")[key] = (value,)
        self.store.put(key, value, "list")

    @rule(key=KEYS)
    def remove_list(self, key):
        self.family("list").pop(key, None)
        self.store.remove(key, "list")

    @rule(keys=st.lists(KEYS, max_size=3))
    def remove_lists(self, keys):
        for key in keys:
            self.family("list").pop(key, None)
        self.family("list")
        self.store.remove_many(binary(keys), "list")

    @rule(keys=st.lists(KEYS, max_size=3))
    def values_of_lists(self, keys):
        family = self.family("list")
        for key in keys:
            assert tuple(self.store.values_iterator(key, "list")) == family.get(key, ())

    @rule(name=st.sampled_from(["other", "list"]))
    def create_column_family(self, name):
        self.family(name)

    @rule(keys=st.lists(KEYS, max_size=4), name=FAMILY)
    def get(self, keys, name):
        family = self.family(name)
        expected = [family.get(k) for k in keys]
        assert self.store.get_many(binary(keys), name).to_pylist() == expected
        assert [self.store.get(k, name) for k in keys] == expected

    @rule(start=st.none() | KEYS, end=st.none() | KEYS, name=FAMILY)
    def get_range(self, start, end, name):
        inside = {
            k: v for k, v in self.family(name).items() if (start is None or k >= start) and (end is None or k < end)
        }
        assert list(self.store.get_range(start, end, name)) == sorted(inside.items())

    @rule(prefix=KEYS)
    def prefix_scan(self, prefix):
        found = list(self.store.prefix_scan(prefix))
        assert found == sorted((k, v) for k, v in self.expected["default"].items() if k.startswith(prefix))

    @rule()
    def commit(self):
        version = self.store.commit()
        self.versions[version:] = [self.expected]
        if version == 1:
            self.removed_below = 0
        for v, reader, _ in self.readers:
            if v >= version:
                reader.abort()  # of a version that has been made again
        self.readers = [r for r in self.readers if r[0] < version]
        pairs = sum(
            sum(map(len, f.values())) if n == "list" else len(f) for n, f in self.expected.items() if f is not None
        )
        assert self.store.metrics.num_keys == pairs
        self.open(version)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=8), maintained=st.booleans())
    def run_batches(self, keys, maintained):
        for i, key in enumerate(keys):
            self.put(key, b"%d" % i, "default")
            self.merge([(key, b"%d" % i)])
            self.commit()
            if maintained:
                self.maintain()

    @rule()
    def abort(self):
        version = self.store.version
        self.store.abort()
        self.open(version)

    @rule(back=st.integers(0, 4))
    def go_back(self, back):
        self.store.abort()
        version = max(len(self.versions) - 1 - back, 0)
        self.open(version if version >= self.oldest() or version == 0 else len(self.versions) - 1)

    @rule(back=st.integers(0, 5))
    def begin_to_read(self, back):
        version = max(len(self.versions) - 1 - back, 0)
        try:
            reader = self.provider.get_read_store(version)
        except VersionNotFoundError:
            assert 0 < version < self.oldest()
            return
        self.readers.append((version, reader, self.versions[version]))

    @rule()
    def read(self):
        for _, reader, expected in self.readers:
            self.compare(reader, expected)
            keys = [b"a", b"", b"\xff", b"a\x00"]
            assert reader.get_many(binary(keys)).to_pylist() == [expected["default"].get(k) for k in keys]

    @rule(back=st.integers(0, 2), keys=st.lists(KEYS, min_size=6, max_size=8))
    def read_late(self, back, keys):
        """A store is first read long after it was opened, when much has been committed and removed since."""
        self.run_batches(keys[:1], maintained=False)
        self.begin_to_read(back)
        self.run_batches(keys[1:], maintained=True)
        self.read()

    @rule()
    def end_reading(self):
        for _, reader, _ in self.readers:
            reader.abort()
        self.readers = []

    @rule()
    def maintain(self):
        self.provider.do_maintenance()
        # Going back does not bring back what is no longer kept.
        self.removed_below = self.oldest()

    @rule(back=st.integers(0, 3), steps=st.integers(0, 4))
    def change_feed(self, back, steps):
        last = max(len(self.versions) - 1 - back, 0)
        first = max(last - steps, 0)
        if any(0 < version < self.oldest() for version in (first, last)):
            return
        state = {n: dict(f or {}) for n, f in self.versions[first].items() if n != "list"}
        elements = elements_of(self.versions[first])
        try:
            batches = list(self.provider.change_feed(first, last))
        except VersionNotFoundError:
            assert first == 0 and self.oldest() > 1
            return
        versions = [batch["version"][0].as_py() for batch in batches]
        assert versions == sorted(versions)
        assert all(first < version <= last for version in versions)
        for row in (row for batch in batches for row in batch.to_pylist()):
            key, before, after = row["key"], row["before"], row["after"]
            if row["column_family"] == "list":
                elements[key, before] -= before is not None
                elements[key, after] += after is not None
                assert elements[key, before] >= 0
            else:
                family = state[row["column_family"]]
                assert family.get(key) == before
                family[key] = after
                if after is None:
                    del family[key]
        assert state == {n: f or {} for n, f in self.versions[last].items() if n != "list"}
        assert +elements == elements_of(self.versions[last])

    @rule(fresh=st.booleans())
    def reload(self, fresh):
        self.end_reading()
        self.provider.close()
        self.lives += 1
        self.reopen(self.directory, local=f"local{self.lives}" if fresh else "local")
        self.open(len(self.versions) - 1)

    @rule(back=st.integers(0, 3), keys=st.lists(KEYS, min_size=1, max_size=4), maintained=st.booleans())
    def come_back(self, back, keys, maintained):
        """A local directory is used again after another one has gone back and made its version again."""
        left = self.local
        self.reload(fresh=True)
        self.go_back(back)
        self.run_batches(keys, maintained)
        self.end_reading()
        self.provider.close()
        self.reopen(self.directory, local=left)
        self.open(len(self.versions) - 1)

    @rule()
    def crash(self):
        """The next process finds only the files that are on disk at this moment."""
        self.end_reading()
        self.lives += 1
        there = self.root / str(self.lives)
        shutil.copytree(self.directory, there)
        self.provider.close()
        shutil.rmtree(self.directory)
        self.reopen(there, local=self.local)
        self.open(len(self.versions) - 1)

    @invariant()
    def all_pairs(self):
        self.compare(self.store, self.expected)

    @staticmethod
    def compare(store, expected):
        for name, pairs in expected.items():
            if pairs is None:
                continue
            found = list(store.iterator(name))
            if name == "list":
                assert found == [(k, e) for k, elements in sorted(pairs.items()) for e in elements]
            else:
                assert found == sorted(pairs.items())

    def teardown(self):
        if getattr(self, "provider", None) is not None:
            self.provider.close()
            shutil.rmtree(self.root)


@pytest.mark.parametrize("provider_class", PROVIDERS, ids=[p.backend for p in PROVIDERS])
def test_a_model_of_dicts(provider_class):
    model = type(f"{provider_class.backend}Model", (Model,), {"provider_class": provider_class})
    # RocksDB's files take most of its time.
    count = {"rocksdb": effort(2, 30), "file": effort(10, 60)}.get(provider_class.backend, effort(5, 60))
    run_state_machine_as_test(
        model, settings=settings(deadline=None, derandomize=True, max_examples=count, stateful_step_count=30)
    )
