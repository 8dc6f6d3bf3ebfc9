# SPDX-License-Identifier: Apache-2.0
"""The mode that finds random keys drawn twice: in programs by JAX, between streams by shardax."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardax as sx
from shardax._core.init.key_reuse import check_whole_process
from shardax.errors import RepeatedKeyError

X = jnp.ones(3)


def use_twice(rngs: sx.Rngs) -> Any:
    key = rngs()
    return jax.random.normal(key) + jax.random.uniform(key)


def draw(rngs: sx.Rngs) -> Any:
    return jax.random.normal(rngs())


def two_layers_of_one_seed() -> Any:
    return [sx.nn.Linear(2, 2, rngs=sx.Rngs(params=7)) for _ in range(2)]


def a_clone() -> Any:
    rngs = sx.Rngs(0)
    return draw(sx.clone(rngs)), draw(rngs)


def a_restored_state() -> Any:
    rngs = sx.Rngs(0)
    saved = sx.state(rngs)
    draw(rngs)
    sx.update(rngs, saved)
    return draw(rngs)


def one_scope_twice() -> Any:
    rngs = sx.Rngs(0)
    return draw(rngs.scope("block")), draw(rngs.scope("block"))


def a_lazy_draw_and_a_real_one() -> Any:
    return sx.nn.Linear(2, 2, rngs=sx.Rngs(0)), draw(sx.Rngs(0))


REPEATED: list[Callable[[], Any]] = [
    two_layers_of_one_seed,
    a_clone,
    a_restored_state,
    one_scope_twice,
    a_lazy_draw_and_a_real_one,
]


@pytest.mark.parametrize("repeat", REPEATED, ids=lambda repeat: repeat.__name__)
def test_streams_issuing_one_key_twice_are_found(repeat: Callable[[], Any]) -> None:
    repeat()  # Without the mode nothing is said.
    with (
        sx.debug_key_reuse(),
        pytest.raises(RepeatedKeyError, match=r"number 0 again.*test_key_reuse\.py:\d+"),
    ):
        repeat()


def test_reuse_error_names_both_lines_and_keeps_count() -> None:
    rngs, again = sx.Rngs(noise=0), sx.Rngs(noise=0)
    with sx.debug_key_reuse():
        rngs.noise()
        with pytest.raises(RepeatedKeyError) as caught:
            again.noise()
    first = caught.traceback[0].lineno  # 0-based, so the line before
    place = __file__ + ":"
    assert f"at {place}{first + 1}; the same key was drawn at {place}{first - 1}." in str(
        caught.value
    )
    assert int(again.noise.count) == 0


@pytest.mark.parametrize(
    "run",
    [
        use_twice,
        lambda rngs: sx.jit(use_twice)(rngs),
        lambda rngs: sx.vmap(use_twice)(rngs.fork(split=3)),
    ],
    ids=["eager", "jit", "vmap"],
)
def test_key_used_twice_is_found_by_jax(run: Callable[[sx.Rngs], Any]) -> None:
    run(sx.Rngs(0))
    with sx.debug_key_reuse(), pytest.raises(jax.errors.KeyReuseError):
        run(sx.Rngs(0))


def test_debug_key_reuse_accepts_intended_uses_of_streams() -> None:
    with sx.debug_key_reuse():
        rngs = sx.Rngs(0, dropout=0)
        model = sx.nn.Sequential(
            sx.nn.Linear(3, 3, rngs=rngs),
            sx.nn.Dropout(0.5, rngs=rngs),
            sx.nn.Linear(3, 3, rngs=rngs),
        )
        for _ in range(2):
            model(X)
            sx.jit(lambda model, x: sx.grad(lambda model, x: model(x).sum())(model, x))(model, X)
            sx.jit(sx.remat(lambda model, x: model(x)))(model, X)
            sx.vmap(draw)(rngs.fork(split=3))
            draw(rngs.fork())
            sx.scan(lambda rngs, x: (rngs, draw(rngs) + x))(rngs, X)
            sx.random.normal(3)
        draw(rngs.scope("a")), draw(rngs.scope("b"))


def test_mode_ends_with_block_and_blocks_start_fresh() -> None:
    @sx.debug_key_reuse()
    def checked() -> Any:
        return draw(sx.Rngs(0))

    assert checked() == checked()
    a_clone()
    assert not jax.config.jax_debug_key_reuse  # pyright: ignore[reportAttributeAccessIssue]


def test_block_belongs_to_its_thread() -> None:
    failures: list[BaseException] = []

    def repeat() -> None:
        try:
            a_clone()
        except RepeatedKeyError as error:
            failures.append(error)

    with sx.debug_key_reuse():
        thread = threading.Thread(target=repeat)
        thread.start()
        thread.join()
    assert failures == []


def test_whole_process_may_be_checked() -> None:
    check_whole_process(True)
    try:
        with pytest.raises(RepeatedKeyError):
            a_clone()
    finally:
        check_whole_process(False)
    a_clone()
