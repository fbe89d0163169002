import os
import sys
from pathlib import Path

if sys.dont_write_bytecode:
    # Many containers set PYTHONDONTWRITEBYTECODE. Then each of the suite's many processes, Ray's and Spark's among
    # them,
    # would compile all that it imports, for seconds. Kept apart from the sources, bytecode is in nobody's way.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
