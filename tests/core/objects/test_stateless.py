# SPDX-License-Identifier: Apache-2.0
"""Functional calls: results and new values are those of the live model, which stays as it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import ModuleAttributeError, ModuleError
from tests.advice import run_advice
from tests.strategies import assert_equal_values, assert_same_model


class Noisy(sx.Module):
    """A layer with a tied weight, dropout, and a counter."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.weight = sx.Param(sx.Init(jax.nn.initializers.normal(), (3, 3), rngs=rngs))
        self.tied = self.weight
        self.dropout = sx.nn.Dropout(0.5, rngs=rngs)
        self.calls = sx.Variable(0)

    def __call__(self, x: Any, scale: float = 1.0) -> Any:
        self.calls += 1
        return self.dropout(x @ self.weight[...]) @ self.tied[...].T * scale

    def peek(self) -> Any:
        return self.calls.value


X = jnp.arange(6.0).reshape(2, 3)


def noisy() -> Noisy:
    return Noisy(sx.Rngs(0))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, sx.jit], ids=["eager", "jax.jit", "sx.jit"])
def test_functional_call_equals_call_and_updated_values(jit: Any) -> None:
    model, live = noisy(), noisy()
    slots, values = sx.unbind(model, freeze=True)
    before = sx.state(model)
    step = jit(lambda values, x: sx.stateless_call(slots, values, x, scale=2.0))
    for _ in range(3):
        result, values = step(values, X)
        assert np.allclose(result, live(X, scale=2.0))
    assert_same_model(sx.thaw(sx.bind(slots, values)), live)
    assert_equal_values(sx.state(model), before)
    assert [value.label for value in values] == [v.label for v in sx.unbind(model, freeze=True)[1]]


def test_function_and_method_are_the_same() -> None:
    slots, values = sx.unbind(noisy(), freeze=True)
    one, two = sx.stateless_call(slots, values, X), slots.stateless_call(values, X)
    assert np.array_equal(one[0], two[0]) and one[1] == two[1]


def test_methods_are_called_too() -> None:
    slots, values = sx.unbind(noisy(), freeze=True)
    result, same = sx.stateless_call(slots.peek, values)
    assert int(result) == 0 and same == values


def test_values_keep_any_pytree_arrangement() -> None:
    slots, params = sx.unbind(noisy(), sx.Param, freeze=True)
    slots, rest = sx.unbind(slots, freeze=True)
    _, new = slots.stateless_call({"params": params, "rest": list(rest)}, X)
    assert jax.tree.structure(new) == jax.tree.structure({"params": params, "rest": list(rest)})
    assert int(sx.stateless_call(slots.peek, new)[0]) == 1

    def loss(params: Any) -> Any:
        result, new = slots.stateless_call((params, rest), X)
        return result.sum(), new[1]

    gradient, _ = jax.grad(loss, has_aux=True)(params)
    assert [g.label for g in gradient] == [("weight",)]
    live = noisy()
    expected = sx.grad(lambda model: model(X).sum())(live)
    assert np.allclose(gradient[0].value, expected.weight)


def test_argument_slots_are_filled_by_label() -> None:
    class Use(sx.Module):
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __call__(self, other: Any, *, count: Any) -> Any:
            count += 1
            return self.stream is other["stream"], count.value

    shared, count = sx.Variable(1.0), sx.Cache(0)
    tree = {"use": Use(shared), "other": {"stream": shared}, "count": count}
    slots, values = sx.unbind(tree, freeze=True)
    (same, counted), new = sx.stateless_call(
        slots["use"], values, slots["other"], count=slots["count"]
    )
    assert same and int(counted) == 1 and int(count) == 0
    assert {value.label: float(value.value) for value in new} == {
        ("count",): 1.0,
        ("other", "stream"): 1.0,
    }


def test_variables_given_as_arguments_are_the_callers_own() -> None:
    class Roll(sx.Module):
        def __init__(self) -> None:
            self.scale = sx.Param(2.0)

        def __call__(self, rngs: Any) -> Any:
            return self.scale * jax.random.normal(rngs.noise())

    rngs = sx.Rngs(noise=0)
    slots, values = sx.unbind(Roll(), freeze=True)
    result, _ = slots.stateless_call(values, rngs)
    assert np.array_equal(result, 2 * jax.random.normal(sx.Rngs(noise=0).noise()))
    assert int(rngs["noise"].count.value) == 1


def test_writing_unpassed_variable_is_refused() -> None:
    model = noisy()
    slots, params = sx.unbind(model, sx.Param, freeze=True)
    with pytest.raises(ModuleAttributeError, match=r"\.calls"):
        slots.stateless_call(params, X)
    assert int(model.calls) == 0
    model.dropout.deterministic = True
    slots, params = sx.unbind(model, sx.Param, freeze=True)
    assert int(sx.stateless_call(slots.peek, params)[0]) == 0  # reading it is fine


def test_stateless_call_refuses_what_a_pure_function_cannot_return() -> None:
    class Sows(sx.Module):
        def __call__(self, x: Any) -> Any:
            self.sow("seen", x)
            return x

    class Switches(sx.Module):
        def __init__(self) -> None:
            self.on = False

        def __call__(self) -> None:
            self.on = True

    with pytest.raises(ModuleError, match=r"added the Variables \.seen"):
        sx.stateless_call(Sows(), (), X)
    model = Switches()
    with pytest.raises(ModuleError, match=r"structure of \(root\)"):
        model.stateless_call(())
    assert model.on is False
    sown = Sows()
    sown(X)
    slots, values = sx.unbind(sown, freeze=True)
    _, values = slots.stateless_call(values, X)
    assert len(values[0].value) == 2


def test_mismatched_values_are_refused_before_running() -> None:
    ran = []

    class Runs(sx.Module):
        def __init__(self) -> None:
            self.w = sx.Param(0.0)

        def __call__(self) -> Any:
            ran.append(1)
            return self.w.value

    slots, (value,) = sx.unbind(Runs(), freeze=True)
    _, variables = sx.unbind(Runs())
    with pytest.raises(ModuleError, match="frozen values, but was given Param") as caught:
        slots.stateless_call(variables)
    names = {"sx": sx, "model": sx.nn.Sequential(), "variables": variables}
    assert run_advice(caught.value, "sx.freeze(variables)", names) == (value,)
    names |= {"variables": (), "rest": X}
    assert run_advice(caught.value, "sx.bind(model, variables)(...)", names) is X
    with pytest.raises(ModuleError, match=r"\.calls, for which there is no slot"):
        slots.stateless_call((value, *sx.unbind(noisy(), sx.Not(sx.Param), freeze=True)[1]))
    with pytest.raises(ModuleError):
        slots.stateless_call([value, jax.tree.map(lambda x: x + 1, value)])
    assert ran == []
    with pytest.raises(ModuleAttributeError, match=r"\.w"):
        slots.stateless_call(())


def test_equal_structure_does_not_retrace() -> None:
    traces = []

    @jax.jit
    def step(slots: Any, values: Any, x: Any) -> Any:
        traces.append(1)
        return slots.stateless_call(values, x)

    for seed in range(4):
        step(*sx.unbind(Noisy(sx.Rngs(seed)), freeze=True), X)
    assert len(traces) == 1
