"""Changelogs: the durable form of one commit of one partition, the same for every backend.

An Arrow IPC file: one record batch of sorted ``key`` and ``value`` (null: removed) per column family. The schema's
metadata says which commit the file is, and names the column families in the order of their batches. The ``FileRef``
that refers to the file proves that the bytes are intact.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pyarrow as pa
from msgspec import Struct

from backends.conf import DEFAULT_FAMILY
from backends.decoders import json_decoder
from backends.encoding.sorted_pairs import PAIRS_SCHEMA, SortedPairs, is_strictly_sorted
from backends.exceptions import DamagedFileError, InvalidStateStoreArgument
from backends.formats.manifest import seal, unseal
from backends.storage.locations import FileRef, digest

if TYPE_CHECKING:
    from backends.storage.checkpoint_storage import CheckpointStorage  # which imports obstore

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
        cls, keys: pa.Array | pa.ChunkedArray, values: pa.Array | pa.ChunkedArray, column_family: str = DEFAULT_FAMILY
    ) -> Changes:
        """Make the changes of one column family. Null values mean removed keys; unsorted keys are sorted.

        Raises ``InvalidStateStoreArgument`` for null keys, a key that is given twice, or other types.
        """
        return cls({column_family: SortedPairs.of(keys, values)})

    @classmethod
    def together(cls, steps: Sequence[Changes]) -> Changes:
        """Return the combined changes of several steps, applied one after the other."""
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

    ``base`` is the path of the changelog below; None for the first one. ``key_growth`` is how many pairs more there are
    than in that state, None if the writer did not know. Who applies the changelog need not look up what it replaces.
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
    key_growth: int | None = None


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
                raise DamagedFileError(f"{name} is not a changelog: it has the columns {reader.schema.names}.")
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
    """Read only the metadata of a changelog: its commit. Raises as ``read_changelog`` does."""
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
        raise DamagedFileError(f"{name} is not a changelog, or is damaged: {error!r}") from error
    if meta.format_version != CHANGELOG_FORMAT_VERSION:
        raise InvalidStateStoreArgument(
            f"{name} has the format {meta.format_version}; this release reads {CHANGELOG_FORMAT_VERSION}. "
            "Use the newer release."
        )
    return meta, names


# Changelog groups: the changelogs of several partitions and operators of one version, in one object.
#
# The changelogs come one after the other, each with the same bytes as a separate file would have. After them come an
# index, sealed, and a footer: the index's length in bytes (8 bytes, little-endian) and ``MAGIC``. A manifest names
# object, offset, size and digest of each part, so a load needs no index, and a damaged part leaves the others readable.
# The index is for a coordinator that must reconstruct a version without its manifest. The idea is that of WarpStream
# and SlateDB: on object storage a request costs more than the bytes in it.


GROUPS_DIRECTORY = "groups"
"""The directory of groups below the state location."""
SUFFIX = ".changelogs"
MAGIC = b"STSTGRP1"
GROUP_FORMAT_VERSION = 1
_FOOTER_BYTES = 8 + len(MAGIC)
_TAIL_BYTES = 64 << 10
"""The first read of a group fetches this many bytes of its end: the index of some hundred parts."""


class GroupMember(NamedTuple):
    """A changelog that is written with others. ``path`` is the name that it would have as a separate file."""

    meta: ChangelogMeta
    path: str
    data: bytes


class GroupPart(Struct, frozen=True):
    """An entry of the index: the position of one commit. ``offset`` and ``size`` are in bytes."""

    meta: ChangelogMeta
    path: str
    offset: int
    size: int
    digest: str


class GroupIndex(Struct, frozen=True):
    """The index of a group. ``path`` is the group's own."""

    path: str
    parts: tuple[GroupPart, ...]
    format_version: int = GROUP_FORMAT_VERSION


def group_path(version: int) -> str:
    """Return a new name for a group of changelogs that lead to ``version``."""
    return f"{GROUPS_DIRECTORY}/{version}-{uuid.uuid4().hex}{SUFFIX}"


def write_group(path: str, members: Sequence[GroupMember]) -> tuple[bytes, list[FileRef]]:
    """Return the bytes of a group that is to be stored at ``path``, and a reference to each member's part."""
    parts = []
    offset = 0
    for meta, name, data in members:
        parts.append(GroupPart(meta, name, offset, len(data), digest(data)))
        offset += len(data)
    index = seal(GroupIndex(path, tuple(parts)))
    footer = len(index).to_bytes(8, "little") + MAGIC
    return b"".join((*(m.data for m in members), index, footer)), [_ref(path, part) for part in parts]


def read_index(storage: CheckpointStorage, path: str, size: int) -> list[tuple[ChangelogMeta, FileRef]]:
    """Return the content of a group of ``size`` bytes: each commit, and the reference to its changelog.

    One request, or two for a long index. Raises ``MissingFileError``; ``DamagedFileError`` if the index is not whole;
    ``InvalidStateStoreArgument`` if a newer release wrote the group.
    """
    name = storage.full_location(path)
    tail = storage.get_range(path, max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
    if len(tail) < _FOOTER_BYTES or not tail.endswith(MAGIC):
        raise DamagedFileError(f"{name} is damaged: it has no footer of a changelog group. Restore it from a copy.")
    length = int.from_bytes(tail[-_FOOTER_BYTES : -len(MAGIC)], "little")
    if length > size - _FOOTER_BYTES:
        raise DamagedFileError(
            f"{name} is damaged: it has {size} bytes, and its index should have {length}. Restore it from a copy."
        )
    if length + _FOOTER_BYTES > len(tail):
        tail = storage.get_range(path, size - length - _FOOTER_BYTES, length + _FOOTER_BYTES)
    index = unseal(tail[-length - _FOOTER_BYTES : -_FOOTER_BYTES], GroupIndex, name)
    if index.format_version != GROUP_FORMAT_VERSION:
        raise InvalidStateStoreArgument(
            f"{name} has the format {index.format_version}; this release reads {GROUP_FORMAT_VERSION}. "
            "Use the newer release."
        )
    # The copy of a checkpoint has the same paths below another location.
    if index.path != path:
        raise DamagedFileError(f"{name} has the index of {index.path}: files have been exchanged.")
    return [(part.meta, _ref(path, part)) for part in index.parts]


def _ref(path: str, part: GroupPart) -> FileRef:
    return FileRef(part.path, part.size, part.digest, path, part.offset)
