# SPDX-License-Identifier: Apache-2.0
"""The order of a pass over data: another one for each seed and each pass.

``permute`` shuffles ``range(size)`` without listing it: a balanced Feistel network over the next
power of four, with cycle walking (places that land outside the range go through it again) to cut it
down to ``size``. An epoch over billions of windows costs no memory, and resuming in the middle of
one is arithmetic, not replay. The integer arithmetic is written out here, because the streams of
NumPy's ``Generator`` may change between releases.

The order is ours on every system, and no library's: a saved position is then a number that counts
batches, for any number of processes, and for a seed of 64 bits. Grain's ``shuffle`` takes seeds of
32 bits, has no wheels for Windows, and reads an item at a time: a batch of 256 windows of 128 bytes
took it seven times as long. Sources of grain are read all the same, with their own positions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardax.train.errors import DataError

_Int64Array = npt.NDArray[np.int64]
_UInt64Array = npt.NDArray[np.uint64]


def shuffled(positions: _Int64Array, size: int, seed: int) -> _Int64Array:
    """Returns the items at positions of endless passes over ``range(size)``."""
    passes, places = np.divmod(positions, size)
    items = np.empty_like(places)
    for number in np.unique(passes):
        is_in_pass = passes == number
        items[is_in_pass] = permute(places[is_in_pass], size, int(hash64(seed, number)[0]))
    return items


def mix64(words: npt.ArrayLike) -> _UInt64Array:
    """Scrambles 64-bit words: the finalizer of SplitMix64, a bijection."""
    # Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    x = np.atleast_1d(np.asarray(words, dtype=np.uint64))
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash64(*words: npt.ArrayLike) -> _UInt64Array:
    """Hashes a sequence of 64-bit words to one, elementwise with broadcasting."""
    digest = np.zeros(1, dtype=np.uint64)
    for word in words:
        digest = mix64(digest ^ np.asarray(word, dtype=np.uint64))
    return digest


def permute(places: npt.ArrayLike, size: int, key: int) -> npt.NDArray[np.int64]:
    """Items at given places of ``range(size)``, shuffled by a key."""
    if not 1 <= size <= 1 << 62:
        raise DataError(f"permute() needs 1 <= size <= 2**62, got size={size}.")
    start = np.atleast_1d(np.asarray(places, dtype=np.int64))
    if start.size and (start.min() < 0 or start.max() >= size):
        raise DataError(f"permute() got a place outside [0, {size}).")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = hash64(key & ((1 << 64) - 1), np.arange(6))
    x = _feistel(start.astype(np.uint64), half_bits, round_keys)
    # The domain is at most four times the range, so few entries walk and none walks long.
    while (outside := x >= np.uint64(size)).any():
        x[outside] = _feistel(x[outside], half_bits, round_keys)
    return x.astype(np.int64)


def _feistel(x: _UInt64Array, half_bits: int, round_keys: _UInt64Array) -> _UInt64Array:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> shift, x & mask
    for round_key in round_keys:
        left, right = right, left ^ (mix64(right ^ round_key) & mask)
    return (left << shift) | right
