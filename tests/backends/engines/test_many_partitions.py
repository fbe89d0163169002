"""A process with many small RocksDB databases writes files when its write buffers are full, and not in every batch."""

import os
from pathlib import Path

import pytest

from backends import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines import rocksdb_files
from backends.engines.rocksdb import LocalRocksDB
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState

FAMILIES = ("default", "timers", "lists")
ROWS = 10
MIB = 1 << 20
DESCRIPTORS_OF_ITS_OWN = 12
"""The most files that a database has open apart from those of its pairs: lock, log, manifest and directories."""


class Partitions:
    """Databases that share the memory of ``conf``, and every file of pairs that they have ever had."""

    def __init__(self, directory: Path, number: int, conf: StateStoreConf) -> None:
        self.directory = directory
        self.buffers = rocksdb_files.shared_memory(conf).buffers
        self.engines = [LocalRocksDB(directory / str(i), conf) for i in range(number)]
        self.written: set[Path] = set()
        self.version = 0

    def commit(self, value_bytes: int) -> None:
        """Write ``ROWS`` new pairs to each family of each database."""
        self.version += 1
        for i, engine in enumerate(self.engines):
            keys = [f"{self.version:06d}-{i:04d}-{row}".encode() for row in range(ROWS)]
            pairs = SortedPairs.from_dict(dict.fromkeys(keys, os.urandom(value_bytes)))
            engine.prepare(Changes(dict.fromkeys(FAMILIES, pairs)))(LocalState(self.version, f"{self.version}", None))
        self.written.update(self.files())

    def files(self) -> list[Path]:
        return list(self.directory.glob("*/*.sst"))

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.parametrize(
    ("number", "buffer_bytes"),
    [
        pytest.param(12, 4 * MIB, id="12 partitions with a thirty-second of the usual write buffers"),
        # The case above replaces this one in other runs.
        pytest.param(500, 128 * MIB, id="500 partitions", marks=pytest.mark.thorough),
    ],
)
def test_small_batches_of_many_partitions_write_no_files_until_the_write_buffers_are_full(
    tmp_path, number, buffer_bytes
):
    others = descriptors()
    families = number * (len(FAMILIES) + 1)
    partitions = Partitions(tmp_path, number, StateStoreConf(rocksdb_write_buffer_bytes=buffer_bytes))
    try:
        for _ in range(30):
            partitions.commit(value_bytes=20)
        assert not partitions.written
        assert partitions.buffers.get_usage() < buffer_bytes
        assert descriptors() - others <= number * DESCRIPTORS_OF_ITS_OWN

        # A quarter of the write buffers in each batch, so that they are full five times.
        value_bytes = buffer_bytes // 4 // (number * len(FAMILIES) * ROWS)
        most_files = most_descriptors = 0
        for _ in range(20):
            partitions.commit(value_bytes)
            most_files = max(most_files, len(partitions.files()))
            most_descriptors = max(most_descriptors, descriptors() - others)
        assert partitions.written
        assert partitions.buffers.get_usage() < 1.5 * buffer_bytes
        # A family is compacted when it has four files; while that is being done there may be some more.
        assert most_files <= 6 * families
        assert most_descriptors <= number * DESCRIPTORS_OF_ITS_OWN + 6 * families
        # Files that a compaction makes count too. If every batch wrote files, there would be 20 of each family.
        assert len(partitions.written) <= 10 * families
    finally:
        partitions.close()
