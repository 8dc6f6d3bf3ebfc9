# SPDX-License-Identifier: Apache-2.0
"""Trees of a checkpoint: plain arrays, optax states, dicts in any order, positions on meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardax as sx
from shardax.errors import CheckpointError
from shardax.train.checkpoint import restore, save
from tests.advice import run_advice


class Net(sx.Module):
    def __init__(self, value: float) -> None:
        self.kernel = sx.Param(jnp.full((8, 2), value), axes=("embed", None))


class Pair(NamedTuple):
    array: Any
    module: Any


def numbers(tree: Any) -> list[Any]:
    """Types and values of all arrays of a tree."""
    return [(type(leaf), np.asarray(leaf).tolist()) for leaf in jax.tree.leaves(tree)]


def trees(value: float) -> dict[str, Any]:
    """Trees of one form whose arrays have a value."""
    array = jnp.full((2,), value)
    return {
        "false": {"step": sx.Variable(jnp.float32(value))},
        "nested first": {"state": {"step": sx.Variable(jnp.float32(value))}, "model": Net(value)},
        "scale first": {"scale": sx.Param(array), "model": Net(value)},
        "model first": {"model": Net(value), "scale": sx.Param(array)},
        "shared array": {"a": array, "b": [array, array + 1]},
        "one element": {"a": jnp.full((1,), value), "b": np.full((1,), value)},
        "empty": {"a": jnp.zeros((0,)), "b": array},
        "list": [array, {"b": Net(value)}],
        "optax": {"opt": optax.adam(0.1).init({"w": array}), "params": {"w": array}},
        "named tuple": {"pair": Pair((array, None), Net(value)), "deep": [Pair(array, [array])]},
        "state": {"state": sx.state(Net(value)), "none": None},
        "state of states": {
            "state": sx.State.from_flat(
                {("a", 0): array, ("b",): array + 1, ("a", "x", "w"): array + 2}
            )
        },
        "keys": {"key": jax.random.key(int(value))},
        "half": {"a": array.astype(jnp.bfloat16)},
    }


@pytest.mark.parametrize("kind", list(trees(0.0)))
@pytest.mark.parametrize(("saved", "before"), [(0.0, 3.0), (3.0, 0.0)])
def test_any_tree_is_restored_into_its_form(
    tmp_path: Path, kind: str, saved: float, before: float
) -> None:
    source, target = trees(saved)[kind], trees(before)[kind]
    if kind == "keys":
        source, target = ({"key": jax.random.key(int(n))} for n in (saved, before))
        save(source, tmp_path / "one")
        restore(target, tmp_path / "one")
        assert jax.random.key_data(target["key"]).tolist() == [0, int(saved)]
        return
    save(source, tmp_path / "one")
    restore(target, tmp_path / "one")
    assert jax.tree.structure(target) == jax.tree.structure(source)
    assert numbers(target) == numbers(source)


def test_tuples_of_arrays_are_restored_into_lists(tmp_path: Path) -> None:
    tx = optax.adam(0.1)
    params = {"w": jnp.ones(2)}
    save((params, tx.init(params)), tmp_path / "one")
    params = {"w": jnp.zeros(2)}
    tree = (params, tx.init({"w": jnp.ones(2)}))
    with pytest.raises(CheckpointError, match=r"array at \[1\]\[0\]\[0\]") as refused:
        restore(tree, tmp_path / "one")
    assert params["w"].tolist() == [0, 0]
    names = {"tree": tree}
    run_advice(refused.value, "holder = list(tree)", names)
    holder: Any = names["holder"]
    restore(holder, tmp_path / "one")
    assert params["w"].tolist() == [1, 1] and int(holder[1][0].count) == 0
    with pytest.raises(CheckpointError, match="The tree cannot be written into") as refused:
        save(jnp.ones(2), tmp_path / "two")
    names = {"tree": jnp.ones(2)}
    run_advice(refused.value, 'holder = {"tree": tree}', names)
    save(names["holder"], tmp_path / "two")


def test_mismatch_of_plain_arrays_changes_nothing(tmp_path: Path) -> None:
    save({"a": jnp.ones(2), "b": jnp.ones(3)}, tmp_path / "one")
    target = {"a": jnp.zeros(2), "b": jnp.zeros(4)}
    with pytest.raises(CheckpointError, match=r"\.b: \(4,\), stored \(3,\)"):
        restore(target, tmp_path / "one")
    assert target["a"].tolist() == [0, 0]


@pytest.mark.parametrize("in_scope", [False, True])
def test_positions_are_restored_onto_a_mesh(tmp_path: Path, in_scope: bool) -> None:
    mesh = jax.make_mesh((2,), ("data",))
    save((Net(1.0), {"epoch": 3}, None, [jnp.ones(2)]), tmp_path / "one")
    tree: Any = (Net(0.0), {"epoch": 0}, None, [jnp.zeros(2)])
    if in_scope:
        with jax.set_mesh(mesh), sx.axis_rules({"embed": "data"}):
            restore(tree, tmp_path / "one")
    else:
        restore(tree, tmp_path / "one", mesh, {"embed": "data"})
    assert tree[1] == {"epoch": 3}
    assert tree[0].kernel.value.sharding.spec == jax.P("data", None)
    assert tree[0].kernel.value.sharding.mesh.shape == {"data": 2}
    assert numbers(tree[3]) == numbers([jnp.ones(2)])
    assert tree[3][0].sharding.is_fully_replicated
