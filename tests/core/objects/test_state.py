# SPDX-License-Identifier: Apache-2.0
"""State: values by path, seen as a nested mapping, stored flat, a pytree."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import FilterError
from tests.advice import run_advice
from tests.strategies import Node, assert_equal_values, models


def _model() -> Node:
    model = Node()
    model.layers = [Node(), Node()]
    for number, layer in enumerate(model.layers):
        layer.kernel = sx.Param(jnp.full(2, float(number)), axes=("embed",), tag="slow")
        layer.mean = sx.BatchStat(jnp.zeros(()))
    model.scale = jnp.ones(3)
    return model


PATHS = [
    ("layers", 0, "kernel"),
    ("layers", 0, "mean"),
    ("layers", 1, "kernel"),
    ("layers", 1, "mean"),
    ("scale",),
]


def test_entries_are_accessible_by_key_and_attribute() -> None:
    state = sx.state(_model())
    assert state["layers"][1]["kernel"].tolist() == state.layers[1].kernel.tolist() == [1.0, 1.0]
    assert isinstance(state.layers, sx.State) and isinstance(state["layers"][0], sx.State)
    assert (list(state), len(state), list(state.layers)) == (["layers", "scale"], 2, [0, 1])
    assert "layers" in state and 0 in state.layers and "kernel" not in state
    assert dict(state.layers[0].items()).keys() == {"kernel", "mean"}


def test_missing_entry_error_lists_existing_ones() -> None:
    state = sx.state(_model())
    with pytest.raises(KeyError, match=r"'heads' \(present: 'layers', 'scale'\)"):
        state["heads"]
    with pytest.raises(AttributeError, match=r"no entry 'bias' \(present: 'kernel', 'mean'\)"):
        _ = state.layers[0].bias
    assert state.get("heads") is None and not hasattr(state, "heads")


def test_attribute_of_a_variable_says_that_entries_are_values() -> None:
    state = sx.state(sx.nn.MLP(2, 3, rngs=sx.Rngs(0)))
    for name in ("value", "axes", "set_metadata"):
        with pytest.raises(AttributeError, match="no entry") as caught:
            getattr(state.up, name)
        names = {"state": state, "path": ("up", "kernel")}
        origin = run_advice(caught.value, "state.origins()[path]", names)
        assert origin.axes == ("embed", "mlp") and origin.variable_type is sx.Param
    with pytest.raises(AttributeError) as caught:
        state.up.kernle  # noqa: B018
    assert str(caught.value) == "State has no entry 'kernle' (present: 'kernel')."


def test_flat_gives_full_paths_in_the_models_order() -> None:
    state = sx.state(_model())
    assert list(state.flat()) == PATHS
    assert list(state.layers[1].flat()) == [("kernel",), ("mean",)]


def test_state_remembers_variable_types() -> None:
    origins = sx.state(_model()).origins()
    kernel = origins["layers", 0, "kernel"]
    assert (kernel.variable_type, kernel.axes, dict(kernel.metadata)) == (
        sx.Param,
        ("embed",),
        {"tag": "slow"},
    )


def test_nested_mappings_states_and_variables_make_a_state() -> None:
    inner = sx.state(_model()).layers
    state = sx.State({"a": {0: jnp.ones(1)}, "b": inner, "c": sx.Param(2.0)})
    assert list(state.flat())[:2] == [("a", 0), ("b", 0, "kernel")]
    assert float(state.c) == 2.0
    assert sx.State(state).flat().keys() == state.flat().keys()


def test_filter_keeps_and_split_partitions() -> None:
    state = sx.state(_model())
    assert list(state.filter((sx.BatchStat, sx.PathContains(0))).flat()) == [
        PATHS[i] for i in (0, 1, 3)
    ]
    assert list(state.filter().flat()) == []
    params, stats = state.filter(sx.Param, sx.BatchStat)
    assert (list(params.flat()), list(stats.flat())) == (PATHS[0:3:2], PATHS[1:4:2])
    slow, rest = state.split("slow", ...)
    assert (list(slow.flat()), list(rest.flat())) == (PATHS[0:3:2], [PATHS[1], PATHS[3], PATHS[4]])
    with pytest.raises(
        FilterError, match=r"No filter matches the BatchStat at \.layers\[0\]\.mean"
    ):
        state.split(sx.Param)


def test_merge_joins_and_later_entries_win() -> None:
    state = sx.state(_model())
    slow, rest = state.split("slow", ...)
    assert set(slow.merge(rest).flat()) == set(PATHS)
    changed = state.merge(jax.tree.map(lambda x: x + 10, slow))
    assert changed.layers[0].kernel.tolist() == [10.0, 10.0]
    assert changed.origins() == state.origins()
    assert state.layers[0].kernel.tolist() == [0.0, 0.0]


def test_to_pure_dict_gives_plain_nested_dicts() -> None:
    pure = sx.state(_model()).to_pure_dict()
    assert type(pure) is dict and type(pure["layers"][0]) is dict
    assert pure.keys() == {"layers", "scale"} and pure["layers"][1].keys() == {"kernel", "mean"}
    pure["layers"][0]["kernel"] = None  # the dict is the caller's own
    assert sx.state(sx.Param(3.0)).to_pure_dict() == {(): 3.0}


def test_variable_holding_dict_is_one_entry() -> None:
    model = sx.List([sx.Variable({"m": jnp.ones(1), "v": jnp.zeros(1)})])
    graphdef, state = sx.split(model)
    assert list(state.flat()) == [(0,)]
    assert_equal_values(sx.merge(graphdef, state.to_pure_dict())[0].value, model[0].value)


def test_state_cannot_be_written() -> None:
    state: Any = sx.state(_model())
    with pytest.raises(TypeError):
        state["scale"] = 1
    with pytest.raises(AttributeError):
        state.scale = 1
    values = state.flat()
    values.clear()
    assert list(state.flat()) == PATHS


# --- as a pytree ---


@given(model=models())
@settings(max_examples=20)
def test_state_is_pytree_of_its_values_leaves(model: Any) -> None:
    state = sx.state(model)
    leaves, treedef = jax.tree.flatten(state)
    assert_equal_values(
        leaves, [x for value in state.flat().values() for x in jax.tree.leaves(value)]
    )
    rebuilt = jax.tree.unflatten(treedef, leaves)
    assert (list(rebuilt.flat()), rebuilt.origins()) == (list(state.flat()), state.origins())
    assert jax.tree.structure(rebuilt) == treedef
    for copied in (
        pickle.loads(pickle.dumps(state)),
        copy.deepcopy(state),
        jax.tree.map(lambda x: x, state),
    ):
        assert jax.tree.structure(copied) == treedef
        assert_equal_values(copied, state)


def test_states_of_different_variable_types_differ_in_structure() -> None:
    one, other = sx.state([sx.Param(1.0)]), sx.state([sx.BatchStat(1.0)])
    with pytest.raises(ValueError, match="State"):
        jax.tree.map(lambda a, b: a + b, one, other)


def test_state_passes_through_transforms() -> None:
    state = sx.state(_model(), sx.Param)
    gradients = jax.grad(lambda s: (s.layers[1].kernel ** 2).sum())(state)
    assert gradients.layers[1].kernel.tolist() == [2.0, 2.0]
    assert list(gradients.filter(sx.Param).flat()) == [PATHS[0], PATHS[2]]


def test_state_shows_one_line_per_value() -> None:
    assert repr(sx.state(_model(), sx.Param)) == (
        "State(\n  .layers[0].kernel: float32[2]\n  .layers[1].kernel: float32[2]\n)"
    )
    assert repr(sx.State()) == "State()"


def test_layouts_without_a_mesh_show_their_device() -> None:
    layout = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert repr(sx.State({"w": layout, "b": layout})).splitlines() == [
        "State of shardings",
        "  path  axes  spec",
        f"  .w          {layout}",
        f"  .b          {layout}",
    ]


def _states() -> tuple[Any, sx.State]:
    model = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
    model.mean = sx.BatchStat(jnp.ones(2))
    return model, sx.state(model)


def test_filters_apply_to_state_as_to_model() -> None:
    model, state = _states()
    kernels = [("gate", "kernel"), ("up", "kernel"), ("down", "kernel")]
    assert list(sx.state(state, sx.Param).flat()) == kernels
    assert sx.state(state) == state and sx.state(state, ...) == state
    for part, of_model in zip(
        sx.state(state, sx.BatchStat, sx.Param),
        sx.state(model, sx.BatchStat, sx.Param),
        strict=True,
    ):
        assert part == of_model
    graphdef, params, rest = sx.split(state, sx.Param, ...)
    assert list(params.flat()) == kernels and list(rest.flat()) == [("mean",)]
    assert sx.merge(graphdef, params, rest) == state == sx.clone(state)
    both = sx.state({"state": state, "model": (model,)}, sx.BatchStat)
    assert list(both.flat()) == [("state", "mean"), ("model", 0, "mean")]
    with pytest.raises(sx.errors.FilterError, match=r"\.mean"):
        sx.split(state, sx.Param)


def test_state_cannot_be_updated_nor_popped_from() -> None:
    _, state = _states()
    with pytest.raises(sx.errors.StateMismatchError, match=r"\.mean: is a plain array"):
        sx.update(state, {"mean": jnp.zeros(2)})
    with pytest.raises(sx.errors.StateMismatchError, match=r"Cannot pop \.mean"):
        sx.pop(state, sx.BatchStat)


def test_equality_covers_path_origin_and_values(auto_mesh: Any) -> None:
    model, state = _states()
    same = sx.state(sx.clone(model))
    assert state == same and hash(state) == hash(same)
    itself = state
    assert state == itself
    assert state != state.merge(sx.state(sx.Module()), sx.State({"mean": jnp.ones(2)}))
    for changed in (jnp.zeros(2), jnp.ones(3), jnp.ones(2, jnp.int32)):
        other = sx.clone(model)
        other.mean = sx.BatchStat(changed)
        assert state != sx.state(other)
    other.mean = sx.BatchStat(jnp.ones(2), axes=("embed",))
    assert state != sx.state(other) and state != state.filter(sx.Param)
    assert sx.shardings(model, auto_mesh) == sx.shardings(model, auto_mesh)
    assert sx.shardings(model, auto_mesh) != sx.shardings(model, auto_mesh, [("mlp", "model")])
    assert sx.partition_specs(model) == sx.partition_specs(model)
    assert jax.eval_shape(lambda s: s, state) == jax.eval_shape(lambda s: s, state) != state
    assert (state == state.to_pure_dict()) is False


def _layouts(mesh: Any, axes: Any, rules: Any = None, kind: Any = sx.Param) -> list[sx.State]:
    model = Node()
    model.layers = [Node()]
    model.layers[0].kernel = kind(jnp.ones((8, 8)), axes=axes)
    return [sx.shardings(model, mesh, rules), sx.partition_specs(model, rules)]


def test_layouts_are_equal_whatever_names_they_came_from(auto_mesh: Any) -> None:
    by_rules = _layouts(auto_mesh, ("embed", "mlp"), [("embed", None), ("mlp", "model")])
    assert by_rules == _layouts(auto_mesh, (None, "model"))
    assert by_rules == _layouts(auto_mesh, ("free", "heads"), [("free", None), ("heads", "model")])
    assert by_rules != _layouts(auto_mesh, ("model", None))
    assert by_rules != _layouts(auto_mesh, (None, "model"), kind=sx.BatchStat)
    for layouts, others in zip(by_rules, _layouts(auto_mesh, ("model", None)), strict=True):
        assert layouts != others


def test_shardings_are_equal_where_devices_hold_the_same(auto_mesh: Any) -> None:
    types = (AxisType.Auto,) * 2
    renamed = Mesh(auto_mesh.devices, ("x", "y"), axis_types=types)
    wide = Mesh(auto_mesh.devices.reshape(1, -1), ("one", "all"), axis_types=types)
    first, second = auto_mesh.axis_names
    abstract = auto_mesh.abstract_mesh
    free = P.UNCONSTRAINED
    alike = [
        (NamedSharding(auto_mesh, P(first)), NamedSharding(auto_mesh, P((first,), None))),
        (NamedSharding(auto_mesh, P(first)), NamedSharding(renamed, P("x"))),
        (NamedSharding(auto_mesh, P(None, (first, second))), NamedSharding(wide, P("one", "all"))),
        (NamedSharding(abstract, P(first)), NamedSharding(abstract, P(first, None))),
        (NamedSharding(auto_mesh, P(free)), NamedSharding(auto_mesh, P(free, None))),
        (P(first, None), P((first,))),
    ]
    different = [
        (NamedSharding(auto_mesh, P(first)), NamedSharding(auto_mesh, P(second))),
        (NamedSharding(auto_mesh, P(first)), NamedSharding(renamed, P("y"))),
        (NamedSharding(auto_mesh, P(first)), NamedSharding(abstract, P(first))),
        (NamedSharding(auto_mesh, P(first, free)), NamedSharding(auto_mesh, P(first))),
        (NamedSharding(auto_mesh, P((first, second))), NamedSharding(auto_mesh, P(first, second))),
        (P(first), P(None, first)),
        (P(), NamedSharding(auto_mesh, P())),
    ]
    for pairs, expected in ((alike, True), (different, False)):
        found = [sx.State({"w": one}) == sx.State({"w": other}) for one, other in pairs]
        assert found == [expected] * len(pairs)
