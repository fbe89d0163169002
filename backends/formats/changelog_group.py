"""Changelog groups: the changelogs of several partitions and operators of one version, in one object.

The changelogs come one after the other, each with the bytes that it would have as a file of its own. After them come
an index, sealed, and a footer: the index's length in bytes (8 bytes, little-endian) and ``MAGIC``. A manifest names
object, offset, size and digest of each part, so a load needs no index, and a damaged part leaves the others readable.
The index is for a coordinator that must put a version together without its manifest. The idea is that of WarpStream and
SlateDB: on object storage a request costs more than the bytes in it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from backends.exceptions import DamagedFileError, InvalidStateStoreArgument
from backends.formats.changelog import ChangelogMeta
from backends.formats.sealed import seal, unseal
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.file_ref import FileRef, digest

GROUPS_DIRECTORY = "groups"
"""The directory of groups below the state location."""
SUFFIX = ".changelogs"
MAGIC = b"STSTGRP1"
GROUP_FORMAT_VERSION = 1
_FOOTER_BYTES = 8 + len(MAGIC)
_TAIL_BYTES = 64 << 10
"""So much of the end is read first: the index of some hundred parts."""


class GroupMember(NamedTuple):
    """A changelog that is written with others. ``path`` is its name, as if it were a file of its own."""

    meta: ChangelogMeta
    path: str
    data: bytes


class GroupPart(Struct, frozen=True):
    """An entry of the index: which commit lies where. ``offset`` and ``size`` are in bytes."""

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
            f"{name} has the format {index.format_version}; this release reads {GROUP_FORMAT_VERSION}. Use the newer "
            "release."
        )
    # The copy of a checkpoint has the same paths below another location.
    if index.path != path:
        raise DamagedFileError(f"{name} has the index of {index.path}: files have been exchanged.")
    return [(part.meta, _ref(path, part)) for part in index.parts]


def _ref(path: str, part: GroupPart) -> FileRef:
    return FileRef(part.path, part.size, part.digest, path, part.offset)
