# SPDX-License-Identifier: Apache-2.0
"""Pickle, cloudpickle, ``sx.host.dumps`` and deepcopy: what goes in comes out, over everything."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import PickleWriteError
from tests.strategies import assert_equal_values, assert_same_model, models
from tests.tools.host import pickled
from tests.tools.host.pickled import Box, Custom, Holder, Placed

WAYS = {
    "pickle": lambda tree: pickle.loads(pickle.dumps(tree)),
    "oldest protocol that keeps slots": lambda tree: pickle.loads(pickle.dumps(tree, protocol=2)),
    "cloudpickle": lambda tree: pickle.loads(cloudpickle.dumps(tree)),
    "dumps": lambda tree: sx.host.loads(sx.host.dumps(tree)),
    "dumps by name": lambda tree: sx.host.loads(sx.host.dumps(tree, by_value=False)),
    "dumps and pickle.loads": lambda tree: pickle.loads(sx.host.dumps(tree)),
    "deepcopy": copy.deepcopy,
}
"""Every way through which a tree can go."""

RULES = {"embed": "data", "in": "data", "mlp": "model", "out": "model", "layers": None}


@pytest.fixture(params=WAYS)
def through(request: pytest.FixtureRequest) -> Any:
    """One of the ways."""
    return WAYS[request.param]


def rngs() -> sx.Rngs:
    return sx.Rngs(0)


def stack() -> Any:
    shared = rngs()
    return sx.nn.Stack(lambda: sx.nn.Linear(4, 4, rngs=shared), 3, "layers")


LAYERS: dict[str, Any] = {
    "Linear": lambda: sx.nn.Linear(4, 8, rngs=rngs()),
    "Einsum": lambda: sx.nn.Einsum("ab,bc->ac", (4, 8), rngs=rngs()),
    "Embed": lambda: sx.nn.Embed(8, 4, rngs=rngs()),
    "MLP": lambda: sx.nn.MLP(4, 8, activation="relu", rngs=rngs()),
    "BatchNorm": lambda: sx.nn.BatchNorm(4),
    "LayerNorm": lambda: sx.nn.LayerNorm(4),
    "RMSNorm": lambda: sx.nn.RMSNorm(4),
    "Dropout": lambda: sx.nn.Dropout(0.5, rngs=rngs()),
    "MultiHeadAttention": lambda: sx.nn.MultiHeadAttention(4, 2, rngs=rngs()),
    "Sequential": lambda: sx.nn.Sequential(sx.nn.Linear(4, 4, rngs=rngs()), jax.nn.relu),
    "Stack": stack,
    "a view of a layer": lambda: stack()[1],
    "Jitted": lambda: sx.Jitted(sx.nn.Linear(4, 8, rngs=rngs())),
    "Remat": lambda: sx.Remat(sx.nn.Linear(4, 8, rngs=rngs())),
    "named Linear": lambda: sx.named.Linear({"a": 4}, {"b": 8}, rngs=rngs()),
    "Rngs": lambda: sx.Rngs(0, dropout=jax.random.key(1, impl="rbg")),
    "forked Rngs": lambda: sx.Rngs(0).fork(split=3),
    "slots": lambda: sx.unbind(sx.nn.Linear(4, 8, rngs=rngs()))[0],
    "frozen": lambda: sx.freeze(sx.nn.Linear(4, 8, rngs=rngs())),
}


# --- what comes out is what went in ---


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_come_out_the_same(layer: str, through: Any) -> None:
    model = LAYERS[layer]()
    assert_same_model(through(model), model)


@settings(max_examples=15, deadline=None)
@given(models())
def test_law_models_come_out_the_same(model: Any) -> None:
    for through in WAYS.values():
        assert_same_model(through(model), model)


@pytest.mark.parametrize("kind", [sx.Variable, sx.Param, sx.OptState, Custom])
def test_variables_of_all_forms_come_out_the_same(kind: Any, through: Any) -> None:
    variable = kind({"m": jnp.ones((2, 3), jnp.bfloat16), "n": np.int32(3)}, tag="slow")
    for form in (variable, variable.freeze()):
        twin = through(form)
        assert (type(twin), dict(twin.metadata)) == (type(form), {"tag": "slow"})
        assert_equal_values(twin.value, form.value)
    assert through(variable.freeze()) == variable.freeze()


def test_abstract_model_comes_out_the_same(through: Any, auto_mesh: Any) -> None:
    model = sx.abstract(LAYERS["Linear"](), auto_mesh, RULES)
    twin = through(model)
    assert sx.graphdef(twin) == sx.graphdef(model)
    assert twin.kernel.value.sharding == model.kernel.value.sharding


def test_states_structures_and_unbound_trees_round_trip(through: Any) -> None:
    model = LAYERS["MLP"]()
    graphdef, state = sx.split(model)
    assert through(graphdef) == graphdef
    assert list(through(state).flat()) == list(state.flat())
    assert through(state).origins() == state.origins()
    assert_same_model(sx.merge(*through((graphdef, state))), model)
    slots, values = through(sx.unbind(model, freeze=True))
    assert_same_model(sx.thaw(sx.bind(slots, values)), model)
    assert_same_model(sx.bind(*through(sx.unbind(model))), model)


def test_pickle_keeps_shared_what_is_shared_in_it(through: Any) -> None:
    weight = sx.Param(jnp.ones(2))
    first, second, state = through((Holder(w=weight), [weight], {"mesh": weight}))
    assert first.w is second[0] is state["mesh"]


def test_shared_array_is_written_once() -> None:
    array = jnp.arange(10000.0)
    for write in (pickle.dumps, cloudpickle.dumps, sx.host.dumps):
        once = len(write(sx.Param(array)))
        assert len(write([sx.Param(array), sx.State({"w": array}), sx.Cache(array)])) < 1.1 * once


def test_optimizer_goes_on_where_it_was() -> None:
    """Its transformation is made of closures, which have no name: they go by value."""

    def train(optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            grads = sx.grad(lambda m: (m(jnp.ones(4)) ** 2).sum())(optimizer.model)
            optimizer.update(grads)

    optimizer = sx.train.Optimizer(LAYERS["Linear"](), optax.adam(1e-2))
    train(optimizer, 2)
    for through in (WAYS["cloudpickle"], WAYS["dumps"], copy.deepcopy):
        twin = through(optimizer)
        assert_equal_values(sx.state(twin), sx.state(optimizer))
        train(twin, 1)
        reference = copy.deepcopy(optimizer)
        train(reference, 1)
        assert_equal_values(sx.state(twin), sx.state(reference))
    with pytest.raises(PickleWriteError, match=r"init_fn|transformation"):
        sx.host.dumps(optimizer, by_value=False)


def test_lazy_model_is_pickled_with_its_future_values() -> None:
    lazy, reference = LAYERS["Linear"](), LAYERS["Linear"]()
    twin = sx.host.loads(sx.host.dumps(lazy))
    assert not twin.kernel.is_lazy
    assert_equal_values(sx.state(twin), sx.state(reference))


def test_pickled_view_becomes_an_independent_layer(through: Any) -> None:
    whole = stack()
    kernel = np.asarray(whole[1].kernel)
    layer, variable = through((whole[1], whole[1].kernel))
    assert layer.kernel is variable
    layer.kernel[...] = jnp.zeros((4, 4))
    assert (np.asarray(whole[1].kernel) == kernel).all()


def test_copy_is_shallow_and_holds_arrays(auto_mesh: Any) -> None:
    array = jax.device_put(jnp.ones((4, 8)), NamedSharding(auto_mesh, P("data")))
    state = copy.copy(sx.State({"w": array}))
    box = copy.copy(sx.Partitioned(array, ("data", None)))
    assert state["w"] is array and box.value is array
    assert copy.copy(sx.named.wrap(array, "a", "b")).data is array


# --- layouts ---


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_layouts_come_out_the_same(kind: AxisType, through: Any) -> None:
    """The trap: pickle keeps the numbers of a sharded array and forgets the sharding."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    place = NamedSharding(mesh, P("data", "model"))
    array = jax.device_put(jnp.arange(32.0).reshape(4, 8), place)
    keys = jax.device_put(
        jax.random.split(jax.random.key(0, impl="rbg"), 8), NamedSharding(mesh, P("data"))
    )
    model = sx.shard(Placed(mesh, place), mesh, RULES)
    tree = {
        "model": model,
        "variable": sx.Variable({"m": array, "key": keys}),
        "frozen": sx.Param(array).freeze(),
        "state": sx.state(model),
        "named": sx.named.wrap(array, "a", "b"),
        "box": sx.Partitioned(array, ("data", "model"), mesh=mesh),
        "own": Box(array, ("data", "model")),
        "key": sx.Variable(keys),
    }
    twin = through(tree)
    assert twin["model"].kernel is twin["model"].tied
    assert (twin["model"].mesh, twin["model"].places) == (mesh, (place, place))
    assert twin["box"].mesh == mesh
    shardings = jax.tree.map(lambda leaf: leaf.sharding, jax.tree.leaves(tree))
    assert jax.tree.map(lambda leaf: leaf.sharding, jax.tree.leaves(twin)) == shardings
    assert_equal_values(jax.tree.leaves(twin), jax.tree.leaves(tree))


