"""Rescaling: a partition takes over its range of keys from the partitions of an earlier layout.

The layout of an operator changes when its query comes back with another number of partitions or another backend.
``formats/manifest_chain.py`` says which partitions have the range; ``loading.py`` calls this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from backends import fault_points
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.engine import StateEngine
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from backends.formats.manifest import Rescaled, SourcePartition


def take_over(
    rescaled: Rescaled,
    engine: StateEngine,
    loaded: Callable[[SourcePartition], AbstractContextManager[StateEngine]],
    step: Callable[[], None],
    *,
    counts_keys: bool,
) -> None:
    """Write the keys from ``rescaled.start`` to ``end`` of all sources to an engine that is empty.

    ``loaded`` opens an engine that holds a source. ``step`` is called after each batch of rows. The column families
    are those of all sources.
    """
    # A process that dies meanwhile leaves a state that no lineage knows.
    unfinished = LocalState.unfinished(rescaled.head)
    families: set[str] = set()
    num_keys = 0

    def taken_over() -> Iterator[tuple[str, SortedPairs]]:
        nonlocal num_keys
        for source in rescaled.sources:
            with loaded(source) as held:
                for family in sorted(held.column_families):
                    families.add(family)
                    for batch in held.scan(rescaled.start, rescaled.end, family):
                        pairs = SortedPairs(batch.column("key"), batch.column("value"))
                        num_keys += len(pairs)
                        yield family, pairs
                        step()
                        fault_points.reached("load:rescaling")

    engine.load_sorted(taken_over(), unfinished)
    made = LocalState(rescaled.version, rescaled.head, num_keys if counts_keys else None)
    engine.prepare(Changes({family: SortedPairs.empty() for family in families}))(made)
