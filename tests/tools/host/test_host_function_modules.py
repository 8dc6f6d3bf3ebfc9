# SPDX-License-Identifier: Apache-2.0
"""Host functions of Modules and Variables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import ClosureError, ForeignMutationError, TransformError
from tests.tools.host.ways import same
from tests.tools.host.ways import way as way

host_function = sx.host.host_function


def lookup_vjp(args: Any, result: Any, cotangent: Any) -> Any:
    table, x = args
    slope = table.values.value[1:] - table.values.value[:-1]
    left = np.clip(x.astype(int), 0, len(slope) - 1)
    share = x - left
    of_values = np.zeros_like(table.values.value)
    np.add.at(of_values, left, cotangent * (1 - share))
    np.add.at(of_values, left + 1, cotangent * share)
    return {"values": of_values}, cotangent * slope[left]


class Table(sx.Module):
    """Values at 0, 1, 2, ..., linear between them."""

    def __init__(self, values: Any) -> None:
        self.values = sx.Param(jnp.asarray(values))
        self.offset = jnp.float32(0)  # an array that is an attribute
        self.parts = [sx.BatchStat(jnp.ones(2))]
        self.unit = "m"

    @host_function(out=lambda self, x: x, vjp=host_function(lookup_vjp))
    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Interpolates."""
        held = [self.values.value, self.values[...], self.offset, self.parts[0].value]
        assert {type(array) for array in held} <= {np.ndarray, np.float32}
        assert (self.unit, self.values.shape) == ("m", (4,))
        return np.interp(x, np.arange(self.values.size), self.values) + self.offset

    @host_function(out=same)
    def rewrite(self) -> Any:
        self.values[...] = np.zeros(4)

    @host_function(out=jax.ShapeDtypeStruct((), "float32"))
    def restructure(self) -> Any:
        self.unit = "km"


def table() -> Table:
    return Table([0.0, 1.0, 4.0, 9.0])


X = jnp.array([0.5, 2.5])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("compiled", [lambda f: f, sx.jit, jax.jit], ids=["eager", "sx.jit", "jit"])
def test_method_sees_numpy_arrays_in_its_module(compiled: Any) -> None:
    model = table()
    look = compiled(lambda model, x: model(x))
    assert look(model, X).tolist() == [0.5, 6.5]
    model.values[...] = 2 * model.values
    model.offset = jnp.float32(1)
    assert look(model, X).tolist() == [2.0, 14.0]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("compiled", [lambda f: f, sx.jit], ids=["eager", "sx.jit"])
def test_gradients_reach_the_variables_and_the_arrays(compiled: Any) -> None:
    loss = compiled(sx.grad(lambda model, x: model(x).sum(), argnums=(0, 1)))
    of_model, of_x = loss(table(), X)
    assert of_model["values"].tolist() == [0.5, 0.5, 0.5, 0.5]
    assert of_x.tolist() == [1.0, 5.0]


def test_gradients_through_a_closure_are_refused_by_name() -> None:
    """As for ``custom_vjp``: what is not passed in has no gradient by the rule, which is told."""
    model = table()
    look = host_function(model.__call__.__func__.function, out=lambda self, x: x)
    with pytest.raises(TransformError, match=r"\.self\.values"):
        sx.grad(lambda model: look(model, X).sum())(model)


def test_ensemble_members_use_their_own_tables() -> None:
    tables = sx.vmap(lambda n: Table(n * jnp.arange(4.0)))(jnp.arange(3.0))
    looked = sx.jit(sx.vmap(lambda model, x: model(x), in_axes=(0, None)))(tables, X)
    assert looked.tolist() == [[0.0, 0.0], [0.5, 2.5], [1.0, 5.0]]


