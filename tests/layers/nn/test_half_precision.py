# SPDX-License-Identifier: Apache-2.0
"""Layers in bfloat16 and float16, on CPU too, and where promotion is forbidden."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardax as sx
from shardax import models, nn, train
from tests.values import with_values

HALF = [jnp.bfloat16, jnp.float16]
HEADS = {"num_heads": 2, "head_dim": 8}
X = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("cell", "gates"), [("SimpleCell", 1), ("LSTMCell", 4)])
def test_recurrent_kernels_are_orthogonal_in_half(cell: str, gates: int, dtype: Any) -> None:
    layer = getattr(nn, cell)(3, 4, param_dtype=dtype, rngs=sx.Rngs(0))
    kernel = layer.recurrent.kernel.value
    assert kernel.dtype == dtype
    matrices = np.asarray(kernel, np.float32).swapaxes(0, 1)
    expected = np.broadcast_to(np.eye(4), (gates, 4, 4))
    np.testing.assert_allclose(matrices @ matrices.swapaxes(1, 2), expected, atol=0.02)
    carry = layer.initial_carry(jnp.ones((2, 3), dtype))
    results = sx.jit(layer)(carry, jnp.ones((2, 3), dtype))
    assert {leaf.dtype for leaf in jax.tree.leaves(results)} == {jnp.dtype(dtype)}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "window": 2, "num_kv_heads": 1},
    {"softcap": 5.0},
    {"rope_base": 100.0, "scale": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "softcap", "rope"])
def test_compiled_float16_attention_runs_on_cpu(options: dict[str, Any]) -> None:
    attention = with_values(nn.MultiHeadAttention(8, 2, rngs=sx.Rngs(0), **options))
    small = nn.MultiHeadAttention(8, 2, dtype=jnp.float16, rngs=sx.Rngs(0), **options)
    sx.update(small, sx.state(attention))
    loss = lambda layer, x: jnp.sum(jnp.sin(layer(x).astype(jnp.float32)))  # noqa: E731
    step = sx.jit(sx.value_and_grad(loss))
    expected, actual = step(attention, X), step(small, X)
    for half, wide in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(half, wide, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("options", [{"dtype": jnp.bfloat16}, {"param_dtype": jnp.bfloat16}])
def test_norms_of_heads_keep_the_compute_dtype(options: dict[str, Any]) -> None:
    norm = lambda: nn.RMSNorm(4)  # noqa: E731
    norms = {"causal": True, "query_norm": norm, "key_norm": norm}
    attention = with_values(nn.MultiHeadAttention(8, 2, rngs=sx.Rngs(0), **norms, **options))
    wide = nn.MultiHeadAttention(8, 2, rngs=sx.Rngs(0), **norms)
    sx.update(wide, jax.tree.map(lambda x: np.asarray(x, np.float32), sx.state(attention)))
    x = X.astype(jnp.bfloat16)
    call = sx.jit(lambda layer, *given, cache=None: layer(*given, cache=cache))
    expected = call(wide, x.astype(np.float32))
    cache = nn.AttentionCache(2, 5, 2, 4, dtype=jnp.bfloat16)
    results = call(attention, x), call(attention, x, cache=cache), call(attention, x, x)
    for actual in results:
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(actual, np.float32), expected, atol=0.1)


def test_wider_context_widens_attention() -> None:
    attention = with_values(nn.MultiHeadAttention(8, 2, param_dtype=jnp.bfloat16, rngs=sx.Rngs(0)))
    assert attention(X.astype(jnp.bfloat16), X).dtype == jnp.float32


# --- jax_numpy_dtype_promotion="strict" ---

LAYERS: dict[str, Callable[[Any], Any]] = {
    "Linear": lambda options: nn.Linear(8, 8, **options),
    "MLP": lambda options: nn.MLP(8, 8, **options),
    "Einsum": lambda options: nn.Einsum("...a,ab->...b", (8, 8), **options),
    "Conv": lambda options: nn.Conv(8, 8, (3,), **options),
    "ConvTranspose": lambda options: nn.ConvTranspose(8, 8, (3,), **options),
    "LayerNorm": lambda options: nn.LayerNorm(8, **options),
    "RMSNorm": lambda options: nn.RMSNorm(8, **options),
    "GroupNorm": lambda options: nn.GroupNorm(8, 2, **options),
    "InstanceNorm": lambda options: nn.InstanceNorm(8, **options),
    "BatchNorm": lambda options: nn.BatchNorm(8, **options),
    "MultiHeadAttention": lambda options: nn.MultiHeadAttention(
        8, 2, causal=True, rope_base=100.0, query_norm=lambda: nn.RMSNorm(4, **options), **options
    ),
    "MultiHeadLatentAttention": lambda options: nn.MultiHeadLatentAttention(
        8, 2, head_dim=4, rope_dim=2, value_dim=4, latent_dim=4, causal=True, **options
    ),
    "ShortConvolution": lambda options: nn.ShortConvolution(8, use_bias=True, **options),
    "StateSpaceMixer": lambda options: nn.StateSpaceMixer(
        8, num_heads=2, head_dim=4, state_dim=3, chunk=2, **options
    ),
    "GatedDeltaNet": lambda options: nn.GatedDeltaNet(
        8, num_heads=2, head_dim=4, num_value_heads=4, chunk=2, **options
    ),
    "softcap": lambda options: nn.MultiHeadAttention(8, 2, softcap=3.0, dropout=0.5, **options),
    "MoE": lambda options: nn.MoE(8, 8, num_experts=4, **options),
    "Dropout": lambda options: nn.Sequential(
        nn.Linear(8, 8, **options), nn.Dropout(0.5, rngs=RNGS)
    ),
    "SimpleCell": lambda options: nn.RNN(nn.SimpleCell(8, 8, **options)),
    "GRUCell": lambda options: nn.RNN(nn.GRUCell(8, 8, **options)),
    "Bidirectional": lambda options: nn.Bidirectional(
        nn.LSTMCell(8, 8, **options), nn.LSTMCell(8, 8, **options)
    ),
    "Stack": lambda options: nn.Stack(lambda: nn.Linear(8, 8, **options), 2),
    "PReLU": lambda options: nn.PReLU(
        features=8, dtype=options.get("dtype"), param_dtype=options["param_dtype"]
    ),
    "WeightNorm": lambda options: nn.WeightNorm(
        nn.Linear(8, 8, **options), param_dtype=options["param_dtype"]
    ),
    "SpectralNorm": lambda options: nn.SpectralNorm(nn.Linear(8, 8, **options), rngs=RNGS),
    "AdaptiveAvgPool": lambda options: nn.Sequential(
        nn.Linear(8, 8, **options), nn.AdaptiveAvgPool(2)
    ),
    "AdaptiveMaxPool": lambda options: nn.Sequential(
        nn.Linear(8, 8, **options), nn.AdaptiveMaxPool(7)
    ),
}
RNGS = sx.Rngs(0)
# In models, in tests of its own, or above.
ELSEWHERE = {
    "AttentionCache",
    "ContextCache",
    "Embed",
    "KernelLayer",  # the base of those that are tried
    "LatentCache",
    "LSTMCell",
    "QuantizedKernel",
    "RNN",
    "RecurrentCache",
    "RecurrentMixer",  # the base of those that are tried
    "Sequential",
}


def test_layers_are_all_tried_under_strict_promotion() -> None:
    layers = {
        name
        for name, item in vars(nn).items()
        if inspect.isclass(item) and issubclass(item, sx.Module)
    }
    assert layers - ELSEWHERE <= LAYERS.keys()


# The path does not depend on the dtype, so the dtypes take turns.
@pytest.mark.parametrize(
    ("name", "dtype"), [*zip(LAYERS, itertools.cycle([jnp.float32, *HALF]), strict=False)]
)
def test_layers_run_under_strict_promotion(name: str, dtype: Any) -> None:
    model = with_values(LAYERS[name]({"param_dtype": dtype, "rngs": sx.Rngs(0)}))
    x = jnp.asarray(X, dtype)
    gradient = sx.grad(lambda model, x: model(x).astype(jnp.float32).sum())
    with jax.numpy_dtype_promotion("strict"):
        assert sx.eval_shape(lambda model, x: model(x), model, x).dtype == dtype
        assert sx.jit(gradient).lower(model, x).as_text()


def _blocks(model: Any, batch: Any) -> jax.Array:
    hidden = model.hidden_states(batch["inputs"])
    given = (batch["targets"], batch["mask"])
    return models.blockwise_cross_entropy(hidden, model.head_kernel, *given, block_size=4)


OPTIONS: dict[str, dict[str, Any]] = {
    "scanned": {"scan_layers": True},
    "gemma": {
        "norms": models.NormConfig(kind="rms_offset"),
        "attention": models.AttentionConfig(**HEADS, qk_norm="head", softcap=5.0),
        "embedding": models.EmbeddingConfig(scale=4.0),
    },
    "gpt": {
        "norms": models.NormConfig(kind="layer"),
        "attention": models.AttentionConfig(**HEADS, rope=None, qkv_bias=True),
        "positions": models.PositionsConfig(max_positions=8),
        "dropout": 0.1,
    },
    "experts": {
        "attention": models.AttentionConfig(**HEADS, qk_norm="all"),
        "experts": models.ExpertsConfig(num_experts=2, dim=8),
        "output": models.OutputConfig(tied=True),
    },
}


# Every dtype, and every model; the others take the same path.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("scanned", "float32"),
        ("scanned", "bfloat16"),
        ("scanned", "float16"),
        ("gemma", "bfloat16"),
        ("gpt", "float16"),
        ("experts", "bfloat16"),
    ],
)
def test_models_train_under_strict_promotion(name: str, dtype: str) -> None:
    options = OPTIONS[name]
    sizes = {"vocab_size": 32, "embed_dim": 16, "mlp": models.MLPConfig(dim=16)}
    sizes |= {"attention": models.AttentionConfig(**HEADS), **options}
    config = models.TransformerConfig(**sizes, dtype=dtype, param_dtype=dtype)
    model = models.Transformer(config, rngs=sx.Rngs(0))
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    batch = {"inputs": tokens, "targets": tokens, "mask": tokens > 3}
    optimizer = train.Optimizer(model, optax.adamw(optax.cosine_decay_schedule(0.1, 10)))

    def step(model: Any, optimizer: Any, batch: Any, loss: Any) -> Any:
        value, gradients = train.accumulated_value_and_grad(loss, 2)(model, batch)
        optimizer.update(gradients)
        return value

    with jax.numpy_dtype_promotion("strict"):
        for loss in (models.next_token_loss, _blocks):
            value = sx.eval_shape(
                lambda *args, loss=loss: step(*args, loss), model, optimizer, batch
            )
            assert value.dtype == jnp.float32
        cache = model.make_cache(2, 8)
        logits = sx.eval_shape(lambda *args: args[0](args[1], cache=args[2]), model, tokens, cache)
    assert logits.dtype == dtype


@pytest.mark.parametrize("master_dtype", [None, jnp.float32])
def test_training_runs_under_strict_promotion(master_dtype: Any) -> None:
    model = with_values(nn.Linear(2, 2, param_dtype=jnp.bfloat16, rngs=sx.Rngs(0)))
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    average, accuracy = train.metrics.Average(), train.metrics.Accuracy()
    with jax.numpy_dtype_promotion("strict"):
        optimizer = train.Optimizer(model, transformation, master_dtype=master_dtype)
        ema = train.EMA(model, lambda count: 0.9)
        before = np.asarray(model.kernel.value, np.float32)

        @sx.jit
        def step(model: Any, optimizer: Any, ema: Any, metrics: Any) -> None:
            optimizer.update(jax.tree.map(jnp.ones_like, sx.state(model, sx.Param)))
            ema.update(model)
            metrics[0].update(values=jnp.ones(2, jnp.bfloat16), weights=jnp.ones(2, bool))
            labels = jnp.zeros(2, jnp.int32)
            metrics[1].update(logits=jnp.ones((2, 3), jnp.bfloat16), labels=labels)

        step(model, optimizer, ema, [average, accuracy])
        model.bias[...] = jnp.ones((), jnp.float32)
        model.bias[0] = jnp.float32(2)
    assert model.kernel.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(model.kernel.value, np.float32), before - 0.1, atol=0.02)
    assert (float(average.compute()), float(accuracy.compute())) == (1.0, 1.0)
    assert model.bias.value.tolist() == [2.0, 1.0]
