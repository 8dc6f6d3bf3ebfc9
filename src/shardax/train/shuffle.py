# SPDX-License-Identifier: Apache-2.0
"""Random order without memory: a permutation computed one entry at a time.

A *keyed permutation* of ``range(size)`` answers "which item stands at place i?" without ever
listing the items, so an epoch over billions of windows costs no memory and any place can be looked
up directly; resuming in the middle of an epoch is arithmetic, not replay. It is a balanced Feistel
network over the next power of four, with *cycle walking* (places that land outside the range are
sent round again) to cut it down to ``size``.

All arithmetic is on unsigned 64-bit integers written out here, so the order depends neither on the
machine nor on the version of NumPy (whose ``Generator`` streams may change between releases).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardax.core.errors import WindowError

UInt64Array = npt.NDArray[np.uint64]

_ROUNDS = 6
_U64 = np.uint64
_LOW_64 = (1 << 64) - 1


def mix64(words: npt.ArrayLike) -> UInt64Array:
    """Scramble 64-bit words: a bijection in which every output bit depends on every input bit.

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014).

    Args:
        words: Integers in ``[0, 2**64)``, any shape.

    Returns:
        uint64 array of the same shape (at least one-dimensional).

    Example:
        >>> [hex(word) for word in mix64([0, 1]).tolist()]
        ['0xe220a8397b1dcdaf', '0x910a2dec89025cc1']
    """
    x = np.atleast_1d(np.asarray(words, dtype=_U64))
    x = x + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def hash64(*words: npt.ArrayLike) -> UInt64Array:
    """Hash a sequence of 64-bit words to one, elementwise over arrays that broadcast together.

    Args:
        *words: Integers in ``[0, 2**64)``; the order matters.

    Returns:
        uint64 array of the broadcast shape (at least one-dimensional).

    Example:
        >>> bool(hash64(1, 2)[0] == hash64(2, 1)[0])
        False
    """
    digest = np.zeros(1, dtype=_U64)
    for word in words:
        digest = mix64(digest ^ np.asarray(word, dtype=_U64))
    return digest


def permute(places: npt.ArrayLike, size: int, key: int) -> npt.NDArray[np.int64]:
    """Which items stand at the given places of a shuffled ``range(size)``.

    Args:
        places: Integers in ``[0, size)``, any shape.
        size: How many items there are, at least 1 and at most ``2**62``.
        key: Selects the permutation; taken modulo ``2**64``.

    Returns:
        int64 array of the shape of ``places`` (at least one-dimensional), in ``[0, size)``; a
        bijection.

    Raises:
        WindowError: ``size`` is out of range or a place is outside ``[0, size)``.

    Example:
        >>> permute(range(8), size=8, key=1).tolist() == permute(range(8), size=8, key=2).tolist()
        False
        >>> sorted(permute(range(8), size=8, key=1).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if not 1 <= size <= 1 << 62:
        raise WindowError(f"permute() needs 1 <= size <= 2**62, got size={size}.")
    start = np.atleast_1d(np.asarray(places, dtype=np.int64))
    if start.size and (start.min() < 0 or start.max() >= size):
        raise WindowError(f"permute() got a place outside [0, {size}).")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = hash64(key & _LOW_64, np.arange(_ROUNDS))
    x = _feistel(start.astype(_U64), half_bits, round_keys)
    # The domain is at most four times the range, so few entries walk and none walks long.
    while (outside := x >= _U64(size)).any():
        x[outside] = _feistel(x[outside], half_bits, round_keys)
    return x.astype(np.int64)


def _feistel(x: UInt64Array, half_bits: int, round_keys: UInt64Array) -> UInt64Array:
    shift, mask = _U64(half_bits), _U64((1 << half_bits) - 1)
    left, right = x >> shift, x & mask
    for round_key in round_keys:
        left, right = right, left ^ (mix64(right ^ round_key) & mask)
    return (left << shift) | right
