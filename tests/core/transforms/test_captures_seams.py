# SPDX-License-Identifier: Apache-2.0
"""Captured objects at the seams: names that are bound anew, in other structures, while tracing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import ClosureError

uncertain = pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")


def variable(number: float) -> Any:
    return sx.Variable(jnp.float32(number))


A, B = variable(1), variable(10)


class Pair(sx.Module):
    """Two variables, read by methods."""

    def __init__(self, first: float, second: float) -> None:
        self.first, self.second = variable(first), variable(second)

    def enc(self, x: Any) -> Any:
        return x * self.first

    def dec(self, x: Any) -> Any:
        return x * self.second


def difference(x: Any, y: Any) -> Any:
    return x.value - y.value


# (what stands in the cell, what is bound there next, what reads it)
BOUND_ANEW: dict[str, tuple[Any, Any, Any]] = {
    "variable": (A, B, lambda held: held * 1),
    "other item of a tuple": ((A, B, 3), (0, A, B), lambda held: held[1] * 1),
    "nested tuples": (((A,), B), ((A, B), 0), lambda held: held[0][-1] * 1),
    "module, and a tuple of it": (A, (B,), lambda held: jax.tree.leaves(held)[0] * 1),
    "partial with other names": (
        functools.partial(difference, x=A, y=B),
        functools.partial(difference, y=A, x=B),
        lambda held: held(),
    ),
    "partial of another function": (
        functools.partial(jnp.add, A),
        functools.partial(jnp.multiply, B),
        lambda held: held(2.0),
    ),
    "method of another name": (Pair(2, 3).enc, Pair(4, 5).dec, lambda held: held(1.0)),
    "jitted function": (sx.jit(lambda x: x * A), sx.jit(lambda x: x * B), lambda held: held(1.0)),
    "mapped function": (
        sx.vmap(lambda x: x * A),
        sx.vmap(lambda x: x * B),
        lambda held: held(jnp.ones(2))[0],
    ),
}


@pytest.mark.parametrize("name", BOUND_ANEW)
def test_name_bound_to_another_structure_is_noticed(name: str) -> None:
    first, second, read = BOUND_ANEW[name]
    held = first
    compiled = sx.jit(lambda: read_held(held))

    def read_held(held: Any) -> Any:
        return read(held)

    results = []
    for held in (first, second, first):
        results.append([float(compiled()), float(read(held))])
    assert all(ours == plain for ours, plain in results)


@uncertain
@pytest.mark.parametrize("who", ["function", "helper"])
def test_name_bound_anew_while_traced_is_as_in_python(who: str) -> None:
    held = first = variable(1)
    second = variable(10)

    def bind() -> None:
        nonlocal held
        held = second

    def helper() -> Any:
        return held * 1

    def function(x: Any) -> Any:
        nonlocal held
        if who == "function":
            held = second
            return x * helper()
        bind()
        return x * held

    assert float(sx.jit(function)(1.0)) == 10.0
    assert held is second and float(first) == 1.0


COUNT = 0
MODEL = variable(3)


@uncertain
def test_function_that_stores_globals_stores_them_once_a_call() -> None:
    seen = []

    def helper() -> int:
        return COUNT

    def function(x: Any) -> Any:
        global COUNT
        COUNT += 1
        seen.append((COUNT, helper()))
        return x * MODEL

    compiled = sx.jit(function)
    assert [float(compiled(1.0)), float(compiled(1.0))] == [3.0, 3.0]
    # Of the first trace nothing is kept: it had a copy of the globals.
    assert seen[1:] == [(count, count) for count in range(1, COUNT + 1)]


def test_globals_of_a_traced_function_are_all_there() -> None:
    def function(x: Any) -> Any:
        return x * MODEL * eval("len('abc')") * ("variable" in globals())

    assert float(sx.jit(function)(1.0)) == 9.0


class Trainer:
    """An ordinary object with a model."""

    def __init__(self) -> None:
        self.model, self.other = variable(2), variable(5)
        self.peer, self.steps = self, 0

    def step(self, x: Any) -> Any:
        self.steps += 1
        self.model, self.other = self.other, self.model
        return x * self.peer.model * (self is self.peer)


@uncertain
def test_method_that_changes_what_it_reaches_is_refused() -> None:
    trainer = Trainer()
    models = [trainer.model, trainer.other]
    with pytest.raises(ClosureError, match=r"step reached a Variable .* did not reach it again"):
        sx.jit(trainer.step)(1.0)
    assert {id(trainer.model), id(trainer.other)} == set(map(id, models))
    assert trainer.steps > 0


# --- inside of plain JAX --------------------------------------------------------------------------

HELD = [variable(2)]


def scanned(carry: Any, _: Any) -> Any:
    return carry * HELD[0], None


PLAIN: dict[str, Any] = {
    "scan": lambda x: jax.lax.scan(scanned, x, None, length=1)[0],
    "jit": jax.jit(lambda x: x * HELD[0]),
    "cond": lambda x: jax.lax.cond(True, lambda x: x * HELD[0], lambda x: x, x),
    "checkpoint": jax.checkpoint(lambda x: x * HELD[0]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_uncertain_capture_inside_of_plain_jax_is_refused(name: str) -> None:
    compiled = sx.jit(lambda x: PLAIN[name](x))
    for _ in range(2):
        with pytest.raises(ClosureError, match=r"A Variable of shape \(\) was reached inside"):
            compiled(1.0)


def test_certain_capture_inside_of_plain_jax_is_live() -> None:
    compiled = sx.jit(lambda x: jax.lax.scan(lambda c, _: (c * MODEL, None), x, None, length=2)[0])
    results = []
    for number in (3.0, 4.0):
        MODEL.value = jnp.float32(number)
        results.append(float(compiled(1.0)))
    MODEL.value = jnp.float32(3)
    assert results == [9.0, 16.0]


# --- programs -------------------------------------------------------------------------------------


def test_numpy_array_of_an_inner_jit_is_as_old_as_the_trace() -> None:
    def make(table: Any) -> Any:
        return sx.jit(lambda x: jax.jit(lambda y: y * table)(x))

    table = jnp.ones(2).__array__().copy()
    first = make(table)
    first(1.0)
    table[:] = 5
    assert make(jnp.full(2, 5.0).__array__())(1.0).tolist() == [5.0, 5.0]
    assert first(1.0).tolist() == [1.0, 1.0]


def test_closed_over_ref_is_read_and_written() -> None:
    ref = jax.new_ref(jnp.float32(1))

    @sx.jit
    def function(x: Any) -> Any:
        ref[...] = ref[...] + x
        return ref[...]

    assert [float(function(1.0)), float(function(1.0)), float(ref[...])] == [2.0, 3.0, 3.0]


def test_attribute_that_is_a_function_made_anew_is_traced_anew() -> None:
    settings = {"scale": 1.0}

    def make() -> Any:
        return lambda x: x * settings["scale"]

    class Acts(sx.Module):
        def __init__(self) -> None:
            self.act = make()

    model = Acts()
    run = sx.jit(lambda model, x: model.act(x))
    results = [float(run(model, 1.0))]
    settings["scale"] = 3.0
    results.append(float(run(model, 1.0)))  # the same function
    model.act = make()
    results.append(float(run(model, 1.0)))
    assert results == [1.0, 1.0, 3.0]


@uncertain
def test_object_that_is_returned_is_the_one_of_now() -> None:
    held = [variable(1)]
    compiled = sx.jit(lambda: held[0])
    assert compiled() is held[0]
    held[0] = variable(2)
    assert compiled() is held[0]


# --- compiled Modules -----------------------------------------------------------------------------


class ByName(sx.Module):
    """Reads a global Variable by its name, and another one in a list."""

    def __init__(self, uses_list: bool) -> None:
        self.uses_list = uses_list

    def __call__(self, x: Any) -> Any:
        return x * (HELD[0] if self.uses_list else GLOBAL)


GLOBAL = variable(2)


@uncertain
@pytest.mark.parametrize("uses_list", [False, True])
@pytest.mark.parametrize("compile_module", [sx.Jitted, sx.jit])
def test_compiled_module_reads_objects_of_now(
    uses_list: bool, compile_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compile_module(ByName(uses_list))
    results = []
    for number in (2.0, 5.0, 7.0):
        if uses_list:
            HELD[0] = variable(number)
        else:
            monkeypatch.setitem(globals(), "GLOBAL", variable(number))
        results.append(float(compiled(1.0)))
    assert results == [2.0, 5.0, 7.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda function: sx.jit(function)(10.0),
        lambda function: sx.cond(jnp.array(True), function, lambda x: x, 10.0),
        lambda function: sx.remat(function)(10.0),
        lambda function: sx.scan(lambda x, _: (function(x), None), length=1)(10.0, None)[0],
    ],
    ids=["jit", "cond", "remat", "scan"],
)
def test_function_that_moves_on_while_it_is_traced_is_refused(call: Any) -> None:
    held = [variable(number) for number in range(20)]

    def function(x: Any) -> Any:
        return x * held.pop()

    with pytest.raises(ClosureError, match="did not reach it again"):
        call(function)


@uncertain
def test_name_that_is_bound_before_an_error_holds_the_users_object() -> None:
    first, second = EqualToAll(1), EqualToAll(2)
    current, raises = first, True

    @sx.jit
    def function(x: Any) -> Any:
        nonlocal current
        result = current(x)
        current = second
        if raises:
            raise KeyError("after the name is bound")
        return result

    with pytest.raises(KeyError):
        function(10.0)
    assert current is second

    raises = False
    assert float(function(10.0)) == 20
    assert current is second


# --- callables that compare themselves ------------------------------------------------------------


class EqualToAll(sx.Module):
    """A callable Module that says it is equal to every other, in an array."""

    def __init__(self, scale: float) -> None:
        self.scale = sx.Param(jnp.float32(scale))

    def __eq__(self, other: object) -> Any:
        return jnp.ones(2) == 1

    def __hash__(self) -> int:
        return 1

    def __call__(self, x: Any) -> Any:
        return x * self.scale


def test_callables_are_told_apart_without_their_comparison() -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda function: sx.remat(function)(1.0),
        lambda function: sx.cond(jnp.array(True), function, lambda x: x, 1.0),
        lambda function: sx.jit(function)(1.0),
        lambda function: sx.scan(lambda x, _: (function(x), None), length=1)(1.0, None)[0],
    ]
    functions = [EqualToAll(2), EqualToAll(3)]
    for call in calls:
        assert [float(call(function)) for function in functions * 2] == [2, 3, 2, 3]
