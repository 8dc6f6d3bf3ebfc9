# SPDX-License-Identifier: Apache-2.0
"""Running a function of plain arrays along names.

A function *lifted* over names sees, of every named array among its arguments, the slice at one
position along every name: an array with the positional dimensions only. It runs at every position
of the *union* of the arguments' names; an argument that lacks a name is the same at all positions
along it. One ``vmap`` per name does that, under the name, so that collectives inside can use it.
Each name is put last, in canonical order, so that results are stored in that order.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax._core.object import Object
from shardax._core.variable import Variable
from shardax._transforms.errors import ClosureError, MappedShardingError
from shardax._transforms.vmap.vmap import vmap
from shardax.named.base import Dims, Name, NamedAxesError, Stored, mapping, sorted_names
from shardax.named.elementwise import Operand, listing, named_sizes
from shardax.partition.explicit import explicit_entries

Make = Callable[[Any, Dims], Any]


class _Arguments(NamedTuple):
    """What a lifted function is called with, taken apart.

    Attributes:
        operands: The named arrays.
        objects: The Modules and Variables, which all runs share.
        rebuild: Given data in place of the operands and the objects, calls the function.
    """

    operands: list[Operand]
    objects: list[Any]
    rebuild: Callable[[Sequence[Any], Sequence[Any]], Any]


def run_lifted(
    make: Make, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Calls a function along all names of its arguments.

    Args:
        make: Makes a named array of data and dims.
        function: Takes plain arrays where ``args`` and ``kwargs`` have named ones.
        args: Pytrees of anything.
        kwargs: Likewise.

    Returns:
        What the function returns, with named arrays for its arrays.

    Raises:
        NamedAxesError: If a name has two sizes, or the function returns something that is no array.
        ClosureError: If the function returns a named array with a name that it is run along.
    """
    arguments = _take_apart(function, args, kwargs)
    names = sorted_names(named_sizes(arguments.operands))
    inner: list[Dims] = []
    outer: list[Any] = []

    def run(datas: Sequence[Any], objects: Sequence[Any]) -> list[Any]:
        with mapping(names):
            result = arguments.rebuild(datas, objects)
        leaves, treedef = jax.tree.flatten(result, is_leaf=_is_named)
        parts = [_leaving(leaf, names) for leaf in leaves]
        inner[:], outer[:] = [dims for _, dims in parts], [treedef]
        return [data for data, _ in parts]

    mapped = run
    for place, name in enumerate(names):
        mapped = _along(mapped, name, names[place + 1 :], arguments)
    datas = mapped([data for data, _ in arguments.operands], arguments.objects)
    leaves = [make(data, (*dims, *names)) for data, dims in zip(datas, inner, strict=True)]
    return outer[0].unflatten(leaves)


def _along(
    function: Callable[..., Any], name: Name, gone: Sequence[Name], arguments: _Arguments
) -> Callable[..., Any]:
    """Maps a function of (data, objects) along one name, when some names are gone already."""
    axes = [
        remaining.index(name) if name in remaining else None
        for remaining in (
            tuple(each for each in operand.dims if each is None or each not in gone)
            for operand in arguments.operands
        )
    ]
    # Objects need the vmap that knows of them; without any the plain one does the same, and sooner.
    transform: Callable[..., Any] = vmap if arguments.objects else jax.vmap
    return transform(function, in_axes=(axes, None), out_axes=-1, axis_name=name)


def _take_apart(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> _Arguments:
    if isinstance(function, types.MethodType) and isinstance(function.__self__, Object):
        args = (function.__self__, *args)
        function = function.__func__
    leaves, treedef = jax.tree.flatten((function, tuple(args), kwargs), is_leaf=_is_whole)
    leaves = [_named_value(leaf) if isinstance(leaf, Variable) else leaf for leaf in leaves]
    named = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Stored)]
    whole = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Object)]

    def rebuild(datas: Sequence[Any], objects: Sequence[Any]) -> Any:
        filled = list(leaves)
        for place, value in zip((*named, *whole), (*datas, *objects), strict=True):
            filled[place] = value
        called, given, keywords = treedef.unflatten(filled)
        return called(*given, **keywords)

    operands = _laid_out_alike([Operand(*leaves[place]._parts()) for place in named])
    return _Arguments(operands, [leaves[place] for place in whole], rebuild)