def test_loops_over_modules_pass_written_state_to_host() -> None:
    def body(model: Table, x: Any) -> Any:
        model.offset = model.offset + 1
        return model, model(x)

    model = table()
    _, found = sx.scan(body)(model, jnp.stack([X, X]))
    assert (found.tolist(), float(model.offset)) == ([[1.5, 7.5], [2.5, 8.5]], 2.0)


def test_copy_on_the_host_cannot_be_written() -> None:
    model = table()
    with pytest.raises(ForeignMutationError, match="copy"):
        host_function(Table.rewrite.function, out=jax.ShapeDtypeStruct((), "float32"))(model)
    with pytest.raises(ForeignMutationError, match="'unit'"), sx.host.host_exceptions():
        jax.block_until_ready(sx.jit(lambda model: model.restructure())(model))
    assert (model.unit, model.values.value.tolist()) == ("m", [0.0, 1.0, 4.0, 9.0])


def test_variables_by_themselves_are_arrays() -> None:
    def add(arrays: Any, more: np.ndarray) -> np.ndarray:
        assert [type(array) for array in (arrays["w"], more)] == [np.ndarray] * 2
        return arrays["w"] + more

    function = host_function(
        add, out=lambda arrays, more: more, vjp=lambda args, result, ct: ({"w": ct}, 2 * ct)
    )
    w, v = sx.Param(jnp.ones(2)), sx.Param(jnp.ones(2))

    @sx.jit
    def loss(w: Any, v: Any) -> Any:
        return function({"w": w}, v).sum()

    assert float(loss(w, v)) == 4.0
    gradients = sx.grad(loss, argnums=(0, 1))(w, v)
    assert [g.tolist() for g in gradients] == [[1.0, 1.0], [2.0, 2.0]]


@pytest.mark.parametrize("compiled", [lambda f: f, sx.jit], ids=["eager", "jit"])
def test_captured_variable_is_refused_instead_of_stale(compiled: Any) -> None:
    scale = sx.Param(jnp.float32(3))
    function = compiled(host_function(lambda x: x * np.asarray(scale.value), out=same))
    with pytest.raises(ClosureError, match="Param"), sx.host.host_exceptions():
        jax.block_until_ready(function(jnp.ones(2)))


@pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")
def test_callable_modules_and_bound_methods_are_accepted() -> None:
    class Power(sx.Module):
        def __init__(self) -> None:
            self.exponent = sx.Variable(jnp.float32(2))

        def __call__(self, x: np.ndarray) -> np.ndarray:
            return x**self.exponent.value

    model = Power()
    whole, method = host_function(model, out=same), host_function(model.__call__, out=same)
    squares = sx.jit(lambda x: (whole(x), method(x)))
    assert [y.tolist() for y in squares(X)] == [[0.25, 6.25]] * 2
    model.exponent[...] = jnp.float32(1)
    assert [y.tolist() for y in squares(X)] == [X.tolist()] * 2


def test_random_streams_of_a_module_arrive_as_words() -> None:
    class Noise(sx.Module):
        def __init__(self, rngs: sx.Rngs) -> None:
            self.key = sx.Variable(rngs())

        @host_function(out=lambda self, x: x)
        def add(self, x: np.ndarray) -> np.ndarray:
            return x + np.random.default_rng(self.key.value).normal(size=x.shape)

    noise = Noise(sx.Rngs(0))
    compiled = sx.jit(lambda noise: noise.add(X))
    assert compiled(noise).tolist() == noise.add(X).tolist() != X.tolist()


def test_lazy_and_frozen_models_arrive_with_their_values() -> None:
    layer = sx.nn.Linear(2, 3, rngs=sx.Rngs(0))

    def apply(layer: Any, x: np.ndarray) -> np.ndarray:
        return x @ layer.kernel.value + layer.bias

    function = host_function(apply, out=jax.ShapeDtypeStruct((3,), "float32"))
    lazy, frozen = function(layer, X), function(sx.freeze(layer), X)
    assert lazy.tolist() == frozen.tolist()
    assert np.allclose(lazy, layer(X))
