# SPDX-License-Identifier: Apache-2.0
"""Writes in JAX's own functions with derivative rules are refused, also in eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import ModuleError

X = jnp.ones(3)


class Counter(sx.Module):
    def __init__(self) -> None:
        self.calls = sx.Variable(jnp.int32(0))

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x.sum()


# What holds a Module, and how the Module is reached in it.
HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "Module": (lambda m: m, lambda m: m),
    "dict": (lambda m: {"m": m}, lambda tree: tree["m"]),
    "list": (lambda m: [1.0, [m]], lambda tree: tree[1][0]),
}


def by_custom_vjp(call: Any, tree: Any) -> Any:
    function = jax.custom_vjp(call)
    function.defvjp(lambda tree, x: (call(tree, x), None), lambda kept, g: (None, g * X))
    return function(tree, X)


def by_custom_jvp(call: Any, tree: Any) -> Any:
    function = jax.custom_jvp(call)
    function.defjvp(lambda given, tangents: (call(*given), tangents[1].sum()))
    return function(tree, X)


def by_custom_gradient(call: Any, tree: Any) -> Any:
    return jax.custom_gradient(lambda tree, x: (call(tree, x), lambda g: (None, g)))(tree, X)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("way", [by_custom_vjp, by_custom_jvp, by_custom_gradient])
def test_eager_write_is_refused_and_reads_work(way: Any, holder: str) -> None:
    hold, reach = HOLDERS[holder]
    model = Counter()
    with pytest.raises(ModuleError, match="a copy that JAX rebuilt"):
        way(lambda tree, x: reach(tree)(x), hold(model))
    assert int(model.calls) == 0
    read = way(lambda tree, x: x.sum() + reach(tree).calls.value, hold(model))
    assert float(read) == 3.0


@pytest.mark.parametrize(
    "copied",
    [
        lambda m: jax.tree.map(lambda x: x, m),
        lambda m: jax.tree.unflatten(jax.tree.structure(m), jax.tree.leaves(m)),
        jax.device_put,
        lambda m: jax.jit(lambda m: m)(m),
        jax.block_until_ready,
    ],
)
def test_ordinary_copies_stay_writable(copied: Any) -> None:
    copy = copied(Counter())
    assert float(copy(X)) == 3.0
    assert int(copy.calls) == 1
