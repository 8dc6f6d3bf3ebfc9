# SPDX-License-Identifier: Apache-2.0
"""Random streams of models, forked, split and broadcast by filter, also around a call."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax import nn
from shardax.errors import ConcurrentWriteError, FilterError, ModuleError
from tests.advice import run_advice


class Noisy(sx.Module):
    """Two layers with one Rngs."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.scale = sx.Param(jnp.ones(()))
        self.first = self.second = rngs


def _counts(rngs: sx.Rngs) -> list[int]:
    return [int(stream.count.sum()) for _, stream in rngs.streams()]


def test_with_rngs_replaces_streams_by_filter() -> None:
    rngs = sx.Rngs(params=0, dropout=1, noise=2)
    model = Noisy(rngs)
    new = sx.with_rngs(model, split={"dropout": (2, 3)}, fork="params", broadcast={"noise": 2})
    assert new.first is new.second is not rngs
    assert new.scale is model.scale
    assert [s.key.shape for _, s in new.first.streams()] == [(), (2, 3), (2,)]
    noise = jax.random.key_data(new.first.noise.key.value)
    assert (noise[0] == noise[1]).all()
    assert (_counts(rngs), _counts(new.first)) == ([1, 1, 1], [0, 0, 0])
    assert bool(new.first.params() != rngs.params())


def test_streams_without_a_rule_stay() -> None:
    rngs = sx.Rngs(params=0, dropout=1)
    new = sx.with_rngs(rngs, split=4, only="dropout")
    assert (new.params.key is rngs.params.key, new.dropout.key.shape) == (True, (4,))
    assert _counts(rngs) == [0, 1]


def test_specific_filter_wins_over_everything() -> None:
    new = sx.with_rngs(sx.Rngs(params=0, dropout=1), split=4, fork="params")
    assert (new.params.key.shape, new.dropout.key.shape) == ((), (4,))


@pytest.mark.parametrize(
    "options", [{"split": {"dropout": 2}, "fork": "dropout"}, {"split": 2, "broadcast": 2}]
)
def test_stream_chosen_twice_is_refused(options: Any) -> None:
    rngs = sx.Rngs(dropout=1)
    text = r"random stream at \.m\.dropout is chosen by split= and"
    with pytest.raises(FilterError, match=text) as caught:
        sx.with_rngs({"m": rngs}, **options)
    fork = run_advice(caught.value, "sx.Not('dropout')", {"sx": sx})
    assert sx.with_rngs(rngs, split={"dropout": 4}, fork=fork).dropout.key.shape == (4,)
    rngs.reseed(dropout=1)
    assert _counts(rngs) == [0]


@pytest.mark.parametrize("size", [0, -1, True, 2.0, (), (2, 0), {"dropout": "2"}])
def test_sizes_are_numbers_of_keys(size: Any) -> None:
    with pytest.raises(ModuleError, match=r"split=.* must be numbers of keys"):
        sx.with_rngs(sx.Rngs(dropout=1), split=size)


def test_none_leaves_streams_to_the_other_options() -> None:
    rngs = sx.Rngs(params=0, dropout=1, noise=2)
    new = sx.with_rngs(rngs, split={"dropout": None, "params": 5, ...: 3}, broadcast=None)
    assert [stream.key.shape for _, stream in new.streams()] == [(5,), (), (3,)]
    assert new.dropout.key is rngs.dropout.key
    both = sx.with_rngs(rngs, split={"dropout": None, ...: 3}, fork="dropout")
    assert both.dropout.key is not rngs.dropout.key and both.dropout.key.shape == ()
    wide = sx.with_rngs(rngs, broadcast={"params": 2, "dropout": None})
    assert [stream.key.shape for _, stream in wide.streams()] == [(2,), (), ()]
    with sx.fork_rngs(rngs, split={"params": 4, "dropout": None}):
        assert (rngs.params.key.shape, rngs.dropout.key.shape) == ((4,), ())


def test_decorated_function_runs_with_split_streams() -> None:
    rngs, xs = sx.Rngs(0, dropout=1), jnp.ones(3)

    @sx.jit
    @sx.with_rngs(split={"dropout": 3})
    def noises(rngs: sx.Rngs, xs: jax.Array, **options: Any) -> Any:
        rngs.note = "seen"
        axes = (sx.StateAxes({"dropout": 0, ...: None}), 0)
        draw = sx.vmap(lambda rngs, x: x * rngs.dropout.normal(()), in_axes=axes)
        return draw(rngs, xs), rngs

    first, same = noises(rngs, xs)
    second, _ = noises(rngs, xs, flag=1)
    assert len({*first.tolist(), *second.tolist()}) == 6
    assert same is rngs and rngs.note == "seen"
    assert (rngs.dropout.key.shape, _counts(rngs)) == ((), [0, 2])


def test_streams_come_back_when_the_call_raises() -> None:
    rngs = sx.Rngs(0)

    @sx.with_rngs(split=2)
    def fail(model: Any) -> None:
        raise ZeroDivisionError(model.first.default.key.shape)

    with pytest.raises(ZeroDivisionError, match=r"\(2,\)"):
        fail(Noisy(rngs))
    assert (rngs.default.key.shape, _counts(rngs)) == ((), [1])


def test_fork_rngs_forks_for_a_block() -> None:
    dropout = nn.Dropout(0.5, rngs=sx.Rngs(0, dropout=1))
    before = sx.clone(dropout)
    x = jnp.ones(16)
    with sx.fork_rngs(dropout):
        inside = dropout(x)
    assert bool((inside != before(x)).any())
    assert bool((dropout(x) == before(x)).all())


def test_views_of_one_stream_are_forked_once() -> None:
    rngs = sx.Rngs(dropout=1)
    view = sx.bind(*sx.unbind(rngs))
    with sx.fork_rngs((rngs, view)):
        pass
    new, new_view = sx.with_rngs((rngs, view), fork=...)
    assert new.dropout is new_view.dropout
    assert _counts(rngs) == [2]


def test_forks_of_two_threads_are_refused() -> None:
    model, results = Noisy(sx.Rngs(0, dropout=1)), list[Any]()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with sx.fork_rngs(model, only="dropout"):
            inside.set()
            assert leave.wait(60)
            results.append(_counts(model.first))

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    try:
        split = sx.with_rngs(split=2)(lambda model: model.first.dropout.key.shape)
        with pytest.raises(
            ConcurrentWriteError, match=r"forks or splits .* at \.model\.first\.d"
        ) as caught:
            split(model)
        copy = run_advice(caught.value, "sx.clone(model)", {"sx": sx, "model": model})
        assert split(copy) == (2,)
    finally:
        leave.set()
        thread.join()
    assert (results, split(model), _counts(model.first)) == ([[0, 0]], (2,), [1, 2])
