# SPDX-License-Identifier: Apache-2.0
"""Weight and spectral normalization, and PReLU: against Flax and NumPy, by whom they are used."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import shardax as sx
from shardax.errors import LayerConfigError, LayerInputError
from tests.advice import run_advice
from tests.values import with_values

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


@sx.jit
def call(layer: Any, x: Any) -> Any:
    return layer(x)


def linear() -> Any:
    return with_values(sx.nn.Linear(4, 6, rngs=sx.Rngs(0)))


def peer_of(layer: Any) -> Any:
    peer = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    peer.kernel[...], peer.bias[...] = layer.kernel.value, layer.bias.value
    return peer


@pytest.mark.parametrize("axes", [-1, None, 0, (0, 1)])
def test_weight_norm_and_its_gradients_equal_flax(axes: Any) -> None:
    layer = sx.nn.WeightNorm(linear(), feature_axes=axes)
    peer = nnx.WeightNorm(peer_of(layer.body), feature_axes=axes, rngs=nnx.Rngs(0))

    def peer_loss(peer: Any, x: Any) -> Any:
        return jnp.sin(peer(x)).sum()

    loss = sx.jit(sx.value_and_grad(lambda layer, x: jnp.sin(layer(x)).sum()))
    value, gradients = loss(layer, X)
    expected, of_peer = nnx.jit(nnx.value_and_grad(peer_loss))(peer, X)
    close(value, expected)
    assert gradients["scale"]["kernel"].shape == layer.scale["kernel"].shape
    close(gradients["body"]["bias"], of_peer["layer_instance"]["bias"][...])


def test_weight_norm_leaves_the_kernel_and_scales_features() -> None:
    layer = sx.nn.WeightNorm(linear())
    kernel = np.asarray(layer.body.kernel.value)
    layer.scale["kernel"].value = scale = np.arange(1, 7, dtype=np.float32)
    expected = X @ (kernel / np.linalg.norm(kernel, axis=0) * scale) + np.asarray(layer.bias.value)
    close(call(layer, X), expected)
    close(layer(X), expected)
    np.testing.assert_array_equal(layer.kernel.value, kernel)
    assert list(sx.nn.WeightNorm(linear(), use_scale=False).scale) == []


def test_gradients_go_through_the_normalization_to_the_kernel() -> None:
    layer = sx.nn.WeightNorm(linear())
    gradients = sx.jit(sx.grad(lambda layer: jnp.sin(layer(X)).sum()))(layer)
    kernel, gradient = (
        np.asarray(array) for array in (layer.kernel.value, gradients["body"]["kernel"])
    )
    # The norm of a column does not count, so the gradient is orthogonal to it.
    close((kernel * gradient).sum(0), np.zeros(6))
    assert np.abs(gradient).max() > 0.01


@pytest.mark.parametrize("steps", [1, 3])
def test_spectral_norm_follows_flax_from_call_to_call(steps: int) -> None:
    layer = sx.nn.SpectralNorm(linear(), n_steps=steps, rngs=sx.Rngs(0))
    peer = nnx.SpectralNorm(peer_of(layer.body), n_steps=steps, rngs=nnx.Rngs(0))
    vector = layer.u["kernel"].value
    peer.batch_stats["kernel", "u"][...] = vector[None]
    close(call(layer, X), peer(X))
    close(layer.u["kernel"].value, peer.batch_stats["kernel", "u"][0])
    # Flax has overwritten its kernel by now.
    again = nnx.SpectralNorm(peer_of(layer.body), n_steps=steps, rngs=nnx.Rngs(0))
    again.batch_stats["kernel", "u"][...] = layer.u["kernel"].value[None]
    layer.eval()
    vector = np.asarray(layer.u["kernel"].value)
    expected = again(X, update_stats=False)
    close(call(layer, X), expected)
    np.testing.assert_array_equal(layer.u["kernel"].value, vector)
    call(layer, X)
    assert not np.array_equal(vector, sx.clone(layer)(X, use_running_average=False)[0, :4])


def test_spectral_norm_converges_to_the_largest_singular_value() -> None:
    layer = sx.nn.SpectralNorm(
        with_values(sx.nn.Conv(4, 6, 3, use_bias=False, rngs=sx.Rngs(0))), rngs=sx.Rngs(0)
    )
    for _ in range(60):
        y = call(layer, X)
    kernel = np.asarray(layer.kernel.value)
    largest = np.linalg.svd(kernel.reshape(-1, 6), compute_uv=False)[0]
    expected = sx.clone(layer.body)
    expected.kernel.value = kernel / largest
    np.testing.assert_allclose(y, expected(X), rtol=1e-3, atol=1e-4)


class Counting(sx.Module):
    """A layer that counts, draws and sows."""

    def __init__(self, rngs: sx.Rngs) -> None:
        self.linear = with_values(sx.nn.Linear(4, 6, rngs=rngs))
        self.dropout = sx.nn.Dropout(0.5, rngs=rngs)
        self.calls = sx.Variable(np.int32(0))

    def __call__(self, x: Any, *, scale: float = 1.0) -> Any:
        self.calls += 1
        y = self.linear(x)
        self.sow("y", y)
        return self.dropout(y) * scale


@pytest.mark.parametrize("norm", ["WeightNorm", "SpectralNorm"])
def test_wrapped_layers_keep_state_streams_and_sown_values(norm: str) -> None:
    layer = getattr(sx.nn, norm)(Counting(sx.Rngs(0)), rngs=sx.Rngs(1))
    first, second = (sx.jit(lambda layer: layer(X, scale=2.0))(layer) for _ in range(2))
    assert int(layer.calls) == 2
    assert not np.array_equal(np.asarray(first) == 0, np.asarray(second) == 0)
    layer.dropout.deterministic = True
    y = layer(X)
    assert [value.shape for value in sx.pop(layer, sx.Intermediate)["body"]["y"]] == [(3, 6)] * 3
    assert [path for path, _ in sx.iter_variables(layer, sx.Intermediate)] == []
    assert y.shape == (3, 6)


def test_stacks_of_normalized_layers_train() -> None:
    def make() -> Any:
        return sx.nn.SpectralNorm(sx.nn.WeightNorm(sx.nn.Linear(4, 4, rngs=rngs)), rngs=rngs)

    rngs = sx.Rngs(0)
    stack = with_values(sx.nn.Stack(make, 2))
    before = np.asarray(stack.stacked.u["body.kernel"].value)
    gradients = sx.jit(sx.grad(lambda stack, x: stack(x).sum()))(stack, X)
    assert gradients["stacked"]["body"]["scale"]["kernel"].shape == (2, 4)
    assert stack.stacked.u["body.kernel"].value.shape == (2, 4)
    assert not np.array_equal(before, stack.stacked.u["body.kernel"].value)


@pytest.mark.parametrize("norm", ["WeightNorm", "SpectralNorm"])
def test_normalized_kernels_keep_explicit_layouts(explicit_mesh: Mesh, norm: str) -> None:
    layer = getattr(sx.nn, norm)(with_values(sx.nn.Linear(4, 8, rngs=sx.Rngs(0))), rngs=sx.Rngs(0))
    whole = sx.clone(layer)(X[:2])
    sx.shard(layer, explicit_mesh, {"in": "data", "out": "model"})
    with jax.set_mesh(explicit_mesh):
        y = call(layer, jax.device_put(X[:2], PartitionSpec("data")))
    close(y, whole)
    assert jax.typeof(y).sharding.spec == PartitionSpec("data", "model")


def test_prelu_and_its_gradients_equal_flax() -> None:
    layer, peer = sx.nn.PReLU(0.3), nnx.PReLU(0.3)
    x = np.array([-2.0, -0.5, 0.0, 1.5], np.float32)
    value, gradients = sx.value_and_grad(lambda layer, x: jnp.sin(layer(x)).sum(), argnums=(0, 1))(
        layer, x
    )
    expected, of_peer = nnx.value_and_grad(lambda peer, x: jnp.sin(peer(x)).sum(), argnums=(0, 1))(
        peer, x
    )
    close(value, expected)
    close(gradients[0]["negative_slope"], of_peer[0]["negative_slope"][...])
    close(gradients[1], of_peer[1])


def test_prelu_has_a_slope_for_each_feature() -> None:
    layer = sx.nn.PReLU(features=2)
    layer.negative_slope.value = np.array([0.5, 2.0], np.float32)
    assert layer(np.array([[-2.0, -2.0], [4.0, 4.0]])).tolist() == [[-1.0, -4.0], [4.0, 4.0]]
    assert layer.negative_slope.axes == ("embed",)
    with pytest.raises(LayerInputError, match="PReLU takes"):
        layer(np.ones(3))


def test_unsuitable_layers_to_normalize_are_refused() -> None:
    for norm in ("WeightNorm", "SpectralNorm"):
        with pytest.raises(LayerConfigError, match=f"{norm} wraps a layer") as caught:
            getattr(sx.nn, norm)(jnp.tanh, rngs=sx.Rngs(0))
        code = f"sx.nn.{norm}(sx.nn.Linear(in_features, out_features, rngs=rngs), rngs=rngs)"
        names = {"sx": sx, "in_features": 4, "out_features": 6, "rngs": sx.Rngs(0)}
        assert run_advice(caught.value, code, names)(X).shape == (3, 6)
        with pytest.raises(
            LayerConfigError, match=r"normalizes no kernel of Dropout.*wrt=sx.Param"
        ):
            getattr(sx.nn, norm)(sx.nn.Dropout(0.5), rngs=sx.Rngs(0))
    with pytest.raises(LayerConfigError, match=r"feature_axes=\(2,\)") as caught:
        sx.nn.WeightNorm(linear(), feature_axes=2)
    names: dict[str, Any] = {}
    run_advice(caught.value, "feature_axes=-1", names)
    layer = sx.nn.WeightNorm(linear(), feature_axes=names["feature_axes"])
    assert layer(X).shape == (3, 6)
    with pytest.raises(LayerConfigError, match="n_steps=0"):
        sx.nn.SpectralNorm(linear(), n_steps=0, rngs=sx.Rngs(0))
