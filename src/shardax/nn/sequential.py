# SPDX-License-Identifier: Apache-2.0
"""``Sequential``: layers called one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardax.core.errors import LayerConfigError
from shardax.core.modules import Module


class Sequential(Module):
    """Calls layers one after the other, each on the result of the one before.

    Args:
        *layers: Modules or functions of one argument.

    Attributes:
        layers: The layers, a tracked list: append to it, replace items, slice it.

    Raises:
        LayerConfigError: If something that cannot be called is among them.

    Example:
        >>> import jax, jax.numpy as jnp, shardax as sx
        >>> rngs = sx.Rngs(0)
        >>> model = sx.nn.Sequential(
        ...     sx.nn.Linear(2, 8, rngs=rngs), jax.nn.relu, sx.nn.Linear(8, 1, rngs=rngs))
        >>> model(jnp.ones((5, 2))).shape, model.layers[2].kernel.shape
        ((5, 1), (8, 1))
    """

    def __init__(self, *layers: Callable[[Any], Any]) -> None:
        for position, layer in enumerate(layers):
            if not callable(layer):
                hint = " Write Sequential(*layers)." if isinstance(layer, (list, tuple)) else ""
                raise LayerConfigError(
                    f"Sequential calls its layers, but the one at {position} is {layer!r} of type "
                    f"{type(layer).__name__}, which cannot be called.{hint}"
                )
        self.layers = list(layers)

    def __call__(self, x: Any) -> Any:
        """Returns the result of the last layer; of no layers, the input."""
        for layer in self.layers:
            x = layer(x)
        return x
