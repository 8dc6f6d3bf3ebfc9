# SPDX-License-Identifier: Apache-2.0
"""Every sampler of ``jax.random`` has a form without a key, which gives the same numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import DrawError

# What makes, changes or reads keys.
OF_KEYS = {
    *("PRNGKey", "clone", "fold_in", "key", "key_data", "key_dtype", "key_impl", "split"),
    "wrap_key_data",
}
SAMPLERS = sorted(
    name
    for name, function in vars(jax.random).items()
    if inspect.isfunction(inspect.unwrap(function)) and name[0] != "_" and name not in OF_KEYS
)

# Arguments behind the key.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "binomial": {"n": 5.0, "p": np.array([0.25, 0.5])},
    "double_sided_maxwell": {"loc": 1.0, "scale": 2.0},
    "gamma": {"a": np.array([0.5, 2.0])},
    "geometric": {"p": np.array([0.25, 0.5])},
    "lognormal": {"sigma": 0.5},
    "multivariate_normal": {"mean": np.zeros(2), "cov": np.eye(2), "method": "eigh"},
    "orthogonal": {"n": 2, "m": 3},
    "pareto": {"b": 3.0},
    "poisson": {"lam": np.array([1.0, 4.0])},
    "rayleigh": {"scale": 2.0},
    "triangular": {"left": 0.0, "mode": 1.0, "right": 3.0},
    "weibull_min": {"scale": 1.0, "concentration": 2.0},
}
# The shape, the probabilities or the bounds of these are tested with the draws of their own.
ELSEWHERE = {"bernoulli", "bits", "categorical", "choice", "normal", "permutation", "randint"} | {
    "truncated_normal",
    "uniform",
}


# Programs of rejection loops take long to compile; those that are not here are run by the examples
# of their documentation alone.
SLOW = {"ball", "beta", "chisquare", "dirichlet", "f", "generalized_normal", "loggamma"} | {
    "multinomial",
    "t",
    "wald",
}


def test_every_sampler_of_jax_has_a_form_without_a_key() -> None:
    assert [name for name in SAMPLERS if not hasattr(sx.random, name)] == []
    without = {name: inspect.signature(getattr(jax.random, name)).parameters for name in SAMPLERS}
    for name in set(SAMPLERS) - ELSEWHERE:
        mine = list(inspect.signature(getattr(sx.random, name)).parameters)
        theirs = [p for p in without[name] if p not in ("key", "out_sharding", "unroll")]
        if "method" in theirs and "method" not in mine:  # of JAX 0.12, for samplers of gamma
            theirs.remove("method")
        assert [p for p in mine if p not in ("device", "sharding")] == [
            p for p in theirs if (name, p) != ("gumbel", "mode")
        ], name


@pytest.mark.parametrize("name", sorted(set(SAMPLERS) - ELSEWHERE - SLOW))
def test_distribution_gives_the_numbers_of_jax(name: str) -> None:
    arguments = ARGUMENTS.get(name, {})
    sampler = getattr(jax.random, name)
    shape = {} if name == "multivariate_normal" else {"shape": (4, 2)}
    given = {key: jnp.asarray(x, jnp.float32) if np.ndim(x) else x for key, x in arguments.items()}
    sx.random.seed(3)
    mine = getattr(sx.random, name)(**arguments, **shape)
    expected = sampler(sx.Rngs(3)(), **given, **shape)
    assert mine.dtype == expected.dtype and mine.shape == expected.shape
    np.testing.assert_allclose(mine, expected, rtol=2e-6)
    assert sx.random.get_state().count == 1


def test_distributions_have_the_default_dtype_and_place(mesh: Mesh) -> None:
    with sx.default_dtype("bfloat16"):
        assert sx.random.exponential(3).dtype == jnp.bfloat16
        assert sx.random.gamma(2.0, dtype="float32").dtype == jnp.float32
        assert sx.random.poisson(2.0, 3, "int16").dtype == jnp.int16
    assert sx.random.laplace(2, device="cpu:3").devices() == {jax.devices()[3]}
    sx.random.seed(1)
    split = sx.random.gumbel((8, 4), sharding=NamedSharding(mesh, P("data", "model")))
    sx.random.seed(1)
    assert split.sharding.spec == P("data", "model")
    np.testing.assert_array_equal(split, sx.random.gumbel((8, 4)))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "beta": (lambda: sx.random.beta(0.0, 1.0), r"beta was given a=0\.0\. Give a number above 0"),
    "gamma": (lambda: sx.random.gamma([1.0, -1.0]), r"gamma was given a=\[ 1\. -1\.\]"),
    "poisson": (lambda: sx.random.poisson(-1.0), r"lam=-1\.0\. Give a number of at least 0"),
    "nan": (lambda: sx.random.wald(float("nan")), "mean=nan"),
    "binomial": (lambda: sx.random.binomial(3, 1.5), "a probability is a number from 0 to 1"),
    "geometric": (lambda: sx.random.geometric(0.0), r"geometric was given p=0\.0"),
    "triangular": (lambda: sx.random.triangular(0, 4, 3), r"Give left <= mode <= right"),
    "ball": (lambda: sx.random.ball(0), "ball was given d=0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_make_no_sense_are_refused(name: str) -> None:
    sx.random.seed(0)
    call, message = WRONG[name]
    with pytest.raises(DrawError, match=message):
        call()
    assert sx.random.get_state().count == 0
    with pytest.raises(DrawError, match="while a JAX transform is tracing"):
        jax.jit(lambda: sx.random.gumbel(2))()
