# SPDX-License-Identifier: Apache-2.0
"""``Embed``: a table looked up by integers, and its transpose as an output layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.core.dtypes import canonical_dtype, cast_all
from shardax.core.errors import LayerConfigError, LayerInputError
from shardax.core.lazy import Initializer
from shardax.core.modules import Module
from shardax.core.rng import Rngs
from shardax.named.array import NamedArray
from shardax.named.functions import dot
from shardax.named.layer_parts import Axes, AxisSizes, check_axes, check_input, parameter
from shardax.named.names import shown
from shardax.partition.explicit import joined_sharding


class Embed(Module):
    """A table with an array of the output axes for every integer.

    Args:
        vocab_axis: The one axis that is looked up along, its size by its name.
        output_axes: The axes that a lookup gives.
        dtype: Compute dtype; None for the parameter dtype (and promotion in ``attend``).
        param_dtype: Parameter dtype.
        embedding_init: Initializer of the table; None for normal with variance 1 / features, so
            that a lookup has length one on average.
        rngs: Random streams; ``params`` is used.

    Attributes:
        embedding: ``Param`` whose axes are the vocabulary's and the output axes.

    Raises:
        LayerConfigError: If axes are not sizes by name, or there is not one vocabulary axis.

    Example:
        >>> import shardax as sx
        >>> embed = sx.named.Embed({"vocab": 10}, {"embed": 4}, rngs=sx.Rngs(0))
        >>> vectors = embed(sx.named.arange({"time": 3}))
        >>> vectors.axes, embed.attend(vectors).axes
        ({'time': 3, 'embed': 4}, {'time': 3, 'vocab': 10})
    """

    def __init__(
        self,
        vocab_axis: Axes,
        output_axes: Axes,
        *,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        embedding_init: Initializer | None = None,
        rngs: Rngs | None,
    ) -> None:
        self.vocab_axis = check_axes("Embed", "vocab_axis", vocab_axis)
        self.output_axes = check_axes("Embed", "output_axes", output_axes)
        names = (*self.vocab_axis.names, *self.output_axes.names)
        if len(self.vocab_axis.names) != 1 or len(set(names)) < len(names):
            raise LayerConfigError(
                f"{self._shown()} needs one axis to look up along, and others for the result."
            )
        sizes = (*self.vocab_axis.sizes, *self.output_axes.sizes)
        if embedding_init is None:
            embedding_init = jax.nn.initializers.variance_scaling(
                1.0, "fan_in", "normal", in_axis=tuple(range(1, len(sizes))), out_axis=0
            )
        self.embedding = parameter(embedding_init, AxisSizes(names, sizes), param_dtype, rngs)
        self.dtype = canonical_dtype(dtype)

    def __call__(self, indices: NamedArray) -> NamedArray:
        """Looks integers up.

        Args:
            indices: Integers with any axes but those of the result. A negative one counts from the
                end; one out of range gives NaN, as it must not pass unseen.

        Returns:
            An array with the axes of the indices and the output axes, in the compute dtype.

        Raises:
            LayerInputError: If the indices are not integers, or have an output axis.
        """
        indices = check_input(self._shown(), indices, AxisSizes((), ()), self.output_axes.names)
        if not jnp.issubdtype(indices.dtype, jnp.integer):
            raise LayerInputError(
                f"{self._shown()} looks up integers, but was given "
                f"{indices.dtype}{shown(indices.dims, indices.shape)}. Cast them: "
                f"indices.astype(int)."
            )
        (table,) = cast_all(self.dtype, self.embedding.value)
        data, rest = indices.data, range(1, table.ndim)
        found = table.at[data].get(
            mode="fill",
            fill_value=jnp.nan,
            out_sharding=joined_sharding(((data, range(data.ndim)), (table, rest))),
        )
        return NamedArray._make(found, (*indices.dims, *self.output_axes.names))

    def attend(self, x: NamedArray) -> NamedArray:
        """Multiplies by the table: the logits of a model with a tied head.

        Args:
            x: Has the output axes, and not the vocabulary's.

        Returns:
            An array with the vocabulary axis in the place of the output axes.

        Raises:
            LayerInputError: If an axis is missing, has another size, or is there already.
        """
        layer = f"{self._shown()}.attend"
        x = check_input(layer, x, self.output_axes, self.vocab_axis.names)
        data, table = cast_all(self.dtype, x.data, self.embedding.value)
        names = (*self.vocab_axis.names, *self.output_axes.names)
        return dot(
            NamedArray._make(data, x.dims), NamedArray._make(table, names), self.output_axes.names
        )

    def _shown(self) -> str:
        return f"Embed(vocab_axis={self.vocab_axis}, output_axes={self.output_axes})"
