# SPDX-License-Identifier: Apache-2.0
"""Under ``jax_check_tracer_leaks`` nothing that a call made keeps an array of its trace.

The code of the pages runs under it by ``make test-leaks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardax as sx
from tests.values import with_values

ROWS = np.arange(6.0, dtype=np.float32).reshape(3, 2)


class Recorded(sx.Module):
    """A layer that sows, counts and draws."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.kernel = sx.Param(jnp.eye(2))
        self.calls = sx.Variable(jnp.int32(0))
        self.rngs = rngs

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        self.sow("rows", x)
        return x @ self.kernel + 0 * self.rngs.uniform(x.shape)


@pytest.fixture(autouse=True)
def checked(collecting_only_what_is_new: None) -> Iterator[None]:
    with jax.checking_leaks():
        yield


def _recorded() -> Recorded:
    return Recorded(sx.Rngs(0))


def _loss(model: Any) -> Any:
    return jnp.sum(model(jnp.asarray(ROWS)) ** 2)


def _stack() -> Any:
    return with_values(sx.nn.Stack(lambda: sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), 2))


CALLS: dict[str, Callable[[], Any]] = {
    "scan": lambda: sx.scan(lambda total, row: (total + row, total))(jnp.zeros(2), ROWS)[0],
    "scan of a Module": lambda: sx.scan(
        lambda model, row: model(row), in_axes=(None, 0), out_axes=0
    )(_recorded(), ROWS),
    "vmap of a Module": lambda: sx.vmap(lambda model, row: model(row), in_axes=(None, 0))(
        sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), ROWS
    ),
    "vmap of what sows": lambda: sx.vmap(_recorded(), in_axes=0)(ROWS),
    "while_loop": lambda: sx.while_loop(lambda x: x.sum() < 9, lambda x: 2 * x, jnp.ones(2)),
    "fori_loop": lambda: sx.fori_loop(0, 3, lambda i, x: x + i, jnp.ones(2)),
    "bounded_while_loop": lambda: (
        sx.bounded_while_loop(
            lambda x: x.sum() < 9, lambda x: 2 * x, jnp.ones(2), max_steps=3
        ).final
    ),
    "cond": lambda: sx.cond(True, lambda m: m(ROWS[0]), lambda m: m(ROWS[1]), _recorded()),
    "Stack": lambda: _stack()(ROWS),
    "grad of Stack": lambda: sx.jit(sx.grad(_loss))(_stack()),
    "RNN": lambda: sx.jit(lambda net, x: net(x))(
        with_values(sx.nn.RNN(sx.nn.LSTMCell(2, 2, rngs=sx.Rngs(0)))), ROWS[None]
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_keep_no_tracers(name: str) -> None:
    leaves = jax.tree.leaves(CALLS[name]())
    assert leaves and all(np.isfinite(leaf).all() for leaf in leaves)


def _counted(transform: Callable[[Any, Any], Any]) -> Any:
    """A compiled loop or choice that writes a Variable that it captures."""
    counter = sx.Variable(jnp.zeros(2))

    @sx.jit
    def run(counter: Any, x: Any) -> Any:
        def add(x: Any) -> Any:
            counter[...] = counter + x
            return x + counter.value

        return transform(add, x)

    run(counter, jnp.ones(2))
    return counter.value


@pytest.mark.parametrize(
    ("transform", "total"),
    [
        (lambda add, x: sx.while_loop(lambda x: x.sum() < 4, add, x), 1),
        (lambda add, x: sx.fori_loop(0, 2, lambda i, x: add(x), x), 3),
        (lambda add, x: sx.cond(x.sum() > 0, add, lambda x: x, x), 1),
        (lambda add, x: sx.scan(lambda x, _: (add(x), None))(x, jnp.zeros(2)), 3),
    ],
    ids=["while_loop", "fori_loop", "cond", "scan"],
)
def test_captured_writes_keep_no_tracers(transform: Callable[[Any, Any], Any], total: int) -> None:
    np.testing.assert_array_equal(_counted(transform), [total, total])


def test_optimizer_keeps_no_tracers() -> None:
    model = sx.nn.Linear(2, 2, use_bias=False, rngs=sx.Rngs(0))
    model.kernel[...] = jnp.eye(2)
    optimizer = sx.train.Optimizer(model, optax.sgd(0.5, momentum=0.9))

    @sx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(sx.grad(lambda model: model(ROWS).sum())(model))

    step(model, optimizer)
    np.testing.assert_allclose(model.kernel.value, np.eye(2) - 0.5 * ROWS.sum(0)[:, None])
