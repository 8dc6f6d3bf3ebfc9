# SPDX-License-Identifier: Apache-2.0
"""Parts of a model, called by themselves, rotate positions as within it."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest

import shardax as sx
from shardax.errors import LayerConfigError
from shardax.models import AttentionConfig, MLPConfig, Rope, Transformer, TransformerConfig
from tests.values import with_values

TOKENS = np.arange(24).reshape(2, 12)
ROPES = {
    "plain": Rope(100.0),
    "linear": Rope(100.0, kind="linear", factor=4.0),
    "llama3": Rope(100.0, kind="llama3", factor=8.0, length=8.0),
    "yarn": Rope(100.0, kind="yarn", factor=4.0, low=1.0, high=32.0, length=16.0),
    "partial": Rope(100.0, fraction=0.5),
    "none": None,
}


def _model(
    *, num_layers: int = 2, scan_layers: bool = False, **attention_options: Any
) -> Transformer:
    attention = AttentionConfig(**{"num_heads": 2, "head_dim": 8, **attention_options})
    config = TransformerConfig(
        num_layers=num_layers,
        embed_dim=16,
        attention=attention,
        mlp=MLPConfig(dim=16),
        scan_layers=scan_layers,
    )
    return with_values(Transformer(config, rngs=sx.Rngs(0)))


def _close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


# Whether layers are stacked does not depend on the kind of rotation, so it takes turns.
@pytest.mark.parametrize(
    ("kind", "scanned"),
    [
        *zip(ROPES, itertools.cycle([False, True]), strict=False),
        ("llama3", True),
        ("llama3", False),
    ],
)
def test_layers_alone_are_those_of_the_model(kind: str, scanned: bool) -> None:
    model = _model(rope=ROPES[kind], scan_layers=scanned)

    @sx.jit
    def by_parts(model: Any) -> jax.Array:
        x = model.embed(TOKENS)
        for layer in [model.layers] if scanned else model.layers:
            x = layer(x)
        return model.head(model.final_norm(x))

    _close(by_parts(model), sx.jit(model)(TOKENS))


def test_attention_alone_rotates_as_its_rope() -> None:
    rope = ROPES["llama3"]
    attention = _model(rope=rope, num_layers=1).layers[0].attn
    x = np.random.default_rng(0).normal(size=(2, 6, 16)).astype(np.float32)

    @sx.jit
    def call(attention: Any, x: Any, **options: Any) -> jax.Array:
        return attention(x, **options)

    expected = call(attention, x, positions=rope.rotation(np.arange(6), 8))
    _close(call(attention, x), expected)
    cache = sx.nn.AttentionCache(2, 6, 2, 8)
    parts = [call(attention, x[:, :4], cache=cache), call(attention, x[:, 4:], cache=cache)]
    _close(np.concatenate(parts, 1), expected)
    plain = call(attention, x, positions=Rope(rope.base).rotation(np.arange(6), 8))
    assert np.abs(np.asarray(plain - expected)).max() > 0.01


def test_local_layers_alone_have_their_own_rope() -> None:
    local = Rope(10.0, fraction=0.5)
    options = {"window": 4, "local_layers": (True, False), "local_rope": local}
    model = _model(rope=ROPES["linear"], **options)
    x = model.embed(TOKENS)
    for layer in model.layers:
        x = layer(x)
    _close(model.head(model.final_norm(x)), model(TOKENS))


def test_rope_of_attention_is_checked() -> None:
    make = lambda **options: sx.nn.MultiHeadAttention(16, 2, rngs=sx.Rngs(0), **options)  # noqa: E731
    with pytest.raises(LayerConfigError, match="give one of them"):
        make(rope=Rope(), rope_base=100.0)
    with pytest.raises(LayerConfigError, match=r"fraction=0\.4 of head_dim=8 is 3"):
        make(rope=Rope(fraction=0.4))
    given, plain = make(rope=Rope(100.0)), make(rope_base=100.0)
    assert sx.graphdef(given) == sx.graphdef(plain)


@pytest.mark.parametrize("is_shared", [True, False])
def test_parallel_layer_without_attention_has_its_norm_still(is_shared: bool) -> None:
    norms = sx.models.NormConfig(shared=is_shared)
    mlp = MLPConfig(dim=16)
    config = TransformerConfig(num_layers=1, embed_dim=16, mlp=mlp, norms=norms, parallel=True)
    layer = with_values(Transformer(config, rngs=sx.Rngs(0))).layers[0]
    x = 3 * np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
    norm = layer.attn_norm if is_shared else layer.mlp_norm
    expected = x + layer.mlp(norm(x))
    layer.attn = None
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)
