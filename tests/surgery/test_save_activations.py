# SPDX-License-Identifier: Apache-2.0
"""Activations are saved of whatever a model calls, and the model computes what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.surgery.decoders import TOKENS, close, decoder, run

import shardax as sx
from shardax import errors
from shardax.surgery import SavedActivation, save_activations

OF_A_LAYER = (".attn_norm", ".attn", ".attn.q", ".attn.softmax", ".attn.out", ".mlp", ".mlp.up", "")


def places(scanned: bool) -> list[str]:
    layer = ".layers.stacked" if scanned else ".layers[1]"
    whole = [".layers"] if scanned else []
    return [".embed", ".final_norm", *whole, *(layer + place for place in OF_A_LAYER)]


@pytest.mark.parametrize(  # every two of scanned, tied (with remat) and compiled together
    ("scanned", "tied", "remat", "call"),
    [
        (False, False, None, run),
        (True, False, None, sx.jit(run)),
        (False, True, "full", sx.jit(run)),
        (True, True, "full", run),
    ],
    ids=["layers", "scanned-jit", "layers-tied-remat-jit", "scanned-tied-remat"],
)
def test_any_place_of_a_decoder_can_be_watched(
    scanned: bool, tied: bool, remat: Any, call: Callable[[Any], jax.Array]
) -> None:
    model = decoder(scanned, tied, remat)
    expected = call(model)
    for place in places(scanned):
        selection = sx.select(model).at_keypaths(place)
        watched = save_activations(selection)
        close(call(watched), expected)
        ((path, saved),) = sx.pop(watched, sx.Intermediate).flat().items()
        assert (path, len(saved)) == ((*selection.keypaths()[0], "activation"), 1)
        assert sx.graphdef(watched) == sx.graphdef(save_activations(selection))


def test_what_is_saved_is_what_the_layer_returned() -> None:
    model = decoder()
    watched = save_activations(sx.select(model).at_instances_of(sx.models.DecoderLayer))
    run(watched)
    first, second = sx.pop(watched, sx.Intermediate).flat().values()
    turned = sx.nn.rotation(
        jnp.arange(TOKENS.shape[-1]), model.config.head_dim, model.config.rope_base
    )
    close(first[0], model.layers[0](model.embed(TOKENS), positions=turned))
    close(second[0], model.layers[1](first[0], positions=turned))


def test_a_stack_saves_what_its_layers_would_by_themselves() -> None:
    saved = []
    for scanned in (False, True):
        model = decoder(scanned)
        watched = save_activations(sx.select(model).at_instances_of(sx.nn.Linear))
        run(watched)
        names = [path[-3:-1] for path in sx.state(watched, sx.Intermediate).flat()]
        values = [value[0] for value in sx.pop(watched, sx.Intermediate).flat().values()]
        saved.append((names, values))
    (names, values), (stacked_names, stacked) = saved
    assert names == stacked_names[:-1] * 2 + stacked_names[-1:]
    count = len(stacked) - 1  # the last one is the head
    for i in range(count):
        close(stacked[i], jnp.stack([values[i], values[i + count]]))
    close(stacked[-1], values[-1])


@pytest.mark.parametrize("scanned", [False, True])
def test_attention_patterns_are_what_the_softmax_returns(scanned: bool) -> None:
    model = decoder(scanned)
    attention = sx.select(model).at_instances_of(sx.nn.MultiHeadAttention)
    watched = save_activations(attention.at(lambda attention: attention.softmax))
    close(run(watched), run(model))
    patterns = [value[0] for value in sx.pop(watched, sx.Intermediate).flat().values()]
    stacked = patterns[0] if scanned else jnp.stack(patterns)
    assert stacked.shape == (2, 2, 4, 5, 5)  # layers, batch, heads, time, other time
    close(stacked.sum(-1), jnp.ones((2, 2, 4, 5)))
    assert (stacked == jnp.tril(stacked)).all()

    # The first layer's by hand: queries and keys of two heads each meet, with rotary positions.
    layer = decoder().layers[0]
    query, key, _ = layer.attn.project(layer.attn_norm(decoder().embed(TOKENS)))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, jnp.repeat(key, 2, 2)) / jnp.sqrt(6.0)
    scores = jnp.where(jnp.tri(5, dtype=bool), scores, -jnp.inf)
    close(stacked[0], jax.nn.softmax(scores))


@pytest.mark.parametrize("shape", [(5, 12), (2, 5, 12)])
@pytest.mark.parametrize(("kv_heads", "causal"), [(4, False), (2, True), (1, True)])
def test_attention_with_another_softmax_computes_the_same(
    shape: tuple[int, ...], kv_heads: int, causal: bool
) -> None:
    layer = sx.nn.MultiHeadAttention(
        12, 4, num_kv_heads=kv_heads, head_dim=3, causal=causal, rngs=sx.Rngs(0)
    )
    other = sx.select(layer).at(lambda layer: layer.softmax).set(lambda x: jax.nn.softmax(x))
    x = jax.random.normal(jax.random.key(1), shape)
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, (*shape[:-2], 1, 5, 5))
    for given in (None, mask):
        close(other(x, mask=given), layer(x, mask=given))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_attention_patterns_are_seen_over_a_mesh(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    model = decoder(scanned=True)
    expected, rules = run(model), sx.models.DECODER_RULES
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        attention = sx.select(sx.shard(model, mesh, rules)).at_instances_of(
            sx.nn.MultiHeadAttention
        )
        watched = save_activations(attention.at(lambda attention: attention.softmax))
        logits = sx.jit(lambda model, tokens: model(tokens))(watched, tokens)
    close(jax.device_get(logits), expected)
    ((patterns,),) = sx.pop(watched, sx.Intermediate).flat().values()
    close(jax.device_get(patterns).sum(-1), jnp.ones((2, 2, 4, 5)))


def test_every_call_since_is_saved_and_a_shared_layer_is_watched_once() -> None:
    linear = sx.nn.Linear(2, 2, rngs=sx.Rngs(0))
    model = sx.nn.Sequential(linear, jnp.tanh, linear)
    watched = save_activations(sx.select(model).at_instances_of(sx.nn.Linear))
    assert watched.layers[0] is watched.layers[2]
    x = jnp.ones(2)
    watched(x)
    (saved,) = sx.pop(watched, sx.Intermediate).flat().values()
    close(saved[0], linear(x))
    close(saved[1], linear(jnp.tanh(linear(x))))


def test_a_wrapper_stands_for_its_layer_and_is_removed_again() -> None:
    model = decoder(tied=True)
    watched = save_activations(sx.select(model).at_instances_of((sx.nn.Embed, sx.nn.Linear)))
    assert watched.layers[0].attn.q.kernel is model.layers[0].attn.q.kernel
    assert watched.embed.attend(jnp.ones((1, 12))).shape == (1, 16)
    bare = sx.select(watched).at_instances_of(SavedActivation).apply(lambda saved: saved.body)
    assert sx.graphdef(bare) == sx.graphdef(model)
    assert bare.embed is model.embed


def test_gradients_and_random_numbers_are_those_of_the_model() -> None:
    config = sx.models.DecoderConfig(
        vocab_size=16, embed_dim=12, head_dim=6, mlp_dim=10, dropout=0.5, scan_layers=True
    )
    model = sx.models.Decoder(config, rngs=sx.Rngs(0))
    watched = save_activations(sx.select(sx.clone(model)).at_instances_of(sx.nn.MLP))
    loss = sx.jit(sx.value_and_grad(lambda model: (model(TOKENS) ** 2).mean()))
    (value, grads), (expected, plain) = loss(watched), loss(model)
    close(value, expected)
    for found, wanted in zip(grads.flat().values(), plain.flat().values(), strict=True):
        close(found, wanted)


@pytest.mark.parametrize(
    ("select", "path"),
    [
        (lambda mlp: mlp.up.kernel, ".up.kernel"),
        (lambda mlp: mlp.up.kernel.value, ".up.kernel.value"),
        (lambda mlp: mlp.activation, ".activation"),
    ],
)
def test_what_is_not_called_is_refused_with_its_path(select: Any, path: str) -> None:
    mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
    with pytest.raises(errors.SelectionError, match=rf"\{path} is"):
        save_activations(sx.select(mlp).at(select))


def test_nothing_selected_and_no_selection_are_errors() -> None:
    mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
    with pytest.raises(errors.EmptySelectionError):
        save_activations(sx.select(mlp).at_instances_of(sx.nn.Embed))
    with pytest.raises(errors.SelectionError, match=r"sx\.select\(model\)"):
        save_activations(mlp)  # pyright: ignore[reportArgumentType]
