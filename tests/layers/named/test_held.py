# SPDX-License-Identifier: Apache-2.0
"""Named arrays in Variables and frozen values outside of Modules are laid out as others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax import named
from shardax.errors import NamedAxesError, PrefixError, TransformError

RULES = sx.Rules({"a": "data", "b": "model"})


class Holder(sx.Module):
    def __init__(self) -> None:
        self.w = whole()
        self.deep = deep()


def whole() -> sx.Param[Any]:
    return sx.Param(named.ones({"b": 8, "a": 4}))


def deep() -> sx.Param[Any]:
    return sx.Param({"x": [named.ones({"b": 8}), jnp.ones(3)]})


TREES: dict[str, Callable[[], Any]] = {
    "variable": whole,
    "value of several": deep,
    "nested": lambda: {"p": [whole(), (deep(), {"q": named.ones({"a": 4})})]},
    "frozen": lambda: {"f": whole().freeze(), "g": [deep().freeze()]},
    "unbound": lambda: sx.unbind(Holder(), freeze=True),
    "state": lambda: sx.state(Holder()),
    "module": Holder,
}
SPECS = {(4, 8): P("data", "model"), (8,): P("model"), (4,): P("data"), (3,): P()}


def assert_laid_out(tree: Any) -> None:
    arrays = jax.tree.leaves(tree)
    assert [array.sharding.spec for array in arrays] == [SPECS[array.shape] for array in arrays]


@pytest.mark.parametrize("make", TREES.values(), ids=list(TREES))
def test_shardings_are_entries_of_initialise_and_jit(make: Any, auto_mesh: Mesh) -> None:
    tree = make()
    places = sx.shardings(tree, auto_mesh, RULES)
    assert_laid_out(sx.initialise(lambda: make(), mesh=auto_mesh, rules=RULES))
    assert_laid_out(sx.jit(lambda: make(), out_shardings=places)())
    taken = sx.jit(lambda tree: tree, in_shardings=(places,), out_shardings=places)(tree)
    assert_laid_out(taken)
    abstract = sx.abstract(tree, auto_mesh, RULES)
    assert sx.jit(lambda tree: None, in_shardings=(places,)).lower(abstract) is not None
    assert_laid_out(sx.shard(make(), auto_mesh, RULES))


def test_in_shardings_of_variable_given_twice_must_agree(auto_mesh: Mesh) -> None:
    w = whole()
    place, other = (sx.shardings(w, auto_mesh, rules) for rules in (RULES, {"a": "model"}))
    again = sx.shardings(w, auto_mesh, RULES)
    sx.jit(lambda first, second: None, in_shardings=(place, again))(w, w)
    with pytest.raises(TransformError, match=r"\.first: .*\n  \.second: "):
        sx.jit(lambda first, second: None, in_shardings=(place, other))(w, w)


def test_entry_of_other_names_or_structure_is_refused(auto_mesh: Mesh) -> None:
    wrong = sx.shardings(named.ones({"c": 3}), auto_mesh, {})
    with pytest.raises(PrefixError, match=r"in_shardings for the argument at \.w, a Param"):
        sx.jit(lambda w: None, in_shardings=(wrong,))(whole())
    with pytest.raises(PrefixError, match=r"in_shardings has no entry for the Param at \.w"):
        sx.jit(lambda w: None, in_shardings=({"y": wrong},))(deep())


# --- stacked --------------------------------------------------------------------------------------


class Pair(sx.Module):
    """A named and a plain parameter of the same name."""

    def __init__(self) -> None:
        self.named = sx.Param(named.ones({"b": 4}))
        self.plain = sx.Param(jnp.ones(4), axes=("b",))

    def __call__(self, x: Any) -> Any:
        return x * (self.named.value.unwrap("b") + self.plain)


def stacked(axis_name: str, make: Callable[[], Any] = Pair) -> Any:
    metadata = {sx.partition.PARTITION_NAME: axis_name}
    return sx.vmap(lambda _: make(), axis_size=2, in_axes=None, metadata=metadata)(0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: stacked("a"),
        lambda: sx.jit(lambda: stacked("a"))(),
        lambda: sx.nn.Stack(Pair, 2, axis_name="a").stacked,
    ],
    ids=["vmap", "jit", "stack"],
)
def test_stacked_named_parameters_lie_as_plain(make: Any, auto_mesh: Mesh) -> None:
    layers = make()
    specs = sx.shardings(layers, auto_mesh, RULES).flat()
    assert [jax.tree.leaves(specs[name,])[0].spec for name in ("named", "plain")] == [
        P("data", "model")
    ] * 2
    sx.shard(layers, auto_mesh, RULES)
    assert layers.named.value.sharding.spec == layers.plain.sharding.spec == P("data", "model")
    seen = []

    def apply(layer: Any, carry: Any) -> Any:
        seen.append((layer.named.value.dims, layer.plain.axes))
        return layer(carry)

    metadata = {sx.partition.PARTITION_NAME: "a"}
    scan = sx.scan(apply, in_axes=(0, sx.Carry), out_axes=sx.Carry, metadata=metadata)
    assert scan(layers, jnp.ones(4)).tolist() == [4.0] * 4
    assert set(seen) == {(("b",), ("b",))}


def test_stacks_of_stacked_named_parameters_lie_as_plain(auto_mesh: Mesh) -> None:
    layers = stacked("outer", lambda: stacked("a"))
    sx.shard(layers, auto_mesh, RULES)
    assert (
        layers.named.value.sharding.spec == layers.plain.sharding.spec == P(None, "data", "model")
    )


def test_stacked_dimension_has_no_name_of_value() -> None:
    layers = stacked("a")
    assert layers.named.value.dims == (None, "b")
    with pytest.raises(NamedAxesError, match="There is no axis 'a'; the names are 'b'"):
        layers.named.value.sum("a")
    assert layers.named.value.tag("a").sum("a").unwrap("b").tolist() == [2.0] * 4
