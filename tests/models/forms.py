# SPDX-License-Identifier: Apache-2.0
"""One model under every form of parallelism, by rules alone."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

import shardax as sx
from shardax.models import (
    AttentionConfig,
    ExpertsConfig,
    MLPConfig,
    Rope,
    Transformer,
    TransformerConfig,
    next_token_loss,
)
from tests.values import with_values


class Form(NamedTuple):
    """A mesh, rules and settings."""

    sizes: dict[str, int]
    settings: dict[str, Any]

    @property
    def rules(self) -> list[Any]:
        """The usual rules of the mesh's axes."""
        batch = tuple(axis for axis in ("data", "expert") if axis in self.sizes)
        every = [
            ("batch", batch),
            ("embed", "data"),
            *((name, "model") for name in ("heads", "kv_heads", "mlp", "vocab")),
            ("layers", "stage"),
            ("seq", "context"),
            ("expert", "expert"),
        ]
        return [(n, axes) for n, axes in every if axes and (axes is batch or axes in self.sizes)]

    @property
    def name(self) -> str:
        """For the names of tests."""
        return " ".join(f"{n}={v}" for n, v in (self.sizes | self.settings).items())


CIRCULAR = {"microbatches": 2, "schedule": "circular"}
FORMS = [
    Form({"data": 1}, {}),
    Form({"stage": 2}, {"microbatches": 2}),
    Form({"context": 2}, {"context": "ring-zigzag"}),
    Form({"stage": 2, "context": 2}, CIRCULAR | {"context": "ring-zigzag"}),
    Form({"data": 2, "expert": 2}, {}),
    Form({"expert": 4, "model": 2}, {}),
    Form({"stage": 2, "context": 2, "model": 2}, CIRCULAR | {"context": "ring"}),
    Form({"data": 2, "stage": 2, "context": 2}, {"microbatches": 2, "context": "ring-zigzag"}),
    Form({"data": 2, "stage": 2, "expert": 2}, CIRCULAR),
    Form({"data": 2, "context": 2, "expert": 2}, {"context": "all-gather"}),
]


@functools.cache
def whole() -> Transformer:
    """A decoder with experts, scanned, on one device."""
    config = TransformerConfig(
        vocab_size=32,
        num_layers=4,
        embed_dim=8,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, rope=Rope(100.0)),
        mlp=MLPConfig(dim=16),
        experts=ExpertsConfig(num_experts=4, dim=8, dispatch="dropless"),
        scan_layers=True,
        remat="full",
    )
    return with_values(Transformer(config, rngs=sx.Rngs(0)))


def make_batch() -> dict[str, Any]:
    """Eight rows of tokens."""
    tokens = np.random.default_rng(0).integers(0, 32, (8, 17))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


@sx.jit
def step(model: Any, batch: Any) -> Any:
    """Loss and gradients."""
    return sx.value_and_grad(next_token_loss)(model, batch)


def run(form: Form, kind: AxisType = AxisType.Auto) -> tuple[Any, Any]:
    """Loss and gradients over the form's mesh."""
    count = math.prod(form.sizes.values())
    devices = np.array(jax.devices()[:count]).reshape(tuple(form.sizes.values()))
    mesh = jax.sharding.Mesh(devices, tuple(form.sizes), axis_types=(kind,) * devices.ndim)
    model = sx.shard(with_values(sx.clone(whole())), mesh, form.rules)
    with jax.set_mesh(mesh), sx.axis_rules(form.rules), sx.parallel(**form.settings):
        return step(model, make_batch())
