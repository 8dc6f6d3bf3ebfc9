# SPDX-License-Identifier: Apache-2.0
"""The decoder over meshes of every axis type: the same losses, and the same bytes on the wire.

*Wire bytes* are the sizes of what collective operations of the compiled program return. Tensor
parallel they are the same whatever the axis types. With parameters split by the batch's mesh axis
too, the compiler gathers the vectors of the norms once more for the backward pass where that axis
is Auto; where it is Explicit, the gathered vector has a type of its own and is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardax as sx
from shardax.models import DECODER_RULES, Decoder, DecoderConfig, next_token_loss

SMALL = DecoderConfig(
    vocab_size=32,
    num_layers=2,
    embed_dim=16,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    mlp_dim=32,
)
TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab_size, (4, 9), np.int32)
BATCH = {"inputs": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}
KINDS = {"A": AxisType.Auto, "E": AxisType.Explicit}
BY_BATCH_TOO = sx.Rules([(n, "data" if n == "embed" else to) for n, to in DECODER_RULES])
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
ITEM_BYTES = {"pred": 1, "s32": 4, "u32": 4, "f32": 4}


@sx.jit
def step(model: Decoder, batch: Any) -> jax.Array:
    """One step of gradient descent; returns the loss before it."""
    loss, gradients = sx.value_and_grad(next_token_loss)(model, batch)
    sx.update(model, jax.tree.map(lambda p, g: p - g, sx.state(model, sx.Param), gradients))
    return loss


def wire_bytes(program: str) -> dict[str, int]:
    """Bytes that collective operations return, by operation, in a compiled program's text."""
    found: Counter[str] = Counter()
    for result, operation in COLLECTIVE.findall(program):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result):
            found[operation] += ITEM_BYTES[dtype] * math.prod(
                map(int, filter(None, shape.split(",")))
            )
    return dict(found)


def decoder(scanned: bool) -> Decoder:
    return Decoder(dataclasses.replace(SMALL, scan_layers=scanned), rngs=sx.Rngs(0))


@functools.cache
def losses_of_one_device() -> list[float]:
    model = decoder(False)
    return [float(step(model, BATCH)) for _ in range(2)]


@functools.cache
def train(scanned: bool, by_batch_too: bool, kinds: str) -> tuple[list[float], dict[str, int]]:
    """Losses of two steps over the mesh data=2, model=4, and the wire bytes of a step."""
    rules = BY_BATCH_TOO if by_batch_too else DECODER_RULES
    types = tuple(KINDS[kind] for kind in kinds)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    model = sx.shard(decoder(scanned), mesh, rules)
    placed = sx.shardings(model, mesh, rules).flat()
    batch = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        program = step.lower(model, batch).compile().as_text()
        losses = [float(step(model, batch)) for _ in range(2)]
    for path, value in sx.state(model).flat().items():
        assert value.sharding.is_equivalent_to(placed[path], value.ndim), path
    return losses, wire_bytes(program)


@pytest.mark.parametrize(
    ("scanned", "kinds"), [(False, "EE"), (True, "EE"), (True, "AE"), (True, "EA")]
)
def test_tensor_parallel_the_axis_types_change_neither_losses_nor_bytes(
    scanned: bool, kinds: str
) -> None:
    losses, found = train(scanned, False, kinds)
    np.testing.assert_allclose(losses, losses_of_one_device(), rtol=1e-5)
    assert losses[1] < losses[0] - 0.1
    assert found == train(scanned, False, "AA")[1]
    assert set(found) == {"all-reduce"}


@pytest.mark.slow
@pytest.mark.parametrize(("scanned", "kinds"), [(False, "EE"), (True, "EE"), (True, "AE")])
def test_with_parameters_split_by_the_batch_too_explicit_axes_cost_no_bytes_more(
    scanned: bool, kinds: str
) -> None:
    losses, found = train(scanned, True, kinds)
    np.testing.assert_allclose(losses, losses_of_one_device(), rtol=1e-5)
    auto = train(scanned, True, "AA")[1]
    norms = 4 * SMALL.embed_dim * (2 * SMALL.num_layers + 1)  # bytes of all vectors of norms
    assert auto["all-gather"] - norms <= found.pop("all-gather") <= auto["all-gather"]
    assert found == {operation: auto[operation] for operation in found}
