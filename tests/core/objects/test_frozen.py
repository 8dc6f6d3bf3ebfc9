# SPDX-License-Identifier: Apache-2.0
"""Frozen values and slots: what they hold, what they refuse, and what they are inside a model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import (
    CheckpointError,
    MetadataError,
    ModuleAttributeError,
    StateMismatchError,
    StaticAttributeError,
)
from tests.advice import run_advice
from tests.structure import structure_epoch


class Tied(sx.Module):
    """A model with a shared weight, an array attribute, a stream, state, and containers."""

    def __init__(self, seed: Any = 0) -> None:
        rngs = sx.Rngs(seed)
        init = sx.Init(jax.nn.initializers.normal(), (4, 3), rngs=rngs)
        self.embed = sx.Param(init, axes=("vocab", "embed"), tag="table")
        self.head = self.embed
        self.scale = jnp.ones(3)
        self.counts = (sx.BatchStat(jnp.zeros(())), "words")
        self.layers = [sx.nn.Linear(3, 3, rngs=rngs), sx.nn.Dropout(0.5, rngs=rngs)]

    def __call__(self, words: Any) -> Any:
        self.counts[0][...] = self.counts[0] + words.size
        x = self.embed[...][words] * self.scale[None]
        for layer in self.layers:
            x = layer(x)
        return x @ self.head[...].T


WORDS = jnp.array([0, 3])


# --- frozen values ---


def test_frozen_value_keeps_value_type_axes_and_metadata() -> None:
    w = sx.Param(jnp.zeros(2), axes=("embed",), tag="slow")
    frozen = w.freeze()
    w[...] = jnp.ones(2)
    w.set_metadata(axes=("mlp",), tag="fast")
    assert frozen.value.tolist() == [0.0, 0.0]
    assert (frozen.variable_type, frozen.axes) == (sx.Param, ("embed",))
    assert dict(frozen.metadata) == {"tag": "slow"}
    thawed = frozen.thaw()
    assert type(thawed) is sx.Param and thawed.axes == ("embed",)
    assert dict(thawed.metadata) == {"tag": "slow"}


@pytest.mark.parametrize(
    "value",
    [jnp.arange(3.0), np.arange(3), {"a": jnp.ones(2), "b": (jnp.zeros(()),)}, jax.random.key(0)],
    ids=["array", "numpy", "pytree", "key"],
)
def test_thaw_creates_new_variable_of_equal_value(value: Any) -> None:
    w = sx.Cache(value)
    thawed = w.freeze().thaw()
    assert thawed is not w
    assert thawed.freeze() == w.freeze()


def test_frozen_pytree_does_not_follow_its_variables() -> None:
    held = {"a": jnp.ones(2)}
    w = sx.Variable(held)
    frozen = w.freeze()
    w["a"] = jnp.zeros(2)
    held["b"] = jnp.ones(1)
    assert list(frozen.value) == ["a"] and frozen.value["a"].tolist() == [1.0, 1.0]


def test_writing_frozen_value_is_refused_naming_its_label() -> None:
    layer = sx.nn.Linear(2, 3, use_bias=False, rngs=sx.Rngs(0))
    slots, values = sx.unbind(layer, freeze=True)
    (frozen,) = values

    def write_whole() -> None:
        frozen.value = jnp.ones((2, 3))

    def write_at() -> None:
        frozen[0] = 1.0

    def add() -> None:
        value = frozen
        value += 1

    before = frozen.value
    for write in (write_whole, write_at, add, lambda: frozen.set_metadata(axes=None)):
        with pytest.raises(ModuleAttributeError, match=r"Param .*\.kernel") as caught:
            write()
    assert frozen.value is before
    names = {"sx": sx, "model": sx.freeze(layer), "slots": slots, "frozen": values}
    run_advice(caught.value, "sx.thaw(model)", names).kernel[...] = 0.0
    run_advice(
        caught.value,
        "result, frozen = sx.stateless_call(slots, frozen, ...)",
        names | {"rest": jnp.ones(2)},
    )
    assert isinstance(ModuleAttributeError(), AttributeError)


def test_equality_compares_type_label_metadata_and_every_number() -> None:
    w = sx.Param(jnp.array([1.0, jnp.nan]), axes=("embed",))
    same = [w.freeze(), copy.deepcopy(w).freeze(), pickle.loads(pickle.dumps(w.freeze()))]
    assert all((one == other) is True and (one != other) is False for one in same for other in same)
    assert len({hash(one) for one in same}) == 1 and len(set(same)) == 1
    others = [
        sx.Cache(w, axes=("embed",)),
        sx.Param(w, axes=("mlp",)),
        sx.Param(w, axes=("embed",), tag="a"),
        sx.Param(jnp.array([1.0, 2.0]), axes=("embed",)),
        sx.Param(jnp.ones(3), axes=("embed",)),
        sx.Param(jnp.ones(2, jnp.bfloat16), axes=("embed",)),
        sx.Param({"a": jnp.ones(2)}),
    ]
    assert [w.freeze() == other.freeze() for other in others] == [False] * len(others)
    moved = sx.FrozenVariable(w, sx.Param, label=("b",), axes=("embed",))
    assert (moved == w.freeze()) is False


def test_equality_never_raises_where_numbers_are_not_known() -> None:
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    abstract, donated = sx.Param(shape).freeze(), sx.Param(jnp.ones(2)).freeze()
    lazy = sx.Param(sx.Init(jax.nn.initializers.ones, (2,))).freeze()
    assert (abstract == sx.Param(shape).freeze()) is True
    assert (abstract == donated) is False and (lazy == donated) is True
    donated.value.delete()
    assert (donated == sx.Param(jnp.ones(2)).freeze()) is False

    @jax.jit
    def compare(one: Any, other: Any) -> Any:
        assert (one == other) is False and (one == one) is True
        return one

    assert compare(lazy, lazy) == lazy


def test_frozen_value_compares_as_its_array() -> None:
    frozen = sx.Param(jnp.arange(3.0)).freeze()
    assert (frozen == 1).tolist() == [False, True, False]
    assert (frozen == sx.Param(jnp.arange(3.0))).tolist() == [True, True, True]
    assert (frozen != jnp.zeros(3)).tolist() == [False, True, True]


def test_array_metadata_is_refused_at_creation() -> None:
    with pytest.raises(MetadataError):
        sx.FrozenVariable(jnp.ones(2), sx.Param, scale=jnp.ones(2))


def test_frozen_value_is_pytree_of_its_value() -> None:
    frozen = sx.Param(jnp.ones(2), axes=("embed",)).freeze()
    doubled = jax.tree.map(lambda x: 2 * x, frozen)
    assert type(doubled) is sx.FrozenVariable and doubled.value.tolist() == [2.0, 2.0]
    assert (doubled.variable_type, doubled.axes) == (sx.Param, ("embed",))
    assert jax.tree.structure(doubled) == jax.tree.structure(frozen)
    gradient = jax.grad(lambda w: (w**2).sum())(frozen)
    assert gradient == jax.tree.map(lambda x: 2 * x, frozen)


def test_new_frozen_values_do_not_trace_anew() -> None:
    traces = []

    @jax.jit
    def read(values: Any) -> Any:
        traces.append(1)
        return sum(value.sum() for value in values)

    for seed in range(4):
        read(sx.unbind(Tied(seed), sx.Param, freeze=True)[1])
    assert len(traces) == 1


def test_user_defined_types_have_all_forms() -> None:
    class Bias(sx.Param):
        pass

    slots, (frozen,) = sx.unbind([Bias(jnp.ones(2))], freeze=True)
    assert slots == [sx.Slot((0,), Bias)] and frozen.variable_type is Bias
    assert type(sx.thaw(sx.bind(slots, frozen))[0]) is Bias


# --- slots ---


def test_reading_a_slot_is_refused_naming_its_label() -> None:
    slot = sx.unbind(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)))[0].kernel
    reads = [
        lambda: slot.value,
        lambda: slot[...],
        lambda: slot.shape,
        lambda: slot + 1,
        lambda: jnp.ones((1, 2)) @ slot,
        lambda: jnp.sum(slot),
        lambda: np.asarray(slot),
        lambda: float(slot),
        lambda: setattr(slot, "value", 1),
        lambda: slot.__setitem__(0, 1),
    ]
    for read in reads:
        with pytest.raises(ModuleAttributeError, match=r"Param .*\.kernel.*sx\.bind"):
            read()
    assert not hasattr(slot, "shape")


def test_calling_unbound_model_names_the_missing_variable() -> None:
    slots, variables = sx.unbind(Tied())
    with pytest.raises(ModuleAttributeError, match=r"BatchStat .*\.counts\[0\]") as caught:
        slots(WORDS)
    names = {"sx": sx, "model": slots, "frozen": sx.freeze(variables), "rest": WORDS}
    pure, _ = run_advice(caught.value, "sx.stateless_call(model, frozen, ...)", dict(names))
    names |= {"variables": variables}
    run_advice(caught.value, "model = sx.bind(model, variables)", names)
    np.testing.assert_array_equal(names["model"](WORDS), pure)


def test_freezing_again_keeps_the_frozen_values() -> None:
    model = sx.freeze(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), sx.PathContains("bias"))
    again = sx.freeze(model)
    assert again.bias is model.bias and again.kernel.label == ("kernel",)


def test_slots_compare_by_type_and_label_without_leaves() -> None:
    slot = sx.Slot(("a", 0), sx.Param)
    assert slot == sx.Slot(("a", 0), sx.Param) and hash(slot) == hash(sx.Slot(("a", 0), sx.Param))
    assert slot != sx.Slot(("a", 0), sx.Cache) and slot != sx.Slot(("a", 1), sx.Param)
    assert slot != sx.Slot(("a", False), sx.Param) and slot != jnp.ones(2).tolist()
    assert jax.tree.leaves([slot]) == [] and copy.deepcopy(slot) is slot
    assert pickle.loads(pickle.dumps(slot)) == slot
    assert copy.copy(slot) is slot
    assert jax.jit(lambda pair: pair)((slot, 1))[0] == slot


def test_array_over_slot_or_frozen_value_is_refused() -> None:
    slots, variables = sx.unbind(Tied())
    for tree in (slots, sx.freeze(Tied())):
        with pytest.raises(StaticAttributeError, match=r"'embed'.*sx\.Param") as caught:
            tree.embed = jnp.ones((4, 3))
        thaws = tree is not slots
        names = {"sx": sx, "model": tree, "variables": variables}
        code = "sx.thaw(model)" if thaws else "sx.bind(model, variables)"
        run_advice(caught.value, code, names).embed[...] = jnp.ones((4, 3))
        tree.embed = run_advice(
            caught.value, "sx.Param(array)", {"sx": sx, "array": jnp.ones((4, 3))}
        )
        tree.scale = jnp.zeros(3)  # an array for an array
        assert tree.scale.tolist() == [0.0, 0.0, 0.0]


# --- in a model ---


def test_model_of_slots_has_only_structure() -> None:
    slots, _ = sx.unbind(Tied(0))
    assert sx.graphdef(slots) == sx.graphdef(sx.unbind(Tied(1))[0])
    assert list(sx.iter_variables(slots)) == []
    assert repr(sx.state(slots)) == "State()"


def test_frozen_model_shows_arrays_and_computes_equally() -> None:
    model = Tied()
    model.layers[1].deterministic = True
    frozen = sx.freeze(model, sx.Param, "array", lambda path, v: path == ("scale",))
    assert isinstance(frozen.scale, jax.Array)
    assert np.array_equal(frozen(WORDS), model(WORDS))
    assert int(frozen.counts[0]) == 4  # what is not frozen is the model's own


def test_shared_frozen_value_has_one_leaf_and_gradient() -> None:
    model = sx.freeze(Tied())
    assert model.embed is model.head
    assert sx.find_duplicates(model) == [[("embed",), ("head",)]]

    def loss(model: Any) -> Any:
        return (model.embed.value.sum() + 2 * model.head.value.sum()) * 1.0

    gradient = sx.grad(loss, wrt=sx.Frozen("table"))(model)
    assert {path: g[0, 0].tolist() for path, g in gradient.flat().items()} == {("embed",): 3.0}
    params_only = sx.unbind(sx.unbind(model, sx.Frozen(sx.Param))[0])[0]
    _, params = sx.unbind(model, sx.Frozen(sx.Param))
    plain = jax.grad(lambda params: loss(sx.bind(params_only, params, allow_unused=True)))(params)
    assert [g.value.ravel()[0].tolist() for g in plain if g.label == ("embed",)] == [3.0]


def test_filters_treat_frozen_values_as_not_trainable() -> None:
    model = sx.freeze(Tied(), sx.PathContains("layers"))
    paths = [path for path, _ in sx.iter_variables(model, sx.Param)]
    assert paths == [("embed",)]
    frozen = [path for path, _ in sx.iter_variables(model, sx.Frozen(sx.Param))]
    assert frozen == [("layers", 0, "kernel"), ("layers", 0, "bias")]
    assert list(sx.state(model).filter(sx.Frozen(sx.Param)).flat()) == frozen
    everything = len(list(sx.iter_variables(model)))
    assert everything == len(list(sx.iter_variables(model, sx.Variable))) == 7
    assert sx.Frozen(sx.Param) == sx.Frozen(sx.Param) != sx.Frozen()


def test_state_cannot_be_written_into_a_frozen_model() -> None:
    model = sx.freeze(sx.nn.Linear(2, 3, rngs=sx.Rngs(0)), sx.PathContains("kernel"))
    bias = model.bias.value
    with pytest.raises(StateMismatchError, match=r"\.kernel"):
        sx.update(model, {"bias": jnp.ones(3), "kernel": jnp.ones((2, 3))})
    assert model.bias.value is bias
    sx.update(model, {"bias": jnp.ones(3)})
    assert model.bias.value.tolist() == [1.0, 1.0, 1.0]


def test_write_inside_compiled_function_is_refused_without_effect() -> None:
    model = sx.freeze(Tied(), sx.BatchStat)
    count = model.layers[1].stream.count.value
    with pytest.raises(ModuleAttributeError, match=r"\.counts\[0\]"):
        sx.jit(model)(WORDS)
    assert int(model.counts[0]) == 0
    assert model.layers[1].stream.count.value is count


def test_compiled_functions_take_return_and_donate_frozen_models() -> None:
    model = sx.freeze(Tied())

    @sx.jit(donate_argnums=0)
    def total(model: Any) -> tuple[Any, Any]:
        return model.embed.sum() + model.scale.sum(), model

    expected = float(model.embed.sum()) + 3
    for _ in range(2):
        result, same = total(model)
        assert float(result) == pytest.approx(expected) and same is model
    traces = []
    read = sx.jit(lambda model: traces.append(1) or model.embed.sum())
    for seed in range(3):
        read(sx.freeze(Tied(seed)))
    assert len(traces) == 1


def test_captured_frozen_value_is_never_a_stale_constant() -> None:
    held = sx.Param(jnp.ones(2)).freeze()
    read = sx.jit(lambda: held.sum())
    assert float(read()) == 2.0
    held = sx.Param(jnp.zeros(2)).freeze()
    assert float(read()) == 0.0


def test_mapped_transforms_keep_axes_of_frozen_values_correct() -> None:
    stacked = sx.vmap(
        lambda seed: sx.nn.Linear(2, 3, rngs=sx.Rngs(seed)),
        metadata={sx.partition.PARTITION_NAME: "layers"},
    )(jnp.arange(4))
    frozen = sx.freeze(stacked)
    assert frozen.kernel.axes == ("layers", "in", "out")
    seen = []

    def look(layer: Any, x: Any) -> Any:
        seen.append((layer.kernel.axes, layer.kernel.shape, layer.kernel.label))
        return layer(x)

    result = sx.vmap(look, in_axes=(0, None))(frozen, jnp.ones((1, 2)))
    assert result.shape == (4, 1, 3) and seen == [(("in", "out"), (2, 3), ("kernel",))]


def test_shardings_of_frozen_values_follow_their_axes(auto_mesh: Any) -> None:
    rules = [("vocab", "model"), ("embed", None), ("in", None), ("out", None)]
    model = Tied()
    live = sx.partition_specs(model, rules)
    frozen = sx.freeze(model)
    assert sx.partition_specs(frozen, rules).flat() == live.flat()
    slots, values = sx.unbind(model, sx.Param, freeze=True)
    specs = sx.partition_specs(values, rules)
    assert list(specs) == [live.flat()[value.label] for value in values]
    sx.shard(frozen, auto_mesh, rules)
    assert frozen.embed.sharding.spec == jax.sharding.PartitionSpec("model", None)
    assert sx.bind(slots, sx.shard(values, auto_mesh, rules)).embed.sharding.spec[0] == "model"


def test_pictures_tell_the_forms_apart() -> None:
    layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))
    half = sx.freeze(sx.unbind(layer, sx.PathContains("bias"))[0])
    assert repr(half) == (
        "Linear(  # 6 parameters\n"
        "  kernel=FrozenVariable(float32[2, 3], lazy, Param .kernel, axes=('in', 'out')),\n"
        "  bias=Slot(Param, .bias),\n"
        "  in_features=2,\n"
        "  out_features=3,\n"
        "  dtype=None,\n"
        ")"
    )


def test_frozen_model_can_be_saved_but_not_restored(tmp_path: Any) -> None:
    model, other = Tied(), Tied(1)
    sx.train.checkpoint.save(sx.freeze(model), tmp_path / "step")
    sx.train.checkpoint.restore(other, tmp_path / "step")
    assert np.array_equal(other.embed.value, model.embed.value)
    half = sx.freeze(Tied(2), sx.PathContains("bias"))
    before = half.embed.value
    with pytest.raises(CheckpointError, match=r"frozen(.|\n)*\.layers\[0\]\.bias"):
        sx.train.checkpoint.restore(half, tmp_path / "step")
    assert half.embed.value is before


def test_freeze_and_thaw_neither_restructure_nor_compute() -> None:
    model = Tied()
    sx.graphdef(model)
    before = structure_epoch()
    thawed = sx.thaw(sx.freeze(model))
    assert structure_epoch() == before
    assert thawed.embed.is_lazy and model.embed.is_lazy
    assert np.array_equal(thawed.embed.value, model.embed.value)
