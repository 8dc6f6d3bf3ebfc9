# SPDX-License-Identifier: Apache-2.0
"""The config of norms, their kinds and placements."""

from __future__ import annotations

from dataclasses import dataclass

from shardax.extend import Options
from shardax.models.config.paths import ConfigPart
from shardax.nn.errors import LayerConfigError
from shardax.nn.parameters import check_epsilon

NORMS = ("rms", "rms_offset", "layer", "layer_offset", "layer_unbiased")
PLACEMENTS = ("pre", "post", "sandwich", "after")


@dataclass(frozen=True)
class NormConfig(ConfigPart):
    """Kind and places of the norms of layers.

    Attributes:
        kind: ``"rms"``, ``"rms_offset"`` (the scale is added to 1), ``"layer"``,
            ``"layer_offset"`` or ``"layer_unbiased"`` (without a bias).
        placement: ``"pre"``, ``"post"``, ``"sandwich"`` or ``"after"``.
        epsilon: Added to mean squares before dividing by their root.
        first: Whether the first layer has a norm before attention.
        shared: Whether a parallel layer has one norm for attention and MLP.

    Raises:
        LayerConfigError: If the kind or the placement is another, or the epsilon negative.

    Example:
        >>> import shardax as sx
        >>> norms = sx.models.NormConfig(kind="layer", placement="post")
        >>> config = sx.models.TransformerConfig(num_layers=1, norms=norms)
        >>> layer = sx.models.Transformer(config, rngs=sx.Rngs(0)).layers[0]
        >>> layer.attn_norm is None, type(layer.attn_post_norm).__name__
        (True, 'LayerNorm')
    """

    kind: str = "rms"
    placement: str = "pre"
    epsilon: float = 1e-6
    first: bool = True
    shared: bool = False

    def __post_init__(self) -> None:
        options = Options(LayerConfigError, type(self).__name__)
        options.choice("kind", self.kind, NORMS)
        options.choice("placement", self.placement, PLACEMENTS)
        check_epsilon(type(self).__name__, self.epsilon, "epsilon")
