# SPDX-License-Identifier: Apache-2.0
"""Alignment by name, operators and reductions of named arrays.

Named dimensions meet by name, wherever they are stored; positional ones as in NumPy, from the last.
A name that one operand lacks is repeated along; a name that both have has one size, also where that
is 1. An array without names beside a named one has positional dimensions only, and must find as
many there: more would multiply the result by dimensions that nobody named.

The ``axis`` of a reduction is a name, a number (which positional dimension), or a tuple of these.
Left out, it is all positional dimensions; an array that has none is reduced whole.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax import Slot, Variable
from shardax.extend import Options
from shardax.named import base
from shardax.named.base import (
    Dims,
    NamedAxesError,
    NamedStorage,
    Operand,
    parts_of,
    positional_dimensions,
    shown,
)

_NUMBERS = (bool, int, float, complex, np.generic)


@functools.lru_cache(maxsize=4096)
def joined(first: Dims, second: Dims) -> Dims:
    """Returns the dims of the result of an elementwise operation."""
    # Those of the operand with more positional dimensions, the first if both have as many; names
    # that only the other has stand in front: ("a", "b") and ("b", "c") give ("c", "a", "b").
    if len(positional_dimensions(second)) > len(positional_dimensions(first)):
        first, second = second, first
    return (*(name for name in second if name is not None and name not in first), *first)


@functools.lru_cache(maxsize=4096)
def _expansion(dims: Dims, target: Dims) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the permutation and the added dimensions towards a target."""
    sources = {target.index(name): i for i, name in enumerate(dims) if name is not None}
    mine, its = positional_dimensions(dims), positional_dimensions(target)
    sources |= dict(zip(its[len(its) - len(mine) :], mine, strict=True))
    order = tuple(sources[dimension] for dimension in sorted(sources))
    added = tuple(dimension for dimension in range(len(target)) if dimension not in sources)
    return order, added


def expand(operand: Operand, target: Dims) -> Any:
    """Returns an array with one dimension per entry of the target."""
    data, dims = operand
    if dims == target:
        return data
    permutation, added = _expansion(dims, target)
    data = base.transposed(data, permutation)
    return jax.lax.expand_dims(data, added) if added else data


def align(operands: Sequence[Operand]) -> tuple[list[Any], Dims]:
    """Expands arrays to their common dims, or raises NamedAxesError."""
    dims = functools.reduce(joined, (operand.dims for operand in operands))
    check_sizes(operands)
    return [expand(operand, dims) for operand in operands], dims


def check_sizes(operands: Sequence[Operand]) -> None:
    """Raises if names have two sizes or positional dimensions do not broadcast."""
    named_sizes(operands)
    shapes = {
        tuple(data.shape[dimension] for dimension in positional_dimensions(dims))
        for data, dims in operands
    }
    try:
        if len(shapes) > 1:
            np.broadcast_shapes(*shapes)
    except ValueError:
        raise NamedAxesError(
            f"The positional dimensions do not broadcast: {listing(operands)}. They meet from the "
            f"last, as in NumPy. Name them, x.tag(...), to say which belong together."
        ) from None


def named_sizes(operands: Sequence[Operand]) -> dict[Any, int]:
    """Returns the sizes of all names, or raises if one has two."""
    sizes: dict[Any, int] = {}
    clashing: dict[Any, None] = {}
    for data, dims in operands:
        for name, size in zip(dims, data.shape, strict=True):
            if name is not None and sizes.setdefault(name, size) != size:
                clashing[name] = None

    if clashing:
        first = next(iter(clashing))
        raise NamedAxesError(
            f"The sizes of the axis {', '.join(map(repr, clashing))} differ: {listing(operands)}. "
            f"A name says that two dimensions are the same; rename one, x.rename({{{first!r}: "
            f"...}}), or take the part that you mean, x[{{{first!r}: slice(...)}}]."
        )
    return sizes


def listing(operands: Sequence[Operand]) -> str:
    """Formats the axes of all operands, by position."""
    return "; ".join(
        f"argument {index} has {shown(dims, data.shape)}"
        for index, (data, dims) in enumerate(operands)
    )