def _laid_out_alike(operands: list[Operand]) -> list[Operand]:
    """Lays names out alike over Explicit mesh axes, as ``vmap`` wants them.

    An array in which a name is not split takes the layout of one in which it is.

    Raises:
        MappedShardingError: If a name is split in two ways.
    """
    if all(explicit_entries(data) is None for data, _ in operands):
        return operands
    wanted: dict[Name, Any] = {}
    specs = [tuple(jax.typeof(data).sharding.spec) for data, _ in operands]
    for (_, dims), spec in zip(operands, specs, strict=True):
        for name, entry in zip(dims, spec, strict=True):
            if name is None or entry is None:
                continue
            if wanted.setdefault(name, entry) != entry:
                raise MappedShardingError(
                    f"nmap cannot run along {name!r}, which is split over {wanted[name]!r} in one "
                    f"argument and over {entry!r} in another: {listing(operands)}. Lay one out as "
                    f"the other: named.constrain(x, {{{name!r}: {wanted[name]!r}}})."
                )
    mesh = next(jax.typeof(data).sharding.mesh for data, _ in operands if explicit_entries(data))
    return [
        Operand(_resharded(data, mesh, spec, [wanted.get(name) for name in dims]), dims)
        for (data, dims), spec in zip(operands, specs, strict=True)
    ]


def _resharded(data: Any, mesh: Any, spec: Sequence[Any], wanted: Sequence[Any]) -> Any:
    entries = [now if entry is None else entry for now, entry in zip(spec, wanted, strict=True)]
    if entries == list(spec):
        return data
    return jax.sharding.reshard(data, NamedSharding(mesh, PartitionSpec(*entries)))


def _named_value(variable: Variable[Any]) -> Any:
    """Returns the named array that a Variable holds, which it stands for; else the Variable."""
    if variable.is_lazy:
        return variable
    return variable.value if isinstance(variable.value, Stored) else variable


def _is_named(value: Any) -> bool:
    return isinstance(value, Stored)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (Stored, Object))


def _leaving(leaf: Any, names: Sequence[Name]) -> Operand:
    """Returns the array of a leaf of the result, and the dims that it has besides the names."""
    if not isinstance(leaf, Stored):
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            array = jnp.asarray(leaf)
            return Operand(array, (None,) * array.ndim)
        raise NamedAxesError(
            f"A function run by nmap returns arrays, or pytrees of them, but returned "
            f"{leaf!r} of type {type(leaf).__name__}."
        )
    dims = leaf.dims
    clashing = [name for name in dims if name is not None and name in names]
    if clashing:
        raise ClosureError(
            f"A function that nmap runs along {', '.join(map(repr, names))} returned a NamedArray "
            f"with dims {dims}, which has {', '.join(map(repr, clashing))} again. If it was "
            f"captured by closure, pass it as an argument: nmap(f)(x, captured); else rename it."
        )
    return Operand(leaf.data, dims)


def lifted_method(name: str) -> Callable[..., Any]:
    """Returns the method of named arrays that runs the method of plain ones along the names."""

    def run(array: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(array, name)(*args, **kwargs)

    def method(self: Stored, *args: Any, **kwargs: Any) -> Any:
        return run_lifted(self._make, run, (self, *args), kwargs)

    method.__name__ = name
    return method


def lifted_operator(function: Callable[[Any, Any], Any], reflected: bool) -> Callable[..., Any]:
    """Returns the method for a binary operator on positional dimensions, run along the names."""

    def method(self: Stored, other: Any) -> Any:
        pair = (other, self) if reflected else (self, other)
        return run_lifted(self._make, function, pair, {})

    return method
