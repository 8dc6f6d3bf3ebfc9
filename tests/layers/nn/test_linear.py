# SPDX-License-Identifier: Apache-2.0
"""Linear and Einsum: their mathematics, initial values, dtypes and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError, ModuleError
from tests.values import with_values


@sx.jit
def call(layer: Any, x: Any) -> Any:
    return layer(x)


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


def test_linear_contracts_last_dimensions_and_adds_bias():
    layer = sx.nn.Linear((2, 3), (4, 5), rngs=sx.Rngs(0))
    kernel, bias, x = floats(2, 3, 4, 5), floats(4, 5), floats(7, 2, 3)
    layer.kernel.value, layer.bias.value = kernel, bias
    expected = np.tensordot(x, kernel, 2) + bias
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5, atol=1e-5)


def test_linear_takes_any_dimensions_in_front():
    layer = with_values(sx.nn.Linear(3, 2, rngs=sx.Rngs(0)))
    x, kernel = floats(2, 4, 5, 3), np.asarray(layer.kernel.value)
    expected = x @ kernel + np.asarray(layer.bias.value)
    for place in ((), (1, 3), (0, 0, 0)):
        np.testing.assert_allclose(call(layer, x[place]), expected[place], rtol=1e-5, atol=1e-6)


def test_kernels_start_with_lecun_variance_biases_zero():
    layer = sx.nn.Linear((8, 16), (16, 32), rngs=sx.Rngs(0))
    einsum = sx.nn.Einsum("...btd,bdh->...bth", (64, 16, 64), rngs=sx.Rngs(0))
    assert np.std(layer.kernel.value) == pytest.approx(1 / np.sqrt(8 * 16), rel=0.02)
    assert np.std(einsum.kernel.value) == pytest.approx(1 / np.sqrt(16), rel=0.02)
    assert not np.asarray(layer.bias.value).any()


def test_bias_leaves_initial_values_of_other_layers():
    def second_kernel(use_bias: bool) -> Any:
        rngs = sx.Rngs(0)
        sx.nn.Linear(2, 2, use_bias=use_bias, rngs=rngs)
        return sx.nn.Linear(2, 2, rngs=rngs).kernel.value

    np.testing.assert_array_equal(second_kernel(True), second_kernel(False))


def test_result_is_promoted_without_a_compute_dtype():
    def dtype_of(x: np.ndarray, **options: Any) -> Any:
        return sx.eval_shape(call, sx.nn.Linear(3, 2, rngs=sx.Rngs(0), **options), x).dtype

    narrow = {"param_dtype": jnp.bfloat16}
    assert dtype_of(floats(3).astype(jnp.bfloat16), **narrow) == jnp.bfloat16
    assert dtype_of(floats(3), **narrow) == jnp.float32
    assert dtype_of(np.arange(3)) == jnp.float32


def test_compute_dtype_casts_input_and_parameters():
    layer = with_values(sx.nn.Linear(3, 2, dtype="bfloat16", rngs=sx.Rngs(0)))
    y = layer(floats(3))
    assert (y.dtype, layer.kernel.dtype) == (jnp.bfloat16, jnp.float32)
    exact = floats(3) @ np.asarray(layer.kernel.value) + np.asarray(layer.bias.value)
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, atol=0.05)


def test_axes_can_be_chosen_and_the_bias_follows():
    layer = sx.nn.Linear(4, (2, 3), kernel_axes=("embed", "heads", None), rngs=sx.Rngs(0))
    assert (layer.kernel.axes, layer.bias.axes) == (("embed", "heads", None), ("heads", None))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sx.nn.Linear(0, 2, rngs=None), "in_features=0"),
        (lambda: sx.nn.Linear(2, (3, -1), rngs=None), r"out_features=\(3, -1\)"),
        (lambda: sx.nn.Linear(2.0, 2, rngs=None), "in_features=2.0"),
        (lambda: sx.nn.Linear(2, 2, kernel_axes=("in",), rngs=None), "2 kernel_axes"),
        (lambda: sx.nn.Linear(2, 2, kernel_axes="io", rngs=None), "2 kernel_axes"),
    ],
)
def test_linear_refuses_unsuitable_sizes_and_axis_names(make: Any, message: str):
    with pytest.raises(LayerConfigError, match=message):
        make()


def test_wrong_input_error_names_layer_and_shapes():
    layer = sx.nn.Linear((2, 3), 4, rngs=sx.Rngs(0))
    with pytest.raises(LayerInputError) as error:
        layer(np.zeros((5, 3, 2), np.float32))
    assert str(error.value) == (
        "Linear(in_features=(2, 3), out_features=4) takes an input of shape (..., 2, 3), but was "
        "given float32[5, 3, 2]. Make the layer with in_features=(3, 2), or bring the features to "
        "the end."
    )
    with pytest.raises(LayerInputError, match=r"\(\.\.\., 2, 3\), but was given float32\[3\]"):
        layer(np.zeros(3, np.float32))


def test_kernel_without_rngs_raises_missing_rngs():
    layer = sx.nn.Linear(2, 2, rngs=None)
    assert layer.kernel.shape == (2, 2)
    with pytest.raises(ModuleError):
        layer(np.zeros(2, np.float32))


def spelled(equation: str, *shapes: tuple[int, ...]) -> list[str]:
    """The letters of input, kernel and result, capital ones for those of the ellipsis."""
    inputs, output = equation.replace(" ", "").split("->")
    terms, extra = inputs.split(","), ""
    for place, shape in enumerate(shapes):
        if "..." in terms[place]:
            count = len(shape) - len(terms[place]) + 3
            own = "XYZ"[3 - count :]
            terms[place] = terms[place].replace("...", own)
            extra = max(extra, own, key=len)
    return [*terms, output.replace("...", extra)]


@pytest.mark.parametrize(
    ("equation", "x_shape", "kernel_shape", "bias_shape"),
    [
        ("...te,ehd->...thd", (2, 5, 8), (8, 4, 2), (4, 2)),
        ("...te, ehd -> ...thd", (2, 5, 8), (8, 4, 2), None),
        ("bte,hed->bhtd", (2, 5, 8), (4, 8, 2), (4, 2)),
        ("...ge,gef->...gf", (5, 3, 8), (3, 8, 2), (2,)),
        ("x,xy->y", (8,), (8, 3), None),
        ("...e,f->...ef", (5, 8), (3,), (3,)),
        ("ab...,bcd->acd...", (2, 8, 3, 5), (8, 4, 2), (4, 2)),
        ("a...b,...bc->c...a", (2, 5, 3, 8), (3, 8, 4), (4,)),
        ("a...,ab->...b", (8, 3, 5), (8, 4), (4,)),
        ("ab,...b->a...", (2, 8), (5, 3, 8), (5, 3)),
        ("...ab,...bc->...ac", (5, 2, 8), (8, 4), None),
        ("...b,...bc->...c", (1, 8), (5, 8, 4), (4,)),
        ("...b,...bc->...c", (8,), (5, 8, 4), None),
        ("a...b,...bc->a...c", (2, 5, 8), (1, 8, 4), (4,)),
    ],
)
def test_einsum_computes_its_equation_and_spreads_the_bias(
    equation: str, x_shape: Any, kernel_shape: Any, bias_shape: Any
):
    layer = sx.nn.Einsum(equation, kernel_shape, bias_shape, rngs=sx.Rngs(0))
    x, kernel = floats(*x_shape), floats(*kernel_shape)
    layer.kernel.value = kernel
    expected = np.einsum(equation, x, kernel)
    if bias_shape is not None:
        layer.bias.value = floats(*bias_shape)
        first, second, output = spelled(equation, x_shape, kernel_shape)
        shape = [1] * expected.ndim
        own = [letter for letter in second if letter not in first]
        for place, letter in enumerate(output):
            if letter in own:
                shape[place] = kernel_shape[second.index(letter)]
        expected = expected + floats(*bias_shape).reshape(shape)
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "x_shape", "kernel_shape", "bias_shape"),
    [
        ("...ge,gef->...gf", (5, 3, 8), (3, 8, 2), (3, 2)),
        ("ab...,bac->ca...", (2, 8, 3), (8, 2, 4), (4, 2)),
        ("...e,...ed->...d", (5, 3, 8), (3, 8, 2), (3, 2)),
        ("a...e,...ed->a...d", (5, 3, 8), (1, 8, 2), (1, 2)),
    ],
)
def test_einsum_bias_covers_shared_dimensions_like_flax(
    equation: str, x_shape: Any, kernel_shape: Any, bias_shape: Any
):
    layer = with_values(sx.nn.Einsum(equation, kernel_shape, bias_shape, rngs=sx.Rngs(0)))
    peer = nnx.Einsum(equation, kernel_shape, bias_shape, rngs=nnx.Rngs(0))
    peer.kernel[...], peer.bias[...] = layer.kernel.value, layer.bias.value
    x = floats(*x_shape)
    np.testing.assert_allclose(call(layer, x), peer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sx.nn.Einsum("te,ed", (2, 2), rngs=None), "cannot read the equation 'te,ed'"),
        (lambda: sx.nn.Einsum("...te,ed->td", (2, 2), rngs=None), "cannot read the equation"),
        (lambda: sx.nn.Einsum("te,...ed->td", (2, 2), rngs=None), "cannot read the equation"),
        (lambda: sx.nn.Einsum("...t...,ed->...d", (2, 2), rngs=None), "cannot read the equation"),
        (lambda: sx.nn.Einsum("tt,td->td", (2, 2), rngs=None), "a letter twice in 'tt'"),
        (lambda: sx.nn.Einsum("te,ed->tx", (2, 2), rngs=None), r"\['x'\] in the result"),
        (lambda: sx.nn.Einsum("te,ed->td", (2,), rngs=None), "'ed' of 2 dimensions"),
        (lambda: sx.nn.Einsum("te,ed->td", (2, 3), (2,), rngs=None), r"Give bias_shape=\(3,\)"),
        (lambda: sx.nn.Einsum("te,ed->td", (2, 3), kernel_axes=("e",), rngs=None), "kernel_axes"),
    ],
)
def test_einsum_refuses_unsuitable_equations_and_shapes(make: Any, message: str):
    with pytest.raises(LayerConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("equation", "shape", "takes"),
    [
        ("te,ehd->thd", (5, 7), "(t, 8)"),
        ("te,ehd->thd", (8,), "(t, 8)"),
        ("te,ehd->thd", (2, 5, 8), "(t, 8)"),
        ("...te,ehd->...thd", (2, 5, 7), "(..., t, 8)"),
        ("t...e,ehd->t...hd", (8,), "(t, ..., 8)"),
    ],
)
def test_einsum_refuses_inputs_that_do_not_fit(equation: str, shape: tuple[int, ...], takes: str):
    layer = sx.nn.Einsum(equation, (8, 4, 2), rngs=sx.Rngs(0))
    message = re.escape(f"'{equation}') takes an input of shape {takes}")
    with pytest.raises(LayerInputError, match=message):
        layer(np.zeros(shape, np.float32))


def test_jax_algorithms_are_precisions_of_layers():
    algorithm = jax.lax.DotAlgorithmPreset.F32_F32_F32
    layer = with_values(sx.nn.Linear(6, 4, precision=algorithm, rngs=sx.Rngs(0)))
    x = floats(3, 6)
    expected = x @ np.asarray(layer.kernel) + np.asarray(layer.bias)
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-5)
    assert "algorithm" in sx.jit(layer).lower(x).as_text()


def test_einsum_broadcasts_ellipses_over_explicit_axes(explicit_mesh: Mesh):
    layer = with_values(sx.nn.Einsum("a...b,...bc->a...c", (4, 3, 8), (4, 8), rngs=sx.Rngs(0)))
    x = floats(8, 1, 3)
    expected = np.asarray(layer(x))
    with jax.set_mesh(explicit_mesh):
        layer.kernel.value = jax.device_put(layer.kernel.value, PartitionSpec("model"))
        layer.bias.value = jax.device_put(layer.bias.value, PartitionSpec("model"))
        y = layer(jax.device_put(x, PartitionSpec("data")))
    assert jax.typeof(y).sharding.spec == PartitionSpec("data", "model", None)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_out_sharding_sets_the_layout_of_results(explicit_mesh: Mesh):
    linear = with_values(sx.nn.Linear(8, 4, rngs=sx.Rngs(0)))
    einsum = with_values(sx.nn.Einsum("...i,io->...o", (8, 4), rngs=sx.Rngs(0)))
    with jax.set_mesh(explicit_mesh):
        x = jax.device_put(floats(2, 8), PartitionSpec("data"))
        wanted = PartitionSpec(None, "model")
        for layer in (linear, einsum):
            assert jax.typeof(layer(x)).sharding.spec == PartitionSpec("data", None)
            y = layer(x, out_sharding=NamedSharding(explicit_mesh.abstract_mesh, wanted))
            assert jax.typeof(y).sharding.spec == wanted
