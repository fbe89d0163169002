"""Where tests keep their files."""

from __future__ import annotations

import shutil
from pathlib import Path

_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30

SCRATCH = str(_MEMORY) if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM else "/tmp"
"""In memory, if this machine has the room: most tests, above all those of RocksDB, write and sync many small files, and
their results do not depend on the place. The path is short because Ray's sockets are below it.
"""
