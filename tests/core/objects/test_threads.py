# SPDX-License-Identifier: Apache-2.0
"""Threads that share streams, lazy models and Variables."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax.errors import ConcurrentWriteError
from tests.threads import in_threads, switching_often  # noqa: F401 (a fixture)

THREADS = 8


def _in_threads(work: Callable[[int], Any]) -> list[Any]:
    """Returns the results of all threads; raises the first error."""
    results, raised = in_threads(work, THREADS)
    if raised:
        raise raised[0]
    return results


@pytest.mark.parametrize(
    "draw",
    [
        lambda rngs: rngs.noise(),
        lambda rngs: rngs(),
        lambda rngs: rngs.fork().default(),
        lambda rngs: sx.Param(sx.Init(jax.random.normal, (4,), rngs=rngs)).value,
    ],
    ids=["stream", "default", "fork", "Init"],
)
def test_rngs_shared_by_threads_draws_no_key_twice(draw: Callable[[Any], Any]) -> None:
    rngs = sx.Rngs(0)

    def numbers(key: Any) -> Any:
        is_key = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return tuple(np.asarray(jax.random.key_data(key) if is_key else key).tolist())

    drawn = _in_threads(lambda _: [numbers(draw(rngs)) for _ in range(20)])
    assert len({key for keys in drawn for key in keys}) == 20 * THREADS
    assert int(rngs.default.count) == 20 * THREADS


@pytest.mark.parametrize("compiled", [False, True])
def test_lazy_model_may_be_first_used_by_threads(compiled: bool) -> None:
    def call(model: Any, x: Any) -> Any:
        return model(x)

    function = sx.jit(call) if compiled else call
    for seed in range(10):
        model = sx.nn.MLP(2, 3, rngs=sx.Rngs(seed))
        expected = sx.nn.MLP(2, 3, rngs=sx.Rngs(seed))(jnp.ones((1, 2)))
        for result in _in_threads(lambda _, model=model: function(model, jnp.ones((1, 2)))):
            np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_threads_that_read_one_lazy_variable_get_one_array() -> None:
    for seed in range(10):
        w = sx.Param(sx.Init(jax.nn.initializers.normal(), (2,), rngs=sx.Rngs(seed)))
        arrays = _in_threads(lambda _, w=w: w.value)
        assert all(array is arrays[0] for array in arrays)


def test_first_use_does_not_overwrite_a_write() -> None:
    for _ in range(20):
        w = sx.Param(sx.Init(jax.nn.initializers.ones, (2,)))

        def use(number: int, w: Any = w) -> None:
            if number == 0:
                w.update(jnp.full(2, 5.0))
            else:
                _ = w.value

        _in_threads(use)
        assert w.value.tolist() == [5.0, 5.0]


def _read(v: Any) -> Any:
    return v.value


def _write(v: Any) -> Any:
    v.value = jnp.ones(3)
    return v.value


@pytest.mark.parametrize("use", [_read, _write])
def test_variable_of_array_does_not_wait_for_initializer_of_another(use: Any) -> None:
    # The initializer ends only when the other Variable was used, or after a minute.
    is_running, is_used = threading.Event(), threading.Event()
    waits: list[bool] = []

    def initialize(key: Any, shape: Any, dtype: Any) -> Any:
        # This thread traces it for the names of a box, when the Variable is made.
        if threading.current_thread() is not threading.main_thread():
            is_running.set()
            waits.append(is_used.wait(60))
        return jnp.zeros(shape, dtype)

    lazy, plain = sx.Param(sx.Init(initialize, (2,))), sx.Variable(jnp.ones(3))
    used: list[Any] = []

    def work(thread: int) -> Any:
        if thread == 0:
            return lazy.value.tolist()
        is_running.wait(60)
        used.append(use(plain).tolist())
        is_used.set()
        return used[-1]

    assert in_threads(work, 2) == ([[0.0, 0.0], [1.0, 1.0, 1.0]], [])
    assert waits and all(waits)


class Model(sx.Module):
    def __init__(self) -> None:
        self.v = sx.Variable(jnp.zeros(()))
        self.many = sx.Variable(jnp.zeros(THREADS))
        self.array = jnp.zeros(())


def test_steps_that_are_one_lose_nothing() -> None:
    model = Model()

    def work(number: int) -> None:
        for _ in range(30):
            model.v += 1
            model.sow("seen", number)

    _in_threads(work)
    assert float(model.v) == 30 * THREADS
    assert len(model.seen.value) == 30 * THREADS

    def fill(number: int) -> None:
        model.many[number] = float(number)

    _in_threads(fill)
    assert model.many.value.tolist() == [float(number) for number in range(THREADS)]


def _whole(model: Any) -> None:
    model.v[...] += 1


def _value(model: Any) -> None:
    model.v.value = model.v.value + 1


def _entry(model: Any) -> None:
    model.many[0] += 1


def _attribute(model: Any) -> None:
    model.array += 1


@pytest.mark.parametrize(
    ("add", "total"),
    [
        (_whole, lambda m: m.v),
        (_value, lambda m: m.v),
        (_entry, lambda m: m.many[0]),
        (_attribute, lambda m: m.array),
    ],
    ids=["v[...] += 1", "v.value =", "v[0] += 1", "model.array += 1"],
)
def test_concurrent_read_and_write_lose_nothing_or_raise(
    add: Callable[[Any], None], total: Callable[[Any], Any]
) -> None:
    model = Model()

    def work(_: int) -> int:
        done = 0
        for _ in range(40):
            with contextlib.suppress(ConcurrentWriteError):
                add(model)
                done += 1
        return done

    done = sum(_in_threads(work))
    assert float(total(model)) == done > 0
    lock = threading.Lock()
    before = float(total(model))

    def locked(_: int) -> None:
        for _ in range(20):
            with lock:
                add(model)

    _in_threads(locked)
    assert float(total(model)) == before + 20 * THREADS


def test_value_read_long_ago_may_be_replaced() -> None:
    variables = [sx.Variable(float(i)) for i in range(20)]
    _ = [v.value for v in variables]
    _in_threads(lambda _: variables[0].update(1.0))
    variables[0].value = 2.0
    _ = variables[1].value
    _in_threads(lambda _: variables[1].update(1.0))
    _ = variables[1].value
    variables[1].value = 2.0


class _Counting(sx.Module):
    def __init__(self, rngs: sx.Rngs) -> None:
        self.linear = sx.nn.Linear(2, 2, rngs=rngs)
        self.calls = sx.Variable(jnp.int32(0))

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return self.linear(x)


@pytest.mark.parametrize("transform", [sx.jit, sx.remat, lambda f: f], ids=["jit", "remat", "none"])
def test_stack_layers_stay_writable_after_thread_use(transform: Any) -> None:
    rngs = sx.Rngs(0)
    stack = sx.nn.Stack(lambda: _Counting(rngs), 3)
    _in_threads(lambda _: stack.stacked.calls.value)
    call = transform(lambda layer, x: layer(x))
    for index in (0, 1, 1):
        call(stack[index], jnp.ones((1, 2)))
    assert stack.stacked.calls.value.tolist() == [1, 2, 0]
