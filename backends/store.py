"""The interfaces of a store at one version and of the provider that opens stores (Spark's of the same names)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backends.conf import DEFAULT_FAMILY, StateStoreConf, StateStoreId, StateStoreProviderId
from backends.exceptions import InvalidStateStoreArgument
from backends.loaded_providers import LoadedProviders

if TYPE_CHECKING:
    from typing_extensions import Self

# The figures of one store (Spark: ``StateStoreMetrics``).


@dataclass(frozen=True)
class StateStoreMetrics:
    """The number of keys of all column families, and the bytes of memory that this store alone holds.

    ``custom`` has the provider's own figures. Their names end in their unit (``_ms``, ``_bytes``), or they are counts.
    """

    num_keys: int
    memory_bytes: int
    custom: dict[str, float] = field(default_factory=dict)


CHANGE_FEED_SCHEMA = pa.schema(
    [
        pa.field("version", pa.int64(), nullable=False),
        pa.field("column_family", pa.string(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("before", pa.binary()),
        pa.field("after", pa.binary()),
    ]
)
"""The columns of a change feed's batches: the value of a key before and after the version (null: there is none)."""


class _Get:
    """Makes ``StateStore.get(provider_id, version, conf)`` open a store; on a store, ``get(key)`` reads a value.

    Spark has the first on its object ``StateStore`` and the second on its trait of the same name.
    """

    __isabstractmethod__ = True

    def __get__(self, store: StateStore | None, owner: type[StateStore]) -> Any:
        return loaded_providers.get


