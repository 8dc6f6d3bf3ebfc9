# SPDX-License-Identifier: Apache-2.0
"""``Linear``: an affine map of the last dimensions of its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shardax.core.dtypes import as_array, canonical_dtype, cast_all
from shardax.core.lazy import Initializer
from shardax.core.modules import Module
from shardax.core.rng import Rngs
from shardax.nn.contraction import contract
from shardax.nn.parameters import (
    Sizes,
    as_axes,
    as_sizes,
    lecun_normal,
    make_parameter,
    refuse_input,
    shown_sizes,
    zeros,
)
from shardax.partition.explicit import align


class Linear(Module):
    """An affine map of the last dimensions: ``y = x @ kernel + bias``.

    Args:
        in_features: Size of the last dimension of the input; or a tuple, of the last dimensions,
            which are then summed over together.
        out_features: Size, or sizes, of the dimensions that take their place.
        use_bias: Whether to add a bias.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernel; None for LeCun normal (variance 1 / fan-in).
        bias_init: Initializer of the bias.
        kernel_axes: Axis names of the kernel; None for ``("in", "out")``, numbered where there are
            several dimensions: ``("in", "out_0", "out_1")``. The bias has those of its dimensions.
        rngs: Random streams; ``params`` is used.

    Attributes:
        kernel: ``Param`` of shape ``(*in_features, *out_features)``.
        bias: ``Param`` of shape ``(*out_features,)``, or None.

    Raises:
        LayerConfigError: If a size is not positive or the names do not fit.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> heads = sx.nn.Linear(8, (4, 2), kernel_axes=("embed", "heads", None), rngs=sx.Rngs(0))
        >>> heads(jnp.ones((3, 8))).shape, heads.kernel.axes, heads.bias.axes
        ((3, 4, 2), ('embed', 'heads', None), ('heads', None))
    """

    def __init__(
        self,
        in_features: Sizes,
        out_features: Sizes,
        *,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = zeros,
        kernel_axes: Sequence[str | None] | None = None,
        rngs: Rngs | None,
    ) -> None:
        inputs = as_sizes("Linear", "in_features", in_features)
        outputs = as_sizes("Linear", "out_features", out_features)
        shape, count = inputs + outputs, len(inputs)
        if kernel_axes is None:
            kernel_axes = (*_numbered("in", count), *_numbered("out", len(outputs)))
        axes = as_axes("Linear", "kernel_axes", kernel_axes, len(shape))
        if kernel_init is None:
            kernel_init = lecun_normal(tuple(range(count)), tuple(range(count, len(shape))))
        self.kernel = make_parameter("Linear", kernel_init, shape, param_dtype, axes, rngs)
        self.bias = (
            make_parameter("Linear", bias_init, outputs, param_dtype, axes[count:], rngs)
            if use_bias
            else None
        )
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = canonical_dtype(dtype)

    def __call__(self, x: Any, *, out_sharding: Any = None) -> jax.Array:
        """Maps an input.

        Args:
            x: Shape (..., *in_features); any dimensions before.
            out_sharding: Sharding of the result over Explicit mesh axes; by default each dimension
                that remains keeps its own.

        Returns:
            Shape (..., *out_features), in the compute dtype.

        Raises:
            LayerInputError: If the last dimensions are not ``in_features``.
        """
        x, kernel = as_array(x), self.kernel.value
        count = len(self.in_features) if isinstance(self.in_features, tuple) else 1
        sizes = kernel.shape[:count]
        if x.shape[-count:] != sizes:
            refuse_input(
                f"Linear(in_features={self.in_features}, out_features={self.out_features})",
                f"an input of shape {shown_sizes(sizes)}",
                x,
                f"Make the layer with in_features={_as_given(x.shape[-count:])}, or bring the "
                f"features to the end.",
            )
        x, kernel = cast_all(self.dtype, x, kernel)
        y = contract(x, kernel, range(count), out_sharding)
        return y if self.bias is None else add_bias(y, self.bias.value)


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}_{position}" for position in range(count))


def _as_given(sizes: tuple[int, ...]) -> Any:
    return sizes[0] if len(sizes) == 1 else sizes


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """Adds a bias over the last dimensions of ``y``, cast to its dtype."""
    bias = align(bias if bias.dtype == y.dtype else bias.astype(y.dtype), y)
    return y + jax.lax.expand_dims(bias, range(y.ndim - bias.ndim))
