# SPDX-License-Identifier: Apache-2.0
"""Laws of composition: transforms inside transforms, in any order, do what Python does.

A *step* is a function of a model and an array. Each *wrapper* runs it through one transform in a
way that must change nothing: one lane, one iteration, the branch that is taken, one device. Every
chain of two or three wrappers, in any order, then gives the result, the state and the gradient of
the bare step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardax as sx
from tests.core.transforms.examples import Mask
from tests.strategies import assert_equal_values
from tests.values import with_values

Step = Callable[[Any, Any], Any]


X = np.array([0.5, -1.0, 2.0], np.float32)


class Cell(sx.Module):
    """A layer with parameters, running statistics, a counter, dropout and a tied parameter."""

    def __init__(self, seed: int) -> None:
        rngs = sx.Rngs(seed)
        self.linear = sx.nn.Linear(3, 3, rngs=rngs)
        self.dropout = Mask(rngs)
        self.mean = sx.BatchStat(jnp.zeros(3))
        self.calls = sx.Variable(jnp.zeros((), jnp.int32))
        self.again = self.linear.bias
        with_values(self, seed)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Uses and writes everything."""
        self.calls += 1
        y = jnp.tanh(self.linear(x)) + self.again
        self.mean[...] = 0.9 * self.mean + 0.1 * jax.lax.stop_gradient(y)
        return self.dropout(y)


def bare(model: Cell, x: jax.Array) -> jax.Array:
    """The step itself."""
    return model(x)


# --- wrappers: each changes nothing --------------------------------------------------------------


def through_jit(step: Step) -> Step:
    """A compiled function."""
    return sx.jit(step)


def through_remat(step: Step) -> Step:
    """A function that is computed again in the backward pass."""
    return sx.remat(step)


def through_cond(step: Step) -> Step:
    """The branch that is taken; the other writes too."""

    def other(model: Any, x: Any) -> Any:
        model.calls += 100
        return x

    return lambda model, x: sx.cond(jnp.all(x == x), step, other, model, x)


def through_switch(step: Step) -> Step:
    """The last of three branches."""
    return lambda model, x: sx.switch(
        jnp.int32(2), [lambda m, x: x, lambda m, x: x * 2, step], model, x
    )


def through_scan(step: Step) -> Step:
    """One iteration with the model shared by all."""
    scanned = sx.scan(step, in_axes=(None, 0), out_axes=0)
    return lambda model, x: scanned(model, x[None])[0]


def through_carry(step: Step) -> Step:
    """One iteration with the model carried."""
    scanned = sx.scan(lambda model, x: (model, step(model, x)))
    return lambda model, x: scanned(model, x[None])[1][0]


def through_fori(step: Step) -> Step:
    """A loop of one round."""
    return lambda model, x: sx.fori_loop(0, 1, lambda _, c: (c[0], step(*c)), (model, x))[1]


def through_vmap(step: Step) -> Step:
    """One lane, which has all of the model's state to itself."""

    def mapped(model: Any, x: Any) -> Any:
        for _, variable in sx.iter_variables(model):
            variable.value = variable.value[None]
            if variable.axes is not None:
                variable.set_metadata(axes=(None, *variable.axes))
        y = sx.vmap(step)(model, x[None])[0]
        for _, variable in sx.iter_variables(model):
            variable.value = variable.value[0]
            if variable.axes is not None:
                variable.set_metadata(axes=variable.axes[1:])
        return y

    return mapped


def through_shard_map(step: Step) -> Step:
    """One device."""
    mesh = jax.make_mesh((1,), ("one",), devices=jax.devices()[:1])
    spec = jax.sharding.PartitionSpec()
    return sx.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec)


def through_vjp(step: Step) -> Step:
    """The forward half of a backward pass."""
    return lambda model, x: sx.vjp(step, model, x)[0]


WRAPPERS = [
    value
    for name, value in sorted(globals().items())
    if name.startswith("through_") and callable(value)
]


