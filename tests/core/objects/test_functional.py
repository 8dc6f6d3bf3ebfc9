# SPDX-License-Identifier: Apache-2.0
"""split, merge, state, update, clone, pop, iter_* and find_duplicates; errors change nothing."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import FilterError, ModuleError, StateMismatchError
from tests.advice import run_advice
from tests.strategies import Node, assert_equal_values, assert_same_model


class Layer(sx.Module):
    def __init__(self, size: int = 2) -> None:
        self.kernel = sx.Param(jnp.ones(size), axes=("embed",))
        self.mean = sx.BatchStat(jnp.zeros(size))

    def __call__(self, x: Any) -> Any:
        return self.kernel * x


def _tower() -> Node:
    tower = Node()
    tower.layers = [Layer(), Layer(3)]
    tower.head = tower.layers[0].kernel
    tower.heads = {"en-us": sx.Param(5.0)}
    return tower


def _lazy() -> sx.Param[Any]:
    return sx.Param(sx.Init(jax.nn.initializers.ones, (2,)))


PATHS = [
    ("layers", 0, "kernel"),
    ("layers", 0, "mean"),
    ("layers", 1, "kernel"),
    ("layers", 1, "mean"),
    ("heads", "en-us"),
]


# --- split and merge ---


def test_split_gives_structure_and_one_state_per_filter() -> None:
    tower = _tower()
    graphdef, state = sx.split(tower)
    assert graphdef == sx.graphdef(tower) and list(state.flat()) == PATHS
    graphdef, params, rest = sx.split(tower, sx.Param, ...)
    assert [list(params.flat()), list(rest.flat())] == [PATHS[0:5:2], PATHS[1:4:2]]
    assert_same_model(sx.merge(graphdef, rest, params), tower)


def test_filters_that_are_functions_see_the_variable() -> None:
    _, wide, _ = sx.split(
        _tower(), lambda path, v: isinstance(v, sx.Param) and v.shape == (3,), ...
    )
    assert list(wide.flat()) == [("layers", 1, "kernel")]


@pytest.mark.parametrize(
    "tree",
    [
        sx.Param(1.0),
        sx.List([sx.Param(1.0), jnp.ones(2)]),
        (sx.Param(1.0), [jnp.ones(2), {"a": sx.BatchStat(2.0)}], "static", None),
        {"model": Layer(), "array": np.ones(2), "number": 3},
        jnp.ones(2),
        functools.partial(max, sx.Param(1.0)),
        Layer().__call__,
    ],
    ids=["Variable", "List", "tuple", "dict", "array", "partial", "method"],
)
def test_any_tree_can_be_split_and_merged(tree: Any) -> None:
    graphdef, state = sx.split(tree)
    merged = sx.merge(graphdef, state)
    assert type(merged) is type(tree)
    assert sx.graphdef(merged) == graphdef
    assert_equal_values(sx.state(merged), state)
    assert_equal_values(sx.state(sx.clone(tree)), state)


def test_merge_makes_new_objects_each_time() -> None:
    tower = _tower()
    graphdef, state = sx.split(tower)
    one, other = sx.merge(graphdef, state), sx.merge(graphdef, state)
    one.head.value = jnp.zeros(2)
    assert one.layers[0].kernel is one.head is not other.head
    assert other.head.value.tolist() == tower.head.value.tolist() == [1.0, 1.0]


def test_merge_lists_all_missing_and_unexpected_entries() -> None:
    graphdef, state = sx.split(_tower())
    wrong = state.to_pure_dict()
    wrong["layers"][0]["kernle"] = wrong["layers"][0].pop("kernel")
    wrong["other"] = {"thing": 1.0}
    del wrong["heads"]
    with pytest.raises(StateMismatchError) as raised:
        sx.merge(graphdef, wrong)
    assert str(raised.value).splitlines() == [
        (
            "The State does not fit the model; nothing was changed. "
            "2 entries do not belong to any Variable of the model:"
        ),
        "  .layers[0].kernle (did you mean .layers[0].kernel?)",
        "  .other.thing",
        "2 values are missing (pass every State that split returned):",
        "  .layers[0].kernel",
        "  .heads['en-us']",
    ]
    assert issubclass(StateMismatchError, ValueError)


# --- state ---


def test_state_returns_one_state_per_filter_without_rest() -> None:
    tower = _tower()
    assert list(sx.state(tower).flat()) == PATHS
    assert list(sx.state(tower, sx.BatchStat).flat()) == PATHS[1:4:2]
    stats, wide = sx.state(tower, sx.BatchStat, sx.PathContains(1))
    assert (list(stats.flat()), list(wide.flat())) == (PATHS[1:4:2], [PATHS[2]])
    params, rest = sx.state(tower, sx.Param, ...)
    assert (len(params.flat()), len(rest.flat())) == (3, 2)


def test_reading_some_values_leaves_the_others_lazy() -> None:
    model = sx.Dict(w=_lazy(), seen=sx.Intermediate(1.0), b=_lazy())
    sx.state(model, sx.Intermediate)
    sx.state(model, sx.Intermediate, sx.Cache)
    sx.pop(model, sx.Intermediate)
    assert model["w"].is_lazy and model["b"].is_lazy
    sx.state(model, sx.PathContains("w"))
    assert (model["w"].is_lazy, model["b"].is_lazy) == (False, True)


def test_state_values_are_copies_as_jax_arrays() -> None:
    model = sx.Dict(a=np.ones(2), b=sx.Param(np.ones(2)), c=_lazy())
    state = sx.state(model)
    assert all(isinstance(value, jax.Array) for value in state.flat().values())
    model["b"].value = jnp.zeros(2)
    assert state.b.tolist() == [1.0, 1.0]


# --- update ---


def test_update_writes_by_path_and_leaves_the_rest() -> None:
    tower = _tower()
    objects = [v for _, v in sx.iter_variables(tower)]
    sx.update(tower, {"heads": {"en-us": 7}}, sx.State({"layers": {0: {"kernel": jnp.zeros(2)}}}))
    assert (int(tower.heads["en-us"]), tower.head.value.tolist()) == (7, [0.0, 0.0])
    assert tower.layers[1].kernel.value.tolist() == [1.0] * 3
    assert [v for _, v in sx.iter_variables(tower)] == objects


def test_later_states_win() -> None:
    model = sx.Dict(a=sx.Param(0.0))
    sx.update(model, {"a": 1.0}, {"a": 2.0})
    assert float(model["a"]) == 2.0


def test_string_positions_are_accepted_when_unambiguous() -> None:
    tower = _tower()
    sx.update(tower, {"layers": {"1": {"kernel": jnp.zeros(3)}}})
    assert tower.layers[1].kernel.value.tolist() == [0.0] * 3
    both = sx.Dict({0: sx.Param(0.0), "0": sx.Param(0.0)})
    sx.update(both, {0: 1.0, "0": 2.0})
    assert [float(v) for v in both.values()] == [1.0, 2.0]


def test_update_of_a_lazy_variable_replaces_its_recipe() -> None:
    model = sx.Dict(w=_lazy())
    sx.update(model, {"w": np.zeros(2)})
    assert not model["w"].is_lazy and model["w"].value.tolist() == [0.0, 0.0]


def test_update_lists_every_misfit_and_changes_nothing() -> None:
    tower = _tower()
    tower.nested = sx.Variable({"a": jnp.ones(1)})
    tower.lazy = _lazy()
    before = sx.clone(tower)
    with pytest.raises(StateMismatchError) as raised:
        sx.update(
            tower,
            {
                "layers": {0: {"mean": jnp.ones(2), "kernel": jnp.ones(3)}, 1: {"kernel": 1.0}},
                "heads": {"en-us": "text"},
                "lazy": (jnp.ones(2),),
                "nested": {"b": jnp.zeros(4)},
            },
        )
    lines = str(raised.value).splitlines()
    assert lines[:2] == [
        "4 of 6 values do not fit; nothing was changed:",
        "  .layers[0].kernel: has shape (2,), given (3,)",
    ]
    assert lines[2] == "  .layers[1].kernel: has shape (3,), given ()"
    assert lines[3].startswith("  .heads['en-us']: A Param holds arrays, but was given 'text'")
    assert lines[4] == "  .lazy: has shape (2,), given a tuple"
    assert tower.lazy.is_lazy
    assert_same_model(tower, before)


def test_unknown_paths_suggest_similar_names_and_change_nothing() -> None:
    tower = _tower()
    with pytest.raises(StateMismatchError, match=r"\.layers\[0\]\.kernl \(did you mean .*kernel\?"):
        sx.update(tower, {"layers": {0: {"kernl": 0.0, "mean": jnp.ones(2)}}})
    assert tower.layers[0].mean.value.tolist() == [0.0, 0.0]


def test_bare_array_outside_modules_cannot_be_updated() -> None:
    with pytest.raises(StateMismatchError, match=r"\[0\]: is a plain array outside any Module"):
        sx.update([jnp.zeros(2), Layer()], {0: jnp.ones(2)})
    model = sx.List([jnp.zeros(2)])
    sx.update((model,), {0: {0: jnp.ones(2)}})
    assert model[0].tolist() == [1.0, 1.0]


# --- clone ---


def test_clone_shares_no_object_and_keeps_laziness() -> None:
    model = Node()
    model.w, model.layer = _lazy(), Layer()
    copied = sx.clone(model)
    assert copied.w.is_lazy and model.w.is_lazy
    copied.layer.kernel.value = jnp.zeros(2)
    copied.layer.extra = 1
    assert model.layer.kernel.value.tolist() == [1.0, 1.0] and not hasattr(model.layer, "extra")


def test_clone_of_read_only_copy_is_writable() -> None:
    @jax.jit
    def double(layer: Layer) -> Layer:
        layer = sx.clone(layer)
        layer.kernel[...] = 2 * layer.kernel
        layer.note = "doubled"
        return layer

    doubled = double(Layer())
    assert (doubled.kernel.value.tolist(), doubled.note) == ([2.0, 2.0], "doubled")


# --- pop ---


def test_pop_removes_every_occurrence_and_returns_values() -> None:
    model = Node()
    model.child, model.entries = Layer(), {"a": 1}
    for holder in (model, model.child):
        holder.sow("seen", jnp.ones(1))
    model.again = model.child.seen
    model.entries["seen"] = model.seen
    model.array = jnp.ones(3)
    popped = sx.pop(model, sx.Intermediate)
    assert list(popped.flat()) == [("child", "seen"), ("entries", "seen")]
    assert not hasattr(model, "again") and not hasattr(model.child, "seen")
    assert model.entries == {"a": 1} and model.array.tolist() == [1.0] * 3
    assert sx.pop(model, sx.Intermediate).flat() == {}


def test_pop_with_several_filters_gives_several_states() -> None:
    layer = Layer()
    layer.array = jnp.ones(3)
    stats, arrays = sx.pop(layer, sx.BatchStat, sx.PathContains("array"))
    assert (list(stats), list(arrays), list(vars(layer))) == (["mean"], ["array"], ["kernel"])
    assert not hasattr(layer, "array")


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda v: setattr_on(Node(), layers=[1, v]), r"\.layers\[1\]: it is part of a List"),
        (lambda v: setattr_on(Node(), pair=(1, v)), r"\.pair\[1\]: it is part of a tuple"),
        (lambda v: setattr_on(Node(), d={"a": (v,)}), r"\.d\.a\[0\]: it is part of a tuple"),
        (lambda v: setattr_on(Node(), act=functools.partial(max, v)), r"it is part of a partial"),
        (lambda v: [Layer(), v], r"\[1\]: it is part of what was given"),
        (lambda v: v, r"\(root\): it is part of what was given"),
    ],
    ids=["list", "tuple", "tuple in dict", "partial", "plain list", "itself"],
)
def test_pop_shifting_positions_is_refused_without_effect(make: Any, path: str) -> None:
    model = make(sx.Intermediate(1.0))
    if isinstance(model, Node):
        model.first, model.last = sx.Intermediate(2.0), sx.Intermediate(3.0)
    before = sx.graphdef(model)
    with pytest.raises(StateMismatchError, match=f"Cannot pop .*{path}.*Nothing was removed"):
        sx.pop(model, sx.Intermediate)
    assert sx.graphdef(model) == before


def setattr_on(node: Node, **attributes: Any) -> Node:
    for name, value in attributes.items():
        setattr(node, name, value)
    return node


def test_pop_needs_a_filter() -> None:
    with pytest.raises(FilterError, match="at least one filter") as caught:
        sx.pop(Layer())
    names = {"sx": sx, "model": Layer()}
    assert not run_advice(caught.value, "sx.pop(model, sx.Intermediate)", names).flat()


def test_pop_of_a_read_only_copy_is_refused() -> None:
    with pytest.raises(ModuleError):
        jax.jit(lambda layer: sx.pop(layer, sx.BatchStat))(Layer())


# --- iterating and duplicates ---


def test_iter_variables_yields_each_once_by_first_path() -> None:
    tower = _tower()
    found = list(sx.iter_variables(tower))
    assert [path for path, _ in found] == PATHS
    assert found[0][1] is tower.head
    assert [
        path for path, _ in sx.iter_variables(tower, sx.BatchStat, sx.PathContains("heads"))
    ] == [PATHS[i] for i in (1, 3, 4)]


def test_iter_modules_yields_each_once_root_first() -> None:
    tower = _tower()
    tower.again, tower.layers[0].parent = tower.layers[1], tower
    assert [(path, type(m).__name__) for path, m in sx.iter_modules(tower)] == [
        ((), "Node"),
        (("layers", 0), "Layer"),
        (("layers", 1), "Layer"),
    ]
    assert [path for path, _ in sx.iter_modules({"a": tower.layers[0].kernel, "b": [tower]})] == [
        ("b", 0),
        ("b", 0, "layers", 0),
        ("b", 0, "layers", 1),
    ]


def test_find_duplicates_lists_all_paths_of_shared_variables() -> None:
    tower = _tower()
    assert sx.find_duplicates(tower) == [[("layers", 0, "kernel"), ("head",)]]
    tower.act = functools.partial(max, tower.heads["en-us"])
    tower.apply = tower.layers[1].__call__
    assert sx.find_duplicates(tower) == [
        [("layers", 0, "kernel"), ("head",)],
        [("layers", 1, "kernel"), ("apply", "kernel")],
        [("layers", 1, "mean"), ("apply", "mean")],
        [("heads", "en-us"), ("act", 0)],
    ]
    assert sx.find_duplicates(Layer()) == []


def test_find_duplicates_ends_on_cycles() -> None:
    layer = Layer()
    layer.itself, layer.parts = layer, [layer]
    assert sx.find_duplicates(layer) == []
