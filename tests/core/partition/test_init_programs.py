# SPDX-License-Identifier: Apache-2.0
"""Initialisation is compiled once, for what it depends on, and keeps nothing alive."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import PartitionCheckError
from shardax.partition import with_logical_partitioning

RULES = sx.Rules({"embed": None, "mlp": "model"})
UNIFORM = jax.nn.initializers.uniform()


def make_init(factor: float = 1.0) -> Callable[..., Any]:
    """An initializer, made anew."""

    def init(key: Any, shape: Any = (4, 8), *, scale: Any = 1.0, make: Any = None) -> Any:
        value = UNIFORM(key, shape) * scale * factor
        return with_logical_partitioning(make or (lambda *_: value), ("embed", "mlp"))(key, shape)

    return init


@dataclasses.dataclass(frozen=True)
class Maker:
    """An initializer that is an instance, or a method."""

    factor: float

    def __call__(self, key: Any) -> Any:
        return make_init(self.factor)(key)

    def method(self, key: Any) -> Any:
        """The same."""
        return self(key)


def keys() -> list[jax.Array]:
    """Two different keys."""
    return [jax.random.key(seed) for seed in range(2)]


@pytest.mark.parametrize(
    "make",
    [
        make_init,
        lambda: Maker(2.0),
        lambda: Maker(2.0).method,
        lambda: functools.partial(make_init(), scale=2.0),
    ],
    ids=["function", "instance", "method", "partial"],
)
def test_initialise_compiles_equal_initializers_once(
    make: Any, mesh: Mesh, compilations: Callable[[], int]
) -> None:
    first_key, other_key = keys()
    first = sx.initialise(make(), first_key, mesh=mesh, rules=RULES)
    compilations()
    other = sx.initialise(make(), other_key, mesh=mesh, rules=RULES)
    again = sx.initialise(make(), first_key, mesh=mesh, rules=RULES)
    assert compilations() == 0
    assert first == again and first != other
    assert again.value.sharding == NamedSharding(mesh, P(None, "model"))


def test_initialise_compiles_again_for_what_the_program_depends_on(
    auto_mesh: Mesh, compilations: Callable[[], int]
) -> None:
    key = jax.random.key(0)
    other_mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])

    def made(*args: Any, mesh: Mesh = auto_mesh, rules: Any = RULES, **kwargs: Any) -> Any:
        compilations()
        box = sx.initialise(make_init(), *args, mesh=mesh, rules=rules, **kwargs)
        return compilations() > 0, box.value.sharding.spec, box.value.shape

    calls: list[Callable[[], Any]] = [
        lambda: made(key, (4, 24)),
        lambda: made(key, (4, 16)),
        lambda: made(key, scale=2.5),
        lambda: made(key, scale=np.full((1, 1), 2.0)),
        lambda: made(key, scale=np.ones((4, 8), np.float32)),
        lambda: made(key, mesh=other_mesh),
        lambda: made(key, rules={"embed": "model"}),
        lambda: made(key, make=jax.nn.initializers.normal()),
    ]
    split = P(None, "model")
    assert [call()[0] for call in calls] == [True] * len(calls)
    assert [call() for call in calls] == [
        (False, split, (4, 24)),
        (False, split, (4, 16)),
        *[(False, split, (4, 8))] * 4,
        (False, P("model", None), (4, 8)),
        (False, split, (4, 8)),
    ]


def test_arrays_that_differ_in_their_numbers_are_inputs(auto_mesh: Mesh) -> None:
    init = make_init()
    scales = [np.full((1, 1), number, np.float32) for number in (1, 2)]
    one, two = (
        sx.initialise(init, keys()[0], scale=scale, mesh=auto_mesh, rules=RULES) for scale in scales
    )
    assert np.array_equal(2 * np.asarray(one.value), two.value)


def test_streams_advance_and_modules_enter_by_structure(auto_mesh: Mesh) -> None:
    def init(rngs: sx.Rngs, old: Any) -> Any:
        drawn = jax.random.normal(rngs(), (8,)) + sum(layer.value for layer in old.layers)
        return {"w": sx.Param(drawn, axes=("mlp",))}

    class Old(sx.Module):
        def __init__(self, depth: int) -> None:
            self.layers = [sx.Param(jnp.full(8, i + 1.0)) for i in range(depth)]

    def value(rngs: sx.Rngs, depth: int) -> Any:
        return sx.initialise(init, rngs, Old(depth), mesh=auto_mesh, rules=RULES)["w"].value

    rngs, alone = sx.Rngs(0), sx.Rngs(0)
    for depth, offset in ((1, 1.0), (1, 1.0), (2, 3.0)):
        expected = jax.random.normal(alone(), (8,)) + offset
        assert np.allclose(value(rngs, depth), expected)


def test_initialise_reads_anew_what_a_function_closes_over(auto_mesh: Mesh) -> None:
    scale = sx.Param(jnp.float32(1))

    def init(key: jax.Array) -> Any:
        return sx.Partitioned(UNIFORM(key, (8,)) * scale.value, ("model",))

    one = sx.initialise(init, jax.random.key(0), mesh=auto_mesh)
    scale[...] = jnp.float32(2)
    two = sx.initialise(init, jax.random.key(0), mesh=auto_mesh)
    scale = sx.Param(jnp.float32(3))
    three = sx.initialise(init, jax.random.key(0), mesh=auto_mesh)
    assert np.array_equal(2 * np.asarray(one.value), two.value)
    assert np.allclose(3 * np.asarray(one.value), three.value)


def initialise_twice(mesh: Mesh) -> list[weakref.ref[Any]]:
    """Initialises by functions that close over models; returns references to all of them."""
    model = sx.nn.Linear(4, 8, rngs=sx.Rngs(0))
    old = sx.nn.Linear(4, 8, rngs=sx.Rngs(1))

    def init(key: jax.Array, make: Any, old: Any) -> Any:
        return make(key, model.kernel.value + old.kernel.value)

    def make(key: jax.Array, value: Any) -> Any:
        return sx.Partitioned(value * model.kernel.value, (None, "model"))

    for key in keys():
        sx.initialise(init, key, make, old, mesh=mesh)
    return [weakref.ref(item) for item in (model, old, init, make)]


@pytest.mark.usefixtures("collecting_only_what_is_new")
def test_initialise_keeps_neither_functions_nor_models_alive(auto_mesh: Mesh) -> None:
    gone = initialise_twice(auto_mesh)
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4


def test_initialise_takes_unhashable_arguments_and_module_methods(auto_mesh: Mesh) -> None:
    class Width:
        __hash__ = None  # pyright: ignore[reportAssignmentType] (the point of the test)

    class Scaled(sx.Module):
        def __init__(self) -> None:
            self.scale = sx.Param(jnp.float32(3))

        def make(self, key: jax.Array, width: Any) -> Any:
            return sx.Partitioned(jnp.ones(8) * self.scale.value, ("model",))

    box = sx.initialise(Scaled().make, jax.random.key(0), Width(), mesh=auto_mesh)
    assert box == sx.Partitioned(jnp.full(8, 3.0), ("model",))
    ones = lambda width: sx.Partitioned(jnp.ones(8), ("model",))  # noqa: E731
    assert sx.initialise(ones, Width(), mesh=auto_mesh) == ones(None)


def test_initialise_refuses_an_invalid_layout_each_time(auto_mesh: Mesh) -> None:
    init = make_init()
    for _ in range(2):
        with pytest.raises(PartitionCheckError):
            sx.initialise(init, jax.random.key(0), (4, 6), mesh=auto_mesh, rules=RULES)
    assert sx.initialise(init, jax.random.key(0), mesh=auto_mesh, rules=RULES).names is not None
