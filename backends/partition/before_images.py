"""Before-images: the pairs that changes replace, by which older versions are read and keys are counted.

A bulk look-up of old values costs time, so they are taken from what the stream has just read where possible,
and looked up only if keys are counted or a reader of an older version asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pyarrow as pa

from backends.conf import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.engine import StateEngine
from backends.exceptions import StoreClosedError, VersionNotFoundError
from backends.formats.changelog import ChangelogMeta, Changes
from backends.formats.local_state import LocalState
from backends.host_memory import BEFORE_IMAGES, HostMemory
from backends.partition.held_versions import HeldVersions
from backends.partition.layers import BeforeImage, Delta
from backends.partition.recent_reads import RecentReads


class BeforeImages:
    """Finds the before-images of the changes of one partition. Its own lock guards the number of pins."""

    def __init__(
        self,
        engine: StateEngine,
        conf: StateStoreConf,
        versions: HeldVersions,
        recent_reads: RecentReads,
        memory: HostMemory,
    ) -> None:
        self._engine = engine
        self._counts_keys = conf.track_total_number_of_rows
        self._versions = versions
        self._recent_reads = recent_reads
        self._memory = memory
        self._pins = 0
        self._lock = threading.Lock()

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Within the block, look before-images up even if nothing else needs them."""
        with self._lock:
            self._pins += 1
        try:
            yield
        finally:
            with self._lock:
                self._pins -= 1

    def _are_looked_up(self) -> bool:
        """Return whether before-images are worth looking up. Those at hand are kept in any case."""
        return self._counts_keys or bool(self._pins)

    def when_staged(self, meta: ChangelogMeta, changes: Changes) -> BeforeImage | None:
        """Return the before-images if they can be told while the changelog is written; None for later, or for never.

        What the task has read is forgotten: its commit has come, and another attempt reads by itself.
        """
        if self._versions.is_loading:
            return None  # a background thread may not wait long
        try:
            with self._versions.reading(meta.version - 1, meta.base) as view:
                known: dict[str, SortedPairs] = {}
                unknown: dict[str, SortedPairs] = {}
                for family, pairs in changes.families.items():
                    values = self._recent_reads.values(meta.base, family, pairs.keys)
                    self._recent_reads.forget(family)
                    if not len(pairs):
                        known[family] = pairs
                    elif values is not None:
                        known[family] = SortedPairs(pairs.keys, values)
                    else:
                        unknown[family] = pairs
                # With a layer over it, the engine does not show the version below.
                if unknown and (view.layers or not self._are_looked_up()):
                    return None
                found = Changes({**known, **replaced_pairs(self._engine, Changes(unknown)).families})
                # The keys are those of the changes, and counted with them.
                nbytes = sum(pairs.values.nbytes for pairs in found.families.values())
                return BeforeImage(found, self._memory.note(BEFORE_IMAGES, nbytes))
        except (VersionNotFoundError, StoreClosedError):
            return None  # the version below is being loaded, was rolled back, or is past already

    def when_applied(self, delta: Delta) -> Changes | None:
        """Return the before-images of changes that are applied next; None if nothing needs them."""
        before = delta.before.result()
        if before is not None:
            return before.changes
        return replaced_pairs(self._engine, delta.changes) if self._are_looked_up() else None

    def state_after(self, delta: Delta, before: Changes | None) -> LocalState:
        """Return the state of the engine after ``delta`` is applied; the keys are counted if ``before`` is known."""
        counted = before if self._counts_keys else None
        return state_after(self._engine.state, delta.meta.version, delta.file.path, delta.changes, counted)


def replaced_pairs(engine: StateEngine, changes: Changes) -> Changes:
    """Return the pairs that ``changes`` replace in the engine: null where there is none."""
    if engine.state.num_keys == 0:
        return Changes({n: SortedPairs(p.keys, pa.nulls(len(p), pa.binary())) for n, p in changes.families.items()})
    # Keys that are written and had not been read are mostly new ones, as those of a list's elements.
    get = partial(engine.get_many, keep=False)
    return Changes({n: SortedPairs(p.keys, get(p.keys, n)) for n, p in changes.families.items()})


def state_after(below: LocalState, version: int, head: str, changes: Changes, before: Changes | None) -> LocalState:
    """Return the state of an engine after ``changes`` made ``version`` on top of ``below``.

    Its keys are counted if those of ``below`` are, and the before-images are given.
    """
    if before is None or below.num_keys is None:
        return LocalState(version, head, None)
    growth = sum(
        before.families[name].values.null_count - pairs.values.null_count for name, pairs in changes.families.items()
    )
    return LocalState(version, head, below.num_keys + growth)
