# SPDX-License-Identifier: Apache-2.0
"""Kernels of attention compile for hardware that is not here, and are counted."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from tests.plan.installed import TPU

import shardax as sx
from shardax import plan

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
