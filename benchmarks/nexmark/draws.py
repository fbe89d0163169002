"""Random numbers and strings that depend only on the seed and the event's number, for many events at once.

A draw is a hash of (seed, event number, index of the draw in the event), so that an event is the same in any batch, and
batches can be made in any order. The hash is the finalizer of SplittableRandom, which Nexmark uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Longs = npt.NDArray[np.int64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_DRAWS_PER_EVENT = np.uint64(64)
_POOL_BYTES = 1 << 20
_LONGEST_TEXT = 1 << 16
_SPECIAL_ONE_IN = 13


@dataclass
class Draws:
    """Random draws for the events with these numbers: each call is another draw, of one value per event."""

    seed: int
    numbers: Longs
    _count: int = field(default=0, init=False)

    def bits(self) -> npt.NDArray[np.uint64]:
        """Draw 64 random bits."""
        place = self.numbers.astype(np.uint64) * _DRAWS_PER_EVENT + np.uint64(self._count)
        self._count += 1
        if self._count > int(_DRAWS_PER_EVENT):
            raise ValueError(f"An event takes more than {_DRAWS_PER_EVENT} draws; raise _DRAWS_PER_EVENT.")
        return _mixed(_mixed(np.full(1, self.seed, np.uint64)) + place * _GAMMA)

    def below(self, bound: Longs | int) -> Longs:
        """Draw an integer from 0 to ``bound - 1``, all as likely."""
        # The upper 32 bits times the bound: a bound has to be small against 2**32.
        high = (self.bits() >> np.uint64(32)) * np.asarray(bound, np.uint64) >> np.uint64(32)
        values: Longs = high.astype(np.int64)
        return values

    def unit(self) -> npt.NDArray[np.float64]:
        """Draw a number from 0 to 1, without 1."""
        values: npt.NDArray[np.float64] = (self.bits() >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return values

    def one_of(self, values: pa.Array) -> pa.Array:
        """Draw one of some values, all as likely."""
        return values.take(pa.array(self.below(len(values))))

    def letters(self, lengths: Longs) -> pa.StringArray:
        """Draw so many lower-case letters for each event."""
        return self._texts(_pool(0), lengths)

    def words(self, max_length: int, special: str = " ") -> pa.StringArray:
        """Draw 3 to ``max_length - 1`` letters, one in thirteen of them ``special``."""
        return self._texts(_pool(ord(special)), 3 + self.below(max_length - 3))

    def digits(self, count: int) -> pa.StringArray:
        """Draw so many decimal digits for each event."""
        wanted, digits = self.below(10**count), np.empty((len(self.numbers), count), np.uint8)
        for place in reversed(range(count)):
            wanted, digit = np.divmod(wanted, 10)
            digits[:, place] = digit + ord("0")
        return _strings(digits.reshape(-1), np.arange(len(self.numbers) + 1, dtype=np.int64) * count)

    def _texts(self, pool: npt.NDArray[np.uint8], lengths: Longs) -> pa.StringArray:
        if lengths.max(initial=0) > _LONGEST_TEXT:
            raise ValueError(f"A string may have at most {_LONGEST_TEXT} letters, not {lengths.max()}.")
        starts = self.below(len(pool) - _LONGEST_TEXT)
        ends = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        return _strings(pool[np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)], ends)


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


_POOLS: dict[int, npt.NDArray[np.uint8]] = {}


def _pool(special: int) -> npt.NDArray[np.uint8]:
    """Return a long random string, whose parts are the random strings of events; the same for every seed."""
    if special not in _POOLS:
        draws = Draws(special, np.arange(_POOL_BYTES, dtype=np.int64))
        letters = (ord("a") + draws.below(26)).astype(np.uint8)
        _POOLS[special] = (
            np.where(draws.below(_SPECIAL_ONE_IN) == 0, np.uint8(special), letters) if special else letters
        )
    return _POOLS[special]


def _strings(characters: npt.NDArray[np.uint8], ends: Longs) -> pa.StringArray:
    offsets = pa.py_buffer(ends.astype(np.int32))
    return pa.StringArray.from_buffers(len(ends) - 1, offsets, pa.py_buffer(np.ascontiguousarray(characters)))
