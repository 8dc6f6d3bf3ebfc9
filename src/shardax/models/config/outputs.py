# SPDX-License-Identifier: Apache-2.0
"""Configs of the results of a model: the output layer, and pooling."""

from __future__ import annotations

from dataclasses import dataclass

from shardax.extend import Options
from shardax.models.config.paths import ConfigPart
from shardax.nn.errors import LayerConfigError

POOLINGS = ("first", "mean", "first_and_mean", "last", "end", "highest", "attention")


@dataclass(frozen=True)
class OutputConfig(ConfigPart):
    """Sizes and form of the output layer.

    Its kind is ``TransformerConfig.head``.

    Attributes:
        tied: Whether the head of tokens is the transposed embedding.
        bias: Whether it has a bias.
        scale: Multiplies the logits of tokens, before a bound.
        softcap: Bound of the logits of tokens, by tanh.
        num_classes: Number of classes of the heads ``"first"`` and ``"each"``.
        projection_dim: Size of what the head ``"embedding"`` returns.
        transform: Whether a dense layer, an activation and a norm stand before the head.
        transform_norm: Whether the norm is there.
        transform_bias: Whether the dense layer has a bias.
        activation: The activation there; None for that of the model.

    Raises:
        LayerConfigError: If the logits are multiplied by 0.

    Example:
        >>> import shardax as sx
        >>> output = sx.models.OutputConfig(tied=True, softcap=30.0)
        >>> config = sx.models.TransformerConfig(num_layers=1, output=output)
        >>> sx.models.Transformer(config, rngs=sx.Rngs(0)).head is None
        True
    """

    tied: bool = False
    bias: bool = False
    scale: float | None = None
    softcap: float | None = None
    num_classes: int = 0
    projection_dim: int = 0
    transform: bool = False
    transform_norm: bool = True
    transform_bias: bool = True
    activation: str | None = None

    def __post_init__(self) -> None:
        options = Options(LayerConfigError, type(self).__name__)
        options.check("scale", self.scale, self.scale != 0, "another number than 0")


@dataclass(frozen=True)
class PoolConfig(ConfigPart):
    """The vector of a sequence, from ``Transformer.pool``.

    The heads ``"first"`` and ``"embedding"`` read it.

    Attributes:
        kind: The ``"first"`` position, the ``"mean"``, ``"first_and_mean"``, one behind the other,
            the mean of the others then, the ``"last"`` position, that of the first ``"end"``
            token, of the ``"highest"`` token, or ``"attention"`` of a learned query to all.
        end_token: The token of the kind ``"end"``.
        norm: Whether the last norm stands behind the pooling, and the last layer's result has
            none.
        dense: Whether there is a dense layer on what is pooled.
        dim: Size of what it returns; 0 for ``embed_dim``.
        activation: Its activation, by name.

    Raises:
        LayerConfigError: If the kind is another, or ``"end"`` without a token.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> config = sx.models.TransformerConfig(
        ...     num_layers=1, head=None, pool=sx.models.PoolConfig(kind="mean"))
        >>> model = sx.models.Transformer(config, rngs=sx.Rngs(0))
        >>> model.pool(model(jnp.zeros((2, 8), int))).shape
        (2, 64)
    """

    kind: str = "first"
    end_token: int = -1
    norm: bool = False
    dense: bool = False
    dim: int = 0
    activation: str = "tanh"

    def __post_init__(self) -> None:
        options = Options(LayerConfigError, type(self).__name__)
        options.choice("kind", self.kind, POOLINGS)
        fits = self.end_token >= 0 or self.kind != "end"
        options.check("end_token", self.end_token, fits, "a token")
