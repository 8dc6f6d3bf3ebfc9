# SPDX-License-Identifier: Apache-2.0
"""Static values: what a program is compiled for by value, and how exactly values are told apart."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import DonationError, StaticArgumentError, TransformError
from tests.core.transforms.examples import Box, Scale


@dataclasses.dataclass(frozen=True)
class Config:
    """Frozen configuration."""

    width: Any


class Mode(enum.IntEnum):
    """Equal to integers in Python."""

    ONE = 1


LOOKALIKES = [1, True, 1.0, 1 + 0j, Mode.ONE]
NUMPY_LOOKALIKES = [np.int32(1), np.float32(1)]
NESTINGS = {
    "alone": lambda value: value,
    "in a tuple": lambda value: (value, "x"),
    "two deep": lambda value: ((0, (value,)),),
    "in a frozen dataclass": lambda value: Config(value),
    "in a frozen dataclass in a tuple": lambda value: (Config((value,)),),
    "in a frozenset": lambda value: frozenset({(value,)}),
    "in a slice": lambda value: slice(None, value),
}


@pytest.mark.parametrize("nest", NESTINGS)
def test_equal_static_arguments_of_other_type_retrace(nest: str) -> None:
    traced: list[str] = []

    def run(x: Any, static: Any) -> Any:
        traced.append(repr(static))
        return x

    by_position, by_name = sx.jit(run, static_argnums=1), sx.jit(run, static_argnames="static")
    given = [NESTINGS[nest](value) for value in [*LOOKALIKES, *NUMPY_LOOKALIKES]]
    for value in given:
        by_position(1.0, value)
        by_position(1.0, value)
        by_name(1.0, static=value)
    assert traced == [repr(value) for value in given for _ in range(2)]


@pytest.mark.parametrize("nest", NESTINGS)
def test_equal_attributes_of_other_type_retrace(nest: str) -> None:
    traced: list[str] = []

    @sx.jit
    def run(model: Box) -> Any:
        traced.append(repr(model.static))
        return model.array

    model = Box()
    model.array = jnp.ones(1)
    given = [NESTINGS[nest](value) for value in LOOKALIKES]
    for value in given * 2:  # the second time each finds its program
        model.static = value
        run(model)
        run(model)
    assert traced == [repr(value) for value in given]


def test_zero_and_minus_zero_are_different_static_values() -> None:
    sign = sx.jit(lambda x, zero: x * np.copysign(1.0, zero), static_argnums=1)
    assert (float(sign(1.0, 0.0)), float(sign(1.0, -0.0))) == (1.0, -1.0)


def test_equal_static_values_share_a_program() -> None:
    traces: list[Any] = []

    def run(x: Any, config: Any) -> Any:
        traces.append(config)
        return x

    compiled = sx.jit(run, static_argnums=1)
    for _ in range(3):
        compiled(1.0, Config((1, "a")))
        compiled(1.0, config=Config((1, "a")))
    assert traces == [Config((1, "a"))] * 2  # by position and by name


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"static_argnums": 1}, lambda f: f(2.0, 3, 4.0)),
        ({"static_argnums": -2}, lambda f: f(2.0, 3, 4.0)),
        ({"static_argnums": (1,)}, lambda f: f(2.0, b=3, c=4.0)),
        ({"static_argnames": "b"}, lambda f: f(2.0, 3, 4.0)),
        ({"static_argnames": ("b",)}, lambda f: f(2.0, c=4.0, b=3)),
        ({"static_argnums": (1, -1)}, lambda f: f(2.0, 3, 4.0)),
        ({"static_argnums": (0, 1, 2)}, lambda f: f(2.0, 3, 4.0)),
        ({"static_argnames": "b"}, lambda f: f(2.0, c=4.0)),
    ],
)
def test_static_arguments_by_position_and_name(options: Any, call: Any) -> None:
    def run(a: Any, b: int = 3, c: Any = 4.0) -> Any:
        assert type(b) is int
        return jnp.asarray(a) * b + c

    assert float(call(sx.jit(run, **options))) == 10.0


def test_static_arguments_among_variadic_ones() -> None:
    compiled = sx.jit(lambda x, *names: x * len(names), static_argnums=(1, 2))
    assert float(compiled(2.0, "a", "b")) == 4.0


def test_eval_shape_and_lower_take_static_arguments_too() -> None:
    run = sx.jit(lambda model, times, x: model(x) * times, static_argnums=1)
    model = Scale()
    assert run.eval_shape(model, 3, jnp.ones(2)).shape == (2,)
    assert run.lower(model, 3, 2.0).compile()(model, 2.0).tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("value", "kind"),
    [([1], "list"), ({"a": 1}, "dict"), ((1, [2]), "tuple"), (jnp.ones(1), "ArrayImpl")],
)
def test_unhashable_static_argument_is_named(value: Any, kind: str) -> None:
    def run(model: Scale, config: Any) -> Any:
        return model(1.0)

    model = Scale()
    for call in (
        lambda: sx.jit(run, static_argnums=1)(model, value),
        lambda: sx.jit(run, static_argnames="config")(model, config=value),
        lambda: sx.jit(run, static_argnames="config").lower(model, config=value),
    ):
        with pytest.raises(StaticArgumentError, match=f"'config' of run .* of type {kind}"):
            call()
    assert int(model.calls) == 0


@pytest.mark.parametrize("value", [Scale(), (1, Scale()), Config(Scale()), sx.Param(jnp.ones(1))])
def test_module_cannot_be_a_static_argument(value: Any) -> None:
    compiled = sx.jit(lambda x, config: x, static_argnames="config")
    with pytest.raises(StaticArgumentError, match="'config'"):
        compiled(1.0, config=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"static_argnums": 2}, r"static_argnums=2 is out of range: run has 2 .* \(a, b\)"),
        ({"static_argnums": -3}, r"static_argnums=-3 is out of range"),
        ({"static_argnames": "d"}, r"static_argnames has 'd', but run has only \(a, b\)"),
    ],
)
def test_static_arguments_that_the_function_lacks_are_named(options: Any, message: str) -> None:
    def run(a: Any, b: Any) -> Any:
        return a

    with pytest.raises(StaticArgumentError, match=message):
        sx.jit(run, **options)


def test_static_names_may_be_those_of_keywords() -> None:
    run = sx.jit(lambda x, **options: x * len(options["name"]), static_argnames="name")
    assert float(run(2.0, name="abc")) == 6.0


def test_argument_cannot_be_static_and_donated() -> None:
    with pytest.raises(DonationError, match=r"\['b'\] are both static and donated"):
        sx.jit(lambda a, b: a, static_argnums=1, donate_argnames="b")


# --- static="auto" ---


def _configured(model: Scale, options: Any, *, activation: Any) -> Any:
    scale = 2.0 if options["training"] else 1.0
    return activation(model.factor) * options["x"] * scale * len(options["mode"])


def test_auto_makes_other_values_static() -> None:
    traces: list[int] = []

    @sx.jit(static="auto")
    def run(model: Scale, options: Any, *, activation: Any) -> Any:
        traces.append(1)
        return _configured(model, options, activation=activation)

    model = Scale()
    options = {"x": jnp.full(2, 3.0), "training": True, "mode": "ab"}
    for _ in range(3):
        assert run(model, options, activation=jnp.negative).tolist() == [-12.0, -12.0]
    assert len(traces) == 1
    changed = {**options, "training": False, "x": np.full(2, 3.0, np.float32)}
    assert run(model, changed, activation=jnp.negative).tolist() == [-6.0, -6.0]
    assert run(model, {**options, "mode": ""}, activation=jnp.negative).tolist() == [0.0, 0.0]
    assert len(traces) == 3


def test_auto_leaves_python_numbers_dynamic() -> None:
    traces: list[int] = []

    @sx.jit(static="auto")
    def scaled(x: Any, options: Any) -> Any:
        traces.append(1)
        return x * options["k"]

    results = [scaled(jnp.ones(2), {"k": k, "mode": "a"}).tolist() for k in (2, 3, 4)]
    assert results == [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]
    assert len(traces) == 1


def test_auto_explains_retraces_and_mismatches_by_path() -> None:
    run, model = sx.jit(_configured, static="auto"), Scale()
    options = {"x": jnp.ones(2), "training": True, "mode": "ab"}
    run(model, options, activation=jnp.sin)
    changed = {**options, "training": False}
    with sx.explain_retraces(file=False) as retraces:
        run(model, changed, activation=jnp.sin)
    assert [r.reasons for r in retraces] == [(".options.training: True (bool) -> False (bool)",)]
    compiled = run.lower(model, options, activation=jnp.sin).compile()
    assert compiled(Scale(), options, activation=jnp.sin).shape == (2,)
    with pytest.raises(TransformError, match=r"\.options\.training: True .* -> False \(bool\)"):
        compiled(model, changed, activation=jnp.sin)
    assert run.eval_shape(model, options, activation=jnp.sin).shape == (2,)


def test_auto_refuses_unhashable_values_and_other_options() -> None:
    with pytest.raises(StaticArgumentError, match=r"set at \.names .*\{1\} is not hashable"):
        sx.jit(lambda model, names: 1.0, static="auto")(Scale(), {1})
    with pytest.raises(
        StaticArgumentError, match=r"static='all': the option takes 'auto'.*'numbers'"
    ):
        sx.jit(lambda x: x, static="all")
