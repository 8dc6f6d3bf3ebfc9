# SPDX-License-Identifier: Apache-2.0
"""Products in fp8: their operands, gradients, layers and layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import shardax as sx
from shardax import errors, nn
from shardax.surgery import with_precision
from shardax.train import checkpoint
from tests.advice import run_advice
from tests.tools.surgery.decoders import TOKENS, close, decoder, run
from tests.values import with_values

X = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)


def rounded(x: Any, dtype: Any = ml_dtypes.float8_e4m3fn) -> np.ndarray:
    """Rounds to fp8 by the least power of two that makes all numbers fit."""
    largest = float(ml_dtypes.finfo(dtype).max)
    x = np.asarray(x, np.float32)
    scale = np.exp2(np.floor(np.log2(np.abs(x).max() / largest)) + 1).astype(np.float32)
    return (x / scale).astype(dtype).astype(np.float32) * scale


@sx.jit
def call(layer: Any, x: Any) -> Any:
    return layer(x)


def linear(**options: Any) -> nn.Linear:
    return with_values(nn.Linear(8, 3, use_bias=False, rngs=sx.Rngs(0), **options))


def test_products_and_gradients_are_of_rounded_operands() -> None:
    layer = linear(precision="fp8")
    weights = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    x, kernel, cotangent = (
        rounded(X),
        rounded(layer.kernel),
        rounded(weights, ml_dtypes.float8_e5m2),
    )
    close(layer(X), x @ kernel)
    result, pull = jax.vjp(lambda kernel, x: linear_of(layer, kernel)(x), layer.kernel.value, X)
    for_kernel, for_x = pull(jnp.asarray(weights))
    close(result, x @ kernel)
    close(for_kernel, x.T @ cotangent)
    close(for_x, cotangent @ kernel.T)


def linear_of(layer: Any, kernel: Any) -> Any:
    copied = sx.clone(layer)
    copied.kernel.value = kernel
    return copied


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: nn.Einsum("...i,io->...o", (8, 3), rngs=sx.Rngs(0), **o),
        lambda **o: nn.MLP(8, 4, rngs=sx.Rngs(0), **o),
        lambda **o: nn.MultiHeadAttention(8, 2, causal=True, rngs=sx.Rngs(0), **o),
    ],
    ids=["einsum", "mlp", "attention"],
)
def test_layers_take_fp8(make: Any) -> None:
    precisions = (None, "fp8", "fp8-delayed")
    layers = [with_values(make(precision=precision)) for precision in precisions]
    expected, found, delayed = (np.asarray(call(layer, X)) for layer in layers)
    assert 0 < np.abs(found - expected).max() < 0.2 * np.abs(expected).max()
    close(delayed, found)  # without a history, of this call
    assert sx.state(layers[-1], sx.AmaxHistory).flat()
    for value in sx.state(layers[-1], sx.AmaxHistory).flat().values():
        assert np.count_nonzero(value) == 1


def test_scales_follow_any_magnitude() -> None:
    layer = linear(precision="fp8", dtype=jnp.bfloat16)
    expected = np.asarray(layer(X), np.float32)
    for factor in (2.0**-100, 2.0**60):
        np.testing.assert_array_equal(np.asarray(layer(X * factor), np.float32), expected * factor)
    assert not np.asarray(layer(0 * X)).any()
    assert np.isnan(np.asarray(layer(X * np.inf), np.float32)).all()


def test_gradients_keep_a_byte_per_number() -> None:
    layer = linear(precision="fp8")
    _, pull = jax.vjp(lambda x: layer(x), jnp.asarray(X))
    assert sorted(str(leaf.dtype) for leaf in jax.tree.leaves(pull) if leaf.ndim == 2) == [
        "float8_e4m3fn",
        "float8_e4m3fn",
    ]


@pytest.mark.parametrize("scanned", [False, True])
def test_filters_choose_layers(scanned: bool) -> None:
    model = decoder(scanned)
    before = np.asarray(run(model))
    trained = with_precision(
        model, {sx.PathContains("attn"): None, sx.PathContains("layers"): "fp8"}
    )
    layer = trained.layers.stacked if scanned else trained.layers[0]
    assert (layer.mlp.up.precision, layer.attn.q.precision, trained.head.precision) == (
        "fp8",
        None,
        None,
    )
    error = np.abs(np.asarray(run(trained)) - before).max()
    assert 0 < error < 0.2 * np.abs(before).max()
    np.testing.assert_array_equal(run(model), before)
    assert [id(v) for _, v in sx.iter_variables(trained)] == [
        id(v) for _, v in sx.iter_variables(model)
    ]
    with pytest.raises(errors.SelectionError, match="with_precision decides about no") as caught:
        with_precision(model, {sx.PathContains("norm"): "fp8"})
    code = "sx.surgery.with_precision(model, 'fp8')"
    assert run_advice(caught.value, code, {"sx": sx, "model": model}).head.precision == "fp8"


def test_meshes_share_one_scale(mesh: Mesh) -> None:
    model = with_precision(decoder(scanned=True), "fp8")
    expected = run(model)
    rules = sx.Rules({"batch": "data", "embed": "data", "vocab": "model"})
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        found = np.asarray(run(sx.shard(model, mesh)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp8", "fp8-delayed"])
def test_training_resumes_bit_for_bit(tmp_path: Path, precision: str) -> None:
    def start() -> tuple[Any, Any]:
        model = decoder(dtype="bfloat16")
        model = with_precision(model, {sx.PathContains("layers"): precision})
        return model, sx.train.Optimizer(model, optax.adam(0.01))

    @sx.jit
    def step(model: Any, optimizer: Any) -> Any:
        value, gradients = sx.value_and_grad(lambda model: (model(TOKENS) ** 2).mean())(model)
        optimizer.update(gradients)
        return value

    model, optimizer = start()
    losses = [float(step(model, optimizer)) for _ in range(2)]
    checkpoint.save((model, optimizer), tmp_path / "saved")
    losses += [float(step(model, optimizer)) for _ in range(2)]
    assert losses[-1] < losses[0]
    resumed = start()
    checkpoint.restore(resumed, tmp_path / "saved")
    assert [float(step(*resumed)) for _ in range(2)] == losses[2:]


# --- scales of earlier calls ---


def history(layer: Any, operand: str = "input") -> list[float]:
    values = np.asarray(getattr(layer.precision, operand).value)
    return values[: np.count_nonzero(values)].tolist()


def test_delayed_scales_are_of_the_calls_before() -> None:
    layer, current = linear(precision="fp8-delayed"), linear(precision="fp8")
    close(layer(X), current(X))  # without a history, of this call
    most = float(np.abs(X).max())
    # Scaled by the history, numbers above 448 of its scale are clipped.
    scale = np.exp2(np.floor(np.log2(most / 448)) + 1)
    clipped = rounded(np.clip(8 * X, -448 * scale, 448 * scale))
    close(layer(8 * X), clipped @ rounded(layer.kernel))
    assert history(layer) == [8 * most, most]
    close(layer(8 * X), current(8 * X))
    assert history(layer, "kernel") == [float(np.abs(layer.kernel).max())] * 3
    for _ in range(20):
        layer(X)
    assert history(layer) == [most] * 16


def test_evaluation_records_nothing() -> None:
    layer = linear(precision="fp8-delayed")
    layer(X)
    before = history(layer)
    layer.eval()
    layer(2 * X)
    assert history(layer) == before


def test_overflow_is_shown_and_leaves_no_trace() -> None:
    layer = linear(precision="fp8-delayed")
    layer(X)
    assert np.isnan(np.asarray(layer(X * np.inf))).all()
    most = float(np.abs(X).max())
    assert history(layer) == [most, most]
    assert np.isfinite(np.asarray(layer(X))).all()


@pytest.mark.parametrize("scanned", [False, True])
def test_histories_are_of_each_layer_and_not_trained(scanned: bool) -> None:
    model = decoder(scanned)
    trained = with_precision(model, {sx.PathContains("layers"): "fp8-delayed"})
    histories = [v for _, v in sx.iter_variables(trained) if isinstance(v, sx.AmaxHistory)]
    lead, names = ((2,), ("layers",)) if scanned else ((), ())
    assert {(v.shape, v.axes) for v in histories} == {((*lead, 16), (*names, None))}
    assert not [path for path in sx.state(trained, sx.Param).flat() if "precision" in path]
    run(trained)
    layer = trained.layers.stacked if scanned else trained.layers[1]
    assert np.count_nonzero(layer.mlp.up.precision.input.value) == (2 if scanned else 1)
    # Without histories it is saved, and computes, as it was.
    plain = with_precision(trained, "default")
    np.testing.assert_allclose(run(plain), run(model), rtol=1e-6)
    assert not sx.state(plain, sx.AmaxHistory).flat()


def test_histories_over_meshes_are_of_all_devices(mesh: Mesh) -> None:
    model = with_precision(decoder(scanned=True), "fp8-delayed")
    expected = [np.asarray(run(model)), np.asarray(run(model))]
    rules = sx.Rules({"batch": "data", "embed": "data", "vocab": "model"})
    model = with_precision(decoder(scanned=True), "fp8-delayed")
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        split = sx.shard(model, mesh)
        found = [np.asarray(run(split)), np.asarray(run(split))]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_convolutions_refuse_fp8() -> None:
    with pytest.raises(errors.LayerConfigError, match="Conv has precision='fp8'"):
        nn.Conv(3, 3, 3, precision="fp8", rngs=sx.Rngs(0))
    with pytest.raises(errors.LayerConfigError, match="'fp8', 'fp8-delayed', or"):
        linear(precision="fp4")
