# SPDX-License-Identifier: Apache-2.0
"""Operations on Variables in containers: as on those of a Module.

The table: each operation over each container of a parameter and of statistics.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import StateMismatchError, TrainError
from shardax.train import EMA, Optimizer, checkpoint

Named = collections.namedtuple("Named", ["weight", "mean"])
RULES = {"mlp": "model"}


class Pair(sx.Module):
    def __init__(self, weight: Any, mean: Any) -> None:
        self.weight, self.mean = weight, mean


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    weight: Any
    mean: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Struct:
    """A frozen dataclass with a field that is no child."""

    weight: Any
    mean: Any
    name: str = dataclasses.field(default="layer", metadata={"static": True})


@flax.struct.dataclass
class FlaxStruct:
    weight: Any
    mean: Any
    name: str = flax.struct.field(pytree_node=False, default="layer")


class Node:
    def __init__(self, weight: Any, mean: Any) -> None:
        self.weight, self.mean = weight, mean


class KeyedNode(Node):
    pass


jax.tree_util.register_pytree_node(
    Node, lambda node: ((node.weight, node.mean), None), lambda _, children: Node(*children)
)
jax.tree_util.register_pytree_with_keys(
    KeyedNode,
    lambda node: (
        tuple((jax.tree_util.GetAttrKey(n), getattr(node, n)) for n in ("weight", "mean")),
        None,
    ),
    lambda _, children: KeyedNode(*children),
)

# Containers of a weight and a mean, with the path of the weight.
CONTAINERS: dict[str, tuple[Callable[[Any, Any], Any], tuple[Any, ...]]] = {
    "Module": (Pair, ("weight",)),
    "dict": (lambda w, m: {"weight": w, "mean": m}, ("weight",)),
    "list": (lambda w, m: [w, m], (0,)),
    "tuple": (lambda w, m: (w, m), (0,)),
    "dataclass": (Data, ("weight",)),
    "struct": (Struct, ("weight",)),
    "flax struct": (FlaxStruct, ("weight",)),
    "named tuple": (Named, (0,)),
    "node": (Node, (0,)),
    "keyed node": (KeyedNode, ("weight",)),
    "nested": (lambda w, m: {"a": [Struct(Named(w, ()), {"m": (m,)})]}, ("a", 0, "weight", 0)),
    "Module in list": (lambda w, m: [{"a": Pair(w, None)}, m], (0, "a", "weight")),
    "nested in Module": (
        lambda w, m: Pair([Data((w,), Node(m, None))], None),
        ("weight", 0, "weight", 0),
    ),
}
# Layouts name the fields of a bare NamedTuple as JAX does; paths in States number them.
PATHS_OF_FIELDS: dict[str, tuple[Any, ...]] = {
    "named tuple": ("weight",),
    "nested": ("a", 0, "weight", "weight"),
}
in_each_container = pytest.mark.parametrize("container", CONTAINERS)


def tree_of(
    container: str, weight: Any = 1.0, mean: Any = 2.0, leading: tuple[int, ...] = ()
) -> Any:
    """A container of a weight (4, 8) and a mean (2,), each of one number."""
    make, _ = CONTAINERS[container]
    return make(
        sx.Param(jnp.full((4, 8), weight), axes=("embed", "mlp")),
        sx.BatchStat(jnp.full((*leading, 2), mean)),
    )


def variable_of(tree: Any, kind: Any) -> Any:
    ((_, variable),) = sx.iter_variables(tree, kind)
    return variable


def numbers(tree: Any) -> tuple[float, float]:
    """The numbers of the weight and the mean, where each is of one number."""
    uniques = [np.unique(variable_of(tree, kind).value) for kind in (sx.Param, sx.BatchStat)]
    (weight,), (mean,) = uniques
    return float(weight), float(mean)


def loss(tree: Any, scale: Any = 1.0) -> Any:
    weight, mean = variable_of(tree, sx.Param), variable_of(tree, sx.BatchStat)
    return scale * (3 * weight.value.sum() + 5 * mean.value.sum())


@in_each_container
def test_wrt_chooses_by_filter(container: str) -> None:
    tree = tree_of(container)
    for kind, number, shape in ((sx.Param, 3.0, (4, 8)), (sx.BatchStat, 5.0, (2,))):
        by_argument = sx.value_and_grad(loss, argnums=sx.DiffState(0, kind))
        for differentiated in (sx.value_and_grad(loss, wrt=kind), by_argument):
            value, gradient = differentiated(tree)
            (leaf,) = jax.tree.leaves(gradient)
            np.testing.assert_array_equal(leaf, np.full(shape, number))
            assert float(value) == 3 * 32 + 5 * 4
    (leaf,) = jax.tree.leaves(sx.grad(loss)(tree))
    assert leaf.shape == (4, 8)


@in_each_container
def test_state_sharding_splits_by_filter(container: str, auto_mesh: Mesh) -> None:
    tree = tree_of(container)
    specs = sx.StateSharding({sx.Param: P(None, "model"), ...: P("data")})
    shapes = []

    def body(tree: Any) -> Any:
        weight, mean = variable_of(tree, sx.Param), variable_of(tree, sx.BatchStat)
        shapes.extend([weight.shape, mean.shape])
        mean.value = mean.value + 1
        return weight.value

    run = sx.shard_map(body, mesh=auto_mesh, in_specs=(specs,), out_specs=P(None, "model"))
    assert run(tree).shape == (4, 8)
    assert shapes[:2] == [(4, 2), (1,)] and numbers(tree) == (1.0, 3.0)
    places = sx.StateSharding({k: NamedSharding(auto_mesh, spec) for k, spec in specs.items()})
    step = sx.jit(lambda tree: variable_of(tree, sx.Param).value + 1, in_shardings=(places,))
    assert step(tree_of(container)).sharding.spec == P(None, "model")


@in_each_container
def test_state_axes_map_by_filter(container: str) -> None:
    tree = tree_of(container, leading=(3,))
    axes = sx.StateAxes({sx.Param: None, ...: 0})

    def row(tree: Any, x: Any) -> Any:
        weight, mean = variable_of(tree, sx.Param), variable_of(tree, sx.BatchStat)
        mean.value = mean.value + x
        return weight.value.sum() + mean.value.sum()

    totals = sx.vmap(row, in_axes=(axes, 0))(tree, jnp.arange(3.0))
    np.testing.assert_array_equal(totals, [36.0, 38.0, 40.0])
    mean = variable_of(tree, sx.BatchStat).value
    np.testing.assert_array_equal(mean, [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]])
    totals = sx.scan(lambda tree, x: row(tree, x), in_axes=(axes, 0), out_axes=0)(tree, jnp.ones(3))
    np.testing.assert_array_equal(totals, [38.0, 40.0, 42.0])


@in_each_container
def test_select_finds_and_replaces(container: str) -> None:
    tree, path = tree_of(container), CONTAINERS[container][1]
    selection = sx.select(tree).at_instances_of(sx.Param)
    assert selection.keypaths() == (path,)
    assert selection.get() is variable_of(tree, sx.Param)
    edited = selection.apply(lambda weight: sx.Param(weight.value * 7))
    assert type(edited) is type(tree)
    assert numbers(edited) == (7.0, 2.0) and numbers(tree) == (1.0, 2.0)
    assert variable_of(edited, sx.BatchStat) is variable_of(tree, sx.BatchStat)
    by_path = sx.select(tree).at_keypaths(path).set(sx.Param(jnp.zeros(2)))
    assert variable_of(by_path, sx.Param).shape == (2,)


@in_each_container
def test_shard_lays_out_in_place(container: str, auto_mesh: Mesh) -> None:
    tree = tree_of(container)
    assert sx.shard(tree, auto_mesh, RULES) is tree
    assert variable_of(tree, sx.Param).sharding == NamedSharding(auto_mesh, P(None, "model"))
    assert variable_of(tree, sx.BatchStat).sharding.is_fully_replicated
    specs = jax.tree.leaves(sx.partition_specs(tree, RULES), is_leaf=lambda x: isinstance(x, P))
    assert sorted(specs, key=len) == [P(), P(None, "model")]
    assert sx.check(tree, auto_mesh, RULES) == []


@in_each_container
def test_check_names_paths(container: str) -> None:
    mesh = AbstractMesh((3,), ("model",))
    (diagnostic,) = sx.check(tree_of(container), mesh, RULES)
    path = PATHS_OF_FIELDS.get(container, CONTAINERS[container][1])
    assert (diagnostic.code, diagnostic.path) == ("indivisible", path)


@in_each_container
def test_checkpoint_restores_values(container: str, tmp_path: Path, auto_mesh: Mesh) -> None:
    checkpoint.save(tree_of(container, 3.0, 4.0), tmp_path / "saved")
    tree = tree_of(container)
    variables = [variable for _, variable in sx.iter_variables(tree)]
    checkpoint.restore(tree, tmp_path / "saved")
    assert numbers(tree) == (3.0, 4.0)
    assert all(a is b for a, (_, b) in zip(variables, sx.iter_variables(tree), strict=True))
    tree, position = tree_of(container, 0.0, 0.0), {"epoch": 3}
    checkpoint.save((tree, position), tmp_path / "zeros")
    tree, position = tree_of(container), {"epoch": 0}
    checkpoint.restore((tree, position), tmp_path / "zeros", auto_mesh, RULES)
    assert numbers(tree) == (0.0, 0.0) and position == {"epoch": 3}
    assert variable_of(tree, sx.Param).sharding.spec == P(None, "model")


@in_each_container
def test_update_writes_by_path(container: str) -> None:
    tree, path = tree_of(container), CONTAINERS[container][1]
    weight = variable_of(tree, sx.Param)
    sx.update(tree, sx.state(tree_of(container, 3.0, 4.0)))
    assert numbers(tree) == (3.0, 4.0)
    sx.update(tree, {path: jnp.full((4, 8), 5.0)})
    sx.update(tree, sx.state(tree_of(container, 6.0, 7.0), sx.BatchStat))
    assert numbers(tree) == (5.0, 7.0) and variable_of(tree, sx.Param) is weight
    sx.update(tree, jax.tree.map(lambda x: 2 * x, sx.state(tree)))
    assert numbers(tree) == (10.0, 14.0)
    with pytest.raises(StateMismatchError, match="shape"):
        sx.update(tree, {path: jnp.zeros(3)})
    with pytest.raises(StateMismatchError, match="absent"):
        sx.update(tree, {"absent": jnp.zeros(3)})
    assert numbers(tree) == (10.0, 14.0)


@in_each_container
def test_optimizer_trains_what_is_chosen(container: str) -> None:
    tree = tree_of(container)
    optimizer = Optimizer(tree, optax.sgd(0.5, momentum=0.5))

    @sx.jit
    def step(tree: Any, optimizer: Any) -> Any:
        value, gradients = sx.value_and_grad(loss, wrt=optimizer.wrt)(tree)
        optimizer.update(gradients)
        return value

    assert float(step(tree, optimizer)) == 3 * 32 + 5 * 4
    assert numbers(tree) == (-0.5, 2.0)
    assert float(step(tree, optimizer)) == 3 * -16 + 5 * 4
    assert numbers(tree) == (-2.75, 2.0)
    with pytest.raises(TrainError, match=r"(?s)trained but has no gradient.*wrt="):
        optimizer.update(sx.grad(loss, wrt=sx.BatchStat)(tree))
    assert numbers(tree) == (-2.75, 2.0)
    statistics = Optimizer(tree, optax.sgd(1.0), wrt=sx.BatchStat)
    statistics.update(sx.grad(loss, wrt=sx.BatchStat)(tree))
    assert numbers(tree) == (-2.75, -3.0)


@in_each_container
def test_moments_are_laid_out_as_parameters(container: str, auto_mesh: Mesh) -> None:
    tree = tree_of(container)
    optimizer = Optimizer(tree, optax.sgd(0.5, momentum=0.5))
    sx.shard((tree, optimizer), auto_mesh, RULES)
    moments = [v for _, v in sx.iter_variables(optimizer.opt_state) if v.shape == (4, 8)]
    assert [moment.sharding.spec for moment in moments] == [P(None, "model")]


@in_each_container
def test_averages_follow_what_is_chosen(container: str) -> None:
    tree = tree_of(container)
    averages = EMA(tree, 0.5)
    variable_of(tree, sx.Param).value = jnp.full((4, 8), 3.0)
    variable_of(tree, sx.BatchStat).value = jnp.full(2, 8.0)
    averages.update(tree)
    assert numbers(averages.model) == (2.0, 8.0) and numbers(tree) == (3.0, 8.0)


def test_tied_weights_of_dict_restore_onto_mesh(tmp_path: Path, auto_mesh: Mesh) -> None:
    def tree_with(number: float) -> dict[str, Any]:
        weight = sx.Param(jnp.full((4, 8), number), axes=("embed", "mlp"))
        return {"output": weight, "bias": sx.Param(jnp.full(2, number)), "input": weight}

    checkpoint.save(tree_with(3.0), tmp_path / "saved")
    tree = tree_with(0.0)
    checkpoint.restore(tree, tmp_path / "saved", auto_mesh, RULES)
    assert tree["output"] is tree["input"] and (tree["output"].value == 3.0).all()
    assert tree["output"].sharding.spec == P(None, "model")
    assert tree["bias"].value.tolist() == [3.0, 3.0] and tree["bias"].sharding.spec == P()


def test_gradients_of_nested_lists_are_named_by_path() -> None:
    tree = {"layers": [sx.Param(jnp.ones(2)), sx.Param(jnp.ones(3))], "seen": [sx.Variable(0)]}
    optimizer = Optimizer(tree, optax.sgd(1.0))
    with pytest.raises(TrainError) as caught:
        optimizer.update({"layers": [jnp.ones(2), jnp.ones(4)], "seen": [jnp.ones(1)]})
    assert "  .layers[1]: has shape (3,), its gradient (4,)\n" in str(caught.value)
    assert "  .seen[0]: has a gradient but is not trained\n" in str(caught.value)
    optimizer.update({"layers": [jnp.ones(2), 2 * jnp.ones(3)], "seen": [None]})
    assert [v.value.tolist() for v in tree["layers"]] == [[0.0, 0.0], [-1.0, -1.0, -1.0]]
    sx.update(tree, {"layers": [jnp.zeros(2), jnp.ones(3)]})
    assert [v.value.tolist() for v in tree["layers"]] == [[0.0, 0.0], [1.0, 1.0, 1.0]]
