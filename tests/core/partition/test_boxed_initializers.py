# SPDX-License-Identifier: Apache-2.0
"""The names that ``with_partitioning`` gives an initializer are the axes of the Variable."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import named, nn
from shardax.errors import MetadataError, PartitionError, VariableValueError
from shardax.partition import AxisMetadata, to_boxes, with_logical_partitioning, with_partitioning
from tests.advice import run_advice

NORMAL = jax.nn.initializers.lecun_normal()
RULES = sx.Rules({"embed": None, "mlp": "model", "layers": "data"})
OF_MESH = functools.partial(with_partitioning, names=(None, "model"))
LOGICAL = functools.partial(with_logical_partitioning, names=("embed", "mlp"))


def linear(boxed: Any = None) -> nn.Linear:
    options: dict[str, Any] = {} if boxed is None else {"kernel_init": boxed(NORMAL)}
    return nn.Linear(16, 32, rngs=sx.Rngs(0), **options)


@pytest.mark.parametrize("boxed", [OF_MESH, LOGICAL])
def test_layer_layout_follows_names_of_its_initializer(boxed: Any, mesh: Mesh) -> None:
    model, plain = linear(boxed), linear()
    assert model.kernel.is_lazy and model.kernel.axes == boxed.keywords["names"]
    rules = (
        RULES if boxed is LOGICAL else {"out": None}
    )  # which a name of a mesh axis does not need
    errors = [each for each in sx.check(model, mesh, rules) if each.severity == "error"]
    assert errors == [] and sx.shardings(model, mesh, rules).kernel.spec == P(None, "model")
    sx.shard(model, mesh, rules)
    assert model.kernel.sharding == NamedSharding(mesh, P(None, "model"))
    assert np.array_equal(model.kernel.value, plain.kernel.value)
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
    np.testing.assert_allclose(model(x), x @ np.asarray(plain.kernel.value), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("boxed", [OF_MESH, LOGICAL])
def test_optimizer_clones_gradients_and_jit_keep_the_names(boxed: Any, mesh: Mesh) -> None:
    model = linear(boxed)
    optimizer = sx.train.Optimizer(model, optax.sgd(1e-3, momentum=0.9))
    places = sx.shardings(optimizer, mesh, RULES)
    assert places["opt_state"][0]["trace"]["kernel"].spec == P(None, "model")
    sx.shard((model, optimizer), mesh, RULES)
    loss = sx.jit(lambda model: jnp.sum(model(jnp.ones((2, 16))) ** 2))
    with jax.set_mesh(mesh):
        optimizer.update(sx.grad(loss)(model))
    assert sx.clone(model).kernel.axes == boxed.keywords["names"]
    assert optimizer.opt_state[0]["trace"]["kernel"].sharding.spec == P(None, "model")
    graphdef, state = sx.split(model)
    assert sx.shardings(state, mesh, RULES).kernel.spec == P(None, "model")
    assert sx.merge(graphdef, state).kernel.axes == boxed.keywords["names"]


MODELS: dict[str, Callable[[Any, sx.Rngs], Any]] = {
    "Param": lambda init, rngs: {"w": sx.Param(sx.Init(init, (8, 16), rngs=rngs))},
    "Embed": lambda init, rngs: nn.Embed(8, 16, embedding_init=init, rngs=rngs),
    "Einsum": lambda init, rngs: nn.Einsum("ij,jk->ik", (8, 16), kernel_init=init, rngs=rngs),
    "named.Linear": lambda init, rngs: named.Linear(
        {"a": 8}, {"b": 16}, kernel_init=init, use_bias=False, rngs=rngs
    ),
    "named.Embed": lambda init, rngs: named.Embed(
        {"a": 8}, {"b": 16}, embedding_init=init, rngs=rngs
    ),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_with_partitioning_initializer_is_taken_by_every_layer(make: Any, mesh: Mesh) -> None:
    model = make(with_partitioning(NORMAL, ("data", "model")), sx.Rngs(0))
    [spec] = jax.tree.leaves(sx.partition_specs(model), is_leaf=lambda x: isinstance(x, P))
    assert spec == P("data", "model") and sx.check(model, mesh) == []
    [array] = jax.tree.leaves(sx.state(sx.shard(model, mesh)))
    assert array.sharding == NamedSharding(mesh, P("data", "model"))


def test_named_layers_compute_with_parameters_of_other_names(mesh: Mesh) -> None:
    options: dict[str, Any] = {
        "scale_init": with_partitioning(jax.nn.initializers.ones, ("model",))
    }
    norm: Any = named.LayerNorm({"a": 8}, **options)
    layer: Any = named.Linear(
        {"a": 8},
        {"b": 4},
        bias_init=with_partitioning(jax.nn.initializers.ones, (None,)),
        rngs=sx.Rngs(0),
    )
    assert norm.scale.axes == ("model",) and layer.bias.axes == (None,)
    assert sx.shard(norm, mesh).scale.sharding.spec == P("model")

    @sx.jit
    def run(layer: Any, norm: Any) -> Any:
        return layer(norm(named.arange({"a": 8}) + named.zeros({"t": 3})))

    found = run(layer, norm)
    assert found.axes == {"t": 3, "b": 4}
    normal = (np.arange(8) - 3.5) / np.sqrt(np.var(np.arange(8)))  # mean 0, variance 1
    expected = normal @ np.asarray(layer.kernel.value) + 1
    np.testing.assert_allclose(
        found.unwrap("t", "b"), np.tile(expected, (3, 1)), rtol=1e-3, atol=1e-4
    )


def test_stack_adds_its_own_mappable_axis_name(auto_mesh: Mesh) -> None:
    rngs = sx.Rngs(0)
    init = with_partitioning(NORMAL, (None, "model"))
    stack = nn.Stack(lambda: nn.Linear(16, 16, kernel_init=init, rngs=rngs), 4, axis_name="layers")
    assert sx.shardings(stack, auto_mesh).stacked.kernel.spec == P(None, None, "model")
    assert sx.shardings(stack, auto_mesh, RULES).stacked.kernel.spec == P("data", None, "model")
    assert sx.shard(stack, auto_mesh, RULES)(jnp.ones((2, 16))).shape == (2, 16)


class Noted(AxisMetadata[Any]):
    """A box of a user's own, which computes its value."""

    def __init__(self, value: Any, note: str) -> None:
        self.value, self.note = value, note

    def unbox(self, apply_constraint: bool = True) -> Any:
        return 2 * self.value

    def add_axis(self, index: int, params: Any) -> Noted:
        return self

    remove_axis = add_axis

    def get_partition_spec(self) -> P:
        return P(None, "model")


