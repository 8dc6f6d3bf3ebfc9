# SPDX-License-Identifier: Apache-2.0
"""One transformer for all families: its parts are chosen by a config.

Layers may take turns: those with a window have their own rotary embedding, and those with experts
stand among those without.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shardax import Cache, List, Module, Rngs, iter_variables
from shardax.extend import Path
from shardax.models.config.checks import Dtypes, dtypes
from shardax.models.config.inputs import ImageConfig
from shardax.models.config.transformer import TransformerConfig
from shardax.models.generating.config import GenerationConfig
from shardax.models.layers.activation_layout import lay_out_activations
from shardax.models.layers.activations import find_activation
from shardax.models.layers.norms import make_norm
from shardax.models.layers.pooling import AttentionPooling, pool_states
from shardax.models.layers.transformer_layer import (
    BlockCache,
    FrameEmbedding,
    LayerCaches,
    TransformerBlock,
    TransformerLayer,
    make_mlp,
)
from shardax.models.words import refuses_other_words
from shardax.nn.arithmetic import add_bias, as_array
from shardax.nn.attention.cache import AttentionCache, ContextCache
from shardax.nn.attention.dot_product import bias_behind, distance_buckets
from shardax.nn.attention.latent import LatentCache
from shardax.nn.attention.multi_head import positions_within
from shardax.nn.dropout import Dropout
from shardax.nn.embedding import Embed, sinusoidal
from shardax.nn.errors import LayerConfigError, LayerInputError
from shardax.nn.linear import Linear
from shardax.nn.masks import as_mask
from shardax.nn.parameters import make_parameter, refuse_input, zeros
from shardax.nn.rope import PlacedRotation
from shardax.nn.stack import Stack, rematerialised


class Transformer(Module):
    """A transformer over tokens or images, its parts chosen by a config.

    Its parameters are lazy, and have axis names: ``sx.shard(model, mesh, sx.models.DECODER_RULES)``
    makes them where they belong.

    Args:
        config: Sizes and parts.
        rngs: Random streams; ``params`` is used, and ``dropout`` if the config asks for it.

    Attributes:
        config: The config.
        embed: The ``Embed`` of tokens, or None for images and features.
        layers: The layers: a list, or a ``Stack`` of them.
        rest: With scanned layers of several kinds, the layers left over; else None.
        final_norm: The norm before the head, or None.
        head: ``Linear`` from embed to logits, or None.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> model = Transformer(TransformerConfig(num_layers=1), rngs=sx.Rngs(0))
        >>> model(jnp.zeros((2, 8), int)).shape
        (2, 8, 256)
    """

    def __init__(self, config: Any, *, rngs: Rngs) -> None:
        self.config = config
        self._build(self._parts, rngs)

    @property
    def _parts(self) -> TransformerConfig:
        return getattr(self.config, "transformer", self.config)

    def _build(self, config: TransformerConfig, rngs: Rngs) -> None:
        options, embedding = dtypes(config), config.embedding
        size = embedding.dim or config.embed_dim

        self.embed: Any = None
        if config.image is not None:
            self._build_patches(config.image, config.embed_dim, rngs=rngs, **options)
        elif config.features is not None:
            self.frames = FrameEmbedding(config.features.size, size, rngs=rngs, **options)
        else:
            self.embed = Embed(config.vocab_size, size, rngs=rngs, **options)

        positions = config.positions
        for name, count in (
            ("positions", positions.max_positions),
            ("types", embedding.token_types),
        ):
            if count:
                names = ("position" if name == "positions" else None, "embed")
                first: Any = {} if config.features is None else {"embedding_init": _sines}
                setattr(self, name, Embed(count, size, axes=names, rngs=rngs, **options, **first))

        self.embed_norm = make_norm(config.norms, size, options) if embedding.norm else None
        if embedding.dim:
            names = (None, "embed")
            wide = Linear(size, config.embed_dim, kernel_axes=names, rngs=rngs, **options)
            self.embed_projection = wide
        if positions.relative_buckets:
            sizes = (positions.relative_buckets, config.attention.num_heads)
            self.distances = Embed(*sizes, axes=("bucket", "heads"), rngs=rngs, **options)
        self.embed_dropout = Dropout(embedding.dropout, rngs=rngs) if embedding.dropout else None

        self.layers, self.rest = self._make_layers(config, rngs)
        has_last_norm = config.norms.placement != "after"
        self.final_norm = (
            make_norm(config.norms, config.embed_dim, options) if has_last_norm else None
        )
        self.head: Any = None
        self._build_pool(config, rngs)
        self._build_head(config, rngs)

    def _build_patches(
        self, config: ImageConfig, size: int, *, rngs: Rngs, **dtypes: Unpack[Dtypes]
    ) -> None:
        self.patches = Linear(
            (config.patch_size, config.patch_size, config.channels),
            size,
            use_bias=config.patch_bias,
            kernel_axes=(None, None, None, "embed"),
            rngs=rngs,
            **dtypes,
        )
        vector = (zeros, (size,), dtypes["param_dtype"], ("embed",), None)
        if config.first_vector:
            self.first = make_parameter(*vector)
        if config.mask_patch:
            self.mask_patch = make_parameter(*vector)

    def _make_layer(self, index: int, rngs: Rngs):
        return TransformerLayer(self._parts, index, rngs=rngs)

    def _make_layers(self, config: TransformerConfig, rngs: Rngs) -> tuple[Any, Any]:
        period, count = config.period, config.num_layers
        if not config.scan_layers:
            return [self._make_layer(index, rngs) for index in range(count)], None
        if period == 1:
            return Stack(lambda: self._make_layer(0, rngs), count, remat=config.remat), None

        def make() -> TransformerBlock:
            return TransformerBlock([self._make_layer(index, rngs) for index in range(period)])

        stack = Stack(make, count // period, remat=config.remat)
        remaining = [self._make_layer(index, rngs) for index in range(count % period)]
        return stack, remaining or None

    def _build_pool(self, config: TransformerConfig, rngs: Rngs) -> None:
        size, pool, options = config.embed_dim, config.pool, dtypes(config)
        if pool.kind == "attention" and config.mlp is not None:
            mlp = make_mlp(config.mlp, size, activation=config.activation, rngs=rngs, **options)
            sizes = (size, config.attention.num_heads, config.norms)
            self.attention_pooling = AttentionPooling(*sizes, mlp, dtypes=options, rngs=rngs)
        if pool.dense:
            names = ("embed", None)
            self.pooler = Linear(size, pool.dim or size, kernel_axes=names, rngs=rngs, **options)

    def _build_head(self, config: TransformerConfig, rngs: Rngs) -> None:
        options, output, token_dim = dtypes(config), config.output, config.embedding.dim
        size = (config.pool.dense and config.pool.dim) or config.embed_dim

        # The vocabulary alone is split over a mesh: other heads are small.
        square = partial(Linear, kernel_axes=("embed", None), rngs=rngs, **options)
        if output.transform:
            read = token_dim if config.head == "tokens" and token_dim else size
            self.head_dense = square(size, read, use_bias=output.transform_bias)
            has_norm = output.transform_norm
            self.head_norm = make_norm(config.norms, read, options) if has_norm else None
            size = read

        # A vector of the first state and the mean is twice as long.
        if config.head not in (None, "tokens"):
            size = 2 * size if config.pool.kind == "first_and_mean" else size
            self.head = square(size, config.head_size, use_bias=config.head != "embedding")
        elif config.head == "tokens" and not output.tied:
            self.head = Linear(
                size,
                config.vocab_size,
                use_bias=output.bias,
                kernel_axes=("embed", "vocab"),
                rngs=rngs,
                **options,
            )
        elif config.head == "tokens" and output.bias:
            shape, names = (config.vocab_size,), ("vocab",)
            self.head_bias = make_parameter(zeros, shape, config.param_dtype, names, None)

    # What texts begin and end with, read by ``from_pretrained``.
    generation_config: GenerationConfig | None = None

    @refuses_other_words("call")
    def __call__(
        self,
        tokens: Any,
        *,
        mask: Any = None,
        positions: Any = None,
        cache: Any = None,
        token_types: Any = None,
        segment_ids: Any = None,
        context: Any = None,
        context_mask: Any = None,
    ) -> jax.Array:
        """Computes the logits.

        Args:
            tokens: Integers of shape (batch, time), or (time,); of a model of images, images of
                shape (batch, height, width, channels); of one of features, of shape (batch, 2 *
                max_positions, feature_size).
            mask: Booleans of shape (batch, time), True for real tokens; None for all.
            positions: Integers of shape (time,) or (batch, time); None counts from the first real
                token.
            cache: What ``make_cache`` returned, which is written.
            token_types: Integers of the shape of the tokens; None for zeros.
            segment_ids: Integers of the shape of the tokens, for rows packed of documents: a token
                reads its segment only, and positions count from its beginning. 0 is padding. A
                segment stands in one piece: behind each border positions, and states of
                recurrent layers, begin anew.
            context: Shape (batch, other time, embed), which a model with cross-attention reads;
                None for that which an earlier call wrote to the cache.
            context_mask: Booleans of shape (batch, other time), True for what of it is real; None
                for all.

        Returns:
            Logits of shape (batch, time, vocab_size), in the compute dtype; of the head
            ``"first"``, (batch, num_classes); of ``"each"``, (batch, time, num_classes); of
            ``"span"`` and ``"binary"``, two and one at each position; of ``"embedding"``,
            (batch, projection_dim); without a head, (batch, time, embed).

        Raises:
            LayerInputError: If the tokens are not integers of that rank, or images of that shape,
                or are more than ``max_positions``. In a compiled program that counts positions by a
                mask or a cache, those that are too many have NaN. If there is a context without
                cross-attention, or the reverse.
        """
        side_inputs = (mask, positions, cache, token_types, segment_ids, context, context_mask)
        states = self._states(as_array(tokens), *side_inputs)
        if self._parts.head in ("first", "embedding"):
            if segment_ids is not None and mask is None:
                mask = as_array(segment_ids) != 0
            states = self.pool(states, tokens, mask)
        return self._logits(states)

    def hidden_states(self, tokens: Any, **options: Any) -> jax.Array:
        """Computes the head's inputs.

        Times ``head_kernel`` it is the logits; see ``blockwise_cross_entropy``.

        Args:
            tokens: As for a call.
            **options: As for a call.

        Returns:
            Shape (batch, time, embed), in the compute dtype.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> model = Transformer(TransformerConfig(num_layers=1), rngs=sx.Rngs(0))
            >>> tokens = jnp.arange(18).reshape(2, 9)
            >>> hidden = model.hidden_states(tokens[:, :-1])
            >>> loss = sx.models.blockwise_cross_entropy(hidden, model.head_kernel, tokens[:, 1:])
            >>> hidden.shape, model.head_kernel.shape, loss.shape
            ((2, 8, 64), (64, 256), ())
        """
        return self._before_head(self._states(as_array(tokens), **options))

    @property
    def head_kernel(self) -> jax.Array:
        """Kernel (embed, vocab) of the head; if tied, the embedding transposed.

        Raises:
            LayerConfigError: If the logits are not a product with a kernel: a head of another kind,
                with a bias, a scale or a softcap, or replaced.
        """
        config, layer = self._parts, self.embed if self.head is None else self.head
        output = config.output

        is_plain = type(layer) is (Embed if self.head is None else Linear)
        for holds, why in (
            (config.head != "tokens", f"its head is {config.head!r}"),
            (not is_plain, f"its head is a {type(layer).__name__}"),
            (output.bias, "its head has a bias"),
            (output.scale is not None, "it has output.scale"),
            (output.softcap is not None, "it has output.softcap"),
        ):
            if holds:
                raise LayerConfigError(
                    f"The logits of this {type(self).__name__} are not hidden states times a "
                    f"kernel: {why}. Call the model, and cross_entropy on its logits."
                )

        return self.embed.embedding.value.T if self.head is None else self.head.kernel.value

    def _states(
        self,
        tokens: jax.Array,
        mask: object = None,
        positions: object = None,
        cache: object = None,
        token_types: object = None,
        segment_ids: object = None,
        context: Any = None,
        context_mask: Any = None,
    ) -> jax.Array:
        """Returns the outputs of the layers and the last norm."""
        self._check_context(context, context_mask, cache, segment_ids)
        if self.embed is None:
            has_frames = self._parts.features is not None
            embed = self._embed_frames if has_frames else self._embed_images
            if mask is not None:  # which nothing would read
                read = "features" if has_frames else "images"
                where = type(self).__name__
                refuse_input(where, f"{read} without a mask", tokens, "Leave it out.")
            return self._run(embed(tokens), {}, cache)

        if token_types is not None and not self._parts.embedding.token_types:
            raise LayerInputError(
                f"{type(self).__name__} has no token_types, but was given some: call it without."
            )
        if tokens.ndim not in (1, 2):
            where = type(self).__name__
            refuse_input(where, "tokens of shape (batch, time) or (time,)", tokens, "")

        if segment_ids is not None:
            segment_ids = as_array(segment_ids)
            positions = positions_within(segment_ids) if positions is None else positions
        options, positions = self._layer_options(tokens, mask, positions, cache)

        options |= {} if segment_ids is None else {"segment_ids": segment_ids}
        options |= {} if context is None else {"context": as_array(context)}
        if context_mask is not None:
            real = self._mask_of(context_mask, as_array(context).shape[:-1])
            options["context_mask"] = real[..., None, None, :]
        x = self._embed_tokens(tokens, positions, token_types)
        return self._run(x, options, cache)

    def _check_context(self, context, mask, cache, segment_ids) -> None:
        """Raises for a context that is missing, or that nothing reads."""
        name, hint = type(self).__name__, "sx.models.EncoderDecoder gives it the encoder's states."
        reads_context = self._parts.attention.cross_attention
        if reads_context and context is None and cache is None:
            raise LayerInputError(f"{name} reads a context, and was given none. {hint}")
        unread = not reads_context and context is not None
        if unread or (mask is not None and context is None):
            raise LayerInputError(
                f"{name} was given a context or its mask, and reads none. Call it without."
            )
        if reads_context and segment_ids is not None:
            raise LayerInputError(
                f"{name} with cross-attention takes no segment_ids, as each token would read the "
                f"context of all documents of its row. Give one document a row, with a mask."
            )

    def pool(self, hidden: jax.Array, tokens: Any = None, mask: Any = None) -> jax.Array:
        """Makes one vector of a sequence, as ``config.pool`` says.

        Args:
            hidden: Shape (batch, time, embed): what a model without a head returns.
            tokens: What the model was called with, of a model that pools by tokens.
            mask: Booleans of shape (batch, time), True for real tokens; None for all. For means.

        Returns:
            Shape (batch, embed), or (batch, pooler_dim).

        Raises:
            LayerInputError: If the position follows from tokens, and there are none, or a row has
                no such token; in a compiled program such a row has NaN.

        Example:
            >>> import jax.numpy as jnp, shardax as sx
            >>> pool = sx.models.PoolConfig(kind="end", end_token=3)
            >>> config = TransformerConfig(num_layers=1, head=None, pool=pool)
            >>> model = Transformer(config, rngs=sx.Rngs(0))
            >>> tokens = jnp.array([[5, 6, 3, 0]])
            >>> hidden = model(tokens)
            >>> bool((model.pool(hidden, tokens) == hidden[:, 2]).all())
            True
        """
        pool = self._parts.pool
        if pool.kind == "attention":
            x = self.attention_pooling(hidden)
        else:
            x = pool_states(pool, hidden, tokens, mask)
        x = self.final_norm(x) if pool.norm and self.final_norm is not None else x
        return find_activation(pool.activation)(self.pooler(x)) if pool.dense else x

    def _layer_options(
        self, tokens: jax.Array, mask: object, positions: object, cache: object
    ) -> tuple[dict[str, Any], Any]:
        """Returns the arguments of every layer, and the positions."""
        attention, learned = self._parts.attention, self._parts.positions
        if mask is not None:
            mask = self._mask_of(mask, tokens.shape)

        # Real tokens alone are counted: a mask says which these are, or the token of padding.
        has_padding = learned.max_positions > 0 and learned.pad_token >= 0
        if positions is None and (mask is not None or cache is not None or has_padding):
            real = jnp.ones_like(tokens) if mask is None else mask
            real = tokens != learned.pad_token if has_padding else real
            counted = jnp.cumsum(real, -1, dtype=jnp.int32)
            positions = jnp.maximum(counted + _last_positions(cache), 0)
            positions = jnp.where(real, positions, -1) if has_padding else positions

        if positions is None:
            if isinstance(tokens.shape[-1], int):  # and no size of any number, in an export
                self._check_positions(np.int32(tokens.shape[-1] - 1))
            positions = jnp.arange(tokens.shape[-1], dtype=jnp.int32)
        else:
            self._check_positions(positions)

        mask = None if mask is None else mask[..., None, None, :]
        positions = as_array(positions)
        options: dict[str, Any] = {} if mask is None else {"mask": mask}
        if learned.relative_buckets:
            options["bias"] = self._distance_bias(tokens, cache)

        # Rotations are computed once for all layers.
        is_placed = attention.chunked or attention.query_growth is not None
        latent, size = attention.latent, attention.head_dim
        ropes = (("positions", attention.rope), ("local_positions", attention.local_rope))
        for name, rope in ropes:
            if rope is not None:
                rotation = rope.rotation(positions, size if latent is None else latent.rope_dim)
                options[name] = PlacedRotation(*rotation, positions) if is_placed else rotation
        return options, positions

    def _mask_of(self, mask: object, shape: tuple[int, ...]) -> jax.Array:
        """Returns a mask of tokens as booleans, or raises."""
        name, meaning = type(self).__name__, "True is for real tokens, False for padding."
        real = as_mask(name, mask, f"of shape {shape}", meaning)
        if real.shape != shape:
            refuse_input(name, f"a mask of booleans of shape {shape}", real, meaning)
        return real

    def _distance_bias(self, tokens: jax.Array, cache: object) -> Any:
        """Returns biases by distance, with a cache a function of positions."""
        learned = self._parts.positions
        sizes = (learned.relative_buckets, learned.farthest_distance)
        if cache is not None:
            by_bucket = self.distances(np.arange(learned.relative_buckets, dtype=np.int32))
            return bias_behind(by_bucket, learned.farthest_distance)
        buckets = distance_buckets(tokens.shape[-1], *sizes, self._parts.causal)
        bias = jnp.moveaxis(self.distances(buckets), -1, 0)
        # Of a batch the first dimension is that of rows, which microbatches would cut.
        return bias if tokens.ndim == 1 else bias[None]

    @property
    def _usable_positions(self) -> int:
        """Rows of learned positions behind that of padding, or the offset."""
        learned = self._parts.positions
        return learned.max_positions - 1 - learned.pad_token - learned.offset

    def _check_positions(self, positions) -> None:
        """Raises if known positions are more than the learned ones."""
        learned, usable = self._parts.positions, self._usable_positions
        count = learned.max_positions
        if not count or isinstance(positions, Tracer) or not np.size(positions):
            return
        if not getattr(positions, "is_fully_addressable", True):
            return

        last = int(np.max(positions))
        if last >= usable:
            first = "padding's" if learned.pad_token >= 0 else "its offset"
            padding = "" if usable == count else f", {count - usable} of them up to {first}"
            raise LayerInputError(
                f"{type(self).__name__} has max_positions={count}{padding}, but was given tokens "
                f"up to the position {last}. Cut them, tokens[:, :{usable}], or make the model "
                f"with more positions."
            )

    def _embed_tokens(self, tokens: jax.Array, positions, token_types: object) -> jax.Array:
        embedding, learned = self._parts.embedding, self._parts.positions
        x = self.embed(tokens)
        if embedding.scale is not None:
            x = x * jnp.asarray(embedding.scale, x.dtype)
        if learned.max_positions:
            # -1 is padding, which has the first row or that of its number.
            offset = learned.pad_token + 1 + learned.offset
            rows = jnp.maximum(positions + offset, max(learned.pad_token, 0))
            x = add_bias(x, self.positions(rows))
        if embedding.token_types:
            x = x + self.types(jnp.zeros_like(tokens) if token_types is None else token_types)
        x = x if self.embed_norm is None else self.embed_norm(x)
        x = x if self.embed_dropout is None else self.embed_dropout(x)
        return lay_out_activations(self.embed_projection(x) if embedding.dim else x)

    def _embed_images(self, images: jax.Array) -> jax.Array:
        config: Any = self._parts.image
        size, side, channels = config.size, config.patch_size, config.channels
        if images.ndim != 4 or images.shape[1:] != (size, size, channels):
            refuse_input(
                type(self).__name__,
                f"images of shape (batch, {size}, {size}, {channels})",
                images,
                "Channels are last: images.transpose(0, 2, 3, 1) of PyTorch's.",
            )

        count = size // side
        images = images[:, : count * side, : count * side]  # as a convolution cuts the rest off
        # One dimension at a time, which keeps the layout over Explicit axes.
        batch = images.shape[0]
        rows = images.reshape(batch, count, side, count * side, channels)
        cut = rows.reshape(batch, count, side, count, side, channels).swapaxes(2, 3)
        x = self.patches(cut.reshape(batch, count * count, side, side, channels))

        if config.first_vector:
            first = add_bias(jnp.zeros_like(x[:, :1]), self.first.value)
            x = jnp.concatenate([first, x], axis=1)
        x = add_bias(x, self.positions(jnp.arange(x.shape[1])))
        x = x if self.embed_norm is None else self.embed_norm(x)
        return lay_out_activations(x if self.embed_dropout is None else self.embed_dropout(x))

    def _embed_frames(self, features: jax.Array) -> jax.Array:
        count, config = self._parts.positions.max_positions, self._parts.features
        shape = (2 * count, 0 if config is None else config.size)
        if features.ndim != 3 or features.shape[1:] != shape:
            refuse_input(
                type(self).__name__,
                f"features of shape (batch, {shape[0]}, {shape[1]})",
                features,
                "Frames come before features: features.transpose(0, 2, 1) of PyTorch's.",
            )
        # Positions are sines, and not trained.
        positions = jax.lax.stop_gradient(self.positions(jnp.arange(count)))
        x = add_bias(self.frames(features), positions)
        return lay_out_activations(x if self.embed_dropout is None else self.embed_dropout(x))

    def make_cache(
        self,
        batch: int,
        length: int,
        dtype: jax.typing.DTypeLike | None = None,
        *,
        context_length: int | None = None,
    ) -> Any:
        """Makes a cache: keys and values of all layers, lazy.

        Args:
            batch: How many rows.
            length: How many positions a row holds; a layer with a window keeps no more than that.
            dtype: Dtype of keys and values; None for the compute dtype, int8 for integers with
                scales, as in ``nn.AttentionCache``.
            context_length: How many positions of a context a row holds, with cross-attention.

        Returns:
            A list of ``nn.AttentionCache``, or one of all layers if they are stacked; of latent
            attention, ``nn.LatentCache``; of a recurrent mixer, ``nn.RecurrentCache``, whose
            states are not rounded to integers. A layer with several of them, or with
            cross-attention (``nn.ContextCache``), has each by the name of its part.

        Raises:
            LayerConfigError: If the model is not causal, or has no cache of the dtype; or it reads
                a context, and ``context_length`` is missing, or the reverse.
        """
        config = self._parts
        if not config.causal:
            raise LayerConfigError(f"{type(self).__name__} is not causal, so there is no cache.")
        dtype = config.dtype if dtype is None else dtype
        attention = config.attention
        if attention.cross_attention == (context_length is None):
            raise LayerConfigError(
                f"{type(self).__name__} has cross_attention={attention.cross_attention}, but "
                f"make_cache was given context_length={context_length}. It is the length of what "
                f"cross-attention reads, and needed for that alone."
            )
        has_attention = map(config.has_attention, range(config.num_layers))
        if not jnp.issubdtype(dtype, jnp.floating) and not any(has_attention):
            raise LayerConfigError(
                f"{type(self).__name__} has no keys and values to keep in {jnp.dtype(dtype)}: all "
                f"of its layers are recurrent. Leave the dtype out."
            )

        def of_layer(index: int, num_layers: int | None = None) -> Any:
            caches = dict[str, Any]()
            if config.has_attention(index):
                caches["attn"] = of_attention(index, num_layers)
            if config.recurrence is not None and config.is_recurrent(index):
                kind = dtype if jnp.issubdtype(dtype, jnp.floating) else config.dtype
                mixer = config.recurrence.mixer.make(config, Rngs(0))
                caches["mixer"] = mixer.make_cache(batch, dtype=kind, num_layers=num_layers)
            if context_length is not None:
                sizes = (batch, context_length, attention.num_kv_heads, attention.head_dim)
                context = ContextCache(*sizes, dtype=dtype, num_layers=num_layers)
                caches["cross_attn"] = context
            return LayerCaches(**caches) if len(caches) > 1 else next(iter(caches.values()))

        def of_attention(index: int, num_layers: int | None) -> Any:
            window = attention.window if attention.is_local(index) else None
            if (latent := attention.latent) is not None:
                sizes = (batch, length, latent.dim, latent.rope_dim)
                return LatentCache(*sizes, dtype=dtype, num_layers=num_layers)
            ring = window is not None and window < length
            slots = length if window is None else min(window, length)
            sizes = (batch, slots, attention.num_kv_heads, attention.head_dim)
            return AttentionCache(*sizes, dtype=dtype, ring=ring, num_layers=num_layers)

        if not isinstance(self.layers, Stack):
            return List([of_layer(index) for index in range(config.num_layers)])
        if config.period == 1:
            return of_layer(0, self.layers.length)
        remaining = [of_layer(index) for index in range(config.num_layers % config.period)]
        stacked = [of_layer(index, self.layers.length) for index in range(config.period)]
        return BlockCache(TransformerBlock(stacked), remaining)

    def unrolled_paths(self) -> dict[Path, list[Path] | Path]:
        """Returns the paths in a list of layers of those that are scanned in blocks.

        Returns:
            As of ``nn.Stack.unrolled_paths``; a layer left over has one path.
        """
        kinds = getattr(getattr(self.layers, "stacked", None), "layers", None)
        if kinds is None:
            return {}

        size = len(kinds)
        total = size * self.layers.length
        paths: dict[Path, list[Path] | Path] = {
            ("layers", "stacked", "layers", kind): [("layers", i) for i in range(kind, total, size)]
            for kind in range(size)
        }
        # What a block returns is what its last layer returns.
        paths["layers", "stacked"] = paths["layers", "stacked", "layers", size - 1]
        for index in range(len(self.rest or ())):
            paths["rest", index] = ("layers", total + index)
        return paths

    def _run(self, x: jax.Array, options: dict[str, object], cache) -> jax.Array:
        layers, caches = self.layers, cache
        if callable(layers):  # a stack, or what a user has put around it
            if isinstance(cache, BlockCache):
                cache, caches = cache.stacked, cache.rest
            cache_option = {} if cache is None else {"cache": cache}
            x = cast("Any", layers)(x, **options, **cache_option)
            layers = self.rest or ()
        for index, layer in enumerate(layers):
            cache_option = {} if cache is None else {"cache": caches[index]}
            x = rematerialised(layer, self._parts.remat)(x, **options, **cache_option)
        is_last = self.final_norm is None or self._parts.pool.norm
        return x if is_last else cast("Any", self.final_norm)(x)

    def _before_head(self, x: jax.Array) -> jax.Array:
        output = self._parts.output
        if output.transform:
            activation = output.activation or self._parts.activation
            x = find_activation(activation)(self.head_dense(x))
            x = x if self.head_norm is None else self.head_norm(x)
        return x

    def _logits(self, x: jax.Array) -> jax.Array:
        head, output = self._parts.head, self._parts.output
        if head is None:
            return x
        x = self._before_head(x)
        if head != "tokens":
            return self.head(x)
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        if self.head is None and output.bias:
            logits = add_bias(logits, self.head_bias.value)
        if output.scale is not None:
            logits = logits * jnp.asarray(output.scale, logits.dtype)
        if output.softcap is not None:
            logits = jnp.tanh(logits / output.softcap) * output.softcap
        return logits


def _sines(key: object, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Initializes positions as sines, then cosines, of wavelengths up to the longest."""
    count, size = shape
    base = 10_000.0 ** (size / max(size - 2, 1))  # so that the last one is the longest
    return sinusoidal(jnp.arange(count), size, base=base, interleaved=False).astype(dtype)


def _last_positions(cache: object):
    """Returns the last position of each row of a cache, or -1."""
    if cache is None:
        return -1
    position = next(v for path, v in iter_variables(cache, Cache) if path[-1] == "position").value
    position = position if position.ndim == 2 else position[0]
    return jnp.max(position, axis=-1, keepdims=True)
