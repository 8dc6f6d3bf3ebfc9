# SPDX-License-Identifier: Apache-2.0
"""The layout of activations between the layers of a transformer."""

from __future__ import annotations

import math
from typing import Any

import jax

from shardax import constrain
from shardax.extend import explicit_entries, mesh_axes_of
from shardax.partition import UNCONSTRAINED, current_rules, resolve_mesh


def lay_out_activations(x: jax.Array) -> jax.Array:
    """Lays activations out by the scope's rules for batch and sequence."""
    # Rules about parameters alone leave activations to the compiler. So does a dimension that the
    # mesh does not divide, such as the batch of one while sampling.
    rules = current_rules()
    splits_seq = "seq" in rules.names and mesh_axes_of(rules.spec(("seq",))[0])
    mesh = resolve_mesh() if "batch" in rules.names or splits_seq else None
    if mesh is None:
        return x

    names: tuple[Any, ...] = ("batch", "seq", "embed")[-x.ndim :]
    if names[0] == "batch" and "batch" not in rules.names:  # it stays where it was placed
        typed = explicit_entries(x)
        if typed is None:
            names = (UNCONSTRAINED, *names[1:])
        else:
            rules = rules.override({"batch": typed[0]})

    parts = [
        math.prod(mesh.shape.get(axis, 1) for axis in mesh_axes_of(entry))
        for entry in rules.spec(names)
    ]
    entries = [
        name if size % count == 0 else UNCONSTRAINED
        for name, size, count in zip(names, x.shape, parts, strict=True)
    ]
    return constrain(x, entries, mesh, rules)
