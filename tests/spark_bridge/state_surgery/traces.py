"""Searching a checkpoint for bytes that must not be there."""

from __future__ import annotations

import base64
from pathlib import Path


def patterns_of(name: str) -> list[bytes]:
    """The bytes of a name, and what they are in base64, in which descriptors hold small files."""
    made = [base64.b64encode(bytes(before) + name.encode())[4:-4] for before in range(3)]
    return [name.encode(), *made]


def files_with(location: str, name: str) -> list[str]:
    """The files in which the bytes of a name are."""
    patterns = patterns_of(name)
    return [
        str(path.relative_to(location))
        for path in sorted(Path(location).rglob("*"))
        if path.is_file() and any(pattern in path.read_bytes() for pattern in patterns)
    ]
