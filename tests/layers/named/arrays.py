# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for named arrays, and the plain arrays that they are compared with.

Every array of one example takes its names from one table of sizes, so that names meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from shardax.named import NamedArray

SIZES: dict[Any, int] = {"a": 2, "b": 3, 7: 2}
"""Few, because every new shape is compiled; two of one size, so that no mix-up goes unseen."""
POSITIONAL = (3, 2)
"""Sizes of positional dimensions, of which an array has the last ones."""

few = settings(max_examples=10)
"""For laws whose every example compiles."""


def compiled(function: Callable[..., Any], *arrays: NamedArray) -> Any:
    """Calls a function of named arrays in one program, with their storage as it is.

    Arguments of ``jax.jit`` would be in canonical order. Eager operations would be a program each.
    """
    dims = [array.dims for array in arrays]
    run = jax.jit(lambda *data: function(*map(NamedArray, data, dims)))
    return run(*(array.data for array in arrays))


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
    return stored_as(array, draw(st.permutations(array.dims)))


def stored_as(array: NamedArray, dims: Any) -> NamedArray:
    """Transposes the storage by NumPy."""
    positional = (place for place, name in enumerate(array.dims) if name is None)
    order = [next(positional) if name is None else array.dims.index(name) for name in dims]
    return NamedArray(jnp.asarray(np.asarray(array.data).transpose(order)), tuple(dims))


def unwrapped(array: NamedArray, *names: Any) -> np.ndarray:
    """The numbers by NumPy: positional dimensions first, then the names in this order."""
    places = [place for place, name in enumerate(array.dims) if name is None]
    return np.asarray(array.data).transpose([*places, *map(array.dims.index, names)])


def plain(array: Any) -> np.ndarray:
    """The array over all names of the table: positional dimensions, then names, 1 where lacking."""
    if not isinstance(array, NamedArray):
        return np.asarray(array)
    names = [*SIZES, *(name for name in array.axes if name not in SIZES)]
    data = unwrapped(array, *(name for name in names if name in array.axes))
    lead = len(array.positional_shape)
    shape = [
        *(1 for _ in range(len(POSITIONAL) - lead)),
        *data.shape[:lead],
        *(array.axes.get(name, 1) for name in names),
    ]
    return data.reshape(shape)


def assert_same(found: Any, expected: Any) -> None:
    """Asserts that two named arrays have the same axes and numbers, whatever their storage."""
    assert found.axes == expected.axes
    assert found.positional_shape == expected.positional_shape
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(plain(found), plain(expected))
