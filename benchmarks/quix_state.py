"""The state of Quix Streams for ``comparisons/providers.py``: bulk puts and gets, in its own environment.

    python benchmarks/quix_state.py PAIRS DIRECTORY

Quix Streams cannot be installed in the project's environments: they have other versions of its dependencies. PAIRS is a
file of 8-byte keys, then 24-byte values, then other values. It reads commands line by line: "put 0" and "put 1" write
the first or the second values into a new store in one transaction, "fill" a store that "get" then reads. The answer is
a line with the seconds, and the SHA-256 of the values read.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from quixstreams.state.rocksdb.partition import RocksDBStorePartition

KEY, VALUE = 8, 24


def main() -> None:
    data, directory = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
    size = len(data) // (KEY + 2 * VALUE)
    keys = [data[i : i + KEY] for i in range(0, KEY * size, KEY)]
    starts = [KEY * size, KEY * size + VALUE * size]
    values = [[data[i : i + VALUE] for i in range(start, start + VALUE * size, VALUE)] for start in starts]
    held: Any = None
    for line in sys.stdin:
        command = line.split()
        digest = ""
        began = time.perf_counter()
        if command[0] == "get":
            read = held.begin()
            found = [read.get_bytes(key=key, prefix=b"") for key in keys]
            seconds = time.perf_counter() - began
            digest = hashlib.sha256(b"".join(found)).hexdigest()
        else:
            path = directory / command[0]
            if held is not None and command[0] == "fill":
                raise ValueError("The store is filled already.")
            store = RocksDBStorePartition(path=str(path))
            began = time.perf_counter()
            write = store.begin()
            for key, value in zip(keys, values[int(command[1])], strict=True):
                write.set_bytes(key=key, value=value, prefix=b"")
            write.prepare()
            write.flush()
            seconds = time.perf_counter() - began
            if command[0] == "fill":
                held = store
            else:
                store.close()
                shutil.rmtree(path)
        print(seconds, digest, flush=True)
    if held is not None:
        held.close()


if __name__ == "__main__":
    main()
