"""Durable, atomic, create-if-absent files on a local disk.

obstore's own ``create`` is atomic, but syncs nothing, so that a name may be durable before its content is. Here a name
appears only once its content is on the disk: after a power cut a file is whole or absent. Create-if-absent files
(manifests, epochs) need that even before they are acknowledged. obstore also passes each request to its own threads,
where a few system calls take three times as long.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_PIECE_BYTES = 4 << 20
_FILE_MODE = 0o644
_shared_umask: int | None = None
"""The umask for durable files in a process whose other files are private; None if they are not."""


def make_process_files_private() -> None:
    """Make new files of this process accessible only to its own user, except durable files, which keep their modes.

    Other users must not read the state on a host's local disk. RocksDB takes no mode for its files, only the umask.
    """
    global _shared_umask
    if _shared_umask is None:
        _shared_umask = os.umask(0o077)


class LocalFiles:
    """Reads, writes and removes files below ``root``. Many threads and processes may do so at once.

    ``fsync`` False leaves out the syncs; writes are still atomic.
    """

    def __init__(self, root: Path, *, fsync: bool) -> None:
        self._root = root
        self._below = f"{root}/"  # a ``str`` path takes a fifth of the time of a ``Path``
        # We make all directories below this one, so we must sync their names.
        self._top = next(d for d in (root, *root.parents) if d.is_dir())
        self._fsync = fsync
        self._durable: set[Path] = set()
        """The directories whose names are durable in those above them."""
        self._lock = threading.Lock()

    def put_new(self, path: str, data: bytes) -> None:
        """Write a file that must not exist; raises ``FileExistsError`` or another ``OSError``.

        On return the file and the names of all directories above it, up to the root's own, are durable.
        """
        self._put(path, data, os.link)

    def put_file(self, path: str, source: Path | bytes, size: int) -> None:
        """Write a file of ``size`` bytes as ``put_new`` does, with the content of another file."""
        self._put(path, source, os.link)

    def replace(self, path: str, data: bytes) -> None:
        """Write a file in place of an existing one, if there is one: at each moment one of the two exists, whole."""
        self._put(path, data, os.replace)

    def _put(self, path: str, source: Path | bytes, name: Callable[[str, str], None]) -> None:
        target = self._below + path
        staged = f"{target}#{secrets.randbits(60)}"  # the mark of an unfinished file, which no listing shows
        descriptor = self._open(staged)
        try:
            try:
                try:
                    self._write(descriptor, source)
                    if self._fsync:
                        os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                name(staged, target)
            finally:
                with suppress(FileNotFoundError):  # ``replace`` has moved it
                    os.unlink(staged)  # noqa: PTH108
        except FileExistsError:
            # The other writer may have died between its link and its sync: a file that was seen must stay.
            self._sync_directories(target)
            raise
        self._sync_directories(target)

    def read(self, path: str) -> bytes:
        """Return a file's content; raises ``FileNotFoundError`` or another ``OSError``."""
        with self._opened(path) as (descriptor, size):
            return _read(descriptor, 0, size)

    def read_ranges(self, path: str, starts: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        """Return parts of a file, shorter where the file ends before. Raises as ``read`` does."""
        with self._opened(path) as (descriptor, size):
            parts = zip(starts, lengths, strict=True)
            return [_read(descriptor, start, min(length, max(size - start, 0))) for start, length in parts]

    def pieces(self, path: str, start: int) -> Iterator[bytes]:
        """Read a file from ``start`` on, in pieces. Raises as ``read`` does."""
        with self._opened(path) as (descriptor, size):
            while start < size and (piece := os.pread(descriptor, _PIECE_BYTES, start)):
                start += len(piece)
                yield piece

    def modified_ms(self, path: str) -> int:
        """Return when a file was written, in ms since 1970. Raises as ``read`` does."""
        status = os.stat(self._below + path)  # noqa: PTH116
        _check_is_file(status, path)
        return status.st_mtime_ns // 1_000_000

    def remove(self, path: str) -> None:
        """Remove a file, finished or not. Raises as ``read`` does."""
        os.unlink(self._below + path)  # noqa: PTH108

    def entries(self, directory: str) -> list[tuple[str, int]]:
        """Return path and size of every file in a directory and below, sorted by path; "" is the root.

        Some may be unfinished (``is_unfinished``). Files that are created or removed during the call may be left out.
        Raises ``OSError``.
        """
        files: list[tuple[str, int]] = []
        left = [f"{directory.strip('/')}/".lstrip("/")]
        while left:
            below = left.pop()
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._below + below) as entries:
                for entry in entries:
                    path = below + entry.name
                    if entry.is_dir():
                        left.append(f"{path}/")
                    else:
                        with suppress(FileNotFoundError):  # removed in between, or a dangling link
                            files.append((path, entry.stat().st_size))
        return sorted(files)

    @contextmanager
    def _opened(self, path: str) -> Iterator[tuple[int, int]]:
        """Open a file to read; give its descriptor and its size."""
        descriptor = os.open(self._below + path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            _check_is_file(status, path)
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)

    def _open(self, staged: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            descriptor = os.open(staged, flags, _FILE_MODE)
        except FileNotFoundError:
            with self._lock:
                self._durable.clear()  # known directories may have been removed since
            _make_directories(Path(staged).parent)
            descriptor = os.open(staged, flags, _FILE_MODE)
        if _shared_umask is not None:
            os.fchmod(descriptor, _FILE_MODE & ~_shared_umask)
        return descriptor

    @classmethod
    def _write(cls, descriptor: int, source: Path | bytes) -> None:
        if isinstance(source, Path):
            with source.open("rb", buffering=0) as file:
                while piece := file.read(_PIECE_BYTES):
                    cls._write(descriptor, piece)
            return
        rest = memoryview(source)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def _sync_directories(self, file: str) -> None:
        """Sync a file's directory, and once each the names of that directory and of those above it, which may be new.

        The process that made a directory may die before its name is durable, so each process syncs the names it uses.
        """
        if not self._fsync:
            return
        directory = Path(file).parent
        _sync(directory)
        while True:
            with self._lock:
                if directory in self._durable:
                    return
            if self._top not in directory.parents:  # also for itself, whose name was there before
                return
            _sync(directory.parent)
            with self._lock:
                self._durable.add(directory)
            directory = directory.parent


def _make_directories(directory: Path) -> None:
    """Make a directory and those above it, with the modes that the process had before its files were private."""
    missing = [d for d in (directory, *directory.parents) if not d.exists()]
    for one in reversed(missing):
        try:
            one.mkdir()
        except FileExistsError:
            continue  # another writer was first
        if _shared_umask is not None:
            one.chmod(stat.S_IMODE(one.stat().st_mode) | (0o777 & ~_shared_umask))


def is_unfinished(path: str) -> bool:
    """Return whether a path has the mark of a file that is being written, or whose writer died."""
    return path.rpartition("#")[2].isdecimal() and "#" in path


def _check_is_file(status: os.stat_result, path: str) -> None:
    """Raise ``FileNotFoundError`` for a directory: object storage has none."""
    if stat.S_ISDIR(status.st_mode):
        raise FileNotFoundError(f"{path} is a directory.")


def _read(descriptor: int, start: int, length: int) -> bytes:
    """Return part of a file, shorter if the file ends before: one system call may return less than requested."""
    pieces: list[bytes] = []
    while length and (piece := os.pread(descriptor, length, start)):
        pieces.append(piece)
        start, length = start + len(piece), length - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
