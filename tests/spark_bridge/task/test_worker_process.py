"""A worker process excludes objects that outlive tasks from garbage collection, and can still import modules."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.patience import HANG

CHILD = """
import gc, importlib, sys
sys.path.insert(0, sys.argv[1])
import packed.one
from spark_bridge.task.executor import settle_worker
importers = lambda: [f for f in sys.path_importer_cache.values() if type(f).__name__ == "zipimporter"]
assert importers()
settle_worker()
frozen = gc.get_freeze_count()
assert frozen > 1000 and not importers()
junk = [[] for _ in range(5000)]
settle_worker()
assert gc.get_freeze_count() <= frozen  # what later tasks make is collected as ever
importlib.invalidate_caches()
import packed.two
assert (packed.one.x, packed.two.x) == (1, 2)
"""


def test_a_settled_worker_imports_from_zip_files_and_freezes_once(tmp_path: Path) -> None:
    archive = tmp_path / "lib.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("packed/__init__.py", "")
        packed.writestr("packed/one.py", "x = 1")
        packed.writestr("packed/two.py", "x = 2")
    subprocess.run([sys.executable, "-c", CHILD, str(archive)], check=True, timeout=HANG)
