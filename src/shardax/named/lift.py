# SPDX-License-Identifier: Apache-2.0
"""Functions of plain arrays, run along names.

A lifted function sees, of every named array among its arguments, the slice at one position along
every name of their union; an argument that lacks a name is the same at all positions. One ``vmap``
per name does that, under the name, so that collectives inside can use it. Each name is put last, in
canonical order, so that results are stored in that order.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardax import Variable, vmap
from shardax.errors import ClosureError, TransformError
from shardax.extend import Object, explicit_entries
from shardax.named.base import (
    Dims,
    Name,
    NamedAxesError,
    NamedStorage,
    Operand,
    from_parts,
    mapping,
    parts_of,
    sorted_names,
)
from shardax.named.elementwise import listing, named_sizes


def run_lifted(
    kind: type[NamedStorage],
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a function of plain arrays along all names of its arguments.

    Returns the pytree of its result, with named arrays of a kind for the arrays in it.
    """
    operands, objects, rebuild = _take_apart(function, args, kwargs)
    names = sorted_names(named_sizes(operands))
    inner: list[Dims] = []
    outer: list[Any] = []

    def run(datas: Sequence[Any], objects: Sequence[Any]) -> list[Any]:
        with mapping(names):
            result = rebuild(datas, objects)
        leaves, treedef = jax.tree.flatten(result, is_leaf=is_named)
        results = [_result(leaf, names) for leaf in leaves]
        inner[:], outer[:] = [dims for _, dims in results], [treedef]
        return [data for data, _ in results]

    # Objects need the vmap that knows of them; without any the plain one does the same, and sooner.
    transform: Callable[..., Any] = vmap if objects else jax.vmap
    for index, name in enumerate(names):
        outer_names = names[index + 1 :]  # mapped over outside of this vmap
        axes = []
        for _, dims in operands:
            left = [dim for dim in dims if dim is None or dim not in outer_names]
            axes.append(left.index(name) if name in left else None)
        run = transform(run, in_axes=(axes, None), out_axes=-1, axis_name=name)
    datas = run([data for data, _ in operands], objects)
    leaves = [
        from_parts(kind, data, (*dims, *names)) for data, dims in zip(datas, inner, strict=True)
    ]
    return outer[0].unflatten(leaves)


def _take_apart(
    function: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]
) -> tuple[list[Operand], list[Any], Callable[..., Any]]:
    """Returns named arrays, objects, and the call with others in place."""
    if isinstance(function, types.MethodType) and isinstance(function.__self__, Object):
        args = (function.__self__, *args)
        function = function.__func__

    leaves, treedef = jax.tree.flatten((function, tuple(args), kwargs), is_leaf=is_whole)
    leaves: list[Any] = [
        _named_value(leaf) if isinstance(leaf, Variable) else leaf for leaf in leaves
    ]
    named = [index for index, leaf in enumerate(leaves) if isinstance(leaf, NamedStorage)]
    whole = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Object)]

    def rebuild(datas: Sequence[object], objects: Sequence[object]):
        filled = list(leaves)
        for index, value in zip((*named, *whole), (*datas, *objects), strict=True):
            filled[index] = value
        called, positional, keywords = treedef.unflatten(filled)
        return called(*positional, **keywords)

    operands = _laid_out_alike([parts_of(leaves[index]) for index in named])
    return operands, [leaves[index] for index in whole], rebuild


def _laid_out_alike(operands: list[Operand]) -> list[Operand]:
    """Lays names out alike over Explicit mesh axes, as ``vmap`` wants."""
    # An array in which a name is not split takes the layout of one in which it is.
    if all(explicit_entries(data) is None for data, _ in operands):
        return operands

    by_name: dict[Name, Any] = {}
    specs = [tuple(jax.typeof(data).sharding.spec) for data, _ in operands]
    for (_, dims), spec in zip(operands, specs, strict=True):
        for name, entry in zip(dims, spec, strict=True):
            if name is None or entry is None:
                continue
            if by_name.setdefault(name, entry) != entry:
                raise TransformError(
                    f"nmap cannot run along {name!r}, which is split over {by_name[name]!r} in one "
                    f"argument and over {entry!r} in another: {listing(operands)}. Lay one out as "
                    f"the other: named.constrain(x, {{{name!r}: {by_name[name]!r}}})."
                )

    mesh = next(jax.typeof(data).sharding.mesh for data, _ in operands if explicit_entries(data))
    laid_out = []
    for (data, dims), spec in zip(operands, specs, strict=True):
        entries = tuple(
            by_name.get(name) if now is None else now for name, now in zip(dims, spec, strict=True)
        )
        if entries != spec:
            data = jax.sharding.reshard(data, NamedSharding(mesh, PartitionSpec(*entries)))
        laid_out.append(Operand(data, dims))
    return laid_out


def _named_value(variable: Variable):
    """Returns the named array of a Variable, or the Variable."""
    if variable.is_lazy:
        return variable
    return variable.value if isinstance(variable.value, NamedStorage) else variable


def is_named(value: object) -> bool:
    """Whether a value is a named array."""
    return isinstance(value, NamedStorage)


def is_whole(value: object) -> bool:
    """Whether a value is a named array or an object."""
    return isinstance(value, (NamedStorage, Object))


def _result(leaf, names: Sequence[Name]) -> Operand:
    """Returns an array of the result, and its dims besides the names."""
    if not isinstance(leaf, NamedStorage):
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
    """Returns the method of plain arrays, run along the names."""

    def run(array, *args, **kwargs) -> Any:
        return getattr(array, name)(*args, **kwargs)

    def method(self: NamedStorage, *args, **kwargs) -> Any:
        return run_lifted(type(self), run, (self, *args), kwargs)

    method.__name__ = name
    return method


def lifted_operator(function: Callable[[Any, Any], object], reflected: bool) -> Callable[..., Any]:
    """Returns a binary operator on positional dimensions, run along the names."""

    def method(self: NamedStorage, other) -> Any:
        pair = (other, self) if reflected else (self, other)
        return run_lifted(type(self), function, pair, {})

    return method
