"""The files of one location on HDFS, through hdfs-native, with the methods of ``LocalFiles``.

HDFS can create a file only if it is absent, but a writer that dies then leaves a part of the file under its name. So a
file is written under another name, closed, and renamed: the NameNode renames at once or not at all, and refuses if the
new name is taken. It answers when its log has the rename on disk. Until then ``hsync`` has had each DataNode of the
file write the content to its disk; ``close`` alone leaves it in the memory of their machines.

hdfs-native has no limit for some of its waits: here each step has one. A client that has met a limit is replaced,
because the same connection may never answer again.

Errors are ``FileNotFoundError``, obstore's ``AlreadyExistsError``, ``ConnectionError`` and ``TimeoutError`` if the same
request may succeed later, otherwise another ``OSError``.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from xml.etree import ElementTree

from obstore.exceptions import AlreadyExistsError

from backends.exceptions import InvalidStateStoreArgument
from backends.lazy_names import import_optional
from backends.storage.locations import Location, hdfs_options

if TYPE_CHECKING:
    from hdfs_native import AsyncClient, FileStatus

T = TypeVar("T")

DEFAULT_PORT = 8020
STEP_SECONDS = 15.0
"""A step of a request, which moves at most ``_PIECE_BYTES``, fails after this many seconds without an answer."""
LISTING_SECONDS = 60.0
"""The limit for the listing of one directory, which takes a request for each thousand of its entries."""
KEPT_SECONDS = 60.0
"""How long a client is kept that has been replaced: longer than any of its requests."""
FEWER_REPLICAS_SECONDS = 60.0
"""How long files are written with fewer replicas after a DataNode has failed."""
BLOCK_BYTES = 128 << 20
"""The block size of all files: ``hsync`` concerns only the block that is being written."""
_PIECE_BYTES = 4 << 20
_AT_ONCE = 16
"""At most this many requests of one call are under way."""
SOCKET_MILLISECONDS = "6000"
"""A DataNode that sends nothing for so long is left for another one: in less time than ``STEP_SECONDS``."""
_FINAL = (
    "AccessControlException",
    "AuthorizationException",
    "FSLimitException",
    "GSSAPIError",
    "InvalidArgument",
    "InvalidPath",
    "InvalidToken",
    "MaxDirectoryItemsExceededException",
    "NoSASLMechanism",
    "ParentNotDirectoryException",
    "PathComponentTooLongException",
    "PathIsNotEmptyDirectoryException",
    "QuotaExceededException",
    "SASLError",
    "UnresolvedPathException",
    "UnsupportedErasureCodingPolicy",
    "UnsupportedFeature",
    "hsync is not supported",
)
"""Errors that the same request meets again."""
_REMEDIES = (
    (
        ("AccessControlException",),
        "Give this user the rights there, or name another one by HADOOP_USER_NAME in the environment of the driver, "
        "the executors and the Ray nodes",
    ),
    (
        ("GSSAPI", "SASL", "InvalidToken"),
        "A cluster with Kerberos needs HADOOP_CONF_DIR, libgssapi_krb5 and a valid ticket (kinit) on each machine",
    ),
    (("rasure",), "Keep state in a directory without erasure coding: hdfs ec -setPolicy -replicate -path ..."),
    (("QuotaExceeded",), "Raise the quota of the directory: hdfs dfsadmin -setSpaceQuota or -setQuota"),
    (("SafeMode",), "The NameNode starts, or has too few DataNodes: hdfs dfsadmin -safemode get"),
    (("could only be written to",), "Too few DataNodes can take a block: hdfs dfsadmin -report"),
    (("refused", "No data received"), "Are the NameNode and the DataNodes running, and is the address right?"),
)


class HdfsClients:
    """The client of one location, which all locations with the same NameNode share. Construction does no requests.

    Many threads may share one. ``endpoint`` and ``bucket`` are as those of ``ObjectStores``. Raises
    ``InvalidStateStoreArgument`` if hdfs-native is missing or if no NameNode is known.
    """

    endpoint: str | None = None

    def __init__(self, location: Location, options: Mapping[str, str]) -> None:
        self._location = location
        self._options = hdfs_options(location, options)
        self.bucket = f"hdfs://{location.container}"
        environment = ((name, os.environ.get(name, "")) for name in _ENVIRONMENT)
        key = (os.getpid(), location.container, *sorted(self._options.items()), *environment)
        with _CLIENTS_LOCK:
            if key not in _CLIENTS:
                _CLIENTS[key] = _Shared(self._made(is_first=True))
            self._shared = _CLIENTS[key]

    @property
    def client(self) -> AsyncClient:
        """Return the client for the next request."""
        return self._shared.client

    def renew(self) -> None:
        """Use new connections for the following requests."""
        self.replace(self.client)

    def replace(self, client: AsyncClient) -> None:
        """Use new connections for the following requests, unless another request has replaced this client."""
        with _CLIENTS_LOCK:
            if self._shared.client is client:
                self._shared.replace(self._made(is_first=False))

    def _made(self, *, is_first: bool) -> AsyncClient:
        hdfs_native = import_optional("hdfs_native", f"State at {self._location.text}", InvalidStateStoreArgument)
        make: Callable[[str, dict[str, str]], AsyncClient] = hdfs_native.AsyncClient
        host = self._location.container or self._default_host()
        # Our own retries have a clock and a limit; hdfs-native's pause fails outside a runtime of Rust. Of the
        # NameNodes of a nameservice, it asks the second one without a pause.
        settings = {
            "dfs.client.socket-timeout": SOCKET_MILLISECONDS,
            "dfs.client.failover.max.attempts": "0" if ":" in host else "1",
            **self._options,
        }
        if not is_first:
            # A NameNode that hangs keeps its connections: the next client must not begin with the same one.
            settings[f"dfs.client.failover.random.order.{host}"] = "true"
        try:
            try:
                return make(f"hdfs://{host}", settings)
            except RuntimeError as error:
                if "No NameNode hosts" not in str(error) or not host or ":" in host:
                    raise
                return make(f"hdfs://{host}:{DEFAULT_PORT}", settings)
        except (RuntimeError, OSError) as error:
            raise InvalidStateStoreArgument(
                f"{self._location.text} cannot be opened: {_first_line(error)}. Name the NameNode in the address "
                f"(hdfs://host:{DEFAULT_PORT}/path), or the directory of core-site.xml and hdfs-site.xml by "
                "HADOOP_CONF_DIR in the environment of the driver, the executors and the Ray nodes."
            ) from error

    def _default_host(self) -> str:
        """Return the NameNode or nameservice of an address without one: that of ``fs.defaultFS``; "" if unknown."""
        url = self._options.get("fs.defaultFS", "")
        home = os.environ.get("HADOOP_HOME")
        conf = os.environ.get("HADOOP_CONF_DIR") or (home and f"{home}/etc/hadoop")
        if not url and conf and Path(conf, "core-site.xml").is_file():
            for setting in ElementTree.parse(Path(conf, "core-site.xml")).iter("property"):
                if setting.findtext("name", "").strip() == "fs.defaultFS":
                    url = setting.findtext("value", "").strip()
        return urlsplit(url).netloc if url.startswith("hdfs:") else ""


_ENVIRONMENT = ("HADOOP_CONF_DIR", "HADOOP_HOME", "HADOOP_PROXY_USER", "HADOOP_TOKEN_FILE_LOCATION", "HADOOP_USER_NAME")
"""The variables that hdfs-native reads when a client is made."""


class _Shared:
    """A client that is used, and those before it.

    A client ends the threads of its runtime when Python drops it. If one of them is just then telling the event loop of
    a result, it waits for Python, and Python for it, forever. So a client is dropped only when it has long been unused.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self._replaced: list[tuple[float, AsyncClient]] = []

    def replace(self, client: AsyncClient) -> None:
        now = time.monotonic()
        self._replaced = [(since, old) for since, old in self._replaced if now < since + KEPT_SECONDS]
        self._replaced.append((now, self.client))
        self.client = client


