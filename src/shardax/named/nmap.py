# SPDX-License-Identifier: Apache-2.0
"""``nmap``: a function of plain arrays, run along all names of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardax.named.array import NamedArray
from shardax.named.lift import run_lifted
from shardax.transforms.call import wraps


def nmap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of plain arrays one of named arrays, run along all their names.

    The function sees slices, which have the positional dimensions only, at every position of the
    union of all names. An argument that lacks a name is the same at all positions along it; so are
    arrays that are not named, and Modules and Variables (one that holds a named array stands for
    it). Collectives of ``jax.lax`` find the names:
    ``jax.lax.psum(x, "batch")``.

    A random key that has no names is one key, and what is drawn from it is the same at all
    positions, also by layers that draw by themselves; ``random_split`` makes one for each.

    Args:
        function: Takes and returns pytrees of arrays. A function, method or callable Module. It
            may return named arrays with other names, which are kept. What it writes into Variables
            must be the same at all positions.

    Returns:
        A function that takes named arrays, and returns them with all names.

    Raises:
        NamedAxesError: When called, if a name has two sizes; lists the axes of every argument.
        ClosureError: When called, if it uses a named array that it was not given and that has one
            of the names.
        MappedShardingError: When called, if a name is split over Explicit mesh axes in two ways.
        SharedWriteError: When called, if it writes different values into a Variable.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> x = sx.named.wrap(jnp.arange(6.0).reshape(2, 3), "batch", "embed")
        >>> sx.named.nmap(jnp.sin)(x).axes
        {'batch': 2, 'embed': 3}
        >>> sx.named.nmap(jax.nn.softmax)(x.untag("embed")).tag("embed").sum("embed").dims
        ('batch',)
    """

    @wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return run_lifted(NamedArray._make, function, args, kwargs)

    return mapped
