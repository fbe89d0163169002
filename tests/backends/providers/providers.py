"""The providers whose behaviour is tried, and steps that they share."""

from backends import FileStateStoreProvider, RocksDBStateStoreProvider
from tests.backends.providers.third_provider import ThirdStateStoreProvider

PROVIDERS = [RocksDBStateStoreProvider, FileStateStoreProvider, ThirdStateStoreProvider]


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
