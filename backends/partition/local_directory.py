"""The local directory of a partition, which one process locks, and the context that its classes share."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from backends.conf import StateStoreConf
from backends.engines.engine import StateEngine
from backends.exceptions import ConcurrentCommitError
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import digest

_KEPT = "kept-"


class Scratch:
    """Short-lived directories below ``root``, which is created with the first one."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def kept(self, name: str) -> Path:
        """Return the directory of a name; create it if necessary. It stays until ``drop_kept`` or ``clear``."""
        directory = self._root / f"{_KEPT}{digest(name.encode())}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def drop_kept(self) -> None:
        for directory in self._root.glob(f"{_KEPT}*"):
            shutil.rmtree(directory, ignore_errors=True)

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Make a new empty directory, and remove the directory at the end of the block."""
        directory = self._root / uuid.uuid4().hex
        directory.mkdir(parents=True)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def clear(self) -> None:
        """Remove everything that is left here, including files of a process that was killed."""
        shutil.rmtree(self._root, ignore_errors=True)


class LocalDirectory:
    """The directory ``path``, created if necessary and locked until ``unlock`` or the end of the process.

    ``engine`` is the engine's own directory in it. Raises ``ConcurrentCommitError`` if the directory is in use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_file = lock(path)
        self.engine = path / "engine"
        self.scratch = Scratch(path / "scratch")

    def unlock(self) -> None:
        """Let others use the directory. The files stay."""
        os.close(self._lock_file)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def lock(directory: Path) -> int:
    """Lock a directory until the returned file descriptor is closed, or the process ends.

    Raises ``ConcurrentCommitError`` if another descriptor holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConcurrentCommitError(
            f"{directory} is open in another provider, in this process or another: one writer at a time. "
            "Close it, or give each provider its own local_dir."
        ) from error
    return descriptor


@dataclass(frozen=True)
class PartitionContext:
    """An engine and the durable files that it is loaded from.

    ``directory`` is the partition's own in the ``storage``, ``backend`` the name of the engine's backend, and
    ``scratch`` provides local directories for temporary files.
    """

    engine: StateEngine
    backend: str
    storage: CheckpointStorage
    directory: str
    conf: StateStoreConf
    scratch: Scratch
