# SPDX-License-Identifier: Apache-2.0
"""The specs of ``shard_map``: one form for each, and one for each argument.

A spec says for each dimension of an array over which mesh axes it is split. Specs are kept without
None at their end, so that ``P("data")`` and ``P("data", None)`` are one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

from shardax._core.graph.paths import Path, PyTree
from shardax._transforms.lift.entries import AssignedPrefixes, assign_by_name
from shardax._transforms.lift.filter_mappings import FilterMapping, StateAxes, entries_in
from shardax._transforms.lift.signatures import by_position, parameter_name, positional_names
from shardax._transforms.shard_map import errors

# The spec of an array that every shard sees whole.
WHOLE = PartitionSpec()


def canonical(specs: PyTree, option: str) -> PyTree:
    """Returns a prefix with every spec in its one form; raises if an entry is no spec."""

    def convert(entry: PyTree) -> PyTree:
        if entry is None:
            return WHOLE
        if isinstance(entry, FilterMapping) and not isinstance(entry, StateAxes):
            pairs = [(item, canonical(value, option)) for item, value in entry.items()]
            return type(entry)(pairs)
        if not isinstance(entry, PartitionSpec):
            raise errors.not_a_spec(entry, option)
        if PartitionSpec.UNCONSTRAINED in tuple(entry):
            raise errors.unconstrained_spec(entry, option)
        return without_end(entry)

    return jax.tree.map(convert, specs, is_leaf=lambda item: item is None)


def without_end(spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec without None at its end."""
    dimensions = list(spec)
    while dimensions and dimensions[-1] is None:
        dimensions.pop()
    if len(dimensions) == len(spec):
        return spec
    return PartitionSpec(*dimensions, unreduced=spec.unreduced, reduced=spec.reduced)


def specs_in(specs: PyTree) -> list[PartitionSpec]:
    """Returns the specs that a canonical prefix can give."""
    return jax.tree.leaves(entries_in(specs))


def dimension_axes(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Returns the mesh axes of each dimension."""
    axes: list[tuple[str, ...]] = []
    for dimension in spec:
        if dimension is None:
            axes.append(())
        elif isinstance(dimension, str):
            axes.append((dimension,))
        else:
            axes.append(tuple(dimension))
    return axes


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns all mesh axes that a spec names."""
    return tuple(axis for axes in dimension_axes(spec) for axis in axes)


def spec_per_array(entry: PyTree, value: PyTree, path: Path, option: str) -> list[PartitionSpec]:
    """Returns one spec for each array of a value, whose entry may be a tree of specs."""
    try:
        return jax.tree.leaves(jax.tree.broadcast(entry, value))
    except ValueError as error:
        raise errors.spec_does_not_fit(entry, value, path, option) from error


def assign(
    function: Callable[..., PyTree],
    specs: PyTree,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> AssignedPrefixes:
    """Returns the arguments of a call, each with its entry of ``in_specs``."""
    by_name = assign_by_name(function, specs, args, kwargs, "in_specs")
    if by_name is not None:
        return by_name

    parameters = positional_names(function)
    args, kwargs = by_position(function, args, kwargs)
    if not isinstance(specs, (tuple, list)):
        named = dict.fromkeys(kwargs, specs)
        return AssignedPrefixes(args, kwargs, [specs] * len(args), named)

    spec_of = dict(zip(parameters, specs, strict=False))
    is_missing = any(name in parameters and name not in spec_of for name in kwargs)
    is_too_long = len(specs) > max(len(parameters), len(args))
    if len(args) > len(specs) or is_too_long or is_missing:
        labels = [parameter_name(function, position) for position in range(len(args))]
        raise errors.not_one_spec_per_parameter(len(specs), [*labels, *kwargs], parameters)

    # What can be given by name alone has no place in the entries: it is whole, as in Flax NNX.
    named = {name: spec_of.get(name, WHOLE) for name in kwargs}
    return AssignedPrefixes(args, kwargs, list(specs[: len(args)]), named)
