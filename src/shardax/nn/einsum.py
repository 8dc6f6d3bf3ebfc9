# SPDX-License-Identifier: Apache-2.0
"""Linear layer written as an equation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shardax import Rngs
from shardax.nn import parameters
from shardax.nn.arithmetic import add_bias, as_array, cast_all, einsum, take_precision
from shardax.nn.errors import LayerConfigError
from shardax.nn.kernels.equation import Equation
from shardax.nn.kernels.layer import KernelLayer, KernelMap
from shardax.nn.parameters import Initializer


class Einsum(KernelLayer):
    """Linear map by an equation: ``y = einsum(equation, x, kernel) + bias``.

    Args:
        equation: Such as ``"...te,ehd->...thd"``: the letters of the input, the kernel, the result.
            An ellipsis may stand anywhere. That of the kernel stands for the last dimensions of
            those of the input and of the result, which broadcast: one of them may be 1, or missing
            in the input.
        shape: Shape of the kernel.
        bias_shape: Shape of the bias: the sizes of those dimensions of the result that come from
            the kernel, in the result's order; either all of them or, for a bias that is the same
            along dimensions that the input has too, those that come from the kernel alone. None for
            no bias.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernel; None for LeCun normal (variance 1 / fan-in).
        bias_init: Initializer of the bias.
        kernel_axes: Axis names of the kernel; None for the equation's letters, and no names in
            place of an ellipsis. The bias has those of its dimensions.
        precision: As in ``jax.lax.dot_general``; or ``"fp8"``, which rounds input and kernel to
            e4m3 and gradients of the result to e5m2, by their largest magnitudes in each call;
            ``"fp8-delayed"``, by those of the last 16 calls, which the layer keeps, and of
            gradients in each.
        preferred_element_type: Dtype of the sums and of the result; None for the compute dtype.
        rngs: Random streams; ``params`` is used.

    Attributes:
        kernel: ``Param`` of the given shape.
        bias: ``Param`` of ``bias_shape``, or None.
        equation: The equation, parsed.

    Raises:
        LayerConfigError: If the equation, the shapes and the names do not fit together.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> layer = sx.nn.Einsum("...te,ehd->...thd", (8, 4, 2), (4, 2), rngs=sx.Rngs(0))
        >>> layer(jnp.ones((3, 5, 8))).shape, layer.kernel.axes
        ((3, 5, 4, 2), ('e', 'h', 'd'))
    """

    takes_precision = True
    precision: Any = None
    preferred_element_type: Any = None

    def __init__(
        self,
        equation: str,
        shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = np.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = parameters.zeros,
        kernel_axes: Sequence[str | None] | None = None,
        precision: object = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        rngs: Rngs | None,
    ) -> None:
        sizes = parameters.as_sizes(f"Einsum({equation!r})", "shape", tuple(shape))
        parsed = Equation.parse(equation, len(sizes))
        name = f"Einsum('{parsed}')"
        if len(sizes) != len(parsed.kernel):
            raise LayerConfigError(
                f"{name} has a kernel {parsed.kernel!r} of {len(parsed.kernel)} dimensions, but "
                f"shape={sizes} has {len(sizes)}. Give one size per letter."
            )

        letters = [letter if letter in equation else None for letter in parsed.kernel]
        axis_names = letters if kernel_axes is None else kernel_axes
        axes = parameters.as_axes(name, "kernel_axes", axis_names, len(sizes))

        if kernel_init is None:
            kernel_init = parameters.lecun_normal(*parsed.kernel_dimensions())
        self.kernel = parameters.make_parameter(kernel_init, sizes, param_dtype, axes, rngs)

        self.bias = None
        if bias_shape is not None:
            bias_dims = [parsed.kernel.index(letter) for letter in parsed.made]
            expected = tuple(sizes[i] for i in bias_dims)
            if len(bias_shape) > len(expected):  # also over the dimensions that are shared
                bias_dims = [parsed.kernel.index(x) for x in parsed.output if x in parsed.kernel]
            if tuple(bias_shape) != tuple(sizes[i] for i in bias_dims):
                raise LayerConfigError(
                    f"{name} has bias_shape={tuple(bias_shape)}, but the dimensions of the result "
                    f"that come from the kernel alone have the sizes {expected}. Give "
                    f"bias_shape={expected}."
                )
            self.bias = parameters.make_parameter(
                bias_init, tuple(bias_shape), param_dtype, [axes[i] for i in bias_dims], rngs
            )
        self.equation = parsed
        self.dtype = parameters.canonical_dtype(dtype)
        take_precision(self, precision, preferred_element_type)

    def __call__(self, x: Any, *, out_sharding: Any = None) -> jax.Array:
        """Maps an input.

        Args:
            x: The first operand of the equation.
            out_sharding: Sharding of the result over Explicit mesh axes; by default each dimension
                that remains keeps its own.

        Returns:
            The result of the equation, in the compute dtype.

        Raises:
            LayerInputError: If the shape does not fit the equation and the kernel.
        """
        kernel, equation = self.kernel.value, self.equation
        inputs = as_array(x)
        x = equation.expanded(inputs)
        extra = x.ndim - len(equation.input)
        sizes = dict(zip(equation.kernel, kernel.shape, strict=True))
        if not _fits(equation, sizes, x.shape):
            expected = [str(sizes.get(letter, letter)) for letter in equation.input]
            if equation.ellipsis:
                expected.insert(equation.input_place, "...")
            parameters.refuse_input(
                f"Einsum('{equation}')",
                f"an input of shape ({', '.join(expected)})",
                inputs,
                f"The kernel has the shape {kernel.shape}.",
            )

        x, kernel = cast_all(self.dtype, x, kernel)
        y = einsum(
            equation.spelled_out(extra),
            x,
            kernel,
            out_sharding,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )

        if self.bias is None:
            return y

        # The bias is over the letters that the kernel makes, and may be over shared ones too.
        has_shared = self.bias.ndim > len(equation.made)
        places = equation.spelled_out(extra).partition("->")[2]
        letters = equation.kernel if has_shared else equation.made
        return add_bias(y, self.bias.value, [i for i, x in enumerate(places) if x in letters])

    def kernel_maps(self) -> dict[str, KernelMap]:
        """Returns the equation of ``kernel``."""
        return {"kernel": KernelMap(self.equation)}


def _fits(equation: Equation, sizes: dict[str, int], shape: tuple[int, ...]) -> bool:
    extra = len(shape) - len(equation.input)
    if extra < 0 or (extra > 0 and not equation.ellipsis):
        return False

    place = equation.input_place
    known_sizes = (*shape[:place], *shape[place + extra :])
    pairs = zip(equation.input, known_sizes, strict=True)
    return all(
        sizes.get(letter, size) == size
        or (letter in equation.shared and 1 in (size, sizes[letter]))
        for letter, size in pairs
    )
