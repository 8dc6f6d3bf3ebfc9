# SPDX-License-Identifier: Apache-2.0
"""``sx.capture``: what a model sows and perturbs during one call."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax import nn
from shardax.errors import (
    ConcurrentWriteError,
    ForeignMutationError,
    StateMismatchError,
    TransformError,
)
from tests.advice import run_advice


class Inner(sx.Module):
    """Sows its input and perturbs its result."""

    def __init__(self) -> None:
        self.scale = sx.Param(jnp.float32(2))
        self.calls = sx.Variable(0)

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        self.sow("seen", x)
        return self.perturb("change", self.scale * x)


class Outer(sx.Module):
    """Calls one layer twice."""

    def __init__(self) -> None:
        self.inner = Inner()

    def __call__(self, x: Any) -> Any:
        self.note = "called"
        return self.finish(self.inner(self.inner(x)))

    def finish(self, x: Any) -> Any:
        return x + 1


X = jnp.float32(3)


def _values(state: sx.State) -> dict[Any, Any]:
    return {path: [float(x) for x in jax.tree.leaves(v)] for path, v in state.flat().items()}


def _names(model: Outer) -> set[str]:
    return {*vars(model), *vars(model.inner)}


@pytest.mark.parametrize("form", ["module", "method", "function", "decorator", "jit"])
def test_captured_values_are_returned_and_removed(form: str) -> None:
    model, kinds = Outer(), (sx.Intermediate, sx.Perturbation)
    call = {
        "module": lambda: sx.capture(model, *kinds)(X),
        "method": lambda: sx.capture(model.__call__, *kinds)(X),
        "function": lambda: sx.capture(lambda m, x: m(x), *kinds)(model, X),
        "decorator": lambda: sx.capture(*kinds)(lambda m, x: m(x))(model, X),
        "jit": lambda: sx.jit(sx.capture(lambda m, x: m(x), *kinds))(model, X),
    }[form]
    for count in (2, 4):
        y, seen, changes = call()
        assert (float(y), int(model.inner.calls), model.note) == (13.0, count, "called")
        assert _values(seen) == {("inner", "seen"): [3.0, 6.0]}
        assert _values(changes) == {("inner", "change"): [0.0]}
        assert seen.origins()[("inner", "seen")].variable_type is sx.Intermediate
        assert _names(model) == {"inner", "note", "scale", "calls"}


def test_values_from_before_stay_as_they_were() -> None:
    model = Inner()
    model(X)
    old = model.seen
    _, seen = sx.capture(model, sx.Intermediate)(X + 1)
    assert _values(seen) == {("seen",): [4.0]}
    assert model.seen is old and [float(x) for x in old.value] == [3.0]


def test_values_are_removed_when_the_call_raises() -> None:
    model = Outer()

    def fail(model: Outer) -> None:
        model.inner(X)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        sx.capture(fail, sx.Intermediate)(model)
    assert _names(model) == {"inner", "scale", "calls", "change"}


def test_init_gives_gradients_of_perturbations() -> None:
    model = Outer()
    _, changes = sx.capture(model, sx.Perturbation)(X)
    loss = sx.capture(lambda model, x: model(x) ** 2, init=changes)
    assert float(loss(model, X)) == 169.0
    of_changes = jax.grad(
        lambda changes: sx.capture(lambda m: m(X) ** 2, init=changes)(sx.clone(model))
    )(changes)
    assert _values(of_changes) == {("inner", "change"): [78.0]}  # 2 * 13 * (2 + 1)
    assert _names(model) == {"inner", "note", "scale", "calls", "seen"}
    with pytest.raises(
        StateMismatchError, match=r"for \.other\.change, but there is no Module"
    ) as caught:
        sx.capture(model, init={"other": {"change": X}})(X)
    run = run_advice(caught.value, "sx.capture(model, sx.Perturbation)", {"sx": sx, "model": model})
    assert float(run(X)[0]) == 13.0


def test_init_of_a_model_in_a_closure_names_the_way() -> None:
    model, changes = Outer(), {"inner": {"change": jnp.zeros(1)}}

    def closed(changes: Any) -> Any:
        return sx.capture(lambda m: m(X).sum(), init=changes)(model)

    with pytest.raises(ForeignMutationError, match=r"at \.inner\.change.* sx\.grad") as caught:
        sx.grad(closed)(changes)
    code = "def loss(init, model, x): return sx.capture(model, init=init)(x)"
    names: dict[str, Any] = {"sx": sx}
    run_advice(caught.value, code, names)
    of_changes = sx.grad(lambda *args: names["loss"](*args).sum())(changes, model, X)
    assert of_changes["inner"]["change"].tolist() == [3.0]
    model(X)  # makes the Variable
    assert sx.grad(closed)(changes)["inner"]["change"].tolist() == [3.0]


def test_method_outputs_are_captured_by_name() -> None:
    model = Outer()
    y, outputs = sx.capture(model, method_outputs=sx.Intermediate)(X)
    assert _values(outputs) == {
        ("inner", "seen"): [3.0, 6.0],
        ("inner", "output"): [6.0, 12.0],
        ("finish_output",): [13.0],
        ("output",): [13.0],
    }
    assert type(model.inner) is Inner and float(model(X)) == float(y) == 13.0
    assert set(_names(model)) == {"inner", "note", "scale", "calls", "seen", "change"}


def test_method_outputs_reach_into_compiled_and_stacked_layers() -> None:
    stack = nn.Stack(
        lambda: nn.Linear(2, 2, kernel_init=jax.nn.initializers.ones, rngs=sx.Rngs(0)), 3
    )
    run = sx.capture(sx.jit(lambda m, x: m(x)), method_outputs=sx.Cache)
    _, outputs = run(stack, jnp.ones(2))
    (of_layers,) = [v for path, v in outputs.flat().items() if len(path) > 1]
    assert of_layers[0].tolist() == [[2.0, 2.0], [4.0, 4.0], [8.0, 8.0]]
    assert {origin.variable_type for origin in outputs.origins().values()} == {sx.Cache}


class Logging(sx.Module):
    """Variables of the captured types that were there before the call."""

    def __init__(self) -> None:
        self.log = sx.Intermediate((jnp.float32(1),))
        self.change = sx.Perturbation(jnp.float32(0))

    def __call__(self, x: Any) -> Any:
        self.sow("seen", x)
        return x + self.change


def test_unchanged_variables_are_not_captured() -> None:
    model = Logging()
    result, seen = sx.capture(model, sx.Intermediate)(jnp.float32(2))
    assert (float(result), _values(seen)) == (2.0, {("seen",): [2.0]})
    assert set(vars(model)) == {"log", "change"}


def test_init_replaces_a_value_for_the_call() -> None:
    model = Logging()
    run = sx.capture(model, sx.Intermediate, init={"change": jnp.float32(5)})
    assert [float(run(jnp.float32(2))[0]) for _ in range(2)] == [7.0, 7.0]
    assert float(model.change) == 0.0


def test_variables_in_a_new_container_stay_there() -> None:
    def attach(model: Any) -> None:
        model.parts = [sx.Intermediate(jnp.float32(9))]

    model = Logging()
    _, seen = sx.capture(attach, sx.Intermediate)(model)
    assert seen == sx.State() and float(model.parts[0]) == 9.0


def test_misuse_of_capture_is_refused() -> None:
    with pytest.raises(TransformError, match=r"model as its first argument.*float"):
        sx.capture(lambda x: x, sx.Intermediate)(1.0)
    name: Any = "seen"
    with pytest.raises(TransformError, match="takes types of Variables"):
        sx.capture(Inner(), name)
    with pytest.raises(TransformError, match="a callable Module, not a int"):
        sx.capture(3, sx.Intermediate)


class Waiting(sx.Module):
    """Sows its input while another thread is let in."""

    def __init__(self) -> None:
        self.inner = Inner()
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __call__(self, x: Any) -> Any:
        self.sow("seen", x)
        self.inside.set()
        assert self.go_on.wait(60)
        return x


def test_capture_from_two_threads_is_refused() -> None:
    model, results = Waiting(), list[Any]()
    thread = threading.Thread(
        target=lambda: results.append(sx.capture(model, sx.Intermediate)(jnp.ones(2)))
    )
    thread.start()
    assert model.inside.wait(60)
    try:
        with pytest.raises(ConcurrentWriteError, match="Another thread captures") as caught:
            sx.capture(model.inner, sx.Intermediate)(X)
        copy = run_advice(caught.value, "sx.clone(model)", {"sx": sx, "model": model.inner})
        _, seen = sx.capture(copy, sx.Intermediate)(X)
        assert [float(value) for value in seen["seen"]] == [float(X)]
    finally:
        model.go_on.set()
        thread.join()
    ((_, state),) = results
    assert [value.tolist() for value in state["seen"]] == [[1.0, 1.0]]
    assert sx.capture(model.inner, sx.Intermediate)(X)[1]["seen"]  # and free again
