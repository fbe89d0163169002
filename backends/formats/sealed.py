"""JSON records that carry their own digest, by which damage is found.

Manifests and the like are found by listing, so no ``FileRef`` has their digest. Such a file is one line of JSON, and
one line with the xxh3-128 of the first line.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from backends.decoders import convert, json_decoder
from backends.exceptions import DamagedFileError
from backends.formats.partition_entries import PartitionEntries, StoredEntries
from backends.storage.file_ref import digest

T = TypeVar("T")


def seal(record: msgspec.Struct) -> bytes:
    """Return the bytes of a file: a record and its digest."""
    content = msgspec.json.encode(record, enc_hook=_encode)
    return content + b"\n" + digest(content).encode() + b"\n"


def unseal(data: bytes, kind: type[T], name: str) -> T:
    """Read what ``seal`` wrote; ``name`` is the file's, for messages. Raises ``DamagedFileError``."""
    content, _, written = data.rstrip(b"\n").rpartition(b"\n")
    if digest(content).encode() != written or not data.endswith(b"\n"):
        raise DamagedFileError(
            f"{name} is damaged: its content has the digest {digest(content)}, written was "
            f"{written[:40].decode(errors='replace')!r}. Restore it from a copy."
        )
    try:
        return json_decoder(kind, _decode).decode(content)
    except msgspec.MsgspecError as error:
        raise DamagedFileError(f"{name} is no {kind.__name__} that this release can read: {error}") from error


def _encode(value: object) -> object:
    if isinstance(value, PartitionEntries):
        return value.stored
    raise NotImplementedError(f"A {type(value).__name__} cannot be written")


def _decode(kind: type[Any], value: Any) -> Any:
    if kind is PartitionEntries:
        return PartitionEntries(convert(value, StoredEntries, str_keys=True))
    raise NotImplementedError(f"A {kind.__name__} cannot be read")
