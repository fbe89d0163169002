"""The interfaces of a store at one version and of the provider that opens stores (Spark's of the same names).

Programs that use providers without a host open them by ``StateStore.get`` and the other class methods of
``StateStore``: ``LoadedProviders`` loads and maintains them (Spark: the object ``StateStore``).
"""

from __future__ import annotations

import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from backends.background_loop import BackgroundLoop
from backends.conf import DEFAULT_FAMILY, StateStoreConf, StateStoreId, StateStoreProviderId
from backends.exceptions import InvalidStateStoreArgument

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

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


# The providers that are loaded in a process, and the thread that maintains them. If there is a coordinator, active
# instances are reported to it.


class Report(Protocol):
    """The coordinator's pending or received answer to the report of an instance."""

    def result(self) -> Sequence[StateStoreProviderId]:
        """Return the providers to unload here, because they are active elsewhere."""


class CoordinatorReference(Protocol):
    """The part of ``coordinator_actor.StateStoreCoordinatorRef`` that is used here."""

    def report_active_instance(
        self,
        provider_id: StateStoreProviderId,
        host: str,
        executor_id: str,
        other_provider_ids: Iterable[StateStoreProviderId] = (),
    ) -> Report:
        """Report to the coordinator that an instance is active here, along with the other ones."""

    def verify_if_instance_active(self, provider_id: StateStoreProviderId, executor_id: str) -> bool:
        """Return whether an instance is active here, as far as the coordinator knows."""