class StateStore(ABC):
    """A map from bytes to bytes at one version, with uncommitted changes on top.

    Reads see the store's own changes. ``commit`` makes the next version of the changes, ``abort`` drops them. After
    either, everything but ``id``, ``version``, ``has_committed`` and ``metrics`` raises ``StoreClosedError``. Keys and
    values are ``bytes``, never None (``InvalidStateStoreArgument``). Iteration is in byte order of the keys. A store is
    for one thread.

    ``StateStore.get``, ``get_read_only``, ``unload``, ``stop``, ``is_loaded`` and ``is_maintenance_running``,
    called on the class, are those of ``loaded_providers``, the providers of this process.
    """

    @staticmethod
    def get_read_only(
        provider_id: StateStoreProviderId, version: int, conf: StateStoreConf | None = None
    ) -> StateStore:
        """Open a version to read. Load the provider if necessary."""
        return loaded_providers.get_read_only(provider_id, version, conf)

    @staticmethod
    def unload(provider_id: StateStoreProviderId) -> None:
        """Close a provider, if it is loaded."""
        loaded_providers.unload(provider_id)

    @staticmethod
    def stop() -> None:
        """Close all loaded providers, and stop their maintenance."""
        loaded_providers.stop()

    @staticmethod
    def is_loaded(provider_id: StateStoreProviderId) -> bool:
        """Return whether a provider is loaded in this process."""
        return loaded_providers.is_loaded(provider_id)

    @staticmethod
    def is_maintenance_running() -> bool:
        """Return whether the maintenance thread runs."""
        return loaded_providers.is_maintenance_running()

    @property
    @abstractmethod
    def id(self) -> StateStoreId:
        """The id of this store."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The version that was opened."""

    @property
    @abstractmethod
    def has_committed(self) -> bool:
        """Whether ``commit`` has succeeded."""

    @property
    @abstractmethod
    def metrics(self) -> StateStoreMetrics:
        """The figures at the version that was opened; after a commit, at the version that was made."""

    if TYPE_CHECKING:

        @abstractmethod
        def get(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> bytes | None:
            """Return the value of a key, None if it has none. On the class: see ``_Get``."""
    else:
        get = _Get()

    @abstractmethod
    def put(self, key: bytes, value: bytes, column_family: str = DEFAULT_FAMILY) -> None:
        """Set the value of a key."""

    @abstractmethod
    def remove(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> None:
        """Remove a key; no error if the key is not there."""

    @abstractmethod
    def get_range(
        self, start: bytes | None = None, end: bytes | None = None, column_family: str = DEFAULT_FAMILY
    ) -> Iterator[tuple[bytes, bytes]]:
        """Return the pairs from ``start`` (included) to ``end`` (not included); None means no limit."""

    @abstractmethod
    def prefix_scan(self, prefix: bytes, column_family: str = DEFAULT_FAMILY) -> Iterator[tuple[bytes, bytes]]:
        """Return the pairs whose key begins with ``prefix``."""

    @abstractmethod
    def iterator(self, column_family: str = DEFAULT_FAMILY) -> Iterator[tuple[bytes, bytes]]:
        """Return all pairs."""

    @abstractmethod
    def get_many(self, keys: pa.Array | pa.ChunkedArray, column_family: str = DEFAULT_FAMILY) -> pa.BinaryArray:
        """Return the values in the order of ``keys``, null where a key has none. Sorted keys are fastest."""

    @abstractmethod
    def put_many(
        self, keys: pa.Array | pa.ChunkedArray, values: pa.Array | pa.ChunkedArray, column_family: str = DEFAULT_FAMILY
    ) -> None:
        """Set many values. For a key that is given twice, the last value wins. Sorted keys are fastest."""

    @abstractmethod
    def remove_many(self, keys: pa.Array | pa.ChunkedArray, column_family: str = DEFAULT_FAMILY) -> None:
        """Remove many keys."""

    @abstractmethod
    def scan(
        self, start: bytes | None = None, end: bytes | None = None, column_family: str = DEFAULT_FAMILY
    ) -> Iterator[pa.RecordBatch]:
        """Return the pairs of ``get_range`` in batches with the binary columns ``key`` and ``value``."""

    @abstractmethod
    def create_column_family(self, name: str, use_multiple_values_per_key: bool = False) -> None:
        """Create a column family, which is a separate map; no error if the family exists.

        With ``use_multiple_values_per_key`` (Spark's term) the values are lists: ``merge`` appends to a list,
        ``values_iterator`` reads a list, iterators and scans give a pair per element, ``put`` replaces a list by one
        element, and ``remove`` removes the whole list. ``get`` and ``get_many`` are for other families.
        """

    @abstractmethod
    def merge(self, key: bytes, value: bytes, column_family: str = DEFAULT_FAMILY) -> None:
        """Append to the list of a key, without reading the list."""

    @abstractmethod
    def merge_many(
        self, keys: pa.Array | pa.ChunkedArray, values: pa.Array | pa.ChunkedArray, column_family: str = DEFAULT_FAMILY
    ) -> None:
        """Append many elements, in the given order; a key may come several times."""

    @abstractmethod
    def values_iterator(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> Iterator[bytes]:
        """Return the elements of a key's list, in the order of their appends; none if there is no list."""

    @abstractmethod
    def commit(self) -> int:
        """Make the changes durable as the next version, and return that version.

        Only changed pairs are written. If the commit fails, nothing has changed. Raises ``ConcurrentCommitError`` if
        another store has committed since this one was opened.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drop the changes. No error if the store was aborted or committed before."""


class StateStoreProvider(ABC):
    """Opens the versions of one store. Version 0 is empty. Many threads may use a provider at once."""

    @property
    @abstractmethod
    def id(self) -> StateStoreId:
        """The id of the store that this provider is for."""

    @abstractmethod
    def get_store(self, version: int) -> StateStore:
        """Open a version to change it: ``commit`` makes ``version + 1``, in place of an existing one.

        Raises ``VersionNotFoundError`` naming the versions that exist.
        """

    @abstractmethod
    def get_read_store(self, version: int) -> StateStore:
        """Open a version to read, while other stores write. Changes are rejected. Any number may be open at once."""

    @abstractmethod
    def latest_version(self) -> int:
        """Return the newest version, 0 if nothing was ever committed."""

    @abstractmethod
    def change_feed(self, from_version: int, to_version: int) -> Iterator[pa.RecordBatch]:
        """Return the changes of the versions ``from_version + 1`` to ``to_version``, as ``CHANGE_FEED_SCHEMA``.

        There is a batch per version and column family, versions ascending, sorted by key. ``before`` is null for a new
        key, ``after`` for a removed one. In a family of lists every element is a separate pair. Raises
        ``VersionNotFoundError``.
        """

    @abstractmethod
    def do_maintenance(self) -> None:
        """Take snapshots that are due, and remove files that are no longer kept, while others read and write."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and local files. Committed versions stay. No error if the provider is closed already."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_provider(provider_id: StateStoreProviderId, conf: StateStoreConf) -> StateStoreProvider:
    """Make the provider that ``conf`` names.

    Raises ``InvalidStateStoreArgument`` if that is not a ``StateStoreProvider``.
    """
    provider = conf.provider_class()(provider_id.store_id, conf)
    if not isinstance(provider, StateStoreProvider):
        raise InvalidStateStoreArgument(
            f"provider={conf.provider!r} makes {provider!r}, which is not a StateStoreProvider."
        )
    return provider


loaded_providers: LoadedProviders[StateStore] = LoadedProviders(load_provider)
"""The providers of this process."""
