"""Recognises, by the errors that files and engines raise, that the disk of the local copies is full."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backends.exceptions import LocalDiskFullError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SAID = ("No space left on device", "Disk quota exceeded")
"""What the system says; engines hand on the text alone."""


def is_full_disk(error: BaseException | None) -> bool:
    """Return whether an error says that a disk is full, itself or as what has caused it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(said in str(error) for said in _SAID):
            return True
        error = error.__cause__
    return False


def disk_full(path: Path, error: BaseException) -> LocalDiskFullError:
    """Return the error for a full disk, on which ``path`` is or was to be."""
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    usage, mib = shutil.disk_usage(there), 1 << 20
    return LocalDiskFullError(
        f"The disk of {path} is full: {usage.free / mib:.1f} of {usage.total / mib:.1f} MiB are free ({error}). Make "
        "room there, or keep local copies on a larger disk: those of a host are in Ray's session directory (ray start "
        "--temp-dir)."
    )


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Raise ``LocalDiskFullError`` where the block finds the disk of ``path`` full."""
    try:
        yield
    except LocalDiskFullError:
        raise
    except Exception as error:
        if is_full_disk(error):
            raise disk_full(path, error) from error
        raise
