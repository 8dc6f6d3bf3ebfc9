# SPDX-License-Identifier: Apache-2.0
"""Linear layer over one or several dimensions."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shardax import Rngs
from shardax.nn import parameters
from shardax.nn.arithmetic import as_array, contract, take_features, take_precision
from shardax.nn.kernels.layer import KernelLayer, KernelMap
from shardax.nn.parameters import Initializer


class Linear(KernelLayer):
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
        precision: As in ``jax.lax.dot_general``; or ``"fp8"``, which rounds input and kernel to
            e4m3 and gradients of the result to e5m2, by their largest magnitudes in each call;
            ``"fp8-delayed"``, by those of the last 16 calls, which the layer keeps, and of
            gradients in each.
        preferred_element_type: Dtype of the sums and of the result; None for the compute dtype.
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

    takes_precision = True
    precision: Any = None
    preferred_element_type: Any = None

    def __init__(
        self,
        in_features: parameters.Sizes,
        out_features: parameters.Sizes,
        *,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = parameters.zeros,
        kernel_axes: Sequence[str | None] | None = None,
        precision: object = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        rngs: Rngs | None,
    ) -> None:
        inputs = parameters.as_sizes("Linear", "in_features", in_features)
        outputs = parameters.as_sizes("Linear", "out_features", out_features)
        shape, count = inputs + outputs, len(inputs)

        if kernel_axes is None:
            kernel_axes = (*numbered("in", count), *numbered("out", len(outputs)))
        axes = parameters.as_axes("Linear", "kernel_axes", kernel_axes, len(shape))

        if kernel_init is None:
            kernel_init = parameters.lecun_normal(
                tuple(range(count)), tuple(range(count, len(shape)))
            )

        self.kernel = parameters.make_parameter(kernel_init, shape, param_dtype, axes, rngs)
        self.bias = (
            parameters.make_parameter(bias_init, outputs, param_dtype, axes[count:], rngs)
            if use_bias
            else None
        )

        self.in_features = in_features
        self.out_features = out_features
        self.dtype = parameters.canonical_dtype(dtype)
        take_precision(self, precision, preferred_element_type)

    def __call__(self, x: Any, out_sharding: Any = None) -> jax.Array:
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
        kernel, x = self.kernel.value, as_array(x)
        count = len(self.in_features) if isinstance(self.in_features, tuple) else 1
        if x.shape[-count:] != kernel.shape[:count]:
            name = f"Linear(in_features={self.in_features}, out_features={self.out_features})"
            x = take_features(name, x, kernel.shape[:count], "in_features")

        bias = None if self.bias is None else self.bias.value
        options = self.precision, self.preferred_element_type, bias, self.dtype
        return contract(x, kernel, range(count), out_sharding, *options)

    def kernel_maps(self) -> dict[str, KernelMap]:
        """Returns the product over the input's last dimensions."""
        inputs = parameters.as_sizes("Linear", "in_features", self.in_features)
        outputs = parameters.as_sizes("Linear", "out_features", self.out_features)
        letters, count = string.ascii_letters[: len(inputs + outputs)], len(inputs)

        equation = f"...{letters[:count]},{letters}->...{letters[count:]}"
        return {"kernel": KernelMap.of(equation, inputs + outputs)}


def numbered(name: str, count: int) -> tuple[str, ...]:
    """Returns a name, or several with numbers."""
    return (name,) if count == 1 else tuple(f"{name}_{position}" for position in range(count))
