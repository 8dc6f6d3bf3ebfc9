# SPDX-License-Identifier: Apache-2.0
"""The raw-JAX decoder is one: causal, knows positions, shares kv heads, and learns."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import raw_decoder
from raw_decoder import Config

CONFIG = Config(vocab=17, embed=16, layers=1, heads=4, kv_heads=2, head_dim=8, mlp=24)


# Compiled whole: one program an example instead of one per operation.
forward = jax.jit(raw_decoder.forward, static_argnums=0)


@pytest.fixture(scope="module")
def params() -> raw_decoder.Params:
    return raw_decoder.init(CONFIG, jax.random.key(0))


@pytest.fixture
def tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(7), (3, 12), 0, CONFIG.vocab, jnp.int32)


@pytest.mark.parametrize("tied", [False, True])
def test_axes_name_every_dimension_of_every_parameter(tied):
    config = replace(CONFIG, tied=tied)
    params = jax.eval_shape(lambda key: raw_decoder.init(config, key), jax.random.key(0))
    names = raw_decoder.axes(config)
    ranks = jax.tree.map(lambda array: array.ndim, params)
    lengths = jax.tree.map(len, names, is_leaf=lambda node: isinstance(node, tuple))
    assert ranks == lengths
    assert ("head" in params) == (not tied)


def test_later_token_changes_no_earlier_logits(params, tokens):
    before = forward(CONFIG, params, tokens)
    changed = tokens.at[:, 8].set((tokens[:, 8] + 1) % CONFIG.vocab)
    after = forward(CONFIG, params, changed)
    same = np.isclose(before, after, rtol=1e-5, atol=1e-5).all(axis=-1)
    assert same.tolist() == [[True] * 8 + [False] * 4] * 3


def test_rotation_keeps_norms_and_depends_on_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def product(q_position: int, k_position: int) -> jax.Array:
        turned_q = raw_decoder.rotate(q, raw_decoder.rotation(jnp.array([q_position]), 8))
        turned_k = raw_decoder.rotate(k, raw_decoder.rotation(jnp.array([k_position]), 8))
        return jnp.sum(turned_q * turned_k)

    np.testing.assert_allclose(product(0, 0), jnp.sum(q * k), rtol=1e-5)
    np.testing.assert_allclose(product(5, 2), product(13, 10), rtol=1e-4)
    assert not np.isclose(product(5, 2), product(5, 3), rtol=1e-3)


def test_grouped_heads_equal_repeated_kv_heads(params, tokens):
    full = replace(CONFIG, kv_heads=CONFIG.heads)
    group = CONFIG.heads // CONFIG.kv_heads
    repeated = dict(params)
    repeated["layers"] = [
        layer | {name: jnp.repeat(layer[name], group, axis=1) for name in ("k", "v")}
        for layer in params["layers"]
    ]
    np.testing.assert_allclose(
        forward(CONFIG, params, tokens), forward(full, repeated, tokens), rtol=1e-4, atol=1e-5
    )


def test_norm_gives_unit_rms_and_keeps_dtype():
    x = 5 * jax.random.normal(jax.random.key(0), (2, 3, 64), jnp.bfloat16)
    normed = raw_decoder.rms_norm(x, jnp.ones(64))
    assert normed.dtype == jnp.bfloat16
    square = jnp.mean(jnp.square(normed.astype(jnp.float32)), axis=-1)
    np.testing.assert_allclose(square, np.ones((2, 3)), rtol=1e-2)


def test_cross_entropy_of_equal_logits_is_log_vocabulary():
    value = raw_decoder.cross_entropy(jnp.zeros((2, 3, 17)), jnp.zeros((2, 3), jnp.int32))
    assert float(value) == pytest.approx(math.log(17), rel=1e-6)


def test_compute_dtype_is_kept_apart_from_parameter_dtype(params, tokens):
    config = replace(CONFIG, dtype="bfloat16")
    assert {array.dtype for array in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert forward(config, params, tokens).dtype == jnp.bfloat16


def test_train_step_learns_a_fixed_batch(params, tokens):
    tx = optax.adamw(1e-2)
    state = tx.init(params)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    step = jax.jit(lambda params, state: raw_decoder.train_step(CONFIG, tx, params, state, batch))
    losses = []
    for _ in range(60):
        loss, params, state = step(params, state)
        losses.append(float(loss))
    assert losses[0] > 2.0
    assert losses[-1] < 0.5
