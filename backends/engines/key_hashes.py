"""Hashes of keys for the table of a ``RowCache``: secret, of 64 bits, for many keys at once."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import Records, binary_content, even_rows

KeyHashes = npt.NDArray[np.uint64]
UPPER_HALF = np.uint64(32)
"""A shift that leaves the upper half of a hash."""

_HASHED_BYTES = 256
_SEED = np.uint64(secrets.randbits(64))
_FACTORS = [np.uint64(secrets.randbits(64) | 1) for _ in range(_HASHED_BYTES // 8 + 2)]
"""The secret factors of the length, and of each word of a key."""
_WORD = (1 << 64) - 1
_WORDS = np.dtype("<u8")
_STIR = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)
_BYTES_MASKS = np.array([(1 << 8 * i) - 1 for i in range(9)], np.uint64)


def hash_keys(keys: pa.BinaryArray, even: Records | None = None) -> KeyHashes:
    """Return a hash of 64 bits for each key, which depends on the key and on the process.

    ``even`` is the result of ``even_rows(keys)``, if it is known. Of a key longer than 256 bytes, the first 256 bytes,
    the last 8 and the length count. The words of a key are multiplied by secret numbers and added up (multilinear
    hashing), and the sum is mixed, so that all its bits are good. Each word counts once: the sum of two odd numbers is
    even, and a word that is multiplied by that loses its highest bits.
    """
    n = len(keys)
    if not n:
        return np.zeros(0, np.uint64)
    even = even_rows(keys) if even is None else even
    if even is not None and even.dtype.itemsize >= 8:
        return _hash_even(even)
    content, offsets = binary_content(keys)
    widths = np.diff(offsets)
    starts = offsets[:-1]
    # 8 more bytes, so that a word can be read wherever a key begins.
    padded = np.zeros(len(content) + 8, np.uint8)
    padded[: len(content)] = content
    words: npt.NDArray[np.uint64] = np.ndarray((len(content) + 1,), "<u8", padded, 0, (1,))
    masks = _BYTES_MASKS[np.minimum(widths, 8)]
    hashes: KeyHashes = (words[starts] & masks) * _FACTORS[1]
    hashes += widths.astype(np.uint64) * _FACTORS[0] + _SEED
    hashes += np.where(widths > 8, words[np.maximum(offsets[1:] - 8, starts)], np.uint64(0)) * _FACTORS[2]
    for i, at in enumerate(range(8, min(int(widths.max()) - 8, _HASHED_BYTES), 8)):
        longer = np.flatnonzero(widths > at + 8)
        hashes[longer] += words[starts[longer] + at] * _FACTORS[3 + i]
    return _stirred(hashes)


def _hash_even(keys: Records) -> KeyHashes:
    """Return the hashes of keys of one width, 8 bytes or more, in fewer steps: the words of all keys are columns."""
    width = keys.dtype.itemsize
    shape, strides = (len(keys),), (width,)
    added, others = _even_words(width)
    hashes: KeyHashes = np.ndarray(shape, _WORDS, keys, 0, strides) * _FACTORS[1]
    hashes += added
    for at, factor in others:
        hashes += np.ndarray(shape, _WORDS, keys, at, strides) * factor
    return _stirred(hashes)


def _even_words(width: int) -> tuple[np.uint64, Iterator[tuple[int, np.uint64]]]:
    """Return the term added for the width, and the positions and factors of the words after the first one."""
    if width == 8:
        return np.uint64((8 * int(_FACTORS[0]) + int(_SEED)) & _WORD), iter(())
    added = np.uint64((width * int(_FACTORS[0]) + int(_SEED)) & _WORD)
    places = (width - 8, *range(8, min(width - 8, _HASHED_BYTES), 8))
    return added, zip(places, _FACTORS[2:], strict=False)


def _stirred(hashes: KeyHashes) -> KeyHashes:
    hashes ^= hashes >> UPPER_HALF
    hashes *= _STIR
    hashes ^= hashes >> _SHIFT
    return hashes
