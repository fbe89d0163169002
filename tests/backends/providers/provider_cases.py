"""The providers whose behaviour is tried, which of them a case is tried with, and steps that they share."""

from pathlib import Path

import pytest

from backends import FileStateStoreProvider, RocksDBStateStoreProvider, StateStoreConf
from tests.backends.providers.third_provider import ThirdStateStoreProvider
from tests.effort import only_thorough

CONF = StateStoreConf(fsync=False)
PROVIDERS = [RocksDBStateStoreProvider, FileStateStoreProvider, ThirdStateStoreProvider]


def usually(*left):
    """All providers, but for those that only a thorough run tries."""
    return [only_thorough(p, id=p.backend) if p.backend in left else pytest.param(p, id=p.backend) for p in PROVIDERS]


# What providers share, with the versions of many snapshots: RocksDB's cost five times those of the others.
shared = pytest.mark.parametrize("provider_class", usually("rocksdb", ThirdStateStoreProvider.backend))


def elements(store):
    found = {}
    for key, value in store.iterator("list"):
        found.setdefault(key, []).append(value)
    assert all(list(store.values_iterator(k, "list")) == v for k, v in found.items())
    return found


def changes(provider, first, last):
    return [tuple(row.values()) for batch in provider.change_feed(first, last) for row in batch.to_pylist()]


SOON = StateStoreConf(fsync=False, deltas_per_snapshot=3, min_versions_to_retain=4)


def files(location, kind):
    return sorted(int(f.name.partition("-")[0]) for f in Path(location).rglob(f"*.{kind}"))


def commit(provider, version, **pairs):
    store = provider.get_store(version)
    for key, value in pairs.items():
        if value is None:
            store.remove(key.encode())
        else:
            store.put(key.encode(), value.encode())
    return store.commit()


def content(store, column_family="default"):
    return {k.decode(): v.decode() for k, v in store.iterator(column_family)}
