# SPDX-License-Identifier: Apache-2.0
"""A small lazy model and many transformations, shared by the tests of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

import shardax as sx

RULES = sx.Rules({"embed": None, "mlp": "model"})


class Layer(sx.Module):
    """A layer with axes."""

    def __init__(self, rngs: sx.Rngs, dtype: Any = np.float32) -> None:
        normal = jax.nn.initializers.normal(1.0)
        self.kernel = sx.Param(sx.Init(normal, (4, 8), dtype, rngs=rngs), axes=("embed", "mlp"))
        self.bias = sx.Param(sx.Init(normal, (8,), dtype, rngs=rngs), axes=("mlp",))

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel + self.bias[None]


class Tower(sx.Module):
    """A layer and a head."""

    def __init__(self, seed: int = 0, dtype: Any = np.float32) -> None:
        rngs = sx.Rngs(seed)
        self.layers = [Layer(rngs, dtype)]
        self.head = sx.Param(
            sx.Init(jax.nn.initializers.normal(1.0), (8, 4), dtype, rngs=rngs),
            axes=("mlp", "embed"),
        )
        self.steps_seen = sx.Variable(0)

    def __call__(self, x: Any) -> Any:
        hidden = jnp.tanh(self.layers[0](x))
        explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
        whole = PartitionSpec() if explicit else None
        return jnp.matmul(hidden, self.head.value, out_sharding=whole)


X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
PATHS = [("layers", 0, "kernel"), ("layers", 0, "bias"), ("head",)]


def loss(model: Any, x: Any) -> Any:
    """The mean distance of the outputs from 1, squared."""
    return jnp.mean((model(x) - 1) ** 2)


@sx.jit
def train_step(model: Any, optimizer: Any, x: Any) -> Any:
    """One step; every transformation is given the loss."""
    value, grads = sx.value_and_grad(loss)(model, x)
    optimizer.update(grads, value=value)
    return value


def params_of(model: Any) -> dict[Any, Any]:
    """The parameters as NumPy arrays, by path."""
    return {path: np.asarray(value) for path, value in sx.state(model, sx.Param).flat().items()}


class TaggedState(NamedTuple):
    """A state with leaves that are no arrays."""

    name: str
    first: Any
    function: Callable[[Any], Any]
    total: Any


def tagged() -> optax.GradientTransformation:
    """Pulls the parameters towards where they started."""

    def init(params: Any) -> TaggedState:
        return TaggedState("pull", jax.tree.map(lambda p: 2 * p, params), jnp.sin, 0.5)

    def update(updates: Any, state: TaggedState, params: Any) -> Any:
        assert state.name == "pull" and state.function is jnp.sin
        pulled = jax.tree.map(
            lambda u, p, f: -0.1 * u + 0.01 * state.total * (f / 2 - p),
            updates,
            params,
            state.first,
        )
        return pulled, state._replace(total=state.total * 0.9)

    return optax.GradientTransformation(init, update)


def is_matrix(params: Any) -> Any:
    """A mask."""
    return jax.tree.map(lambda p: p.ndim == 2, params)


def kind(params: Any) -> Any:
    """Labels."""
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)


TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "sgd without state": lambda: optax.sgd(0.1),
    "adamw": lambda: optax.adamw(1e-2),
    "clip and nesterov": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9, nesterov=True)
    ),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), is_matrix), optax.adam(1e-2)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "vector": optax.set_to_zero()}, kind
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.cosine_decay_schedule(0.1, 5)
    ),
    "schedule": lambda: optax.adam(optax.exponential_decay(0.1, 2, 0.5)),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "copies of the parameters": lambda: optax.contrib.schedule_free_adamw(0.1),
    "distance from the start": lambda: optax.contrib.dog(1.0),
    "factored": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "history": lambda: optax.lbfgs(0.1, memory_size=3, linesearch=None),
    "random key": lambda: optax.chain(optax.add_noise(0.1, 0.5, 7), optax.sgd(0.1)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "extra argument": lambda: optax.chain(
        optax.sgd(0.5), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)
    ),
    "static leaves": tagged,
}
