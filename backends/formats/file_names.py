"""Paths of a partition's files below the state location, and the parts of their names."""

from __future__ import annotations


def partition_directory(operator: str, num_partitions: int, partition: int, store: str = "default") -> str:
    """Return the directory of a partition's files in the layout of ``num_partitions``."""
    return f"operators/{operator}/{num_partitions}/{partition}/{store}"


def changelog_path(operator: str, n: int, p: int, store: str, version: int, unique: str) -> str:
    """Return where a changelog lies below the state location. ``unique`` differs for every file ever written."""
    return f"{partition_directory(operator, n, p, store)}/{changelog_name(version, unique)}"


def changelog_name(version: int, unique: str) -> str:
    """Return a changelog's file name in its partition's directory."""
    return f"{version}-{unique}.changelog"


def version_in(path: str) -> int:
    """Return the version that a file's name begins with, ``<version>-<unique>.<kind>``; -1 if it is no such name."""
    version, dash, _ = path.rsplit("/", 1)[-1].partition("-")
    return int(version) if dash and version.isdecimal() else -1
