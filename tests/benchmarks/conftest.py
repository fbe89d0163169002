"""The suite's modules find each other in ``benchmarks/``, as its scripts do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
