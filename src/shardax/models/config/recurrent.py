# SPDX-License-Identifier: Apache-2.0
"""Configs of recurrent layers and of their mixers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from shardax import Rngs
from shardax.extend import Options
from shardax.models.config.checks import dtypes
from shardax.models.config.paths import ConfigPart
from shardax.models.layers.activations import ACTIVATIONS
from shardax.nn.errors import LayerConfigError
from shardax.nn.mixers.convolution import ShortConvolution
from shardax.nn.mixers.delta import GatedDeltaNet
from shardax.nn.mixers.state_space import StateSpaceMixer
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
        >>> recurrence = sx.models.RecurrenceConfig(mixer, layers=(True, False))
        >>> config = sx.models.TransformerConfig(recurrence=recurrence)
        >>> type(sx.models.Transformer(config, rngs=sx.Rngs(0)).layers[0].mixer).__name__
        'ShortConvolution'
    """

    size: int = 3
    use_bias: bool = False

    def __post_init__(self) -> None:
        as_size(type(self).__name__, "size", self.size)

    def make(self, config: Any, rngs: Rngs) -> ShortConvolution:
        """Makes the mixer of a layer.

        Args:
            config: The ``TransformerConfig``.
            rngs: Random streams.

        Returns:
            The mixer.
        """
        return ShortConvolution(
            config.embed_dim, size=self.size, use_bias=self.use_bias, rngs=rngs, **dtypes(config)
        )


@dataclass(frozen=True)
class StateSpaceConfig:
    """The sizes of ``nn.StateSpaceMixer`` as layers have it.

    Attributes:
        num_heads: Number of heads.
        head_dim: Size of a head's values.
        state_dim: Number of components of a head's state.
        num_groups: Number of groups of heads.
        size: How many positions the convolution reads.
        chunk: How many positions are computed together.
        step_limits: Bounds of the steps.
        activation: Function behind the convolution, by name.
        use_bias: Whether the projections have biases.
        out_bias: Whether that of the result has one; None for as ``use_bias``.
        conv_bias: Whether the convolution has biases.
        gate_norm: Where the norm stands: ``"behind"`` the gate, ``"before"`` it, or None.
        scales: Factors of the projections.

    Raises:
        LayerConfigError: If a size is not positive, groups do not divide heads, or an option is
            none of those of ``nn.StateSpaceMixer``.

    Example:
        >>> import shardax as sx
        >>> mixer = sx.models.StateSpaceConfig(num_heads=8, head_dim=16, state_dim=4)
        >>> recurrence = sx.models.RecurrenceConfig(mixer)
        >>> config = sx.models.TransformerConfig(recurrence=recurrence, mlp=None)
        >>> layer = sx.models.Transformer(config, rngs=sx.Rngs(0)).layers[0]
        >>> type(layer.mixer).__name__, layer.mlp is None
        ('StateSpaceMixer', True)
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int = 1
    size: int = 4
    chunk: int = 256
    step_limits: tuple[float, float] = (0.0, math.inf)
    activation: str = "silu"
    use_bias: bool = False
    out_bias: bool | None = None
    conv_bias: bool = True
    gate_norm: str | None = "behind"
    scales: tuple[float, ...] = (1.0,) * 5

    def __post_init__(self) -> None:
        if self.out_bias is None:
            object.__setattr__(self, "out_bias", self.use_bias)
        self._mixer(1, Rngs(0))

    def make(self, config: Any, rngs: Rngs) -> StateSpaceMixer:
        """Makes the mixer of a layer.

        Args:
            config: The ``TransformerConfig``.
            rngs: Random streams.

        Returns:
            The mixer.
        """
        options = {"norm_epsilon": config.norms.epsilon, **dtypes(config)}
        return self._mixer(config.embed_dim, rngs, **options)

    def _mixer(self, features: int, rngs: Rngs, **options: Any) -> StateSpaceMixer:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["activation"] = ACTIVATIONS.get(self.activation, self.activation)
        return StateSpaceMixer(features, rngs=rngs, **values, **options)


@dataclass(frozen=True)
class GatedDeltaConfig:
    """The sizes of ``nn.GatedDeltaNet`` in a model's layers.

    Its activation is that of the model.

    Attributes:
        num_heads: Heads of queries and keys.
        head_dim: Size of a head of queries and keys.
        num_value_heads: Heads of values, a multiple of ``num_heads``.
        value_dim: Size of a head of values.
        size: How many positions the convolution reads.
        chunk: How many positions are computed together.

    Raises:
        LayerConfigError: If a size is not positive, or heads of values are no multiple of the
            others.

    Example:
        >>> import shardax as sx
        >>> mixer = sx.models.GatedDeltaConfig(2, 16, num_value_heads=4, value_dim=16)
        >>> recurrence = sx.models.RecurrenceConfig(mixer, layers=(True, False))
        >>> config = sx.models.TransformerConfig(recurrence=recurrence)
        >>> type(sx.models.Transformer(config, rngs=sx.Rngs(0)).layers[0].mixer).__name__
        'GatedDeltaNet'
    """

    num_heads: int
    head_dim: int
    num_value_heads: int
    value_dim: int
    size: int = 4
    chunk: int = 64

    def __post_init__(self) -> None:
        GatedDeltaNet(1, rngs=Rngs(0), **vars(self))

    def make(self, config: Any, rngs: Rngs) -> GatedDeltaNet:
        """Makes the mixer of a layer.

        Args:
            config: The ``TransformerConfig``.
            rngs: Random streams.

        Returns:
            The mixer.
        """
        activation = ACTIVATIONS.get(config.activation, config.activation)
        options = {"activation": activation, "norm_epsilon": config.norms.epsilon, **dtypes(config)}
        return GatedDeltaNet(config.embed_dim, rngs=rngs, **vars(self), **options)


MixerConfig = ShortConvolutionConfig | StateSpaceConfig | GatedDeltaConfig


@dataclass(frozen=True)
class RecurrenceConfig(ConfigPart):
    """The recurrent mixer and its layers.

    Attributes:
        mixer: The mixer, by its config.
        layers: Which layers have it; None for all.
        beside: Whether these have attention too, which reads the same; what both return is added.
        in_scale: Multiplies what the mixer reads.
        out_scale: Multiplies what the mixer returns.

    Raises:
        LayerConfigError: If the mixer is no config of one.

    Example:
        >>> import shardax as sx
        >>> mixer = sx.models.ShortConvolutionConfig(size=4)
        >>> recurrence = sx.models.RecurrenceConfig(mixer, beside=True)
        >>> config = sx.models.TransformerConfig(num_layers=1, recurrence=recurrence)
        >>> layer = sx.models.Transformer(config, rngs=sx.Rngs(0)).layers[0]
        >>> type(layer.mixer).__name__, type(layer.attn).__name__
        ('ShortConvolution', 'MultiHeadAttention')
    """

    mixer: MixerConfig
    layers: tuple[bool, ...] | None = None
    beside: bool = False
    in_scale: float = 1.0
    out_scale: float = 1.0
    absent: ClassVar = {"mixer": None}

    def __post_init__(self) -> None:
        options = Options(LayerConfigError, type(self).__name__)
        options.instance("mixer", self.mixer, MixerConfig, "the config of a mixer")

    def in_layer(self, index: int) -> bool:
        """Returns whether a layer has the mixer.

        Args:
            index: Which layer.

        Returns:
            Whether it has.
        """
        return self.layers is None or self.layers[index]
