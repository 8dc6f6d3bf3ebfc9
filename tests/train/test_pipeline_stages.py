# SPDX-License-Identifier: Apache-2.0
"""Pipelines of one executable a stage: the same results as the whole model on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.errors import PipelineError
from shardax.train import PipelineStep, Schedule, accumulated_value_and_grad

ROWS, WIDTH, VOCAB = 16, 8, 32
SCHEDULES = ["gpipe", "1f1b", "zero-bubble"]
RULES = {"batch": "data", "mlp": "model", "vocab": "model"}


class Embed(sx.Module):
    """Tokens to vectors; hands the mask on."""

    def __init__(self, seed: int) -> None:
        self.embed = sx.nn.Embed(VOCAB, WIDTH, rngs=sx.Rngs(seed))

    def __call__(self, batch: Any) -> Any:
        return {"x": self.embed(batch["tokens"]), "mask": batch["mask"]}


class Block(sx.Module):
    """A perceptron of its own width, beside what it does not change."""

    def __init__(self, seed: int, width: int, rate: float = 0.0, rngs: Any = None) -> None:
        rngs = sx.Rngs(seed) if rngs is None else rngs
        self.mlp = sx.nn.MLP(WIDTH, width, rngs=rngs)
        self.dropout = sx.nn.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, given: Any) -> Any:
        x = given["x"] + self.mlp(given["x"])
        return given | {"x": x if self.dropout is None else self.dropout(x)}


class Head(sx.Module):
    """Logits, of which the mask takes some away."""

    def __init__(self, seed: int) -> None:
        self.head = sx.nn.Linear(WIDTH, VOCAB, rngs=sx.Rngs(seed))

    def __call__(self, given: Any) -> Any:
        return self.head(given["x"]) * given["mask"][..., None]


def make(rate: float = 0.0) -> list[Any]:
    return [Embed(0), Block(1, 16, rate), Block(2, 32, rate), Head(3)]


def cross_entropy(logits: Any, targets: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_batch() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (ROWS, 4))
    return {"tokens": tokens, "mask": random.integers(0, 2, (ROWS, 4))}, (tokens + 1) % VOCAB


def make_mesh(kind: AxisType = AxisType.Auto, **sizes: int) -> Any:
    count = int(np.prod(list(sizes.values())))
    kinds = (kind,) * len(sizes)
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def whole(stages: list[Any], microbatches: int, loss: Any = cross_entropy) -> Any:
    """The loss and gradients of the stages on one device."""

    def total(model: Any, batch: Any) -> Any:
        x, targets = batch
        for stage in model.stages:
            x = stage(x)
        return loss(x, targets)

    class Whole(sx.Module):
        def __init__(self) -> None:
            self.stages = list(stages)

    inputs, targets = make_batch()
    inputs = jax.tree.map(jnp.asarray, inputs)
    step = sx.jit(accumulated_value_and_grad(total, microbatches))
    value, gradients = step(Whole(), (inputs, jnp.asarray(targets)))
    return value, [gradients.stages[i] for i in range(len(stages))]


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    one, other = (dict(sx.State(tree).flat()) for tree in (found, wanted))
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_allclose(
            np.asarray(value), np.asarray(other[path]), atol=tolerance, err_msg=str(path)
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "sizes", [{"stage": 4, "data": 1, "model": 2}, {"data": 2, "stage": 4, "model": 1}], ids=str
)
def test_loss_and_gradients_are_those_of_the_whole_model(
    schedule: str, kind: AxisType, sizes: dict[str, int]
) -> None:
    value, wanted = whole(make(), 4)
    mesh = make_mesh(kind, **sizes)
    step = PipelineStep(
        make(), cross_entropy, mesh=mesh, rules=RULES, microbatches=4, schedule=schedule
    )
    for _ in range(2):
        loss, gradients = step(*make_batch())
        assert float(loss) == pytest.approx(float(value), abs=1e-6)
        for number, grads in enumerate(gradients):
            assert_close(grads, wanted[number])
            for path, each in grads.flat().items():
                parameter = sx.state(step.stages[number]).flat()[path]
                assert each.sharding == parameter.sharding
                assert each.sharding.device_set == set(step.meshes[number].devices.flat)
