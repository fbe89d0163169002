"""A chain of manifests of which one is missing: it ends above the gap, or the gap is an error."""

from __future__ import annotations

import pytest
from msgspec import structs

from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats.manifest import Manifest
from backends.formats.manifest_chain import walk


def chain_of(first: int, last: int) -> dict[int, Manifest]:
    """Manifests with ids from 100 on, whose chain begins with version ``first``."""
    return {
        100 + v: Manifest(100 + v, None if v == first else 99 + v, v, 1, "run", 0, {}, chain_from=first)
        for v in range(first, last + 1)
    }


def walked(manifests: dict[int, Manifest], gap: bool) -> tuple[list[int], list[Exception]]:
    gaps: list[Exception] = []
    head = manifests[max(manifests)]
    found = walk(head, manifests.get, lambda i: f"manifest {i}", gaps.append if gap else None)
    assert all(manifests[100 + v] is m for v, m in found.items())
    return list(found), gaps


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_chain_ends_above_a_manifest_that_is_missing(missing: int) -> None:
    manifests = chain_of(1, 5)
    assert walked(manifests, gap=True) == ([5, 4, 3, 2, 1], [])
    del manifests[100 + missing]
    with pytest.raises(MissingFileError, match=f"manifest {100 + missing} does not exist"):
        walked(manifests, gap=False)
    versions, (error,) = walked(manifests, gap=True)
    assert versions == list(range(5, missing, -1)) and isinstance(error, MissingFileError)


def test_a_chain_ends_above_manifests_that_were_exchanged() -> None:
    manifests = chain_of(1, 5)
    manifests[102] = structs.replace(manifests[101], id=102)
    with pytest.raises(DamagedFileError, match="exchanged"):
        walked(manifests, gap=False)
    versions, (error,) = walked(manifests, gap=True)
    assert versions == [5, 4, 3] and isinstance(error, DamagedFileError)


def test_a_state_to_begin_with_that_is_not_known_is_not_taken_for_none() -> None:
    """Changelogs from version 1 on are applied to no state where version 0 is on no chain."""
    manifests = chain_of(0, 3)
    del manifests[100]
    versions, gaps = walked(manifests, gap=True)
    assert versions == [3, 2] and len(gaps) == 1
    assert walked(chain_of(0, 3), gap=True) == ([3, 2, 1, 0], [])
