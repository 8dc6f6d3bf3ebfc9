# SPDX-License-Identifier: Apache-2.0
"""Linear layer, and the arithmetic of layers: casts, contractions, layouts.

Over *Explicit* mesh axes an array's sharding is part of its type, and JAX refuses an operation
whose result could be laid out in several ways. A layer has one sensible answer, found here from the
operands alone, so that a model needs no rules in scope and no shardings by hand:

- A contraction keeps the layout of the dimensions that remain; a mesh axis that both operands want
  goes to the input, so the batch stays where it is and the parameter is gathered. The sum over a
  split contracted dimension is left to the compiler, as over Auto axes.
- A lookup has the layout of the indices, then that of the row.
- A parameter that is combined elementwise takes the layout of the dimensions it meets.

Over Auto axes, on one device and for Manual axes (inside ``shard_map``) types have no sharding, and
nothing is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core._jax import INLINE
from shardax._core.init.lazy import Initializer
from shardax._core.init.rng import Rngs
from shardax._core.module import Module
from shardax._transforms.errors import LayerConfigError
from shardax.nn import parameters
from shardax.partition.rules import SpecEntry, mesh_axes_of


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
        precision: As in ``jax.lax.dot_general``.
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

    precision: Any = None
    preferred_element_type: Any = None

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
        precision: Any = None,
        preferred_element_type: Any = None,
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
        kernel = self.kernel.value
        count = len(self.in_features) if isinstance(self.in_features, tuple) else 1
        name = f"Linear(in_features={self.in_features}, out_features={self.out_features})"
        x = take_features(name, x, kernel.shape[:count], "in_features")
        x, kernel = cast_all(self.dtype, x, kernel)
        options = self.precision, self.preferred_element_type
        y = contract(x, kernel, range(count), out_sharding, *options)
        return y if self.bias is None else add_bias(y, self.bias.value)


def numbered(name: str, count: int) -> tuple[str, ...]:
    """Returns a name, or several with numbers."""
    return (name,) if count == 1 else tuple(f"{name}_{position}" for position in range(count))


def take_precision(layer: Module, precision: Any, preferred_element_type: Any) -> None:
    """Sets the precision of a layer, or raises if not valid."""
    # Set only where given: a layer that has the defaults looks as it did before there were others.
    if precision is not None:
        try:
            for entry in precision if isinstance(precision, tuple) else (precision,):
                if not isinstance(entry, jax.lax.DotAlgorithmPreset):
                    jax.lax.Precision(entry)
        except (TypeError, ValueError) as error:
            raise LayerConfigError(
                f"{type(layer).__name__} has precision={precision!r}. It takes None, 'default', "
                f"'high', 'highest', or a jax.lax.Precision."
            ) from error
        layer.precision = precision
    if preferred_element_type is not None:
        layer.preferred_element_type = parameters.canonical_dtype(preferred_element_type)


def with_layout(
    function: Callable[..., jax.Array], out_sharding: Any, *arrays: jax.Array
) -> jax.Array:
    """Runs a function with Explicit mesh axes as Auto."""
    if out_sharding is None:
        return function(*arrays)
    result: Any = jax.sharding.auto_axes(function, out_sharding=out_sharding)
    return result(*arrays)


def as_array(value: Any) -> jax.Array:
    """Returns a number, NumPy array or Variable as a JAX array."""
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def take_features(
    layer: str, x: Any, sizes: tuple[int, ...], option: str = "features", hint: str = ""
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
    compute_dtype = jnp.result_type(*arrays) if dtype is None else dtype
    return tuple(
        array if array.dtype == compute_dtype else array.astype(compute_dtype) for array in arrays
    )


def at_least_float32(dtype: Any) -> np.dtype:
    """Returns the dtype of statistics over an array."""
    # Not by JAX's promotion, which a user may forbid: these casts are meant.
    dtype = jnp.dtype(dtype)
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4
    return dtype if is_wide else jnp.dtype(jnp.float32)


def result_dtype(dtype: Any, x: jax.Array, *parameters: jax.Array | None) -> Any:
    """Returns the compute dtype; without one, the promoted dtype."""
    if dtype is not None:
        return dtype
    promoted = jnp.result_type(x, *(parameter for parameter in parameters if parameter is not None))
    return promoted if jnp.issubdtype(promoted, jnp.inexact) else at_least_float32(promoted)


def contract(
    x: jax.Array,
    kernel: jax.Array,
    dimensions: Sequence[int],
    out_sharding: Any = None,
    precision: Any = None,
    preferred: Any = None,
) -> jax.Array:
    """Sums products over the last dimensions of ``x`` and given kernel dimensions."""
    # The result has the shape (..., *remaining dimensions of the kernel) and the preferred
    # dtype, else that of ``x``.
    free = x.ndim - len(dimensions)
    if out_sharding is None:
        free_dims = [axis for axis in range(kernel.ndim) if axis not in dimensions]
        out_sharding = joined_sharding(((x, range(free)), (kernel, free_dims)))
    # In this order and not by jnp.einsum, which contracts several dimensions last one first: XLA
    # on CPU then copies both operands.
    contracted = (tuple(range(free, x.ndim)), tuple(dimensions))
    return _dot_general(x, kernel, contracted, out_sharding, precision, preferred)


# A unit as ``jnp.einsum`` is, so that layers of one shape are traced and differentiated once.
@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5), inline=INLINE)
def _dot_general(
    x: jax.Array, kernel: jax.Array, contracted: Any, out_sharding: Any, precision: Any, wide: Any
) -> jax.Array:
    return jax.lax.dot_general(
        x,
        kernel,
        (contracted, ((), ())),
        precision=precision,
        preferred_element_type=x.dtype if wide is None else wide,
        out_sharding=out_sharding,
    )


def einsum(
    equation: str, x: jax.Array, kernel: jax.Array, out_sharding: Any = None, **options: Any
) -> jax.Array:
    """Runs ``jnp.einsum`` without ellipses, laid out over Explicit mesh axes."""
    if out_sharding is None:
        inputs, output = equation.split("->")
        first, second = inputs.split(",")
        parts = [
            (x, (first.index(letter),)) if letter in first else (kernel, (second.index(letter),))
            for letter in output
        ]
        out_sharding = joined_sharding(parts)
    return jnp.einsum(equation, x, kernel, out_sharding=out_sharding, **options)


def add_bias(y: jax.Array, bias: jax.Array, dimensions: Sequence[int] | None = None) -> jax.Array:
    """Adds a bias over given dimensions, by default the last."""
    places = range(y.ndim - bias.ndim, y.ndim) if dimensions is None else dimensions
    bias = align(bias if bias.dtype == y.dtype else bias.astype(y.dtype), y, places)
    return y + jax.lax.expand_dims(bias, [i for i in range(y.ndim) if i not in places])


def explicit_entries(array: jax.Array) -> tuple[SpecEntry, ...] | None:
    """Mesh axes of each dimension in the array's type, or None."""
    entries = tuple(jax.typeof(array).sharding.spec)
    return entries if any(entry is not None for entry in entries) else None


