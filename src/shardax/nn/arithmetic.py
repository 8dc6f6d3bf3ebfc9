# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of layers: casts, contractions and biases."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import AmaxHistory, Init, Module
from shardax._parallel.kernels import is_choosing, platform_in_scope, takes_tokamax
from shardax.extend import INLINE, align, explicit_entries, joined_sharding
from shardax.nn import parameters
from shardax.nn.errors import LayerConfigError, LayerInputError


def as_array(value: object) -> jax.Array:
    """Returns a number, NumPy array or Variable as a JAX array."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def take_features(
    layer: str, x: object, sizes: tuple[int, ...], option: str = "features", hint: str = ""
) -> jax.Array:
    """Returns an input as an array, or raises if sizes differ."""
    x = as_array(x)
    last_sizes = x.shape[-len(sizes) :]
    if last_sizes != sizes:
        actual = last_sizes[0] if len(last_sizes) == 1 else last_sizes
        parameters.refuse_input(
            layer,
            f"an input of shape ({', '.join(['...', *map(str, sizes)])})",
            x,
            hint or f"Make the layer with {option}={actual}, or bring the features to the end.",
        )
    return x


def cast_all(dtype: np.dtype | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Casts arrays to the compute dtype; None promotes them to their widest."""
    if dtype is None:
        # Mostly they have one dtype, of which JAX's promotion would take a while to say so.
        dtype = arrays[0].dtype
        for array in arrays:
            if array.dtype != dtype:
                dtype = jnp.result_type(*arrays)
                break
    return tuple([array if array.dtype == dtype else array.astype(dtype) for array in arrays])


def at_least_float32(dtype: jax.typing.DTypeLike) -> np.dtype:
    """Returns the dtype of statistics over an array."""
    # Not by JAX's promotion, which a user may forbid: these casts are meant.
    dtype = jnp.dtype(dtype)
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4
    return dtype if is_wide else jnp.dtype(jnp.float32)


def result_dtype(
    dtype: jax.typing.DTypeLike | None, x: jax.Array, *parameters: jax.Array | None
) -> Any:
    """Returns the compute dtype; without one, the promoted dtype."""
    if dtype is not None:
        return dtype
    promoted = jnp.result_type(x, *(parameter for parameter in parameters if parameter is not None))
    return promoted if jnp.issubdtype(promoted, jnp.inexact) else at_least_float32(promoted)


def uses_tokamax(kind: str, layer: str, x: Any, reason: Callable[[], str]) -> bool:
    """Whether a call runs tokamax's kernel, or raises if it cannot."""
    if not is_choosing(kind):
        return False
    is_taken, refusal = takes_tokamax(kind, layer, x, reason())
    if refusal:
        raise LayerInputError(
            f'{layer} does not run by {kind}="tokamax" for {x.dtype}'
            f"{list(x.shape)} on {platform_in_scope()}: {refusal}. For XLA's operations where "
            f'they are needed: sx.kernels({kind}="auto").'
        )
    return is_taken


def take_precision(
    layer: Module,
    precision: object,
    preferred_element_type: jax.typing.DTypeLike | None,
    has_fp8: bool = True,
) -> None:
    """Sets the precision of a layer, or raises if not valid."""
    # Set only where given: a layer that has the defaults looks as it did before there were others.
    if precision == "fp8" and has_fp8:
        layer.precision = precision
    elif precision == "fp8-delayed" and has_fp8:
        layer.precision = DelayedScaling()
    elif precision is not None:
        try:
            for entry in precision if isinstance(precision, tuple) else (precision,):
                if not isinstance(entry, jax.lax.DotAlgorithmPreset):
                    jax.lax.Precision(entry)
        except (TypeError, ValueError) as error:
            names = "None, 'default', 'high', 'highest'" + (
                ", 'fp8', 'fp8-delayed'" if has_fp8 else ""
            )
            raise LayerConfigError(
                f"{type(layer).__name__} has precision={precision!r}. It takes {names}, or a "
                f"jax.lax.Precision."
            ) from error
        layer.precision = precision

    if preferred_element_type is not None:
        layer.preferred_element_type = parameters.canonical_dtype(preferred_element_type)


