# SPDX-License-Identifier: Apache-2.0
"""Taking Variables out and putting them in: labels, conflicts, pytrees, compiled initialisers."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import FilterError, ModuleError
from tests.advice import run_advice
from tests.core.objects.elsewhere import in_another_process


class Pair(NamedTuple):
    """A pytree of the user's own."""

    first: Any
    second: Any


class Head(sx.Module):
    """A Module that holds what it is given."""

    def __init__(self, weight: Any, *others: Any) -> None:
        self.weight = weight
        self.others = others

    def __call__(self, x: Any) -> Any:
        return self.weight * x

    def scaled(self, x: Any, by: Any) -> Any:
        return self(x) * by


def linear(seed: Any = 0) -> sx.nn.Linear:
    return sx.nn.Linear(2, 3, rngs=sx.Rngs(seed))


# --- what unbind returns ---


def test_unbind_returns_slots_and_variables_in_order() -> None:
    shared = sx.Param(jnp.ones(2))
    model = Head(shared, sx.Cache(jnp.zeros(1)), shared, "static", 1)
    slots, variables = sx.unbind(model)
    assert repr(slots) == (
        "Head(\n"
        "  weight=Slot(Param, .weight),\n"
        "  others=tuple(\n"
        "    Slot(Cache, .others[0]),\n"
        "    Slot(Param, .weight),\n"
        "    'static',\n"
        "    1,\n"
        "  ),\n"
        ")"
    )
    assert [id(v) for v in variables] == [id(shared), id(model.others[0])]
    assert model.weight is shared


def test_filters_select_variables_and_share_the_rest() -> None:
    model = Head(sx.Param(jnp.ones(2)), sx.BatchStat(jnp.zeros(1), tag="slow"))
    for chosen in (sx.Param, sx.Not("slow"), lambda path, v: path == ("weight",), [sx.Param]):
        slots, variables = sx.unbind(model, chosen)
        assert [id(v) for v in variables] == [id(model.weight)]
        assert slots.others[0] is model.others[0]
    assert len(sx.unbind(model, sx.Param, "slow")[1]) == 2
    with pytest.raises(FilterError):
        sx.unbind(model, ..., sx.Param)


def test_any_pytree_of_modules_and_variables_unbinds() -> None:
    shared = sx.Param(jnp.ones(2))
    method, partial = Head(shared).scaled, functools.partial(linear(1))
    tree = {
        "b": [linear(), shared],
        "a": Pair(Head(shared), 3.0),
        "m": method,
        "p": partial,
        "n": None,
    }
    slots, frozen = sx.unbind(tree, freeze=True)
    assert [value.label for value in frozen] == [
        ("a", "first", "weight"),
        ("b", 0, "kernel"),
        ("b", 0, "bias"),
        ("p", "kernel"),
        ("p", "bias"),
    ]
    assert slots["b"][1] == slots["a"].first.weight == sx.Slot(("a", "first", "weight"), sx.Param)
    bound = sx.thaw(sx.bind(slots, frozen))
    assert bound["b"][1] is bound["a"].first.weight is bound["m"].__self__.weight
    assert bound["a"].second == 3.0 and bound["n"] is None
    assert bound["m"](jnp.ones(2), 3.0).tolist() == [3.0, 3.0]
    assert np.array_equal(bound["p"](jnp.ones((1, 2))), tree["p"](jnp.ones((1, 2))))


def test_variable_alone_is_a_tree() -> None:
    v = sx.Param(jnp.ones(2))
    slot, variables = sx.unbind(v)
    assert slot == sx.Slot((), sx.Param) and variables[0] is v and sx.bind(slot, variables) is v


# --- labels ---


def test_labels_are_the_same_in_every_process() -> None:
    slots, frozen = in_another_process()["unbound"]
    mine, values = sx.unbind(sx.nn.MLP(2, 4, rngs=sx.Rngs(0)), freeze=True)
    assert sx.graphdef(slots) == sx.graphdef(mine) and hash(frozen) == hash(values)
    assert frozen == values
    assert sx.bind(mine, frozen).up.kernel.value.shape == (2, 4)


def test_copies_of_one_model_have_distinct_labels() -> None:
    model = linear()
    tree = {"student": model, "teacher": copy.deepcopy(model)}
    slots, variables = sx.unbind(tree)
    assert slots["student"].kernel.label == ("student", "kernel")
    assert sx.bind(slots, variables[::-1])["teacher"].kernel is tree["teacher"].kernel


