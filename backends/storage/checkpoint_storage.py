"""The durable files of one state location: local disk, S3, GCS, Azure or memory, through obstore.

Files are written once, create-if-absent, and never changed. A file to which a ``FileRef`` refers is read with its size
and digest checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import obstore
import xxhash
from obstore.exceptions import AlreadyExistsError, BaseError, UnknownConfigurationKeyError

from backends.exceptions import (
    DamagedFileError,
    FileExistsInStorageError,
    InvalidStateStoreArgument,
    MissingFileError,
)
from backends.storage.file_ref import FileRef
from backends.storage.local_files import LocalFiles
from backends.storage.locations import Location, parse_location
from backends.storage.object_stores import ObjectStores
from backends.storage.sending.failures import check_bucket, first_line, is_out_of_range
from backends.storage.sending.hedges import HEDGED_BYTES
from backends.storage.sending.request_counts import RequestCounts
from backends.storage.sending.sender import RequestSender
from backends.storage.sending.traffic import BucketTraffic, buckets_of_process
from backends.storage.shared_objects import SharedObjects

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore


_MOST_AT_ONCE = 1000
"""S3 removes at most this many files with one request, and lists at most this many on one page."""
_CHUNK_BYTES = 4 << 20
_PART_BYTES, _PARTS_AT_ONCE, _MOST_PARTS = 8 << 20, 4, 10_000
"""The bytes of a part, in which large files go up, a few at once; and the most parts that S3 takes."""


def digest(data: bytes) -> str:
    """Return the digest that ``FileRef`` carries: xxh3-128, hex."""
    return xxhash.xxh3_128_hexdigest(data)


def file_digest(path: Path) -> str:
    """Return the digest of a local file's content."""
    hashed = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            hashed.update(chunk)
    return hashed.hexdigest()


OpenStorage: TypeAlias = "Callable[[str, Mapping[str, str]], CheckpointStorage]"
"""Opens the storage at a location with its options, as ``CheckpointStorage.open`` does."""


