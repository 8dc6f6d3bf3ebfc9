# SPDX-License-Identifier: Apache-2.0
"""Draws from named arrays, and distributions whose parameters have names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax import named
from shardax.errors import NamedAxesError
from shardax.named import wrap
from tests.advice import run_advice

KEY = jax.random.key(0)
LOGITS = wrap(np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32), "a", "b", "v")
X = wrap(np.arange(12).reshape(3, 4), "a", "item")


def test_categorical_draws_at_every_other_position() -> None:
    draws = named.categorical(KEY, LOGITS, "v", {"draw": 5})
    expected = jax.random.categorical(KEY, LOGITS.unwrap("a", "b", "v")[:, :, None], -1, (2, 3, 5))
    np.testing.assert_array_equal(draws.unwrap("a", "b", "draw"), expected)
    turned = named.categorical(KEY, LOGITS.order_as("v", "b", "a"), "v", {"draw": 5})
    np.testing.assert_array_equal(turned.unwrap("a", "b", "draw"), expected)
    assert named.categorical(KEY, LOGITS, "v").axes == {"a": 2, "b": 3}


def test_categorical_draws_separately_for_each_named_key() -> None:
    keys = named.random_split(KEY, {"a": 2, "k": 2})
    draws = jax.jit(lambda keys: named.categorical(keys, LOGITS, "v", {"draw": 3}))(keys)
    assert draws.axes == {"a": 2, "b": 3, "draw": 3, "k": 2}
    logits = LOGITS.unwrap("a", "b", "v")
    for a, k in np.ndindex(2, 2):
        key = keys[{"a": a, "k": k}].data
        expected = jax.random.categorical(key, logits[a][:, None], -1, (3, 3))
        np.testing.assert_array_equal(draws[{"a": a, "k": k}].unwrap("b", "draw"), expected)


def test_categories_are_drawn_by_their_probabilities() -> None:
    p = np.array([[0.1, 0.9], [0.5, 0.5]], np.float32)
    draws = named.categorical(KEY, wrap(np.log(p), "a", "v"), "v", {"draw": 4000})
    np.testing.assert_allclose(draws.unwrap("a", "draw").mean(1), p[:, 1], atol=0.03)


def test_choice_draws_slices_of_an_axis() -> None:
    draws = named.choice(KEY, X, "item", {"draw": 3, "row": 2})
    positions = jax.random.choice(KEY, 4, (3, 2))
    expected = X.unwrap("a", "item")[:, positions]
    np.testing.assert_array_equal(draws.unwrap("a", "draw", "row"), expected)
    ordered = named.choice(KEY, X, "item", {"item": 4}, replace=False)
    assert sorted(ordered[{"a": 0}].unwrap("item").tolist()) == [0, 1, 2, 3]
    own = named.choice(KEY, X, "item", {"a": 3, "draw": 20}).unwrap("a", "draw")
    assert (own // 4 == np.arange(3)[:, None]).all()
    assert len(np.unique(own % 4, axis=0)) == 3
    last = named.choice(KEY, X, "item", {"draw": 9}, p=np.array([0.0, 0.0, 0.0, 1.0]))
    assert (last.unwrap("a", "draw") % 4 == 3).all()


def test_permutation_keeps_slices_whole_or_not() -> None:
    for array in (X, X.order_as("item", "a")):
        together = named.permutation(KEY, array, "item").unwrap("a", "item")
        order = jax.random.permutation(KEY, 4)
        np.testing.assert_array_equal(together, X.unwrap("a", "item")[:, order])
        apart = named.permutation(KEY, array, "item", independent=True).unwrap("a", "item")
        expected = jax.random.permutation(KEY, X.unwrap("a", "item"), axis=1, independent=True)
        np.testing.assert_array_equal(apart, expected)
    keys = named.random_split(KEY, {"a": 3})
    own = named.permutation(keys, X, "item")
    assert own.axes == X.axes
    for a in range(3):
        order = jax.random.permutation(keys[{"a": a}].data, 4)
        np.testing.assert_array_equal(own[{"a": a}].unwrap("item"), X.unwrap("a", "item")[a][order])


PARAMETERS: dict[str, dict[str, Any]] = {
    "bernoulli": {"p": 0.3},
    "beta": {"a": 2.0, "b": 3.0},
    "gamma": {"a": 2.0},
    "poisson": {"lam": 3.0},
    "truncated_normal": {"lower": -1.0, "upper": 2.0},
    "t": {"df": 3.0},
    "pareto": {"b": 2.0},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_distributions_take_parameters_with_names(name: str) -> None:
    factor = np.array([1.0, 1.5], np.float32)
    parameters = {key: value * factor for key, value in PARAMETERS[name].items()}
    sampler = getattr(jax.random, name)
    draws = named.random(
        sampler,
        KEY,
        {"b": 3, "a": 2},
        **{key: wrap(value, "a") for key, value in parameters.items()},
    )
    columns = {key: value[:, None] for key, value in parameters.items()}
    expected = sampler(KEY, shape=(2, 3), **columns)
    np.testing.assert_array_equal(draws.unwrap("a", "b"), expected)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: named.categorical(KEY, LOGITS, "c"), "no axis 'c'"),
        (lambda: named.categorical(KEY, LOGITS, "v", {"a": 2}), "'a', which the logits have"),
        (lambda: named.categorical(KEY, LOGITS, "v", {"v": 2}), "'v', which the logits have"),
        (lambda: named.categorical(KEY, LOGITS.untag("a"), "v"), "positional dimensions"),
        (lambda: named.choice(KEY, X, "c", {"draw": 2}), "no axis 'c'"),
        (lambda: named.permutation(KEY, X, "c"), "no axis 'c'"),
        (
            lambda: named.permutation(
                named.random_split(KEY, {"k": 2}), X, "item", independent=True
            ),
            "leave independent out",
        ),
    ],
)
def test_unfit_draws_are_refused(refused: Any, message: str) -> None:
    with pytest.raises(NamedAxesError, match=message):
        refused()


def test_probabilities_of_each_position_are_categories() -> None:
    p = wrap(np.eye(4, dtype=np.float32)[:3], "a", "item")
    with pytest.raises(NamedAxesError, match="takes probabilities") as caught:
        named.choice(KEY, X, "item", {"draw": 2}, p=p)
    names = {"named": named, "jnp": jnp, "key": KEY, "p": p}
    code = "named.categorical(key, named.nmap(jnp.log)(p), 'item')"
    draws = run_advice(caught.value, code, names)
    assert draws.unwrap("a").tolist() == [0, 1, 2]


def test_draws_run_over_explicit_axes(explicit_mesh: jax.sharding.Mesh) -> None:
    expected = named.categorical(KEY, LOGITS, "v", {"draw": 4})
    with jax.set_mesh(explicit_mesh):
        logits = named.shard(LOGITS, {"a": "data"}, explicit_mesh)
        draws = sx.jit(lambda logits: named.categorical(KEY, logits, "v", {"draw": 4}))(logits)
    np.testing.assert_array_equal(draws.unwrap("a", "b", "draw"), expected.unwrap("a", "b", "draw"))
