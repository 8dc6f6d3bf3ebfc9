# SPDX-License-Identifier: Apache-2.0
"""Convolutional networks of stages with blocks like those of a transformer.

    block(x) = x + scale * down(activation(up(norm(depthwise convolution(x)))))

A stage halves the height and width of the one before, and has a width of its own (Liu et al., "A
ConvNet for the 2020s", 2022). The second version has no scale, but normalizes the responses of the
hidden layer over an image (Woo et al., "ConvNeXt V2", 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from shardax import List, Module, Rngs
from shardax.extend import Options, align
from shardax.models.config.checks import dtype_name, dtypes
from shardax.models.layers.activations import ACTIVATIONS, find_activation
from shardax.nn.arithmetic import add_bias, as_array, at_least_float32
from shardax.nn.conv import Conv
from shardax.nn.errors import LayerConfigError
from shardax.nn.linear import Linear
from shardax.nn.normalization import LayerNorm
from shardax.nn.parameters import as_size, check_epsilon, make_parameter, ones, refuse_input, zeros

# Of all norms but the last one.
_EPSILON = 1e-6


@dataclass(frozen=True)
class ConvNeXtConfig:
    """Sizes and parts of a ``ConvNeXt``.

    Attributes:
        widths: Number of channels of each stage.
        depths: Number of blocks of each stage.
        patch_size: Height and width of the patches that the first stage sees.
        channels: Number of channels of an image.
        activation: Function of the hidden layers, by name.
        layer_scale: Whether what a block adds is scaled.
        response_norm: Whether the responses of hidden layers are normalized.
        norm_epsilon: That of the last norm, of what is pooled.
        head: ``"classes"``, or None for the features of the last stage.
        num_classes: Number of classes.
        dtype: Compute dtype.
        param_dtype: Dtype of the parameters.
        source: The ``config.json`` that it was read from, as text.

    Raises:
        LayerConfigError: If a size is not positive, there is not one depth for each width, the head
            or the activation is unknown, or a dtype is none.

    Example:
        >>> import shardax as sx
        >>> sx.models.ConvNeXtConfig(widths=(8, 16), depths=(1, 2), head=None).num_layers
        3
    """

    widths: tuple[int, ...] = (96, 192, 384, 768)
    depths: tuple[int, ...] = (3, 3, 9, 3)
    patch_size: int = 4
    channels: int = 3
    activation: str = "exact_gelu"
    layer_scale: bool = True
    response_norm: bool = False
    norm_epsilon: float = 1e-12
    head: str | None = "classes"
    num_classes: int = 1000
    dtype: str = "float32"
    param_dtype: str = "float32"
    source: str | None = None

    # As of a Transformer that is no language model.
    causal: ClassVar[bool] = False
    tied_head: ClassVar[bool] = False

    def __post_init__(self) -> None:
        where = type(self).__name__
        options = Options(LayerConfigError, where)
        sizes = {"patch_size": self.patch_size, "channels": self.channels}
        if self.head is not None:
            sizes["num_classes"] = self.num_classes
        for name in ("widths", "depths"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            sizes |= {f"{name}[{i}]": size for i, size in enumerate(getattr(self, name))}

        for name, size in sizes.items():
            as_size(where, name, size)

        fits = len(self.widths) == len(self.depths) > 0
        options.check("depths", self.depths, fits, f"of as many stages as widths={self.widths}")
        options.choice("head", self.head, (None, "classes"))
        check_epsilon(where, self.norm_epsilon, "norm_epsilon")
        fits = self.activation in ACTIVATIONS or hasattr(jax.nn, self.activation)
        options.check("activation", self.activation, fits, "the name of a function of jax.nn")

        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, dtype_name(where, name, getattr(self, name)))

    @property
    def num_layers(self) -> int:
        """Number of blocks of all stages."""
        return sum(self.depths)


class ConvNeXt(Module):
    """Stages of convolutional blocks, for images.

    Args:
        config: The sizes and parts.
        rngs: Random streams; ``params`` is used.

    Attributes:
        patches: ``Conv`` that embeds patches.
        patch_norm: ``LayerNorm`` of them.
        stages: The stages; each has ``blocks``, and all but the first ``norm`` and ``reduction``, a
            ``Conv`` of two by two positions to one.
        final_norm: ``LayerNorm`` of what is pooled.
        head: ``Linear`` to the classes, or None.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> config = sx.models.ConvNeXtConfig(widths=(8, 16), depths=(1, 1), num_classes=5)
        >>> model = sx.models.ConvNeXt(config, rngs=sx.Rngs(0))
        >>> model(jnp.ones((2, 16, 16, 3))).shape
        (2, 5)
    """

    def __init__(self, config: ConvNeXtConfig, *, rngs: Rngs) -> None:
        self.config = config
        options = dtypes(config)
        first, last, side = config.widths[0], config.widths[-1], config.patch_size

        self.patches = Conv(
            config.channels,
            first,
            (side, side),
            strides=(side, side),
            padding="VALID",
            kernel_axes=(None, None, None, "embed"),
            rngs=rngs,
            **options,
        )
        self.patch_norm = LayerNorm(first, epsilon=_EPSILON, **options)

        self.stages = List([ConvNeXtStage(config, i, rngs=rngs) for i in range(len(config.widths))])
        self.final_norm = LayerNorm(last, epsilon=config.norm_epsilon, **options)
        classes = None
        if config.head is not None:
            names = ("embed", None)
            classes = Linear(last, config.num_classes, kernel_axes=names, rngs=rngs, **options)
        self.head = classes

    def __call__(self, images: Any) -> jax.Array:
        """Computes the logits of images.

        Args:
            images: Shape (batch, height, width, channels). What is left beside whole patches is not
                read, as all strides begin at the first row and column.

        Returns:
            Logits of shape (batch, num_classes), in the compute dtype; without a head the features
            of the last stage, (batch, rows, columns, width).

        Raises:
            LayerInputError: If the images have another shape, or are too small for all stages.
        """
        config, images = self.config, as_array(images)
        least = config.patch_size * 2 ** (len(config.widths) - 1)
        if images.ndim != 4 or images.shape[3] != config.channels or min(images.shape[1:3]) < least:
            refuse_input(
                type(self).__name__,
                f"images of shape (batch, height, width, {config.channels}), of at least {least} "
                f"rows and columns",
                images,
                "Channels are last: images.transpose(0, 2, 3, 1) of PyTorch's.",
            )
        x = self.patch_norm(self.patches(images))
        for stage in self.stages:
            x = stage(x)
        return x if self.head is None else self.head(self.pool(x))

    def pool(self, hidden: jax.Array) -> jax.Array:
        """Makes one vector of an image, the norm of its mean.

        Args:
            hidden: Shape (batch, rows, columns, width): what a model without a head returns.

        Returns:
            Shape (batch, width).

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> config = sx.models.ConvNeXtConfig(widths=(8,), depths=(1,), head=None)
            >>> model = sx.models.ConvNeXt(config, rngs=sx.Rngs(0))
            >>> model.pool(model(jnp.ones((2, 8, 8, 3)))).shape
            (2, 8)
        """
        wide = hidden.astype(at_least_float32(hidden.dtype))
        return self.final_norm(jnp.mean(wide, axis=(1, 2)).astype(hidden.dtype))


class ConvNeXtStage(Module):
    """Blocks of one width, behind a reduction but in the first stage."""

    def __init__(self, config: ConvNeXtConfig, index: int, *, rngs: Rngs) -> None:
        width, norm, reduction = config.widths[index], None, None
        if index > 0:
            before, options = config.widths[index - 1], dtypes(config)
            norm = LayerNorm(before, epsilon=_EPSILON, **options)
            reduction = Conv(
                before,
                width,
                (2, 2),
                strides=(2, 2),
                padding="VALID",
                kernel_axes=(None, None, None, "embed"),
                rngs=rngs,
                **options,
            )

        self.norm, self.reduction = norm, reduction
        self.blocks = List(
            [ConvNeXtBlock(config, width, rngs=rngs) for _ in range(config.depths[index])]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.norm is not None and self.reduction is not None:
            x = self.reduction(self.norm(x))
        for block in self.blocks:
            x = block(x)
        return x


class ConvNeXtBlock(Module):
    """A depthwise convolution and a feed-forward layer, beside what they read."""

    def __init__(self, config: ConvNeXtConfig, width: int, *, rngs: Rngs) -> None:
        hidden, options = 4 * width, dtypes(config)
        self.conv = Conv(
            width,
            width,
            (7, 7),
            padding=3,
            groups=width,
            # A kernel of groups stays whole, as XLA does not split it.
            kernel_axes=(None, None, None, None),
            rngs=rngs,
            **options,
        )

        self.norm = LayerNorm(width, epsilon=_EPSILON, **options)
        self.up = Linear(width, hidden, kernel_axes=("embed", "mlp"), rngs=rngs, **options)
        self.activation = config.activation
        self.responses = ResponseNorm(hidden, config) if config.response_norm else None
        self.down = Linear(hidden, width, kernel_axes=("mlp", "embed"), rngs=rngs, **options)

        scale = (ones, (width,), config.param_dtype, ("embed",), None)
        self.scale = make_parameter(*scale) if config.layer_scale else None

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = find_activation(self.activation)(self.up(self.norm(self.conv(x))))
        y = self.down(hidden if self.responses is None else self.responses(hidden))
        return x + (y if self.scale is None else _scaled(y, self.scale))


class ResponseNorm(Module):
    """Scales channels by their norms over an image."""

    def __init__(self, features: int, config: ConvNeXtConfig) -> None:
        shape, dtype, names = (features,), config.param_dtype, ("mlp",)
        self.scale = make_parameter(zeros, shape, dtype, names, None)
        self.bias = make_parameter(zeros, shape, dtype, names, None)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(at_least_float32(x.dtype))
        norms = jnp.sqrt(jnp.sum(jnp.square(wide), axis=(1, 2), keepdims=True))
        relative = norms / (jnp.mean(norms, axis=-1, keepdims=True) + 1e-6)
        normed = (wide * relative).astype(x.dtype)
        return add_bias(_scaled(normed, self.scale), self.bias.value) + x


def _scaled(x: jax.Array, scale: Any) -> jax.Array:
    aligned = align(scale.value.astype(x.dtype), x, (x.ndim - 1,))
    return x * jax.lax.expand_dims(aligned, range(x.ndim - 1))
