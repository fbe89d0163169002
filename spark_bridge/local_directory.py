"""Where a task may write files of its own."""

from __future__ import annotations

import os
import tempfile


def local_directory() -> str:
    """Spark's local directory, or the system's for temporary files."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
