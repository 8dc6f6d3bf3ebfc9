# SPDX-License-Identifier: Apache-2.0
"""What the report of ``shardax migrate`` says to write runs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import shardax as sx
from tests.advice import run_advice
from tests.interop.migrate.translation import LEFT, NAMES, translate


@pytest.fixture
def names() -> dict[str, Any]:
    model = sx.nn.Linear(4, 4, rngs=sx.Rngs(0))
    return {
        "sx": sx,
        "functools": functools,
        "model": model,
        "f": model,
        "x": jnp.ones((2, 4)),
        "primals": (jnp.ones((2, 4)),),
        "values": {"bias": jnp.ones(4)},
        "flat": sx.state(model).flat(),
        "mesh": jax.make_mesh((8,), ("data",)),
        "specs": jax.P("data"),
        "rules": {"in": None, "out": None},
        "tx": optax.sgd(0.1),
        "rngs": sx.Rngs(0),
        "key": jax.random.key(0),
        "name": "noise",
        "layer": model,
        "decay": 0.9,
        "n": 3,
        "rest": ...,
        **dict.fromkeys(("in_features", "features", "batch", "length", "heads", "size"), 2),
    }


def test_remedies_all_run(names: dict[str, Any]) -> None:
    cache = "from flax import nnx\nm = nnx.data(0)\nc = layer.init_cache(3)\n"
    texts = "\n".join(
        [
            *(left.write for left in LEFT.values()),
            *(name.check for name in NAMES.values()),
            *(f"{notice.reason} {notice.write}" for notice in translate(cache).notes),
        ]
    )
    run_advice(texts, "sx.RngStream(key, name)", names)
    run_advice(texts, "sx.State.from_flat(flat)", names)
    run_advice(texts, "sx.Variable(jax.numpy.asarray(x))", {**names, "jax": jax})
    run_advice(texts, "sx.abstract(model, mesh, rules)", names)
    run_advice(texts, "sx.Frozen(sx.Param)", names)
    with run_advice(texts, "sx.axis_rules(rules)", names):
        pass
    run_advice(texts, "sx.bind(*sx.unbind(model))", names)
    run_advice(texts, "sx.custom_vjp(f)", names)
    run_advice(texts, "sx.iter_modules(model)", names)
    run_advice(texts, "sx.iter_variables(model)", names)
    run_advice(texts, "sx.jit(functools.partial(f, model))", names)
    run_advice(texts, "sx.nn.WeightNorm(layer)", names)
    run_advice(texts, "sx.nn.SpectralNorm(layer, rngs=rngs)", names)
    run_advice(texts, "sx.iter_graph(model)", names)
    run_advice(texts, "sx.recursive_map(f, model)", {**names, "f": lambda path, part: part})
    run_advice(texts, "sx.nn.GRUCell(in_features, features, rngs=rngs)", names)
    run_advice(texts, "sx.nn.LSTMCell(in_features, features, rngs=rngs)", names)
    run_advice(texts, "sx.partition_specs(model, rules)", names)
    run_advice(texts, "sx.select(model)", names)
    run_advice(texts, "sx.shard(model, mesh, rules)", names)
    run_advice(texts, "sx.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs)", names)
    run_advice(texts, "sx.state(model)", names)
    run_advice(texts, "sx.surgery.lora(sx.select(model), rank=8)", names)
    run_advice(texts, "sx.train.EMA(model, decay)", names)
    run_advice(texts, "sx.train.Optimizer(model, tx)", names)
    run_advice(texts, "sx.update(model, values)", names)
    run_advice(texts, "sx.vjp(f, *primals, as_module=True)", names)
    run_advice(texts, "sx.vmap(f, axis_size=n)", names)
    run_advice(texts, "sx.nn.AttentionCache(batch, length, heads, size)", names)
