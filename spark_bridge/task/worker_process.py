"""What PySpark does between two tasks of a worker process, made cheap: 85 of the 100 ms CPU that a small task takes."""

from __future__ import annotations

import gc
import sys
import zipimport

_is_frozen = False


def settle_worker() -> None:
    """To be called at the end of each task, when all modules that tasks need have been imported.

    After every task PySpark's daemon collects all garbage, and goes through all that pyarrow, pandas and the rest are made
    of: that stays, and is taken out of the collections once. Before every task PySpark 3.5 has each importer of its zip
    file, one per package, read the file's directory anew: what is cached of them comes back when something is imported.
    """
    global _is_frozen
    if not _is_frozen:
        gc.freeze()
        _is_frozen = True
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter):
            del sys.path_importer_cache[path]
