# SPDX-License-Identifier: Apache-2.0
"""Donated memory: which arrays are given away, what stays usable, and what is refused."""

from __future__ import annotations

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax.errors import DonationError
from tests.advice import run_advice
from tests.core.transforms.examples import Scale, values


def _grow(model: Scale, by: Any) -> Any:
    model.grow(by)
    return model.factor * 2


def sharing_copy(model: Scale) -> Scale:
    """Another model with the same arrays."""
    other = Scale()
    sx.update(other, sx.state(model))
    return other


def _arrays(model: Scale) -> list[Any]:
    return [model.factor.value, model.calls.value]


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"donate_argnums": 0}, lambda f, m: f(m, 1.0)),
        ({"donate_argnums": -2}, lambda f, m: f(m, 1.0)),
        ({"donate_argnums": (0,)}, lambda f, m: f(m, by=1.0)),
        ({"donate_argnums": 0}, lambda f, m: f(model=m, by=1.0)),
        ({"donate_argnames": "model"}, lambda f, m: f(m, 1.0)),
        ({"donate_argnames": ("model",)}, lambda f, m: f(by=1.0, model=m)),
    ],
)
def test_donated_model_stays_usable(options: Any, call: Any) -> None:
    model, compiled = Scale(), sx.jit(_grow, **options)
    for number in (2.0, 3.0, 4.0):
        before = _arrays(model)
        assert call(compiled, model).tolist() == [2 * number] * 2
        assert [array.is_deleted() for array in before] == [True, True]
        assert values(model) == {("factor",): [number] * 2, ("calls",): 0}


def test_unwritten_donated_variable_is_still_readable() -> None:
    model = Scale()
    read = sx.jit(lambda m: m.factor * 3, donate_argnums=0)
    for _ in range(3):
        assert read(model).tolist() == [3.0, 3.0]
    assert values(model) == {("factor",): [1.0, 1.0], ("calls",): 0}


def test_jit_donates_the_chosen_arguments_only() -> None:
    kept, given = Scale(), Scale()
    batch, state = jnp.ones(2), jnp.full(2, 3.0)
    kept_arrays, given_arrays = _arrays(kept), _arrays(given)

    @functools.partial(sx.jit, donate_argnums=(1,), donate_argnames="state")
    def run(a: Scale, b: Scale, batch: Any, *, state: Any) -> Any:
        b.grow(a.factor + batch)
        return state + 1

    assert run(kept, given, batch, state=state).tolist() == [4.0, 4.0]
    assert [array.is_deleted() for array in (*kept_arrays, batch)] == [False] * 3
    assert [array.is_deleted() for array in (*given_arrays, state)] == [True] * 3
    assert values(given)[("factor",)] == [3.0, 3.0]


def test_array_beside_model_in_argument_is_donated() -> None:
    model, batch = Scale(), jnp.ones(2)
    run = sx.jit(lambda tree: tree["m"].factor + tree["x"], donate_argnums=0)
    assert run({"m": model, "x": batch}).tolist() == [2.0, 2.0]
    assert batch.is_deleted() and values(model)[("factor",)] == [1.0, 1.0]


def test_variable_shared_with_undonated_argument_raises() -> None:
    model = Scale()
    run = sx.jit(lambda a, b: a.factor + b.factor, donate_argnums=0)
    for _ in range(2):
        assert run(model, model).tolist() == [2.0, 2.0]


def test_donated_tied_variable_is_donated_once() -> None:
    model = Scale()
    model.alias = model.factor
    run = sx.jit(_grow, donate_argnums=0)
    run(model, 1.0)
    run(model, 1.0)
    assert model.alias.value.tolist() == [3.0, 3.0]


def test_structural_changes_of_a_donated_model() -> None:
    @functools.partial(sx.jit, donate_argnums=0)
    def edit(model: Scale) -> Scale:
        model.twice = sx.Param(model.factor * 2)
        del model.calls
        return model

    model = Scale()
    assert edit(model) is model
    assert values(model) == {("factor",): [1.0, 1.0], ("twice",): [2.0, 2.0]}


def test_compiled_ahead_of_time_with_donation() -> None:
    model, other = Scale(), Scale()
    compiled = sx.jit(_grow, donate_argnums=0).lower(model, 1.0).compile()
    before = _arrays(other)
    compiled(other, 1.0)
    assert [array.is_deleted() for array in before] == [True, True]
    assert (values(model)[("factor",)], values(other)[("factor",)]) == ([1.0] * 2, [2.0] * 2)
    (state, _), _ = compiled.args_info
    assert {path: info.donated for path, info in state.flat().items()} == {
        ("factor",): True,
        ("calls",): True,
    }


# --- what is refused ---


def test_array_in_two_donated_variables_names_both() -> None:
    first = Scale()
    second = sharing_copy(first)
    run = sx.jit(lambda a, b: a.factor + b.factor, donate_argnums=(0, 1))
    with pytest.raises(DonationError, match=r"\.a\.factor, \.b\.factor; \.a\.calls, \.b\.calls"):
        run(first, second)
    assert values(first) == values(second) == {("factor",): [1.0, 1.0], ("calls",): 0}


