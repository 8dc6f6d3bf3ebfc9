# SPDX-License-Identifier: Apache-2.0
"""Sizes and layouts of the arrays of a generation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardax import Cache, axis_rules, constrain, iter_variables, jit
from shardax.extend import mesh_axes_of
from shardax.partition import current_rules, resolve_mesh


def bucket(size: int) -> int:
    """Returns the next power of two, at least 16, so that few programs serve all lengths."""
    return max(16, 1 << (size - 1).bit_length())


@contextlib.contextmanager
def model_layout_scope(model: Any, batch: int) -> Generator[None]:
    """Enters the model's mesh, with rules for the cache and the rows."""
    # The cache is split as the kernels that make its keys and values are.
    entries: dict[str, Any] = {"kv_heads": None, "head_dim": None, "layers": None}
    mesh: Any = resolve_mesh()
    for _, variable in iter_variables(model):
        sharding = getattr(variable, "sharding", None)
        if isinstance(sharding, NamedSharding) and variable.axes is not None:
            mesh = sharding.mesh if mesh is None else mesh
            names = zip(variable.axes, sharding.spec, strict=False)
            entries |= {name: entry for name, entry in names if name in entries}
    if mesh is None:
        yield
        return

    # Rows stay whole where no rule splits them, or where they do not divide.
    rules = current_rules()
    parts = 0
    if "batch" in rules.names:
        axes = mesh_axes_of(rules.spec(("batch",))[0])
        parts = math.prod(mesh.shape.get(axis, 1) for axis in axes)
    if parts == 0 or batch % parts:
        entries["batch"] = None

    with contextlib.ExitStack() as stack:
        if resolve_mesh() is None:
            stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(axis_rules(rules.override(entries)))
        yield


def lay_out_cache(cache: Any) -> None:
    """Lays a cache out as rules in scope say of its axes."""
    mesh = resolve_mesh()
    if mesh is None:
        return
    for _, variable in iter_variables(cache, Cache):
        if variable.axes is not None:
            variable.value = constrain(variable.value, variable.axes, mesh)


def by_rows(x: jax.typing.ArrayLike) -> jax.Array:
    """Lays rows out as rules say of ``batch``."""
    mesh = resolve_mesh()
    x = jnp.asarray(x)
    return x if mesh is None else constrain(x, ("batch", *[None] * (x.ndim - 1)), mesh)


@jit
def _whole(x: jax.Array) -> jax.Array:
    return constrain(x, (None,) * x.ndim, resolve_mesh())


def to_host(x: jax.Array) -> np.ndarray:
    """Returns an array on the host, whole also where other processes hold parts of it."""
    return np.asarray(x if x.is_fully_addressable else _whole(x))
