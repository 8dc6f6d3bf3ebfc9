# SPDX-License-Identifier: Apache-2.0
"""Values that are kept in the memory of the host, and come to the devices to be computed with.

``shard(..., memory_kind={sx.OptState: "pinned_host"})`` keeps an optimizer's state out of the
devices' own memory. JAX computes with values of one memory only, so a program brings such values to
the device first and returns them afterwards; the compiler sees when each is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from shardax.core.functional import iter_variables


@contextlib.contextmanager
def in_device_memory(tree: Any) -> Iterator[None]:
    """Has values that are in host memory in device memory for a block, inside a compiled function.

    Args:
        tree: A Module, a Variable, or a pytree of such; their layout over the mesh stays.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> total = sx.Variable(jax.device_put(jnp.zeros(2), jax.memory.Space.Host))
        >>> @sx.jit
        ... def add(total, x):
        ...     with in_device_memory(total):
        ...         total.value += x
        >>> add(total, jnp.ones(2))
        >>> total.value.tolist(), total.value.sharding.memory_kind
        ([1.0, 1.0], 'pinned_host')
    """
    hosted = [variable for _, variable in iter_variables(tree) if _is_in_host_memory(variable)]
    _move(hosted, jax.memory.Space.Device)
    try:
        yield
    finally:
        _move(hosted, jax.memory.Space.Host)


def _is_in_host_memory(variable: Any) -> bool:
    leaves = jax.tree.leaves(variable.value)
    return any(jax.typeof(leaf).memory_space == jax.memory.Space.Host for leaf in leaves)


def _move(variables: list[Any], space: Any) -> None:
    for variable in variables:
        variable.value = jax.device_put(variable.value, space)
