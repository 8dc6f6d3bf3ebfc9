# SPDX-License-Identifier: Apache-2.0
"""What layers return is changed by path, however the layers are run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import shardax as sx
from shardax.errors import SelectionError
from shardax.models import AttentionConfig, Transformer, TransformerConfig
from shardax.surgery import lora, patch, record
from tests.advice import run_advice
from tests.tools.surgery.decoders import TOKENS, close, decoder, in_every_layout, logits
from tests.values import with_values

OTHERS = TOKENS[::-1]


def heads(model: Any) -> Any:
    return model.at_instances_of(sx.nn.MultiHeadAttention).at(lambda attention: attention.out)


def activations(model: Any, tokens: Any = TOKENS) -> dict[Any, Any]:
    """What every layer returns, every MLP, and the embedding."""
    kinds = (sx.models.DecoderLayer, sx.nn.MLP, sx.nn.Embed)
    return sx.jit(record(model, *kinds))(tokens)[1]


@in_every_layout
def test_activations_of_another_run_make_its_logits(scanned: bool, tied: bool, remat: Any) -> None:
    model = decoder(scanned, tied, remat)
    others = activations(model, OTHERS)
    structure = sx.graphdef(model)
    for path in (("embed",), ("layers", 1)):
        patched = patch(model, {path: others[path]})
        close(sx.jit(lambda patched: patched(TOKENS))(patched), logits(tied)[::-1])
    close(model(TOKENS), logits(tied))
    assert sx.graphdef(model) == structure


@pytest.mark.parametrize("scanned", [False, True])
def test_only_named_layers_change_and_one_may_be_inside_another(scanned: bool) -> None:
    model, shift = decoder(scanned), jnp.arange(12.0).reshape(1, 1, 12)
    inner, outer = ("layers", 0, "mlp"), ("layers", 1)
    before = activations(model)
    first = patch(model, {inner: before[inner] + shift})
    _, after = record(first, sx.models.DecoderLayer)(TOKENS)
    expected = patch(model, {outer: after[outer] + shift})(TOKENS)
    both = patch(model, {inner: shift, outer: shift}, jnp.add)
    close(sx.jit(lambda both: both(TOKENS))(both), expected)
    assert np.abs(expected - logits()).max() > 1e-2


@pytest.mark.parametrize("scanned", [False, True])
def test_gradients_of_values_are_those_of_activations(scanned: bool) -> None:
    model = decoder(scanned)

    def loss(shifts: Any) -> jax.Array:
        return (patch(model, shifts, jnp.add)(TOKENS) ** 2).sum()

    zeros = jax.tree.map(jnp.zeros_like, activations(model))
    gradients = jax.jit(jax.grad(loss))(zeros)
    assert list(gradients) == list(zeros)
    direction = jax.random.normal(jax.random.key(0), zeros["layers", 0, "mlp"].shape)
    step = 1e-2
    moved = [loss({("layers", 0, "mlp"): sign * step * direction}) for sign in (1, -1)]
    slope = (moved[0] - moved[1]) / (2 * step)
    found = (gradients["layers", 0, "mlp"] * direction).sum()
    np.testing.assert_allclose(found, slope, rtol=1e-2)


@pytest.mark.parametrize("scanned", [False, True])
def test_patched_input_is_a_head_of_another_run(scanned: bool) -> None:
    model, path = decoder(scanned), ("layers", 0, "attn", "out")
    one, other = (record(model, heads, inputs=True)(tokens)[1][path] for tokens in (TOKENS, OTHERS))
    patched = patch(model, {path: one.at[:, :, 0].set(other[:, :, 0])}, inputs=True)
    _, found = record(model, sx.nn.MultiHeadAttention)(TOKENS)
    _, changed = record(patched, sx.nn.MultiHeadAttention)(TOKENS)
    kernel = decoder().layers[0].attn.out.kernel[...]
    gap = jnp.einsum("bth,he->bte", other[:, :, 0] - one[:, :, 0], kernel[0])
    close(changed["layers", 0, "attn"] - found["layers", 0, "attn"], gap)


@pytest.mark.parametrize("scanned", [False, True])
def test_steered_model_generates_with_its_cache_and_keeps_its_parameters(scanned: bool) -> None:
    model = decoder(scanned)
    vector = 3 * jax.random.normal(jax.random.key(1), (12,))
    steered = patch(model, {("layers", 0): vector}, jnp.add)
    rows = sx.models.generate(steered, [[1, 2, 3], [4]], max_new_tokens=4, temperature=0)
    for row in rows:
        expected = jnp.argmax(steered(row[None, :-1]), -1)[0]
        assert row[-4:].tolist() == expected[-4:].tolist()
    parameters = dict(sx.iter_variables(model, sx.Param))
    assert list(map(id, parameters.values())) == [
        id(variable) for _, variable in sx.iter_variables(steered, sx.Param)
    ]
    (value,) = sx.state(steered, sx.Perturbation).flat().values()
    assert value.shape == ((2, 12) if scanned else (12,))


def test_layers_of_blocks_and_those_left_over_have_numbers() -> None:
    attention = AttentionConfig(
        num_heads=2, window=2, local_layers=(True, False, True, False, True)
    )
    config = TransformerConfig(
        vocab_size=16, num_layers=5, embed_dim=8, attention=attention, scan_layers=True
    )
    model = with_values(Transformer(config, rngs=sx.Rngs(0)))
    _, found = sx.jit(record(model, sx.nn.MLP))(TOKENS)
    for layer in range(5):
        path = ("layers", layer, "mlp")
        patched = patch(model, {path: jnp.ones(8)}, jnp.add)
        _, changed = sx.jit(record(patched, sx.nn.MLP))(TOKENS)
        same = [
            np.array_equal(found["layers", i, "mlp"], x) for i, x in enumerate(changed.values())
        ]
        assert same == [i < layer for i in range(5)]


def test_layer_of_a_stack_of_stacks_has_two_numbers() -> None:
    rngs = sx.Rngs(0)
    model = sx.nn.Stack(lambda: sx.nn.Stack(lambda: sx.nn.Linear(2, 2, rngs=rngs), 2), 3)
    x = np.ones((1, 2), np.float32)
    _, found = record(model, sx.nn.Linear)(x)
    patched = patch(model, {(2, 1): jnp.array([1.0, 2.0])}, jnp.add)
    close(patched(x) - found[2, 1], [[1, 2]])
    close(patch(model, {(2, 0): found[2, 0]})(x + 1), found[2, 1])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("scanned", [False, True])
def test_patch_of_a_sharded_model_keeps_its_layout(scanned: bool, kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    rules = sx.Rules([("batch", "data"), ("embed", "model")])
    path = ("layers", 0, "mlp")
    model, shift = decoder(scanned), jnp.arange(12.0).reshape(1, 1, 12)
    expected = patch(model, {path: shift}, jnp.add)(TOKENS)
    sx.shard(model, mesh, rules)
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        _, found = sx.jit(record(model, sx.nn.MLP))(TOKENS)
        shifted = {path: found[path] + shift}
        close(sx.jit(patch(model, shifted))(TOKENS), expected)
        close(sx.jit(patch(model, {path: shift}, jnp.add))(TOKENS), expected)


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "no values"),
        ({("layers", 2, "mlp"): 0.0}, r"\.layers\[2\]\.mlp.*no such layer.*: \.layers\[0\]\.mlp"),
        ({("layers", 0, "mpl"): 0.0}, r"no such layer.*\.layers\[0\]\.mlp"),
        ({("layers", 0, "mlp", "up", "kernel"): 0.0}, "wraps what a model calls"),
        ({("layers", 0, "mlp"): np.ones(5)}, r"makes float32\[1,1,5\] of float32\[2,5,12\]"),
        ({("layers", 0, "mlp"): (0.0, 0.0)}, "have that structure"),
    ],
    ids=["none", "number", "name", "variable", "shape", "structure"],
)
def test_value_that_does_not_fit_is_refused(scanned: bool, values: Any, message: str) -> None:
    with pytest.raises(SelectionError, match=message):
        patch(decoder(scanned), values)(TOKENS)


def test_patch_without_values_says_how_they_are_given() -> None:
    model, array = decoder(), np.ones(12, np.float32)
    with pytest.raises(SelectionError) as refused:
        patch(model, {})
    code = 'sx.surgery.patch(model, {("layers", 0, "mlp"): array})'
    patched = run_advice(refused.value, code, {"sx": sx, "model": model, "array": array})
    _, found = record(patched, sx.nn.MLP)(TOKENS)
    assert np.abs(patched(TOKENS) - logits()).max() > 0 and len(found) == 2


def test_values_of_a_stack_have_one_shape() -> None:
    values = {("layers", 0, "mlp"): np.ones(12), ("layers", 1, "mlp"): np.ones((5, 12))}
    patch(decoder(), values)(TOKENS)
    with pytest.raises(SelectionError, match=r"shapes \(5, 12\) and \(12,\)"):
        patch(decoder(scanned=True), values)


def test_adapters_and_patches_go_together() -> None:
    model = lora(sx.select(decoder(True)).at_instances_of(sx.nn.MLP), rank=1)
    _, found = record(model, sx.nn.MLP)(TOKENS)
    path = next(iter(found))
    close(patch(model, {path: found[path]})(TOKENS), logits())


@pytest.mark.parametrize("scanned", [False, True])
def test_recording_of_a_patched_model_has_the_paths_and_the_patched_results(scanned: bool) -> None:
    model, path = decoder(scanned), ("layers", 0, "mlp")
    kinds = (sx.nn.MLP, sx.nn.Linear)
    plain = record(model, *kinds)(TOKENS)[1]
    patched = patch(model, {path: jnp.full(12, 2.0)})

    _, seen = record(patched, *kinds)(TOKENS)
    assert seen.keys() == plain.keys()
    assert (seen[path] == 2).all()
    close(seen[*path, "up"], plain[*path, "up"])  # inside of the patched layer

    again = patch(patched, {(*path, "up"): seen[*path, "up"], path: jnp.full(12, 3.0)})
    assert (record(again, sx.nn.MLP)(TOKENS)[1][path] == 3).all()
