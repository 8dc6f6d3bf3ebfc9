# SPDX-License-Identifier: Apache-2.0
"""Kernels of experts, losses, gated units and norms equal XLA's, or are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import shardax as sx
from shardax import models, nn
from shardax.errors import LayerInputError, PartitionError
from tests.advice import run_advice
from tests.needs import needs, needs_no
from tests.values import with_values

X = np.random.default_rng(0).normal(size=(4, 8, 16)).astype(np.float32)
TARGETS = np.random.default_rng(1).integers(0, 40, (4, 8))
TARGETS[0, :3] = -100
MASK = np.arange(8) < np.array([8, 6, 8, 1])[:, None]


class Loss(sx.Module):
    """A head whose result is its loss."""

    def __init__(self) -> None:
        self.kernel = sx.Param(jnp.zeros((16, 40)), axes=("embed", None))

    def __call__(self, x: Any) -> Any:
        return models.blockwise_cross_entropy(x, self.kernel.value, TARGETS, MASK)


LAYERS: dict[str, Callable[[], Any]] = {  # by kind
    "norms": lambda: nn.RMSNorm(16),
    "norms, centred": lambda: nn.LayerNorm(16, epsilon=1e-3),
    "gated": lambda: nn.MLP(16, 8, activation="gelu", rngs=sx.Rngs(0)),
    "experts": lambda: nn.MoE(16, 8, num_experts=4, rngs=sx.Rngs(0)),
    "loss": Loss,
}


class Named(sx.Module):
    def __init__(self) -> None:
        self.norm = sx.named.RMSNorm({"embed": 16})

    def __call__(self, x: Any) -> Any:
        return self.norm(sx.named.NamedArray(x, ("batch", "seq", "embed"))).unwrap(
            "batch", "seq", "embed"
        )


def mlp(**options: Any) -> nn.MLP:
    return nn.MLP(16, 8, rngs=sx.Rngs(0), **options)


def moe(**options: Any) -> nn.MoE:
    return nn.MoE(16, 8, num_experts=4, rngs=sx.Rngs(0), **options)


def weighted_loss(x: Any) -> Any:
    return models.blockwise_cross_entropy(x, np.ones((16, 40), np.float32), TARGETS, MASK / 2)


# Calls that another library's kernel does not compute: their kind, and why.
OTHERS: dict[str, tuple[str, Callable[[], Any], str]] = {
    "groups": ("norms", lambda: nn.GroupNorm(16, 4), "of each row alone"),
    "batch": ("norms", lambda: nn.BatchNorm(16), "of each row alone"),
    "named": ("norms", Named, "arrays without names"),
    "mask": ("norms", lambda: lambda x: nn.RMSNorm(16)(x, mask=x > 0), "takes no mask"),
    "bias": ("gated", lambda: mlp(use_bias=True), "takes no bias"),
    "fp8": ("gated", lambda: mlp(precision="fp8"), "takes no precision"),
    "LoRA": ("gated", lambda: sx.surgery.lora(sx.select(mlp()), 2), "takes no LoRA"),
    "function": ("gated", lambda: mlp(activation=jnp.tanh), "by one of the names silu"),
    "dense": ("experts", lambda: moe(dispatch="dense"), 'dispatch="dense" has no products'),
    "weights": ("loss", lambda: weighted_loss, "a mask of booleans"),
}


@sx.jit
def result_and_gradients(layer: Any, x: Any) -> Any:
    def sine(layer: Any, x: Any) -> Any:
        result = layer(x)
        return jnp.sin(result).sum(), result

    (_, result), grads = sx.value_and_grad(sine, argnums=(0, 1), has_aux=True)(layer, x)
    return result, grads


def program_of(layer: Any, x: Any) -> str:
    return result_and_gradients.lower(layer, x).as_text(debug_info=True)


def assert_close(actual: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@needs("tokamax")
@pytest.mark.parametrize("name", LAYERS)
def test_tokamax_equals_xla_with_gradients(name: str) -> None:
    kind, layer = name.partition(",")[0], with_values(LAYERS[name]())
    expected = result_and_gradients(layer, X)
    with sx.kernels(**{kind: "tokamax"}):
        assert f"tokamax[{kind}]" in program_of(layer, X)
        assert_close(result_and_gradients(layer, X), expected)
    assert "tokamax[" not in program_of(layer, X)


RULES = {"batch": "data", "mlp": "model", "expert": "data"}


@needs("tokamax")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", LAYERS)
def test_tokamax_over_a_mesh_equals_one_device(name: str, axis_type: AxisType) -> None:
    kind, layer = name.partition(",")[0], with_values(LAYERS[name]())
    expected = result_and_gradients(layer, X)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    sx.shard(layer, mesh, RULES)
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))
    with jax.set_mesh(mesh), sx.axis_rules(RULES), sx.kernels(**{kind: "tokamax"}):
        assert f"tokamax[{kind}]" in program_of(layer, x)
        result, gradients = result_and_gradients(layer, x)
    assert_close((result, gradients), expected)
    assert result.ndim == 0 or result.sharding.spec[0] == "data"


@needs("tokamax")
@pytest.mark.parametrize("dtypes", [("bfloat16", None), ("float32", "bfloat16")], ids=str)
def test_norms_have_the_dtype_of_xlas(dtypes: tuple[str, str | None]) -> None:
    layer = with_values(nn.RMSNorm(16, dtype=dtypes[1]))
    x = jnp.asarray(X, dtypes[0])
    expected = layer(x)
    with sx.kernels(norms="tokamax"):
        actual = layer(x)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=1e-2
    )


@needs("tokamax")
def test_offsets_of_scales_are_the_kernels() -> None:
    config = models.TransformerConfig(
        vocab_size=16, embed_dim=16, norms=models.NormConfig(kind="rms_offset")
    )
    norm = with_values(models.Transformer(config, rngs=sx.Rngs(0)).final_norm)
    expected = norm(X)
    with sx.kernels(norms="tokamax"):
        np.testing.assert_allclose(norm(X), expected, rtol=1e-5)


@needs("tokamax")
def test_targets_outside_of_the_vocabulary_are_nan() -> None:
    targets = np.full((4, 8), 3)
    kernel = np.ones((16, 40), np.float32)
    with sx.kernels(loss="tokamax"):
        assert np.isfinite(models.blockwise_cross_entropy(X, kernel, targets))
        targets[1, 1] = 40
        assert np.isnan(models.blockwise_cross_entropy(X, kernel, targets))
        assert models.blockwise_cross_entropy(X, kernel, targets, MASK & False) == 0


@pytest.mark.parametrize("case", OTHERS)
def test_auto_passes_over_what_is_refused_by_name(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind, make, reason = OTHERS[case]
    layer = make()
    layer = with_values(layer) if isinstance(layer, sx.Module) else layer
    expected = sx.jit(layer)(X)
    with sx.kernels(**{kind: "tokamax"}), pytest.raises(LayerInputError, match=reason) as refusal:
        sx.jit(layer)(X)
    with (
        caplog.at_level(logging.INFO, "shardax.kernels"),
        run_advice(refusal.value, f'sx.kernels({kind}="auto")', {"sx": sx}),
    ):
        np.testing.assert_array_equal(sx.jit(layer)(X), expected)
    assert "xla (not tokamax: " in caplog.text and reason in caplog.text


def gated(x: Any) -> Any:
    return mlp()(x)


@pytest.mark.parametrize(
    ("kind", "call", "spec", "rules", "reason"),
    [
        ("norms", nn.RMSNorm(16), (), {}, "no rules in scope say how the mesh"),
        ("norms", nn.RMSNorm(16), (), {"embed": "model"}, "features are split over model"),
        ("norms", nn.RMSNorm(16), (None, None, "model"), None, "features are split over model"),
        ("gated", gated, (None, None, "model"), None, "features are split over model"),
        ("loss", Loss(), (), {}, "no rules in scope say how the mesh"),
        ("experts", nn.MoE(16, 8, num_experts=4, rngs=sx.Rngs(0)), (), {"batch": "data"}, "model"),
    ],
)
def test_arrays_that_a_mesh_splits_otherwise_are_refused(
    kind: str, call: Any, spec: Any, rules: Any, reason: str
) -> None:
    axis_type = AxisType.Explicit if rules is None else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    scopes = sx.axis_rules(rules or {}), sx.kernels(**{kind: "tokamax"})
    with jax.set_mesh(mesh), scopes[0], scopes[1], pytest.raises(LayerInputError, match=reason):
        call(jax.device_put(X, jax.NamedSharding(mesh, jax.P(*spec))))


def test_loss_of_a_split_vocabulary_is_refused() -> None:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rules = sx.axis_rules({"batch": "data", "vocab": "model"})
    refused = pytest.raises(LayerInputError, match="the vocabulary is split over model")
    with jax.set_mesh(mesh), rules, sx.kernels(loss="tokamax"), refused:
        Loss()(X)


def test_kernels_do_not_run_inside_of_shard_map() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    norm = nn.RMSNorm(16, use_scale=False)
    region = jax.shard_map(lambda x: norm(x), in_specs=jax.P("data"), out_specs=jax.P("data"))
    with jax.set_mesh(mesh), sx.kernels(norms="auto"):
        np.testing.assert_allclose(jax.jit(region)(X), norm(X), rtol=1e-5)
    refused = pytest.raises(LayerInputError, match="does not run inside a")
    with jax.set_mesh(mesh), sx.kernels(norms="tokamax"), refused:
        jax.jit(region)(X)


@needs("tokamax")
def test_tokamax_is_refused_for_absent_hardware() -> None:
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)
    refused = pytest.raises(LayerInputError, match="chooses by the device of this machine, cpu")
    with jax.sharding.use_abstract_mesh(mesh), sx.kernels(norms="tokamax"), refused:
        jax.eval_shape(lambda x: nn.RMSNorm(16)(x), X)


@needs_no("tokamax")
@pytest.mark.parametrize("name", LAYERS)
def test_absent_tokamax_is_refused_with_its_install_command(name: str) -> None:
    layer, kind = LAYERS[name](), name.partition(",")[0]
    install = pytest.raises(LayerInputError, match=r"pip install 'shardax\[kernels\]'")
    with sx.kernels(**{kind: "tokamax"}), install:
        layer(X)


def test_unknown_kernels_are_refused() -> None:
    for kind in ("experts", "loss", "gated", "norms"):
        with pytest.raises(PartitionError, match=f"{kind}='splash' must be 'auto', 'xla'"):
            sx.kernels(**{kind: "splash"})
