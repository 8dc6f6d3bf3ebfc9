# SPDX-License-Identifier: Apache-2.0
"""Kernels of attention and of experts compile for hardware that is not here, and are counted."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardax as sx
from shardax import plan
from tests.needs import PACKAGES, needs, needs_compiler
from tests.planner.plan.absent import GPU, TPU

BATCH, TIME, HEADS, KV_HEADS, HEAD_DIM, EMBED = 8, 512, 4, 2, 128, 64
RULES = {"batch": "data", "heads": "model", "kv_heads": "model"}
DEVICES = 8
PAIRS = TIME * (TIME + 1) // 2  # that a causal mask leaves
ONE_PRODUCT = 2 * BATCH * HEADS * HEAD_DIM  # operations of a pair, on all devices


def step_of(attention: str) -> tuple[Any, tuple[Any, ...]]:
    """The gradient of a decoder's attention layer."""
    layer = sx.nn.MultiHeadAttention(
        EMBED,
        HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        causal=True,
        rope_base=1e4,
        dtype="bfloat16",
        rngs=sx.Rngs(0),
    )

    @sx.jit
    @sx.kernels(attention=attention)
    def step(layer: Any, x: Any) -> Any:
        return sx.grad(lambda layer, x: layer(x).astype(jnp.float32).sum())(layer, x)

    return step, (layer, plan.NamedShape((BATCH, TIME, EMBED), "bfloat16", ("batch", "seq", None)))


def report_of(attention: str, target: str, mesh: dict[str, int]) -> Any:
    (report,) = plan.compare(*step_of(attention), {"split": RULES}, mesh, target, cache=None)
    assert report.outcome == "fits", report.reason
    return report


@pytest.mark.parametrize("target", [TPU])
def test_plan_compares_xla_and_splash_on_tpus(target: str) -> None:
    xla, splash = (report_of(name, target, {"data": 4, "model": 2}) for name in ("xla", "splash"))
    assert not [warning for warning in splash.warnings if "not counted" in warning]
    # Scores and values, and backward seven products, of which XLA computes two not again, but
    # all pairs; what is left are the projections.
    projections = xla.flops - 6 * ONE_PRODUCT * TIME * TIME / DEVICES
    assert splash.flops == pytest.approx(projections + 9 * ONE_PRODUCT * PAIRS / DEVICES)
    assert splash.hbm_bytes < xla.hbm_bytes
    assert splash.program_flops == xla.program_flops


def test_step_for_a_tpu_traces_by_reference_operations() -> None:
    result = plan.search(
        step_of,
        (),
        "tpu:v5e:2x4",
        attention=["xla", "splash"],
        meshes=[{"data": 4, "model": 2}],
        fix={"batch": "data"},
        effort="trace",
        cache=None,
        progress=False,
    )
    names = {report.layout.name.rpartition("attention:")[2] for report in result}
    assert names == {"xla", "splash"}


EXPERTS, EXPERT_DIM, HIDDEN = 8, 128, 256


def experts_step(experts: str) -> tuple[Any, tuple[Any, ...]]:
    """The gradient of a layer of experts."""
    layer = sx.nn.MoE(
        EXPERT_DIM, HIDDEN, num_experts=EXPERTS, top_k=1, dtype="bfloat16", rngs=sx.Rngs(0)
    )

    @sx.jit
    @sx.kernels(experts=experts)
    def step(layer: Any, x: Any) -> Any:
        return sx.grad(lambda layer, x: layer(x).astype(jnp.float32).sum())(layer, x)

    shape = BATCH, 64, EXPERT_DIM
    return step, (layer, plan.NamedShape(shape, "bfloat16", ("batch", "seq", None)))


@needs("tokamax")
@pytest.mark.skipif(
    PACKAGES["tokamax"].is_here() and metadata.version("tokamax") != "0.0.12",
    reason="later versions of tokamax compile experts for GPUs that are here only",
)
@pytest.mark.parametrize("target", [GPU])
def test_experts_on_gpus_multiply_rows_by_their_group(target: str) -> None:
    flops = {}
    for experts in ("xla", "auto"):
        (report,) = plan.compare(
            *experts_step(experts), {"split": {"batch": "data"}}, {"data": 8}, target, cache=None
        )
        assert report.outcome == "fits", report.reason
        assert not [warning for warning in report.warnings if "not counted" in warning]
        flops[experts] = report.flops
    assert flops["auto"] == counted_experts(forward=1, kernels=1)
    assert flops["xla"] == counted_experts(forward=EXPERTS, kernels=EXPERTS)


@pytest.mark.parametrize("target", [TPU])
def test_experts_on_tpus_have_a_kernel_of_xla(target: str) -> None:
    (report,) = plan.compare(
        *experts_step("xla"), {"split": {"batch": "data"}}, {"data": 8}, target, cache=None
    )
    assert report.outcome == "fits", report.reason
    # Before JAX 0.12 it has none for gradients of kernels: XLA multiplies by all experts there.
    by_group = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)
    assert report.flops == counted_experts(forward=1, kernels=1 if by_group else EXPERTS)


