# SPDX-License-Identifier: Apache-2.0
"""Linear and Einsum: their mathematics, initial values, dtypes and what they refuse."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError, MissingRngsError


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


def test_linear_sums_over_the_last_dimensions_and_adds_the_bias():
    layer = sx.nn.Linear((2, 3), (4, 5), rngs=sx.Rngs(0))
    kernel, bias, x = floats(2, 3, 4, 5), floats(4, 5), floats(7, 2, 3)
    layer.kernel.value, layer.bias.value = kernel, bias
    np.testing.assert_allclose(layer(x), np.tensordot(x, kernel, 2) + bias, rtol=1e-5, atol=1e-5)


def test_linear_takes_any_dimensions_in_front():
    layer = sx.nn.Linear(3, 2, rngs=sx.Rngs(0))
    x = floats(2, 4, 5, 3)
    assert layer(x[0, 0, 0]).shape == (2,)
    np.testing.assert_allclose(layer(x)[1, 3], layer(x[1, 3]), rtol=1e-6)


def test_kernels_start_with_variance_one_over_fan_in_and_biases_at_zero():
    layer = sx.nn.Linear((8, 16), (16, 32), rngs=sx.Rngs(0))
    einsum = sx.nn.Einsum("...btd,bdh->...bth", (64, 16, 64), rngs=sx.Rngs(0))
    assert float(layer.kernel.value.std()) == pytest.approx(1 / np.sqrt(8 * 16), rel=0.02)
    assert float(einsum.kernel.value.std()) == pytest.approx(1 / np.sqrt(16), rel=0.02)
    assert not layer.bias.value.any()


def test_a_bias_leaves_the_numbers_of_other_layers_as_they_were():
    def second_kernel(use_bias: bool) -> Any:
        rngs = sx.Rngs(0)
        sx.nn.Linear(2, 2, use_bias=use_bias, rngs=rngs)
        return sx.nn.Linear(2, 2, rngs=rngs).kernel.value

    assert (second_kernel(True) == second_kernel(False)).all()


def test_without_a_compute_dtype_input_and_parameters_are_promoted():
    stored_small = sx.nn.Linear(3, 2, param_dtype=jnp.bfloat16, rngs=sx.Rngs(0))
    assert stored_small(floats(3).astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert stored_small(floats(3)).dtype == jnp.float32
    assert sx.nn.Linear(3, 2, rngs=sx.Rngs(0))(np.arange(3)).dtype == jnp.float32


def test_a_compute_dtype_casts_input_and_parameters():
    layer = sx.nn.Linear(3, 2, dtype="bfloat16", rngs=sx.Rngs(0))
    assert (layer(floats(3)).dtype, layer.kernel.dtype) == (jnp.bfloat16, jnp.float32)


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
def test_linear_refuses_sizes_and_names_that_do_not_fit(make: Any, message: str):
    with pytest.raises(LayerConfigError, match=message):
        make()


def test_linear_names_itself_what_it_takes_and_what_it_was_given():
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


def test_a_layer_without_rngs_says_so_when_its_kernel_is_needed():
    layer = sx.nn.Linear(2, 2, rngs=None)
    assert layer.kernel.shape == (2, 2)
    with pytest.raises(MissingRngsError):
        layer(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("equation", "x_shape", "kernel_shape", "bias_shape"),
    [
        ("...te,ehd->...thd", (2, 5, 8), (8, 4, 2), (4, 2)),
        ("...te, ehd -> ...thd", (2, 5, 8), (8, 4, 2), None),
        ("bte,hed->bhtd", (2, 5, 8), (4, 8, 2), (4, 2)),
        ("...ge,gef->...gf", (5, 3, 8), (3, 8, 2), (2,)),
        ("x,xy->y", (8,), (8, 3), None),
        ("...e,f->...ef", (5, 8), (3,), (3,)),
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
        letters = equation.split("->")[1].replace("...", "")
        first, second = equation.split("->")[0].replace("...", "").split(",")
        shape = [
            kernel_shape[second.index(letter)] if letter in second and letter not in first else 1
            for letter in letters
        ]
        expected = expected + floats(*bias_shape).reshape(shape)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sx.nn.Einsum("te,ed", (2, 2), rngs=None), "cannot read the equation 'te,ed'"),
        (lambda: sx.nn.Einsum("...te,ed->td", (2, 2), rngs=None), "cannot read the equation"),
        (lambda: sx.nn.Einsum("tt,td->td", (2, 2), rngs=None), "a letter twice in 'tt'"),
        (lambda: sx.nn.Einsum("te,ed->tx", (2, 2), rngs=None), r"\['x'\] in the result"),
        (lambda: sx.nn.Einsum("te,ed->td", (2,), rngs=None), "'ed' of 2 dimensions"),
        (lambda: sx.nn.Einsum("te,ed->td", (2, 3), (2,), rngs=None), r"Give bias_shape=\(3,\)"),
        (lambda: sx.nn.Einsum("te,ed->td", (2, 3), kernel_axes=("e",), rngs=None), "kernel_axes"),
    ],
)
def test_einsum_refuses_equations_and_shapes_that_do_not_fit(make: Any, message: str):
    with pytest.raises(LayerConfigError, match=message):
        make()


@pytest.mark.parametrize("shape", [(5, 7), (8,), (2, 5, 8)])
def test_einsum_refuses_inputs_that_do_not_fit(shape: tuple[int, ...]):
    layer = sx.nn.Einsum("te,ehd->thd", (8, 4, 2), rngs=sx.Rngs(0))
    with pytest.raises(LayerInputError, match=r"'te,ehd->thd'\) takes an input of shape \(t, 8\)"):
        layer(np.zeros(shape, np.float32))


def test_the_layout_of_a_result_can_be_asked_for(explicit_mesh: Mesh):
    linear = sx.nn.Linear(8, 4, rngs=sx.Rngs(0))
    einsum = sx.nn.Einsum("...i,io->...o", (8, 4), rngs=sx.Rngs(0))
    with jax.set_mesh(explicit_mesh):
        x = jax.device_put(floats(2, 8), PartitionSpec("data"))
        wanted = PartitionSpec(None, "model")
        for layer in (linear, einsum):
            assert jax.typeof(layer(x)).sharding.spec == PartitionSpec("data", None)
            y = layer(x, out_sharding=NamedSharding(explicit_mesh.abstract_mesh, wanted))
            assert jax.typeof(y).sharding.spec == wanted
