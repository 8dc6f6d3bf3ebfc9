# SPDX-License-Identifier: Apache-2.0
"""What a layer says of its kernels, so that they can be quantized and adapted.

``sx.quantize``, ``sx.surgery.lora`` and ``sx.surgery.with_precision`` know no layers. Each layer
says how it multiplies by its kernels, and what low-rank terms of them add to its result.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from shardax import Module, Param
from shardax.nn.arithmetic import as_array, cast_all, einsum
from shardax.nn.kernels.equation import Equation
from shardax.nn.quantization import Format, QuantizedKernel


class LowRankTerm(NamedTuple):
    """A scaled product of two small kernels, which is added to a kernel."""

    a: jax.Array
    b: jax.Array
    scale: float


@dataclass(frozen=True)
class KernelMap:
    """How a layer multiplies its input by one of its kernels.

    Args:
        equation: Letters of the input, of the kernel and of the result.
        shape: Shape of the kernel in one layer, so that the dimensions of a stack are told from its
            own; empty if it is not known.
        is_table: Whether rows of the kernel are looked up, and not summed over.

    Example:
        >>> import shardax as sx
        >>> heads = sx.nn.KernelMap.of("...d,dhk->...hk", (8, 4, 2))
        >>> [str(equation) for equation in heads.factors], heads.quantized_along
        (['...d,da->...a', '...a,ahk->...hk'], (-3,))
    """

    equation: Equation
    shape: tuple[int, ...] = ()
    is_table: bool = False

    @classmethod
    def of(cls, equation: str, shape: tuple[int, ...] = (), *, is_table: bool = False) -> Self:
        """Returns the map of an equation as ``nn.Einsum`` takes it.

        Args:
            equation: Such as ``"...d,dhk->...hk"``.
            shape: Shape of the kernel in one layer, if it is known. For an ellipsis in the kernel
                it has to be: that stands for the dimensions without a letter.
            is_table: Whether rows of the kernel are looked up.

        Raises:
            LayerConfigError: If it is no equation.
        """
        return cls(_parsed(equation, len(shape) or None), shape, is_table)

    @property
    def ndim(self) -> int:
        """Number of dimensions of the kernel in one layer."""
        return len(self.equation.kernel)

    def dimensions_of_stacks(
        self, kernel: Param[Any] | QuantizedKernel
    ) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
        """Returns sizes and axis names of a kernel's dimensions before those in one layer."""
        count = len(kernel.shape) - self.ndim
        names = kernel.axes or (None,) * count
        return kernel.shape[:count], names[:count]

    def fits(self, kernel: Param[Any] | QuantizedKernel) -> bool:
        """Whether the last dimensions of a kernel are those in one layer, if these are known."""
        return not self.shape or kernel.shape[-len(self.shape) :] == self.shape

    @property
    def quantized_along(self) -> tuple[int, ...]:
        """Dimensions along which a quantized kernel has one scale, counted from the last."""
        # The numbers of a row that is looked up are scaled by one number. Any other kernel has a
        # scale for each number of the result.
        summed = (1,) if self.is_table else self.equation.kernel_dimensions()[0]
        return tuple(dimension - self.ndim for dimension in summed)

    @property
    def factors(self) -> tuple[Equation, Equation]:
        """Equations of the two products of a low-rank term, with ``a`` and with ``b``."""
        return _factors(self.equation)

    def quantized(
        self, kernel: Param[Any], number_format: Format, tile_size: int | None = None
    ) -> QuantizedKernel:
        """Returns the kernel in few bits.

        Args:
            kernel: The ``Param``, also that of a stack of layers.
            number_format: ``"int8"``, ``"int4"`` or ``"fp8"``.
            tile_size: How many inputs of a channel share a scale; None for all.
        """
        return QuantizedKernel(kernel, self.quantized_along, number_format, tile_size)


# Equations are few, and are asked for in each call of an adapted layer.
_parsed = functools.lru_cache(maxsize=256)(Equation.parse)


@functools.lru_cache(maxsize=256)
def _factors(whole: Equation) -> tuple[Equation, Equation]:
    dimensions = whole.kernel_dimensions()
    summed, made, batch = ("".join(whole.kernel[i] for i in indices) for indices in dimensions)

    rank = unused_letters(whole.input + whole.kernel)[0]
    middle = "".join(letter for letter in whole.input if letter not in summed) + rank

    first = Equation(whole.input, batch + summed + rank, middle, whole.ellipsis, whole.input_place)
    second = Equation(
        middle, batch + rank + made, whole.output, whole.ellipsis, 0, whole.output_place
    )
    return first, second


