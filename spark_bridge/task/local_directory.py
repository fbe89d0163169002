"""Finds the directory where a task may write files of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import IO


def local_directory() -> str:
    """Return one of Spark's local directories, or the system's directory for temporary files."""
    given = filter(None, os.environ.get("SPARK_LOCAL_DIRS", "").split(","))
    return next((d for d in given if Path(d).is_dir()), tempfile.gettempdir())


def temporary_file() -> IO[bytes]:
    """Open a file without a name in the local directory: it is gone once it is closed, or if the process dies."""
    return tempfile.TemporaryFile(dir=local_directory(), prefix="statestore-")