def explicit_sharding(array: jax.Array) -> NamedSharding | None:
    """Sharding of an array's type over Explicit axes, or None."""
    return None if explicit_entries(array) is None else jax.typeof(array).sharding


def joined_sharding(parts: Iterable[tuple[jax.Array, Sequence[int]]]) -> NamedSharding | None:
    """Sharding of a result with several operands' dimensions, for ``out_sharding=``."""
    # ``parts`` are pairs of an operand and those of its dimensions that the result has, in the
    # result's order. Where two want one mesh axis, the earlier has it. None if no operand is split.
    array_entries = [(array, explicit_entries(array), dimensions) for array, dimensions in parts]
    mesh = next(
        (
            jax.typeof(array).sharding.mesh
            for array, entries, _ in array_entries
            if entries is not None
        ),
        None,
    )
    if mesh is None:
        return None
    used_axes: set[str] = set()
    spec: list[SpecEntry] = []
    for _, entries, dimensions in array_entries:
        for dimension in dimensions:
            entry = None if entries is None else entries[dimension]
            spec.append(None if used_axes.intersection(mesh_axes_of(entry)) else entry)
            used_axes.update(mesh_axes_of(spec[-1]))
    return NamedSharding(mesh, PartitionSpec(*spec))


def align(parameter: jax.Array, x: jax.Array, dimensions: Sequence[int] | None = None) -> jax.Array:
    """Lays a parameter out like the dimensions it meets elementwise."""
    # ``dimensions`` are those of ``x``, the last ones by default.
    entries = explicit_entries(parameter)
    if entries is None:
        return parameter
    every = tuple(jax.typeof(x).sharding.spec)
    last = range(x.ndim - parameter.ndim, x.ndim)
    aligned = tuple(every[i] for i in (last if dimensions is None else dimensions))
    if aligned == entries:
        return parameter
    mesh = jax.typeof(parameter).sharding.mesh
    return jax.sharding.reshard(parameter, NamedSharding(mesh, PartitionSpec(*aligned)))