_CLIENTS: dict[tuple[object, ...], _Shared] = {}
"""By process, NameNode, settings and environment. They stay: a process uses few."""
_CLIENTS_LOCK = threading.Lock()


class HdfsFiles:
    """Reads, writes and removes the files below ``prefix``. Many threads and processes may do so at once.

    ``fsync`` False leaves out the syncs; writes are still atomic.
    """

    def __init__(self, clients: HdfsClients, prefix: str, *, fsync: bool) -> None:
        self._clients = clients
        self._below = f"/{prefix.strip('/')}/" if prefix.strip("/") else "/"
        self._fsync = fsync
        # Only the event loop uses these.
        self._replicas: int | None = None
        self._full_replicas: int | None = None
        self._fewer_until = 0.0

    def put_new(self, path: str, data: bytes) -> None:
        """Write a file that must not exist; raises ``AlreadyExistsError`` if it does. Durable on return."""
        self._put(path, data, len(data), overwrite=False)

    def put_file(self, path: str, source: Path | bytes, size: int) -> None:
        """Write a file of ``size`` bytes, under a name that nothing else uses. Durable on return."""
        self._put(path, source, size, overwrite=True)

    def replace(self, path: str, data: bytes) -> None:
        """Write a file in place of an existing one, if there is one: at each moment one of the two exists, whole."""
        self._put(path, data, len(data), overwrite=True)

    def _put(self, path: str, source: Path | bytes, size: int, *, overwrite: bool) -> None:
        target = self._below + path
        staged = f"{target}#{secrets.randbits(60)}"  # the mark of an unfinished file, which no listing shows

        async def put() -> None:
            try:
                await self._write(staged, source, size)
                try:
                    await self._step(self._clients.client.rename(staged, target, overwrite))
                except FileNotFoundError as error:
                    # hdfs-native repeats a rename whose answer was lost; the file may have its name by now.
                    raise ConnectionError(f"it is unknown whether {target} was renamed: {error}") from error
            except FileExistsError as error:
                await self._discard(staged)
                raise AlreadyExistsError(f"{target} exists") from error
            except BaseException:
                await self._discard(staged)
                raise

        self._run(put())

    async def _write(self, staged: str, source: Path | bytes, size: int) -> None:
        """Write a file that nothing has named yet, and close it."""
        import hdfs_native

        client = self._clients.client
        replicas = self._replicas if time.monotonic() < self._fewer_until else None
        # Also for small files: blocks are smaller where dfs.blocksize is, and those before the last are not synced.
        options = hdfs_native.WriteOptions(replication=replicas, block_size=BLOCK_BYTES)
        try:
            writer = await self._step(client.create(staged, options))
        except FileExistsError as error:
            raise ConnectionError(f"it is unknown whether {staged} was created: {error}") from error
        try:
            written = 0
            for piece in _pieces_of(source, min(_PIECE_BYTES, BLOCK_BYTES)):
                await self._step(writer.write(piece))
                written += len(piece)
                if self._fsync and (written == size or written % BLOCK_BYTES == 0):
                    await self._step(writer.hsync())
            await self._step(writer.close())
            if replicas is not None and self._full_replicas is not None:
                await self._step(client.set_replication(staged, self._full_replicas))
        except OSError:
            await self._use_fewer_replicas(staged)
            raise

    async def _use_fewer_replicas(self, staged: str) -> None:
        """Write the following files with one replica less, for a while.

        hdfs-native cannot tell the NameNode which DataNode has failed, and so may get the same one again until the
        NameNode itself counts it as dead. Files with fewer replicas need fewer DataNodes. They get the others from the
        NameNode, which is told the full number at the end.
        """
        with suppress(OSError):
            replication = (await self._step(self._clients.client.get_file_info(staged))).replication
            if replication:
                if time.monotonic() >= self._fewer_until:
                    self._full_replicas = replication
                self._replicas = max(1, replication - 1)
                self._fewer_until = time.monotonic() + FEWER_REPLICAS_SECONDS

    async def _discard(self, staged: str) -> None:
        """Remove an unfinished file, if HDFS answers. Otherwise it stays unfinished."""
        with suppress(OSError):
            await self._step(self._clients.client.delete(staged, False))

    def read(self, path: str) -> bytes:
        """Return a file's content; raises ``FileNotFoundError``."""

        async def whole() -> bytes:
            reader = await self._opened(path)
            pieces = [await self._part(reader, at, _PIECE_BYTES) for at in range(0, len(reader), _PIECE_BYTES)]
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

        return self._run(whole())

    def read_ranges(self, path: str, starts: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        """Return parts of a file, shorter where the file ends before. Raises ``FileNotFoundError``."""

        async def ranges() -> list[bytes]:
            reader = await self._opened(path)
            parts = zip(starts, lengths, strict=True)
            return await _gathered([self._part(reader, start, length) for start, length in parts])

        return self._run(ranges())

    def pieces(self, path: str, start: int) -> Iterator[bytes]:
        """Read a file from ``start`` on, in pieces. Raises ``FileNotFoundError``."""
        reader = self._run(self._opened(path))
        for at in range(start, len(reader), _PIECE_BYTES):
            yield self._run(self._part(reader, at, _PIECE_BYTES))

    async def _opened(self, path: str) -> Any:
        return await self._step(self._clients.client.read(self._below + path))

    async def _part(self, reader: Any, start: int, length: int) -> bytes:
        # hdfs-native panics if a range ends after the file.
        length = min(length, len(reader) - start)
        return bytes(await self._step(reader.read_range(start, length))) if length > 0 else b""

    def modified_ms(self, path: str) -> int:
        """Return when a file was written, in ms since 1970. Raises ``FileNotFoundError``."""

        async def status() -> FileStatus:
            return await self._step(self._clients.client.get_file_info(self._below + path))

        of_file = self._run(status())
        if of_file.isdir:
            raise FileNotFoundError(f"{path} is a directory.")
        return of_file.modification_time

    def remove(self, path: str) -> None:
        """Remove a file, finished or not. No error if there is none."""
        self.remove_all([path])

    def remove_all(self, paths: Sequence[str]) -> None:
        """Remove files, finished or not. No error for those that do not exist."""

        async def remove() -> None:
            await _gathered([self._step(self._clients.client.delete(self._below + path, False)) for path in paths])

        self._run(remove())

    def entries(self, directory: str) -> list[tuple[str, int]]:
        """Return path and size of every file in a directory and below, sorted by path; see ``LocalFiles``."""

        async def walk() -> list[tuple[str, int]]:
            files: list[tuple[str, int]] = []
            level = [(self._below + directory.strip("/")).rstrip("/") or "/"]
            while level:
                listings = await _gathered([self._listing(one) for one in level])
                level = [status.path for listing in listings for status in listing if status.isdir]
                files += [
                    (status.path.removeprefix(self._below), status.length)
                    for listing in listings
                    for status in listing
                    if not status.isdir
                ]
            return sorted(files)

        return self._run(walk())

    async def _listing(self, directory: str) -> list[FileStatus]:
        async def entries() -> list[FileStatus]:
            return [status async for status in self._clients.client.list_status(directory)]

        try:
            listing = await self._step(entries(), LISTING_SECONDS)
        except FileNotFoundError:
            return []
        return [status for status in listing if status.path != directory]  # a file lists itself

    async def _step(self, answer: Awaitable[T], seconds: float | None = None) -> T:
        """Wait for a step. Replace the client if it gets no answer."""
        limit = STEP_SECONDS if seconds is None else seconds
        client = self._clients.client
        try:
            return await asyncio.wait_for(answer, limit)
        except (FileNotFoundError, FileExistsError) as error:
            raise type(error)(_first_line(error)) from error
        except (asyncio.TimeoutError, TimeoutError) as error:
            self._clients.replace(client)
            raise TimeoutError(
                f"no answer from {self._clients.bucket} or its DataNodes for {limit:g} s. Do they run, and can this "
                "machine reach them?"
            ) from error
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            text = _first_line(error)
            if "(is not a directory)" in text:
                raise FileNotFoundError(text) from error
            remedy = next((remedy for signs, remedy in _REMEDIES if any(sign in text for sign in signs)), None)
            message = text if remedy is None else f"{text}. {remedy}"
            if any(name in text for name in _FINAL) or isinstance(error, NotImplementedError):
                raise OSError(message) from error
            raise ConnectionError(message) from error

    @staticmethod
    def _run(steps: Coroutine[Any, Any, T]) -> T:
        """Run the steps of a request in the event loop of this process, and return their result."""
        running = asyncio.run_coroutine_threadsafe(steps, _event_loop())
        try:
            return running.result()
        except BaseException:
            running.cancel()  # the caller was interrupted
            raise


async def _gathered(answers: Sequence[Awaitable[T]]) -> list[T]:
    """Await all, some at once; the results are in their order."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def in_turn(answer: Awaitable[T]) -> T:
        async with turns:
            return await answer

    return list(await asyncio.gather(*map(in_turn, answers)))


def _pieces_of(source: Path | bytes, most: int) -> Iterator[bytes]:
    if isinstance(source, bytes):
        view = memoryview(source)
        for at in range(0, len(source), most):
            yield bytes(view[at : at + most]) if len(source) > most else source
        return
    with source.open("rb", buffering=0) as file:
        while piece := file.read(most):
            yield piece


def _first_line(error: BaseException) -> str:
    """Return an error's message without the NameNode's stack trace, and without the class names around it."""
    text = str(error).split("\n", 1)[0].split("\\n", 1)[0]
    name, opened, inner = text.removesuffix('")').partition('("')
    return f"{name}: {inner}".replace('", "', ": ") if opened else text


_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}
"""The event loop of each process that was forked from another one, by its id; only its own runs."""
_LOOPS_LOCK = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    with _LOOPS_LOCK:
        loop = _LOOPS.get(os.getpid())
        if loop is None:
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="statestore-hdfs", daemon=True)
            thread.start()
            atexit.register(_end_loop, loop, thread)
        return loop


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Let threads that are telling the loop of a result do so before the clients are dropped with this process."""
    if thread.is_alive():  # not in a process that was forked from that of the loop
        loop.call_soon_threadsafe(loop.stop)
        thread.join(1.0)