class LoadedProviders:
    """Loaded providers by their id. Many threads may use one object at once.

    ``load`` makes a provider. ``coordinator`` returns the reference to the coordinator, or None if there is none.
    ``_lock`` guards everything here. It is held during ``load`` and ``coordinator``, and never during other calls of a
    provider or of the coordinator.
    """

    def __init__(
        self,
        load: Callable[[StateStoreProviderId, StateStoreConf], StateStoreProvider],
        coordinator: Callable[[], CoordinatorReference | None] = lambda: None,
        *,
        host: str | None = None,
        executor_id: str = "driver",
    ) -> None:
        self._load = load
        self._coordinator_of = coordinator
        self._coordinator: CoordinatorReference | None = None
        self._host = host or socket.gethostname()
        self._executor_id = executor_id
        self._providers: dict[StateStoreProviderId, StateStoreProvider] = {}
        self._reported: set[StateStoreProviderId] = set()
        self._maintained: dict[StateStoreProviderId, Future[None]] = {}
        self._lock = threading.RLock()
        self._loop: BackgroundLoop | None = None
        self._pool: ThreadPoolExecutor | None = None

    def use_coordinator(
        self,
        coordinator: Callable[[], CoordinatorReference | None],
        host: str | None = None,
        executor_id: str = "driver",
    ) -> None:
        """Report to a coordinator from now on."""
        with self._lock:
            self._coordinator_of, self._coordinator = coordinator, None
            self._host, self._executor_id = host or self._host, executor_id

    def get(self, provider_id: StateStoreProviderId, version: int, conf: StateStoreConf | None = None) -> StateStore:
        """Open a version to change it. Load the provider if necessary, which starts maintenance.

        Raises ``VersionNotFoundError``, and ``InvalidStateStoreArgument`` for an invalid provider id or class.
        """
        return self._provider(provider_id, conf).get_store(version)

    def get_read_only(
        self, provider_id: StateStoreProviderId, version: int, conf: StateStoreConf | None = None
    ) -> StateStore:
        return self._provider(provider_id, conf).get_read_store(version)

    def _provider(self, provider_id: StateStoreProviderId, conf: StateStoreConf | None) -> StateStoreProvider:
        if not isinstance(provider_id, StateStoreProviderId):
            raise InvalidStateStoreArgument(
                f"{provider_id!r} is not a StateStoreProviderId. On the class, StateStore.get(provider_id, version, "
                "conf) opens a store; get(key) is for a store that is open."
            )
        conf = conf or StateStoreConf()
        with self._lock:
            self._start_maintenance(conf)
            provider = self._providers.get(provider_id)
            if provider is None:
                provider = self._providers[provider_id] = self._load(provider_id, conf)
            others = [other for other in self._providers if other != provider_id]
        self._report(provider_id, others)
        return provider

    def _reference(self) -> CoordinatorReference | None:
        with self._lock:
            if self._coordinator is None:
                log.debug("Getting StateStoreCoordinatorRef")
                self._coordinator = self._coordinator_of()
                if self._coordinator is not None:
                    log.info("Retrieved reference to StateStoreCoordinator: %s", self._coordinator)
            return self._coordinator

    def _report(self, provider_id: StateStoreProviderId, others: Sequence[StateStoreProviderId]) -> None:
        coordinator = self._reference()
        if coordinator is None:
            return
        report = coordinator.report_active_instance(provider_id, self._host, self._executor_id, tuple(others))
        log.info("Reported that the loaded instance %s is active", provider_id)
        to_unload = report.result()
        with self._lock:
            self._reported.add(provider_id)
        log.debug("The loaded instances are going to unload: %s", ", ".join(map(str, to_unload)))
        for other in to_unload:
            self.unload(other)

    def is_loaded(self, provider_id: StateStoreProviderId) -> bool:
        with self._lock:
            return provider_id in self._providers

    def unload(self, provider_id: StateStoreProviderId) -> None:
        with self._lock:
            provider = self._providers.pop(provider_id, None)
            self._maintained.pop(provider_id, None)
            self._reported.discard(provider_id)
        if provider is not None:
            provider.close()
            log.info("Unloaded %s", provider)

    def stop(self) -> None:
        """Close all providers, and end maintenance. A provider that is loaded afterwards starts maintenance again."""
        with self._lock:
            ids = list(self._providers)
            loop, pool = self._loop, self._pool
            self._loop = self._pool = None
            self._coordinator = None
        if loop is not None:
            loop.close()
        for provider_id in ids:
            self.unload(provider_id)
        if loop is not None:
            loop.close(timeout=None)
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        log.info("StateStore stopped")

    # -- maintenance ---------------------------------------------------------------------------

    def is_maintenance_running(self) -> bool:
        with self._lock:
            return self._loop is not None and self._loop.is_alive

    def _start_maintenance(self, conf: StateStoreConf) -> None:
        if self._loop is not None and self._loop.is_alive:
            return
        self._pool = self._pool or ThreadPoolExecutor(
            conf.maintenance_threads, thread_name_prefix="statestore-maintenance"
        )
        self._loop = BackgroundLoop(
            self.do_maintenance,
            conf.maintenance_interval,
            name="state-store-maintenance-task",
            what="do the maintenance of the loaded providers: no snapshots are made",
            remedy="Look at the log of this process.",
        ).start()
        log.info("State Store maintenance task started")

    def do_maintenance(self) -> list[Future[None]]:
        """Do one round: unload providers that are active elsewhere, and begin to maintain the rest.

        Returns at once, so that a slow upload does not delay the next round. A provider whose last maintenance has not
        ended is skipped.
        """
        log.debug("Doing maintenance")
        with self._lock:
            loaded, pool = dict(self._providers), self._pool
        begun = []
        for provider_id, provider in loaded.items():
            with self._lock:
                running = self._maintained.get(provider_id)
                if pool is None or (running is not None and not running.done()):
                    continue
                try:
                    begun.append(pool.submit(self._maintain, provider_id, provider))
                except RuntimeError:  # stopped in between
                    break
                self._maintained[provider_id] = begun[-1]
        return begun

    def _maintain(self, provider_id: StateStoreProviderId, provider: StateStoreProvider) -> None:
        try:
            if self._is_active(provider_id):
                provider.do_maintenance()
            else:
                self.unload(provider_id)
        except Exception:
            with self._lock:
                is_loaded = self._providers.get(provider_id) is provider
            if is_loaded:  # else it was closed on purpose, in the middle of its maintenance
                log.warning("Error managing %s, unloading state store provider", provider, exc_info=True)
                self.unload(provider_id)

    def _is_active(self, provider_id: StateStoreProviderId) -> bool:
        coordinator = self._reference()
        with self._lock:
            is_reported = provider_id in self._reported
        if coordinator is None or not is_reported:  # one that is just being loaded is not reported yet
            return True
        verified = coordinator.verify_if_instance_active(provider_id, self._executor_id)
        log.debug("Verified whether the loaded instance %s is active: %s", provider_id, verified)
        return verified


loaded_providers = LoadedProviders(load_provider)
"""The providers of this process."""
