"""Where a task may write files of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def local_directory() -> str:
    """One of Spark's local directories, or the system's for temporary files."""
    given = filter(None, os.environ.get("SPARK_LOCAL_DIRS", "").split(","))
    return next((d for d in given if Path(d).is_dir()), tempfile.gettempdir())
