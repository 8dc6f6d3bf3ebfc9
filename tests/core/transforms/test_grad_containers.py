# SPDX-License-Identifier: Apache-2.0
"""Filters choose Variables in containers as they do in Modules."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx

Pair = collections.namedtuple("Pair", ["weight", "rest"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    weight: Any
    rest: Any


class Node:
    def __init__(self, weight: Any, rest: Any) -> None:
        self.weight, self.rest = weight, rest


jax.tree_util.register_pytree_node(
    Node, lambda node: ((node.weight, node.rest), None), lambda _, children: Node(*children)
)

# Containers of a weight and the rest, and how the weight is read.
CONTAINERS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda w, r: {"weight": w, "rest": r}, lambda c: c["weight"]),
    "list": (lambda w, r: [w, r], lambda c: c[0]),
    "tuple": (lambda w, r: (w, r), lambda c: c[0]),
    "namedtuple": (Pair, lambda c: c.weight),
    "dataclass": (Data, lambda c: c.weight),
    "node": (Node, lambda c: c.weight),
    "nested": (lambda w, r: {"a": [Data(w, 0.0), r]}, lambda c: c["a"][0].weight),
}
RESTS = {
    "statistics": lambda: sx.BatchStat(jnp.ones(3)),
    "integers": lambda: sx.Variable(jnp.int32(0)),
    "keys": lambda: sx.RngState(jax.random.key(0)),
}


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_filter_chooses_inside_of_containers(container: str, rest: str) -> None:
    make, read = CONTAINERS[container]
    given = make(sx.Param(jnp.ones(3)), RESTS[rest]())

    def loss(held: Any) -> Any:
        return jnp.sum(read(held).value * 2)

    for options in ({}, {"wrt": sx.Param}, {"argnums": sx.DiffState(0, sx.Param)}):
        value, gradient = sx.value_and_grad(loss, **options)(given)
        chosen = [leaf for leaf in jax.tree.leaves(gradient) if getattr(leaf, "ndim", 0) == 1]
        assert float(value) == 6.0
        assert [leaf.tolist() for leaf in chosen] == [[2.0, 2.0, 2.0]]


def test_path_filter_sees_the_path_in_the_container() -> None:
    given = {"a": sx.Param(jnp.ones(2)), "b": [sx.Param(jnp.ones(2))]}
    gradient = sx.grad(
        lambda held: jnp.sum(held["a"] * 2 + held["b"][0] * 3), wrt=sx.PathContains("b")
    )(given)
    assert gradient["a"] is None and gradient["b"][0].tolist() == [3.0, 3.0]


def test_container_without_a_chosen_variable_is_refused() -> None:
    with pytest.raises(sx.errors.TransformError, match="no Variable that the filter Param"):
        sx.grad(lambda held: held["a"].value.sum())({"a": sx.BatchStat(jnp.ones(2))})
    stats = {"a": sx.BatchStat(jnp.ones(2))}
    gradient = sx.grad(lambda held: held["a"].value.sum(), wrt=sx.BatchStat)(stats)
    assert gradient["a"].tolist() == [1.0, 1.0]
