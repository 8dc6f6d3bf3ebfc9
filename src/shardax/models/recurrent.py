# SPDX-License-Identifier: Apache-2.0
"""Recurrent mixers of a transformer's layers, in place of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from shardax._core.init.rng import Rngs
from shardax.models.norms import dtypes
from shardax.nn.mixers.convolution import ShortConvolution
from shardax.nn.parameters import as_size


@dataclass(frozen=True)
class ShortConvolutionConfig:
    """The sizes of ``nn.ShortConvolution`` as layers have it.

    Attributes:
        size: How many positions the kernel reads.
        use_bias: Whether it has biases.

    Raises:
        LayerConfigError: If the size is not positive.

    Example:
        >>> import shardax as sx
        >>> mixer = sx.models.ShortConvolutionConfig(size=4)
        >>> config = sx.models.TransformerConfig(recurrent=mixer, recurrent_layers=(True, False))
        >>> type(sx.models.Transformer(config, rngs=sx.Rngs(0)).layers[0].mixer).__name__
        'ShortConvolution'
    """

    size: int = 3
    use_bias: bool = False
    kind: ClassVar[type] = ShortConvolution

    def __post_init__(self) -> None:
        as_size(type(self).__name__, "size", self.size)

    def make(self, config: Any, rngs: Rngs | None) -> ShortConvolution:
        """Makes the mixer of a layer.

        Args:
            config: The ``TransformerConfig``.
            rngs: Random streams.

        Returns:
            The mixer.
        """
        options = {"size": self.size, "use_bias": self.use_bias, **dtypes(config)}
        return ShortConvolution(config.embed_dim, rngs=rngs, **options)

    @classmethod
    def of(cls, mixer: Any) -> ShortConvolutionConfig:
        """Reads the sizes of a mixer.

        Args:
            mixer: The mixer.

        Returns:
            Its config.
        """
        return cls(size=mixer.size, use_bias=mixer.bias is not None)


RecurrentConfig = ShortConvolutionConfig
RECURRENT = {kind.kind: kind for kind in (ShortConvolutionConfig,)}
"""The config of each mixer, by its class."""
