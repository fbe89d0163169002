"""Every error that the backends raise on purpose.

All have one base class, so that a caller can tell a rejection by the state store from a bug. Messages say what was
wrong, name the values, and say what to do. Each class can be rebuilt from its message alone, so that errors can be sent
to other processes.
"""

from __future__ import annotations


class StateStoreError(Exception):
    """Base of all errors of the state store."""


class InvalidStateStoreArgument(StateStoreError, ValueError):
    """An argument or option that can never work: a None key, an unknown option value, a bad name."""


class UnsupportedTypeError(StateStoreError, TypeError):
    """A column's type cannot be a key or a value; the message names column and type."""


class SchemaMismatchError(StateStoreError):
    """Stored bytes, or a stored schema, do not have the schema that they are read with."""


class IncompatibleSchemaError(SchemaMismatchError):
    """The program declares a schema that cannot read the stored state; the message names both schemas."""


class UnsupportedLocationError(StateStoreError):
    """State cannot be kept at this address; the message names the remedy."""


class StorageError(StateStoreError):
    """The storage failed permanently, or for longer than retries last."""


class MissingFileError(StorageError):
    """A file that should exist does not."""


class FileExistsInStorageError(StorageError):
    """A file that must be new exists already, with another writer's content."""


class DamagedFileError(StorageError):
    """A file's content differs from what was written; the message names the file."""


class LocalStateDamagedError(StateStoreError):
    """The working copy on local disk failed. The durable files are elsewhere; the message says what to remove."""


class LocalDiskFullError(LocalStateDamagedError):
    """The local disk has no room for the working copy; the message names the disk, and what to do.

    ``is_larger_than_disk``: the files of the one copy are larger than the whole disk. ``is_refused``: nothing was
    written, since there was no room for a reservation.
    """

    is_larger_than_disk: bool = False
    is_refused: bool = False


class LoadEndedError(StateStoreError):
    """A load was ended before it completed: no caller waits for it any more, or its run is over. Load again."""


class VersionNotFoundError(StateStoreError):
    """A version that does not exist, or is no longer held; the message names the versions that are held."""


class LineageMismatchError(StateStoreError):
    """Changes or files do not follow from the state that is loaded: load it again from storage."""


class HostMemoryError(StateStoreError):
    """A commit or a scan does not fit into ``host_memory``; the message says how much is held, and what to do."""


class HostMemoryBusyError(StateStoreError):
    """A commit has to wait for others of its host, which use the memory; tasks retry."""


class StoreClosedError(StateStoreError):
    """A store was used after ``commit``, ``abort`` or ``close``."""


class ConcurrentCommitError(StateStoreError):
    """Another writer writes, or has written, the same state; this commit changed nothing."""
