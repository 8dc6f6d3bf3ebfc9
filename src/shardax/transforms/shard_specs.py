# SPDX-License-Identifier: Apache-2.0
"""Specs and meshes of ``shard_map``: what is allowed, and bringing arrays to where specs say.

A *region* is what one call of ``shard_map`` runs over: a mesh, and the mesh axes that become
*manual* in it, which is all of them unless ``axis_names`` says otherwise. A *shard* is the part of
an array that one place of the region has.

A spec is kept in one form (``canonical``), so that two ways to write the same layout, ``P("data")``
and ``P("data", None)``, are one entry.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardax.core._jax import Tracer
from shardax.core.errors import (
    AbstractValueError,
    ArgumentError,
    AxisSizeError,
    MeshError,
    NoMeshError,
    PrefixError,
)
from shardax.core.paths import Path, format_path
from shardax.transforms.closures import parameters_of
from shardax.transforms.prefix import FilterMapping, StateAxes

AnyMesh = Mesh | AbstractMesh
WHOLE = PartitionSpec()
"""The spec of an array that every shard sees whole."""


# --- specs ----------------------------------------------------------------------------------------


def canonical(prefix: Any, name: str) -> Any:
    """Returns a prefix of specs with every spec in its one form; None is ``P()``.

    Args:
        prefix: A spec, None, a ``StateSharding`` or ``State`` of specs, or containers of these.
        name: The option's name, for messages.

    Raises:
        PrefixError: If an entry is something else.
    """

    def convert(leaf: Any) -> Any:
        if leaf is None:
            return WHOLE
        if isinstance(leaf, FilterMapping) and not isinstance(leaf, StateAxes):
            return type(leaf)([(item, canonical(value, name)) for item, value in leaf.items()])
        if not isinstance(leaf, PartitionSpec):
            raise PrefixError(
                f"{name} gives {leaf!r}; an entry is a PartitionSpec (None for P()), for a Module "
                f"also a State of specs, such as sx.partition_specs(model), or sx.StateSharding."
            )
        if PartitionSpec.UNCONSTRAINED in tuple(leaf):
            raise PrefixError(
                f"{name} gives {leaf}; inside sx.shard_map every dimension is split over mesh axes "
                f"or whole, so none can be left to the compiler. Leave mesh axes to it instead, "
                f"with axis_names=..."
            )
        return _without_end(leaf)

    return jax.tree.map(convert, prefix, is_leaf=lambda item: item is None)


def _without_end(spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec without None at its end."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    if len(entries) == len(tuple(spec)):
        return spec
    return PartitionSpec(*entries, unreduced=spec.unreduced, reduced=spec.reduced)


def specs_in(prefix: Any) -> list[PartitionSpec]:
    """Returns the specs that a canonical prefix can give."""
    found: list[PartitionSpec] = []
    for leaf in jax.tree.leaves(prefix):
        found.extend(
            spec
            for value in (leaf.values() if isinstance(leaf, FilterMapping) else [leaf])
            for spec in jax.tree.leaves(value)
        )
    return found


def dimension_axes(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dimension."""
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns all mesh axes that a spec names."""
    return tuple(axis for axes in dimension_axes(spec) for axis in axes)


def spread(entry: Any, value: Any, path: Path, name: str) -> list[PartitionSpec]:
    """Returns one spec per array of a value.

    Args:
        entry: A spec, or a prefix of specs of a value that is a pytree.
        value: An array, or a pytree of arrays.
        path: Path of the value.
        name: The option's name, for messages.

    Raises:
        PrefixError: If the entry does not fit.
    """
    try:
        return jax.tree.leaves(jax.tree.broadcast(entry, value))
    except ValueError as error:
        raise PrefixError(
            f"{name} does not fit the value at {format_path(path)}: it has {entry} where the value "
            f"is {jax.tree.structure(value)}. Give one spec for the whole value."
        ) from error


class Assigned(NamedTuple):
    """Arguments, each with its entry.

    Attributes:
        args: The positional arguments; also those given by name that have their place among them.
        kwargs: The others.
        prefixes: One prefix per positional argument.
        named: One prefix per other argument, by name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prefixes: list[Any]
    named: dict[str, Any]


