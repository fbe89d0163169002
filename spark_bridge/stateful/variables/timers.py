"""Timers of grouping keys: stored by key, and by time, so that the timers that fire are one range per key group."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import list_array, list_parts
from backends.encoding.key_order import key_order
from backends.encoding.operator_schema import StateVariable
from spark_bridge.state_format.families import TIMERS_BY_EXPIRY, TIMERS_BY_KEY, family_of
from spark_bridge.state_format.layouts import EXPIRIES, is_present
from spark_bridge.state_format.ranges import offsets_of
from spark_bridge.state_format.stored_keys import by_expiry, expired_ranges, without_expiry
from spark_bridge.stateful.variables.step import KeyStep


class Timers:
    """The timers of one partition's grouping keys; those at or before ``until_ms`` (since 1970) fire in this batch."""

    def __init__(self, variable: StateVariable, step: KeyStep, until_ms: int) -> None:
        self._family, self._schema = family_of(variable, TIMERS_BY_KEY)
        self._expiry_family, self._expiry_schema = family_of(variable, TIMERS_BY_EXPIRY)
        self._step = step
        self.until_ms = until_ms
        self._lists: list[list[int] | None] | None = None
        self._before: dict[int, list[int]] = {}

    def register(self, expiry_ms: int) -> None:
        """Add a timer to the current key, unless the key has it."""
        timers = self._changeable()
        at = bisect_left(timers, expiry_ms)
        if at == len(timers) or timers[at] != expiry_ms:
            timers.insert(at, expiry_ms)
        self._step.figures.count("numRegisteredTimers")

    def delete(self, expiry_ms: int) -> None:
        """Remove a timer of the current key, if the key has it."""
        timers = self._changeable()
        at = bisect_left(timers, expiry_ms)
        if at < len(timers) and timers[at] == expiry_ms:
            del timers[at]
        self._step.figures.count("numDeletedTimers")

    def listed(self) -> Iterator[int]:
        """Yield the timers that the current key has at the time of the call, ascending."""
        return iter(list(self._all()[self._step.current] or ()))

    def expired(self) -> list[int]:
        """Return the current key's timers that fire in this batch, ascending."""
        timers = self._all()[self._step.current]
        if not timers or timers[0] > self.until_ms:
            return []
        expired = timers[: bisect_right(timers, self.until_ms)]
        self._step.figures.count("numExpiredTimers", len(expired))
        return expired

    def keys_with_expired(self) -> pa.BinaryArray:
        """Return the grouping keys that have a stored timer which fires in this batch, sorted."""
        ranges = expired_ranges(self._step.store.key_groups, self.until_ms)
        found = [without_expiry(batch.column(0)) for batch in self._step.store.scan(ranges, self._expiry_family)]
        keys = pc.unique(pa.chunked_array(found, pa.binary()))
        return keys.take(key_order(keys))

    def begin(self) -> None:
        """Forget the keys of the step before."""
        self._lists, self._before = None, {}

    def end(self) -> None:
        """Stage the step's changes."""
        lists = self._lists
        if not self._before or lists is None:
            return
        step = self._step
        changed = sorted(self._before)
        after = [lists[i] or [] for i in changed]
        added: list[tuple[int, int]] = []
        removed: list[tuple[int, int]] = []
        for i, now in zip(changed, after, strict=True):
            before = self._before[i]
            added += [(i, expiry) for expiry in set(now).difference(before)]
            removed += [(i, expiry) for expiry in set(before).difference(now)]
        counts = offsets_of(np.array([len(now) for now in after]))
        kind = self._schema.value.field(EXPIRIES).type
        expiries = pa.array([expiry for now in after for expiry in now], kind.value_type)
        rows = pa.RecordBatch.from_arrays([list_array(expiries, counts, None, kind)], schema=self._schema.value)
        keys = step.keys.take(pa.array(changed))
        is_kept = pa.array(np.diff(counts) > 0)
        step.stage(keys.filter(is_kept), self._schema.encode_values(rows.filter(is_kept)), self._family)
        step.stage(keys.filter(pc.invert(is_kept)), None, self._family)
        step.stage(
            self._by_expiry(added), self._expiry_schema.encode_values(is_present(len(added))), self._expiry_family
        )
        step.stage(self._by_expiry(removed), None, self._expiry_family)
        self.begin()

    def _by_expiry(self, timers: list[tuple[int, int]]) -> pa.BinaryArray:
        """Return the stored keys of timers, given as numbers of keys and expiries, sorted as the store writes them."""
        columns = np.array(timers, np.int64).reshape(-1, 2)
        keys = by_expiry(self._step.keys.take(pa.array(columns[:, 0])), columns[:, 1])
        return keys.take(key_order(keys))

    def _changeable(self) -> list[int]:
        """Return the current key's timers, to be changed, and remember what they were."""
        lists, i = self._all(), self._step.current
        timers = lists[i]
        if timers is None:
            timers = lists[i] = []
        if i not in self._before:
            self._before[i] = timers.copy()
        return timers

    def _all(self) -> list[list[int] | None]:
        """Return the timers of all keys of the step, read for all keys at once when first needed."""
        lists = self._lists
        if lists is None:
            stored = self._step.store.get_many(self._step.keys, self._family)
            if stored.null_count == len(stored):
                lists = [None] * len(stored)
            else:
                elements, offsets = list_parts(self._schema.decode_values(stored).column(EXPIRIES))
                flat = elements.to_numpy().tolist()
                lists = [flat[a:b] if a < b else None for a, b in pairwise(offsets.tolist())]
            self._lists = lists
        return lists
