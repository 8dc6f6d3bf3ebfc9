# SPDX-License-Identifier: Apache-2.0
"""The model of `pipelines.py` in SpectraX, which finds classes of Modules by their import."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import spectrax as spx
from jax.sharding import Mesh
from spectrax.runtime.types import MpMdMesh

SCHEDULES = {
    "gpipe": spx.GPipe,
    "1f1b": spx.Std1F1B,
    "interleaved": spx.InterleavedH1,
    "zero-bubble": spx.ZeroBubbleH1,
}


class Block(spx.Module):
    """A residual perceptron."""

    def __init__(self, up: Any, down: Any) -> None:
        super().__init__()
        self.up, self.down = spx.Parameter(up), spx.Parameter(down)

    def forward(self, x: Any) -> Any:
        """Adds the perceptron's result."""
        return x + jnp.tanh(x @ self.up.value) @ self.down.value


class Pair(spx.Module):
    """Two of them, one after the other."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Any) -> Any:
        """Calls both."""
        return self.second(self.first(x))


def mean_square(y: Any, target: Any) -> Any:
    """The loss."""
    return jnp.mean((y - target) ** 2)


def ways(
    up: Any, down: Any, x: Any, target: Any, ranks: int, microbatches: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name, and a step that returns loss and gradients."""
    mesh = MpMdMesh(Mesh(np.array(jax.devices()), ("pp",)), "pp")
    for name, kind in SCHEDULES.items():
        schedule = kind(microbatches=microbatches)
        turns = range(schedule.virtual_stages_per_rank())
        ranks_of = {schedule.logical_at(r, turn, ranks): r for r in range(ranks) for turn in turns}
        places = [mesh.sub_sharding(ranks_of[stage]) for stage in range(len(ranks_of))]
        of_a_stage = len(up) // len(places)
        layers = []
        # An array on one device counts as of that stage, so all are put where they are used.
        for number, pair in enumerate(zip(up, down, strict=True)):
            stage = number // of_a_stage
            with spx.assign_stage(total=len(places), current=stage):
                layers.append(Block(*jax.device_put(pair, places[stage])))
        pairs = zip(layers[::2], layers[1::2], strict=True)
        stages = layers if of_a_stage == 1 else [Pair(*each) for each in pairs]
        call = functools.partial(
            spx.sxcall,
            spx.nn.PipelineSequential(*stages),
            (jax.device_put(x, places[0]), jax.device_put(target, places[-1])),
            mesh=mesh,
            schedule=schedule,
            loss_fn=mean_square,
        )

        def step(call: Any = call) -> Any:
            value, gradients = call()
            return value, jax.tree.leaves(dict(gradients.shards))

        yield f"SpectraX, {name}", step
