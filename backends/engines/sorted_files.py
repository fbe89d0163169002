"""Sorted pairs as files of RocksDB, which a database takes over as they are.

A key costs about half of what it costs through a write buffer, which is flushed later.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rocksdict import Options, SstFileWriter

from backends.encoding.sorted_pairs import SortedPairs, to_bytes_list

FILE_BYTES = 64 << 20
"""A file has about this many bytes of keys and values: a compaction, or a later snapshot, makes whole files anew."""
FILE_STEP_ROWS = 1 << 10
"""At most this many pairs are Python objects at a time."""


def write_sorted_files(
    parts: Iterable[tuple[str, SortedPairs]], directory: Path, options: Options
) -> list[tuple[str, Path]]:
    """Write the pairs of column families to files in ``directory``; return the files, each with its family.

    The keys of a file ascend. Parts that do not go on after the last one of their family begin a file. Families that
    come without pairs have no file.
    """
    made: list[tuple[str, Path]] = []
    open_files: dict[str, _SortedFile] = {}
    for family, pairs in parts:
        if not len(pairs):
            continue
        file = open_files.get(family)
        if file is None or not file.takes(pairs):
            if file is not None:
                file.finish()
            path = directory / f"{len(made)}.sst"
            made.append((family, path))
            file = open_files[family] = _SortedFile(path, options)
        file.add(pairs)
    for file in open_files.values():
        file.finish()
    return made


class _SortedFile:
    def __init__(self, path: Path, options: Options) -> None:
        self._writer = SstFileWriter(options=options)
        self._writer.open(str(path))
        self._bytes = 0
        self._last = b""

    def takes(self, pairs: SortedPairs) -> bool:
        """Whether there is room for pairs, and they come after what is there."""
        return self._bytes < FILE_BYTES and self._last < pairs.keys[0].as_py()

    def add(self, pairs: SortedPairs) -> None:
        writer = self._writer
        for at in range(0, len(pairs), FILE_STEP_ROWS):
            step = pairs.slice(at, FILE_STEP_ROWS)
            for key, value in zip(to_bytes_list(step.keys), to_bytes_list(step.values), strict=True):
                writer[key] = value
        self._bytes += pairs.nbytes
        self._last = pairs.keys[-1].as_py()

    def finish(self) -> None:
        self._writer.finish()
