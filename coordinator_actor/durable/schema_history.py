"""The schemas with which the versions of an operator were written."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from backends.formats.manifest import Manifest


def schema_history(chain: Mapping[int, Manifest], operator: str) -> list[tuple[str, int, int]]:
    """Return the schema id, the first and the last version of each stretch of one schema, the oldest first.

    ``chain`` has a manifest per version, as many as are retained.
    """
    written = [(v, chain[v].operators[operator].schema_id) for v in sorted(chain) if operator in chain[v].operators]
    found = []
    for schema_id, of_schema in groupby(written, key=lambda one: one[1]):
        versions = [version for version, _ in of_schema]
        found.append((schema_id, versions[0], versions[-1]))
    return found
