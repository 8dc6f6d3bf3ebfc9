# SPDX-License-Identifier: Apache-2.0
"""Eager calls see changes since a trace, wherever they are; what a trace wrote is none."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardax as sx

TRUE = jnp.array(True)


def same(x: Any) -> Any:
    return x


class Plain:
    """An ordinary object."""

    scale = 1.0


class Slots:
    """An object without a ``__dict__``."""

    __slots__ = ("__weakref__", "scale")


class SlotsBelow(Slots):
    """An object whose base class has slots."""


class SlotsRenamed(Slots):
    """An object with a property in place of an attribute of its base class."""

    @property
    def scale(self) -> float:
        return 2.0


class FloatWithUnit(float):
    """A number with an attribute."""


class Sizes(dict[str, int]):
    """A dictionary with an attribute."""


class Queue(collections.deque[float]):
    """A subclass of a class that is written in C."""


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass, which may hold what is not frozen."""

    held: Any


def function_with_attribute(x: Any) -> Any:
    return x * function_with_attribute.scale


def in_item(held: Any, value: float) -> None:
    held[0] = value


def in_attribute(held: Any, value: float) -> None:
    held.scale = value


def scaled_by_item(held: Any) -> Callable[[Any], Any]:
    return lambda x: x * held[0]


def scaled_by_attribute(held: Any) -> Callable[[Any], Any]:
    return lambda x: x * held.scale


def scaled_by(read: Callable[[], float]) -> Callable[[Any], Any]:
    return lambda x: x * read()