BOXED = with_partitioning(NORMAL, (None, "model"))
OF_MODEL = sx.Partitioned(None, (None, "model"))
AROUND: dict[str, tuple[Any, Any]] = {
    "lambda": (lambda *args: BOXED(*args), OF_MODEL),
    "wraps": (functools.wraps(BOXED)(lambda *args: BOXED(*args)), OF_MODEL),
    "partial": (functools.partial(lambda *args: BOXED(*args)), OF_MODEL),
    "jax.jit": (jax.jit(BOXED, static_argnums=(1, 2)), OF_MODEL),
    "jax.checkpoint": (jax.checkpoint(BOXED, static_argnums=(1, 2)), OF_MODEL),
    "sx.jit": (sx.jit(BOXED, static_argnums=(1, 2)), OF_MODEL),
    "box": (lambda *args: sx.Partitioned(NORMAL(*args), (None, "model")), OF_MODEL),
    "logical": (
        lambda *args: LOGICAL(NORMAL)(*args),
        sx.LogicallyPartitioned(None, ("embed", "mlp")),
    ),
    "own": (lambda *args: Noted(NORMAL(*args) / 2, "n"), Noted(None, "n")),
}


@pytest.mark.parametrize(("init", "box"), AROUND.values(), ids=list(AROUND))
def test_init_takes_names_of_a_box_by_another_function(init: Any, box: Any, mesh: Mesh) -> None:
    layer, plain = linear(lambda _: init), linear()
    names, _ = box.layout()
    assert layer.kernel.is_lazy and layer.kernel.axes == tuple(names)
    assert dict(layer.kernel.metadata) == {"box": box}
    sx.shard(layer, mesh, RULES)
    assert layer.kernel.sharding == NamedSharding(mesh, P(None, "model"))
    np.testing.assert_allclose(layer.kernel.value, plain.kernel.value, rtol=1e-5)


def test_init_of_a_boxed_function_is_boxed_by_the_outer_names() -> None:
    twice = with_partitioning(lambda *args: BOXED(*args), ("data", None))
    assert sx.Param(sx.Init(twice, (8, 16), rngs=sx.Rngs(0))).axes == ("data", None)
    with pytest.raises(PartitionError, match="holds another box") as caught:
        sx.Init(lambda *args: sx.Partitioned(BOXED(*args), (None, None)), (8, 16), rngs=sx.Rngs(0))
    names = {"sx": sx, "box": BOXED(jax.random.key(0), (8, 16)), "rest": ("embed", "mlp")}
    assert run_advice(caught.value, "sx.Param(sx.unbox(box), axes=...)", names).shape == (8, 16)