def assign(
    function: Callable[..., Any], specs: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Assigned:
    """Finds the entry of every argument: an argument given by name has that of its position.

    Args:
        function: The user's function.
        specs: ``in_specs``: one entry for everything, or a tuple of one per positional parameter.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Raises:
        PrefixError: If ``in_specs`` has no entry for an argument, or one for no parameter.
        TypeError: If the function does not take these arguments.
    """
    parameters = parameters_of(function)
    if parameters is not None and kwargs:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
    if not isinstance(specs, (tuple, list)):
        named = dict.fromkeys(kwargs, specs)
        return Assigned(tuple(args), dict(kwargs), [specs] * len(args), named)
    positional = [
        p.name for p in parameters or () if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    most = max(len(positional), len(args))
    if not len(args) <= len(specs) <= most:
        shown = f" ({', '.join(positional)})" if positional else ""
        raise PrefixError(
            f"in_specs has {len(specs)} entries, but the function was given {len(args)} positional "
            f"arguments{shown}. Give one entry per parameter, or one for everything."
        )
    named = {}
    for keyword in kwargs:
        if keyword not in positional:
            raise PrefixError(
                f"in_specs has one entry per positional parameter, so there is none for the "
                f"argument {keyword!r}, which can only be given by name. Make it positional, or "
                f"give one entry for everything."
            )
        if positional.index(keyword) >= len(specs):
            raise PrefixError(
                f"in_specs has {len(specs)} entries, so there is none for the argument {keyword!r} "
                f"at position {positional.index(keyword)}."
            )
        named[keyword] = specs[positional.index(keyword)]
    return Assigned(tuple(args), dict(kwargs), list(specs[: len(args)]), named)


# --- regions --------------------------------------------------------------------------------------


class Region(NamedTuple):
    """Where one call runs.

    Attributes:
        mesh: The mesh; without devices where JAX hides them.
        axes: The mesh axes that become manual, in the order of the mesh.
    """

    mesh: AnyMesh
    axes: tuple[str, ...]

    @property
    def is_inner(self) -> bool:
        """Whether this is inside another ``shard_map``, over other axes."""
        return AxisType.Manual in self.mesh.axis_types

    @property
    def types(self) -> dict[str, AxisType]:
        """The type of every mesh axis."""
        return dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))

    def check(self, path: Path, leaf: Any, spec: PartitionSpec, name: str) -> None:
        """Checks that an array can be taken apart by a spec.

        Args:
            path: Path of the array.
            leaf: The array.
            spec: Its spec.
            name: The option's name, for messages.

        Raises:
            AbstractValueError: If it has no numbers.
            ArgumentError: If it is no array.
            AxisSizeError: If it has no such dimension, or one that cannot be divided.
        """
        where = format_path(path)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise AbstractValueError(
                f"The value at {where} is abstract ({leaf.dtype}{list(leaf.shape)}): it has a "
                f"shape but no numbers. Materialise the model first, for instance with "
                f"sx.shard(model, mesh, rules), or use sx.eval_shape."
            )
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            raise ArgumentError(
                f"The argument of sx.shard_map at {where} is {leaf!r} of type "
                f"{type(leaf).__name__}, which is neither an array nor a Module. Bind it "
                f"beforehand with functools.partial, or keep it as configuration of a Module."
            )
        self.check_shape(path, np.shape(leaf), spec, name)

    def check_shape(
        self, path: Path, shape: tuple[int, ...], spec: PartitionSpec, name: str
    ) -> None:
        """Checks that an array of a shape can be taken apart by a spec, as ``check`` does."""
        where, parts = format_path(path), dimension_axes(spec)
        if len(parts) > len(shape):
            raise AxisSizeError(
                f"{name} gives {spec} for the array at {where}, which has shape {shape} and so no "
                f"dimension {len(parts) - 1}. Give it P() if all shards see it whole."
            )
        for dimension, axes in enumerate(parts):
            count = math.prod(self.mesh.shape[axis] for axis in axes)
            if shape[dimension] % count:
                sizes = " and ".join(f"{axis!r} of size {self.mesh.shape[axis]}" for axis in axes)
                raise AxisSizeError(
                    f"{name} gives {spec} for the array at {where}, but its dimension {dimension} "
                    f"of shape {shape} cannot be divided over the mesh axis {sizes}. Pad it to a "
                    f"multiple of {count}, or give another spec."
                )

    def place(self, leaf: Any, spec: PartitionSpec) -> Any:
        """Returns an array where ``jax.shard_map`` can take it apart.

        JAX refuses arrays that are committed to other devices than the mesh's, and over Explicit
        axes those that are not laid out by their spec already.
        """
        kinds = self.types
        typed = {*self.axes} == {*kinds} and set(kinds.values()) == {AxisType.Explicit}
        if isinstance(leaf, Tracer):
            if not typed:
                return leaf
            return jax.sharding.reshard(leaf, NamedSharding(self.mesh, spec))
        if not isinstance(self.mesh, Mesh):
            return leaf
        wanted = NamedSharding(self.mesh, spec)
        if isinstance(leaf, jax.Array):
            now = leaf.sharding
            same_mesh = isinstance(now, NamedSharding) and now.mesh == self.mesh
            if now == wanted or (same_mesh and not typed):
                return leaf
        return jax.device_put(leaf, wanted)