def operand_of(value: object, mate: Operand) -> Any:
    """Returns an operand, a number, or NotImplemented for the other side."""
    if isinstance(value, NamedStorage):
        return parts_of(value)
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, (Slot, Variable)):
        return operand_of(value.value, mate)
    if not isinstance(value, (jax.Array, np.ndarray)):
        return NotImplemented
    if value.ndim == 0:
        return value

    if value.ndim > len(positional_dimensions(mate.dims)):
        names = [name for name in mate.dims if name is not None] + ["other"] * value.ndim
        raise NamedAxesError(
            f"An array of shape {tuple(value.shape)} has no names to meet the axes "
            f"{shown(mate.dims, mate.data.shape)} by. Name its dimensions, "
            f"named.wrap(array, {', '.join(map(repr, names[: value.ndim]))}), or, for "
            f"dimensions besides those, named.wrap(array)."
        )
    return Operand(jnp.asarray(value), (None,) * value.ndim)


def binary(function: Callable[[Any, Any], object], reflected: bool = False) -> Callable[..., Any]:
    """Returns the method for a binary operator, reflected or not."""

    def method(self: NamedStorage, other) -> Any:
        mine = self._parts()
        operand = operand_of(other, mine)
        if operand is NotImplemented:
            return NotImplemented

        if not isinstance(operand, Operand):
            data = function(operand, mine.data) if reflected else function(mine.data, operand)
            return self._make(data, mine.dims)

        left, right = (operand, mine) if reflected else (mine, operand)
        if left.dims == right.dims and left.data.shape == right.data.shape:
            return self._make(function(left.data, right.data), left.dims)
        (first, second), dims = align((left, right))
        return self._make(function(first, second), dims)

    return method


def unary(function: Callable[[Any], object]) -> Callable[..., Any]:
    """Returns the method for a unary operator."""

    def method(self: NamedStorage) -> Any:
        data, dims = self._parts()
        return self._make(function(data), dims)

    return method


def _both(function: Callable[[Any, Any], object]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return binary(function), binary(function, reflected=True)


class Operators(NamedStorage):
    """Operators of named arrays, element by element."""

    __slots__ = ()
    # NumPy arrays and numbers on the left leave the operation to the reflected operators here, and
    # NumPy's functions refuse, where they would make an array of objects.
    __array_ufunc__ = None
    __array_priority__ = 1000

    __add__, __radd__ = _both(operator.add)
    __sub__, __rsub__ = _both(operator.sub)
    __mul__, __rmul__ = _both(operator.mul)
    __truediv__, __rtruediv__ = _both(operator.truediv)
    __floordiv__, __rfloordiv__ = _both(operator.floordiv)
    __mod__, __rmod__ = _both(operator.mod)
    __pow__, __rpow__ = _both(operator.pow)
    __and__, __rand__ = _both(operator.and_)
    __or__, __ror__ = _both(operator.or_)
    __xor__, __rxor__ = _both(operator.xor)
    __lshift__, __rlshift__ = _both(operator.lshift)
    __rshift__, __rrshift__ = _both(operator.rshift)
    __lt__, __gt__ = binary(operator.lt), binary(operator.gt)
    __le__, __ge__ = binary(operator.le), binary(operator.ge)
    __eq__, __ne__ = binary(operator.eq), binary(operator.ne)  # element by element, as of arrays
    __hash__: Any = None  # equality is no truth value, so there is no hash
    __neg__, __pos__ = unary(operator.neg), unary(operator.pos)
    __abs__, __invert__ = unary(operator.abs), unary(operator.invert)

    def __divmod__(self, other: object) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: object) -> tuple[Any, Any]:
        return other // self, other % self

    def __round__(self, digits: int | None = None) -> Any:
        data, dims = self._parts()
        return self._make(jnp.round(data, digits or 0), dims)


