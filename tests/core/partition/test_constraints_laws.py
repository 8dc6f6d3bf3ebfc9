# SPDX-License-Identifier: Apache-2.0
"""Laws of constraints over random meshes: 1 to 8 devices, 1 to 3 axes, of random types."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx

SIZES = [(1,), (2,), (4,), (8,), (1, 2), (2, 2), (2, 4), (4, 2), (2, 1, 4), (2, 2, 2)]
NAMES = ("first", "second")
SHAPE = (8, 16)
NUMBERS = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


class Layout(NamedTuple):
    """A mesh, the spec of what goes in, and rules for what comes out."""

    mesh: Mesh
    spec: P
    rules: sx.Rules

    def place(self) -> jax.Array:
        return jax.device_put(NUMBERS, NamedSharding(self.mesh, self.spec))

    def axes_of_type(self, kind: AxisType) -> set[str]:
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return {axis for axis, found in types if found is kind}

    def wanted(self, *, without: frozenset[str] | set[str] = frozenset()) -> list[tuple[str, ...]]:
        """Mesh axes of each dimension, Explicit ones first where a type says so."""
        explicit = self.axes_of_type(AxisType.Explicit)
        entries = [target or () for _, target in self.rules]
        kept = [[axis for axis in entry if axis not in without] for entry in entries]
        return [tuple(sorted(entry, key=lambda axis: axis not in explicit)) for entry in kept]


@st.composite
def entries(draw: st.DrawFn, axes: tuple[str, ...]) -> list[tuple[str, ...] | None]:
    """Mesh axes for two dimensions, each at most once."""
    order = draw(st.permutations(axes))
    first = draw(st.integers(0, len(axes)))
    second = draw(st.integers(first, len(axes)))
    return [tuple(order[:first]) or None, tuple(order[first:second]) or None]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """A random mesh with axes of random types, and random layouts before and after."""
    sizes = draw(st.sampled_from(SIZES))
    axes = ("x", "y", "z")[: len(sizes)]
    kinds = tuple(draw(st.sampled_from([AxisType.Auto, AxisType.Explicit])) for _ in sizes)
    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, axes, axis_types=kinds, devices=devices)
    rules = sx.Rules(list(zip(NAMES, draw(entries(axes)), strict=True)))
    event(" and ".join(sorted({kind.name for kind in kinds})))
    return Layout(mesh, P(*draw(entries(axes))), rules)


def laid_out(array: Any) -> list[tuple[str, ...]]:
    """Mesh axes of each dimension, by a sharding or a spec."""
    spec = array.spec if isinstance(array, NamedSharding) else array
    every = [*spec, *(None,) * (len(SHAPE) - len(spec))]
    return [(e,) if isinstance(e, str) else tuple(e or ()) for e in every]


def seen_by_compiler(layout: Layout, body: Callable[[jax.Array], jax.Array]) -> NamedSharding:
    """The sharding that the compiler gives to what a body returns."""
    found: list[Any] = []

    def look(x: jax.Array) -> jax.Array:
        y = body(x)
        jax.debug.inspect_array_sharding(y, callback=found.append)
        return 2 * y

    jax.jit(look)(layout.place())
    return found[0]


@settings(max_examples=20)
@given(layouts(), st.sampled_from(["given", "in scope", "of the array", "abstract"]))
def test_law_compiler_layout_equals_the_constraint(layout: Layout, how: str) -> None:
    mesh: Any = {"given": layout.mesh, "abstract": layout.mesh.abstract_mesh}.get(how)

    def body(x: jax.Array) -> jax.Array:
        once = sx.constrain(x + 0, NAMES, mesh, layout.rules)
        twice = sx.constrain(once, NAMES, mesh, layout.rules)
        assert jax.typeof(once) == jax.typeof(twice)
        return twice

    if how == "in scope":
        with jax.set_mesh(layout.mesh):
            found = seen_by_compiler(layout, body)
    else:
        found = seen_by_compiler(layout, body)
    wanted = NamedSharding(layout.mesh, P(*(entry or None for entry in layout.wanted())))
    assert found.is_equivalent_to(wanted, len(SHAPE))


@settings(max_examples=30)
@given(layouts())
def test_law_eager_constraint_is_exact_and_idempotent(layout: Layout) -> None:
    once = sx.constrain(layout.place(), NAMES, rules=layout.rules)
    wanted = NamedSharding(layout.mesh, P(*(target for _, target in layout.rules)))
    assert once.sharding.is_equivalent_to(wanted, len(SHAPE))
    assert sx.constrain(once, NAMES, rules=layout.rules).sharding == once.sharding
    assert np.asarray(once).tobytes() == NUMBERS.tobytes()


@settings(max_examples=20)
@given(layouts(), st.data())
def test_law_inside_shard_map_only_nonmanual_axes_count(
    layout: Layout, data: st.DataObject
) -> None:
    axes = layout.mesh.axis_names
    manual = data.draw(st.sets(st.sampled_from(axes), min_size=1), label="manual")
    given_mesh = data.draw(st.sampled_from([layout.mesh, None]), label="mesh")
    spec = P(*(tuple(a for a in entry if a in manual) or None for entry in laid_out(layout.spec)))
    types = []

    def body(part: jax.Array) -> jax.Array:
        result = sx.constrain(part, NAMES, given_mesh, layout.rules)
        types.append(jax.typeof(result).sharding.spec)
        return 2 * result

    mapped = jax.shard_map(body, mesh=layout.mesh, in_specs=spec, out_specs=spec, axis_names=manual)
    found = jax.jit(mapped)(layout._replace(spec=spec).place())
    assert np.asarray(found).tobytes() == (2 * NUMBERS).tobytes()
    assert laid_out(types[-1]) == layout.wanted(without=manual | layout.axes_of_type(AxisType.Auto))


def computed(x: Any, lay_out: Callable[[jax.Array], jax.Array]) -> list[np.ndarray]:
    """Numbers without a sum; then a sum, and its gradient; from one program."""

    def elementwise(x: jax.Array) -> jax.Array:
        # No product that is added to: fused, that rounds once, and a constraint may part the two.
        return lay_out(jnp.sqrt(jnp.abs(lay_out(x / 3)))) / 7

    def contracted(x: jax.Array) -> jax.Array:
        return (jnp.tanh(lay_out(x)) ** 2).sum()

    made = jax.jit(lambda x: (elementwise(x), *jax.value_and_grad(contracted)(x)))(x)
    return [np.asarray(each) for each in made]


@functools.cache
def computed_alone() -> list[np.ndarray]:
    return computed(NUMBERS, lambda x: x)


@settings(max_examples=15)
@given(layouts())
def test_law_sharded_computation_matches_unsharded(layout: Layout) -> None:
    def constrained(x: jax.Array) -> jax.Array:
        return sx.constrain(x, NAMES, rules=layout.rules)

    numbers, value, gradient = computed(layout.place(), constrained)
    expected = computed_alone()
    assert numbers.tobytes() == expected[0].tobytes()
    np.testing.assert_allclose(value, expected[1], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[2], rtol=1e-5, atol=1e-6)