class CheckpointStorage:
    """The files below one location; made by ``open``. Many threads may use one object at once.

    ``shared`` are objects of which others in the process read parts as well; None: nothing is shared.

    Transient errors (throttling, server errors, broken connections) are retried with growing waits for
    ``retry_seconds`` seconds, then raised as ``StorageError``; permanent ones are raised at once.
    """

    def __init__(
        self,
        location: Location,
        stores: ObjectStores,
        *,
        fsync: bool,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        retry_seconds: float,
        requests: RequestCounts,
        buckets: BucketTraffic,
    ) -> None:
        self.location = location.text
        self.is_local = location.kind == "local"
        self._stores = stores
        # A local store is rooted at '/': obstore refuses a root that does not exist yet.
        root = location.prefix.strip("/")
        self._prefix = f"{root}/" if root else ""
        self._files = LocalFiles(Path(location.prefix), fsync=fsync) if self.is_local else None
        self.shared: SharedObjects | None = None
        self._counts = requests
        # What is in the memory of the process is never late.
        has_hedges = location.kind not in ("local", "memory")
        self._sender = RequestSender(
            self.location,
            clock=clock,
            sleep=sleep,
            retry_seconds=retry_seconds,
            counts=requests,
            traffic=None if self.is_local else buckets.of(stores.bucket, with_hedges=has_hedges),
            renew=stores.renew,
        )

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
        """Open the storage at an address; nothing is read or made yet.

        ``options`` are Spark's ``spark.hadoop.fs.s3a.*`` or obstore's own. ``fsync`` concerns local disks only.
        ``requests`` counts what is asked of the storage; on a local disk, too. ``buckets`` is what all requests to a
        bucket share, by default with all of the process. Raises ``UnsupportedLocationError``, or
        ``InvalidStateStoreArgument`` for a wrong option.
        """
        parsed = parse_location(location)
        counts = RequestCounts() if requests is None else requests
        try:
            stores = ObjectStores(parsed, options or {})
        except UnknownConfigurationKeyError as error:
            raise InvalidStateStoreArgument(
                f"An option for {parsed.text} is unknown to obstore: {first_line(error)}"
            ) from error
        except (BaseError, ValueError) as error:
            raise InvalidStateStoreArgument(f"{parsed.text} cannot be opened: {first_line(error)}") from error
        return cls(
            parsed,
            stores,
            fsync=fsync,
            clock=clock,
            sleep=sleep,
            retry_seconds=retry_seconds,
            requests=counts,
            buckets=buckets_of_process() if buckets is None else buckets,
        )

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

    def put_new(self, path: str, data: bytes) -> FileRef:
        """Write a new file: whole or not at all, durable on return. Of several writers one succeeds.

        Raises ``FileExistsInStorageError`` if the name is taken, ``StorageError`` if the storage fails.
        """
        key = self._key(path)
        ref = FileRef(path, len(data), digest(data))
        if self._files is not None:
            files = self._files
            try:
                self._sender.send("write", path, lambda: files.put_new(path, data))
            except FileExistsError as error:
                raise self._exists(path) from error
            self._counts.moved(self.location, sent=len(data))
            return ref
        unanswered = False  # an attempt of ours may have written the file without our knowing

        def put() -> bool:
            self._counts.moved(self.location, sent=len(data))
            try:
                obstore.put(self._store, key, data, mode="create")
                return True
            except AlreadyExistsError:
                # A repeated attempt may meet what the first one wrote before its answer was lost. S3 also
                # answers "conflict" while another writer is busy, with nothing there in the end.
                may_be_ours = unanswered
                self._counts.note("read", self.location)
                held = self._get_or_none(path, key)
                if held is None:
                    raise
                return may_be_ours and held == data
            except (BaseError, OSError):
                note_unanswered()
                raise

        def note_unanswered() -> None:
            nonlocal unanswered
            unanswered = True

        if not self._sender.send("write", path, put, on_second=note_unanswered if ref.size <= HEDGED_BYTES else None):
            raise self._exists(path)
        return ref

    def replace(self, path: str, data: bytes) -> None:
        """Write a file in place of the one that may be there: at each moment one of the two is there, whole.

        Only for files of Spark's: those of the state are never overwritten. As durable as ``put_new``.
        """
        key, files = self._key(path), self._files
        if files is not None:
            self._sender.send("write", path, lambda: files.replace(path, data))
        else:
            self._sender.send("write", path, lambda: obstore.put(self._store, key, data))

    def put_file(self, path: str, source: Path) -> FileRef:
        """Copy a local file into the storage, under a name that nothing else uses. As durable as ``put_new``."""
        ref = FileRef(path, source.stat().st_size, file_digest(source))
        if self._files is not None:
            files = self._files
            self._sender.send("write", path, lambda: files.put_new_file(path, source))
            self._counts.moved(self.location, sent=ref.size)
        else:
            self._put_in_parts(ref, source)
        return ref

    def put_unique(self, path: str, data: bytes) -> FileRef:
        """Write a new file as ``put_new`` does, under a name that nothing else uses: in parts if the file is large."""
        if self.is_local or len(data) <= _PART_BYTES:
            return self.put_new(path, data)
        ref = FileRef(path, len(data), digest(data))
        self._put_in_parts(ref, data)
        return ref

    def _put_in_parts(self, ref: FileRef, source: Path | bytes) -> None:
        """Write a large file in parts, some at once. obstore repeats a part that fails, at a pace of its own."""
        key = self._key(ref.path)
        part = max(_PART_BYTES, -(-ref.size // _MOST_PARTS))

        def put() -> None:
            self._counts.moved(self.location, sent=ref.size)
            if ref.size > part:
                # Each part, and to begin and to end them: one more than the parts.
                self._counts.note("write", self.location, -(-ref.size // part) + 1)
            obstore.put(self._stores.in_parts, key, source, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)

        self._sender.send("write", ref.path, put)

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
        """Give each piece of a file to ``take``, with its offset. Goes on after the last one if a connection breaks.

        Raises as ``read`` does: then the pieces that were given are worth nothing.
        """
        if ref.within is not None:
            take(self.read(ref), 0)  # parts of an object are small
            return
        key = self._key(ref.path)
        hashed, size = xxhash.xxh3_128(), 0

        def fetch() -> bool:
            nonlocal size
            try:
                for piece in self._chunks(key, size):
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
        key = self._key(path)
        on_second = _nothing if is_small else None
        found = self._sender.send("read", path, lambda: self._get_or_none(path, key), on_second=on_second)
        if found is None:
            raise MissingFileError(f"{self.full_location(path)} does not exist.")
        return found

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a file from ``start`` on, unchecked; fewer where the file ends before.

        Raises ``MissingFileError``.
        """
        key = self._key(path)

        def fetch() -> bytes | None:
            try:
                return self._range(path, key, start, length)
            except FileNotFoundError as error:
                check_bucket(error)
                return None

        found = self._sender.send("read", path, fetch, on_second=_nothing if length <= HEDGED_BYTES else None)
        if found is None:
            raise MissingFileError(f"{self.full_location(path)} does not exist.")
        return found

    def read(self, ref: FileRef) -> bytes:
        """Return a file's content, checked by its size and digest; of a group's object only the part.

        Raises ``MissingFileError`` or ``DamagedFileError`` naming the file.
        """
        try:
            if ref.within is None:
                data = self._whole(ref.path, is_small=ref.size <= HEDGED_BYTES)
            else:
                data = self._shared_part(ref) or self.get_range(ref.within, ref.offset, ref.size)
        except MissingFileError as error:
            raise self._missing(ref) from error
        if len(data) != ref.size or digest(data) != ref.digest:
            raise self._damaged(ref, len(data), digest(data))
        return data

    def is_being_shared(self, ref: FileRef) -> bool:
        """Return whether ``read`` will find a part of an object in memory, or will wait for somebody who reads it."""
        if self.shared is None or ref.within is None:
            return False
        return self.shared.has(self.full_location(ref.within), ref.offset + ref.size)

    def read_together(self, refs: Sequence[FileRef]) -> dict[str, bytes]:
        """Return parts of one object by their paths, checked as by ``read``: parts that lie near to each other are one
        request.

        What is missing or damaged is left out: ``read`` says what is wrong with it. Raises ``StorageError``.
        """
        shared = {ref.path: self._shared_part(ref, is_new_reader=i == 0) for i, ref in enumerate(refs)}
        held = {path: data for path, data in shared.items() if data is not None}
        refs = [ref for ref in refs if ref.path not in held]
        if not refs:
            return held
        within = refs[0].stored_in
        key = self._key(within)
        starts, lengths = [ref.offset for ref in refs], [ref.size for ref in refs]

        def fetch() -> list[bytes]:
            try:
                if self._files is None:
                    found = obstore.get_ranges(self._store, key, starts=starts, lengths=lengths)
                    parts = [bytes(part) for part in found]
                else:
                    parts = self._files.read_ranges(within, starts, lengths)
            except FileNotFoundError as error:
                check_bucket(error)
                return []
            except BaseError as error:
                if is_out_of_range(error):
                    return []
                raise
            self._counts.moved(self.location, received=sum(map(len, parts)))
            return parts

        found = self._sender.send("read", within, fetch, on_second=_nothing if sum(lengths) <= HEDGED_BYTES else None)
        parts = zip(refs, found, strict=True) if found else ()
        whole = {ref.path: data for ref, data in parts if len(data) == ref.size and digest(data) == ref.digest}
        return held | whole

    def _shared_part(self, ref: FileRef, *, is_new_reader: bool = True) -> bytes | None:
        """Return a part of an object that many read at once, checked; None if it has to be read alone."""
        within = ref.within
        if self.shared is None or within is None:
            return None
        name = self.full_location(within)
        part = self.shared.part(
            name, ref.offset, ref.size, lambda n: self.get_range(within, 0, n), is_new_reader=is_new_reader
        )
        return part if part is not None and digest(part) == ref.digest else None

    def _missing(self, ref: FileRef) -> MissingFileError:
        return MissingFileError(
            f"{self._named(ref)} ({ref.size} bytes) does not exist, but the state needs it: "
            "it was removed, or is kept elsewhere. Restore it from a copy."
        )

    def _damaged(self, ref: FileRef, size: int, found: str) -> DamagedFileError:
        return DamagedFileError(
            f"{self._named(ref)} is damaged: {size} bytes with digest {found}, "
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

        Object storage says the second.
        """
        key, files = self._key(path), self._files

        def head() -> int | None:
            try:
                if files is not None:
                    return files.modified_ms(path)
                return int(obstore.head(self._store, key)["last_modified"].timestamp() * 1000)
            except FileNotFoundError:
                return None

        return self._sender.send("look up", path, head)

    def unfinished(self, prefix: str) -> list[str]:
        """Return files that were never finished, or are being written now. Only local storage has any.

        ``list`` does not show them.
        """
        files = self._files
        return [] if files is None else self._sender.send("list", prefix, lambda: files.unfinished(prefix))

    def list(self, prefix: str = "", *, after: str | None = None) -> list[tuple[str, int]]:
        """Return path and size in bytes of every file in the directory ``prefix`` and below, sorted by path.

        With ``after``, only those whose paths sort after it: an object store does not even look at the others.
        """
        key = self._key(prefix.rstrip("/")) if prefix.strip("/") else self._prefix.rstrip("/")
        files = self._files
        if files is not None and not Path(f"/{key}").is_dir():
            return []
        offset = None if after is None else self._key(after)

        def list_all() -> list[tuple[str, int]]:
            if files is not None:
                return [found for found in files.listed(prefix) if after is None or found[0] > after]
            found = obstore.list(self._store, prefix=key or None, offset=offset).collect()
            self._counts.note("list", self.location, len(found) // _MOST_AT_ONCE)  # further pages
            return sorted((str(meta["path"]).removeprefix(self._prefix), int(meta["size"])) for meta in found)

        return self._sender.send("list", prefix, list_all)

    def delete(self, path: str) -> None:
        """Remove a file, finished or not. No error if there is none."""
        key, files = self._key(path), self._files

        def delete() -> None:
            try:
                if files is None:
                    obstore.delete(self._store, key)
                else:
                    files.remove(path)
            except FileNotFoundError as error:
                check_bucket(error)

        self._sender.send("delete", path, delete)

    def delete_all(self, paths: Sequence[str]) -> None:
        """Remove files, finished or not, with one request for ``_MOST_AT_ONCE`` of them where the storage can do so.

        No error for those that do not exist. Raises ``StorageError``: some may have been removed then, others not.
        """
        if self._files is not None:
            for path in paths:
                self.delete(path)
            return
        for first in range(0, len(paths), _MOST_AT_ONCE):
            some = paths[first : first + _MOST_AT_ONCE]
            keys = [self._key(path) for path in some]

            def delete(keys: list[str] = keys) -> bool:
                try:
                    obstore.delete(self._store, keys)
                except FileNotFoundError as error:
                    check_bucket(error)
                    return False
                return True

            # Some storages stop at the first file that does not exist.
            if not self._sender.send("delete", f"{some[0]} and {len(some) - 1} other files", delete):
                for path in some:
                    self.delete(path)

    def _chunks(self, key: str, start: int = 0) -> Iterator[bytes]:
        """Read a file from ``start`` on, in pieces."""
        if self._files is None:
            try:
                rest: GetOptions = {"range": {"offset": start}} if start else {}
                found = obstore.get(self._store, key, options=rest)
            except BaseError as error:
                if start and is_out_of_range(error):
                    return  # all was read when the connection broke
                raise
            yield from found.stream(min_chunk_size=_CHUNK_BYTES)
            return
        # obstore streams local files in pieces that are too small to be fast.
        with Path(f"/{key}").open("rb", buffering=0) as file:
            file.seek(start)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def _range(self, path: str, key: str, start: int, length: int) -> bytes:
        if not length:
            return b""
        try:
            if self._files is None:
                data = bytes(obstore.get_range(self._store, key, start=start, length=length))
            else:
                data = self._files.read_ranges(path, [start], [length])[0]
        except BaseError as error:
            if is_out_of_range(error):
                return b""
            raise
        self._counts.moved(self.location, received=len(data))
        return data

    def _get_or_none(self, path: str, key: str) -> bytes | None:
        try:
            data = bytes(obstore.get(self._store, key).bytes()) if self._files is None else self._files.read(path)
        except FileNotFoundError as error:
            check_bucket(error)
            return None
        self._counts.moved(self.location, received=len(data))
        return data

    @property
    def _store(self) -> ObjectStore:
        return self._stores.plain

    def _key(self, path: str) -> str:
        if any(part in ("", ".", "..") for part in path.split("/")):
            raise InvalidStateStoreArgument(
                f"{path!r} is no path below {self.location}: it must be relative, without empty parts, '.' or '..'."
            )
        return self._prefix + path

    def _exists(self, path: str) -> FileExistsInStorageError:
        return FileExistsInStorageError(f"{self.full_location(path)} exists already and is never overwritten.")


def _nothing() -> None:
    """Do nothing when a read is made a second time."""