PLAIN, FROZEN_SET = Plain(), frozenset({Plain()})
(IN_SET,) = FROZEN_SET
HELD: dict[str, tuple[Any, Callable[[Any, float], None], Callable[[Any], Any]]] = {
    "slots": ((held := Slots()), in_attribute, scaled_by_attribute(held)),
    "slots of a base": ((held := SlotsBelow()), in_attribute, scaled_by_attribute(held)),
    "deque": ((held := collections.deque([1.0])), in_item, scaled_by_item(held)),
    "subclass in C": ((held := Queue([1.0])), in_item, scaled_by_item(held)),
    "bytearray": ((held := bytearray(1)), in_item, scaled_by_item(held)),
    "default dict": ((held := collections.defaultdict(int)), in_item, scaled_by_item(held)),
    "namespace": ((held := types.SimpleNamespace()), in_attribute, scaled_by_attribute(held)),
    "attribute of a dict": ((held := Sizes(a=1)), in_attribute, scaled_by_attribute(held)),
    "attribute of a number": ((held := FloatWithUnit(2)), in_attribute, scaled_by_attribute(held)),
    "attribute of a function": (
        function_with_attribute,
        in_attribute,
        lambda x: function_with_attribute(x),
    ),
    "frozen dataclass": (PLAIN, in_attribute, scaled_by_attribute(PLAIN)),
    "in a frozen dataclass": (
        PLAIN,
        in_attribute,
        functools.partial(lambda config, x: x * config.held.scale, Frozen(PLAIN)),
    ),
    "in a frozen set": (IN_SET, in_attribute, lambda x: x * next(iter(FROZEN_SET)).scale),
    "weak reference": (
        PLAIN,
        in_attribute,
        functools.partial(lambda reference, x: x * reference().scale, weakref.ref(PLAIN)),
    ),
    "method of a list": (
        (held := [1.0]),
        in_item,
        functools.partial(lambda method, x: x * method(0), held.__getitem__),
    ),
    "set": (
        (numbers := set[float]()),
        lambda held, value: held.clear() or held.add(value),
        lambda x: x * next(iter(numbers)),
    ),
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("transform", ["cond", "jit"])
def test_change_of_what_is_held_is_seen(name: str, transform: str) -> None:
    held, write, function = HELD[name]
    results = []
    for value in (1, 1, 1, 4, 1):
        write(held, value)
        # ``jit`` of a function made anew, so that no program is that of one ``Jit``.
        anew = functools.partial(function) if transform == "cond" else (lambda x: function(x))
        results.append(
            float(sx.cond(TRUE, anew, same, 1.0) if transform == "cond" else sx.jit(anew)(1.0))
        )
    assert results == [1, 1, 1, 4, 1]


@pytest.mark.parametrize(
    "draw",
    [
        random.Random(0).random,
        random.Random(0),
        np.random.default_rng(0).normal,
        np.random.RandomState(0),
        itertools.count(1).__next__,
        itertools.count(1),
        (number for number in range(1, 9)),
    ],
    ids=lambda draw: type(draw).__name__,
)
def test_hidden_states_are_read_at_every_call(draw: Any) -> None:
    def drawn() -> float:
        if hasattr(draw, "random"):
            return float(draw.random())
        return float(draw() if callable(draw) else next(draw))

    results = {float(sx.fori_loop(0, 1, lambda i, x: x + drawn(), 0.0)) for _ in range(4)}
    assert len(results) == 4


def test_list_that_a_trace_appends_to_may_change() -> None:
    history = [0.5]

    def branch(x: Any) -> Any:
        history.append(1.0)
        return x * history[0]

    results = [float(sx.cond(TRUE, branch, same, 1.0)) for _ in range(3)]
    assert (results, history) == ([0.5] * 3, [0.5, 1.0])
    history[0] = 2.0
    assert float(sx.cond(TRUE, lambda x: branch(x), same, 1.0)) == 2.0


def test_value_written_by_user_and_trace_is_read() -> None:
    state = {"scale": 1.0}

    def branch(x: Any) -> Any:
        y = x * state["scale"]
        state["scale"] = 5.0
        return y

    results = []
    for scale in (1.0, 1.0, 2.0, 2.0, 1.0):
        state["scale"] = scale
        results.append(float(sx.cond(TRUE, lambda x: branch(x), same, 1.0)))
    assert results == [1, 1, 2, 2, 1]


def test_new_list_is_filled_by_a_trace() -> None:
    def rollout() -> list[Any]:
        shapes: list[Any] = []

        def body(step: Any, x: Any) -> Any:
            shapes.append(x.shape)
            return x + 1

        sx.fori_loop(0, 2, body, jnp.zeros(3))
        return shapes

    first = rollout()
    assert first
    assert [rollout() for _ in range(3)] == [first] * 3


COUNT = 0


def counted_branch(x: Any) -> Any:
    global COUNT
    COUNT += 1
    return x + 1


def counted_body(step: Any, x: Any) -> Any:
    global COUNT
    COUNT += 1
    return x * 2


def test_calls_that_share_a_counter_trace_once() -> None:
    def call() -> None:
        sx.cond(TRUE, counted_branch, same, 1.0)
        sx.fori_loop(0, 2, counted_body, 1.0)

    call()
    first = COUNT
    assert first > 0
    for _ in range(4):
        call()
    assert first == COUNT


@pytest.mark.parametrize("transform", ["cond", "jit"])
def test_cleared_counter_of_one_function_traces_nothing(transform: str) -> None:
    traces = []

    def counted(x: Any) -> Any:
        traces.append(None)
        return x

    for _ in range(3):
        traces.clear()
        _ = sx.cond(TRUE, counted, same, 1.0) if transform == "cond" else sx.jit(counted)(1.0)
    assert traces == []


@pytest.mark.parametrize(
    "inner",
    [
        lambda x: logging.getLogger("a").debug("traced") or x,
        sx.vmap(lambda x: 2 * x),
        sx.remat(jnp.sin),
        sx.jit(lambda x: x * 2),
        jax.jit(jnp.cos),
        lambda x: optax.adam(1e-3).init(x)[0].mu + jax.nn.relu(x),
        functools.lru_cache(lambda x: x),
    ],
    ids=["logger", "vmap", "remat", "jit", "jax.jit", "optax", "lru_cache"],
)
def test_eager_cond_is_traced_once_with_constants(inner: Callable[[Any], Any]) -> None:
    traces = []

    def branch(x: Any) -> Any:
        traces.append(None)
        return x + (0 * x if hasattr(inner, "cache_info") else inner(x))

    for _ in range(4):
        sx.cond(TRUE, branch, same, jnp.ones(2))
    assert len(traces) == 1


def test_jit_of_one_function_keeps_its_traces_as_in_jax() -> None:
    options = Plain()
    options.scale = 1.0

    def step(x: Any) -> Any:
        return x * options.scale

    for jit in (sx.jit, jax.jit):
        options.scale = 1.0
        compiled = jit(step)
        compiled(jnp.ones(2))
        options.scale = 2.0
        assert float(compiled(jnp.ones(3))[0]) == 2.0  # traced with what is now
        options.scale = 1.0
        assert float(jit(step)(jnp.ones(3))[0]) == 2.0
        assert float(jit(lambda x: step(x))(jnp.ones(3))[0]) == 1.0


def test_slots_of_a_static_argument_are_compared() -> None:
    options = Slots()
    step = sx.jit(lambda x, options: x * options.scale, static_argnames="options")
    results = []
    for options.scale in (1.0, 2.0, 1.0):
        results.append(float(step(1.0, options)))
    assert results == [1.0, 2.0, 1.0]


def test_unset_slots_behind_properties_are_ignored() -> None:
    options = SlotsRenamed()
    step = sx.jit(lambda x, options: x * options.scale, static_argnames="options")
    assert float(step(1.0, options)) == 2.0
    assert float(sx.cond(TRUE, lambda x: x * options.scale, same, 1.0)) == 2.0
