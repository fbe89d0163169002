"""Where tests keep their files."""

from __future__ import annotations

import shutil
from pathlib import Path

_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30

SCRATCH = str(_MEMORY) if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM else "/tmp"
"""In memory, if this machine has the room: most tests write and sync many small files, RocksDB above all. What they
show does not depend on where. A short path, for Ray's sockets live below it.
"""
