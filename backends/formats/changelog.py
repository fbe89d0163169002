"""Changelogs: the durable form of one commit of one partition, the same for every backend.

An Arrow IPC file: one record batch of sorted ``key`` and ``value`` (null: removed) per column family. The schema's
metadata says which commit the file is, and names the column families in the order of their batches. The ``FileRef``
that refers to the file proves that the bytes are intact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from backends.decoders import json_decoder
from backends.encoding.sorted_pairs import PAIRS_SCHEMA, SortedPairs, is_strictly_sorted
from backends.exceptions import DamagedFileError, InvalidStateStoreArgument
from backends.ids import DEFAULT_FAMILY

CHANGELOG_FORMAT_VERSION = 1
_META = b"statestore.changelog"
_FAMILIES = b"statestore.column_families"
_FEW_BYTES = 1 << 16
"""Of at most this many bytes, handing columns to Arrow's threads takes longer than compressing or reading them here."""


@dataclass(frozen=True)
class Changes:
    """The changes of one commit by column family. A family without pairs was created by the commit."""

    families: Mapping[str, SortedPairs]

    @classmethod
    def of(
        cls,
        keys: pa.Array | pa.ChunkedArray,
        values: pa.Array | pa.ChunkedArray,
        column_family: str = DEFAULT_FAMILY,
    ) -> Changes:
        """Make the changes of one column family. Null values mean removed keys; unsorted keys are sorted.

        Raises ``InvalidStateStoreArgument`` for null keys, a key that is given twice, or other types.
        """
        return cls({column_family: SortedPairs.of(keys, values)})

    @classmethod
    def together(cls, steps: Sequence[Changes]) -> Changes:
        """Return the changes that lead where these lead, one after the other."""
        if len(steps) == 1:
            return steps[0]
        families: dict[str, list[SortedPairs]] = {}
        for step in steps:
            for name, pairs in step.families.items():
                families.setdefault(name, []).append(pairs)
        return cls(
            {
                name: SortedPairs.last_wins(
                    pa.concat_arrays([part.keys for part in parts]), pa.concat_arrays([part.values for part in parts])
                )
                for name, parts in families.items()
            }
        )

    @property
    def num_changes(self) -> int:
        """The number of changed keys."""
        return sum(len(pairs) for pairs in self.families.values())

    @property
    def nbytes(self) -> int:
        """The memory of all pairs."""
        return sum(pairs.nbytes for pairs in self.families.values())


class ChangelogMeta(msgspec.Struct, frozen=True):
    """The commit of a changelog: from the state that ``base`` made to ``version``.

    ``base`` is the path of the changelog below; None for the first one.
    """

    query_run_id: str
    operator: str
    partition: int
    num_partitions: int
    version: int
    attempt: str
    base: str | None
    store: str = "default"
    format_version: int = CHANGELOG_FORMAT_VERSION


def write_changelog(changes: Changes, meta: ChangelogMeta, compression: str = "zstd") -> bytes:
    """Return the bytes of a changelog; ``compression`` is "none", "lz4" or "zstd"."""
    schema = PAIRS_SCHEMA.with_metadata(
        {_META: msgspec.json.encode(meta), _FAMILIES: msgspec.json.encode(list(changes.families))}
    )
    options = pa.ipc.IpcWriteOptions(
        compression=None if compression == "none" else compression, use_threads=changes.nbytes > _FEW_BYTES
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        for pairs in changes.families.values():
            writer.write_batch(pa.RecordBatch.from_arrays([pairs.keys, pairs.values], schema=schema))
    return bytes(sink.getvalue())


def read_changelog(data: bytes, name: str = "the changelog") -> tuple[ChangelogMeta, Changes]:
    """Read what ``write_changelog`` wrote; ``name`` is the file's, for messages.

    Raises ``DamagedFileError`` if the bytes are not a whole, sorted changelog, ``InvalidStateStoreArgument`` if a newer
    release wrote them.
    """
    try:
        options = pa.ipc.IpcReadOptions(use_threads=len(data) > _FEW_BYTES)
        with pa.ipc.open_file(pa.py_buffer(data), options=options) as reader:
            meta, names = _read_meta(reader.schema, name)
            if not reader.schema.equals(PAIRS_SCHEMA, check_metadata=False):
                raise DamagedFileError(f"{name} is no changelog: it has the columns {reader.schema.names}.")
            if reader.num_record_batches != len(names):
                raise DamagedFileError(
                    f"{name} is damaged: {reader.num_record_batches} batches for {len(names)} column families."
                )
            families = {}
            for i, family in enumerate(names):
                batch = reader.get_batch(i)
                batch.validate(full=True)
                keys, values = batch.columns
                if keys.null_count or not is_strictly_sorted(keys):
                    raise DamagedFileError(f"{name} is damaged: the keys of {family!r} are not sorted and unique.")
                families[family] = SortedPairs(keys, values)
            return meta, Changes(families)
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(f"{name} is damaged: {error}") from error


def read_changelog_meta(data: bytes, name: str = "the changelog") -> ChangelogMeta:
    """Read only which commit a changelog is. Raises as ``read_changelog`` does."""
    try:
        with pa.ipc.open_file(pa.py_buffer(data)) as reader:
            return _read_meta(reader.schema, name)[0]
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(f"{name} is damaged: {error}") from error


def _read_meta(schema: pa.Schema, name: str) -> tuple[ChangelogMeta, list[str]]:
    metadata = schema.metadata or {}
    try:
        meta = json_decoder(ChangelogMeta).decode(metadata[_META])
        names = json_decoder(list[str]).decode(metadata[_FAMILIES])
    except (KeyError, msgspec.MsgspecError) as error:
        raise DamagedFileError(f"{name} is no changelog, or is damaged: {error!r}") from error
    if meta.format_version != CHANGELOG_FORMAT_VERSION:
        raise InvalidStateStoreArgument(
            f"{name} has the format {meta.format_version}; this release reads {CHANGELOG_FORMAT_VERSION}. Use the "
            "newer release."
        )
    return meta, names