def test_separately_unbound_equal_parts_claim_one_label() -> None:
    model = Head(sx.Param(jnp.ones(2)), sx.unbind(Head(sx.Cache(jnp.ones(1))))[0])
    with pytest.raises(ModuleError, match=r"\.weight: a slot at \.others\[0\]") as caught:
        sx.unbind(model)
    tree = Head(sx.Param(jnp.ones(2)), Head(sx.Cache(jnp.ones(1))))  # the parts not taken out
    slots, variables = run_advice(caught.value, "sx.unbind(tree)", {"sx": sx, "tree": tree})
    assert sx.bind(slots, variables).others[0].weight is tree.others[0].weight
    slots = [sx.unbind(Head(kind(jnp.ones(1))))[0] for kind in (sx.Param, sx.Cache)]
    with pytest.raises(ModuleError, match=r"\[0\]\.weight.*\[1\]\.weight"):
        sx.bind(slots, ())


def test_conflicting_values_for_one_label_are_refused() -> None:
    slots, (weight,) = sx.unbind(Head(sx.Param(jnp.ones(2))), freeze=True)
    other = jax.tree.map(lambda x: 2 * x, weight)
    with pytest.raises(ModuleError, match=r"\.weight: variables\.a\[0\], and variables\.b"):
        sx.bind(slots, {"a": [weight], "b": other})
    same = pickle.loads(pickle.dumps(weight))
    assert sx.bind(slots, [weight, same]).weight is weight


def test_variable_unbound_from_two_trees_binds_to_both() -> None:
    v = sx.Param(jnp.ones(2))
    first, (same,) = sx.unbind(Head(v))
    second, _ = sx.unbind([Head(v)])
    assert sx.bind(first, [v]).weight is sx.bind(second, [same])[0].weight is v
    both = (first, second)
    with pytest.raises(ModuleError, match=r"\.weight and \[0\]\.weight.*both"):
        sx.bind(both, v)


# --- what bind refuses ---


def test_slots_without_a_variable_stay() -> None:
    model = linear()
    slots, variables = sx.unbind(model)
    partly = sx.bind(slots, variables[:1])
    assert partly.kernel is model.kernel and partly.bias == sx.Slot(("bias",), sx.Param)
    assert sx.bind(partly, variables[1:]).bias is model.bias


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: sx.unbind(Head(sx.Param(jnp.ones(2))))[1], r"\.weight, for which there is no slot"),
    (lambda: sx.unbind({"kernels": sx.Param(0.0)})[1], r"did you mean \.kernel\?"),
    (lambda: sx.Param(0.0), r"variables: the Param has no label"),
    (lambda: {"x": [jnp.ones(2)]}, r"variables\.x\[0\]: the ArrayImpl is neither"),
    (
        lambda: [sx.FrozenVariable(jnp.ones(3), sx.Cache, label=("bias",))],
        r"variables\[0\]: the frozen Cache does not belong into the slot of a Param",
    ),
]


@pytest.mark.parametrize(("variables", "message"), REFUSED)
def test_mismatched_value_is_refused_with_its_place(variables: Any, message: str) -> None:
    slots, _ = sx.unbind(linear())
    with pytest.raises(ModuleError, match=message) as caught:
        sx.bind(slots, variables())
    names = {"sx": sx, "tree": linear(1)}
    if "no label" in message:
        _, frozen = run_advice(caught.value, "sx.unbind(tree, freeze=True)", names)
        assert sx.bind(slots, frozen).kernel is frozen[0]
    _, fitting = run_advice(caught.value, "sx.unbind(tree)", names)
    assert sx.bind(slots, fitting).kernel is fitting[0]


def test_bind_lists_all_mismatches_in_one_error() -> None:
    slots, _ = sx.unbind(linear())
    with pytest.raises(ModuleError, match=r"2 of 3(.|\n)*variables\[0\](.|\n)*variables\[2\]"):
        sx.bind(slots, [sx.Param(0.0), *sx.unbind(linear())[1][:1], 3])


def test_unused_variables_may_be_allowed() -> None:
    slots, _ = sx.unbind(linear())
    more = sx.unbind({"kernel": sx.Param(jnp.ones((2, 3))), "other": sx.Cache(0.0)})[1]
    bound = sx.bind(slots, more, allow_unused=True)
    assert bound.kernel is more[0] and type(bound.bias) is sx.Slot


