# SPDX-License-Identifier: Apache-2.0
"""The table of handlers: what every walk knows of the values that a tree can hold."""

from __future__ import annotations

import collections
import functools
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax._core.graph import handlers
from shardax._core.graph.handlers import Handler, handler_of, register
from tests.strategies import Node


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclass
class Registered:
    first: Any
    second: Any


class Layer(Node):
    def double(self, x: Any) -> Any:
        return 2 * x


def _model() -> Layer:
    layer = Layer()
    layer.w, layer.array, layer.rate = sx.Param(jnp.ones(2)), jnp.ones(3), 0.5
    layer.items, layer.entries = [1, sx.Param(2.0)], {"a": sx.Param(3.0)}
    return layer


LAYER = _model()

VALUES: dict[str, tuple[Any, list[Any]]] = {
    "list": ([1, 2], [0, 1]),
    "tuple": ((1, 2), [0, 1]),
    "named tuple": (Point(1, 2), [0, 1]),
    "dict": ({"b": 1, "a": 2}, ["b", "a"]),
    "ordered dict": (collections.OrderedDict(b=1, a=2), ["b", "a"]),
    "partial": (functools.partial(max, 1, key=abs), [None, 0, "key"]),
    "method": (LAYER.double, [None]),
    "wrapper": (sx.jit(max), [None]),
    "Module": (LAYER, ["w", "rate", "items", "entries", "array"]),
    "List": (LAYER.items, [0, 1]),
    "Dict": (LAYER.entries, ["a"]),
    "State": (sx.State({"a": {"b": 1}, "c": 2}), ["a", "c"]),
    "dataclass": (Registered(1, 2), ["first", "second"]),
}


@pytest.mark.parametrize(("value", "keys"), VALUES.values(), ids=VALUES.keys())
def test_handler_rebuilds_every_kind_from_its_children(value: Any, keys: list[Any]) -> None:
    handler = handler_of(value)
    pairs = handler.children(value)
    assert [key for key, _ in pairs] == keys
    again = handler.remake(value, pairs)
    assert type(again) is type(value)
    assert again is not value
    for (key, child), (new_key, new) in zip(pairs, handler.children(again), strict=True):
        assert new_key == key and (new is child or type(new) is sx.State)
    assert pickle.loads(pickle.dumps(handler)) is handler


@pytest.mark.parametrize("value", [1, "text", None, jnp.ones(2), abs, int, sx.Param(1.0)])
def test_handler_of_other_values_has_no_children(value: Any) -> None:
    assert list(handler_of(value).children(value)) == []


def test_has_identity_is_true_of_objects_lists_and_dicts_only() -> None:
    identical = {name for name, (value, _) in VALUES.items() if handler_of(value).has_identity}
    assert identical == {"list", "dict", "ordered dict", "Module", "List", "Dict"}
    assert handler_of(sx.Param(1.0)).has_identity


def test_new_container_needs_only_one_table_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair:
        def __init__(self, left: Any, right: Any) -> None:
            self.left, self.right = left, right

    monkeypatch.setattr(handlers, "_rows", list(handlers._rows))
    monkeypatch.setattr(handlers, "_known", {})
    pair = Handler(
        "pair of a test",
        children=lambda value: [("left", value.left), ("right", value.right)],
        rebuild=lambda kind, pairs: kind(*(child for _, child in pairs)),
        in_models=True,
    )
    register(Pair, pair)
    shared = sx.Param(jnp.ones(2))
    model = Node()
    model.pair, model.alone = Pair(shared, (shared, 7)), shared
    assert [path for path, _ in sx.iter_variables(model)] == [("pair", "left")]
    assert sx.find_duplicates(model) == [[("pair", "left"), ("pair", "right", 0), ("alone",)]]
    copied = sx.clone(model)
    assert type(copied.pair) is Pair and copied.pair.right == (copied.alone, 7)
    assert copied.pair.left is copied.alone is not shared
    assert "left=" in repr(model) and "<same Param as .pair.left>" in repr(model)
    edited = sx.select(model).at_keypaths(".pair.right[1]").set(8)
    assert edited.pair.right == (shared, 8) and edited.pair.left is shared
    slots, taken = sx.unbind(model)
    assert len(taken) == 1 and sx.bind(slots, taken).pair.left is shared
    assert sx.jit(lambda m: m.pair.left + 1)(model).tolist() == [2.0, 2.0]
    handlers._by_name.pop("pair of a test")


def test_last_row_that_accepts_a_class_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    class Special(tuple[Any, ...]):
        __slots__ = ()

    monkeypatch.setattr(handlers, "_rows", list(handlers._rows))
    monkeypatch.setattr(handlers, "_known", {})
    special = Handler("special tuple of a test")
    assert handler_of(Special()) is handlers.TUPLE
    register(tuple, special, where=lambda value: type(value) is Special)
    assert handler_of(Special()) is special and handler_of(()) is handlers.TUPLE
    handlers._by_name.pop("special tuple of a test")
