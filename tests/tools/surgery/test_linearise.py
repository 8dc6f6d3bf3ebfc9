# SPDX-License-Identifier: Apache-2.0
"""Linear approximations around the inputs of one call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax import errors
from shardax.surgery import linearise
from tests.tools.surgery.decoders import LAYOUTS, TOKENS, close, decoder, logits, run
from tests.values import with_values

PARTS, LAYER = (sx.nn.RMSNorm, sx.nn.MultiHeadAttention), sx.models.DecoderLayer


@pytest.mark.parametrize(  # every two of scanned, tied (with remat) and kinds together
    ("layout", "kinds"), [*zip(LAYOUTS, [PARTS, LAYER, LAYER, PARTS], strict=True)]
)
def test_linearised_decoder_keeps_logits_of_same_tokens(layout: Any, kinds: Any) -> None:
    model = decoder(*layout)
    close(run(linearise(sx.select(model).at_instances_of(kinds), TOKENS)), logits(layout[1]))


def test_linearised_norm_is_its_jacobian() -> None:
    norm = with_values(sx.nn.RMSNorm(4))
    x, other = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    linear = linearise(sx.select(sx.nn.Sequential(norm)).at_instances_of(sx.nn.RMSNorm), x)

    @sx.jit
    def both(linear: Any, norm: Any) -> Any:
        return linear(other), norm(x) + jax.jacobian(norm)(x) @ (other - x)

    close(*both(linear, norm))


@pytest.mark.parametrize("scanned", [False, True])
def test_changes_of_the_stream_add_up(scanned: bool) -> None:
    kinds = (sx.nn.RMSNorm, sx.nn.MultiHeadAttention, sx.nn.MLP)
    linear = linearise(sx.select(decoder(scanned)).at_instances_of(kinds), TOKENS)

    @sx.jit
    def moved_by(linear: Any, change: Any) -> jax.Array:
        embed = sx.select(linear).at(lambda model: model.embed)
        return embed.apply(lambda embed: _Shifted(embed, change))(TOKENS)

    one, two = np.random.default_rng(0).normal(size=(2, *TOKENS.shape, 12)).astype(np.float32)
    changes = (0 * one, one, two, one + two)
    base, by_one, by_two, by_both = (np.asarray(moved_by(linear, each)) for each in changes)
    assert np.abs(by_one - base).max() > 0.1
    close(by_both - base, (by_one - base) + (by_two - base))


class _Shifted(sx.Module):
    def __init__(self, layer: Any, change: jax.Array) -> None:
        self.layer, self.change = layer, change

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.layer(tokens) + self.change


def test_recorded_call_leaves_the_model_unchanged() -> None:
    dropout = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
    model = sx.nn.Sequential(dropout, sx.nn.RMSNorm(3))
    before = sx.state(model).flat()
    linearise(sx.select(model).at_instances_of(sx.nn.RMSNorm), np.ones(3, np.float32))
    after = sx.state(model).flat()
    assert before.keys() == after.keys()
    assert all(after[path] is value for path, value in before.items())


def test_keywords_reach_the_layer_and_points_broadcast() -> None:
    class Scaled(sx.Module):
        def __call__(self, x: Any, *, by: Any) -> Any:
            return by * x**2

    class Net(sx.Module):
        def __init__(self) -> None:
            self.square = Scaled()

        def __call__(self, x: Any, by: Any) -> Any:
            return self.square(x, by=by)

    linear = linearise(sx.select(Net()).at(lambda net: net.square), jnp.float32(3), by=2.0)
    # 5 * (9 + 6 * (x - 3)) at 4 and 3
    close(sx.jit(linear)(jnp.array([4.0, 3.0]), by=5.0), [75.0, 45.0])


def test_layer_taking_integers_is_refused_by_path() -> None:
    model = sx.nn.Sequential(with_values(sx.nn.Embed(4, 3, rngs=sx.Rngs(0))))
    with pytest.raises(errors.SelectionError, match=r"\.layers\[0\] cannot.*takes integers"):
        linearise(sx.select(model).at_instances_of(sx.nn.Embed), np.arange(3))


def test_layer_called_twice_is_refused_by_path() -> None:
    norm = sx.nn.RMSNorm(3)
    twice = sx.nn.Sequential(norm, jnp.tanh, norm)
    with pytest.raises(errors.SelectionError, match=r"\.layers\[0\] cannot.*called 2 times"):
        linearise(sx.select(twice).at_instances_of(sx.nn.RMSNorm), np.ones(3, np.float32))


def test_layer_never_called_is_refused_by_path() -> None:
    class Spare(sx.Module):
        def __init__(self) -> None:
            self.spare = sx.nn.RMSNorm(3)

        def __call__(self, x: Any) -> Any:
            return x

    with pytest.raises(errors.SelectionError, match=r"\.spare cannot.*called 0 times"):
        linearise(sx.select(Spare()).at_instances_of(sx.nn.RMSNorm), np.ones(3, np.float32))