def test_meshes_and_shardings_come_out_the_same(through: Any) -> None:
    """The trap: pickle cannot write a mesh, since it cannot write a device."""
    devices = np.array(jax.devices())[::-1].reshape(4, 2)
    mesh = jax.sharding.Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto, AxisType.Explicit))
    sharding = NamedSharding(mesh, P(("x", "y")), memory_kind="pinned_host")
    few = jax.make_mesh((2,), ("x",), devices=jax.devices()[6:])
    layout = sx.StateSharding({sx.Param: sharding, ...: None})
    tree = [mesh, sharding, few, mesh.abstract_mesh, layout, sx.Rules({"embed": "data"})]
    assert through(tree) == tree


def test_weak_types_come_out_the_same(through: Any, auto_mesh: Any) -> None:
    """A strong scalar in place of a weak one would change the dtype of what it is multiplied by."""
    weak = jax.device_put(jnp.asarray(2.0), NamedSharding(auto_mesh, P()))
    model = Holder(
        weak=sx.Variable(weak), here=sx.Variable(jnp.asarray(2.0)), strong=sx.Variable(2.0)
    )
    twin = through(model)
    found = [v.value.weak_type for v in (twin.weak, twin.here, twin.strong)]
    assert found == [True, True, False]
    assert twin.weak.sharding == weak.sharding


