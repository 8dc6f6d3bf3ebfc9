# SPDX-License-Identifier: Apache-2.0
"""Key paths of models, States and optimizer states are JAX's: tools that walk them work."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax.tree_util import DictKey, GetAttrKey, SequenceKey, keystr

import shardax as sx
from tests.advice import run_advice
from tests.strategies import Node, Pair, models

# --- entries: one a step, of the container's own class ---


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    """A node of JAX with attributes."""

    kernel: Any
    scale: Any


class Holder:
    """A node of JAX whose children have no names."""

    def __init__(self, *content: Any) -> None:
        self.content = content


jax.tree_util.register_pytree_node(
    Holder, lambda holder: (holder.content, None), lambda _, content: Holder(*content)
)


def key_paths(tree: Any) -> list[Any]:
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


W = np.ones(2, np.float32)

CONTAINERS = {
    "list": [W, W],
    "tuple": (W, (W, W)),
    "dict": {"bias": W, "en-us": W, "kernel": [W]},
    "ordered dict": collections.OrderedDict(kernel=W, bias=W),
    "dataclass": Scaled(W, (W,)),
    "unnamed node": Holder(W, [W]),
    "nested": [{"layers": ({"kernel": W},)}, [Scaled(W, W)]],
}


@pytest.mark.parametrize("content", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_module_key_paths_continue_as_jax_has_them_in_the_container(content: Any) -> None:
    model = Node()
    model.content = content
    found = key_paths(model)
    assert found == [(GetAttrKey("content"), *path) for path in key_paths(content)]
    assert [keystr(path) for path in found] == [f".content{keystr(p)}" for p in key_paths(content)]


@pytest.mark.parametrize("content", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_state_key_paths_are_those_of_its_nested_dict(content: Any) -> None:
    model = Node()
    model.content = content
    state = sx.state(model)
    by_path = [(path, key_paths(value)) for path, value in state.flat().items()]
    assert key_paths(state) == [
        (*map(DictKey, path), *inside) for path, paths in by_path for inside in paths
    ]
    assert set(key_paths(state)) == set(key_paths(state.to_pure_dict()))


def test_partial_key_paths_are_its_arguments_among_the_attributes_of_its_function() -> None:
    model = Node()
    model.call = functools.partial(sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), sx.Param(W), y=sx.Param(W))
    call = GetAttrKey("call")
    assert key_paths(model) == [
        (call, GetAttrKey("kernel")),
        (call, GetAttrKey("bias")),
        (call, DictKey(0)),
        (call, DictKey("y")),
    ]


def test_list_that_lacks_items_has_dict_keys_with_positions() -> None:
    linear = sx.nn.Linear(2, 2, use_bias=False, rngs=sx.Rngs(0))
    tied = sx.nn.Sequential(linear, jax.nn.relu, sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), linear)
    keys = [path[1] for path in key_paths(tied)]
    assert keys == [DictKey(0), DictKey(2), DictKey(2)]
    assert [key.idx for key in keys] == [0, 2, 2]
    assert keystr(key_paths(tied)[1]) == ".layers[2].kernel"


def test_named_tuple_has_items_by_position_as_paths_have() -> None:
    model = Node()
    model.content = Pair(W, {"second": W})
    names = ["content/0", "content/1/second"]
    for tree in (model, sx.state(model)):
        assert [keystr(p, simple=True, separator="/") for p in key_paths(tree)] == names
    assert key_paths(model)[0] == (GetAttrKey("content"), SequenceKey(0))


def test_bare_variable_has_the_key_value() -> None:
    variable = sx.Param(1.0)
    assert key_paths([variable]) == [(SequenceKey(0), GetAttrKey("value"))]
    assert key_paths(variable) == key_paths(sx.state(variable)) == [(GetAttrKey("value"),)]


def test_attribute_and_item_keys_have_key_as_dict_keys_do() -> None:
    model = Node()
    model.layers = [W]
    ((attribute, item),) = key_paths(model)
    assert (attribute.key, item.key, repr(attribute)) == ("layers", 0, "GetAttrKey(name='layers')")


@given(model=models())
@settings(max_examples=20)
def test_key_paths_spell_the_paths_of_the_state_laws(model: Any) -> None:
    state = sx.state(model)
    names = [
        keystr((*map(DictKey, path), *inside), simple=True, separator="/")
        for path, value in state.flat().items()
        for inside in key_paths(value)
    ]
    for tree in (model, state):
        leaves, treedef = jax.tree.flatten(tree)
        by_path, treedef_with_paths = jax.tree_util.tree_flatten_with_path(tree)
        assert [keystr(path, simple=True, separator="/") for path, _ in by_path] == names
        assert len(leaves) == len(names)
        assert treedef == treedef_with_paths == jax.tree.structure(treedef.unflatten(leaves))


# --- tools: on ours as on plain nested containers of the same arrays ---


def _flat() -> Any:
    return sx.nn.Linear(2, 2, rngs=sx.Rngs(0))


def _nested() -> Any:
    model = Node()
    model.body = sx.nn.Sequential(_flat(), jax.nn.relu, sx.nn.Linear(2, 2, rngs=sx.Rngs(1)))
    model.heads = {"de": [_flat()], "en-us": (_flat(), _flat())}
    model.bias = W
    return model


def _shared() -> Any:
    model = Node()
    model.encoder = model.decoder = _flat()
    model.head = Node()
    model.head.kernel = model.encoder.kernel
    model.head.bias = sx.Param(W)
    return model


def _stacked() -> Any:
    rngs = sx.Rngs(0)
    model = Node()
    model.blocks = sx.nn.Stack(lambda: sx.nn.Linear(2, 2, rngs=rngs), 2)
    model.head = _flat()
    return model


MODELS = {"flat": _flat, "nested": _nested, "shared": _shared, "stacked": _stacked}


class Case(NamedTuple):
    """A tree of ours, and plain nested containers of the same arrays."""

    ours: Any
    plain: Any


@functools.cache
def case(model_name: str, kind: str) -> Case:
    model = MODELS[model_name]()
    plain = sx.state(model).to_pure_dict()
    adam = optax.adam(1e-3)
    match kind:
        case "Module":
            return Case(model, plain)
        case "State":
            return Case(sx.state(model), plain)
        case "gradients":
            loss = lambda tree: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))  # noqa: E731
            return Case(sx.grad(loss, wrt=...)(model), jax.grad(loss)(plain))
        case "optimizer state":
            return Case(adam.init(sx.state(model)), adam.init(plain))
    raise AssertionError(kind)


def by_name(tree: Any) -> dict[str, Any]:
    """Leaves as lists of numbers, by the name of their key path."""
    return {
        keystr(path, simple=True, separator="/"): np.asarray(leaf).tolist()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def map_with_path(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf.size + len(path), tree)


def names_found_by_rule(tree: Any) -> list[str]:
    return sorted(
        name for name in by_name(tree) if re.search(r"(^|/)(head|heads/de)/.*bias$", name)
    )


def is_bias(path: Any) -> bool:
    return path[-1].key == "bias"


def no_bias(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: not is_bias(path), tree)


def label(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "train" if any("head" in str(key) for key in path) else "freeze", tree
    )


def updated(tx: Any, tree: Any) -> Any:
    """The parameters after two updates by themselves."""
    state = tx.init(tree)
    for _ in range(2):
        updates, state = tx.update(tree, state, tree)
        tree = optax.apply_updates(tree, updates)
    return tree


DECAY = optax.chain(optax.add_decayed_weights(0.5, mask=no_bias), optax.sgd(0.1))
MASKED = optax.masked(optax.adam(0.1), no_bias)
LABELS = optax.multi_transform({"train": optax.adam(0.1), "freeze": optax.set_to_zero()}, label)

TOOLS: dict[str, Callable[[Any], Any]] = {
    "keystr": by_name,
    "tree_map_with_path": lambda tree: by_name(map_with_path(tree)),
    "regular expression": names_found_by_rule,
    "decay mask": lambda tree: by_name(updated(DECAY, tree)),
    "masked": lambda tree: by_name(updated(MASKED, tree)),
    "multi_transform": lambda tree: by_name(updated(LABELS, tree)),
    "state of masked": lambda tree: by_name(MASKED.init(tree)),
    "state of multi_transform": lambda tree: by_name(LABELS.init(tree)),
}
OPTAX = [tool for tool in TOOLS if "mask" in tool or "multi" in tool]
KINDS = {
    "Module": [*TOOLS],
    "State": [*TOOLS],
    "gradients": [*TOOLS],
    "optimizer state": [tool for tool in TOOLS if tool not in OPTAX],
}
each_tool_and_kind = pytest.mark.parametrize(
    ("kind", "tool"), [(kind, tool) for kind, tools in KINDS.items() for tool in tools]
)
each_model = pytest.mark.parametrize("model_name", MODELS)


@each_model
@each_tool_and_kind
def test_tool_does_to_tree_what_it_does_to_plain_dicts(
    model_name: str, kind: str, tool: str
) -> None:
    ours, plain = case(model_name, kind)
    assert TOOLS[tool](ours) == TOOLS[tool](plain)


@each_model
@pytest.mark.parametrize("kind", KINDS)
def test_orbax_saves_and_restores_tree_as_plain_dicts(
    model_name: str, kind: str, tmp_path: Path
) -> None:
    import orbax.checkpoint as ocp

    ours, plain = case(model_name, kind)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", ours)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", jax.eval_shape(lambda: ours))
        without_target = checkpointer.restore(tmp_path / "saved")
    assert jax.tree.structure(restored) == jax.tree.structure(ours)
    assert by_name(restored) == by_name(without_target) == by_name(plain)


# --- structure: what JAX says of trees that differ, and what it rebuilds ---


def _layers(*names_by_layer: str) -> Any:
    model = Node()
    model.layers = [Node() for _ in names_by_layer]
    for layer, names in zip(model.layers, names_by_layer, strict=True):
        for name in names.split():
            setattr(layer, name, sx.Param(W))
    return model


DIFFERENT = {
    "layers": (_layers("w"), _layers("w", "w"), "layers", "1"),
    "names": (_layers("w", "w"), _layers("w", "w b"), "layers 1", "b"),
}


@pytest.mark.parametrize("kind", ["Module", "State"])
@pytest.mark.parametrize("difference", DIFFERENT)
def test_jax_names_the_place_where_trees_differ(difference: str, kind: str) -> None:
    first, second, steps, key = DIFFERENT[difference]
    if kind == "State":
        first, second = sx.state(first), sx.state(second)
    where = key_paths(first)[-1][: len(steps.split())]
    assert jax.tree.structure(first) != jax.tree.structure(second)
    for function in (
        lambda: jax.tree.map(lambda *_: 0, first, second),
        lambda: jax.tree_util.tree_map_with_path(lambda *_: 0, first, second),
        lambda: jax.vmap(lambda _: 0, in_axes=(jax.tree.map(lambda _: 0, first),))(second),
    ):
        with pytest.raises(ValueError, match="different numbers of pytree children") as caught:
            function()
        assert f"{keystr(where)}\n" in str(caught.value)
        # JAX 0.10 shows the key alone, 0.12 as `[1]` or `.b`.
        assert re.search(rf"difference on key sets is\n    [.\[']*{key}", str(caught.value))


def test_attributes_that_a_module_lacks_are_named_by_jax() -> None:
    second = _layers("w")
    second.scale = W
    with pytest.raises(ValueError, match=r"symmetric difference on key sets is\n +\.?scale"):
        jax.tree.map(lambda *_: 0, _layers("w"), second)


def test_state_with_a_value_in_the_place_of_a_state_is_a_prefix_of_it() -> None:
    state = sx.state(_layers("w", "w b"))

    def is_layer(tree: Any) -> bool:
        return isinstance(tree, sx.State) and "w" in tree

    sizes = jax.tree.map(len, state, is_leaf=is_layer)
    assert sizes.flat() == {("layers", 0): 1, ("layers", 1): 2}
    spread = jax.tree.map(lambda size, layer: dict.fromkeys(layer, size), sizes, state)
    assert spread.layers[1] == {"w": 2, "b": 2}


def test_module_cannot_have_a_value_in_the_place_of_a_part() -> None:
    model = _layers("w")

    def is_leaf(tree: Any) -> bool:
        return not isinstance(tree, (sx.Module, sx.State))

    def function(leaf: Any) -> int:
        return 0

    with pytest.raises(
        sx.errors.ModuleError, match=r"an object of type int .* below \.layers\."
    ) as e:
        jax.tree.map(function, model, is_leaf=is_leaf)
    names = {"jax": jax, "sx": sx, "model": model, "is_leaf": is_leaf, "function": function}
    state = run_advice(e.value, "jax.tree.map(function, sx.state(model), is_leaf=is_leaf)", names)
    assert state.flat() == {("layers", 0, "w"): 0}


# --- a State whose entries stand in another order than in nested dicts ---


def _interleaved() -> sx.State:
    values = {("a", "x"): jnp.ones((2, 3)), ("b",): jnp.ones(3), ("a", "y"): jnp.ones(3)}
    return sx.State.from_flat(values)


def test_interleaved_state_keeps_the_order_of_its_leaves() -> None:
    state = _interleaved()
    names = [keystr(path, simple=True, separator="/") for path in key_paths(state)]
    assert names == ["a/x", "b", "a/y"]
    assert jax.tree.map(lambda leaf: leaf, state) == state
    assert list(jax.tree.map(jnp.sum, state).flat()) == list(state.flat())
    axes = sx.State.from_flat(dict(zip(state.flat(), (1, 0, 0), strict=True)))
    summed = sx.vmap(lambda part: jax.tree.map(jnp.sum, part), in_axes=(axes,))(state)
    assert [leaf.tolist() for leaf in jax.tree.leaves(summed)] == [[2.0] * 3, [1.0] * 3, [1.0] * 3]


def test_interleaved_state_has_no_one_place_for_a_value() -> None:
    state = _interleaved()

    def size_of_parts(state: sx.State) -> sx.State:
        return jax.tree.map(len, state, is_leaf=lambda part: part is not state)

    with pytest.raises(sx.errors.StateMismatchError, match=r"below \.a stand at several") as caught:
        size_of_parts(state).flat()
    names = {"sx": sx, "state": state}
    run_advice(caught.value, "state = sx.State(state.to_pure_dict())", names)
    assert size_of_parts(names["state"]).flat() == {("a",): 2, ("b",): 3}
