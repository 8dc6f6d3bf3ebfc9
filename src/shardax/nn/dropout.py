# SPDX-License-Identifier: Apache-2.0
"""Dropout: zeroing random elements while training.

Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014; in the
form that scales what is kept, so that nothing changes when it is switched off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardax import Module, Rngs
from shardax.errors import ModuleError
from shardax.extend import Options, check_rngs, explicit_sharding
from shardax.nn.arithmetic import as_array
from shardax.nn.errors import LayerConfigError, LayerInputError


class Dropout(Module):
    """Zeroes elements at random and scales the others.

    With probability ``rate`` an element becomes zero; the others are divided by ``1 - rate``.

    ``model.train()`` and ``model.eval()`` switch it on and off by its attribute ``deterministic``.

    Args:
        rate: Probability of an element to be dropped, from 0 to 1.
        broadcast_dims: Dimensions along which elements are dropped together.
        deterministic: Whether it starts switched off.
        rngs: Random streams; each call draws from ``dropout``. The stream itself is kept, so layers
            made with the same ``Rngs`` share one. None: pass ``rngs=`` when calling.

    Attributes:
        stream: The ``RngStream``, or None.
        deterministic: Whether it is switched off.

    Raises:
        LayerConfigError: If ``rate`` is not a probability.
        ModuleError: If ``rngs`` is a seed or a key, and no ``Rngs``.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> dropout = sx.nn.Dropout(0.5, rngs=sx.Rngs(0))
        >>> sorted(set(dropout(jnp.ones(100)).tolist()))
        [0.0, 2.0]
        >>> dropout.eval(); set(dropout(jnp.ones(100)).tolist())
        {1.0}
    """

    def __init__(
        self,
        rate: float,
        *,
        broadcast_dims: Sequence[int] = (),
        deterministic: bool = False,
        rngs: Rngs | None = None,
    ) -> None:
        expected = "from 0 to 1, the probability to drop"
        Options(LayerConfigError, "Dropout").check("rate", rate, 0 <= rate <= 1, expected)
        self.rate = float(rate)
        self.broadcast_dims = tuple(broadcast_dims)
        self.deterministic = bool(deterministic)
        self.stream = None if rngs is None else check_rngs(rngs)["dropout"]

    def __call__(
        self, x: Any, *, deterministic: bool | None = None, rngs: Rngs | None = None
    ) -> jax.Array:
        """Drops elements, or returns the input as it is when switched off.

        Args:
            x: Any shape.
            deterministic: Overrides the attribute for this call.
            rngs: Overrides the layer's stream for this call.

        Returns:
            The same shape and dtype.

        Raises:
            ModuleError: If there is no stream to draw from.
            LayerInputError: If ``broadcast_dims`` has a dimension that ``x`` lacks.
        """
        x = as_array(x)
        if (self.deterministic if deterministic is None else deterministic) or self.rate == 0:
            return x
        if self.rate == 1:
            return jnp.zeros_like(x)

        stream = self.stream if rngs is None else check_rngs(rngs)["dropout"]
        if stream is None:
            raise ModuleError(
                "Dropout has no random stream: it was made without rngs. Make it with "
                f"Dropout({self.rate}, rngs=sx.Rngs(dropout=0)), or call it with "
                "dropout(x, rngs=rngs); or switch it off with model.eval()."
            )
        key = stream()

        outside = [axis for axis in self.broadcast_dims if not -x.ndim <= axis < x.ndim]
        if outside:
            raise LayerInputError(
                f"Dropout(broadcast_dims={self.broadcast_dims}) was given an input of shape "
                f"{x.shape}, which has no dimension {outside[0]}."
            )

        together = {axis % x.ndim for axis in self.broadcast_dims}
        shape = tuple(1 if axis in together else size for axis, size in enumerate(x.shape))
        sharding = explicit_sharding(x) if shape == x.shape else None
        mask = jax.random.bernoulli(key, 1 - self.rate, shape, out_sharding=sharding)
        return jnp.where(jnp.broadcast_to(mask, x.shape), x / (1 - self.rate), 0)
