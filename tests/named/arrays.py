# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for named arrays, and the plain arrays that they are compared with.

Every array of one example takes its names from one table of sizes, so that names meet.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from shardax.named import NamedArray

SIZES: dict[Any, int] = {"a": 2, "b": 3, 7: 2}
"""Few, because every new shape is compiled; two of one size, so that no mix-up goes unseen."""
POSITIONAL = (3, 2)
"""Sizes of positional dimensions, of which an array has the last ones."""

few = settings(max_examples=12)
"""For laws whose every example compiles."""


@st.composite
def named_arrays(
    draw: st.DrawFn, *, positional: int = 2, names: Any = tuple(SIZES), dtype: Any = np.float32
) -> NamedArray:
    """A named array of small whole numbers, stored in any order."""
    chosen = draw(st.lists(st.sampled_from(list(names)), unique=True, max_size=3))
    count = draw(st.integers(0, positional))
    dims = draw(st.permutations([*chosen, *(None for _ in range(count))]))
    lengths = iter(POSITIONAL[len(POSITIONAL) - count :])
    shape = [SIZES[name] if name is not None else next(lengths) for name in dims]
    size = int(np.prod(shape, dtype=int))
    numbers = np.random.default_rng(draw(st.integers(0, 9))).integers(1, 6, size)
    return NamedArray(jnp.asarray(numbers.reshape(shape).astype(dtype)), dims)


@st.composite
def restored(draw: st.DrawFn, array: NamedArray) -> NamedArray:
    """The same array stored in another order; positional dimensions keep theirs."""
    return array.order_as(*draw(st.permutations(array.dims)))


def plain(array: Any) -> np.ndarray:
    """The array over all names of the table: positional dimensions, then names, 1 where lacking."""
    if not isinstance(array, NamedArray):
        return np.asarray(array)
    own = [name for name in SIZES if name in array.axes]
    data = np.asarray(array.unwrap(*own))
    lead = data.ndim - len(own)
    shape = [
        *(1 for _ in range(len(POSITIONAL) - lead)),
        *data.shape[:lead],
        *(array.axes.get(name, 1) for name in SIZES),
    ]
    return data.reshape(shape)


def assert_same(found: Any, expected: Any) -> None:
    """Asserts that two named arrays have the same axes and numbers, whatever their storage."""
    assert found.axes == expected.axes
    assert found.positional_shape == expected.positional_shape
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(plain(found), plain(expected))
