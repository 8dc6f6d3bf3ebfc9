# SPDX-License-Identifier: Apache-2.0
"""The decoder over meshes of every axis type: the same losses, and the same bytes on the wire.

*Wire bytes* are the sizes of what collective operations of the compiled program return, those in a
loop as often as it turns. Tensor parallel they are the same whatever the axis types, and whether
layers are stacked in a loop or not. With
parameters split by the batch's mesh axis too, the compiler gathers the vectors of the norms once
more for the backward pass where that axis is Auto; where it is Explicit, the gathered vector has a
type of its own and is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import shardax as sx
from shardax.errors import TransformError
from shardax.models import DECODER_RULES, Decoder, next_token_loss
from tests.models import small
from tests.models.small import BATCH, with_equal_values

SMALL = dataclasses.replace(small.SMALL, num_layers=2)
KINDS = {"A": AxisType.Auto, "E": AxisType.Explicit}
BY_BATCH_TOO = sx.Rules([(n, "data" if n == "embed" else to) for n, to in DECODER_RULES])
COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
COMPUTATION = re.compile(r"^(ENTRY )?%([\w.-]+) \(.*?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%([\w.-]+)")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
ITEM_BYTES = {"pred": 1, "s32": 4, "u32": 4, "f32": 4}


@sx.jit
def step(model: Decoder, batch: Any) -> jax.Array:
    """One step of gradient descent; returns the loss before it."""
    loss, gradients = sx.value_and_grad(next_token_loss)(model, batch)
    sx.update(model, jax.tree.map(lambda p, g: p - g, sx.state(model, sx.Param), gradients))
    return loss


def test_from_pretrained_refuses_meshes_without_places(tmp_path: Path) -> None:
    sx.models.save_pretrained(Decoder(SMALL, rngs=sx.Rngs(0)), tmp_path / "model")
    load = functools.partial(sx.models.from_pretrained, tmp_path / "model")
    abstract = jax.sharding.AbstractMesh((2,), ("data",))
    manual = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Manual,))
    for mesh, says in ((abstract, "which has no devices"), (manual, "axes of type Manual")):
        with pytest.raises(TransformError, match=f"from_pretrained cannot place arrays.*{says}"):
            load(mesh=mesh)
    with (
        jax.sharding.use_abstract_mesh(abstract),
        pytest.raises(TransformError, match="no devices"),
    ):
        load()


def wire_bytes(program: str) -> Counter[str]:
    """Bytes that collective operations return, by operation, in a compiled program's text."""
    computations = {name: body for _, name, body in COMPUTATION.findall(program)}
    [entry] = [name for is_entry, name, _ in COMPUTATION.findall(program) if is_entry]
    return _bytes_of(entry, computations)


def _bytes_of(name: str, computations: dict[str, str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in computations[name].splitlines():
        for result, operation in COLLECTIVE.findall(line):
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result):
                sizes = map(int, filter(None, shape.split(",")))
                found[operation] += ITEM_BYTES[dtype] * math.prod(sizes)
        turns = int(TURNS.findall(line)[0]) if " while(" in line else 1
        for called in CALLED.findall(line):
            for operation, count in _bytes_of(called, computations).items():
                found[operation] += turns * count
    return found


def decoder(scanned: bool) -> Decoder:
    config = dataclasses.replace(SMALL, scan_layers=scanned)
    return with_equal_values(Decoder(config, rngs=sx.Rngs(0)))


@functools.cache
def losses_of_one_device() -> list[float]:
    model = decoder(False)
    return [float(step(model, BATCH)) for _ in range(2)]


@functools.cache
def train(scanned: bool, by_batch_too: bool, kinds: str) -> tuple[list[float], Counter[str]]:
    """Losses of two steps over the mesh data=2, model=4, and the wire bytes of a step."""
    rules = BY_BATCH_TOO if by_batch_too else DECODER_RULES
    types = tuple(KINDS[kind] for kind in kinds)
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=types)
    model = sx.shard(decoder(scanned), mesh, rules)
    placed = sx.shardings(model, mesh, rules).flat()
    batch = jax.device_put(BATCH, NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh), sx.axis_rules(rules):
        program = step.lower(model, batch).compile()
        losses = [float(program(model, batch)) for _ in range(2)]
    for path, value in sx.state(model).flat().items():
        assert value.sharding.is_equivalent_to(placed[path], value.ndim), path
    return losses, wire_bytes(program.as_text())


CASES = pytest.mark.parametrize(
    ("scanned", "kinds"), [(False, "EE"), (True, "EE"), (True, "AE"), (True, "EA")]
)


@CASES
def test_tensor_parallel_losses_and_bytes_are_equal(scanned: bool, kinds: str) -> None:
    losses, found = train(scanned, False, kinds)
    np.testing.assert_allclose(losses, losses_of_one_device(), rtol=1e-5)
    assert losses[1] < losses[0] - 0.1
    assert found == train(False, False, "AA")[1]
    assert set(found) == {"all-reduce"}


@CASES
def test_explicit_axes_gather_the_norms_only_once(scanned: bool, kinds: str) -> None:
    losses, found = train(scanned, True, kinds)
    np.testing.assert_allclose(losses, losses_of_one_device(), rtol=1e-5)
    norms = 4 * SMALL.embed_dim * (2 * SMALL.num_layers + 1)  # bytes of all vectors of norms
    saved = norms if kinds[0] == "E" else 0  # the batch is split over the first axis
    assert found + Counter({"all-gather": saved}) == train(scanned, True, "AA")[1]
    assert set(found) == {"all-gather", "all-reduce", "all-to-all", "collective-permute"}


@pytest.mark.parametrize("narrow", [0, 1])
@pytest.mark.parametrize("mesh", [None, {"layers": 2}, {"data": 8}])
def test_stacked_layers_of_several_dtypes_keep_the_wider(
    tmp_path: Path, narrow: int, mesh: dict[str, int] | None
) -> None:
    config = sx.models.DecoderConfig(num_layers=2, scan_layers=False)
    model = Decoder(config, rngs=sx.Rngs(0))
    sx.models.save_pretrained(model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    name = f"model.layers.{narrow}.mlp.up_proj.weight"
    tensors = load_file(file)
    tensors[name] = tensors[name].astype(np.float16)
    save_file(tensors, file)

    devices = None if mesh is None else jax.make_mesh(tuple(mesh.values()), tuple(mesh))
    rules = [("layers", "layers")] if mesh and "layers" in mesh else [("mlp", "data")]
    options = {} if devices is None else {"mesh": devices, "rules": rules}
    loaded = sx.models.from_pretrained(tmp_path / "model", scan_layers=True, **options)
    kernel = loaded.layers.stacked.mlp.up.kernel
    assert kernel.dtype == np.float32
    wanted = np.stack([tensors[f"model.layers.{i}.mlp.up_proj.weight"].T for i in range(2)])
    np.testing.assert_array_equal(kernel.value, wanted.astype(np.float32))
