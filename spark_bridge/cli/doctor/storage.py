"""Checks of storage: whether it creates files only if they are absent, shows what was written, and how slow it is."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from backends.exceptions import FileExistsInStorageError, StateStoreError
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from spark_bridge.cli.doctor.checks import OK, Check
from spark_bridge.overview.model import ERROR, WARNING

STORAGE_AREA = "storage"
DOCTOR_PROBE = ".statestore-doctor"
SLOW_WRITE_SECONDS = 0.5
STORAGE_RETRY_SECONDS = 10.0
"""A storage that fails is tried again for this many seconds."""


def _open(location: str, options: Mapping[str, str] | None = None) -> CheckpointStorage:
    return CheckpointStorage.open(location, options, retry_seconds=STORAGE_RETRY_SECONDS)


def storage_checks(
    location: str,
    options: Mapping[str, str],
    *,
    open_storage: OpenStorage = _open,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Check]:
    """Write, read, list and delete a small file below ``location``; nothing of it is left behind."""
    try:
        storage = open_storage(location, dict(options))
        path = f"{DOCTOR_PROBE}/{uuid.uuid4().hex}"
        begun = clock()
        storage.put_new(path, b"first")
    except StateStoreError as error:
        remedy = "Look at the address, the credentials (--storage-option) and the rights of this user."
        yield Check(STORAGE_AREA, "write", ERROR, f"{location} cannot be written to: {error}", remedy)
        return
    seconds = clock() - begun
    try:
        yield from _written(storage, path)
    finally:
        storage.delete(path)
        if storage.is_local:
            with suppress(OSError):  # somebody else's doctor is at work there
                Path(storage.full_location(DOCTOR_PROBE).removeprefix("file://")).rmdir()
    found = f"A file is durable after {seconds * 1000:.0f} ms."
    if seconds > SLOW_WRITE_SECONDS:
        remedy = "Each batch waits for its changelogs and its manifest: look for a nearer or a faster storage."
        yield Check(STORAGE_AREA, "latency", WARNING, found, remedy)
    else:
        yield Check(STORAGE_AREA, "latency", OK, found)


def _written(storage: CheckpointStorage, path: str) -> Iterator[Check]:
    where = storage.full_location("")
    try:
        storage.put_new(path, b"second")
    except FileExistsInStorageError:
        yield Check(STORAGE_AREA, "create-if-absent", OK, f"{where} refuses to create a file twice.")
    else:
        yield Check(
            STORAGE_AREA,
            "create-if-absent",
            ERROR,
            f"{where} lets a second writer replace a file that it should only create.",
            "Two drivers could both believe they own a query: use a storage with conditional writes (local disk, S3, "
            "Google Cloud Storage, Azure); for an S3 look-alike turn conditional PUT (If-None-Match) on.",
        )
        return
    if storage.get(path) != b"first":
        yield Check(
            STORAGE_AREA, "read", ERROR, f"{where} gives other bytes than were written.", "Do not use this storage."
        )
    elif path not in (name for name, _ in storage.list(DOCTOR_PROBE)):
        remedy = "Manifests are found by listing: use a storage whose listings are consistent."
        yield Check(STORAGE_AREA, "list", ERROR, f"A new file is not listed at {where}.", remedy)
    else:
        yield Check(STORAGE_AREA, "read", OK, "What was written is read and listed at once.")