def test_slot_accepts_subtype_of_its_variable_type() -> None:
    class Scale(sx.Param):
        pass

    slots, _ = sx.unbind(Head(sx.Param(jnp.ones(2))))
    _, scale = sx.unbind(Head(Scale(jnp.ones(2))))
    assert sx.bind(slots, scale).weight is scale[0]


# --- abstract values and compiled initialisers ---


def test_abstract_values_stand_in_every_form() -> None:
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    model = Head(
        sx.Param(shape, axes=("embed",)), sx.Cache(sx.Init(jax.nn.initializers.ones, (3,)))
    )
    slots, frozen = sx.unbind(model, freeze=True)
    assert [value.is_abstract for value in frozen] == [True, False] and frozen[1].is_lazy
    thawed = sx.thaw(sx.bind(slots, frozen))
    assert thawed.weight.is_abstract and thawed.weight.axes == ("embed",)
    assert thawed.others[0].is_lazy and thawed.others[0].value.tolist() == [1.0, 1.0, 1.0]


def test_shapes_of_an_initialiser_make_an_abstract_model() -> None:
    slots, shapes = jax.eval_shape(
        lambda key: sx.unbind(linear(key), freeze=True), jax.random.key(0)
    )
    model = sx.thaw(sx.bind(slots, shapes))
    assert model.kernel.is_abstract and model.kernel.shape == (2, 3)
    assert model.kernel.axes == ("in", "out")
    assert sx.graphdef(model) == sx.graphdef(linear())


@pytest.mark.parametrize("jit", [jax.jit, sx.jit], ids=["jax.jit", "sx.jit"])
def test_compiled_initialiser_returns_slots_and_frozen_values(jit: Any) -> None:
    traces = []

    @jit
    def init(key: Any) -> Any:
        traces.append(1)
        return sx.unbind(linear(key), freeze=True)

    for seed in range(3):
        key = jax.random.key(seed)
        model = sx.thaw(sx.bind(*init(key)))
        assert sx.graphdef(model) == sx.graphdef(linear())
        assert np.allclose(model.kernel.value, linear(key).kernel.value)
    assert len(traces) == 1


def test_initialiser_writes_into_its_shards(auto_mesh: Any) -> None:
    rules = [("in", "data"), ("out", None)]
    init = lambda key: sx.unbind(linear(key), freeze=True)  # noqa: E731
    _, shapes = jax.eval_shape(init, jax.random.key(0))
    wanted = sx.shardings(shapes, auto_mesh, rules)
    slots, frozen = jax.jit(init, out_shardings=(None, wanted))(jax.random.key(0))
    assert sx.bind(slots, frozen).kernel.sharding == wanted[0]


def test_mapped_initialiser_names_the_new_dimension() -> None:
    init = sx.vmap(
        lambda key: sx.unbind(linear(key), freeze=True),
        metadata={sx.partition.PARTITION_NAME: "layers"},
    )
    keys = jax.random.split(jax.random.key(0), 4)
    models = sx.thaw(sx.bind(*init(keys)))
    assert models.kernel.shape == (4, 2, 3) and models.kernel.axes == ("layers", "in", "out")
    assert np.allclose(models.kernel[2], linear(keys[2]).kernel.value)


def test_models_are_bound_inside_compiled_functions() -> None:
    model = linear()
    slots, frozen = sx.unbind(model, freeze=True)
    x = jnp.ones((1, 2))
    for jit in (jax.jit, sx.jit):
        call = jit(lambda values, x: sx.bind(slots, values)(x))
        assert np.allclose(call(frozen, x), model(x))
        both = jit(lambda slots, values, x: sx.bind(slots, values)(x))
        assert np.allclose(both(slots, frozen, x), model(x))
    _, variables = sx.unbind(model)
    with pytest.raises(ModuleError, match="frozen values"):
        sx.jit(lambda variables: sx.bind(slots, variables)(x))(variables)


def test_part_of_stack_unbinds_whole() -> None:
    rngs = sx.Rngs(0)
    stack = sx.nn.Stack(lambda: sx.nn.Linear(2, 2, rngs=rngs), 3)
    slots, frozen = sx.unbind(stack[1], freeze=True)
    assert [value.variable_type for value in frozen] == [sx.Param, sx.Param]
    x = jnp.ones((1, 2))
    assert np.allclose(sx.bind(slots, frozen)(x), stack[1](x))
    whole, values = sx.unbind(stack, freeze=True)
    assert np.allclose(sx.bind(whole, values)(x), stack(x))
