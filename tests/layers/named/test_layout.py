# SPDX-License-Identifier: Apache-2.0
"""Named arrays are laid out by their names: by rules as Variables are, or by a mapping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import named
from shardax.named import NamedArray, wrap, zeros
from tests.layers.named.arrays import assert_same, unwrapped
from tests.values import with_values


class Model(sx.Module):
    """A model with names in all places: axes of Variables, a named array, several in a pytree."""

    def __init__(self):
        self.linear = named.Linear({"embed": 8}, {"mlp": 4}, rngs=sx.Rngs(0))
        self.weight = sx.Param(numbers())
        self.pair = sx.Variable({"named": numbers(), "plain": jnp.ones(2)})


def numbers():
    """Stored neither in canonical order nor with its positional dimension first."""
    data = np.arange(96, dtype=np.float32).reshape(4, 3, 8)
    return NamedArray(jnp.asarray(data), ("mlp", None, "embed"))


MAPPING = {"embed": "model", "mlp": "data"}
SPEC = P(None, "model", "data")


def test_named_array_is_placed_by_its_names(mesh):
    for placed in (named.shard(numbers(), MAPPING, mesh), sx.shard(numbers(), mesh, MAPPING)):
        assert placed.dims == (None, "embed", "mlp")
        assert placed.sharding == NamedSharding(mesh, SPEC)
        assert_same_numbers(placed)


def assert_same_numbers(array):
    expected = unwrapped(numbers(), "mlp", "embed")
    np.testing.assert_array_equal(unwrapped(array, "mlp", "embed"), expected)


def test_model_is_placed_in_place_by_mapping(mesh):
    model = Model()
    assert named.shard(model, MAPPING, mesh) is model
    assert model.weight.sharding.spec == model.pair.value["named"].sharding.spec == SPEC
    assert model.pair.value["plain"].sharding.spec == P()
    assert model.linear.kernel.sharding.spec == P("model", "data")
    assert_same_numbers(model.weight.value)
    by_rules = sx.shard(Model(), mesh, MAPPING)
    assert [v.sharding for _, v in sx.iter_variables(by_rules.linear)] == [
        v.sharding for _, v in sx.iter_variables(model.linear)
    ]


def test_empty_mapping_gathers_and_unshard_too(mesh):
    placed = named.shard({"x": numbers(), "plain": jnp.ones(3)}, MAPPING, mesh)
    assert named.shard(placed, {}, mesh)["x"].sharding.spec == P(None, None, None)
    assert sx.unshard(placed)["x"].sharding.device_set == {jax.devices()[0]}


def test_specs_shardings_and_abstract_copies_know_the_names(mesh):
    model = Model()
    specs = sx.partition_specs(model, MAPPING)
    assert (specs["weight"].data, specs["linear"]["kernel"]) == (SPEC, P("model", "data"))
    assert sx.shardings(numbers(), mesh, MAPPING).data == NamedSharding(mesh, SPEC)
    copy = sx.abstract(model, mesh, MAPPING).weight.value
    assert (copy.axes, copy.sharding.spec) == (numbers().axes, SPEC)
    assert [f.code for f in sx.check(named.shard(model, MAPPING, mesh), mesh, MAPPING)] == []


def test_state_of_the_optimizer_follows_a_named_parameter(mesh):
    model = Model()
    with_values(model.linear)
    sx.shard(model, mesh, MAPPING)
    optimizer = sx.train.Optimizer(model, optax.adam(1e-3))

    @sx.jit
    def step(model, optimizer):
        optimizer.update(sx.grad(lambda m: m.weight.value.sum(["mlp", "embed", 0]).unwrap())(model))

    with jax.set_mesh(mesh):
        step(model, optimizer)
    moments = [v for path, v in sx.iter_variables(optimizer, sx.OptState) if "weight" in path]
    assert [moment.sharding.spec for moment in moments] == [SPEC, SPEC]


def test_functional_initialisers_write_into_their_shards(mesh):
    def initial(key):
        return {"w": named.normal(key, {"mlp": 4, "embed": 8}), "b": zeros({"mlp": 4})}

    made = sx.initialise(initial, jax.random.key(0), mesh=mesh, rules=MAPPING)
    assert (made["w"].sharding.spec, made["b"].sharding.spec) == (P("model", "data"), P("data"))
    assert_same_axes_and_close(made["w"], initial(jax.random.key(0))["w"])


def assert_same_axes_and_close(found, expected):
    assert found.axes == expected.axes
    np.testing.assert_allclose(found.unwrap(*found.axes), expected.unwrap(*found.axes), rtol=1e-6)


def test_names_that_are_not_strings_can_be_mapped(mesh):
    x = wrap(jnp.zeros((8, 2)), 3, ("layer", 0))
    assert named.shard(x, {3: "model", ("layer", 0): "data"}, mesh).sharding.spec == (
        P("model", "data")
    )


# --- inside programs ---


def test_constrain_lays_out_arrays_and_models(mesh):
    @jax.jit
    def double(x):
        return named.constrain({"x": 2 * x, "plain": jnp.ones(2)}, {"embed": "model"}, mesh)

    @sx.jit
    def constrained(model):
        assert named.constrain(model, MAPPING, mesh) is model

    model = Model()
    with jax.set_mesh(mesh):
        found = double(numbers())["x"]
        constrained(model)
    assert found.sharding.spec in (P(None, "model", None), P(None, "model"))
    assert_same_numbers(found / 2)
    assert model.weight.sharding.spec == SPEC
    assert model.linear.kernel.sharding.spec == P("model", "data")


def test_constraint_layers_are_inserted_and_removed_by_selections(auto_mesh):
    rngs = sx.Rngs(0)
    first = named.Linear({"embed": 8}, {"mlp": 16}, rngs=rngs)
    model = sx.nn.Sequential(first, named.Linear({"mlp": 16}, {"embed": 8}, rngs=rngs))
    layer = named.Constrain({"batch": "data", "mlp": "model"}, auto_mesh)
    edited = sx.select(model).at_instances_of(named.Linear).insert_after(layer)
    x = named.ones({"batch": 4, "embed": 8})
    assert [type(each).__name__ for each in edited.layers] == ["Linear", "Constrain"] * 2
    assert jax.jit(edited)(x).sharding.spec in (P("data"), P("data", None))
    np.testing.assert_allclose(edited(x).data, model(x).data, rtol=1e-5)
    removed = sx.select(edited).at_instances_of(named.Constrain).remove()
    assert len(removed.layers) == 2
    assert removed.layers[0] is first


def test_layers_work_over_explicit_axes_and_in_scan(explicit_mesh):
    x = named.ones({"batch": 4, "time": 3, "embed": 8})
    x = named.shard(x, {"batch": "data"}, explicit_mesh)
    layer = sx.shard(named.Linear({"embed": 8}, {"embed": 8}, rngs=sx.Rngs(0)), explicit_mesh, {})
    with jax.set_mesh(explicit_mesh):
        last, _ = named.scan(lambda c, v: (layer(c) + v, None), "time", x[{"time": 0}], x)
    assert last.axes == {"batch": 4, "embed": 8}
    assert last.sharding.mesh.axis_types == (AxisType.Explicit,) * 2


def test_nmap_runs_along_names_split_explicitly(explicit_mesh):
    whole = named.ones({"batch": 4, "embed": 8})
    split = named.shard(whole, {"batch": "data"}, explicit_mesh)
    other = named.shard(whole, {"batch": "model"}, explicit_mesh)
    with jax.set_mesh(explicit_mesh):
        add = named.nmap(jnp.add)
        for found in (add(split, whole), jax.jit(add)(whole, split)):
            assert found.sharding.spec == P("data", None)
            assert_same_axes_and_close(found, whole + whole)
        with pytest.raises(sx.errors.TransformError, match=r"'batch'.*'data'.*'model'"):
            add(split, other)


# --- errors ---


@pytest.mark.parametrize("function", [named.shard, named.constrain])
def test_unused_name_is_reported_unless_allowed(function, auto_mesh):
    x = numbers()
    with pytest.raises(sx.errors.NamedAxesError, match=r"'embd'.*'embed', 'mlp'.*Did you mean"):
        function(x, {"embd": "model"}, auto_mesh)
    assert_same_numbers(function(x, {"embd": "model"}, auto_mesh, allow_unused=True))
    with pytest.raises(sx.errors.NamedAxesError, match="'batch'"):
        function(Model(), {"batch": "data"}, auto_mesh)


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"embed": "modl"}, r"\.weight: .*'embed'.*'modl'.*Did you mean 'model'"),
        ({"embed": "model", "mlp": "model"}, r"\.weight: .*'model' is wanted by"),
        ({"mlp": ("data", "model")}, r"\.weight: .*'mlp'.*size 4.*not divisible by 8"),
    ],
)
def test_impossible_placement_names_path_and_moves_nothing(mapping, text, auto_mesh):
    model = Model()
    before = model.weight.sharding
    with pytest.raises(sx.errors.PartitionCheckError, match=text):
        named.shard(model, mapping, auto_mesh)
    assert model.weight.sharding == before
    assert model.linear.kernel.is_lazy


def test_axes_beside_a_named_value_are_refused():
    with pytest.raises(sx.errors.MetadataError, match="NamedArray"):
        sx.Param(numbers(), axes=("mlp", None, "embed"))


def test_variables_are_written_by_named_index():
    weight = sx.Param(zeros({"a": 2, "b": 3}))
    weight[{"a": 1}] = 5
    assert_same(weight.value, zeros({"a": 2, "b": 3}).at[{"a": 1}].set(5))
