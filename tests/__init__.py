import os
import sys

if sys.dont_write_bytecode:
    # Many containers set PYTHONDONTWRITEBYTECODE. Then each of the suite's many processes, Ray's and Spark's among
    # them, would compile our packages, and pytest would rewrite the assertions of all tests in each.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
