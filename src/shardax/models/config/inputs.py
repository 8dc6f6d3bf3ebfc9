# SPDX-License-Identifier: Apache-2.0
"""Configs of the inputs of a model: tokens, positions, images and features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardax.extend import Options
from shardax.models.config.checks import check_rate
from shardax.models.config.paths import ConfigPart
from shardax.nn.errors import LayerConfigError
from shardax.nn.parameters import as_size


@dataclass(frozen=True)
class EmbeddingConfig(ConfigPart):
    """Size, factor and norm of the embedding.

    Attributes:
        dim: Size of embeddings that a linear layer makes ``embed_dim`` of; 0 for that size.
        scale: Multiplies the embedding.
        norm: Whether it is normalised.
        token_types: Number of kinds of tokens that have an embedding.
        dropout: Rate of dropout on it, while training.

    Raises:
        LayerConfigError: If the rate is not from 0 up to 1.

    Example:
        >>> import shardax as sx
        >>> embedding = sx.models.EmbeddingConfig(dim=8, norm=True)
        >>> config = sx.models.TransformerConfig(num_layers=1, embedding=embedding)
        >>> sx.models.Transformer(config, rngs=sx.Rngs(0)).embed_projection.kernel.shape
        (8, 64)
    """

    dim: int = 0
    scale: float | None = None
    norm: bool = False
    token_types: int = 0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_rate(Options(LayerConfigError, type(self).__name__), "dropout", self.dropout)


@dataclass(frozen=True)
class PositionsConfig(ConfigPart):
    """Learned positions, and learned biases of distances.

    Rotary positions are of attention.

    Attributes:
        max_positions: Number of learned positions; 0 for none.
        offset: Rows of the learned positions before that of the first token.
        pad_token: A token of padding: it has the learned position of its number, and the others
            are counted behind it, without padding. -1 for positions that count from row 0.
        relative_buckets: Number of learned distances, whose biases are added to the scores of all
            layers; 0 for none. If causal, all of them are for positions behind.
        farthest_distance: Distance from which on all positions share the last bucket.

    Raises:
        LayerConfigError: If the offset is no row, or the buckets are odd or fewer than four.

    Example:
        >>> import shardax as sx
        >>> positions = sx.models.PositionsConfig(max_positions=32)
        >>> config = sx.models.TransformerConfig(num_layers=1, positions=positions)
        >>> sx.models.Transformer(config, rngs=sx.Rngs(0)).positions.embedding.shape
        (32, 64)
    """

    max_positions: int = 0
    offset: int = 0
    pad_token: int = -1
    relative_buckets: int = 0
    farthest_distance: int = 128

    def __post_init__(self) -> None:
        options = Options(LayerConfigError, type(self).__name__)
        fits = 0 <= self.offset <= self.max_positions
        options.check("offset", self.offset, fits, "within max_positions")
        options.check("pad_token", self.pad_token, self.pad_token >= -1, "a token, or -1")
        if self.relative_buckets:
            even = self.relative_buckets >= 4 and self.relative_buckets % 2 == 0
            options.check("relative_buckets", self.relative_buckets, even, "even and at least 4")


@dataclass(frozen=True)
class ImageConfig(ConfigPart):
    """Sizes of images and of their patches.

    Attributes:
        size: Height and width of images.
        patch_size: Height and width of the patches.
        channels: Channels of images.
        patch_bias: Whether the map from patches to embeddings has a bias.
        first_vector: Whether a learned vector stands before the patches.
        mask_patch: Whether there is a learned vector that hides a patch, in pretraining only.

    Raises:
        LayerConfigError: If a size is not positive, or a patch is larger than an image.

    Example:
        >>> import shardax as sx
        >>> config = sx.models.TransformerConfig(
        ...     num_layers=1,
        ...     causal=False,
        ...     head=None,
        ...     image=sx.models.ImageConfig(size=8, patch_size=4),
        ...     positions=sx.models.PositionsConfig(max_positions=5),
        ... )
        >>> sx.models.Transformer(config, rngs=sx.Rngs(0)).patches.kernel.shape
        (4, 4, 3, 64)
    """

    size: int
    patch_size: int
    channels: int = 3
    patch_bias: bool = True
    first_vector: bool = True
    mask_patch: bool = False
    absent: ClassVar = {"size": 0, "patch_size": 0}

    def __post_init__(self) -> None:
        where = type(self).__name__
        as_size(where, "size", self.size)
        fits = 0 < self.patch_size <= self.size
        options = Options(LayerConfigError, where)
        options.check("patch_size", self.patch_size, fits, f"from 1 up to {self.size}")


@dataclass(frozen=True)
class FeaturesConfig(ConfigPart):
    """Frames of features, such as of sound, in place of tokens.

    Two convolutions make one position of two frames, so a model reads ``2 * max_positions``.

    Attributes:
        size: Size of a frame.

    Raises:
        LayerConfigError: If the size is not positive.

    Example:
        >>> import shardax as sx
        >>> config = sx.models.TransformerConfig(
        ...     num_layers=1,
        ...     causal=False,
        ...     head=None,
        ...     features=sx.models.FeaturesConfig(size=10),
        ...     positions=sx.models.PositionsConfig(max_positions=6),
        ... )
        >>> sx.models.Transformer(config, rngs=sx.Rngs(0)).frames.conv1.kernel.shape
        (3, 10, 64)
    """

    size: int
    absent: ClassVar = {"size": 0}

    def __post_init__(self) -> None:
        as_size(type(self).__name__, "size", self.size)
