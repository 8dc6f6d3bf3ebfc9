# SPDX-License-Identifier: Apache-2.0
"""Tracing and programs of JAX, in the same way for all supported versions.

``INLINE`` is for ``jax.jit(inline=INLINE)``: the function becomes part of the program that calls it
while that is traced.

>>> import functools, jax, jax.numpy as jnp
>>> from shardax import extend
>>> @functools.partial(jax.jit, inline=extend.INLINE)
... def double(x):
...     return 2 * x
>>> [equation.primitive.name for equation in jax.make_jaxpr(double)(jnp.ones(())).eqns]
['mul']
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardax._core import _jax, frames
from shardax._core._jax import INLINE as INLINE


def is_eager() -> bool:
    """Returns whether no transform of JAX is tracing in this thread.

    Returns:
        True outside of ``jax.jit``, ``sx.jit``, ``jax.grad`` and the like.

    Example:
        >>> import jax
        >>> from shardax import extend
        >>> traced = []
        >>> _ = jax.jit(lambda: traced.append(extend.is_eager()))()
        >>> extend.is_eager(), traced
        (True, [False])
    """
    return frames.is_eager()


def is_prng_key(value: Any) -> bool:
    """Returns whether a value is an array of typed random keys.

    Args:
        value: Any value.

    Returns:
        True for the results of ``jax.random.key``, False for arrays of numbers and other values.

    Example:
        >>> import jax
        >>> from shardax import extend
        >>> extend.is_prng_key(jax.random.key(0)), extend.is_prng_key(jax.random.PRNGKey(0))
        (True, False)
    """
    return _jax.is_prng_key(value)


def varying_axes(array: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which an array may differ, inside ``shard_map``.

    Args:
        array: An array or a tracer.

    Returns:
        The axes; none outside of ``shard_map``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from shardax import extend
        >>> mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> axes = []
        >>> def body(x):
        ...     axes.append(extend.varying_axes(x))
        ...     return x
        >>> _ = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(
        ...     jnp.ones(4))
        >>> axes
        [frozenset({'data'})]
    """
    return _jax.varying_axes(array)


def open_jaxpr(program: Any) -> Any:
    """Returns the program with equations, of one that may come with its constants.

    Args:
        program: An open or a closed jaxpr.

    Returns:
        What has ``invars``, ``constvars``, ``eqns`` and ``outvars``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from shardax import extend
        >>> closed = jax.make_jaxpr(jnp.sin)(1.0)
        >>> [equation.primitive.name for equation in extend.open_jaxpr(closed).eqns]
        ['sin']
    """
    return _jax.open_jaxpr(program)


def function_of_jaxpr(program: Any) -> Callable[..., list[Any]]:
    """Returns the function that runs a closed program.

    Args:
        program: A closed jaxpr.

    Returns:
        A function from its inputs to the list of its outputs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from shardax import extend
        >>> run = extend.function_of_jaxpr(jax.make_jaxpr(lambda x: x + 1.0)(1.0))
        >>> [float(output) for output in run(2.0)]
        [3.0]
    """
    return _jax.jaxpr_as_fun(program)