def test_init_without_an_array_is_refused() -> None:
    with pytest.raises(VariableValueError, match="returned dict and not an array"):
        sx.Param(sx.Init(lambda *args: {"w": NORMAL(*args)}, (8, 16), rngs=sx.Rngs(0))).value  # noqa: B018


def test_init_that_does_not_trace_fails_when_it_is_read() -> None:
    def untraceable(key: Any, *args: Any) -> Any:
        return sx.Partitioned(np.asarray(jax.random.key_data(key)) * 1.0, (None,))

    weight = sx.Param(sx.Init(untraceable, (2,), rngs=sx.Rngs(0)))
    assert weight.is_lazy
    with pytest.raises(jax.errors.TracerArrayConversionError):
        weight.value  # noqa: B018


def test_names_shorter_than_shape_leave_dimensions_whole(mesh: Mesh) -> None:
    weight = sx.Param(sx.Init(with_partitioning(NORMAL, ("data",)), (8, 16), rngs=sx.Rngs(0)))
    assert weight.axes == ("data", None)
    assert sx.shard(weight, mesh).sharding.spec == P("data", None)
    with pytest.raises(MetadataError, match="3 axis names"):
        sx.Param(sx.Init(with_partitioning(NORMAL, ("data", None, None)), (8, 16)))


def test_partial_keeps_names_and_box_mesh_and_rules(auto_mesh: Mesh) -> None:
    init = with_logical_partitioning(NORMAL, ("embed", "mlp"), auto_mesh, {"embed": "data"})
    weight = sx.Param(sx.Init(functools.partial(init, dtype="float32"), (8, 16)))
    assert weight.axes == ("embed", "mlp")
    assert sx.shardings(weight) == NamedSharding(auto_mesh, P("data", None))
    twice = with_partitioning(with_partitioning(NORMAL, ("data", None)), (None, "model"))
    assert sx.Param(sx.Init(twice, (8, 16))).axes == (None, "model")
    unknown = with_partitioning(NORMAL, None)
    layer = nn.Linear(4, 4, kernel_init=unknown, rngs=sx.Rngs(0))
    assert layer.kernel.axes == ("in", "out") and layer.kernel.value.shape == (4, 4)


def test_variable_of_boxed_initializer_converts_back_to_box() -> None:
    init = with_partitioning(jax.nn.initializers.ones, ("data", None))
    weight = sx.Param(sx.Init(init, (2, 3)))
    weight.value  # noqa: B018
    assert to_boxes(weight) == sx.Partitioned(jnp.ones((2, 3)), ("data", None))


def test_constants_still_draw_nothing() -> None:
    zeros = with_partitioning(jax.nn.initializers.zeros, ("model",))
    pairs: Any = ((sx.Rngs(0), {}), (sx.Rngs(0), {"bias_init": zeros}))
    models = [
        nn.Sequential(nn.Linear(4, 4, rngs=rngs, **options), nn.Linear(4, 4, rngs=rngs))
        for rngs, options in pairs
    ]
    first, second = (jax.tree.leaves(sx.state(model)) for model in models)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_names_of_an_initializer_are_given_once() -> None:
    init = with_partitioning(NORMAL, ("data", None))
    for boxed in (init, lambda *args: init(*args)):
        with pytest.raises(MetadataError, match="give the names once"):
            sx.Param(sx.Init(boxed, (8, 16)), axes=("a", "b"))
        weight = sx.Param(jnp.ones((8, 16)))
        with pytest.raises(MetadataError, match="give the names once, to a new Param"):
            weight.value = sx.Init(boxed, (8, 16))
        with pytest.raises(MetadataError, match="give the names once"):
            weight.replace(sx.Init(boxed, (8, 16)))


def test_initializer_around_a_boxed_one_computes_its_own_value() -> None:
    init = with_partitioning(NORMAL, ("data", None))

    @functools.wraps(init)
    def doubled(*args: Any) -> Any:
        return jax.tree.map(lambda x: 2 * x, init(*args))

    layer, plain = (
        nn.Linear(8, 16, kernel_init=each, rngs=sx.Rngs(0)) for each in (doubled, NORMAL)
    )
    assert layer.kernel.axes == ("data", None)
    np.testing.assert_allclose(layer.kernel.value, 2 * plain.kernel.value, rtol=1e-6)
