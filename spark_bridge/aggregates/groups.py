"""Rows in groups: the rows of one key in a batch, or the states that are to be merged into one."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from backends.encoding.columns import Integers, Mask


class Groups:
    """Rows in ``num`` groups: ``ids`` has the group of each row, 0 to ``num`` - 1."""

    def __init__(self, ids: Integers, num: int) -> None:
        self.ids = ids
        self.num = num

    @cached_property
    def sizes(self) -> Integers:
        """Return the number of rows in each group."""
        return np.bincount(self.ids, minlength=self.num)

    def counts(self, mask: Mask | None) -> Integers:
        """Return the number of rows in each group for which ``mask`` is not set; the mask marks nulls."""
        return self.sizes if mask is None else np.bincount(self.ids[~mask], minlength=self.num)

    def where(self, chosen: Mask) -> Groups:
        """Return the chosen rows in the same groups."""
        return Groups(self.ids[chosen], self.num)
