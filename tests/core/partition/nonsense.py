# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for what users may give, and for what they should not: nonsense."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from hypothesis import Phase, assume
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import shardax as sx

LOGICAL = ["embed", "mlp", "batch", "vocab"]
MESH_AXES = ["data", "model", "pipe"]
NONSENSE: list[Any] = [3, 1.5, True, b"x", object(), "", (), ("data", 3), {"a": 1}, float("nan")]
UNCONSTRAINED = PartitionSpec.UNCONSTRAINED

# Without the explanation of failures, which takes minutes for inputs as large as these.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]

rarely = st.integers(0, 9).map(lambda n: n == 0)


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draws from ``odd`` one time in ten."""
    return rarely.flatmap(lambda is_odd: odd if is_odd else usual)


nonsense = st.sampled_from(NONSENSE)
entries = mostly(
    st.sampled_from([*LOGICAL, None]),
    nonsense | st.just(UNCONSTRAINED) | st.tuples(st.sampled_from(LOGICAL)),
)
targets = mostly(
    st.sampled_from([*MESH_AXES, None]) | st.permutations(MESH_AXES).map(lambda a: tuple(a[:2])),
    nonsense | st.just(UNCONSTRAINED) | st.just("dat"),
)
rules = mostly(
    st.lists(st.tuples(st.sampled_from(LOGICAL), targets), max_size=5),
    nonsense | st.none() | st.dictionaries(st.sampled_from(LOGICAL), targets, max_size=3),
)
policies = st.sampled_from([{}, {"on_conflict": "error"}, {"on_unmapped": "error"}])
specs = st.lists(
    mostly(
        st.sampled_from([*MESH_AXES, None, ("data", "model")]), nonsense | st.just(UNCONSTRAINED)
    ),
    max_size=3,
)


@st.composite
def meshes(draw: st.DrawFn) -> Any:
    """A mesh of 1 to 8 devices and 1 to 3 axes of any types; or an abstract one; or nonsense."""
    if draw(rarely):
        return draw(nonsense | st.none())
    shapes = [(n,) for n in (1, 2, 3, 8)] + [(2, 4), (1, 2), (3, 2), (2, 2, 2), (1, 2, 4)]
    shape = draw(st.sampled_from(shapes))
    usual = st.sampled_from([AxisType.Auto, AxisType.Explicit])
    types = tuple(draw(mostly(usual, st.just(AxisType.Manual))) for _ in shape)
    names = tuple(draw(st.permutations(MESH_AXES))[: len(shape)])
    if draw(rarely):
        return AbstractMesh(shape, names, axis_types=types)
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, names, axis_types=types)


@st.composite
def places(draw: st.DrawFn) -> Any:
    """What an override may say, and what it may not."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(nonsense | st.none())
    if kind < 4:
        return draw(rules)
    try:
        spec = PartitionSpec(*draw(specs))
        return NamedSharding(draw(meshes()), spec) if kind == 4 else spec
    except Exception:  # noqa: BLE001 (JAX refuses to make it: it cannot be given to us either)
        assume(False)


filters = mostly(
    st.sampled_from([sx.Param, sx.OptState, ..., "tag", lambda p, v: "w" in p, None]), nonsense
)
overrides = st.none() | mostly(
    st.lists(st.tuples(filters, places()), max_size=3), nonsense | st.lists(nonsense, max_size=2)
)
memory_kinds = mostly(
    st.none() | st.just("device"),
    st.sampled_from(["pinned_host", "moon", ""])
    | nonsense
    | st.lists(st.tuples(filters, st.sampled_from(["device", "moon", None, 3])), max_size=2),
)
