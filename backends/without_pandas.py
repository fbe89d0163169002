"""Keep pandas out of a process that does not use pandas: the import takes as long as that of all our own modules.

pyarrow imports pandas, if pandas is installed, the first time that it makes an array or a scalar, only to see whether
the given value is of pandas.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import pyarrow as pa


class _NoPandas(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ImportError("pandas is kept out of this process while pyarrow looks for it")
        return None


def keep_pandas_out() -> None:
    """Make pyarrow take pandas for not installed in this process; too late if pyarrow has looked for pandas already."""
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(finder)
