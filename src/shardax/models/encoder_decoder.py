# SPDX-License-Identifier: Apache-2.0
"""An encoder of inputs, and a decoder that reads its states.

    states = encoder(inputs)                               (batch, input time, embed)
    logits = decoder(tokens, states)                       (batch, time, vocab)

Both are a ``Transformer``. The decoder's layers have cross-attention: between attention and MLP
each reads the states. Of a context that is in a cache, keys and values are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax

from shardax import Module, Rngs
from shardax.extend import Options
from shardax.models.config.transformer import TransformerConfig
from shardax.models.convnext import ConvNeXt, ConvNeXtConfig
from shardax.models.dual_encoder import TOWERS, DualEncoder, DualEncoderConfig
from shardax.models.generating.config import GenerationConfig
from shardax.models.transformer import Transformer
from shardax.models.words import refuses_other_words
from shardax.nn.arithmetic import as_array
from shardax.nn.errors import LayerConfigError

# The parts, by their names in a model and in its config.
HALVES = ("encoder", "decoder")
_OPTIONS = Options(LayerConfigError, "EncoderDecoderConfig")


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """Sizes and parts of an ``EncoderDecoder``.

    Attributes:
        encoder: What reads the inputs.
        decoder: What writes.
        start_token: The token that a text begins with, unless it has a beginning; None for none.
        source: The ``config.json`` that it was read from, as text.

    Raises:
        LayerConfigError: If the encoder has a head or is causal, the decoder has no cross-attention
            or is not causal, or their sizes differ.

    Example:
        >>> import shardax as sx
        >>> encoder = sx.models.TransformerConfig(num_layers=1, causal=False, head=None)
        >>> attention = sx.models.AttentionConfig(cross_attention=True)
        >>> decoder = sx.models.TransformerConfig(num_layers=1, attention=attention)
        >>> sx.models.EncoderDecoderConfig(encoder, decoder, start_token=0).num_layers
        2
    """

    encoder: TransformerConfig
    decoder: TransformerConfig
    start_token: int | None = None
    source: str | None = None

    # As of a Transformer.
    causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        encoder, decoder = self.encoder, self.decoder
        for name, value, expected in (
            ("encoder.head", encoder.head, None),
            ("encoder.causal", encoder.causal, False),
            ("encoder.attention.cross_attention", encoder.attention.cross_attention, False),
            ("decoder.causal", decoder.causal, True),
            ("decoder.attention.cross_attention", decoder.attention.cross_attention, True),
            ("decoder.embed_dim", decoder.embed_dim, encoder.embed_dim),
            *(
                []
                if encoder.image or encoder.features
                else [("decoder.vocab_size", decoder.vocab_size, encoder.vocab_size)]
            ),
        ):
            _OPTIONS.check(name, value, value == expected, repr(expected))

        if self.start_token is not None and not 0 <= self.start_token < decoder.vocab_size:
            raise LayerConfigError(
                f"EncoderDecoderConfig has start_token={self.start_token!r}, but tokens are from 0 "
                f"to {decoder.vocab_size - 1}."
            )

    @property
    def num_layers(self) -> int:
        """Number of layers of both halves."""
        return self.encoder.num_layers + self.decoder.num_layers

    @property
    def head(self) -> str | None:
        """The head of the decoder."""
        return self.decoder.head

    @property
    def tied_head(self) -> bool:
        """Whether that head is the transposed embedding."""
        return self.decoder.output.tied

    @property
    def max_positions(self) -> int:
        """Number of learned positions of the decoder that tokens can have."""
        positions = self.decoder.positions
        return positions.max_positions - positions.offset


class EncoderDecoder(Module):
    """An encoder and a decoder that reads its states.

    Where both read tokens, they share one embedding.

    Args:
        config: The sizes and parts of both.
        rngs: Random streams; ``params`` is used, and ``dropout`` if the config asks for it.

    Attributes:
        encoder: The ``Transformer`` of the inputs.
        decoder: The ``Transformer`` of what is written, with cross-attention.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> encoder = sx.models.TransformerConfig(num_layers=1, causal=False, head=None)
        >>> attention = sx.models.AttentionConfig(cross_attention=True)
        >>> decoder = sx.models.TransformerConfig(num_layers=1, attention=attention)
        >>> config = sx.models.EncoderDecoderConfig(encoder, decoder, start_token=0)
        >>> model = sx.models.EncoderDecoder(config, rngs=sx.Rngs(0))
        >>> model(jnp.zeros((2, 7), int), jnp.zeros((2, 5), int)).shape
        (2, 5, 256)
    """

    def __init__(self, config: EncoderDecoderConfig, *, rngs: Rngs) -> None:
        self.config = config
        self.encoder = Transformer(config.encoder, rngs=rngs)
        self.decoder = Transformer(config.decoder, rngs=rngs)
        if self.encoder.embed is not None:
            self.decoder.embed = self.encoder.embed

    # What texts begin and end with, read by ``from_pretrained``.
    generation_config: GenerationConfig | None = None

    @refuses_other_words("call")
    def __call__(
        self, inputs: Any, tokens: Any, *, input_mask: Any = None, mask: Any = None
    ) -> jax.Array:
        """Computes the logits of the tokens.

        Args:
            inputs: Integers of shape (batch, input time); of an encoder of features, numbers of
                shape (batch, 2 * max_positions, feature_size), without a mask.
            tokens: Integers of shape (batch, time), what is written so far.
            input_mask: Booleans of the shape of the inputs, True for real ones; None for all.
            mask: Likewise of the tokens.

        Returns:
            Logits of shape (batch, time, vocab_size), in the compute dtype; without a head, (batch,
            time, embed).

        Raises:
            LayerInputError: As each half raises it.
        """
        states = self.encode(inputs, mask=input_mask)
        return self.decode(tokens, states, context_mask=input_mask, mask=mask)

    def encode(self, inputs: Any, *, mask: Any = None) -> jax.Array:
        """Computes the states that the decoder reads.

        Args:
            inputs: As for a call.
            mask: Booleans of their shape, True for real ones; None for all.

        Returns:
            Shape (batch, input time, embed).

        Raises:
            LayerInputError: As the encoder raises it.
        """
        return self.encoder(as_array(inputs), mask=mask)

    def decode(
        self,
        tokens: Any,
        context: Any = None,
        *,
        context_mask: Any = None,
        mask: Any = None,
        cache: Any = None,
    ) -> jax.Array:
        """Computes the logits of tokens.

        Args:
            tokens: As for a call.
            context: What ``encode`` returned; None for that which an earlier call wrote to the
                cache.
            context_mask: Booleans of shape (batch, input time), True for what of it is real.
            mask: Booleans of the shape of the tokens, True for real ones; None for all.
            cache: What ``make_cache`` returned, which is written.

        Returns:
            As a call.

        Raises:
            LayerInputError: As the decoder raises it; if there is neither a context nor a cache.
        """
        options = {"context": context, "context_mask": context_mask}
        return self.decoder(tokens, mask=mask, cache=cache, **options)

    def make_cache(
        self,
        batch: int,
        length: int,
        dtype: jax.typing.DTypeLike | None = None,
        *,
        input_length: int,
    ) -> Any:
        """Makes a lazy cache of the decoder, for tokens and states.

        Args:
            batch: How many rows.
            length: How many tokens a row holds.
            dtype: Dtype of keys and values, as for ``Transformer.make_cache``.
            input_length: How many states a row holds.

        Returns:
            As ``Transformer.make_cache``.

        Raises:
            LayerConfigError: If there is no cache of the dtype.
        """
        return self.decoder.make_cache(batch, length, dtype, context_length=input_length)


ModelConfig = TransformerConfig | DualEncoderConfig | EncoderDecoderConfig | ConvNeXtConfig


def names_of_parts(model: object) -> tuple[str, ...]:
    """Returns the names of the Transformers that a model, or its config, is made of."""
    if isinstance(model, (DualEncoder, DualEncoderConfig)):
        return TOWERS
    return HALVES if isinstance(model, (EncoderDecoder, EncoderDecoderConfig)) else ()


def build_model(config: Any, settings: Mapping[str, Any], rngs: Rngs) -> Any:
    """Builds the model of a config, with settings of computing."""
    if isinstance(config, ConvNeXtConfig):
        unread = {name: settings[name] for name in ("scan_layers", "remat") if settings.get(name)}
        if unread:
            raise LayerConfigError(
                f"ConvNeXt has no {' and no '.join(unread)}: its stages differ in width. Leave "
                f"{'it' if len(unread) == 1 else 'them'} out."
            )
        kinds = {name: settings[name] for name in ("dtype", "param_dtype") if name in settings}
        return ConvNeXt(replace(config, **kinds), rngs=rngs)

    parts = names_of_parts(config)
    if not parts:
        return Transformer(replace(config, **settings), rngs=rngs)

    model: Any = DualEncoder if isinstance(config, DualEncoderConfig) else EncoderDecoder
    changes: Any = {name: replace(getattr(config, name), **settings) for name in parts}
    return model(replace(config, **changes), rngs=rngs)
