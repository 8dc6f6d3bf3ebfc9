# SPDX-License-Identifier: Apache-2.0
"""Laws of layouts: random trees by random rules over random meshes of 1 to 8 devices, 1 to 3 axes.

Whatever the layout, the numbers are the same to the last bit where nothing is summed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

import shardax as sx

LOGICAL = ("embed", "mlp", "vocab")
MESH_AXES = ("x", "y", "z")


def _factorings(count: int, axes: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of so many factors."""
    if axes == 1:
        return [(count,)]
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return [(n, *rest) for n in divisors for rest in _factorings(count // n, axes - 1)]


MESH_SHAPES = [
    shape for count in range(1, 9) for axes in (1, 2, 3) for shape in _factorings(count, axes)
]


class Case(NamedTuple):
    """A mesh, rules, and what a tree is made of, which can be made again."""

    mesh: Mesh
    rules: sx.Rules
    shapes: tuple[tuple[int, ...], ...]
    axes: tuple[tuple[Any, ...] | None, ...]
    lazy: tuple[bool, ...]

    def tree(self) -> Any:
        """The tree, made anew."""
        return Tree(self)


class Tree(sx.Module):
    """Variables of different types, in a list, one of them shared; lazy ones among them."""

    def __init__(self, case: Case) -> None:
        rngs = sx.Rngs(0)
        normal = jax.nn.initializers.normal()
        kinds = (sx.Param, sx.BatchStat, sx.OptState)
        self.parts = []
        for i, (shape, axes, lazy) in enumerate(
            zip(case.shapes, case.axes, case.lazy, strict=True)
        ):
            numbers = np.random.default_rng(i).normal(size=shape).astype(np.float32)
            value = sx.Init(normal, shape, rngs=rngs) if lazy else jnp.asarray(numbers)
            self.parts.append(kinds[i % 3](value, axes=axes))
        self.again = self.parts[0]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A case in which everything divides: sizes are multiples of the number of devices."""
    grid = draw(st.sampled_from(MESH_SHAPES))
    names = tuple(draw(st.permutations(MESH_AXES))[: len(grid)])
    types = tuple(draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])) for _ in grid)
    devices = np.array(draw(st.permutations(jax.devices()))[: math.prod(grid)]).reshape(grid)
    mesh = Mesh(devices, names, axis_types=types)
    # Explicit axes first, as check wants the mesh axes of one dimension.
    ordered = sorted(names, key=lambda name: types[names.index(name)] is not AxisType.Explicit)
    target = st.none() | st.sets(st.sampled_from(names), min_size=1).map(
        lambda chosen: tuple(name for name in ordered if name in chosen)
    )
    rules = sx.Rules(draw(st.lists(st.tuples(st.sampled_from(LOGICAL), target), max_size=5)))
    # Few shapes, so that programs for one device are shared. 24 devices' worth divides by most.
    unit = 24 if 24 % mesh.size == 0 else 2 * mesh.size
    sizes = [(), (1,), (1, 2), (1, 2, 1), (1, 0), (0, 1, 2)]
    shapes = tuple(
        tuple(factor * unit for factor in shape)
        for shape in draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=3))
    )
    orders = [draw(st.none() | st.permutations([*LOGICAL, None])) for _ in shapes]
    axes = tuple(
        None if order is None else tuple(order[: len(shape)])
        for order, shape in zip(orders, shapes, strict=True)
    )
    lazy = tuple(draw(st.booleans()) for _ in shapes)
    event(f"{len(names)} mesh axes, {mesh.size} devices")
    return Case(mesh, rules, shapes, axes, lazy)


def bits(tree: Any) -> list[bytes]:
    """The bytes of every array; of a random key its words."""
    leaves = jax.tree.leaves(sx.state(tree))
    return [
        np.asarray(
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        ).tobytes()
        for leaf in leaves
    ]


@settings(max_examples=25)
@given(cases())
def test_law_placed_tree_keeps_bits_and_named_layout(case: Case) -> None:
    tree = case.tree()
    wanted = sx.shardings(tree, case.mesh, case.rules).flat()
    assert sx.shard(tree, case.mesh, case.rules) is tree
    placed = sx.state(tree).flat()
    assert {path: value.sharding for path, value in placed.items()} == wanted
    assert [f for f in sx.check(tree, case.mesh, case.rules) if f.severity == "error"] == []
    assert bits(tree) == bits(case.tree())
    sx.shard(tree, case.mesh, case.rules)  # again: nothing is touched
    assert all(v is placed[path] for path, v in sx.state(tree).flat().items())
    sx.unshard(tree)
    assert bits(tree) == bits(case.tree())


@settings(max_examples=10)
@given(cases())
def test_law_sharded_results_match_unsharded(case: Case) -> None:
    @sx.jit
    def run(tree: Any) -> Any:
        for part in tree.parts:
            # No product that is added to: fused it would be rounded once, and elsewhere twice.
            part.value = jnp.sqrt(jnp.abs(part.value)) / 7
        return sum(jnp.sum(jnp.tanh(part.value)) for part in tree.parts)

    tree, alone = case.tree(), case.tree()
    sx.shard(tree, case.mesh, case.rules)
    with jax.set_mesh(case.mesh):
        total = run(tree)
    expected = run(alone)
    assert bits(tree) == bits(alone)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    if AxisType.Auto not in case.mesh.axis_types:  # over Auto axes the compiler may choose
        assert [f for f in sx.check(tree, case.mesh, case.rules) if f.code == "misplaced"] == []
