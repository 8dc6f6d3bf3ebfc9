# SPDX-License-Identifier: Apache-2.0
"""Activations are saved of whatever a model calls, and the model computes what it did."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardax as sx
from shardax import errors
from shardax.surgery import SavedActivation, save_activations
from tests.advice import run_advice
from tests.tools.surgery.decoders import TOKENS, close, decoder, logits, run
from tests.values import with_values

OF_A_LAYER = [["attn_norm", "attn.q", "attn.softmax", "attn.out", "mlp.up"], ["attn", "mlp"]]


def places(scanned: bool) -> list[list[str]]:
    """Returns all kinds of places of a decoder, in groups where none holds another."""
    layer = ".layers.stacked" if scanned else ".layers[1]"
    outer = [[".embed", ".final_norm", layer], *([[".layers"]] if scanned else [])]
    return outer + [[f"{layer}.{name}" for name in group] for group in OF_A_LAYER]


@pytest.mark.parametrize(  # every two of scanned, tied (with remat) and compiled together
    ("scanned", "tied", "remat", "compiled"),
    [
        (False, False, None, False),
        (True, False, None, True),
        (False, True, "full", True),
        (True, True, "full", False),
    ],
    ids=["layers", "scanned-jit", "layers-tied-remat-jit", "scanned-tied-remat"],
)
def test_any_place_of_a_decoder_is_saved(
    scanned: bool, tied: bool, remat: Any, compiled: bool
) -> None:
    model = decoder(scanned, tied, remat)
    for group in places(scanned):
        selection = sx.select(model).at_keypaths(*group)
        assert selection.count() == len(group)
        watched = save_activations(selection)
        close(run(watched) if compiled else watched(TOKENS), logits(tied))
        saved = sx.pop(watched, sx.Intermediate).flat()
        assert saved.keys() == {(*path, "activation") for path in selection.keypaths()}
        assert {len(calls) for calls in saved.values()} == {1}
        assert sx.graphdef(watched) == sx.graphdef(save_activations(selection))


@functools.cache
def saved(scanned: bool) -> tuple[dict[Any, np.ndarray], dict[Any, np.ndarray]]:
    """Returns by path what the linear layers of a decoder return, and its softmax functions."""
    model = decoder(scanned)
    attention = sx.select(model).at_instances_of(sx.nn.MultiHeadAttention)
    watched = save_activations(attention.at(lambda attention: attention.softmax))
    watched = save_activations(sx.select(watched).at_instances_of(sx.nn.Linear))
    close(run(watched), logits())
    found = {
        path[:-1]: np.asarray(calls[0])
        for path, calls in sx.pop(watched, sx.Intermediate).flat().items()
    }
    of_softmax = {path for path in found if path[-1] == "softmax"}
    linears = {path: value for path, value in found.items() if path not in of_softmax}
    return linears, {path: found[path] for path in of_softmax}


def test_saved_activation_is_what_the_layer_returned() -> None:
    model = decoder()
    watched = save_activations(sx.select(model).at_instances_of(sx.models.DecoderLayer))
    run(watched)
    first, second = sx.pop(watched, sx.Intermediate).flat().values()

    @sx.jit
    def by_hand(model: Any) -> Any:
        turned = sx.nn.rotation(
            jnp.arange(TOKENS.shape[-1]), model.config.head_dim, model.config.rope_base
        )
        expected = model.layers[0](model.embed(TOKENS), positions=turned)
        return expected, model.layers[1](expected, positions=turned)

    expected = by_hand(model)
    close(first[0], expected[0])
    close(second[0], expected[1])


def test_stack_saves_activations_of_each_layer() -> None:
    (alone, _), (stacked, _) = saved(False), saved(True)
    names = {path[2:] for path in alone if path[0] == "layers"}
    assert stacked.keys() == {("head",), *(("layers", "stacked", *name) for name in names)}
    assert len(names) == 7
    for name in names:
        layers = [alone["layers", i, *name] for i in range(2)]
        close(stacked["layers", "stacked", *name], np.stack(layers))
    close(stacked["head",], alone["head",])


@pytest.mark.parametrize("scanned", [False, True])
def test_attention_patterns_are_what_softmax_returns(scanned: bool) -> None:
    _, found = saved(scanned)
    patterns = [value for _, value in sorted(found.items())]
    stacked = patterns[0] if scanned else np.stack(patterns)
    assert stacked.shape == (2, 2, 4, 5, 5)  # layers, batch, heads, time, other time
    close(stacked.sum(-1), np.ones((2, 2, 4, 5)))
    assert (stacked == np.tril(stacked)).all()

    # The first layer's by hand: queries and keys of two heads each meet, with rotary positions.
    @sx.jit
    def projected(model: Any) -> Any:
        layer = model.layers[0]
        return layer.attn.project(layer.attn_norm(model.embed(TOKENS)))[:2]

    query, key = map(np.asarray, projected(decoder()))
    scores = np.einsum("bqhd,bkhd->bhqk", query, np.repeat(key, 2, 2)) / np.sqrt(6.0)
    weights = np.exp(np.where(np.tri(5, dtype=bool), scores, -np.inf))
    close(stacked[0], weights / weights.sum(-1, keepdims=True))


@pytest.mark.parametrize(("kv_heads", "causal"), [(4, False), (2, True), (1, True)])
def test_attention_computes_the_same_with_another_softmax(kv_heads: int, causal: bool) -> None:
    sizes = {"num_kv_heads": kv_heads, "head_dim": 3, "causal": causal}
    layer = with_values(sx.nn.MultiHeadAttention(12, 4, **sizes, rngs=sx.Rngs(0)))
    other = sx.select(layer).at(lambda layer: layer.softmax).set(lambda x: jax.nn.softmax(x))
    random = np.random.default_rng(1)
    x = random.normal(size=(2, 5, 12)).astype(np.float32)
    mask = random.random((2, 1, 5, 5)) < 0.7
    cases = [(x, None), (x, mask), (x[0], None), (x[0], mask[0])]

    @sx.jit
    def both(other: Any, layer: Any) -> Any:
        return [[each(x, mask=mask) for x, mask in cases] for each in (other, layer)]

    for found, expected in zip(*both(other, layer), strict=True):
        close(found, expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_attention_patterns_are_saved_over_a_mesh(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    rules = sx.models.DECODER_RULES
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        attention = sx.select(sx.shard(decoder(scanned=True), mesh, rules)).at_instances_of(
            sx.nn.MultiHeadAttention
        )
        watched = save_activations(attention.at(lambda attention: attention.softmax))
        found = sx.jit(lambda model, tokens: model(tokens))(watched, tokens)
    close(found, logits())
    ((patterns,),) = sx.pop(watched, sx.Intermediate).flat().values()
    (expected,) = saved(True)[1].values()
    close(patterns, expected)


def test_save_activations_saves_every_call_of_a_shared_layer() -> None:
    linear = with_values(sx.nn.Linear(2, 2, rngs=sx.Rngs(0)))
    model = sx.nn.Sequential(linear, jnp.tanh, linear)
    watched = save_activations(sx.select(model).at_instances_of(sx.nn.Linear))
    assert watched.layers[0] is watched.layers[2]
    x = np.ones(2, np.float32)
    watched(x)
    (calls,) = sx.pop(watched, sx.Intermediate).flat().values()
    kernel, bias = np.asarray(linear.kernel.value), np.asarray(linear.bias.value)
    first = x @ kernel + bias
    assert len(calls) == 2
    close(calls[0], first)
    close(calls[1], np.tanh(first) @ kernel + bias)


def test_wrapper_forwards_attributes_and_is_removed_again() -> None:
    model = decoder(tied=True)
    watched = save_activations(sx.select(model).at_instances_of((sx.nn.Embed, sx.nn.Linear)))
    assert watched.layers[0].attn.q.kernel is model.layers[0].attn.q.kernel
    close(watched.embed.attend(np.ones((1, 12), np.float32))[0], model.embed.embedding[...].sum(1))
    bare = sx.select(watched).at_instances_of(SavedActivation).apply(lambda saved: saved.body)
    assert sx.graphdef(bare) == sx.graphdef(model)
    assert bare.embed is model.embed


def test_gradients_and_dropout_are_those_of_the_model() -> None:
    model = decoder(scanned=True, dropout=0.5)
    watched = save_activations(sx.select(sx.clone(model)).at_instances_of(sx.nn.MLP))
    loss = sx.jit(sx.value_and_grad(lambda model: (model(TOKENS) ** 2).mean()))
    (value, grads), (expected, plain) = loss(watched), loss(model)
    close(value, expected)
    assert len(grads.flat()) == len(plain.flat()) == 12
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
def test_uncalled_value_is_refused_by_path(select: Any, path: str) -> None:
    mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
    with pytest.raises(errors.SelectionError, match=rf"\{path} is") as caught:
        save_activations(sx.select(mlp).at(select))
    code = "sx.select(model).at_instances_of(sx.nn.Linear)"
    save_activations(run_advice(caught.value, code, {"sx": sx, "model": mlp}))


def test_empty_or_missing_selection_is_refused() -> None:
    mlp = sx.nn.MLP(2, 4, rngs=sx.Rngs(0))
    with pytest.raises(errors.SelectionError):
        save_activations(sx.select(mlp).at_instances_of(sx.nn.Embed))
    with pytest.raises(errors.SelectionError, match="takes a selection") as caught:
        save_activations(mlp)  # pyright: ignore[reportArgumentType]
    code = "sx.select(model).at_instances_of(sx.nn.Linear)"
    save_activations(run_advice(caught.value, code, {"sx": sx, "model": mlp}))
