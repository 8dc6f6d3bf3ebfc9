# SPDX-License-Identifier: Apache-2.0
"""Whatever names, rules, meshes, overrides and memories are given: a layout, or one of our errors.

Never an internal error, and never half of a move: either every array is where ``shardings`` says,
with its numbers, or none has changed. Some of what is drawn is nonsense on purpose.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

import shardax as sx
from shardax.errors import PartitionCheckError, ShardaxError
from tests.core.partition.nonsense import (
    PHASES,
    entries,
    memory_kinds,
    meshes,
    overrides,
    policies,
    rarely,
    rules,
)

SHAPES = [(), (8,), (3,), (1,), (0,), (8, 4), (4, 8), (3, 8), (2, 0), (8, 1), (2, 4, 8), (8, 3, 2)]


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """A pytree of Variables, lazy, live and shared, with a State and plain arrays beside them."""

    def variable() -> Any:
        shape = draw(st.sampled_from(SHAPES))
        cls = draw(st.sampled_from([sx.Param, sx.OptState, sx.BatchStat]))
        try:
            axes = draw(st.none() | st.lists(entries, min_size=len(shape), max_size=len(shape)))
            init = sx.Init(jax.nn.initializers.ones, shape)
            ones = np.ones(shape, np.float32)
            value = draw(st.sampled_from([init, jnp.asarray(ones), ones]))
            if draw(rarely):
                value = draw(
                    st.sampled_from([jax.ShapeDtypeStruct(shape, jnp.float32), {"a": value}])
                )
            return cls(value, axes=axes)
        except ShardaxError:  # names that a Variable refuses
            return cls(jnp.asarray(np.ones(shape, np.float32)))

    made = [variable() for _ in range(draw(st.integers(1, 3)))]
    tree: dict[str, Any] = dict(zip(["w", "m", "v"], made, strict=False))
    extra = draw(st.sampled_from(["none", "shared", "state", "array"]))
    if extra == "shared":
        tree["again"] = [made[0]]
    elif extra == "state" and not any(v.is_lazy for v in made):
        tree["state"] = sx.state(made)
    elif extra == "array":
        tree["x"], tree["n"] = jnp.asarray(np.ones((2, 4), np.float32)), "no array"
    return tree


def held(tree: Any) -> list[Any]:
    """What every Variable holds."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, sx.Variable))
    return [leaf._value for leaf in leaves if isinstance(leaf, sx.Variable)]


def unmoved(tree: Any, before: list[Any]) -> bool:
    """Whether every Variable holds what it did."""
    return all(one is other for one, other in zip(held(tree), before, strict=True))


def arrays(tree: Any) -> list[Any]:
    """The arrays of what was placed: of Variables, States and beside them."""
    return [
        leaf
        for part in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, sx.Variable))
        for leaf in jax.tree.leaves(part.value if isinstance(part, sx.Variable) else part)
        if isinstance(leaf, jax.Array)
    ]


@settings(max_examples=300, phases=PHASES)
@given(trees(), meshes(), rules, policies, overrides, memory_kinds)
def test_law_shard_places_everything_or_changes_nothing(
    tree: Any, mesh: Any, rules: Any, policy: Any, overrides: Any, memory_kind: Any
) -> None:
    before = held(tree)
    options: dict[str, Any] = {"overrides": overrides, "memory_kind": memory_kind}
    try:
        known = sx.Rules(rules, **policy) if policy else rules
    except ShardaxError as error:
        event(type(error).__name__)
        return
    errors = None  # as `check` finds them; None if it refuses what it is given
    try:
        errors = [f for f in sx.check(tree, mesh, known, **options) if f.severity == "error"]
    except ShardaxError as error:
        event(type(error).__name__)
    assert unmoved(tree, before)
    try:
        placed = sx.shard(tree, mesh, known, **options)
    except ShardaxError as error:
        event(type(error).__name__)
        assert unmoved(tree, before)
        if isinstance(error, PartitionCheckError):
            own = [f for f in error.findings if f.code not in ("abstract", "deleted")]
            assert own == errors
        return
    event("placed")
    assert errors == []
    wanted = sx.shardings(tree, mesh, known, **options)
    for array, place in zip(arrays(placed), jax.tree.leaves(wanted), strict=True):
        assert array.sharding == place
        assert bool((jax.device_get(array) == 1).all())
    again = sx.unshard(placed)
    assert all(len(array.devices()) == 1 for array in arrays(again))
