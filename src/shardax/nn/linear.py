# SPDX-License-Identifier: Apache-2.0
"""Linear layer and the contractions that layers are made of.

Where the caller does not say how to lay a result out over Explicit mesh axes, it keeps the layout
of the dimensions that remain.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax._core.init.lazy import Initializer
from shardax._core.init.rng import Rngs
from shardax._core.module import Module
from shardax.nn import parameters
from shardax.partition.explicit import align, joined_sharding


def contract(
    x: jax.Array, kernel: jax.Array, dimensions: Sequence[int], out_sharding: Any = None
) -> jax.Array:
    """Sums products over the last dimensions of ``x`` and given kernel dimensions."""
    # The result has the shape (..., *remaining dimensions of the kernel) and the dtype of ``x``.
    free = x.ndim - len(dimensions)
    if out_sharding is None:
        rest = [axis for axis in range(kernel.ndim) if axis not in dimensions]
        out_sharding = joined_sharding(((x, range(free)), (kernel, rest)))
    # In this order and not by jnp.einsum, which contracts several dimensions last one first: XLA
    # on CPU then copies both operands.
    contracted = (tuple(range(free, x.ndim)), tuple(dimensions))
    return _dot_general(x, kernel, contracted, out_sharding)


# A unit as ``jnp.einsum`` is, so that layers of one shape are traced and differentiated once.
@functools.partial(jax.jit, static_argnums=(2, 3), inline=True)
def _dot_general(x: jax.Array, kernel: jax.Array, contracted: Any, out_sharding: Any) -> jax.Array:
    return jax.lax.dot_general(
        x, kernel, (contracted, ((), ())), preferred_element_type=x.dtype, out_sharding=out_sharding
    )


def einsum(equation: str, x: jax.Array, kernel: jax.Array, out_sharding: Any = None) -> jax.Array:
    """Runs ``jnp.einsum`` without ellipses, laid out over Explicit mesh axes."""
    if out_sharding is None:
        inputs, output = equation.split("->")
        first, second = inputs.split(",")
        parts = [
            (x, (first.index(letter),)) if letter in first else (kernel, (second.index(letter),))
            for letter in output
        ]
        out_sharding = joined_sharding(parts)
    return jnp.einsum(equation, x, kernel, out_sharding=out_sharding)


class Linear(Module):
    """Affine map of the last dimensions, ``x @ kernel + bias``.

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
        in_features: parameters.Sizes,
        out_features: parameters.Sizes,
        *,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = parameters.zeros,
        kernel_axes: Sequence[str | None] | None = None,
        rngs: Rngs | None,
    ) -> None:
        inputs = parameters.as_sizes("Linear", "in_features", in_features)
        outputs = parameters.as_sizes("Linear", "out_features", out_features)
        shape, count = inputs + outputs, len(inputs)
        if kernel_axes is None:
            kernel_axes = (*_numbered("in", count), *_numbered("out", len(outputs)))
        axes = parameters.as_axes("Linear", "kernel_axes", kernel_axes, len(shape))
        if kernel_init is None:
            kernel_init = parameters.lecun_normal(
                tuple(range(count)), tuple(range(count, len(shape)))
            )
        self.kernel = parameters.make_parameter(
            "Linear", kernel_init, shape, param_dtype, axes, rngs
        )
        self.bias = (
            parameters.make_parameter("Linear", bias_init, outputs, param_dtype, axes[count:], rngs)
            if use_bias
            else None
        )
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = parameters.canonical_dtype(dtype)

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
        x, kernel = parameters.as_array(x), self.kernel.value
        count = len(self.in_features) if isinstance(self.in_features, tuple) else 1
        sizes = kernel.shape[:count]
        if x.shape[-count:] != sizes:
            parameters.refuse_input(
                f"Linear(in_features={self.in_features}, out_features={self.out_features})",
                f"an input of shape {parameters.shown_sizes(sizes)}",
                x,
                f"Make the layer with in_features="
                f"{x.shape[-1] if count == 1 and x.ndim else x.shape[-count:]}, or bring the "
                f"features to the end.",
            )
        x, kernel = parameters.cast_all(self.dtype, x, kernel)
        y = contract(x, kernel, range(count), out_sharding)
        return y if self.bias is None else add_bias(y, self.bias.value)


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}_{position}" for position in range(count))


def add_bias(y: jax.Array, bias: jax.Array, dimensions: Sequence[int] | None = None) -> jax.Array:
    """Adds a bias over given dimensions, by default the last."""
    places = range(y.ndim - bias.ndim, y.ndim) if dimensions is None else dimensions
    bias = align(bias if bias.dtype == y.dtype else bias.astype(y.dtype), y, places)
    return y + jax.lax.expand_dims(bias, [i for i in range(y.ndim) if i not in places])
