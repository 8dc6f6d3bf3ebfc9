# SPDX-License-Identifier: Apache-2.0
"""Linear approximations around the inputs of one call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.surgery.decoders import TOKENS, close, decoder, in_every_layout, run

import shardax as sx
from shardax import errors
from shardax.surgery import linearise


@in_every_layout
def test_on_the_same_tokens_the_model_is_what_it_was(scanned: bool, tied: bool, remat: Any) -> None:
    model = decoder(scanned, tied, remat)
    for kinds in ((sx.nn.RMSNorm, sx.nn.MultiHeadAttention), sx.models.DecoderLayer):
        linear = linearise(sx.select(model).at_instances_of(kinds), TOKENS)
        close(sx.jit(run)(linear), run(model))


def test_a_norm_becomes_its_jacobian() -> None:
    norm = sx.nn.RMSNorm(4)
    x, other = jax.random.normal(jax.random.key(0), (2, 4))
    model = sx.nn.Sequential(norm)
    linear = linearise(sx.select(model).at_instances_of(sx.nn.RMSNorm), x)
    close(linear(other), norm(x) + jax.jacobian(norm)(x) @ (other - x))


@pytest.mark.parametrize("scanned", [False, True])
def test_changes_of_the_stream_add_up_when_all_is_linear(scanned: bool) -> None:
    model = decoder(scanned)
    kinds = (sx.nn.RMSNorm, sx.nn.MultiHeadAttention, sx.nn.MLP)
    linear = linearise(sx.select(model).at_instances_of(kinds), TOKENS)

    def moved_by(change: jax.Array) -> jax.Array:
        embed = sx.select(linear).at(lambda model: model.embed)
        return run(embed.apply(lambda embed: _Shifted(embed, change)))

    base = run(linear)
    one, two = jax.random.normal(jax.random.key(0), (2, *TOKENS.shape, 12))
    close(moved_by(one + two) - base, (moved_by(one) - base) + (moved_by(two) - base))


class _Shifted(sx.Module):
    def __init__(self, layer: Any, change: jax.Array) -> None:
        self.layer, self.change = layer, change

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.layer(tokens) + self.change


def test_the_run_leaves_the_model_as_it_is() -> None:
    dropout = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
    model = sx.nn.Sequential(dropout, sx.nn.RMSNorm(3))
    before = sx.state(sx.clone(model)).flat()
    linearise(sx.select(model).at_instances_of(sx.nn.RMSNorm), jnp.ones(3))
    after = sx.state(model).flat()
    assert all(bool((after[path] == value).all()) for path, value in before.items())


def test_keywords_are_given_to_the_layer_and_a_point_is_broadcast() -> None:
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
    close(linear(jnp.array([4.0, 3.0]), by=5.0), [75.0, 45.0])


def test_what_takes_integers_is_called_twice_or_never_is_refused_with_its_path() -> None:
    model = decoder(tied=True)
    with pytest.raises(errors.SelectionError, match=r"\.embed cannot.*takes integers"):
        linearise(sx.select(model).at(lambda model: model.embed), TOKENS)
    norm = sx.nn.RMSNorm(3)
    twice = sx.nn.Sequential(norm, jnp.tanh, norm)
    with pytest.raises(errors.SelectionError, match=r"\.layers\[0\] cannot.*called 2 times"):
        linearise(sx.select(twice).at_instances_of(sx.nn.RMSNorm), jnp.ones(3))

    class Spare(sx.Module):
        def __init__(self) -> None:
            self.spare = sx.nn.RMSNorm(3)

        def __call__(self, x: Any) -> Any:
            return x

    with pytest.raises(errors.SelectionError, match=r"\.spare cannot.*called 0 times"):
        linearise(sx.select(Spare()).at_instances_of(sx.nn.RMSNorm), jnp.ones(3))