def _abstract(mesh: AnyMesh) -> AbstractMesh:
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


def find_region(mesh: AnyMesh | None, axis_names: Iterable[str]) -> Region:
    """Returns the region of a call.

    Args:
        mesh: The mesh, or None for the one in scope (``jax.set_mesh``).
        axis_names: The mesh axes to make manual; empty for all that are not manual yet.

    Raises:
        NoMeshError: If there is no mesh.
        MeshError: If it is no mesh, another one than in scope, or has no such axes.
    """
    inside = jax.sharding.get_abstract_mesh()
    if mesh is None:
        if inside.empty:
            raise NoMeshError(
                "sx.shard_map needs a mesh: none was given and none is in scope. Pass one, "
                "sx.shard_map(f, mesh=mesh, ...), or put one in scope: with jax.set_mesh(mesh): ..."
            )
        found = _with_devices(inside)
    elif not isinstance(mesh, (Mesh, AbstractMesh)) or mesh.empty:
        raise MeshError(
            f"mesh={mesh!r} of type {type(mesh).__name__} is not a mesh with axes. Make one of the "
            f"devices at hand, for instance mesh = jax.make_mesh((8,), ('data',)), or pass None to "
            f"use the mesh in scope."
        )
    elif inside.empty or _abstract(mesh) == inside:
        found = mesh
    elif dict(inside.shape) == dict(mesh.shape) and AxisType.Manual in inside.axis_types:
        found = inside  # the same mesh, seen from inside the shard_map around this call
    else:
        raise MeshError(
            f"sx.shard_map was given {mesh}, which differs from the mesh in scope here, {inside}. "
            f"Pass the same mesh, or none to take the one in scope."
        )
    pairs = list(zip(found.axis_names, found.axis_types, strict=True))
    free = [axis for axis, kind in pairs if kind is not AxisType.Manual]
    wanted = frozenset(axis_names)
    if not wanted <= set(free):
        raise MeshError(
            f"axis_names={sorted(wanted)} is not a part of the mesh axes {free} that can become "
            f"manual here."
        )
    return Region(found, tuple(axis for axis in free if not wanted or axis in wanted))


def _with_devices(inside: AbstractMesh) -> AnyMesh:
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # JAX refuses to name devices while it traces
        return inside
    # Inside shard_map the abstract mesh says more.
    return mesh if isinstance(mesh, Mesh) and mesh.abstract_mesh == inside else inside


def check_axes(region: Region, specs: Iterable[PartitionSpec], name: str) -> None:
    """Checks that specs name axes that are manual in a region, each once.

    Raises:
        PrefixError: If one does not.
    """
    for spec in specs:
        named = axes_of(spec)
        unknown = [axis for axis in named if axis not in region.axes]
        if unknown:
            raise PrefixError(
                f"{name} gives {spec}, but the mesh axes to split over here are "
                f"{list(region.axes)} of {region.mesh}."
            )
        if len(set(named)) < len(named):
            raise PrefixError(f"{name} gives {spec}, which names a mesh axis twice.")
