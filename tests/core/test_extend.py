# SPDX-License-Identifier: Apache-2.0
"""``shardax.extend``: transforms, containers and settings of one's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax import extend
from shardax.errors import ClosureError, TransformError


class Counter(sx.Module):
    def __init__(self) -> None:
        self.scale = sx.Param(jnp.asarray(2.0))
        self.calls = sx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.calls.value = self.calls + 1
        return x * self.scale


checkpointed = extend.lift(jax.checkpoint, "checkpointed")


@pytest.mark.parametrize("around", [lambda f: f, sx.jit], ids=["eager", "jit"])
def test_lifted_checkpoint_equals_remat(around: Callable[..., Any]) -> None:
    def gradient(transform: Callable[..., Any]) -> Any:
        model = Counter()
        loss = lambda model, x: transform(model)(x) ** 2  # noqa: E731
        value = around(sx.grad(loss))(model, jnp.asarray(3.0))
        return float(value["scale"]), int(model.calls)

    assert gradient(checkpointed) == gradient(sx.remat) == (36.0, 1)


def test_lifted_call_writes_nothing_after_an_exception() -> None:
    model = Counter()

    def fails(model: Counter, x: Any) -> Any:
        model(x)
        raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        checkpointed(fails)(model, jnp.ones(()))
    assert int(model.calls) == 0


def test_lifted_transform_refuses_what_is_no_function_or_array() -> None:
    with pytest.raises(TransformError, match="checkpointed"):
        checkpointed(3)
    with pytest.raises(TransformError, match="checkpointed is a str"):
        checkpointed(lambda x: x)("text")


def test_lifted_layer_is_part_of_the_model_and_copied_with_it() -> None:
    model = sx.nn.Sequential(checkpointed(Counter()))
    copy = sx.clone(model)
    copy(jnp.ones(()))
    calls = [
        int(variable) for _, variable in sx.iter_variables((model, copy)) if variable.ndim == 0
    ]
    assert sorted(calls) == [0, 1, 2, 2]
    assert "checkpointed(" in repr(model) and "sx.checkpointed" not in repr(model)


def test_frame_rule_refuses_captured_variables() -> None:
    class ClosedFrame(extend.Frame):
        def capture(self, outer: Any) -> Any:
            raise ClosureError(f"{self.name} was not given a {type(outer).__name__}.")

    closed = extend.lift(lambda function: function, "closed", make_frame=ClosedFrame)
    scale = sx.Param(jnp.ones(()))
    with pytest.raises(ClosureError, match="closed was not given a Param"):
        closed(lambda x: x * scale)(1.0)


class Pair:
    def __init__(self, **parts: Any) -> None:
        self.parts = parts


extend.register_container(
    Pair,
    name="pair of tests",
    children=lambda pair: list(pair.parts.items()),
    rebuild=lambda kind, parts: kind(**dict(parts)),
)


def test_registered_container_shares_variables_and_goes_through_jit() -> None:
    class Model(sx.Module):
        def __init__(self) -> None:
            counter = Counter()
            self.pair = Pair(first=counter, second=counter)

    model = Model()
    assert len(sx.state(model).flat()) == 2

    @sx.jit
    def call(model: Model, x: Any) -> Any:
        return model.pair.parts["second"](model.pair.parts["first"](x))

    assert float(call(model, jnp.ones(()))) == 4.0
    assert int(model.pair.parts["first"].calls) == 2


def test_settings_are_those_of_the_innermost_scope_and_part_of_jax_keys() -> None:
    traced: list[Any] = []

    @jax.jit
    def look(x: Any) -> Any:
        traced.append(extend.ScopeSettings.current().microbatches)
        return x

    with sx.parallel(microbatches=2):
        look(1.0), look(1.0)
        with extend.ScopeSettings.scope(microbatches=None):
            look(1.0)
    assert traced == [2, None]


def test_wrapped_methods_keep_the_class_of_the_module() -> None:
    calls: list[str] = []

    def around(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return method(*args, **kwargs)

        return call

    Wrapped = extend.wrap_methods(Counter, around)  # noqa: N806
    model = Wrapped()
    model(jnp.ones(()))
    assert isinstance(model, Counter) and type(model).__name__ == "Counter"
    assert calls == ["__call__"]