def contract(
    x: jax.Array,
    kernel: jax.Array,
    dimensions: Sequence[int],
    out_sharding: object = None,
    precision: object = None,
    preferred: object = None,
    bias: jax.Array | None = None,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """Sums products over the last dimensions of ``x`` and given kernel dimensions.

    Args:
        x: Shape (..., *dimensions that are summed over).
        kernel: The kernel.
        dimensions: Those of its dimensions that are summed over.
        out_sharding: Sharding of the result over Explicit mesh axes; by default each dimension that
            remains keeps its own.
        precision: As in ``jax.lax.dot_general``, or in fp8.
        preferred: Dtype of the result; None for the compute dtype.
        bias: What is added over the last dimensions of the result.
        dtype: Compute dtype, to which ``x`` and the kernel are cast; None promotes them.

    Returns:
        Shape (..., *remaining dimensions of the kernel).
    """
    summed = tuple(dimensions)
    if out_sharding is None:
        out_sharding = _sharding_of_product(x, kernel, summed)

    amax = None
    if isinstance(precision, DelayedScaling):
        amax, precision = precision.update(*cast_all(dtype, x, kernel)), "fp8"

    options = summed, out_sharding, precision, preferred, dtype
    return _dot_general(x, kernel, bias, amax, *options)


def _sharding_of_product(
    x: jax.Array, kernel: jax.Array, summed: tuple[int, ...]
) -> jax.sharding.NamedSharding | None:
    """Returns the sharding of a product, each remaining dimension as it is."""
    if explicit_entries(x) is None and explicit_entries(kernel) is None:
        return None
    kernel_dimensions = [axis for axis in range(kernel.ndim) if axis not in summed]
    return joined_sharding(((x, range(x.ndim - len(summed))), (kernel, kernel_dimensions)))


# A unit as ``jnp.einsum`` is, so that layers of one shape are traced and differentiated once.
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8), inline=INLINE)
def _dot_general(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    amax: Any,
    summed: tuple[int, ...],
    out_sharding: object,
    precision,
    wide,
    dtype: np.dtype | None,
) -> jax.Array:
    x, kernel = cast_all(dtype, x, kernel)

    # In this order and not by jnp.einsum, which contracts several dimensions last one first: XLA
    # on CPU then copies both operands.
    contracted = (tuple(range(x.ndim - len(summed), x.ndim)), summed)
    multiply = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(contracted, ((), ())),
        precision=None if precision == "fp8" else precision,
        preferred_element_type=x.dtype if wide is None else wide,
        out_sharding=out_sharding,
    )

    y = fp8_product(multiply, x, kernel, amax) if precision == "fp8" else multiply(x, kernel)
    return y if bias is None else add_bias(y, bias)


def einsum(
    equation: str, x: jax.Array, kernel: jax.Array, out_sharding: Any = None, **options: Any
) -> jax.Array:
    """Runs ``jnp.einsum`` without ellipses, laid out over Explicit mesh axes."""
    if out_sharding is None:
        inputs, output = equation.split("->")
        first, second = inputs.split(",")
        # A dimension of size 1 is split nowhere, so the other operand's is kept.
        is_broadcast = [size == 1 for size in x.shape]
        parts = [
            (kernel, (second.index(letter),))
            if letter in second and (letter not in first or is_broadcast[first.index(letter)])
            else (x, (first.index(letter),))
            for letter in output
        ]
        out_sharding = joined_sharding(parts)

    amax, precision = None, options.get("precision")
    if isinstance(precision, DelayedScaling):
        amax, precision = precision.update(x, kernel), "fp8"

    if precision == "fp8":
        options["precision"] = None
        multiply = functools.partial(jnp.einsum, equation, out_sharding=out_sharding, **options)
        return fp8_product(multiply, x, kernel, amax)
    return jnp.einsum(equation, x, kernel, out_sharding=out_sharding, **options)


def add_bias(y: jax.Array, bias: jax.Array, dimensions: Sequence[int] | None = None) -> jax.Array:
    """Adds a bias over given dimensions, by default the last."""
    places = range(y.ndim - bias.ndim, y.ndim) if dimensions is None else dimensions
    return _add_over(y, bias, tuple(places))


# A unit: called eagerly, each operation in it would take longer than the whole.
@functools.partial(jax.jit, static_argnums=2, inline=INLINE)
def _add_over(y: jax.Array, bias: jax.Array, dimensions: tuple[int, ...]) -> jax.Array:
    bias = align(bias.astype(y.dtype), y, dimensions)
    return y + jax.lax.expand_dims(bias, [i for i in range(y.ndim) if i not in dimensions])


