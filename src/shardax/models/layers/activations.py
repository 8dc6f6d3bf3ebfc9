# SPDX-License-Identifier: Apache-2.0
"""Activations of published models that ``jax.nn`` has not by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def exact_gelu(x: Any) -> jax.Array:
    """Returns the gelu without the approximation by tanh."""
    return jax.nn.gelu(x, approximate=False)


def quick_gelu(x: Any) -> jax.Array:
    """Returns ``x * sigmoid(1.702 * x)``."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: Any) -> jax.Array:
    """Returns ``relu(x) ** 2``."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS = {"exact_gelu": exact_gelu, "quick_gelu": quick_gelu, "squared_relu": squared_relu}


def find_activation(name: str) -> Callable[[Any], Any]:
    """Returns an activation by its name in a config."""
    return ACTIVATIONS[name] if name in ACTIVATIONS else getattr(jax.nn, name)
