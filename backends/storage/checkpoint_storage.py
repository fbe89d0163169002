"""The durable files of one state location: local disk, HDFS, or S3, GCS, Azure and memory through obstore.

Files are written once, create-if-absent, and never changed. A file that is read by a ``FileRef`` is checked against its
size and digest.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeAlias, TypeVar

import xxhash
from obstore.exceptions import AlreadyExistsError, BaseError, UnknownConfigurationKeyError

from backends import exceptions
from backends.host_memory import BoundedDict
from backends.load_watch import LoadWatch
from backends.storage.failures import HEDGED_BYTES, check_bucket, first_line
from backends.storage.hdfs_files import HdfsClients, HdfsFiles
from backends.storage.local_files import LocalFiles, is_unfinished
from backends.storage.locations import FileRef, Location, digest, file_digest, parse_location
from backends.storage.object_files import MAX_FILES_AT_ONCE, PART_BYTES, ObjectFiles, ObjectStores, SharedObjects
from backends.storage.requests import BucketTraffic, RequestCounts, RequestSender, Traffic, buckets_of_process

T = TypeVar("T")

OpenStorage: TypeAlias = "Callable[[str, Mapping[str, str]], CheckpointStorage]"
"""Opens the storage at a location with its options, as ``CheckpointStorage.open`` does."""


class CheckpointStorage:
    """The files below one location; made by ``open``. Many threads may use one object at once.

    ``shared`` are objects whose parts other readers in the process use as well; None: nothing is shared.

    Transient errors (throttling, server errors, broken connections) are retried with backoff for ``retry_seconds``
    seconds, then raised as ``StorageError``; permanent ones are raised at once.
    """

    def __init__(
        self,
        location: Location,
        stores: ObjectStores | HdfsClients,
        counts: RequestCounts,
        traffic: Traffic | None,
        sender: RequestSender,
        *,
        fsync: bool,
    ) -> None:
        self.location = location.text
        self.is_local = location.kind == "local"
        self._stores = stores
        self.shared: SharedObjects | None = None
        self._counts = counts
        self._traffic = traffic
        self._sender = sender
        self._files: LocalFiles | HdfsFiles | ObjectFiles
        if self.is_local:
            self._files = LocalFiles(Path(location.prefix), fsync=fsync)
        elif isinstance(stores, HdfsClients):
            self._files = HdfsFiles(stores, location.prefix, fsync=fsync)
        else:
            self._files = ObjectFiles(stores, location.prefix, self._note_more)

    @classmethod
    def open(
        cls,
        location: str,
        options: Mapping[str, str] | None = None,
        *,
        fsync: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        retry_seconds: float = 60.0,
        requests: RequestCounts | None = None,
        buckets: BucketTraffic | None = None,
    ) -> CheckpointStorage:
        """Open the storage at an address; nothing is read or written yet.

        ``options`` are Spark's ``spark.hadoop.fs.s3a.*`` or obstore's own, for HDFS Spark's ``spark.hadoop.dfs.*`` or
        Hadoop's own. ``fsync`` concerns local disks and HDFS only.
        ``requests`` counts the requests to the storage, also those to a local disk. ``buckets`` has the pace and the
        usual durations of a bucket, by default those of the whole process. Raises ``UnsupportedLocationError``, or
        ``InvalidStateStoreArgument`` for a wrong option.
        """
        parsed = parse_location(location)
        counts = RequestCounts() if requests is None else requests
        try:
            kind: type[HdfsClients | ObjectStores] = HdfsClients if parsed.kind == "hdfs" else ObjectStores
            stores = kind(parsed, options or {})
        except UnknownConfigurationKeyError as error:
            raise exceptions.InvalidStateStoreArgument(
                f"An option for {parsed.text} is unknown to obstore: {first_line(error)}"
            ) from error
        except (BaseError, ValueError) as error:
            raise exceptions.InvalidStateStoreArgument(
                f"{parsed.text} cannot be opened: {first_line(error)}"
            ) from error
        traffic = None
        if parsed.kind != "local":
            # Storage in the memory of the process is never late.
            traffic = (buckets or buckets_of_process()).of(stores.bucket, with_hedges=parsed.kind != "memory")
        sender = RequestSender(
            parsed.text,
            clock=clock,
            sleep=sleep,
            retry_seconds=retry_seconds,
            counts=counts,
            traffic=traffic,
            renew=stores.renew,
        )
        return cls(parsed, stores, counts, traffic, sender, fsync=fsync)

    @property
    def store_name(self) -> str:
        """Return the address and, if one was given, the endpoint of the service behind it, for messages."""
        endpoint = self._stores.endpoint
        return self.location if endpoint is None else f"{self.location} (at {endpoint})"

    @property
    def used(self) -> dict[str, int]:
        """Return the requests to this location by kind, and their bytes, of all objects that share its counts."""
        return self._counts.at(self.location)

    def full_location(self, path: str) -> str:
        """Return a file's address, as messages name it."""
        return f"{self.location}/{path}"

    def _note_more(self, verb: str, number: int) -> None:
        """Count the additional requests of an operation that needs more than the one already counted."""
        self._counts.note(verb, self.location, number)

    def put_new(self, path: str, data: bytes) -> FileRef:
        """Write a new file: whole or not at all, durable on return. Of several writers one succeeds.

        Raises ``FileExistsInStorageError`` if the name is taken, ``StorageError`` if the storage fails.
        """
        self._check_path(path)
        ref = FileRef(path, len(data), digest(data))
        unanswered = False  # an attempt of ours may have written the file without an answer

        def put() -> bool:
            self._counts.moved(self.location, sent=len(data))
            try:
                self._files.put_new(path, data)
                return True
            except FileExistsError:
                # A local disk always answers. But a file system of a network may fail once the file has its name.
                return unanswered and self._get_or_none(path) == data
            except AlreadyExistsError:
                # A repeated attempt may find the file that the first one wrote before its answer was lost. S3 also
                # answers "conflict" while another writer is active, even if no file exists in the end.
                may_be_ours = unanswered
                self._note_more("read", 1)
                stored_data = self._get_or_none(path)
                if stored_data is None:
                    raise
                return may_be_ours and stored_data == data
            except (BaseError, OSError):
                note_unanswered()
                raise

        def note_unanswered() -> None:
            nonlocal unanswered
            unanswered = True

        if not self._sender.send("write", path, put, on_second=note_unanswered if ref.size <= HEDGED_BYTES else None):
            raise exceptions.FileExistsInStorageError(
                f"{self.full_location(path)} exists already and is never overwritten."
            )
        return ref

    def replace(self, path: str, data: bytes) -> None:
        """Write a file in place of an existing one, if there is one: at each moment one of the two exists, whole.

        Only for files of Spark's: those of the state are never overwritten. As durable as ``put_new``.
        """
        self._check_path(path)
        self._sender.send("write", path, lambda: self._files.replace(path, data))

    def put_file(self, path: str, source: Path) -> FileRef:
        """Copy a local file into the storage, under a name that nothing else uses. As durable as ``put_new``."""
        self._check_path(path)
        return self._put_file(FileRef(path, source.stat().st_size, file_digest(source)), source)

    def put_unique(self, path: str, data: bytes) -> FileRef:
        """Write a new file as ``put_new`` does, under a name that nothing else uses: in parts if the file is large."""
        if self.is_local or len(data) <= PART_BYTES:
            return self.put_new(path, data)
        self._check_path(path)
        return self._put_file(FileRef(path, len(data), digest(data)), data)

    def _put_file(self, ref: FileRef, source: Path | bytes) -> FileRef:
        unanswered = False

        def put() -> None:
            nonlocal unanswered
            self._counts.moved(self.location, sent=ref.size)
            try:
                self._files.put_file(ref.path, source, ref.size)
            except FileExistsError:
                if not unanswered:
                    raise
                # An earlier attempt gave the file its name, which nothing else uses, and failed then.
            except (BaseError, OSError):
                unanswered = True
                raise

        self._sender.send("write", ref.path, put)
        return ref

    def fetch_turn(self, load: LoadWatch) -> AbstractContextManager[None]:
        """Wait until a load may fetch its next large file, and hold that place within the block; see ``FetchTurns``."""
        return nullcontext() if self._traffic is None else self._traffic.turns.turn(load)

    def read_to_file(self, ref: FileRef, target: Path) -> None:
        """Copy a file of the storage to a new local file, a piece at a time. Checked as by ``read``."""
        with target.open("wb") as file:

            def write(piece: bytes, start: int) -> None:
                file.seek(start)
                file.write(piece)

            self._read_in_pieces(ref, write)

    def check(self, ref: FileRef) -> None:
        """Read a whole file, a piece at a time, and keep nothing of it. Raises as ``read`` does."""
        self._read_in_pieces(ref, lambda piece, start: None)

    def _read_in_pieces(self, ref: FileRef, take: Callable[[bytes, int], None]) -> None:
        """Pass each piece of a file, with its offset, to ``take``.

        If a connection breaks, continue after the last piece.

        Raises as ``read`` does; the pieces passed so far are then invalid.
        """
        if ref.within is not None:
            take(self.read(ref), 0)  # parts of an object are small
            return
        self._check_path(ref.path)
        hashed, size = xxhash.xxh3_128(), 0

        def fetch() -> bool:
            nonlocal size
            try:
                for piece in self._files.pieces(ref.path, size):
                    self._counts.moved(self.location, received=len(piece))
                    take(piece, size)
                    hashed.update(piece)
                    size += len(piece)
            except FileNotFoundError as error:
                check_bucket(error)
                return False
            return True

        if not self._sender.send("read", ref.path, fetch, progress=lambda: size):
            raise self._missing(ref)
        if (size, hashed.hexdigest()) != (ref.size, ref.digest):
            raise self._damaged(ref, size, hashed.hexdigest())

    def get(self, path: str) -> bytes:
        """Return a file's content, unchecked. Use ``read`` if you have a ``FileRef``. Raises ``MissingFileError``."""
        return self._whole(path, is_small=True)

    def _whole(self, path: str, *, is_small: bool) -> bytes:
        self._check_path(path)
        on_second = _nothing if is_small else None
        data = self._sender.send("read", path, lambda: self._get_or_none(path), on_second=on_second)
        if data is None:
            raise exceptions.MissingFileError(f"{self.full_location(path)} does not exist.")
        return data

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a file from ``start`` on, unchecked; fewer where the file ends before.

        Raises ``MissingFileError``.
        """
        self._check_path(path)
        if not length:
            return b""
        parts = self._ranges(path, [start], [length])
        if parts is None:
            raise exceptions.MissingFileError(f"{self.full_location(path)} does not exist.")
        return parts[0]

    def _ranges(self, path: str, starts: Sequence[int], lengths: Sequence[int]) -> Sequence[bytes] | None:
        """Return parts of a file, each shorter where the file ends before; None for a missing file."""
        self._check_path(path)

        def fetch() -> Sequence[bytes] | None:
            parts = _unless_missing(lambda: self._files.read_ranges(path, starts, lengths))
            self._counts.moved(self.location, received=sum(map(len, parts or ())))
            return parts

        return self._sender.send("read", path, fetch, on_second=_nothing if sum(lengths) <= HEDGED_BYTES else None)

    def read(self, ref: FileRef) -> bytes:
        """Return a file's content, checked by its size and digest; of a group's object only the part.

        Raises ``MissingFileError`` or ``DamagedFileError`` naming the file.
        """
        try:
            if ref.within is None:
                data = self._whole(ref.path, is_small=ref.size <= HEDGED_BYTES)
            else:
                data = self._shared_part(ref) or self.get_range(ref.within, ref.offset, ref.size)
        except exceptions.MissingFileError as error:
            raise self._missing(ref) from error
        if len(data) != ref.size or digest(data) != ref.digest:
            raise self._damaged(ref, len(data), digest(data))
        return data

    def is_being_shared(self, ref: FileRef) -> bool:
        """Return whether ``read`` will find a part of an object in memory, or will wait for another reader of it."""
        if self.shared is None or ref.within is None:
            return False
        return self.shared.has(self.full_location(ref.within), ref.offset + ref.size)

    def read_together(self, refs: Sequence[FileRef]) -> dict[str, bytes]:
        """Return parts of one object by their paths, checked as by ``read``.

        Parts that are close to each other share one request.

        Missing or damaged parts are left out: ``read`` reports their errors. Raises ``StorageError``.
        """
        shared = {ref.path: self._shared_part(ref, is_new_reader=i == 0) for i, ref in enumerate(refs)}
        shared_data = {path: data for path, data in shared.items() if data is not None}
        refs = [ref for ref in refs if ref.path not in shared_data]
        if not refs:
            return shared_data
        pieces = self._ranges(refs[0].stored_in, [ref.offset for ref in refs], [ref.size for ref in refs])
        parts = zip(refs, pieces, strict=True) if pieces else ()
        whole = {ref.path: data for ref, data in parts if len(data) == ref.size and digest(data) == ref.digest}
        return shared_data | whole

    def _shared_part(self, ref: FileRef, *, is_new_reader: bool = True) -> bytes | None:
        """Return a part of an object that many read at once, checked; None if it must be read alone."""
        within = ref.within
        if self.shared is None or within is None:
            return None
        name = self.full_location(within)
        part = self.shared.part(
            name, ref.offset, ref.size, lambda n: self.get_range(within, 0, n), is_new_reader=is_new_reader
        )
        return part if part is not None and digest(part) == ref.digest else None

    def _missing(self, ref: FileRef) -> exceptions.MissingFileError:
        return exceptions.MissingFileError(
            f"{self._named(ref)} ({ref.size} bytes) does not exist, but the state needs it: "
            "it was removed, or is kept elsewhere. Restore it from a copy."
        )

    def _damaged(self, ref: FileRef, size: int, digest: str) -> exceptions.DamagedFileError:
        return exceptions.DamagedFileError(
            f"{self._named(ref)} is damaged: {size} bytes with digest {digest}, "
            f"written were {ref.size} bytes with digest {ref.digest}. Restore it from a copy."
        )

    def _named(self, ref: FileRef) -> str:
        at = self.full_location(ref.stored_in)
        return at if ref.within is None else f"{at}, from byte {ref.offset} on {ref.path},"

    def exists(self, path: str) -> bool:
        """Return whether a file of that name exists."""
        return self.modified_ms(path) is not None

    def modified_ms(self, path: str) -> int | None:
        """Return when a file was written, in ms since 1970 by the clock of the storage; None if there is none.

        Object storage has a resolution of one second.
        """
        self._check_path(path)
        return self._sender.send("look up", path, lambda: _unless_missing(lambda: self._files.modified_ms(path)))

    def unfinished(self, prefix: str) -> list[str]:
        """Return files that were never finished, or are being written now. Object storage has none.

        ``list`` does not show them.
        """
        files = self._files
        if isinstance(files, ObjectFiles):
            return []
        entries = self._sender.send("list", prefix, lambda: files.entries(prefix))
        return [path for path, _ in entries if is_unfinished(path)]

    def list(self, prefix: str = "", *, after: str | None = None) -> list[tuple[str, int]]:
        """Return path and size in bytes of every file in the directory ``prefix`` and below, sorted by path.

        With ``after``, only those whose paths sort after it: an object store skips the others.
        """
        if prefix.strip("/"):
            self._check_path(prefix.rstrip("/"))
        if after is not None:
            self._check_path(after)
        files = self._files
        if isinstance(files, ObjectFiles):
            return self._sender.send("list", prefix, lambda: files.entries(prefix, after))
        entries = self._sender.send("list", prefix, lambda: files.entries(prefix))
        return [(p, size) for p, size in entries if (after is None or p > after) and not is_unfinished(p)]

    def delete(self, path: str) -> None:
        """Remove a file, finished or not. No error if there is none."""
        self._check_path(path)
        self._sender.send("delete", path, lambda: _unless_missing(lambda: self._files.remove(path)))

    def delete_all(self, paths: Sequence[str]) -> None:
        """Remove files, finished or not: ``MAX_FILES_AT_ONCE`` of them with one request if the storage supports it.

        No error for those that do not exist. Raises ``StorageError``: some may have been removed then, others not.
        """
        files = self._files
        if isinstance(files, LocalFiles):
            for path in paths:
                self.delete(path)
            return
        for path in paths:
            self._check_path(path)
        for first in range(0, len(paths), MAX_FILES_AT_ONCE):
            some = paths[first : first + MAX_FILES_AT_ONCE]

            def delete(some: Sequence[str] = some) -> bool:
                try:
                    files.remove_all(some)
                except FileNotFoundError as error:
                    check_bucket(error)
                    return False
                return True

            # Some storages stop at the first file that does not exist.
            if not self._sender.send("delete", f"{some[0]} and {len(some) - 1} other files", delete):
                for path in some:
                    self.delete(path)

    def _get_or_none(self, path: str) -> bytes | None:
        data = _unless_missing(lambda: self._files.read(path))
        if data is not None:
            self._counts.moved(self.location, received=len(data))
        return data

    def _check_path(self, path: str) -> None:
        if any(part in ("", ".", "..") for part in path.split("/")):
            raise exceptions.InvalidStateStoreArgument(
                f"{path!r} is not a path below {self.location}: it must be relative, without empty parts, '.' or '..'."
            )


def _unless_missing(request: Callable[[], T]) -> T | None:
    """Return the answer to a request; None if the file does not exist."""
    try:
        return request()
    except FileNotFoundError as error:
        check_bucket(error)
        return None


def _nothing() -> None:
    """Do nothing when a read is repeated."""


# Proves that a storage honours create-if-absent, which the fencing of writers depends on.
#
# Of two coordinators that claim one epoch, or two that write one manifest, exactly one may succeed. Some stores that
# speak S3 ignore ``If-None-Match`` and overwrite. That would go unnoticed until state is lost. So the condition is
# tested before the first write that counts.


CREATE_PROBE = "create-if-absent"
"""The file that the test tries to overwrite. It stays: a later test then needs one write."""
PROBED_LOCATIONS = 10_000


class CreateIfAbsentProofs:
    """The locations that were tested. Thread-safe; no lock is held during requests to the storage.

    A proof takes two small writes at a new location, one at any other, and none when it is remembered here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._proven: BoundedDict[str, None] = BoundedDict(PROBED_LOCATIONS)

    def require(self, storage: CheckpointStorage) -> None:
        """Raise ``UnsupportedLocationError``, which names the store, unless it leaves an existing file unchanged.

        A local disk needs no proof: ``local_files`` links names, which the operating system does only once. Raises
        ``StorageError`` if the storage cannot be reached.
        """
        if storage.is_local:
            return
        location = storage.location
        with self._lock:
            if location in self._proven:
                return
        # At the second write the file exists, whichever process made it. The contents differ: a write whose answer was
        # lost must not be confused with another one.
        if _creates(storage) and _creates(storage):
            raise exceptions.UnsupportedLocationError(
                f"{storage.store_name} overwrites files that it was asked to create only if they are absent "
                f"({CREATE_PROBE} was created twice; S3 calls that If-None-Match: *). Two coordinators could overwrite "
                "each other's epochs and manifests there. Put the state on a store that honours the condition: HDFS, "
                "AWS S3, MinIO, Google Cloud Storage, Azure or a disk."
            )
        with self._lock:
            self._proven[location] = None


def _creates(storage: CheckpointStorage) -> bool:
    """Return whether the storage says that it has created the file."""
    try:
        storage.put_new(CREATE_PROBE, secrets.token_bytes(16))
    except exceptions.FileExistsInStorageError:
        return False
    return True
