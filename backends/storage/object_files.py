"""The files of one location on object storage or in memory, through obstore, with the methods of ``LocalFiles``.

Errors are obstore's own. A call is one request, unless it says otherwise; ``RequestSender`` retries failed requests.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from backends.exceptions import MissingFileError, StorageError
from backends.storage.failures import is_out_of_range
from backends.storage.locations import Location, store_options

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config, S3Credential, S3CredentialProvider

# obstore's store for a location: its kind, options and credentials.


_MEMORY_STORES: dict[str, MemoryStore] = {}
_MEMORY_LOCK = threading.Lock()
# Retries are ours: obstore's have no clock that a test can control, share no rate limit, and do not repeat creates.
_NO_RETRIES: RetryConfig = {"max_retries": 0}
# A part is retried soon; if that does not help, the whole file is.
_RETRIES_OF_PARTS: RetryConfig = {
    "max_retries": 4,
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
    "retry_timeout": timedelta(seconds=60),
}


class ObjectStores:
    """obstore's stores of one location. Construction does no I/O. Many threads may share one.

    ``plain`` does not retry: ``RequestSender`` does. ``in_parts`` is for multipart uploads of large files, and
    retries each part separately. Raises obstore's errors, and ``ValueError``, for a wrong option.
    """

    def __init__(self, location: Location, options: Mapping[str, str]) -> None:
        self._location = location
        self._options = options
        self.plain = _make_store(location, options)
        self._in_parts: ObjectStore | None = None

    @property
    def in_parts(self) -> ObjectStore:
        """Return the store for large files."""
        if self._in_parts is None:
            self._in_parts = _make_store(self._location, self._options, _RETRIES_OF_PARTS)
        return self._in_parts

    @property
    def endpoint(self) -> str | None:
        """Return the endpoint of the service, if one was given."""
        config: Mapping[str, object] = getattr(self.plain, "config", None) or {}
        endpoint = config.get("endpoint")
        return None if endpoint is None else str(endpoint)

    @property
    def bucket(self) -> str:
        """Return the bucket with its service: the unit of rate limiting."""
        return f"{self._location.kind}://{self._location.container} {self.endpoint or ''}".strip()

    def renew(self) -> None:
        """Request new credentials with the next requests: the fetched ones are dropped with the stores."""
        self.plain, self._in_parts = _make_store(self._location, self._options), None


def _make_store(location: Location, options: Mapping[str, str], retries: RetryConfig = _NO_RETRIES) -> ObjectStore:
    """Make the store of a location, rooted at its bucket, container or '/'. Stores in memory are shared by name."""
    if location.kind == "local":
        return LocalStore()
    if location.kind == "memory":
        with _MEMORY_LOCK:
            return _MEMORY_STORES.setdefault(location.container, MemoryStore())
    mapped = store_options(location, options)
    client = cast("ClientConfig", mapped.client)
    if location.kind == "s3":
        return S3Store(
            location.container,
            config=cast("S3Config", _above_environment(mapped.config)),
            client_options=client,
            retry_config=retries,
            credential_provider=_tokenless_credentials(mapped.config),
        )
    by_url: Any = GCSStore if location.kind == "gs" else AzureStore
    store: GCSStore | AzureStore = by_url.from_url(
        f"{location.kind}://{location.container}", config=mapped.config, client_options=client, retry_config=retries
    )
    return store


def _above_environment(config: Mapping[str, str | bool]) -> dict[str, str | bool]:
    """Return obstore's configuration with the options above the ``AWS_*`` variables of the environment.

    obstore adds what the variables say, even if the options say otherwise.
    """
    own: dict[str, str | bool] = {"conditional_put": "etag", **config}
    if "access_key_id" in config:
        own.setdefault("skip_signature", False)
    if "endpoint" in config and "AWS_ENDPOINT_URL_S3" in os.environ:
        own.setdefault("aws_endpoint_url_s3", config["endpoint"])
    return own


def _tokenless_credentials(config: Mapping[str, str | bool]) -> S3CredentialProvider | None:
    """Return the given keys without a token, if the environment has a token; None otherwise.

    obstore would send that token, which belongs to other keys.
    """
    key, secret = config.get("access_key_id"), config.get("secret_access_key")
    has_token = not config.keys().isdisjoint(("session_token", "aws_session_token", "token"))
    if not key or not secret or has_token or "AWS_SESSION_TOKEN" not in os.environ:
        return None
    credential: S3Credential = {
        "access_key_id": str(key),
        "secret_access_key": str(secret),
        "token": None,
        "expires_at": None,
    }
    return lambda: credential


MAX_FILES_AT_ONCE = 1000
"""S3 removes at most this many files with one request, and lists at most this many on one page."""
PART_BYTES, _PARTS_AT_ONCE, _MAX_PARTS = 8 << 20, 4, 10_000
"""The bytes of a part of a multipart upload, the number of parts that are uploaded at once, and the most parts that S3
accepts.
"""
_PIECE_BYTES = 1 << 20


class ObjectFiles:
    """Reads, writes and removes the files below ``prefix``. Many threads and processes may do so at once.

    ``note_more`` is called for requests beyond the first one of a call: their verb and their number.
    """

    def __init__(self, stores: ObjectStores, prefix: str, note_more: Callable[[str, int], None]) -> None:
        self._stores = stores
        root = prefix.strip("/")
        self._prefix = f"{root}/" if root else ""
        self._note_more = note_more

    def put_new(self, path: str, data: bytes) -> None:
        """Write a file that must not exist; raises ``AlreadyExistsError`` if it does, or if it is being written."""
        obstore.put(self._stores.plain, self._prefix + path, data, mode="create")

    def replace(self, path: str, data: bytes) -> None:
        """Write a file in place of an existing one, if there is one."""
        obstore.put(self._stores.plain, self._prefix + path, data)

    def put_file(self, path: str, source: Path | bytes, size: int) -> None:
        """Write a large file in parts, some at once. obstore retries a part that fails, with its own backoff."""
        part = max(PART_BYTES, -(-size // _MAX_PARTS))
        if size > part:
            # One request for each part, and to begin and to end the upload: one more than the parts.
            self._note_more("write", -(-size // part) + 1)
        store = self._stores.in_parts
        obstore.put(store, self._prefix + path, source, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)

    def read(self, path: str) -> bytes:
        """Return a file's content; raises ``FileNotFoundError``."""
        return bytes(obstore.get(self._stores.plain, self._prefix + path).bytes())

    def read_ranges(self, path: str, starts: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        """Return parts of a file; one part is shorter if the file ends before. Raises ``FileNotFoundError``.

        Parts that are close to each other share one request. If one of several begins after the end, all are empty.
        """
        store, key = self._stores.plain, self._prefix + path
        try:
            if len(starts) == 1:
                return [bytes(obstore.get_range(store, key, start=starts[0], length=lengths[0]))]
            return [bytes(part) for part in obstore.get_ranges(store, key, starts=starts, lengths=lengths)]
        except BaseError as error:
            if is_out_of_range(error):
                return [b""] * len(starts)
            raise

    def pieces(self, path: str, start: int) -> Iterator[bytes]:
        """Read a file from ``start`` on, in pieces. Raises ``FileNotFoundError``."""
        try:
            rest: GetOptions = {"range": {"offset": start}} if start else {}
            response = obstore.get(self._stores.plain, self._prefix + path, options=rest)
        except BaseError as error:
            if start and is_out_of_range(error):
                return  # all was read when the connection broke
            raise
        yield from response.stream(min_chunk_size=_PIECE_BYTES)

    def modified_ms(self, path: str) -> int:
        """Return when a file was written, in ms since 1970, by the second. Raises ``FileNotFoundError``."""
        return int(obstore.head(self._stores.plain, self._prefix + path)["last_modified"].timestamp() * 1000)

    def remove(self, path: str) -> None:
        """Remove a file. Some storages raise ``FileNotFoundError`` if there is none."""
        obstore.delete(self._stores.plain, self._prefix + path)

    def remove_all(self, paths: Sequence[str]) -> None:
        """Remove at most ``MAX_FILES_AT_ONCE`` files; some storages stop at one that is missing, as by ``remove``."""
        obstore.delete(self._stores.plain, [self._prefix + path for path in paths])

    def entries(self, directory: str, after: str | None) -> list[tuple[str, int]]:
        """Return what ``LocalFiles`` returns; with ``after``, only files whose paths sort after it."""
        key = (self._prefix + directory).rstrip("/") if directory.strip("/") else self._prefix.rstrip("/")
        offset = None if after is None else self._prefix + after
        objects = obstore.list(self._stores.plain, prefix=key or None, offset=offset).collect()
        self._note_more("list", len(objects) // MAX_FILES_AT_ONCE)  # further pages
        return sorted((str(meta["path"]).removeprefix(self._prefix), int(meta["size"])) for meta in objects)


# Reads objects that many loads of a process need at about the same time: each object once, for all loads.
#
# When a query starts, a host loads dozens of partitions, whose changelogs and small snapshots are in the same few
# objects. A request for each part of each partition takes longer than the transfer of the bytes.


ALONE = 2
"""This many first readers of an object read their parts alone: one load asks once or twice.

If more loads are under way, the first one reads for all: most likely their host is starting.
"""
OBJECT_BYTES = 4 << 20
"""At most this many bytes of an object are read for all. Later parts are read alone."""
MAX_OBJECTS = 64
MAX_SHARED_BYTES = 16 << 20
"""Limit of the kept bytes of all objects; the least recently used object is evicted first."""


class SharedObjects:
    """The beginnings of objects that were read recently. Thread-safe: ``_lock`` guards the tables, not the requests.

    ``_asked`` counts the readers of each object, ``_held`` has the objects that were read for all or are being read.
    Both are bounded by ``MAX_OBJECTS``, the bytes by ``MAX_SHARED_BYTES`` plus those being read. ``_loads`` counts
    the loads under way. ``spare(nbytes, drop)`` counts bytes in the memory of the process, as ``HostMemory.spare``
    does, and returns None if there is no room for them.
    """

    def __init__(self, spare: Callable[[int, Callable[[], None]], object | None]) -> None:
        self._lock = threading.Lock()
        self._spare = spare
        self._asked: OrderedDict[str, int] = OrderedDict()
        self._held: OrderedDict[str, Future[bytes]] = OrderedDict()
        self._claims: dict[str, object] = {}
        self._loads = 0

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count a load for as long as the block lasts."""
        with self._lock:
            self._loads += 1
        try:
            yield
        finally:
            with self._lock:
                self._loads -= 1

    def has(self, name: str, end: int) -> bool:
        """Return whether an object is held up to ``end``, or is being read for all."""
        with self._lock:
            return end <= OBJECT_BYTES and name in self._held

    def part(
        self, name: str, offset: int, size: int, read: Callable[[int], bytes], *, is_new_reader: bool = True
    ) -> bytes | None:
        """Return a part of an object, unchecked; None if the caller has to read it alone.

        ``read`` reads a given number of bytes from the object's beginning. The first caller that needs them for all
        reads them, and the others wait. If its read fails, the others do not get the error: they read alone.
        """
        if offset + size > OBJECT_BYTES:
            return None
        with self._lock:
            asked = self._asked.pop(name, 0) + is_new_reader
            self._asked[name] = asked
            if len(self._asked) > MAX_OBJECTS:
                self._asked.popitem(last=False)
            future = self._held.get(name)
            if future is None and asked <= ALONE and self._loads <= ALONE:
                return None
            reads = future is None
            if future is None:
                future = self._held[name] = Future()
            self._held.move_to_end(name)
        if reads:
            self._read(name, future, read)
        whole = future.result()
        return whole[offset : offset + size] if offset + size <= len(whole) else None

    def _read(self, name: str, future: Future[bytes], read: Callable[[int], bytes]) -> None:
        data = b""
        try:
            data = read(OBJECT_BYTES)
        except (StorageError, MissingFileError):
            pass  # callers that read alone now get the error themselves
        finally:
            claim = self._spare(len(data), partial(self._forget, name)) if data else None
            with self._lock:
                if claim is None:
                    self._held.pop(name, None)
                elif name in self._held:  # it may have been dropped again by now
                    self._claims[name] = claim
                future.set_result(data)
                self._shrink()

    def _forget(self, name: str) -> None:
        """Stop keeping an object. Callers that wait for it still get it."""
        with self._lock:
            self._held.pop(name, None)
            self._claims.pop(name, None)

    def _shrink(self) -> None:
        done = [(name, len(future.result())) for name, future in self._held.items() if future.done()]
        nbytes = sum(size for _, size in done)
        for name, size in done:
            if nbytes <= MAX_SHARED_BYTES and len(self._held) <= MAX_OBJECTS:
                return
            del self._held[name]
            self._claims.pop(name, None)
            nbytes -= size
