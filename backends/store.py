"""The interfaces: a store at one version, and the provider that opens stores (Spark's of the same names)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import pyarrow as pa

from backends.changelog import DEFAULT_FAMILY

if TYPE_CHECKING:
    from typing_extensions import Self

    from backends.ids import StateStoreId
    from backends.metrics import StateStoreMetrics


class StateStore(ABC):
    """A map from bytes to bytes at one version, with uncommitted changes on top.

    Reads see the store's own changes. ``commit`` makes the next version of them, ``abort`` drops
    them; after either, all but ``id``, ``version``, ``has_committed`` and ``metrics`` raises
    ``StoreClosedError``. Keys and values are ``bytes``, never None (``InvalidStateStoreArgument``).
    Iteration is in byte order of the keys. One store is for one thread.
    """

    @property
    @abstractmethod
    def id(self) -> StateStoreId:
        """Which store this is."""

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
        """Figures: at the version opened, and once committed, at the version made."""

    @abstractmethod
    def get(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> bytes | None:
        """The value of a key, None if it has none."""

    @abstractmethod
    def put(self, key: bytes, value: bytes, column_family: str = DEFAULT_FAMILY) -> None:
        """Set the value of a key."""

    @abstractmethod
    def remove(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> None:
        """Remove a key; it is no error if it is not there."""

    @abstractmethod
    def get_range(
        self, start: bytes | None = None, end: bytes | None = None, column_family: str = DEFAULT_FAMILY
    ) -> Iterator[tuple[bytes, bytes]]:
        """Pairs from ``start`` (included) to ``end`` (not included); None is no limit."""

    @abstractmethod
    def prefix_scan(self, prefix: bytes, column_family: str = DEFAULT_FAMILY) -> Iterator[tuple[bytes, bytes]]:
        """The pairs whose key begins with ``prefix``."""

    @abstractmethod
    def iterator(self, column_family: str = DEFAULT_FAMILY) -> Iterator[tuple[bytes, bytes]]:
        """All pairs."""

    @abstractmethod
    def get_many(self, keys: pa.Array | pa.ChunkedArray, column_family: str = DEFAULT_FAMILY) -> pa.BinaryArray:
        """Values in the order of ``keys``, null where there is none. Sorted keys are fastest."""

    @abstractmethod
    def put_many(
        self,
        keys: pa.Array | pa.ChunkedArray,
        values: pa.Array | pa.ChunkedArray,
        column_family: str = DEFAULT_FAMILY,
    ) -> None:
        """Set many values; of a key given twice the last counts. Sorted keys are fastest."""

    @abstractmethod
    def remove_many(self, keys: pa.Array | pa.ChunkedArray, column_family: str = DEFAULT_FAMILY) -> None:
        """Remove many keys."""

    @abstractmethod
    def scan(
        self, start: bytes | None = None, end: bytes | None = None, column_family: str = DEFAULT_FAMILY
    ) -> Iterator[pa.RecordBatch]:
        """As ``get_range``, in batches with the binary columns ``key`` and ``value``."""

    @abstractmethod
    def create_column_family(self, name: str) -> None:
        """Make a column family, a map of its own; it is no error if it exists."""

    @abstractmethod
    def commit(self) -> int:
        """Make the changes durable as the next version, which is returned.

        Only changed pairs are written. If it fails, nothing has changed. Raises
        ``ConcurrentCommitError`` if another store has committed since this one was opened.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drop the changes; it is no error to abort twice, or after a commit."""


class StateStoreProvider(ABC):
    """Opens the versions of one store. Version 0 is empty. Safe to use from many threads."""

    @property
    @abstractmethod
    def id(self) -> StateStoreId:
        """Which store this provider is for."""

    @abstractmethod
    def get_store(self, version: int) -> StateStore:
        """Open a version to change it: ``commit`` makes ``version + 1``, in place of any that was there.

        Raises ``VersionNotFoundError`` naming the versions that exist.
        """

    @abstractmethod
    def get_read_store(self, version: int) -> StateStore:
        """Open a version to read: any number at once, while others write; changes are refused."""

    @abstractmethod
    def latest_version(self) -> int:
        """The newest version, 0 if nothing was ever committed."""

    @abstractmethod
    def close(self) -> None:
        """Let go of memory and local files; what was committed stays. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
