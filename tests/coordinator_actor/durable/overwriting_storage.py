"""Storage that overwrites what it was asked to create only if it is absent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.storage.checkpoint_storage import CheckpointStorage


def overwriting(location: str, options: Mapping[str, str]) -> CheckpointStorage:
    """Open a directory that does so, as if it were in an object store."""
    storage = CheckpointStorage.open(location, options, fsync=False)
    storage.is_local = False
    put_new = storage.put_new

    def put(path: str, data: bytes) -> Any:
        (Path(storage.location.removeprefix("file://")) / path).unlink(missing_ok=True)
        return put_new(path, data)

    storage.put_new = put  # type: ignore[method-assign]
    return storage
