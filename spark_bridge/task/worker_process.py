"""Makes the work of PySpark between two tasks of a worker process cheap: 85 of the 100 ms CPU of a small task."""

from __future__ import annotations

import gc
import sys
import zipimport

_is_frozen = False


def settle_worker() -> None:
    """Prepare the worker process for its next task. Call it at the end of each task, when all modules are imported.

    After every task PySpark's daemon collects all garbage, and goes through all objects of pyarrow, pandas and the
    other modules. These objects stay, so they are taken out of the collections once. Before every task PySpark 3.5 has
    each importer of its zip file, one per package, read the file's directory anew. So the cached importers are dropped;
    the next import of a module makes its importer again.
    """
    global _is_frozen
    if not _is_frozen:
        gc.freeze()
        _is_frozen = True
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter):
            del sys.path_importer_cache[path]
