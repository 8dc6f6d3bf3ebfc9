# SPDX-License-Identifier: Apache-2.0
"""Quantized kernels: the rounding, every layer that has kernels, and all that is done to models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import shardax as sx
from shardax import errors, nn
from shardax.models import generate
from shardax.train import checkpoint
from tests.advice import run_advice
from tests.needs import needs
from tests.tools.surgery.decoders import TOKENS, close, decoder, run
from tests.values import with_values

HALF = np.random.default_rng(5).normal(size=(2, 6, 8)).astype(np.float32)


def rounded(kernel: Any, dims: tuple[int, ...], kind: str) -> np.ndarray:
    """Rounds as qwix does: the largest magnitude becomes 127.5, 7.5 or 448 steps."""
    x = np.asarray(kernel, np.float32)
    largest = {"int8": 127.5, "int4": 7.5, "fp8": 448.0}[kind]
    scale = np.abs(x).max(axis=dims, keepdims=True) / np.float32(largest)
    steps = x / np.where(scale == 0, 1, scale)
    if kind == "fp8":
        return steps.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    least = {"int8": -128, "int4": -8}[kind]
    return np.clip(np.round(steps), least, -least - 1) * scale


def check_rounding(kernel: Any, original: Any, dims: tuple[int, ...], kind: str) -> None:
    """Compares with ``rounded``, but where a number is halfway between two steps."""
    found, x = np.asarray(kernel, np.float32), np.asarray(original, np.float32)
    expected = rounded(x, dims, kind)
    is_halfway = np.isclose(np.abs(found - x), np.abs(expected - x), rtol=1e-3, atol=1e-6)
    assert is_halfway.all()
    assert np.isclose(found, expected, rtol=1e-5, atol=1e-6).mean() > 0.7


def linear(*sizes: Any, **options: Any) -> nn.Linear:
    return with_values(nn.Linear(*sizes, rngs=sx.Rngs(0), **options))


def everything_but(name: str, kind: str) -> dict[Any, Any]:
    return {sx.PathContains(name): None, ...: kind}


LAYERS: dict[str, Any] = {
    "linear": (lambda: nn.Linear(8, 5, rngs=sx.Rngs(0)), {"kernel": (0,)}),
    "heads": (lambda: nn.Linear(8, (3, 2), rngs=sx.Rngs(0)), {"kernel": (0,)}),
    "joined": (lambda: nn.Linear((6, 8), 5, rngs=sx.Rngs(0)), {"kernel": (0, 1)}),
    "einsum": (lambda: nn.Einsum("bte,bef->btf", (2, 8, 3), rngs=sx.Rngs(0)), {"kernel": (1,)}),
    "conv": (lambda: nn.Conv(8, 4, 3, rngs=sx.Rngs(0)), {"kernel": (0, 1)}),
    "experts": (
        lambda: nn.MoE(8, 4, num_experts=3, rngs=sx.Rngs(0)),
        {"gate": (1,), "up": (1,), "down": (1,)},
    ),
}


@sx.jit
def call(layer: Any, x: Any) -> Any:
    return layer(x)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_with_the_rounded_kernel(name: str, kind: Any) -> None:
    make, kernels = LAYERS[name]
    layer, expected = with_values(make()), with_values(make())
    small = sx.quantize(layer, everything_but("router", kind))
    for attribute, dims in kernels.items():
        kernel, small_kernel = getattr(expected, attribute), getattr(small, attribute)
        check_rounding(small_kernel.value, kernel.value, dims, kind)
        kernel.value = small_kernel.value
        assert small_kernel.axes == kernel.axes
        assert (small_kernel.ndim, small_kernel.size) == (kernel.ndim, kernel.size)
        np.testing.assert_array_equal(small_kernel[0], small_kernel.value[0])
    assert [v.value.nbytes for _, v in sx.iter_variables(layer)] == [
        v.value.nbytes for _, v in sx.iter_variables(expected)
    ]
    close(call(small, HALF), call(expected, HALF))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_results_keep_the_dtype_under_strict_promotion(kind: Any, dtype: Any) -> None:
    for make, _ in LAYERS.values():
        layer = sx.map(lambda _, v: jax.ShapeDtypeStruct(v.shape, dtype), sx.abstract(make()))
        small = sx.quantize(layer, kind)
        with jax.numpy_dtype_promotion("strict"):
            assert sx.eval_shape(small, HALF.astype(dtype)).dtype == dtype


def test_embedding_rounds_each_vector_alone() -> None:
    table = with_values(nn.Embed(6, 8, rngs=sx.Rngs(0)))
    small = sx.quantize(table, "int8")
    expected = np.asarray(small.embedding.value)
    check_rounding(expected, table.embedding.value, (1,), "int8")
    assert small.embedding.scale.shape == (6, 1)
    close(small(np.array([[0, 5]])), expected[[[0, 5]]])
    close(small.attend(HALF), HALF @ expected.T)
    assert np.isnan(np.asarray(small(np.array([-1, 6])))).all()


def test_tiles_have_scales_of_their_own() -> None:
    layer = linear((3, 8), 4)
    small = sx.quantize(layer, "int4", tile_size=2)
    tiles = np.asarray(layer.kernel.value).reshape(3, 4, 2, 4)
    expected = np.asarray(small.kernel.value)
    check_rounding(expected.reshape(3, 4, 2, 4), tiles, (2,), "int4")
    names, scale = list(layer.kernel.axes or ()), small.kernel.scale
    assert (scale.shape, scale.axes) == ((3, 4, 4), (names[0], None, "out"))
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    close(small(x), np.einsum("bij,ijo->bo", x, expected) + np.asarray(layer.bias))


def test_channels_of_zeros_stay_zero() -> None:
    layer = linear(3, 2, use_bias=False)
    layer.kernel.value = np.zeros((3, 2), np.float32)
    for kind in ("int8", "int4", "fp8"):
        assert sx.quantize(layer, kind)(np.ones((1, 3))).tolist() == [[0.0, 0.0]]


def nbytes(model: Any) -> int:
    return sum(v.value.nbytes for _, v in sx.iter_variables(model))


def test_quantized_decoder_takes_a_quarter() -> None:
    options: dict[str, Any] = {"vocab_size": 256, "embed_dim": 128, "mlp_dim": 256, "num_layers": 1}
    model = with_values(sx.models.Decoder(sx.models.DecoderConfig(**options), rngs=sx.Rngs(0)))
    before = nbytes(model)
    assert nbytes(sx.quantize(model, "int8")) < 0.28 * before
    assert nbytes(model) == before


@pytest.mark.parametrize(("scanned", "tied"), [(False, True), (True, False)])
def test_decoders_equal_their_dequantized_ones(scanned: bool, tied: bool) -> None:
    model = decoder(scanned, tied)
    before = np.asarray(run(model))
    small = sx.quantize(model, "int8")
    again = sx.dequantize(small)
    assert sx.graphdef(again) == sx.graphdef(model)
    close(run(small), run(again))
    error = np.abs(np.asarray(run(small)) - before).max()
    assert 0 < error < 0.05 * np.abs(before).max()
    np.testing.assert_array_equal(run(model), before)
    gradients = sx.jit(sx.grad(lambda model: model(TOKENS).sum()))(small)
    assert {path[-1] for path in gradients.flat()} == {"scale"}  # those of norms
    assert {type(sx.select(small).at_keypaths(path).get()) for path in gradients.flat()} == {
        sx.Param
    }


def test_meshes_split_values_and_scales(mesh: Mesh) -> None:
    model = decoder(scanned=True)
    rules = sx.Rules({"batch": "data", "embed": "data", "vocab": "model"})
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        laid_out = sx.shard(sx.quantize(model, "int8"), mesh)
        found = np.asarray(run(laid_out))
        of_laid_out = sx.quantize(sx.shard(model, mesh), "int8")
    kernel = laid_out.layers.stacked.attn.q.kernel
    assert kernel.values.sharding.spec == PartitionSpec(None, "data", None, None)
    for _, variable in sx.iter_variables(of_laid_out, sx.Quantized):
        assert variable.sharding.mesh == mesh
    assert kernel.sharding == kernel.values.sharding
    close(found, run(sx.quantize(model, "int8")))


def test_checkpoints_resume_bit_for_bit(tmp_path: Path) -> None:
    model = sx.quantize(decoder(), {sx.PathContains("mlp"): "int4", ...: "fp8"}, tile_size=2)
    checkpoint.save(model, tmp_path / "saved")
    other = sx.quantize(
        with_values(decoder(), seed=3), {sx.PathContains("mlp"): "int4", ...: "fp8"}, tile_size=2
    )
    checkpoint.restore(other, tmp_path / "saved")
    pairs = zip(sx.iter_variables(model), sx.iter_variables(other), strict=True)
    for (path, old), (_, new) in pairs:
        np.testing.assert_array_equal(
            np.asarray(old.value, np.float32), np.asarray(new.value, np.float32), str(path)
        )
    np.testing.assert_array_equal(run(other), run(model))


def test_generation_follows_the_dequantized_model() -> None:
    small = sx.quantize(decoder(scanned=True), "int8")
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0}
    found = generate(small, [[1, 2], [3]], **options)
    expected = generate(sx.dequantize(small), [[1, 2], [3]], **options)
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]


def test_layers_leave_a_quantized_stack() -> None:
    small = sx.quantize(decoder(scanned=True), "int8")
    alone = decoder()
    alone.layers = nn.unstack_layers(small.layers)
    alone.embed, alone.head, alone.final_norm = small.embed, small.head, small.final_norm
    close(run(alone), run(small))


def test_vmap_maps_over_quantized_models() -> None:
    kernels = np.random.default_rng(0).normal(size=(3, 8, 2)).astype(np.float32)
    several = linear(8, 2, use_bias=False)
    several.kernel.value = kernels[0]
    stacked = sx.vmap(lambda k: sx.quantize(_with_kernel(k), "int8"))(kernels)
    found = sx.vmap(lambda layer: layer(HALF[0]))(stacked)
    expected = [sx.quantize(_with_kernel(kernel), "int8")(HALF[0]) for kernel in kernels]
    close(found, np.stack(expected))


def _with_kernel(kernel: Any) -> nn.Linear:
    layer = nn.Linear(8, 2, use_bias=False, rngs=sx.Rngs(0))
    layer.kernel.value = kernel
    return layer


def test_shared_kernels_are_shared_again() -> None:
    first, second = linear(4, 4), linear(4, 4)
    second.kernel = first.kernel
    model = nn.Sequential(first, second)
    small = sx.quantize(model, {lambda path, _: path[:2] == ("layers", 1): "int8"})
    assert small.layers[0].kernel is small.layers[1].kernel
    assert sx.dequantize(small).layers[0].kernel is not first.kernel
    assert sx.graphdef(sx.dequantize(small)) == sx.graphdef(model)
    everywhere = sx.quantize(model, "int8")
    assert everywhere.layers[0].kernel is everywhere.layers[1].kernel
    assert sx.graphdef(everywhere) == sx.graphdef(small)
    with pytest.raises(errors.SelectionError, match=r"\.layers\[1\]\.kernel is the kernel of"):
        sx.quantize(model, {lambda path, _: path[:2] == ("layers", 1): "int8", ...: "int4"})


def test_abstract_models_are_quantized_by_shape() -> None:
    small = sx.quantize(sx.abstract(decoder()), "int4")
    kernel = small.layers[0].mlp.up.kernel
    assert (kernel.values.dtype, kernel.scale.shape) == (jnp.int4, (1, 10))
    assert (kernel.value.shape, kernel.value.dtype) == ((12, 10), jnp.float32)


def test_adapters_train_on_a_quantized_base() -> None:
    small = sx.quantize(decoder(), "int8")
    adapted = sx.surgery.lora(sx.select(small), rank=2)
    before = {p: np.asarray(v.value) for p, v in sx.iter_variables(adapted, sx.Quantized)}
    optimizer = sx.train.Optimizer(adapted, optax.adam(0.05), wrt="lora")

    @sx.jit
    def step(model: Any, optimizer: Any) -> Any:
        value, gradients = sx.value_and_grad(lambda model: (model(TOKENS) ** 2).mean(), wrt="lora")(
            model
        )
        optimizer.update(gradients)
        return value

    losses = [float(step(adapted, optimizer)) for _ in range(4)]
    assert losses[-1] < losses[0]
    for path, variable in sx.iter_variables(adapted, sx.Quantized):
        np.testing.assert_array_equal(variable.value, before[path], str(path))
    with pytest.raises(errors.SelectionError, match=r"\.layers\[0\]\.attn\.q") as caught:
        sx.surgery.merge_lora(adapted)
    code = "sx.surgery.merge_lora(sx.dequantize(model))"
    merged = run_advice(caught.value, code, {"sx": sx, "model": adapted})
    close(run(merged), run(adapted))


def test_published_layouts_have_no_quantized_embedding(tmp_path: Path) -> None:
    small = sx.quantize(decoder(), {sx.PathContains("embed"): "int8"})
    with pytest.raises(errors.PretrainedError, match=r"embed\.embedding is of an emb") as caught:
        sx.models.save_pretrained(small, tmp_path / "no")
    assert not (tmp_path / "no").exists()
    code = "sx.models.save_pretrained(sx.dequantize(model), folder)"
    run_advice(caught.value, code, {"sx": sx, "model": small, "folder": tmp_path / "yes"})
    close(run(sx.models.from_pretrained(tmp_path / "yes")), run(small))


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (sx.Variable(np.ones((4, 4))), r"\.kernel is a Variable of float\d+, not a Param"),
        (sx.Param(np.ones((4, 4), int)), r"\.kernel is a Param of int\d+, not a Param of floating"),
        (sx.Param(np.ones((4, 5), np.float32)), r"\.kernel has the shape \(4, 5\), .* \(4, 4\)"),
    ],
    ids=["variable", "integers", "shape"],
)
def test_unfit_kernels_are_refused_by_path(kernel: Any, says: str) -> None:
    layer = linear(4, 4)
    layer.kernel = kernel
    with pytest.raises(errors.SelectionError, match=says):
        sx.quantize(layer, "int8")
    assert layer.kernel is kernel


def test_kernels_that_sum_nothing_are_refused() -> None:
    outer = nn.Einsum("...i,ij->...ij", (4, 4), rngs=sx.Rngs(0))
    with pytest.raises(errors.SelectionError, match="summed over no dimension"):
        sx.quantize(outer, "int8")


def test_layers_without_a_kernel_are_left() -> None:
    model = nn.Sequential(linear(4, 4), linear(4, 4))
    model.layers[0].kernel = None
    small = sx.quantize(model, "int8")
    assert small.layers[0].kernel is None
    assert isinstance(small.layers[1].kernel, nn.QuantizedKernel)


def test_normalized_kernels_are_refused() -> None:
    normalized = nn.WeightNorm(linear(3, 4), rngs=sx.Rngs(0))
    with pytest.raises(errors.SelectionError, match=r"\.body\.kernel is normalized"):
        sx.quantize(normalized, "int8")
    layer = sx.quantize(linear(3, 4), "int8")
    with pytest.raises(errors.LayerConfigError, match="is quantized") as caught:
        nn.WeightNorm(layer, rngs=sx.Rngs(0))
    again = run_advice(caught.value, "sx.dequantize(layer)", {"sx": sx, "layer": layer})
    assert nn.WeightNorm(again, rngs=sx.Rngs(0))(np.ones((1, 3))).shape == (1, 4)


def test_filters_without_kernels_are_refused() -> None:
    model = decoder()
    with pytest.raises(errors.SelectionError, match="decides about no kernel") as caught:
        sx.quantize(model, {sx.PathContains("norm"): "int8"})
    small = run_advice(caught.value, "sx.quantize(model, 'int8')", {"sx": sx, "model": model})
    assert sx.select(small).at_instances_of(nn.QuantizedKernel).count() == 16
    with pytest.raises(errors.SelectionError, match="is quantized already") as caught:
        sx.quantize(small, "int4")
    again = run_advice(caught.value, "sx.dequantize(model)", {"sx": sx, "model": small})
    assert sx.quantize(again, "int4").head.kernel.values.dtype == jnp.int4
    both = sx.quantize(
        sx.quantize(model, {sx.PathContains("mlp"): "int4"}), {sx.Quantized: None, ...: "int8"}
    )
    assert {v.dtype.name for _, v in sx.iter_variables(both, sx.Quantized)} == {
        "int4",
        "int8",
        "float32",
    }


def test_unfit_options_are_refused() -> None:
    layer = linear(6, 4)
    cases: list[tuple[Any, str]] = [
        ("int3", "must be 'int8', 'int4' or 'fp8'"),
        ({...: "int3"}, "must be 'int8', 'int4', 'fp8' or None"),
    ]
    for formats, text in cases:
        with pytest.raises(errors.SelectionError, match=text):
            sx.quantize(layer, formats)
    with pytest.raises(errors.SelectionError, match="has 6 inputs, which tile_size=4 does not"):
        sx.quantize(layer, "int8", tile_size=4)
    with pytest.raises(errors.SelectionError, match="an integer of at least 1"):
        sx.quantize(layer, "int8", tile_size=0)
    with pytest.raises(errors.SelectionError, match="takes a format") as caught:
        sx.quantize(layer, {})
    code = 'sx.quantize(model, {sx.PathContains("mlp"): "int8"})'
    names = {"sx": sx, "model": decoder()}
    assert run_advice(caught.value, code, names).layers[0].mlp.up.kernel.values.dtype == jnp.int8


@needs("qwix")
@pytest.mark.parametrize(
    ("kind", "dtype"), [("int8", "int8"), ("int4", "int4"), ("fp8", "float8_e4m3fn")]
)
def test_rounding_equals_that_of_qwix(kind: Any, dtype: str) -> None:
    import qwix

    layer = linear(32, 16)
    kernel = jnp.asarray(layer.kernel.value)
    expected = qwix.dequantize(qwix.quantize(kernel, dtype, channelwise_axes=(1,)))
    close(sx.quantize(layer, kind).kernel.value, expected)
