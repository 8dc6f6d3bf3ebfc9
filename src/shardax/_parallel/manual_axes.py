# SPDX-License-Identifier: Apache-2.0
"""Regions of ``shard_map``: types of mesh axes, marks and sums along Manual ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from shardax.extend import AnyMesh, PyTree, varying_axes


def axis_types(mesh: AnyMesh) -> dict[str, AxisType]:
    """Returns the type of each mesh axis, by name."""
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def mesh_of_region(mesh: AnyMesh | None) -> Any:
    """Returns a mesh as ``jax.shard_map`` takes it; None where JAX finds it in scope."""
    # A mesh of ``with mesh:`` is not one that JAX finds by itself.
    return mesh if jax.sharding.get_abstract_mesh().empty else None


def with_auto_axes(
    function: Callable[..., PyTree], mesh: AnyMesh, out_sharding: PyTree
) -> Callable[..., Any]:
    """Returns a function that runs with Explicit axes as Auto, its results typed."""
    # JAX cannot differentiate a change of axis types inside of shard_map, as layers may have it.
    explicit = [axis for axis, kind in axis_types(mesh).items() if kind is AxisType.Explicit]
    if not explicit:
        return function
    return jax.sharding.auto_axes(function, axes=tuple(explicit), out_sharding=out_sharding)


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Returns a value marked as one that may differ along Manual axes."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def mark_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns a value as ``vary`` does, its gradient summed over the axes as by ``sum_over``."""
    if varying_axes(x).issuperset(axes):
        return x
    return _wide_on_cpu(lambda x: vary(x, axes), x)


def sum_over(x: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """Returns the sum of a value over Manual axes."""
    return _wide_on_cpu(lambda x: jax.lax.psum(x, axes), x)


def _wide_on_cpu(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Runs a function, and its transpose, in float32 on CPUs."""
    # XLA for CPU ends the process where narrow floats are summed over some of a mesh's axes while
    # it lays out the others ("Invalid binary instruction opcode copy"; 0.10 to 0.12).
    if not (jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4):
        return function(x)
    return jax.lax.platform_dependent(
        x, cpu=lambda x: function(x.astype(jnp.float32)).astype(x.dtype), default=function
    )