# --- the laws ------------------------------------------------------------------------------------


def run(step: Step, seed: int) -> tuple[Any, Any]:
    """Two calls of a step on a fresh model: (results, state)."""
    model = Cell(seed)
    results = [step(model, X), step(model, 2 * X)]
    return results, sx.state(model).flat()


@functools.cache
def expected(seed: int) -> tuple[Any, Any]:
    """What the bare step gives."""
    return run(bare, seed)


def loss(step: Step) -> Step:
    """A loss of a step, for gradients."""
    return lambda model, x: (step(model, x) ** 2).sum()


def differentiated(step: Step, seed: int) -> tuple[Any, Any]:
    """The loss of a step and its gradients in one list, and the state afterwards."""
    model = Cell(seed)
    value, gradient = sx.jit(sx.value_and_grad(loss(step)))(model, X)
    assert list(gradient.flat()) == [("linear", "kernel"), ("linear", "bias")]
    return [value, *gradient.flat().values()], sx.state(model).flat()


@functools.cache
def expected_gradient(seed: int) -> tuple[Any, Any]:
    """What the bare step gives."""
    return differentiated(bare, seed)


def assert_alike(one: tuple[Any, Any], other: tuple[Any, Any], rtol: float = 1e-5) -> None:
    """Results and states agree; typed keys exactly."""
    for a, b in zip(one[0], other[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)
    assert one[1].keys() == other[1].keys()
    for path, value in one[1].items():
        match = other[1][path]
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            assert_equal_values(value, match)
        else:
            np.testing.assert_allclose(value, match, rtol=1e-5, atol=1e-6, err_msg=str(path))


# A mesh axis that is Manual already cannot be mapped again, so one shard_map in a chain.
chains = st.lists(st.sampled_from(WRAPPERS), min_size=2, max_size=3).filter(
    lambda chain: chain.count(through_shard_map) < 2
)


def compose(chain: list[Any], step: Step) -> Step:
    """Wraps a step, the first of the chain outermost."""
    for wrapper in reversed(chain):
        step = wrapper(step)
    return step


# Each example compiles a program or more. The outermost function is compiled in most of them:
# one program instead of several.
COMPILED = st.sampled_from([True, True, False])
SEEDS = st.integers(0, 3)


@given(chain=chains, seed=SEEDS, compiled=COMPILED)
@settings(max_examples=8)
def test_transforms_compose_in_any_order(chain: list[Any], seed: int, compiled: bool) -> None:
    step = compose(chain, bare)
    found = run(sx.jit(step) if compiled else step, seed)
    assert_alike(found, expected(seed))


@given(chain=chains, seed=SEEDS)
@settings(max_examples=10)
def test_gradients_through_compositions_match_the_plain_function(
    chain: list[Any], seed: int
) -> None:
    found = differentiated(compose(chain, bare), seed)
    assert_alike(found, expected_gradient(seed), rtol=1e-4)


@pytest.mark.filterwarnings("ignore::shardax.errors.UncertainCaptureWarning")
@given(chain=chains, seed=SEEDS, compiled=COMPILED)
@settings(max_examples=10)
def test_captured_model_behaves_as_a_passed_one(
    chain: list[Any], seed: int, compiled: bool
) -> None:
    """Where writes through closures are carried; vmap and shard_map refuse them."""
    chain = [w for w in chain if w not in (through_vmap, through_shard_map)]
    model = Cell(seed)
    step = compose(chain, lambda _, x: model(x))
    holder = _Holder(sx.Variable(jnp.zeros(())))
    results = [(sx.jit(step) if compiled else step)(holder, x) for x in (X, 2 * X)]
    assert_alike((results, sx.state(model).flat()), expected(seed))


class _Holder(sx.Module):
    """What is passed when the model is closed over."""

    def __init__(self, calls: Any) -> None:
        self.calls = calls
