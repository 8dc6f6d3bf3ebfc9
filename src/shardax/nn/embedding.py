# SPDX-License-Identifier: Apache-2.0
"""Embedding table, its transpose as an output layer, and sinusoidal positions."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Rngs
from shardax.extend import INLINE, Options, explicit_sharding, joined_sharding
from shardax.nn import parameters
from shardax.nn.arithmetic import as_array, cast_all, contract, take_features, take_precision
from shardax.nn.errors import LayerConfigError
from shardax.nn.kernels.layer import KernelLayer, KernelMap, LowRankTerm
from shardax.nn.parameters import Initializer
from shardax.nn.quantization import QuantizedKernel, quantized_rows

default_embedding_init: Initializer = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "normal", out_axis=0
)
"""Normal with variance 1 / features, so that a vector has length one on average."""


class Embed(KernelLayer):
    """Table with a vector for each of ``num_embeddings`` integers.

    Args:
        num_embeddings: Number of vectors.
        features: Their size.
        dtype: Compute dtype; None for the parameter dtype (and promotion in ``attend``).
        param_dtype: Parameter dtype.
        embedding_init: Initializer of the table; by default normal with variance 1 / features.
        axes: Axis names of the table; None for the default.
        precision: As for ``Linear``, of ``attend``.
        preferred_element_type: Dtype of the sums and of the result of ``attend``; None for the
            compute dtype.
        rngs: Random streams; ``params`` is used.

    Attributes:
        embedding: ``Param`` of shape (num_embeddings, features).

    Raises:
        LayerConfigError: If a size is not positive or the names do not fit.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> embed = sx.nn.Embed(10, 4, rngs=sx.Rngs(0))
        >>> vectors = embed(jnp.array([[1, 2, 3]]))
        >>> vectors.shape, embed.attend(vectors).shape
        ((1, 3, 4), (1, 3, 10))
    """

    takes_precision = True
    is_adapted_unasked = False
    precision: Any = None
    preferred_element_type: Any = None

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        embedding_init: Initializer = default_embedding_init,
        axes: Sequence[str | None] | None = ("vocab", "embed"),
        precision: object = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        rngs: Rngs | None,
    ) -> None:
        if axes is None:  # as Linear takes kernel_axes
            axes = ("vocab", "embed")
        shape = (
            parameters.as_size("Embed", "num_embeddings", num_embeddings),
            parameters.as_size("Embed", "features", features),
        )

        names = parameters.as_axes("Embed", "axis names", axes, 2)
        self.embedding = parameters.make_parameter(embedding_init, shape, param_dtype, names, rngs)
        self.num_embeddings, self.features = shape
        self.dtype = parameters.canonical_dtype(dtype)
        take_precision(self, precision, preferred_element_type)

    def __call__(self, indices: Any, out_sharding: Any = None) -> jax.Array:
        """Looks vectors up.

        Args:
            indices: Integers of any shape. One out of range, also a negative one, gives NaN, as it
                must not pass unseen.
            out_sharding: Sharding of the result over Explicit mesh axes; by default that of the
                indices, then that of the table's features.

        Returns:
            Shape (*indices.shape, features), in the compute dtype.

        Raises:
            LayerInputError: If the indices are not integers.
        """
        indices = as_array(indices)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            parameters.refuse_input(
                f"Embed({self.num_embeddings}, {self.features})",
                "integers to look up",
                indices,
                "Cast them: indices.astype(int). For a distribution over the vectors, multiply: "
                "weights @ embed.embedding.",
            )

        if isinstance(self.embedding, QuantizedKernel) and out_sharding is None:
            return quantized_rows(self.embedding, look_up, indices, self.dtype)
        (table,) = cast_all(self.dtype, self.embedding.value)
        return look_up(table, indices, out_sharding)

    def attend(self, x: Any, out_sharding: Any = None) -> jax.Array:
        """Multiplies by the transposed table.

        These are the logits of a model with a tied head.

        Args:
            x: Shape (..., features).
            out_sharding: Sharding of the result over Explicit mesh axes; by default each dimension
                that remains keeps its own.

        Returns:
            Shape (..., num_embeddings), in the compute dtype.

        Raises:
            LayerInputError: If the last dimension is not ``features``.
        """
        name = f"Embed({self.num_embeddings}, {self.features}).attend"
        hint = "It is the transpose of the lookup, so it takes what the lookup gives."
        x = take_features(name, x, (self.features,), hint=hint)
        x, table = cast_all(self.dtype, x, self.embedding.value)
        options = self.precision, self.preferred_element_type
        return contract(x, table, (1,), out_sharding, *options)

    def kernel_maps(self) -> dict[str, KernelMap]:
        """Returns the lookup, which is a product of one-hot vectors with the table."""
        shape = (self.num_embeddings, self.features)
        return {"embedding": KernelMap.of("...v,vf->...f", shape, is_table=True)}

    def low_rank_term(
        self, x: Any, y: jax.Array, a: jax.Array, b: jax.Array, out_sharding: Any
    ) -> jax.Array:
        """Returns rows of ``a``, multiplied by ``b``."""
        a, b = cast_all(self.dtype, a, b)
        return contract(look_up(a, as_array(x)), b, (0,), explicit_sharding(y))

    def attend_with_terms(
        self, x: Any, terms: Mapping[str, LowRankTerm], out_sharding: Any = None
    ) -> jax.Array:
        """Multiplies by the transposed sum of the table and its term.

        Args:
            x: As for ``attend``.
            terms: The low-rank term of ``embedding``.
            out_sharding: As for ``attend``.

        Returns:
            An array as ``attend`` returns it.
        """
        y, term = self.attend(x, out_sharding=out_sharding), terms["embedding"]
        x, a, b = cast_all(self.dtype, as_array(x), term.a, term.b)
        extra = contract(contract(x, b, (1,), None), a, (1,), out_sharding)
        return y + (term.scale * extra).astype(y.dtype)


def look_up(table: jax.Array, indices: jax.Array, out_sharding: object = None) -> jax.Array:
    """Returns rows of a table; NaN for an index out of range."""
    if out_sharding is None:
        out_sharding = joined_sharding(((indices, range(indices.ndim)), (table, (1,))))
    return _rows(table, indices, out_sharding)


# A unit as ``jnp.take`` is, so that lookups of one shape are traced once.
@functools.partial(jax.jit, static_argnums=2, inline=INLINE)
def _rows(table: jax.Array, indices: jax.Array, out_sharding) -> jax.Array:
    options = {} if out_sharding is None else {"out_sharding": out_sharding}
    return table.at[indices].get(mode="fill", wrap_negative_indices=False, **options)


def sinusoidal(
    positions: object, features: int, *, base: float = 10_000.0, interleaved: bool = True
) -> jax.Array:
    """Embeds positions as sines and cosines of many wavelengths.

    Feature ``2 i`` is the sine and feature ``2 i + 1`` the cosine of
    ``position * base ** (-2 i / features)``; Vaswani et al., "Attention Is All You Need", 2017.
    (Learned positions are an ``Embed`` with a vector for each.)

    Args:
        positions: Integers or floats of any shape.
        features: Size of an embedding, even.
        base: The longest wavelength is nearly ``2 * pi * base``.
        interleaved: Whether sines and cosines alternate, as in the paper; otherwise the first half
            are the sines.

    Returns:
        float32 of the shape of ``positions``, and ``features``.

    Raises:
        LayerConfigError: If ``features`` is odd or not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> np.asarray(sinusoidal(jnp.arange(2), 4)).round(2).tolist()[0]
        [0.0, 1.0, 0.0, 1.0]
    """
    size = parameters.as_size("sinusoidal", "features", features)
    options = Options(LayerConfigError, "sinusoidal")
    options.check("features", features, size % 2 == 0, "even, for a sine and a cosine each")

    positions = as_array(positions).astype(jnp.float32)
    steps = jnp.arange(size // 2, dtype=jnp.float32)
    frequencies = jax.lax.expand_dims(base ** (-2 * steps / size), range(positions.ndim))
    angles = jnp.expand_dims(positions, -1) * frequencies

    waves = [jnp.sin(angles), jnp.cos(angles)]
    if not interleaved:
        return jnp.concatenate(waves, axis=-1)
    return jnp.stack(waves, axis=-1).reshape(*positions.shape, size)
