"""Searching a checkpoint for bytes that must not be there."""

from __future__ import annotations

import base64
from pathlib import Path


def patterns_of(name: str) -> list[bytes]:
    """Return the bytes of a name and their base64 forms: descriptors hold small files in base64."""
    made = [base64.b64encode(bytes(before) + name.encode())[4:-4] for before in range(3)]
    return [name.encode(), *made]


def files_with(location: str, name: str) -> list[str]:
    """Return the files that contain the bytes of a name."""
    patterns = patterns_of(name)
    return [
        str(path.relative_to(location))
        for path in sorted(Path(location).rglob("*"))
        if path.is_file() and any(pattern in path.read_bytes() for pattern in patterns)
    ]
