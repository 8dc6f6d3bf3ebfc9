# SPDX-License-Identifier: Apache-2.0
"""Dtypes of layers: what is stored and what is computed with.

The *parameter dtype* (``param_dtype``) is how a parameter is stored, trained and saved. The
*compute dtype* (``dtype``) is what inputs and parameters are cast to where they are used, and so
the dtype of a layer's output. Without a compute dtype a layer *promotes*: it computes in the widest
dtype among its input and its parameters, by JAX's own promotion.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def canonical_dtype(dtype: Any) -> np.dtype | None:
    """Returns a dtype as NumPy names it, canonical for JAX.

    Example:
        >>> canonical_dtype("bfloat16"), canonical_dtype(float), canonical_dtype(None)
        (dtype(bfloat16), dtype('float32'), None)
    """
    return None if dtype is None else jax.dtypes.canonicalize_dtype(jnp.dtype(dtype))


def as_array(value: Any) -> jax.Array:
    """Returns what stands for an array (a number, NumPy array, Variable) as a JAX array."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def cast_all(dtype: np.dtype | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Casts arrays to the compute dtype.

    Args:
        dtype: The compute dtype, or None to promote the arrays to their widest.
        *arrays: Any shapes; at least one is floating or complex.

    Returns:
        The arrays, all of one dtype; those that have it already are returned as they are.

    Example:
        >>> x, kernel = jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32)
        >>> [array.dtype.name for array in cast_all(None, x, kernel)]
        ['float32', 'float32']
    """
    wanted = jnp.result_type(*arrays) if dtype is None else dtype
    return tuple(array if array.dtype == wanted else array.astype(wanted) for array in arrays)


def at_least_float32(dtype: Any) -> np.dtype:
    """Returns the dtype in which statistics over a ``dtype`` array are computed."""
    return jnp.promote_types(dtype, jnp.float32)


def result_dtype(dtype: Any, x: jax.Array, *parameters: jax.Array | None) -> Any:
    """Returns the compute dtype; without one, what input and parameters promote to."""
    if dtype is not None:
        return dtype
    promoted = jnp.result_type(x, *(one for one in parameters if one is not None))
    return promoted if jnp.issubdtype(promoted, jnp.inexact) else at_least_float32(promoted)
