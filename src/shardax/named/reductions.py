# SPDX-License-Identifier: Apache-2.0
"""Reductions and other methods of named arrays that work along axes.

``axis`` is a name, a number (which positional dimension), or a tuple of these. Left out, it is all
positional dimensions, names being what a function is run along (``nmap``); an array that has none
is reduced whole. ``x.sum("batch")``, ``x.untag("batch").sum()`` and, if there is no other axis,
``x.sum()`` are therefore the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardax.core.errors import NamedAxesError
from shardax.named.align import Operand, check_sizes, expand
from shardax.named.base import Stored
from shardax.named.names import Dims, positional_places
from shardax.named.operators import operand_of


def places_of(dims: Dims, axis: Any) -> tuple[int, ...]:
    """Returns the dimensions that an ``axis`` argument means.

    Args:
        dims: The dims of the array.
        axis: A name, the number of a positional dimension, a tuple or list of these, or None.

    Raises:
        NamedAxesError: If there is no such axis, or one is given twice.

    Example:
        >>> places_of(("a", None, "b"), ("b", 0)), places_of(("a", None, "b"), None)
        ((2, 1), (1,))
    """
    if axis is None:
        return positional_places(dims) or tuple(range(len(dims)))
    several = isinstance(axis, list) or (isinstance(axis, tuple) and axis not in dims)
    places = tuple(place_of(dims, each) for each in (axis if several else (axis,)))
    if len(set(places)) < len(places):
        raise NamedAxesError(f"axis={axis!r} has an axis twice; the dims are {dims}.")
    return places


def place_of(dims: Dims, axis: Any) -> int:
    """Returns the dimension that a name, or the number of a positional dimension, means.

    Raises:
        NamedAxesError: If there is none.
    """
    if axis is not None and axis in dims:
        return dims.index(axis)
    positional = positional_places(dims)
    if isinstance(axis, (int, np.integer)) and not isinstance(axis, bool):
        if -len(positional) <= axis < len(positional):
            return positional[axis]
        raise NamedAxesError(
            f"There is no axis {axis}: the dims {dims} have {len(positional)} positional "
            f"dimensions, which is what a number counts. Give the axis by its name."
        )
    names = ", ".join(repr(name) for name in dims if name is not None) or "none"
    raise NamedAxesError(f"There is no axis {axis!r}; the names are {names}.")


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that removes axes."""

    def method(
        self: Stored, axis: Any = None, *, keepdims: bool = False, where: Any = None, **options: Any
    ) -> Any:
        data, dims = self._parts()
        places = places_of(dims, axis)
        if where is not None:
            options["where"] = _mask(where, Operand(data, dims))
        options = {name: value for name, value in options.items() if value is not None}
        if keepdims:
            _check_keepdims(dims, places)
            return self._make(function(data, axis=places, keepdims=True, **options), dims)
        kept = tuple(name for place, name in enumerate(dims) if place not in places)
        return self._make(function(data, axis=places, **options), kept)

    return method


def _mask(where: Any, reduced: Operand) -> Any:
    mask = operand_of(where, reduced)
    if not isinstance(mask, Operand):
        return mask
    check_sizes((reduced, mask))
    extra = [name for name in mask.dims if name is not None and name not in reduced.dims]
    if extra or len(positional_places(mask.dims)) > len(positional_places(reduced.dims)):
        raise NamedAxesError(
            f"where= has the dims {mask.dims}, of which the array with dims {reduced.dims} lacks "
            f"{extra or 'positional ones'}. Multiply first: (x * mask).sum(...)."
        )
    return expand(mask, reduced.dims)


def _check_keepdims(dims: Dims, places: tuple[int, ...]) -> None:
    named = [dims[place] for place in places if dims[place] is not None]
    if named:
        raise NamedAxesError(
            f"keepdims=True would leave {named} with size 1, which meets no array of another "
            f"size. It is not needed: what lacks a name is repeated along it."
        )


def _along(function: Callable[..., Any], removes: bool = False) -> Callable[..., Any]:
    """Returns the method that works along one axis, and keeps or removes it."""

    def method(self: Stored, axis: Any = None, **options: Any) -> Any:
        data, dims = self._parts()
        places = places_of(dims, axis)
        if len(places) != 1:
            raise NamedAxesError(
                f"{function.__name__} works along one axis, but axis={axis!r} is {len(places)} of "
                f"the dims {dims}, in no order that their names give. Name one: "
                f"x.{function.__name__}({next(iter(dims), 'name')!r})."
            )
        (place,) = places
        kept = (*dims[:place], *dims[place + 1 :]) if removes else dims
        return self._make(function(data, axis=place, **options), kept)

    return method


class Reductions(Stored):
    """The methods that work along axes."""

    __slots__ = ()

    sum, prod = _reduction(jnp.sum), _reduction(jnp.prod)
    mean, std, var = _reduction(jnp.mean), _reduction(jnp.std), _reduction(jnp.var)
    max, min = _reduction(jnp.max), _reduction(jnp.min)
    all, any = _reduction(jnp.all), _reduction(jnp.any)
    argmax, argmin = _along(jnp.argmax, removes=True), _along(jnp.argmin, removes=True)
    cumsum, cumprod = _along(jnp.cumsum), _along(jnp.cumprod)
    sort, argsort = _along(jnp.sort), _along(jnp.argsort)
