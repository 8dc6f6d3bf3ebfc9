# SPDX-License-Identifier: Apache-2.0
"""Operators of named arrays.

Arithmetic, comparison and bitwise operators work element by element: dimensions meet by name
(``shardax.named.align``). They call the operator of the plain arrays, so dtypes are promoted as
there. The other operand may be a number, a Variable, or an array without names, a JAX or NumPy
one, on either side. Such an array has positional dimensions only, and must find as many in the
named array: one that has more would otherwise multiply the result by dimensions that nobody named.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardax.core.arraylike import ArrayLike
from shardax.core.errors import NamedAxesError
from shardax.named.align import Operand, align
from shardax.named.base import Stored
from shardax.named.names import positional_places, shown

_NUMBERS = (bool, int, float, complex, np.generic)


def operand_of(value: Any, beside: Operand) -> Any:
    """Returns an operand for what stands beside a named array in an operation.

    Args:
        value: Anything.
        beside: The named array.

    Returns:
        An ``Operand``; a number as it is; ``NotImplemented`` for what is neither.

    Raises:
        NamedAxesError: If it is an array with more dimensions than ``beside`` has positional ones.
    """
    if isinstance(value, Stored):
        return Operand(*value._parts())
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, ArrayLike):
        return operand_of(value.value, beside)
    if not isinstance(value, (jax.Array, np.ndarray)):
        return NotImplemented
    if value.ndim == 0:
        return value
    if value.ndim > len(positional_places(beside.dims)):
        raise NamedAxesError(
            f"An array of shape {tuple(value.shape)} has no names to meet the axes "
            f"{shown(beside.dims, beside.data.shape)} by. Name its dimensions, "
            f"named.wrap(array, {', '.join(map(repr, _names_like(beside, value.ndim)))}), or, for "
            f"dimensions besides those, named.wrap(array)."
        )
    return Operand(jnp.asarray(value), (None,) * value.ndim)


def _names_like(beside: Operand, count: int) -> tuple[Any, ...]:
    """Names for an example."""
    names = [name for name in beside.dims if name is not None]
    return tuple((names + ["other"] * count)[:count])


def binary(function: Callable[[Any, Any], Any], reflected: bool = False) -> Callable[..., Any]:
    """Returns the method for a binary operator.

    Args:
        function: The operator on plain arrays.
        reflected: Whether the named array stands on the right.
    """

    def method(self: Stored, other: Any) -> Any:
        mine = Operand(*self._parts())
        found = operand_of(other, mine)
        if found is NotImplemented:
            return NotImplemented
        if not isinstance(found, Operand):
            data = function(found, mine.data) if reflected else function(mine.data, found)
            return self._make(data, mine.dims)
        left, right = (found, mine) if reflected else (mine, found)
        if left.dims == right.dims and left.data.shape == right.data.shape:
            return self._make(function(left.data, right.data), left.dims)
        (first, second), dims = align((left, right))
        return self._make(function(first, second), dims)

    return method


def unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns the method for a unary operator."""

    def method(self: Stored) -> Any:
        data, dims = self._parts()
        return self._make(function(data), dims)

    return method


def _both(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return binary(function), binary(function, reflected=True)


class Operators(Stored):
    """The operators."""

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

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __round__(self, digits: int | None = None) -> Any:
        data, dims = self._parts()
        return self._make(jnp.round(data, digits or 0), dims)