def counted_experts(forward: int, kernels: int) -> float:
    """Operations of a device: products of rows, gradients of kernels, the router."""
    rows = 2 * BATCH * 64 / DEVICES * EXPERT_DIM
    return rows * HIDDEN * (4 * forward + 3 * kernels) + 2 * rows * EXPERTS


# A decoder, in training and in decoding, by kernel and by precision, over 1, 8 and 64 devices.
DECODER = sx.models.TransformerConfig(
    vocab_size=256,
    num_layers=2,
    embed_dim=256,
    attention=sx.models.AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=128),
    mlp=sx.models.MLPConfig(dim=256),
    dtype="bfloat16",
    param_dtype="bfloat16",
    scan_layers=True,
)
SPLIT = {**RULES, "mlp": "model", "vocab": "model"}
LAYERS = sx.PathContains("layers")
ROWS, LENGTH = 64, 128
MESHES = {1: {"data": 1, "model": 1}, 8: {"data": 2, "model": 4}, 64: {"data": 8, "model": 8}}
MACHINES = {
    "tpu": {1: "tpu:v5e:1x1", 8: "tpu:v5e:2x4", 64: "tpu:v5e:8x8"},
    "gpu": {1: "gpu:h100:1x1", 8: "gpu:h100:1x8", 64: "gpu:h100:8x8"},
}
KINDS = [pytest.param(kind, marks=needs_compiler(kind)) for kind in MACHINES]


def decoder_report(step: Any, args: tuple[Any, ...], kind: str, devices: int) -> Any:
    layouts, mesh = {"split": SPLIT}, MESHES[devices]
    (report,) = plan.compare(step, args, layouts, mesh, MACHINES[kind][devices], cache=None)
    assert report.outcome == "fits", report.reason
    return report


def bytes_on_a_device(held: Any, devices: int) -> float:
    """What a device holds of the Variables, by their names."""
    total = 0.0
    for _, variable in sx.iter_variables(held):
        names = variable.axes or ()
        parts = [MESHES[devices][SPLIT[name]] for name in names if name in SPLIT]
        itemsize = 0.5 if variable.dtype == "int4" else variable.dtype.itemsize
        total += variable.size * itemsize / np.prod(parts, dtype=int)
    return total


@pytest.mark.parametrize(
    ("attention", "precision", "devices"),
    [("xla", "fp8", 64), ("xla", "fp8-delayed", 8), ("splash", None, 64), ("splash", "fp8", 1)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_training_by_kernel_and_precision_compiles_and_counts(
    kind: str, attention: str, precision: str | None, devices: int
) -> None:
    attention = attention if kind == "tpu" else "xla"
    model = sx.models.Transformer(DECODER, rngs=sx.Rngs(0))
    if precision is not None:
        model = sx.surgery.with_precision(model, {LAYERS: precision})

    @sx.jit
    @sx.kernels(attention=attention)
    def step(model: Any, tokens: Any) -> Any:
        return sx.grad(lambda model: model(tokens).astype(jnp.float32).mean())(model)

    args = model, plan.NamedShape((ROWS, LENGTH), "int32", ("batch", "seq"))
    report = decoder_report(step, args, kind, devices)
    held = report.argument_bytes["parameters"] + report.argument_bytes["other"]
    assert held == bytes_on_a_device(model, devices)
    if attention == "xla":  # splash computes no pairs that the mask leaves out
        assert report.program_flops <= report.flops * devices <= 1.1 * report.program_flops


@pytest.mark.parametrize(
    ("precision", "cache_dtype", "devices"),
    [
        (None, None, 8),
        ("int8", None, 1),
        ("int8", "int8", 64),
        ("fp8", None, 64),
        ("int4", None, 8),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_few_bits_compiles_and_holds_them(
    kind: str, precision: str | None, cache_dtype: str | None, devices: int
) -> None:
    model = sx.models.Transformer(DECODER, rngs=sx.Rngs(0))
    model.eval()
    if precision is not None:
        model = sx.quantize(model, {LAYERS: precision, ...: None})
    cache = model.make_cache(ROWS, LENGTH, dtype=cache_dtype)

    @sx.jit
    def step(model: Any, cache: Any, tokens: Any) -> Any:
        return model(tokens, cache=cache)

    args = model, cache, plan.NamedShape((ROWS, 1), "int32", ("batch", "seq"))
    report = decoder_report(step, args, kind, devices)
    assert report.argument_bytes["parameters"] == bytes_on_a_device(model, devices)
    assert report.argument_bytes["other"] == bytes_on_a_device(cache, devices)
