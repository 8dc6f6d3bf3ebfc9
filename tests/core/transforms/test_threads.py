# SPDX-License-Identifier: Apache-2.0
"""Threads that call compiled and lifted functions on one model lose nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from tests.core.transforms.examples import Box, Scale, values
from tests.threads import in_threads, switching_often  # noqa: F401 (a fixture)

THREADS = 6


def _in_threads(call: Callable[[int], Any], count: int) -> list[BaseException]:
    """Calls in several threads at once; returns what was raised."""
    return in_threads(call, THREADS, times=count)[1]


def _add(v: Any, x: Any = 1.0) -> None:
    v[...] += x


def _move(model: Scale, x: Any) -> Any:
    model.factor += x
    model.calls += 1
    return model.factor.sum()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"donate_argnums": 0},
    {"static": "auto"},
    {"static_argnames": "x"},
]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_jit_in_threads_loses_no_update(options: dict[str, Any], first: bool) -> None:
    model, step = Scale(), sx.jit(_move, **options)
    if not first:
        step(model, x=1.0)
    assert _in_threads(lambda _: step(model, x=1.0), 50) == []
    count = 50 * THREADS + (not first)
    assert values(model) == {("factor",): [1.0 + count] * 2, ("calls",): count}


def test_jit_of_different_functions_in_threads_loses_no_update() -> None:
    v = sx.Variable(jnp.zeros(()))
    calls: list[Any] = [
        sx.jit(_add),
        sx.jit(_add, donate_argnums=0),
        lambda v: sx.jit(lambda v, x: _add(v, x))(v, 1.0),
        lambda v: sx.jit(lambda: _add(v))(),
        lambda v: sx.jit(lambda tree: _add(tree["v"][0]))({"v": [v]}),
    ]
    assert _in_threads(lambda i: calls[i % len(calls)](v), 10) == []
    assert float(v) == 10 * THREADS


def test_jit_beside_eager_steps_in_threads_loses_no_update() -> None:
    v, rngs, step = sx.Variable(jnp.zeros(())), sx.Rngs(0), sx.jit(_add)
    drawn, draw = [], sx.jit(lambda rngs: rngs.noise())

    def call(i: int) -> None:
        if i % 2:
            step(v)
            drawn.append(draw(rngs))
        else:
            v.__iadd__(1.0)
            drawn.append(rngs.noise())

    assert _in_threads(call, 20) == []
    assert float(v) == 20 * THREADS
    assert len({str(jax.random.key_data(key)) for key in drawn}) == 20 * THREADS


def test_sow_in_threads_loses_no_value() -> None:
    model, step = Box(), sx.jit(lambda m, x: m.sow("seen", x))
    assert _in_threads(lambda i: step(model, jnp.float32(i)), 5) == []
    assert sorted(map(float, model.seen.value)) == sorted(
        float(thread + i) for thread in range(THREADS) for i in range(5)
    )


def test_readers_during_donation_see_a_consistent_state() -> None:
    model = Scale()
    step, read = sx.jit(_move, donate_argnums=0), sx.jit(lambda m: (m.factor.sum(), m.calls * 1))
    step(model, 1.0)
    seen: list[tuple[Any, Any]] = []

    def call(i: int) -> None:
        if i % 2:
            step(model, 1.0)
        else:
            seen.append(read(model))

    assert _in_threads(call, 20) == []
    assert seen and all(float(total) == 2 + 2 * int(calls) for total, calls in seen)


EAGER: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda v: sx.vmap(lambda v, x: _add(v), in_axes=(None, 0))(v, jnp.ones(2)),
    "grad": lambda v: sx.grad(lambda x: (_add(v), x)[1])(1.0),
    "scan": lambda v: sx.scan(lambda v, x: (_add(v), (v, x))[1])(v, jnp.ones(1)),
    "cond": lambda v: sx.cond(True, _add, lambda v: None, v),
    "remat": lambda v: sx.remat(_add)(v),
}


@pytest.mark.parametrize("call", EAGER.values(), ids=EAGER.keys())
def test_eager_transform_losing_an_update_raises(call: Callable[[Any], Any]) -> None:
    v, step = sx.Variable(jnp.zeros(())), sx.jit(_add)
    raised = _in_threads(lambda i: step(v) if i % 2 else call(v), 6)
    assert {type(error) for error in raised} <= {sx.errors.ConcurrentWriteError}
    assert float(v) == 6 * THREADS - len(raised)


def test_callback_that_writes_does_not_wait_for_the_call_that_runs_it() -> None:
    """Over several devices, a call may wait for its callback, which is in a thread of XLA."""
    total, count = sx.Variable(jnp.zeros(8)), sx.Variable(jnp.zeros(()))
    mesh = jax.make_mesh((8,), ("data",))
    total.value = jax.device_put(total.value, jax.NamedSharding(mesh, jax.P("data")))

    def add_one(x: Any) -> Any:
        count.__iadd__(1.0)
        return np.ones_like(x)

    @sx.jit
    def step(total: Any) -> None:
        shape = jax.ShapeDtypeStruct((8,), jnp.float32)
        total[...] = total + jax.pure_callback(add_one, shape, total.value)

    results, errors = in_threads(lambda _: step(total), 2, times=5)
    assert (results, errors) == ([None, None], [])
    assert total.value.tolist() == [10.0] * 8
    assert float(count) >= 10
