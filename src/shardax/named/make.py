# SPDX-License-Identifier: Apache-2.0
"""Making named arrays: of arrays, of constants, of random numbers.

*Axes* are a mapping from names to sizes, such as ``{"batch": 8, "embed": 512}``. Constants are
stored in its order. Random numbers are drawn in canonical order and stored so, so that one key
gives the same number at the same place whatever the order of the mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shardax.core.errors import NamedAxesError
from shardax.core.variables import Variable
from shardax.named.array import NamedArray
from shardax.named.names import check_sizes_by_name, sorted_names

Axes = Mapping[Any, int]


def wrap(array: Any, *names: Any) -> NamedArray:
    """Names the dimensions of an array.

    Args:
        array: A JAX or NumPy array, a number, or a Variable.
        *names: One per dimension, None for one that stays positional. Without any, all stay
            positional; but a Variable gives its ``axes``.

    Returns:
        The array under these names, not copied.

    Raises:
        NamedAxesError: If there is not one name per dimension.
        AxisNamesError: If a name is not hashable or occurs twice.

    Example:
        >>> import numpy as np, shardax as sx
        >>> sx.named.wrap(np.zeros((2, 3)), "batch", "embed").axes
        {'batch': 2, 'embed': 3}
        >>> sx.named.wrap(sx.Param(np.zeros((2, 3)), axes=("embed", "mlp"))).dims
        ('embed', 'mlp')
    """
    if isinstance(array, Variable) and not names:
        names = array.axes or ()
        array = array.value
    if not names and not isinstance(array, NamedArray):
        names = (None,) * jnp.ndim(array)
    return NamedArray(array, names)


def full(axes: Axes, fill_value: Any, dtype: Any = None) -> NamedArray:
    """Returns an array of one number.

    Args:
        axes: Sizes by name.
        fill_value: The number.
        dtype: The dtype; None for that of the number.

    Example:
        >>> import shardax as sx
        >>> sx.named.full({"a": 2}, 7).unwrap("a").tolist()
        [7, 7]
    """
    names, shape = check_sizes_by_name(axes)
    return NamedArray(jnp.full(shape, fill_value, dtype), names)


def zeros(axes: Axes, dtype: Any = None) -> NamedArray:
    """Returns an array of zeros.

    Args:
        axes: Sizes by name.
        dtype: The dtype; None for JAX's default float.

    Example:
        >>> import shardax as sx
        >>> sx.named.zeros({"a": 2, "b": 3}).axes
        {'a': 2, 'b': 3}
    """
    names, shape = check_sizes_by_name(axes)
    return NamedArray(jnp.zeros(shape, dtype), names)


def ones(axes: Axes, dtype: Any = None) -> NamedArray:
    """Returns an array of ones.

    Args:
        axes: Sizes by name.
        dtype: The dtype; None for JAX's default float.

    Example:
        >>> import shardax as sx
        >>> sx.named.ones({"a": 2}).sum().item()
        2.0
    """
    names, shape = check_sizes_by_name(axes)
    return NamedArray(jnp.ones(shape, dtype), names)


def arange(axes: Axes, start: Any = 0, step: Any = 1, dtype: Any = None) -> NamedArray:
    """Returns numbers in equal steps along one axis.

    Args:
        axes: The one axis and how many numbers.
        start: The first.
        step: From each to the next.
        dtype: The dtype; None for that of start and step.

    Raises:
        NamedAxesError: If there is not one axis.

    Example:
        >>> import shardax as sx
        >>> sx.named.arange({"time": 4}, start=1, step=2).unwrap("time").tolist()
        [1, 3, 5, 7]
    """
    names, shape = check_sizes_by_name(axes)
    if len(names) != 1:
        raise NamedAxesError(
            f"arange makes one axis, but was given {len(names)}: {dict(axes)}. Add numbers along "
            f"several axes, which meet by name: arange({{'a': 2}}) + 10 * arange({{'b': 3}})."
        )
    numbers = start + step * jnp.arange(shape[0])
    return NamedArray(numbers if dtype is None else numbers.astype(dtype), names)


def random(sampler: Callable[..., Any], key: Any, axes: Axes, **options: Any) -> NamedArray:
    """Draws random numbers, all different, by a function such as those of ``jax.random``.

    Args:
        sampler: Called as ``sampler(key, shape=shape, **options)``.
        key: A random key, without axes.
        axes: Sizes by name.
        **options: For the sampler.

    Returns:
        The numbers, stored in canonical order.

    Example:
        >>> import jax, shardax as sx
        >>> sx.named.random(jax.random.gumbel, jax.random.key(0), {"vocab": 5}).axes
        {'vocab': 5}
    """
    given, _ = check_sizes_by_name(axes)
    names = sorted_names(given)
    shape = tuple(axes[name] for name in names)
    return NamedArray(sampler(_plain_key(key), shape=shape, **options), names)


def normal(key: Any, axes: Axes, dtype: Any = float) -> NamedArray:
    """Draws numbers of the standard normal distribution.

    Args:
        key: A random key.
        axes: Sizes by name.
        dtype: A floating dtype.

    Example:
        >>> import jax, shardax as sx
        >>> one = sx.named.normal(jax.random.key(0), {"a": 2, "b": 3})
        >>> other = sx.named.normal(jax.random.key(0), {"b": 3, "a": 2})
        >>> bool((one == other).all())
        True
    """
    return random(jax.random.normal, key, axes, dtype=dtype)


def uniform(
    key: Any, axes: Axes, dtype: Any = float, minval: Any = 0.0, maxval: Any = 1.0
) -> NamedArray:
    """Draws numbers evenly from ``[minval, maxval)``.

    Args:
        key: A random key.
        axes: Sizes by name.
        dtype: A floating dtype.
        minval: The least number.
        maxval: The bound above.

    Example:
        >>> import jax, shardax as sx
        >>> bool((sx.named.uniform(jax.random.key(0), {"a": 9}) < 1).all())
        True
    """
    return random(jax.random.uniform, key, axes, dtype=dtype, minval=minval, maxval=maxval)


def randint(key: Any, axes: Axes, minval: Any, maxval: Any, dtype: Any = int) -> NamedArray:
    """Draws integers evenly from ``[minval, maxval)``.

    Args:
        key: A random key.
        axes: Sizes by name.
        minval: The least integer.
        maxval: The bound above.
        dtype: An integer dtype.

    Example:
        >>> import jax, shardax as sx
        >>> tokens = sx.named.randint(jax.random.key(0), {"time": 9}, 0, 100)
        >>> tokens.axes, bool((tokens >= 0).all())
        ({'time': 9}, True)
    """
    return random(jax.random.randint, key, axes, minval=minval, maxval=maxval, dtype=dtype)


def random_split(key: Any, axes: Axes) -> NamedArray:
    """Returns a key for every position, so that a function run by ``nmap`` draws differently there.

    A key that is not split is the same at all positions, and so is the noise drawn from it.

    Args:
        key: A random key.
        axes: Sizes by name.

    Returns:
        The keys, stored in canonical order.

    Example:
        >>> import jax, shardax as sx
        >>> keys = sx.named.random_split(jax.random.key(0), {"batch": 3})
        >>> sx.named.nmap(lambda key: jax.random.normal(key, (2,)))(keys).dims
        (None, 'batch')
    """
    return random(lambda key, shape: jax.random.split(key, shape), key, axes)


def _plain_key(key: Any) -> Any:
    return key.unwrap() if isinstance(key, NamedArray) else key
