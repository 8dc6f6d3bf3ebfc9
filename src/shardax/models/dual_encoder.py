# SPDX-License-Identifier: Apache-2.0
"""An encoder of texts and one of images, whose vectors are compared.

    text = normalized(projection(pooled(text encoder(tokens))))          (texts, projection)
    image = normalized(projection(pooled(image encoder(images))))        (images, projection)
    logits = exp(scale) * image @ text.T + bias                          (images, texts)

CLIP (Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021)
has projections and no bias; SigLIP (Zhai et al., "Sigmoid Loss for Language Image Pre-Training",
2023) has a bias, and encoders that pool to vectors of one size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from shardax import Module, Rngs
from shardax.extend import gathered
from shardax.models.config.checks import dtypes
from shardax.models.config.transformer import TransformerConfig
from shardax.models.transformer import Transformer
from shardax.models.words import refuses_other_words
from shardax.nn.arithmetic import at_least_float32
from shardax.nn.errors import LayerConfigError
from shardax.nn.linear import Linear
from shardax.nn.parameters import make_parameter

# The encoders, by their names in a model and in its config.
TOWERS = ("text", "image")


@dataclass(frozen=True)
class DualEncoderConfig:
    """Sizes and parts of a ``DualEncoder``.

    Attributes:
        text: The encoder of texts.
        image: The encoder of images.
        projection_dim: Size of the vectors, to which both are projected; 0 without projections.
        logit_bias: Whether a learned number is added to the logits.
        source: The ``config.json`` that it was read from, as text.

    Raises:
        LayerConfigError: If an encoder has a head, one is of the other kind, or without projections
            they pool to different sizes.

    Example:
        >>> import shardax as sx
        >>> attention = sx.models.AttentionConfig(rope=None)
        >>> sizes = {"num_layers": 1, "head": None, "attention": attention}
        >>> text = sx.models.TransformerConfig(**sizes, pool=sx.models.PoolConfig(kind="last"))
        >>> image = sx.models.TransformerConfig(
        ...     **sizes,
        ...     causal=False,
        ...     image=sx.models.ImageConfig(size=8, patch_size=4),
        ...     positions=sx.models.PositionsConfig(max_positions=5),
        ... )
        >>> sx.models.DualEncoderConfig(text, image, projection_dim=16).logit_bias
        False
    """

    text: TransformerConfig
    image: TransformerConfig
    projection_dim: int = 0
    logit_bias: bool = False
    source: str | None = None

    # As of a Transformer that is no language model.
    head: ClassVar[None] = None
    causal: ClassVar[bool] = False
    tied_head: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in TOWERS:
            config = getattr(self, name)
            fits = config.head is None and (config.image is not None) == (name == "image")
            if not fits:
                kind = f"{name}s, without a head"
                raise LayerConfigError(
                    f"DualEncoderConfig needs {name} to be the config of an encoder of {kind}, but "
                    f"it has head={config.head!r} and image={config.image}."
                )

        sizes = [config.pool.dim or config.embed_dim for config in (self.text, self.image)]
        if self.projection_dim < 0 or (not self.projection_dim and sizes[0] != sizes[1]):
            raise LayerConfigError(
                f"DualEncoderConfig compares vectors of one size, but its encoders pool to "
                f"{sizes[0]} and {sizes[1]}, and projection_dim={self.projection_dim}. Project "
                f"them: projection_dim={sizes[0]}."
            )

    @property
    def num_layers(self) -> int:
        """Number of layers of both encoders."""
        return self.text.num_layers + self.image.num_layers


class DualEncoderOutput(NamedTuple):
    """What a ``DualEncoder`` returns.

    Attributes:
        logits_per_image: Shape (images, texts).
        logits_per_text: The same transposed.
        text_embeddings: Shape (texts, projection), of length 1.
        image_embeddings: Shape (images, projection), of length 1.

    Example:
        >>> import jax.numpy as jnp
        >>> logits = jnp.zeros((2, 3))
        >>> output = DualEncoderOutput(logits, logits.T, jnp.zeros((3, 4)), jnp.zeros((2, 4)))
        >>> output.logits_per_text.shape
        (3, 2)
    """

    logits_per_image: jax.Array
    logits_per_text: jax.Array
    text_embeddings: jax.Array
    image_embeddings: jax.Array


class DualEncoder(Module):
    """Encoders of texts and of images, whose vectors are compared.

    Args:
        config: The sizes and parts of both.
        rngs: Random streams; ``params`` is used.

    Attributes:
        text: The ``Transformer`` of texts.
        image: The ``Transformer`` of images.
        text_projection: ``Linear`` to the size of both, or None.
        image_projection: Likewise.
        logit_scale: Logarithm of the factor of the logits.
        logit_bias: A number that is added to them, or None.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> attention = sx.models.AttentionConfig(rope=None)
        >>> sizes = {"num_layers": 1, "head": None, "attention": attention}
        >>> text = sx.models.TransformerConfig(**sizes, pool=sx.models.PoolConfig(kind="last"))
        >>> image = sx.models.TransformerConfig(
        ...     **sizes,
        ...     causal=False,
        ...     image=sx.models.ImageConfig(size=8, patch_size=4),
        ...     positions=sx.models.PositionsConfig(max_positions=5),
        ... )
        >>> config = sx.models.DualEncoderConfig(text, image, projection_dim=16)
        >>> model = sx.models.DualEncoder(config, rngs=sx.Rngs(0))
        >>> output = model(jnp.zeros((3, 6), int), jnp.ones((2, 8, 8, 3)))
        >>> output.logits_per_image.shape, output.text_embeddings.shape
        ((2, 3), (3, 16))
    """

    def __init__(self, config: DualEncoderConfig, *, rngs: Rngs) -> None:
        self.config = config
        self.text = Transformer(config.text, rngs=rngs)
        self.image = Transformer(config.image, rngs=rngs)
        self.text_projection = _projection(config, config.text, rngs)
        self.image_projection = _projection(config, config.image, rngs)
        # The first values are those of the papers.
        scale, dtype = (10.0 if config.logit_bias else 1 / 0.07), config.text.param_dtype
        constant = jax.nn.initializers.constant
        self.logit_scale = make_parameter(constant(math.log(scale)), (), dtype, (), rngs)
        self.logit_bias = (
            make_parameter(constant(-10.0), (), dtype, (), rngs) if config.logit_bias else None
        )

    @refuses_other_words("call")
    def __call__(self, tokens: Any, images: Any, *, mask: Any = None) -> DualEncoderOutput:
        """Compares all images with all texts.

        Args:
            tokens: Integers of shape (texts, time).
            images: Shape (images, height, width, channels).
            mask: Booleans of the shape of the tokens, True for real ones; None for all.

        Returns:
            Logits and embeddings, in the compute dtype.

        Raises:
            LayerInputError: As an encoder raises it, and of a text without the token that it is
                pooled at; in a compiled program its embedding and logits are NaN.
        """
        text, image = self.encode_text(tokens, mask=mask), self.encode_images(images)
        # Rows stay where images are, and each device compares its own with all texts.
        logits = image @ gathered(text, 0).T * jnp.exp(self.logit_scale.value).astype(text.dtype)
        if self.logit_bias is not None:
            logits = logits + self.logit_bias.value.astype(logits.dtype)
        return DualEncoderOutput(logits, logits.T, text, image)

    def encode_text(self, tokens: Any, *, mask: Any = None) -> jax.Array:
        """Embeds texts.

        Args:
            tokens: As for a call.
            mask: As for a call.

        Returns:
            Vectors of length 1, shape (texts, projection).

        Raises:
            LayerInputError: As for a call.
        """
        pooled = self.text.pool(self.text(tokens, mask=mask), tokens, mask)
        return _normalized(pooled if self.text_projection is None else self.text_projection(pooled))

    def encode_images(self, images: Any) -> jax.Array:
        """Embeds images.

        Args:
            images: As for a call.

        Returns:
            Vectors of length 1, shape (images, projection).

        Raises:
            LayerInputError: If the images have another shape.
        """
        pooled = self.image.pool(self.image(images))
        projection = self.image_projection
        return _normalized(pooled if projection is None else projection(pooled))


def _projection(config: DualEncoderConfig, encoder: TransformerConfig, rngs: Rngs) -> Any:
    if not config.projection_dim:
        return None
    return Linear(
        encoder.pool.dim or encoder.embed_dim,
        config.projection_dim,
        use_bias=False,
        kernel_axes=("embed", None),
        rngs=rngs,
        **dtypes(encoder),
    )


def _normalized(x: jax.Array) -> jax.Array:
    wide = x.astype(at_least_float32(x.dtype))
    return (wide / jnp.linalg.norm(wide, axis=-1, keepdims=True)).astype(x.dtype)