def test_arrays_beside_models_keep_their_layout_through_dumps(auto_mesh: Any) -> None:
    array = jax.device_put(jnp.ones((4, 8)), NamedSharding(auto_mesh, P("data")))
    other = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    twin, place = WAYS["dumps"]((array, other))
    assert (twin.sharding, place) == (array.sharding, other)


# --- what cannot be written ---


def test_unpicklable_entry_is_named_by_path() -> None:
    """The traps: compiled programs, tracers, deleted arrays, closures without cloudpickle."""
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    with pytest.raises(PickleWriteError, match=r"\.layers\[1\]\.program") as caught:
        sx.host.dumps({"layers": [1, Holder(program=compiled)]})
    assert "checkpoint.save" in str(caught.value)
    deep = Holder(inner=[Holder(act=(len, lambda x: x))])
    with pytest.raises(PickleWriteError, match=r"at \.inner\[0\]\.act: .*lambda"):
        sx.host.dumps(deep, by_value=False)
    assert sx.host.loads(sx.host.dumps(deep)).inner[0].act[1](3) == 3

    donated = Holder(w=sx.Param(jnp.ones(3)))
    donated.w.value.delete()
    with pytest.raises(PickleWriteError, match=r"\.w: .*deleted"):
        sx.host.dumps(donated)

    def traced(x: Any) -> Any:
        with pytest.raises(PickleWriteError, match=r"\.x: .*traced"):
            sx.host.dumps({"x": sx.Param(x)})
        with pytest.raises(PickleWriteError, match="traced"):
            pickle.dumps(sx.Param(x))
        return x

    jax.jit(traced)(1.0)