def test_donated_array_passed_twice_names_both_places() -> None:
    first = Scale()
    second = sharing_copy(first)
    run = sx.jit(lambda a, b: a.factor + b.factor, donate_argnums=0)
    with pytest.raises(DonationError, match=r"\.a\.factor, \.b\.factor"):
        run(first, second)


def test_clone_outlives_donation_of_the_original() -> None:
    model = Scale()
    copies = [sx.clone(model), sx.clone({"model": model})["model"], copy.deepcopy(model)]
    sx.jit(_grow, donate_argnums=0)(model, 1.0)
    for each in copies:
        assert values(each) == {("factor",): [1.0, 1.0], ("calls",): 0}
        assert sx.jit(_grow, donate_argnums=0)(each, 1.0).tolist() == [4.0, 4.0]


def test_sharer_of_donated_model_cannot_be_used() -> None:
    model = Scale()
    sharer = sharing_copy(model)
    run = sx.jit(_grow, donate_argnums=0)
    run(model, 1.0)
    for use in (run, sx.jit(_grow), lambda m, by: sx.jit(_grow).lower(m, by).compile()(m, by)):
        with pytest.raises(DonationError, match=r"deleted: \.model\.factor, ") as caught:
            use(sharer, 1.0)
        independent = run_advice(caught.value, "sx.clone(model)", {"sx": sx, "model": model})
        run(model, 1.0)
        assert run(independent, 1.0).tolist() == run(sx.clone(model), 0.0).tolist()


def test_copying_as_the_error_says_makes_both_usable() -> None:
    model = Scale()
    other = sharing_copy(model)
    sx.update(other, jax.tree.map(jnp.copy, sx.state(other)))
    run = sx.jit(lambda a, b: a.factor + b.factor, donate_argnums=(0, 1))
    assert run(model, other).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"donate_argnums": 2}, r"donate_argnums=2 is out of range: _grow has 2"),
        ({"donate_argnames": "models"}, r"donate_argnames has 'models', but _grow has only"),
    ],
)
def test_donated_arguments_that_the_function_lacks_are_named(options: Any, message: str) -> None:
    with pytest.raises(DonationError, match=message):
        sx.jit(_grow, **options)


class Holder(sx.Module):
    """A Module with an array, a list and a dict."""

    def __init__(self) -> None:
        self.scale = jnp.ones(4)
        self.parts = [sx.nn.Linear(4, 4, rngs=sx.Rngs(0)), {"last": Scale()}]

    def __call__(self, x: Any) -> Any:
        return self.parts[0](x) * self.scale


def _twin_of_donated() -> Holder:
    model = Holder()
    model(jnp.ones(4))
    twin = sx.merge(*sx.split(model))
    sx.jit(lambda model: None, donate_argnums=0)(model)
    return twin


EAGER: dict[str, tuple[Any, str]] = {
    "call": (lambda twin: twin(jnp.ones(4)), r"Cannot read twin\.parts\[0\]\.kernel, a Param: "),
    "array": (lambda twin: twin.scale * 2, r"Cannot read twin\.scale, an array: "),
    "operator": (
        lambda twin: twin.parts[1]["last"].factor + 1,
        r"Cannot read twin\.parts\[1\]\.last\.factor, a Param: ",
    ),
    "part": (lambda twin: twin.parts[0].bias[0], r"Cannot read twin\.parts\[0\]\.bias, a Param: "),
    "frozen": (
        lambda twin: sx.freeze(twin).parts[0].bias + 1,
        r"Cannot read a FrozenVariable: its array was donated",
    ),
    "copy": (copy.deepcopy, r"Cannot read x\.parts\[0\]\.kernel, a Param: "),
    "clone": (sx.clone, r"5 Variables hold .* \.parts\[0\]\.bias, "),
    "grad": (lambda twin: sx.grad(lambda m: m.scale.sum())(twin), r" Variables hold .* \.m\.scale"),
    "vmap": (
        lambda twin: sx.vmap(lambda m, x: m(x), in_axes=(None, 0))(twin, jnp.ones((2, 4))),
        r" Variables hold .* \.m\.scale",
    ),
    "cond": (
        lambda twin: sx.cond(True, lambda m: m.scale, lambda m: m.scale, twin),
        r" Variables hold .* \.m\.scale",
    ),
    "closure": (
        lambda twin: jax.jit(lambda x: twin(x))(jnp.ones(4)),
        r"Cannot read twin\.parts\[0\]\.kernel, a Param: ",
    ),
}


@pytest.mark.parametrize("use", EAGER)
def test_eager_uses_of_donated_arrays_name_the_variable(use: str) -> None:
    function, message = EAGER[use]
    with pytest.raises(DonationError, match=message) as caught:
        function(_twin_of_donated())
    assert "sx.clone(model)" in str(caught.value)


def test_donated_view_names_its_stack() -> None:
    stack = sx.nn.Stack(lambda: sx.nn.Linear(4, 4, rngs=sx.Rngs(0)), 2)
    twin = sx.merge(*sx.split(stack))
    layer = twin[1]
    sx.jit(lambda model: None, donate_argnums=0)(stack)
    with pytest.raises(DonationError, match=r"Cannot read layer\.kernel, a Param: its array"):
        layer.kernel + 1
