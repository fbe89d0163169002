"""Proves that a storage honours create-if-absent, on which the fencing of writers depends.

Of two coordinators that claim one epoch, or two that write one manifest, exactly one may succeed. Some stores that
speak S3 ignore ``If-None-Match`` and overwrite. Nobody would notice before state is lost. So the condition is tried out
before the first write that counts.
"""

from __future__ import annotations

import secrets
import threading

from backends.bounded_dict import BoundedDict
from backends.exceptions import FileExistsInStorageError, UnsupportedLocationError
from backends.storage.checkpoint_storage import CheckpointStorage

CREATE_PROBE = "create-if-absent"
"""The file that is tried to be overwritten. It stays: whoever tries later needs one write."""
PROBED_LOCATIONS = 10_000


class CreateIfAbsentProofs:
    """The locations that were tried out. Thread-safe; nothing is locked while the storage is asked.

    A proof takes two small writes at a new location, one at any other, and none when it is remembered here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._proven: BoundedDict[str, None] = BoundedDict(PROBED_LOCATIONS)

    def require(self, storage: CheckpointStorage) -> None:
        """Raise ``UnsupportedLocationError``, which names the store, unless a file that exists is left as it is.

        A local disk needs no proof: ``local_files`` links names, which the operating system does only once. Raises
        ``StorageError`` if the storage cannot be asked.
        """
        if storage.is_local:
            return
        location = storage.location
        with self._lock:
            if location in self._proven:
                return
        # At the second write the file exists, whoever has made it. The contents differ: a write whose answer was lost
        # must not be taken for another one.
        if _creates(storage) and _creates(storage):
            raise UnsupportedLocationError(
                f"{storage.store_name} overwrites files that it was asked to create only if they are absent "
                f"({CREATE_PROBE} was created twice; S3 calls that If-None-Match: *). Two coordinators could overwrite "
                "each other's epochs and manifests there. Put the state on a store that honours the condition: AWS S3, "
                "MinIO, Google Cloud Storage, Azure or a disk."
            )
        with self._lock:
            self._proven[location] = None


def _creates(storage: CheckpointStorage) -> bool:
    """Return whether the storage says that it has created the file."""
    try:
        storage.put_new(CREATE_PROBE, secrets.token_bytes(16))
    except FileExistsInStorageError:
        return False
    return True
