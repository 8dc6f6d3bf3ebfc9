# SPDX-License-Identifier: Apache-2.0
"""``Einsum``: a linear map written as an equation.

An *equation* such as ``"...te,ehd->...thd"`` names the dimensions of the input, of the kernel and
of the result by letters. The kernel's letters that the result lacks are summed over; those that
only the kernel has are *made*; those that input, kernel and result have are *batch* dimensions,
along which the kernel is many kernels.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from shardax._core.init.lazy import Initializer
from shardax._core.init.rng import Rngs
from shardax._core.module import Module
from shardax._transforms.errors import LayerConfigError
from shardax.nn.linear import einsum
from shardax.nn.parameters import (
    as_array,
    as_axes,
    as_sizes,
    canonical_dtype,
    cast_all,
    lecun_normal,
    make_parameter,
    refuse_input,
    zeros,
)
from shardax.partition.explicit import align

_FORM = re.compile(r"(\.\.\.)?([A-Za-z]+),([A-Za-z]+)->(\.\.\.)?([A-Za-z]*)")


@dataclass(frozen=True)
class Equation:
    """An equation of an input and a kernel.

    Attributes:
        input: Letters of the input, after the ellipsis.
        kernel: Letters of the kernel.
        output: Letters of the result, after the ellipsis.
        ellipsis: Whether input and result have further dimensions in front.
    """

    input: str
    kernel: str
    output: str
    ellipsis: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads an equation.

        Raises:
            LayerConfigError: If it is not of the form that ``Einsum`` takes.

        Example:
            >>> Equation.parse("...te, ehd -> ...thd")
            Equation(input='te', kernel='ehd', output='thd', ellipsis=True)
        """
        match = _FORM.fullmatch(text.replace(" ", ""))
        if match is None or match[1] != match[4]:
            raise LayerConfigError(
                f"Einsum cannot read the equation {text!r}. Write the letters of input, kernel and "
                f"result, with an ellipsis at the front of input and result or of neither: "
                f"'...te,ehd->...thd'."
            )
        _, first, second, _, output = match.groups()
        for letters in (first, second, output):
            if len(set(letters)) < len(letters):
                raise LayerConfigError(
                    f"Einsum({text!r}) has a letter twice in {letters!r}; give each dimension of "
                    f"one array a letter of its own."
                )
        unknown = set(output) - set(first + second)
        if unknown:
            raise LayerConfigError(
                f"Einsum({text!r}) has {sorted(unknown)} in the result but in neither operand."
            )
        return cls(first, second, output, match[1] is not None)

    @property
    def made(self) -> str:
        """Letters of the result that come from the kernel alone, in the result's order."""
        return "".join(x for x in self.output if x in self.kernel and x not in self.input)

    def kernel_dimensions(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Returns the kernel's dimensions that are summed over, made, and batch."""
        kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
        for position, letter in enumerate(self.kernel):
            kind = 0 if letter not in self.output else 1 if letter not in self.input else 2
            kinds[kind].append(position)
        return tuple(kinds[0]), tuple(kinds[1]), tuple(kinds[2])

    def spelled_out(self, extra: int) -> str:
        """Returns the equation with letters for ``extra`` dimensions in place of the ellipsis."""
        unused = [x for x in string.ascii_letters if x not in self.input + self.kernel]
        front = "".join(unused[:extra])
        return f"{front}{self.input},{self.kernel}->{front}{self.output}"

    def __str__(self) -> str:
        dots = "..." if self.ellipsis else ""
        return f"{dots}{self.input},{self.kernel}->{dots}{self.output}"


class Einsum(Module):
    """A linear map written as an equation: ``y = einsum(equation, x, kernel) + bias``.

    Args:
        equation: Such as ``"...te,ehd->...thd"``: the letters of the input, the kernel, the result.
        shape: Shape of the kernel.
        bias_shape: Shape of the bias: the sizes of those dimensions of the result that come from
            the kernel alone, in the result's order. None for no bias.
        dtype: Compute dtype; None promotes input and parameters.
        param_dtype: Parameter dtype.
        kernel_init: Initializer of the kernel; None for LeCun normal (variance 1 / fan-in).
        bias_init: Initializer of the bias.
        kernel_axes: Axis names of the kernel; None for the equation's letters. The bias has those
            of its dimensions.
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

    def __init__(
        self,
        equation: str,
        shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = np.float32,
        kernel_init: Initializer | None = None,
        bias_init: Initializer = zeros,
        kernel_axes: Sequence[str | None] | None = None,
        rngs: Rngs | None,
    ) -> None:
        parsed = Equation.parse(equation)
        name = f"Einsum('{parsed}')"
        sizes = as_sizes(name, "shape", tuple(shape))
        if len(sizes) != len(parsed.kernel):
            raise LayerConfigError(
                f"{name} has a kernel {parsed.kernel!r} of {len(parsed.kernel)} dimensions, but "
                f"shape={sizes} has {len(sizes)}. Give one size per letter."
            )
        given = tuple(parsed.kernel) if kernel_axes is None else kernel_axes
        axes = as_axes(name, "kernel_axes", given, len(sizes))
        if kernel_init is None:
            kernel_init = lecun_normal(*parsed.kernel_dimensions())
        self.kernel = make_parameter(name, kernel_init, sizes, param_dtype, axes, rngs)
        self.bias = None
        if bias_shape is not None:
            made = [parsed.kernel.index(letter) for letter in parsed.made]
            _check_bias(name, tuple(bias_shape), tuple(sizes[i] for i in made))
            self.bias = make_parameter(
                name, bias_init, tuple(bias_shape), param_dtype, [axes[i] for i in made], rngs
            )
        self.equation = parsed
        self.dtype = canonical_dtype(dtype)

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
        x, kernel, equation = as_array(x), self.kernel.value, self.equation
        extra = x.ndim - len(equation.input)
        sizes = dict(zip(equation.kernel, kernel.shape, strict=True))
        if not _fits(equation, sizes, x.shape):
            dots = ["..."] if equation.ellipsis else []
            expected = [str(sizes.get(letter, letter)) for letter in equation.input]
            refuse_input(
                f"Einsum('{equation}')",
                f"an input of shape ({', '.join(dots + expected)})",
                x,
                f"The kernel has the shape {kernel.shape}.",
            )
        x, kernel = cast_all(self.dtype, x, kernel)
        y = einsum(equation.spelled_out(extra), x, kernel, out_sharding)
        return y if self.bias is None else _add_bias(equation, y, self.bias.value)


def _check_bias(name: str, given: tuple[int, ...], made: tuple[int, ...]) -> None:
    if given != made:
        raise LayerConfigError(
            f"{name} has bias_shape={given}, but the dimensions of the result that come from the "
            f"kernel alone have the sizes {made}. Give bias_shape={made}."
        )


def _fits(equation: Equation, sizes: dict[str, int], shape: tuple[int, ...]) -> bool:
    extra = len(shape) - len(equation.input)
    if extra < 0 or (extra > 0 and not equation.ellipsis):
        return False
    pairs = zip(equation.input, shape[extra:], strict=True)
    return all(sizes.get(letter, size) == size for letter, size in pairs)


def _add_bias(equation: Equation, y: jax.Array, bias: jax.Array) -> jax.Array:
    extra = y.ndim - len(equation.output)
    made = [extra + i for i, letter in enumerate(equation.output) if letter in equation.made]
    bias = align(bias if bias.dtype == y.dtype else bias.astype(y.dtype), y, made)
    return y + jax.lax.expand_dims(bias, [i for i in range(y.ndim) if i not in made])
