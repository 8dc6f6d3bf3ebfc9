# SPDX-License-Identifier: Apache-2.0
"""What a steady call costs: a small number of Python calls, whatever the number of Variables.

Times depend on the machine; numbers of Python calls do not. A *steady call* is one whose like was
made before. On its path JAX must not run Python of its own: its fast path is C++, and an argument
or result that it cannot handle would silently turn it off.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax._core import threads
from shardax._core.graph.flatten import has_objects
from shardax._transforms.jit import calls
from tests.core.transforms.examples import Box, Many, Scale, step

JAX = os.path.dirname(jax.__file__)


@pytest.fixture(autouse=True)
def _program_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests of threads may have run in this process.
    monkeypatch.setattr(threads, "several", False)


def python_calls(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Returns ``file:name`` of every Python function that runs during the call."""
    found: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            found.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        function(*args, **kwargs)
    finally:
        sys.setprofile(None)
    return found


def _steady(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    for _ in range(3):
        function(*args, **kwargs)
    return python_calls(function, *args, **kwargs)


def _forward(model: Many, x: Any) -> Any:
    return sum(cell[...] for cell in model.cells) * x


def _kinds(count: int) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Yields (name, compiled function, positional, keyword arguments) for models of a size."""
    x, model = jnp.ones(2), Many(count)
    yield "writes all", sx.jit(step), (model,), {}
    yield "writes none", sx.jit(_forward), (model, x), {}
    yield "donated", sx.jit(step, donate_argnums=0), (Many(count),), {}
    yield (
        "batch in containers",
        sx.jit(lambda m, b: _forward(m, b["x"][0])),
        (model, {"x": [x]}),
        {},
    )
    yield "model in a container", sx.jit(lambda t: _forward(t["m"], x)), ({"m": model},), {}
    yield "by name", sx.jit(_forward), (), {"model": model, "x": x}
    yield "static", sx.jit(lambda m, n: _forward(m, n), static_argnums=1), (model, 2), {}
    yield "closed over", sx.jit(lambda x: _forward(model, x)), (x,), {}
    yield "with a Variable", sx.jit(lambda m, v: _forward(m, v)), (model, sx.Variable(x)), {}
    yield "callable Module", sx.jit(_Caller(model)), (x,), {}
    yield "shardings", sx.jit(_forward, in_shardings=None, out_shardings=None), (model, x), {}


class _Caller(sx.Module):
    def __init__(self, model: Many) -> None:
        self.model = model

    def __call__(self, x: Any) -> Any:
        return _forward(self.model, x)


KINDS = [name for name, *_ in _kinds(1)]


@pytest.mark.parametrize("kind", KINDS)
def test_steady_call_overhead_is_independent_of_model(kind: str) -> None:
    counts = []
    for size in (2, 64):
        function, args, kwargs = next(rest for name, *rest in _kinds(size) if name == kind)
        counts.append(len(_steady(function, *args, **kwargs)))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", ["writes all", "writes none", "donated", "callable Module"])
def test_steady_call_uses_the_jax_fast_path(kind: str) -> None:
    function, args, kwargs = next(rest for name, *rest in _kinds(8) if name == kind)
    calls = _steady(function, *args, **kwargs)
    assert [call for call in calls if call.startswith(JAX)] == []
    assert len(calls) <= 15


def test_jax_fast_path_runs_no_python() -> None:
    plain = jax.jit(lambda x: x + 1)
    assert _steady(plain, jnp.ones(2)) == []
    unstable = jax.jit(lambda x: (x, _Unstable()))
    assert any(call.startswith(JAX) for call in _steady(unstable, jnp.ones(2)))


class _Unstable:
    """A pytree node that comes back as a leaf, which turns the fast path off."""


jax.tree_util.register_pytree_node(_Unstable, lambda _: ((), None), lambda *_: object())


def test_equal_model_is_steady_from_second_call() -> None:
    function = sx.jit(step)
    function(Many(4))
    function(Many(4))
    fresh = Many(4)
    function(fresh)
    assert [call for call in python_calls(function, fresh) if call.startswith(JAX)] == []


def test_first_array_of_a_process_is_steady_from_second_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "ARRAY_TYPES", {float})
    function, model = sx.jit(_forward), Many(2)
    for _ in range(2):
        function(model, jnp.ones(()))
    assert len(function.calls) == 1


def test_two_models_called_in_turn_are_both_steady() -> None:
    function, models = sx.jit(step), [Many(4), Many(4)]
    for _ in range(2):
        for model in models:
            function(model)
    for model in models:
        assert len(python_calls(function, model)) <= 15


def test_unrelated_edit_costs_one_graph_walk() -> None:
    function, model, other = sx.jit(step), Many(64), Scale()
    function(model)
    function(model)
    sx.jit(lambda m: m.factor * 1)(other)
    other.mode = "changed"
    after_edit = len(python_calls(function, model))
    assert after_edit > 64
    assert len(python_calls(function, model)) <= 15


def test_building_models_does_not_disturb_steady_calls() -> None:
    function, model = sx.jit(step), Many(64)
    function(model)
    function(model)
    for _ in range(3):
        built = Scale()
        built.rate = 0.1
        built.extra = sx.Param(jnp.ones(2))
        model.cells[0][...] = jnp.zeros(2)
        assert len(python_calls(function, model)) <= 15


def test_value_made_lazy_again_is_materialized() -> None:
    function, model = sx.jit(lambda m: m.factor * 2), Scale()
    function(model)
    function(model)
    model.factor.value = sx.Init(jax.nn.initializers.zeros, (2,))
    assert function(model).tolist() == [0.0, 0.0]


def test_numpy_values_stay_on_the_steady_path() -> None:
    function, model = sx.jit(lambda m, x: m.factor * x), Scale()
    for x in (1.0, 2.0):
        function(model, x)
    assert len(python_calls(function, model, 3.0)) <= 15


def test_repeated_pytree_searches_are_harmless() -> None:
    tree = {"a": [{"b": (Box(),)}]}
    for _ in range(3000):  # JAX counts its depth, and an exception from inside makes it miscount
        assert has_objects(tree)
        assert not has_objects({"a": [1.0, None]})


def test_structure_check_is_one_comparison_of_integers() -> None:
    """A wrong answer of the epoch is noticed: this is what the steady path relies on."""
    traces: list[int] = []

    @sx.jit
    def function(model: Box) -> Any:
        traces.append(1)
        return model.inner.inner.leaf.factor * 1

    model = Box()
    model.inner = Box()
    model.inner.inner = Box()
    model.inner.inner.leaf = Scale()
    for _ in range(3):
        function(model)
    model.inner.inner.leaf.rate = 0.125
    function(model)
    function(model)
    assert len(traces) == 2
