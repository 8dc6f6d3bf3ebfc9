# SPDX-License-Identifier: Apache-2.0
"""What layers over named axes share: parameters, and checking what they are given.

A parameter of such a layer is an ordinary lazy ``Param`` with one axis name per dimension, so
layouts, optimizers and checkpoints treat it as any other. ``wrap`` makes a named array of it where
the layer computes. The names of a layer's inputs and results are the names of its parameters' axes,
which is what rules map to mesh axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from shardax.core.errors import AxisNamesError, LayerConfigError, LayerInputError, NamedAxesError
from shardax.core.lazy import Init, Initializer
from shardax.core.rng import Rngs
from shardax.core.variables import Param
from shardax.named.array import NamedArray
from shardax.named.names import check_sizes_by_name, shown
from shardax.partition.explicit import align

Axes = Mapping[Any, int]
ones = jax.nn.initializers.ones
zeros = jax.nn.initializers.zeros


@dataclasses.dataclass(frozen=True)
class AxisSizes:
    """Axes as layers keep them, hashable.

    Attributes:
        names: The names.
        sizes: The sizes.
    """

    names: tuple[Any, ...]
    sizes: tuple[int, ...]

    def items(self) -> Iterator[tuple[Any, int]]:
        """Yields names with sizes."""
        return zip(self.names, self.sizes, strict=True)

    def __repr__(self) -> str:
        return shown(self.names, self.sizes)


def check_axes(layer: str, option: str, axes: Any, *, empty: bool = False) -> AxisSizes:
    """Returns the axes that a layer was made with.

    Args:
        layer: The layer's name, for messages.
        option: The option's name.
        axes: A mapping from names to sizes.
        empty: Whether there may be none.

    Raises:
        LayerConfigError: If it is no such mapping.

    Example:
        >>> check_axes("Linear", "input_axes", {"embed": 4})
        {'embed': 4}
    """
    try:
        names, sizes = check_sizes_by_name(axes, least=1)
    except (AxisNamesError, NamedAxesError) as error:
        raise LayerConfigError(
            f"{layer} needs sizes by name: {option}={axes!r}. {error}"
        ) from error
    if not names and not empty:
        raise LayerConfigError(f"{layer} needs an axis at least, but {option}={axes!r}.")
    return AxisSizes(names, sizes)


def parameter(
    initializer: Initializer,
    axes: AxisSizes,
    dtype: Any,
    rngs: Rngs | None,
) -> Param[Any]:
    """Makes a lazy parameter whose dimensions have the given names and sizes.

    Constants draw nothing from the random streams.
    """
    source = None if initializer in (ones, zeros) else rngs
    return Param(Init(initializer, axes.sizes, dtype, rngs=source), axes=axes.names)


def check_input(layer: str, x: Any, expected: AxisSizes, absent: Iterable[Any] = ()) -> NamedArray:
    """Checks the axes of an input.

    Args:
        layer: The layer and how it was made, for messages.
        x: The input.
        expected: The axes that it must have.
        absent: Names that it must not have.

    Returns:
        The input.

    Raises:
        LayerInputError: If it is no named array or its axes do not fit; says of each axis that does
            not what was expected and what was found.
    """
    if not isinstance(x, NamedArray):
        shape = f" of shape {tuple(x.shape)}" if hasattr(x, "shape") else ""
        raise LayerInputError(
            f"{layer} takes a NamedArray, but was given {type(x).__name__}{shape}. Name the "
            f"dimensions: named.wrap(x, {', '.join(map(repr, ('batch', *expected.names)))})."
        )
    own = x.axes
    wrong = [
        f"axis {name!r}: expected size {size}, found {own.get(name, 'no such axis')}"
        for name, size in expected.items()
        if own.get(name) != size
    ]
    wrong += [
        f"axis {name!r}: expected no such axis, as the layer makes it, found size {own[name]}"
        for name in absent
        if name in own
    ]
    if wrong:
        lines = "".join(f"\n  {each}" for each in wrong)
        raise LayerInputError(
            f"{layer} was given {x.dtype}{shown(x.dims, x.shape)}, whose axes do not fit:{lines}\n"
            f"Exchange names with x.rename({{found: expected}})."
        )
    return x


def beside(variable: Param[Any], x: NamedArray, dtype: Any) -> NamedArray:
    """Returns a parameter ready to be combined with ``x`` elementwise, in a dtype.

    Over Explicit mesh axes it takes the layout of the dimensions that it meets.
    """
    names = variable.axes or ()
    data = align(variable.value.astype(dtype), x.data, [x.dims.index(name) for name in names])
    return NamedArray._make(data, names)