def dimensions_of_axes(dims: Dims, axis: Any) -> tuple[int, ...]:
    """Returns the dimensions of one axis, several, or None, or raises."""
    if axis is None:
        return positional_dimensions(dims) or tuple(range(len(dims)))
    several = isinstance(axis, list) or (isinstance(axis, tuple) and axis not in dims)
    dimensions = tuple(dimension_of_axis(dims, name) for name in (axis if several else (axis,)))
    if len(set(dimensions)) < len(dimensions):
        raise NamedAxesError(f"axis={axis!r} has an axis twice; the dims are {dims}.")
    return dimensions


def dimension_of_axis(dims: Dims, axis: object) -> int:
    """Returns the dimension of a name or position, or raises."""
    if axis is not None and axis in dims:
        return dims.index(axis)
    positional = positional_dimensions(dims)
    if Options.is_integer(axis):
        if -len(positional) <= axis < len(positional):
            return positional[axis]
        raise NamedAxesError(
            f"There is no axis {axis}: the dims {dims} have {len(positional)} positional "
            f"dimensions, which is what a number counts. Give the axis by its name."
        )
    names = ", ".join(repr(name) for name in dims if name is not None) or "none"
    raise NamedAxesError(f"There is no axis {axis!r}; the names are {names}.")


def _reduction(function: Callable[..., object]) -> Callable[..., Any]:
    """Returns a method for removing axes."""

    def method(
        self: NamedStorage, axis=None, *, keepdims: bool = False, where=None, **options
    ) -> Any:
        data, dims = self._parts()

        dimensions = dimensions_of_axes(dims, axis)
        if where is not None:
            options["where"] = _mask(where, Operand(data, dims))
        options = {name: value for name, value in options.items() if value is not None}

        if keepdims:
            named = [dims[dimension] for dimension in dimensions if dims[dimension] is not None]
            if named:
                raise NamedAxesError(
                    f"keepdims=True would leave {named} with size 1, which meets no array of "
                    f"another size. It is not needed: what lacks a name is repeated along it."
                )
            return self._make(function(data, axis=dimensions, keepdims=True, **options), dims)

        kept_dims = tuple(
            name for dimension, name in enumerate(dims) if dimension not in dimensions
        )
        return self._make(function(data, axis=dimensions, **options), kept_dims)

    return method


def _mask(where: object, reduced: Operand):
    mask = operand_of(where, reduced)
    if not isinstance(mask, Operand):
        return mask
    check_sizes((reduced, mask))

    extra = [name for name in mask.dims if name is not None and name not in reduced.dims]
    if extra or len(positional_dimensions(mask.dims)) > len(positional_dimensions(reduced.dims)):
        raise NamedAxesError(
            f"where= has the dims {mask.dims}, of which the array with dims {reduced.dims} lacks "
            f"{extra or 'positional ones'}. Multiply first: (x * mask).sum(...)."
        )
    return expand(mask, reduced.dims)


def _along(function: Any, removes: bool = False) -> Callable[..., Any]:
    """Returns a method along one axis."""

    def method(self: NamedStorage, axis=None, **options) -> Any:
        data, dims = self._parts()
        dimensions = dimensions_of_axes(dims, axis)
        if len(dimensions) != 1:
            raise NamedAxesError(
                f"{function.__name__} works along one axis, but axis={axis!r} is "
                f"{len(dimensions)} of the dims {dims}, in no order that their names give. Name "
                f"one: x.{function.__name__}({next(iter(dims), 'name')!r})."
            )

        (dimension,) = dimensions
        kept_dims = (*dims[:dimension], *dims[dimension + 1 :]) if removes else dims
        return self._make(function(data, axis=dimension, **options), kept_dims)

    return method


class Reductions(NamedStorage):
    """Methods along axes."""

    __slots__ = ()

    sum, prod = _reduction(jnp.sum), _reduction(jnp.prod)
    mean, std, var = _reduction(jnp.mean), _reduction(jnp.std), _reduction(jnp.var)
    max, min = _reduction(jnp.max), _reduction(jnp.min)
    all, any = _reduction(jnp.all), _reduction(jnp.any)
    argmax, argmin = _along(jnp.argmax, removes=True), _along(jnp.argmin, removes=True)
    cumsum, cumprod = _along(jnp.cumsum), _along(jnp.cumprod)
    sort, argsort = _along(jnp.sort), _along(jnp.argsort)