def test_reading_while_something_is_traced_gives_arrays() -> None:
    data = sx.host.dumps(sx.Param(jnp.ones(3)))
    found: list[Any] = []

    def f(x: Any) -> Any:
        found.append(sx.host.loads(data))
        return x + found[0][...]

    assert jax.jit(f)(1.0).tolist() == [2.0, 2.0, 2.0]
    assert found[0].value.tolist() == [1.0, 1.0, 1.0]


# --- functions ---


@pytest.mark.parametrize("name", ["compiled", "ruled", "jax_ruled", "mapped", "hosted"])
def test_decorated_functions_go_by_name(name: str, through: Any) -> None:
    """The trap: what is inside has the name, too, so pickle says it is not the same object."""
    decorated = getattr(pickled, name)
    assert through(decorated) is decorated
    assert through(Holder(act=(decorated, jax.nn.relu))).act == (decorated, jax.nn.relu)


@pytest.mark.parametrize("custom_vjp", [sx.custom_vjp, jax.custom_vjp])
@pytest.mark.parametrize("way", ["cloudpickle", "dumps", "deepcopy"])
def test_functions_with_custom_rules_pickle_by_value(custom_vjp: Any, way: str) -> None:
    """The trap: jax.custom_vjp of a closure can be written, and fails when it is read."""
    scale = 2.0

    @custom_vjp
    def double(x: Any) -> Any:
        return scale * x

    double.defvjp(lambda x: (double(x), None), lambda _, g: (5 * g,))
    twin = WAYS[way](double)
    assert (float(twin(3.0)), float(jax.grad(twin)(3.0))) == (6.0, 5.0)


def test_closures_work_by_value_and_bring_their_arrays() -> None:
    weight = sx.Param(jnp.ones(3))
    forward = WAYS["dumps"](sx.jit(lambda x: (weight * x).sum()))
    assert float(forward(jnp.arange(3.0))) == 3.0
    assert (
        float(WAYS["dumps"](jax.jit(jax.grad(lambda x: (weight[...] * x).sum())))(weight[...])[0])
        == 1
    )


def test_classes_of_a_function_work_by_value() -> None:
    class Local(sx.Module):
        def __init__(self) -> None:
            self.w = LocalParam(jnp.ones(2))

    class LocalParam(sx.Param):
        pass

    model = Local()
    assert_same_model(WAYS["dumps"](model), model)
    with pytest.raises(PickleWriteError, match="Local"):
        sx.host.dumps(model, by_value=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"donate_argnums": 0},
        {"static_argnums": 1, "keep_unused": True},
        {"static_argnames": "times", "donate_argnames": "x"},
    ],
)
def test_function_of_jax_jit_keeps_its_options(options: dict[str, Any]) -> None:
    def repeated(x: jax.Array, times: int) -> jax.Array:
        return x * times

    jitted = jax.jit(repeated, **options)
    again = sx.host.loads(sx.host.dumps(jitted))
    x = jnp.ones(4)
    before, after = (each.trace(x, 3).lower() for each in (jitted, again))
    assert after.args_info == before.args_info
    assert again(x, 3).tolist() == [3.0] * 4


def test_jitted_function_pickles_without_its_caches() -> None:
    scale = sx.jit(lambda x, times: x * times, static_argnums=1, donate_argnums=0)
    scale(jnp.ones(4), 2)
    again = sx.host.loads(sx.host.dumps(scale))
    assert (again.options, len(again.specializations)) == (scale.options, 0)
    assert again(jnp.ones(4), 3).tolist() == [3.0] * 4
