# SPDX-License-Identifier: Apache-2.0
"""Variables in registered dataclasses, named tuples and frozen dicts, under loops and maps.

The law: a transform does with them what it does with a tuple of the same Variables.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P

import shardax as sx
from tests.core.transforms.examples import Mask
from tests.strategies import assert_equal_values


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    """A dataclass that is registered with JAX."""

    a: Any
    b: Any


class Named(NamedTuple):
    """A named tuple."""

    a: Any
    b: Any


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "dataclass": Pair,
    "named tuple": Named,
    "frozen dict": lambda a, b: FrozenDict({"a": a, "b": b}),
    "nested": lambda a, b: Pair({"b": Named(a, [b])}, None),
}


def leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, sx.Variable))


def variables(tree: Any) -> list[Any]:
    return [variable for _, variable in sx.iter_variables(tree)]


class Net(sx.Module):
    """Two parameters in a container, a counter and dropout."""

    def __init__(self, make: Callable[[Any, Any], Any], rngs: sx.Rngs) -> None:
        self.pair = make(sx.Param(jnp.full(4, 1.0), axes=("x",)), sx.Param(jnp.full(4, 2.0)))
        self.calls = sx.Variable(jnp.int32(0))
        self.drop = Mask(rngs)

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        a, b = variables(self.pair)
        b[...] = b + jnp.mean(x)
        return self.drop(a * x + b)


ROWS = jnp.arange(12.0).reshape(3, 4)
NAME = {sx.partition.PARTITION_NAME: "layers"}


def _ensemble(make: Any) -> Any:
    return sx.vmap(lambda r: Net(make, r), axis_size=3, metadata=NAME)(sx.Rngs(0))


def _step(model: Any, x: Any) -> Any:
    return model, model(x)


def _layers(model: Any) -> Any:
    run = sx.scan(lambda x, m: m(x), in_axes=(sx.Carry, 0), out_axes=sx.Carry, metadata=NAME)
    return run(ROWS[0], model)


def _shards(model: Any) -> Any:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = sx.StateSharding({sx.PathContains("pair"): P("d"), ...: P()})

    def body(model: Any, x: Any) -> Any:
        a, b = variables(model.pair)
        a[...] = a + x
        return a * b

    run = sx.shard_map(body, mesh=mesh, in_specs=(specs, P("d")), out_specs=P("d"))
    return sx.jit(run)(model, ROWS[0])


def _until(model: Any) -> Any:
    def body(model: Any) -> Any:
        model(ROWS[0])
        return model

    assert sx.while_loop(lambda m: m.calls < 3, body, model) is model
    return model.calls.value


ONE: dict[str, Callable[[Any], Any]] = {
    "jit": lambda m: sx.jit(lambda m, x: m(x))(m, ROWS[1]),
    "scan": lambda m: sx.scan(_step)(m, ROWS)[1],
    "while": _until,
    "cond": lambda m: sx.cond(m.calls < 1, lambda m: m(ROWS[1]), lambda m: 2 * ROWS[1], m),
    "remat": lambda m: sx.remat(m)(ROWS[1]),
    "shard_map": _shards,
}
MANY: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda m: sx.vmap(lambda m, x: m(x))(m, ROWS),
    "shared": lambda m: sx.vmap(
        lambda m, x: m(x), in_axes=(sx.StateAxes({sx.PathContains("pair"): 0, ...: 0}), 0)
    )(m, ROWS),
    "scan over layers": _layers,
    "grad": lambda m: jax.tree.leaves(
        sx.grad(lambda m: sx.vmap(lambda m, x: m(x).sum())(m, ROWS).sum())(m)
    ),
}


def _one(make: Any) -> Any:
    return Net(make, sx.Rngs(0))


def _results(make: Any, build: Any, calls: dict[str, Callable[[Any], Any]]) -> list[Any]:
    """What each call gives and leaves, and the types of the Variables."""
    model = build(make)
    rows = [(call(model), jax.tree.leaves(sx.state(model))) for call in calls.values()]
    return [rows, [type(variable) for variable in variables(model)]]


@functools.cache
def _results_with_a_tuple(build: Any) -> list[Any]:
    return _results(lambda a, b: (a, b), build, ONE if build is _one else MANY)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("build", "calls"), [(_one, ONE), (_ensemble, MANY)])
def test_law_transforms_of_containers_match_a_tuple(kind: str, build: Any, calls: Any) -> None:
    rows, types = _results(KINDS[kind], build, calls)
    expected, expected_types = _results_with_a_tuple(build)
    for row, other in zip(rows, expected, strict=True):
        assert_equal_values(row, other)
    assert types == expected_types


@pytest.mark.parametrize("kind", KINDS)
def test_registered_containers_are_arguments_results_and_carries(kind: str) -> None:
    make = KINDS[kind]

    def add(pair: Any, x: Any) -> Any:
        a, b = leaves(pair)
        a[...] = a + b * x
        return make(a, sx.Param(b * x))

    given = make(sx.Param(jnp.ones((3, 2))), jnp.arange(6.0).reshape(2, 3))
    axes = make(0, 1)
    made = sx.vmap(add, in_axes=(axes, None), out_axes=axes)(given, 2.0)
    assert type(made) is type(given) and leaves(made)[0] is leaves(given)[0]
    assert leaves(given)[0].value.tolist() == [[1, 7], [3, 9], [5, 11]]
    assert leaves(made)[1].value.tolist() == [[0, 2, 4], [6, 8, 10]]

    def carried(pair: Any, x: Any) -> Any:
        add(pair, x)
        return pair, make(sx.Variable(x), leaves(pair)[0].value)

    pair = make(sx.Param(jnp.float32(1)), jnp.float32(2))
    last, rows = sx.scan(carried)(pair, jnp.arange(3.0))
    assert leaves(last)[0] is leaves(pair)[0] and float(leaves(pair)[0]) == 7
    assert [leaves(rows)[0].value.tolist(), leaves(rows)[1].tolist()] == [[0, 1, 2], [1, 3, 7]]


@pytest.mark.parametrize("kind", KINDS)
def test_stack_of_container_layers_has_name_and_values(kind: str) -> None:
    rngs = sx.Rngs(0)
    stack = sx.nn.Stack(lambda: Net(KINDS[kind], rngs), 3)
    other = sx.Rngs(0)
    layers = [Net(lambda a, b: (a, b), other) for _ in range(3)]
    a, b = variables(stack.stacked.pair)
    assert (a.axes, a.shape, b.axes) == (("layers", "x"), (3, 4), None)
    y = ROWS[1]
    for layer in layers:
        y = layer(y)
    np.testing.assert_allclose(stack(ROWS[1]), y, rtol=1e-5, atol=1e-6)
