# SPDX-License-Identifier: Apache-2.0
"""While a transform is tracing, the global stream refuses: no constant, no leaked tracer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import shardax as sx
from shardax.errors import DrawError

X = np.ones(8, np.float32)

USES: dict[str, Callable[[], Any]] = {
    "key": sx.random.key,
    "bits": sx.random.bits,
    "uniform": sx.random.uniform,
    "normal": sx.random.normal,
    "truncated_normal": lambda: sx.random.truncated_normal(-1, 1),
    "randint": lambda: sx.random.randint((), 0, 5),
    "bernoulli": sx.random.bernoulli,
    "categorical": lambda: sx.random.categorical(np.zeros(3)),
    "choice": lambda: sx.random.choice(3),
    "permutation": lambda: sx.random.permutation(3),
    "seed": lambda: sx.random.seed(0),
    "get_state": sx.random.get_state,
    "set_state": lambda: sx.random.set_state(sx.random.StreamState("threefry2x32", (0, 0), 0)),
    "isolated": lambda: sx.random.isolated(0).__enter__(),
}


def noisy(x: Any) -> Any:
    return jnp.sum(x) + sx.random.normal()


def noisy_at_compile_time(x: Any) -> Any:
    with jax.ensure_compile_time_eval():
        return noisy(x)


def over_shards(x: Any) -> Any:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(noisy, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=None)(x)


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "jax.jit": lambda: jax.jit(noisy)(X),
    "jax.grad": lambda: jax.grad(noisy)(X),
    "jax.vmap": lambda: jax.vmap(noisy)(X),
    "jax.checkpoint": lambda: jax.checkpoint(noisy)(X),
    "jax.eval_shape": lambda: jax.eval_shape(noisy, X),
    "jax.lax.scan": lambda: jax.lax.scan(lambda c, x: (noisy(x), None), 0.0, X),
    "jax.lax.cond": lambda: jax.lax.cond(True, noisy, jnp.sum, X),
    "jax.shard_map": lambda: over_shards(X),
    "compile time": lambda: jax.jit(noisy_at_compile_time)(X),
    "jit in vmap": lambda: jax.vmap(jax.jit(noisy))(X),
    "sx.jit": lambda: sx.jit(noisy)(X),
    "sx.grad": lambda: sx.grad(noisy)(X),
    "sx.vmap": lambda: sx.vmap(noisy)(X),
    "sx.remat": lambda: sx.remat(noisy)(X),
    "sx.eval_shape": lambda: sx.eval_shape(noisy, X),
    "sx.make_jaxpr": lambda: sx.make_jaxpr(noisy)(X),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_draws_inside_a_transform_are_refused(transform: str) -> None:
    with pytest.raises(DrawError, match=r"random\.normal was called while.*Rngs\(0\)"):
        TRANSFORMS[transform]()
    expected = jax.random.normal(jax.random.fold_in(jax.random.key(0), 0))
    assert sx.random.normal() == expected


@pytest.mark.parametrize("name", USES)
def test_random_functions_refuse_tracing(name: str) -> None:
    def use(x: Any) -> Any:
        USES[name]()
        return x

    before = sx.random.get_state()
    with pytest.raises(DrawError, match=rf"shardax\.random\.{name} was called"):
        jax.jit(use)(X)
    assert sx.random.get_state() == before


def test_rngs_argument_draws_anew_at_every_call() -> None:
    @sx.jit
    def step(rngs: sx.Rngs, x: Any) -> Any:
        return x + jax.random.normal(rngs.noise(), x.shape)

    rngs = sx.Rngs(0)
    assert (np.asarray(step(rngs, X)) != np.asarray(step(rngs, X))).all()


def test_numbers_drawn_outside_may_be_passed_in() -> None:
    add = jax.jit(jnp.add)
    first, second = (np.asarray(add(X, sx.random.normal(8))) for _ in range(2))
    assert (first != second).all()


def test_draws_are_allowed_where_jit_is_disabled() -> None:
    with jax.disable_jit():
        assert jax.jit(noisy)(X) != jax.jit(noisy)(X)
