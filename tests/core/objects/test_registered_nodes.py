# SPDX-License-Identifier: Apache-2.0
"""Params and Modules inside classes that are registered with JAX, held by a Module."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict

import shardax as sx


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    a: Any
    b: Any
    kind: str = dataclasses.field(default="pair", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenPair:
    a: Any
    b: Any


@flax.struct.dataclass
class FlaxPair:
    a: Any
    b: Any
    kind: str = flax.struct.field(pytree_node=False, default="pair")


class Tuple(NamedTuple):
    a: Any
    b: Any


@jax.tree_util.register_pytree_with_keys_class
class Keyed:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b

    def tree_flatten_with_keys(self) -> Any:
        key = jax.tree_util.GetAttrKey
        return ((key("a"), self.a), (key("b"), self.b)), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Keyed:
        return cls(*children)


class Plain:
    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


jax.tree_util.register_pytree_node(
    Plain, lambda plain: ((plain.a, plain.b), None), lambda _, children: Plain(*children)
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Setting:
    rate: float


KINDS: dict[str, tuple[Callable[[Any, Any], Any], tuple[Any, Any]]] = {
    "dataclass": (Pair, ("a", "b")),
    "frozen dataclass": (FrozenPair, ("a", "b")),
    "flax.struct": (FlaxPair, ("a", "b")),
    "with keys": (Keyed, ("a", "b")),
    "without keys": (Plain, (0, 1)),
    "named tuple": (Tuple, (0, 1)),
    "FrozenDict": (lambda a, b: FrozenDict(a=a, b=b), ("a", "b")),
}
every_kind = pytest.mark.parametrize(("make", "keys"), KINDS.values(), ids=KINDS.keys())


class Net(sx.Module):
    """Its first Param is tied to one beside the node, its Module leads back here."""

    def __init__(self, make: Callable[[Any, Any], Any]) -> None:
        inner = sx.Module()
        inner.net, inner.scale = self, sx.Param(jnp.full(2, 3.0), axes=("embed",))
        self.tied = sx.Param(jnp.ones(2), axes=("embed",))
        self.node = make(self.tied, {"deep": [(inner, make(jnp.zeros(()), sx.BatchStat(0.0)))]})

    def __call__(self, x: Any) -> Any:
        first, second = _parts(self.node)
        ((inner, counted),) = second["deep"]
        _parts(counted)[1][...] += 1
        return (x * first * inner.scale * self.tied).sum() + _parts(counted)[0]


def _parts(node: Any) -> Any:
    if isinstance(node, FrozenDict):
        return node["a"], node["b"]
    return node.a, node.b


def _paths(keys: tuple[Any, Any]) -> list[Any]:
    a, b = keys
    deep = ("node", b, "deep", 0)
    return [("tied",), (*deep, 0, "scale"), (*deep, 1, b), (*deep, 1, a)]


@every_kind
def test_node_contents_are_model_state_under_node_keys(make: Any, keys: tuple[Any, Any]) -> None:
    net = Net(make)
    tied, scale, count, array = _paths(keys)
    assert set(sx.state(net).flat()) == {tied, scale, count, array}
    assert set(sx.state(net, sx.Param).flat()) == {tied, scale}
    assert set(sx.state(net, sx.BatchStat).flat()) == {count}
    assert sx.find_duplicates(sx.select(net).at_children().get_all()[:1]) == []
    assert type(net.node) is type(make(1, 2)) and _parts(net.node)[0] is net.tied


@every_kind
def test_registered_node_has_gradients_and_jit_writes_back(
    make: Any, keys: tuple[Any, Any]
) -> None:
    net = Net(make)
    tied, scale, count, _ = _paths(keys)
    gradients = sx.grad(lambda net: net(2.0))(net).flat()
    assert {path: g.tolist() for path, g in gradients.items()} == {
        tied: [12.0, 12.0],
        scale: [2.0, 2.0],
    }
    step = sx.jit(lambda net, x: net(x))
    assert [float(step(net, 1.0)) for _ in range(2)] == [6.0, 6.0]
    assert float(sx.state(net).flat()[count]) == 3.0
    assert len(jax.tree.leaves(net)) == 4


@every_kind
def test_registered_node_copies_keep_types_sharing_and_cycles(
    make: Any, keys: tuple[Any, Any]
) -> None:
    net = Net(make)
    copies = [
        sx.clone(net),
        sx.merge(*sx.split(net)),
        sx.merge(*sx.split(net, sx.Param, ...)),
        jax.tree.map(lambda x: x, net),
        sx.bind(*sx.unbind(net)),
        sx.thaw(sx.freeze(net)),
        sx.select(net).at(lambda net: net.tied).apply(lambda w: w.replace(w.value)),
    ]
    if make is not KINDS["FrozenDict"][0]:  # Flax's own copy rebuilds the Modules in it
        copies.append(copy.deepcopy(net))
    for made in copies:
        first, second = _parts(made.node)
        inner = second["deep"][0][0]
        assert type(made.node) is type(net.node)
        assert first is made.tied and inner.net is made is not net
        assert sx.graphdef(made) == sx.graphdef(net)
    graphdef = sx.graphdef(net)
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef


@every_kind
def test_registered_node_is_sharded_selected_printed_mapped_and_saved(
    make: Any, keys: tuple[Any, Any], tmp_path: Path
) -> None:
    net = Net(make)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sx.shard(net, mesh, rules=[("embed", "x")])
    spec = jax.sharding.PartitionSpec("x")
    scale = _parts(net.node)[1]["deep"][0][0].scale
    assert scale.sharding.spec == net.tied.sharding.spec == spec
    assert set(sx.select(net).at_instances_of(sx.Param).keypaths()) == set(_paths(keys)[:2])
    assert "scale=Param(float32[2], axes=('embed',))" in repr(net)
    mapped = sx.vmap(lambda net, x: net(x), in_axes=(sx.StateAxes({...: None}), 0))
    assert mapped(net, jnp.ones(3)).tolist() == [6.0, 6.0, 6.0]
    assert float(sx.state(net, sx.BatchStat).flat()[_paths(keys)[2]]) == 1.0
    sx.train.checkpoint.save(net, tmp_path / "saved")
    other = Net(make)
    other.tied[...] = jnp.zeros(2)
    sx.train.checkpoint.restore(other, tmp_path / "saved")
    assert other.tied.value.tolist() == [1.0, 1.0] and _parts(other.node)[0] is other.tied


@every_kind
def test_tree_of_nodes_is_saved_split_and_called(
    make: Any, keys: tuple[Any, Any], tmp_path: Path
) -> None:
    linear = sx.nn.Linear(2, 2, rngs=sx.Rngs(0))
    tree = make(linear, [sx.Param(jnp.ones(2))])
    a, b = keys
    assert list(sx.state(tree).flat()) == [(a, "kernel"), (a, "bias"), (b, 0)]
    assert type(sx.merge(*sx.split(tree))) is type(tree)
    result = sx.jit(lambda tree, x: _parts(tree)[0](x) * _parts(tree)[1][0])(tree, jnp.ones(2))
    assert (result == linear(jnp.ones(2))).all()
    sx.train.checkpoint.save(tree, tmp_path / "saved")
    other = make(sx.nn.Linear(2, 2, rngs=sx.Rngs(1)), [sx.Param(jnp.zeros(2))])
    sx.train.checkpoint.restore(other, tmp_path / "saved")
    assert sx.state(other) == sx.state(tree)


@every_kind
def test_layers_with_nodes_stack_scan_and_view(make: Any, keys: tuple[Any, Any]) -> None:
    class Layer(sx.Module):
        def __init__(self, rngs: Any) -> None:
            self.node = make(sx.nn.Linear(2, 2, rngs=rngs), jnp.full((1, 2), 2.0))

        def __call__(self, x: Any) -> Any:
            layer, scale = _parts(self.node)
            return layer(x) * scale

    rngs, again = sx.Rngs(0), sx.Rngs(0)
    stack = sx.nn.Stack(lambda: Layer(rngs), 3)
    expected = jnp.ones((1, 2))
    for layer in [Layer(again) for _ in range(3)]:
        expected = layer(expected)
    assert np.allclose(stack(jnp.ones((1, 2))), expected)
    _parts(stack[1].node)[0].kernel[...] = jnp.zeros((2, 2))
    assert (stack(jnp.ones((1, 2))) == 0).all()


@every_kind
def test_optimizer_trains_it(make: Any, keys: tuple[Any, Any]) -> None:
    net = Net(make)
    optimizer = sx.train.Optimizer(net, optax.sgd(0.5))
    optimizer.update(sx.grad(lambda net: net(1.0))(net))
    assert _parts(net.node)[0].value.tolist() == [-2.0, -2.0]


def test_arrays_alone_stay_the_value_of_one_attribute() -> None:
    model = sx.Module()
    model.pair = Pair(jnp.ones(2), jnp.zeros(3))
    model.setting = Setting(0.5)
    assert list(sx.state(model).flat()) == [("pair",)]
    assert type(model.pair) is Pair and model.pair.b.shape == (3,)
    assert model.setting == Setting(0.5)


def test_registered_static_field_is_compared_exactly() -> None:
    def model(kind: Any) -> sx.Module:
        made = sx.Module()
        made.pair = Pair(sx.Param(1.0), 2, kind)
        return made

    assert sx.graphdef(model(1)) == sx.graphdef(model(1)) != sx.graphdef(model(True))
    with pytest.raises(sx.errors.StaticAttributeError, match=r"attribute 'pair'.*\n?.*unhashable"):
        model([])


def test_in_place_field_assignment_reaches_compiled_functions() -> None:
    model = sx.Module()
    model.pair = Pair(sx.Param(jnp.ones(2)), sx.Param(jnp.ones(2)))
    total = sx.jit(lambda model: model.pair.a.sum())
    assert float(total(model)) == 2.0
    model.pair.a = sx.Param(jnp.zeros(2))
    assert float(total(model)) == 0.0

    @sx.jit
    def change(model: Any) -> None:
        model.pair.b = sx.BatchStat(model.pair.a + 1)

    change(model)
    assert type(model.pair.b) is sx.BatchStat and model.pair.b.value.tolist() == [1.0, 1.0]


@jax.tree_util.register_pytree_with_keys_class
class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b

    tree_flatten_with_keys = Keyed.tree_flatten_with_keys

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Slotted:
        return cls(*children)


CHANGEABLE = {"dataclass": Pair, "with keys": Keyed, "without keys": Plain, "slots": Slotted}
every_changeable = pytest.mark.parametrize("kind", CHANGEABLE.values(), ids=CHANGEABLE.keys())
# What stands beside the array that is assigned: the node is an array attribute, or part of a model.
NEIGHBORS: dict[str, Callable[[], Any]] = {
    "array": lambda: jnp.ones(2),
    "Param": lambda: sx.Param(jnp.ones(2)),
}
# How a model holds the node, and the way to it.
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "attribute": (lambda node: node, lambda held: held),
    "list": (lambda node: [node], lambda held: held[0]),
    "dict of tuples": (lambda node: {"k": (node, 1)}, lambda held: held["k"][0]),
    "node": (lambda node: Pair(node, sx.Param(1.0)), lambda held: held.a),
}
# Every kind in every place, and each of both beside each of two neighbors.
CASES = [
    (kind, ("array", "Param")[(row + column) % 2], place)
    for row, kind in enumerate(CHANGEABLE)
    for column, place in enumerate(PLACES)
]


@pytest.mark.parametrize(("kind_name", "neighbor", "place"), CASES)
def test_array_assigned_in_place_is_the_models(kind_name: str, neighbor: str, place: str) -> None:
    kind, beside, (wrap, reach) = CHANGEABLE[kind_name], NEIGHBORS[neighbor], PLACES[place]
    model = sx.Module()
    model.held = wrap(kind(beside(), jnp.zeros(3)))

    def change(model: Any, number: Any) -> Any:
        node = reach(model.held)
        node.b = node.b + number
        return reach(model.held).b.sum()

    held = reach(model.held)
    assert float(change(model, 1)) == 3.0 and float(sx.jit(change)(model, 1)) == 6.0
    assert float(sx.jit(lambda model: reach(model.held).b.sum())(model)) == 6.0
    assert float(sx.grad(lambda x: change(model, x))(0.0)) == 3.0
    sx.fori_loop(0, 3, lambda i, model: (change(model, 1), model)[1], model)
    assert reach(model.held).b.tolist() == [5.0, 5.0, 5.0]
    if isinstance(held.a, sx.Param):  # what was read before the compiled calls is still the model's
        held.b = jnp.zeros(3)
        assert reach(model.held) is held and held.b.tolist() == [0.0, 0.0, 0.0]
    reach(model.held).b = jnp.zeros(3)
    assert float(sx.jit(lambda: change(model, 1))()) == 3.0  # through a closure
    assert reach(model.held).b.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(sx.errors.ForeignMutationError, match=r"held.*was not passed in"):
        sx.vmap(lambda x: (change(model, 1), x)[1])(jnp.ones(2))
    reach(model.held).b = jnp.zeros(3)
    for copied in (sx.clone(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        reach(copied.held).b = jnp.ones(3)
        assert float(change(copied, 1)) == 6.0
    assert float(change(model, 1)) == 3.0


@every_changeable
def test_array_over_param_and_untrackable_data_are_refused(kind: Any) -> None:
    model = sx.Module()
    model.node = kind(sx.Param(jnp.ones(2)), jnp.zeros(3))
    model.node.a = jnp.zeros(2)
    with pytest.raises(sx.errors.StaticAttributeError, match=r"over the Param in .* 'node'"):
        sx.state(model)
    assert model.node.a.value.tolist() == [1.0, 1.0]
    model.node.a = sx.Param(jnp.full(2, 7.0))
    assert sx.state(model, sx.Param).flat().popitem()[1].tolist() == [7.0, 7.0]
    model.node.b = {sx.Param(1.0)}
    with pytest.raises(sx.errors.StaticAttributeError, match=r"'node'.* cannot be tracked"):
        sx.state(model)
    assert model.node.b.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("make", [dict, lambda a, b: Pair(a, b)], ids=["dict", "node"])
def test_value_changed_in_place_is_written(make: Any) -> None:
    def change(variable: Any) -> None:
        value = variable.value
        if isinstance(value, dict):
            value["b"] = value["b"] + 1
        else:
            value.b = value.b + 1

    def read(variable: Any) -> float:
        value = variable.value
        return float(value["b"] if isinstance(value, dict) else value.b)

    variable = sx.Variable(make(a=jnp.ones(2), b=jnp.zeros(())))
    change(variable)
    sx.jit(change)(variable)
    sx.jit(lambda: change(variable))()
    sx.fori_loop(0, 3, lambda i, variable: (change(variable), variable)[1], variable)
    assert read(variable) == 6.0
    with pytest.raises(sx.errors.ForeignMutationError, match=r"Cannot write .* inside sx\.vmap"):
        sx.vmap(lambda x: (change(variable), x)[1])(jnp.ones(2))
    assert read(variable) == 6.0


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def _generator(held: Any) -> Iterator[Any]:
    yield held


UNTRACKED: dict[str, Callable[[Any], Any]] = {
    "set": lambda held: {held},
    "frozenset": lambda held: frozenset([held]),
    "deque": lambda held: collections.deque([held]),
    "generator": _generator,
    "map": lambda held: map(abs, [held]),
    "chain": lambda held: itertools.chain([held]),
    "dict_values": lambda held: {"a": held}.values(),
    "Holder": Holder,
}


@pytest.mark.parametrize("make", UNTRACKED.values(), ids=UNTRACKED.keys())
@pytest.mark.parametrize("around", [lambda x: x, lambda x: (x,), lambda x: {"k": [x]}])
@pytest.mark.parametrize("held", [sx.Param(1.0), sx.Module()], ids=["Param", "Module"])
def test_untrackable_value_is_refused_with_fix(make: Any, around: Any, held: Any) -> None:
    model = sx.Module()
    with pytest.raises(sx.errors.StaticAttributeError, match="cannot be tracked") as refused:
        model.held = around(make(held))
    assert "use a list, dict or tuple" in str(refused.value)
    assert not hasattr(model, "held")


# --- nodes that make Variables anew ---------------------------------------------------------------


class Node:
    def __init__(self, variable: Any) -> None:
        self.variable = variable


@jax.tree_util.register_pytree_node_class
class CopiesWhenFlat(Node):
    def tree_flatten(self) -> tuple[Any, Any]:
        return (sx.Param(self.variable.value),), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> CopiesWhenFlat:
        return cls(*children)


@jax.tree_util.register_pytree_node_class
class CopiesWhenBuilt(Node):
    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.variable,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> CopiesWhenBuilt:
        (child,) = children
        return cls(sx.Param(child.value) if isinstance(child, sx.Param) else child)


TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "jit": lambda tree: sx.jit(_write_inside)(tree),
    "remat": lambda tree: sx.remat(_write_inside)(tree),
    "cond": lambda tree: sx.cond(True, _write_inside, _write_inside, tree),
    "grad": lambda tree: sx.grad(lambda tree: tree["of"][0].variable.value)(tree),
    "vmap": lambda tree: sx.vmap(_write_inside, in_axes=None, axis_size=2)(tree),
}


def _write_inside(tree: Any) -> None:
    variable = tree["of"][0].variable
    variable.value = variable.value + 1


@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED.keys())
@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (
            CopiesWhenFlat,
            r"Flattening a CopiesWhenFlat.*lambda node: \(\(node\.variable,\), None\)",
        ),
        (CopiesWhenBuilt, r"CopiesWhenBuilt: .*lambda _, children: Node\(\*children\)"),
    ],
)
def test_argument_that_copies_variables_is_refused(
    kind: type[Node], advice: str, transformed: Any
) -> None:
    variable = sx.Param(1.0)
    with pytest.raises(sx.errors.ModuleError, match=advice):
        transformed({"of": [kind(variable)]})
    assert variable.value == 1.0