# --- products in fp8 ---
#
# Operands are rounded by the largest magnitude that they have in this call (current scaling), or
# had in the calls before (delayed scaling), for which layers keep a history; Micikevicius et al.,
# "FP8 Formats for Deep Learning", 2022. Gradients have none, and are scaled by their current one. A
# scale is a power of two, by which nothing is rounded a second time. The product is that of
# ``fp8 * scale`` in the compute dtype: the form in which XLA looks for products of fp8 on devices
# that have them, with the same operands on others.

Multiply = Callable[[jax.Array, jax.Array], jax.Array]

_OPERAND = jnp.float8_e4m3fn, 448.0
_GRADIENT = jnp.float8_e5m2, 57344.0


_HISTORY = 16  # calls


class DelayedScaling(Module):
    """Largest magnitudes of the input and the kernel in earlier calls."""

    def __init__(self, lead: Sequence[int] = (), names: Sequence[str | None] = ()) -> None:
        # ``lead`` are dimensions of a stack of layers.
        shape, axes = (*lead, _HISTORY), (*names, None)
        self.input = AmaxHistory(Init(parameters.zeros, shape, np.float32), axes=axes)
        self.kernel = AmaxHistory(Init(parameters.zeros, shape, np.float32), axes=axes)
        # ``model.eval()`` sets it: evaluation scales as training did last, and records nothing.
        self.deterministic = False

    def update(self, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns magnitudes to scale by, and records this call's."""
        pairs = (self.input, x), (self.kernel, kernel)
        first, second = (self._recorded(history, array) for history, array in pairs)
        return first, second

    def _recorded(self, history: AmaxHistory[Any], array: jax.Array) -> jax.Array:
        now, earlier = jax.lax.stop_gradient(_amax(array)), history.value

        most = jnp.max(earlier)
        most = jnp.where(most > 0, most, now)  # there were no calls yet
        if not self.deterministic:
            # A step that is skipped for an overflow leaves no trace.
            added = jnp.where(jnp.isfinite(now), now, earlier[0])
            history.value = jnp.concatenate([added[None], earlier[:-1]])
        return jnp.where(jnp.isfinite(now), most, now)


def fp8_product(multiply: Multiply, x: jax.Array, kernel: jax.Array, amax: Any = None) -> jax.Array:
    """Multiplies operands rounded to fp8; gradients are rounded likewise."""
    # ``amax`` are the magnitudes by which operands are scaled; numbers above are clipped.
    if amax is None:
        amax = jax.lax.stop_gradient((_amax(x), _amax(kernel)))
    return _scaled_product(multiply, x, kernel, amax)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scaled_product(multiply: Multiply, x: jax.Array, kernel: jax.Array, amax: Any) -> jax.Array:
    return _forward(multiply, x, kernel, amax)[0]


def _forward(multiply: Multiply, x: jax.Array, kernel: jax.Array, amax: Any):
    # What is kept for the backward pass has a byte for each number.
    rounded = [
        (*_rounded(array, most, *_OPERAND), jnp.zeros(0, array.dtype))
        for array, most in zip((x, kernel), amax, strict=True)
    ]
    return multiply(*map(_widened, rounded)), rounded


def _backward(multiply: Multiply, rounded, cotangent: jax.Array) -> tuple[Any, ...]:
    numbers, scale = _rounded(cotangent, _amax(cotangent), *_GRADIENT)
    _, pull = jax.vjp(multiply, *map(_widened, rounded))
    return (*pull(numbers.astype(cotangent.dtype) * scale), None)


_scaled_product.defvjp(_forward, _backward)


def _amax(x: jax.Array) -> jax.Array:
    """Returns the largest magnitude, in float32."""
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)


def _rounded(
    x: jax.Array, most: jax.Array, dtype: Any, largest: float
) -> tuple[jax.Array, jax.Array]:
    """Returns fp8 numbers and the scale of them all."""
    limits = jnp.finfo(x.dtype)
    _, exponent = jnp.frexp(most / largest)
    exponent = jnp.clip(exponent, max(int(limits.minexp), -126), min(int(limits.maxexp), 128) - 1)
    scale = jnp.ldexp(jnp.float32(1), exponent)
    scale = jnp.where(jnp.isfinite(most), scale, jnp.nan).astype(x.dtype)
    return jnp.clip(x / scale, -largest, largest).astype(dtype), scale


def _widened(rounded: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    numbers, scale, like = rounded
    return numbers.astype(like.dtype) * scale