def unused_letters(letters: str) -> str:
    """Returns the letters that are not among some."""
    return "".join(letter for letter in string.ascii_letters if letter not in letters)


class KernelLayer(Module):
    """Base of layers whose kernels can be quantized and adapted.

    A layer reads its kernels by ``kernel.value``, which a ``nn.QuantizedKernel`` has too, and says
    by ``kernel_maps`` how it multiplies by them. For one kernel nothing else is needed if the
    result is the product, plus what does not depend on the kernel: the low-rank term, by the map's
    equation, is added to the result. A layer that multiplies in another way overrides
    ``low_rank_term``; one of several kernels, or that computes further with the product, such as an
    activation, ``call_with_terms``. One with an ``attend`` beside its call, as ``nn.Embed`` has,
    says by ``attend_with_terms(x, terms, out_sharding)`` what that adds. A subclass with a
    ``__call__`` or ``attend`` of its own says ``kernel_maps`` again, or is not adapted.

    Attributes:
        dtype: Compute dtype of low-rank terms; None promotes the input and the term's kernels.
        takes_precision: Whether the layer multiplies with its attribute ``precision``, which
            ``sx.surgery.with_precision`` then sets.
        is_adapted_unasked: Whether ``sx.surgery.lora`` adapts the layer inside of what is selected,
            and not only where it is selected itself.

    Example:
        >>> import jax.numpy as jnp, shardax as sx
        >>> class Mirrored(sx.nn.KernelLayer):
        ...     def __init__(self, features):
        ...         self.kernel = sx.Param(jnp.eye(features))
        ...     def __call__(self, x):
        ...         return x @ self.kernel.value[:, ::-1]
        ...     def kernel_maps(self):
        ...         return {"kernel": sx.nn.KernelMap.of("...i,ij->...j")}
        ...     def low_rank_term(self, x, y, a, b, out_sharding):
        ...         return (x @ a @ b)[..., ::-1]
        >>> type(sx.quantize(Mirrored(4), "int8").kernel).__name__
        'QuantizedKernel'
        >>> adapted = sx.surgery.lora(sx.select(Mirrored(4)), rank=2)
        >>> adapted.b.value = jnp.ones((2, 4))
        >>> x = jnp.ones((3, 4))
        >>> bool(jnp.allclose(adapted(x), sx.surgery.merge_lora(adapted)(x), rtol=1e-4))
        True
    """

    dtype: np.dtype | None = None
    takes_precision = False
    is_adapted_unasked = True

    def kernel_maps(self) -> Mapping[str, KernelMap]:
        """Returns how the layer multiplies by each kernel, by names of attributes."""
        raise NotImplementedError(f"{type(self).__name__} does not say its kernel_maps.")

    def low_rank_problem(self) -> str | None:
        """Returns why the kernels have no low-rank terms, if so; begins after "is a Name"."""
        return None

    def call_with_terms(self, x: Any, terms: Mapping[str, LowRankTerm], **options: Any) -> Any:
        """Calls the layer as if its kernels were the sums of them and their terms.

        Args:
            x: The input.
            terms: The low-rank term of each kernel, by names of attributes.
            **options: What the layer takes by name, such as ``out_sharding``.

        Returns:
            An array as the layer returns it.
        """
        if len(terms) != 1:
            raise NotImplementedError(
                f"{type(self).__name__} has the kernels {', '.join(terms)}. A layer of several "
                f"kernels says in its call_with_terms how their terms are added."
            )
        layer: Any = self
        y = layer(x, **options)

        (term,) = terms.values()
        extra = self.low_rank_term(x, y, term.a, term.b, options.get("out_sharding"))
        return y + (term.scale * extra).astype(y.dtype)

    def low_rank_term(self, x: Any, y: Any, a: jax.Array, b: jax.Array, out_sharding: Any) -> Any:
        """Returns what a low-rank term of the only kernel adds to the result, without its scale.

        Args:
            x: The input of the layer.
            y: Its result, whose shape the returned array has.
            a: The kernel of the first product, in the dtype of its parameter.
            b: The kernel of the second product.
            out_sharding: Sharding of the result over Explicit mesh axes, or None.
        """
        (kernel_map,) = self.kernel_maps().values()
        whole, (first, second) = kernel_map.equation, kernel_map.factors
        x = whole.expanded(as_array(x))
        extra = x.ndim - len(whole.input)

        x, a, b = cast_all(self.dtype, x, a, b)
        middle = einsum(first.spelled_out(extra), x, a)
        return einsum(second.spelled_out(extra), middle, b, out_sharding)
