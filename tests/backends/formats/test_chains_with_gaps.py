"""A chain of manifests with one missing: the chain leaves that version out, or the gap is an error."""

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
    """Return the versions of a chain, and its gaps; below a gap it continues with the last manifest written before."""
    gaps: list[Exception] = []

    def go_on(child: Manifest, error: Exception) -> Manifest | None:
        gaps.append(error)
        return manifests.get(max((i for i in manifests if i < (child.parent or 0)), default=0))

    head = manifests[max(manifests)]
    found = walk(head, manifests.get, lambda i: f"manifest {i}", go_on if gap else None)
    assert all(manifests[100 + v] is m for v, m in found.items())
    return list(found), gaps


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_chain_leaves_out_a_manifest_that_is_missing(missing: int) -> None:
    manifests = chain_of(1, 5)
    assert walked(manifests, gap=True) == ([5, 4, 3, 2, 1], [])
    del manifests[100 + missing]
    with pytest.raises(MissingFileError, match=f"manifest {100 + missing} does not exist"):
        walked(manifests, gap=False)
    versions, (error,) = walked(manifests, gap=True)
    assert versions == [v for v in (5, 4, 3, 2, 1) if v != missing] and isinstance(error, MissingFileError)


def test_a_chain_leaves_out_two_manifests_that_are_missing() -> None:
    manifests = chain_of(1, 6)
    del manifests[105], manifests[102]
    versions, gaps = walked(manifests, gap=True)
    assert versions == [6, 4, 3, 1] and len(gaps) == 2


def test_a_chain_continues_below_a_gap_whatever_was_written_before() -> None:
    """The last manifest before the gap may be another attempt of the missing version, or of a later one."""
    manifests = chain_of(1, 4)
    manifests[110] = structs.replace(manifests[104], id=110, version=5, parent=104)  # later given up
    manifests[121] = structs.replace(manifests[104], id=121, version=4, parent=120)  # 120 is of version 3, and missing
    found = walk(manifests[121], manifests.get, str, lambda child, error: manifests[110])
    assert {v: m.id for v, m in found.items()} == {4: 121, 2: 102, 1: 101}


def test_a_chain_leaves_out_manifests_that_were_exchanged() -> None:
    manifests = chain_of(1, 5)
    manifests[102] = structs.replace(manifests[101], id=102)
    with pytest.raises(DamagedFileError, match="exchanged"):
        walked(manifests, gap=False)
    found = walk(manifests[105], manifests.get, str, lambda child, error: manifests[101])
    assert list(found) == [5, 4, 3, 1]


def test_a_state_to_begin_with_that_is_not_known_is_not_taken_for_none() -> None:
    """Changelogs from version 1 on are applied to no state where version 0 is on no chain."""
    manifests = chain_of(0, 3)
    del manifests[100]
    versions, gaps = walked(manifests, gap=True)
    assert versions == [3, 2] and len(gaps) == 1
    assert walked(chain_of(0, 3), gap=True) == ([3, 2, 1, 0], [])
