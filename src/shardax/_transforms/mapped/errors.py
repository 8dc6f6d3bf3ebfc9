# SPDX-License-Identifier: Apache-2.0
"""Texts of the errors of mapped calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from shardax._core.frames import kind_of
from shardax._core.graph.paths import Leaf, Path, format_path
from shardax._core.variable import Variable
from shardax._core.variable_types import ArrayAttribute
from shardax._transforms.errors import PrefixError, TransformError


def stream_was_given_a_key(path: Path, name: str) -> TransformError:
    """Returns the error of a run that wrote the key of a split random stream."""
    return TransformError(
        f"The random stream at {format_path(path)} was given another key inside sx.{name}, which "
        f"splits it: every batch element has a key of its own, so there is not one to keep. Reseed "
        f"it outside, or make a stream of its own inside (sx.Rngs)."
    )


def not_an_array(path: Path, value: object, axis: int, name: str) -> TransformError:
    """Returns the error of a value with an axis that is no array."""
    return TransformError(
        f"sx.{name} maps axis {axis} of what stands at {format_path(path)}, but {value!r} is a "
        f"{type(value).__name__}, not an array. Give it None in in_axes, or bind it with "
        f"functools.partial."
    )


def no_such_axis(path: Path, shape: tuple[int, ...], axis: int, name: str) -> TransformError:
    """Returns the error of an array that does not have the axis of its entry."""
    return TransformError(
        f"sx.{name} maps axis {axis} of the array at {format_path(path)}, which has shape {shape}. "
        f"Give it None in in_axes if it is the same for all, or another axis."
    )


def different_sizes(
    sizes: Mapping[int, Path | None], size_option: str, name: str
) -> TransformError:
    """Returns the error of mapped arrays of different sizes; the path None is the option."""
    listed = "\n".join(
        f"  {size_option if path is None else format_path(path)}: {size}"
        for size, path in sizes.items()
    )
    return TransformError(f"sx.{name} maps arrays of different sizes:\n{listed}")


def unknown_size(size_option: str, name: str) -> TransformError:
    """Returns the error of a call in which nothing is mapped."""
    return TransformError(
        f"sx.{name} does not know how many times to run: no argument has an axis to map. Give "
        f"{size_option}=..., or an axis in in_axes."
    )


def not_a_count(value: object, option: str) -> TransformError:
    """Returns the error of an option that is no number of runs."""
    return TransformError(
        f"{option} is {value!r}, but the number of runs is part of the program: an integer of at "
        f"least 0, known before it runs, such as {option}=8. It may be left out where an argument "
        f"is mapped."
    )


def no_room_for_axis(path: Path, shape: tuple[int, ...], axis: int, name: str) -> TransformError:
    """Returns the error of slices that cannot be stacked along an axis."""
    rank = len(shape) + 1
    return TransformError(
        f"sx.{name} puts {format_path(path)} together along axis {axis}, but each part has shape "
        f"{shape}, so the whole has no axis {axis}. Give it one from {-rank} to {rank - 1}: in "
        f"out_axes for a result, in in_axes for what belongs to an argument."
    )


def layouts_differ(first: tuple[Path, Any], other: tuple[Path, Any], name: str) -> TransformError:
    """Returns the error of mapped dimensions with different (path, mesh axes)."""
    return TransformError(
        f"sx.{name} maps arrays whose mapped dimensions are split differently over the mesh:\n"
        f"  {format_path(first[0])}: {first[1]}\n"
        f"  {format_path(other[0])}: {other[1]}\n"
        f"Over Explicit mesh axes nothing is moved without being asked. Use jax.reshard, or "
        f"sx.shard for a model, to split them alike."
    )


def shared_array_is_split(
    path: Path, array: Leaf, mesh_axes: tuple[str, ...], name: str
) -> TransformError:
    """Returns the error of a shared array that is split over the axes of the mapped dimension."""
    return TransformError(
        f"sx.{name} maps a dimension that is split over the mesh axes {mesh_axes}, but the array "
        f"at {format_path(path)}, which the whole batch shares, is split over them too: "
        f"{jax.typeof(array)}. Use jax.reshard to take it off them, or map it as well."
    )


def scanned_dimension_is_split(
    path: Path, array: Leaf, axis: int, mesh_axes: object
) -> TransformError:
    """Returns the error of a scanned dimension that is split over Explicit mesh axes."""
    return TransformError(
        f"sx.scan takes slices along axis {axis} of the array at {format_path(path)}, which is "
        f"split over the mesh axis {mesh_axes!r} there: {jax.typeof(array)}. One slice after "
        f"another cannot be split so over Explicit mesh axes. Keep the dimension whole (a rule "
        f"such as ('layers', None), or jax.reshard), or give the mesh Auto axes."
    )


def not_params(metadata: object, name: str) -> PrefixError:
    """Returns the error of ``metadata`` that does not describe a dimension."""
    return PrefixError(
        f"metadata of sx.{name} is {metadata!r}; it is a mapping that has the name of the mapped "
        f"dimension, metadata={{sx.partition.PARTITION_NAME: 'layers'}}, and may have further "
        f"entries, which add_axis and remove_axis of boxes are given."
    )


def several_axes_in_a_box(path: Path, entries: Iterable[object], name: str) -> PrefixError:
    """Returns the error of a box whose arrays have different entries."""
    return PrefixError(
        f"The arrays in the box at {format_path(path)} have the axes {entries} in sx.{name}, but "
        f"its names hold for all of them. Give the box one axis."
    )


def shared_result_differs(path: Path) -> TransformError:
    """Returns the error of a result of ``vmap`` without an axis that differs by batch element."""
    return TransformError(
        f"out_axes of sx.vmap gives None for {format_path(path)}, but its value differs between "
        f"batch elements. Give it an axis in out_axes, or reduce it over the batch: "
        f"jax.lax.pmean(x, axis_name)."
    )


def shared_variable_differs(
    path: Path, variable: Variable, is_in_arguments: bool
) -> TransformError:
    """Returns the error of a shared Variable to which batch elements write different values."""
    if is_in_arguments:
        reason = "is shared by all batch elements of sx.vmap (its entry in in_axes is None)"
        axes = f"{{{filter_text(type(variable), path)}: 0, ...: None}}"
        advice = f"Give it an axis, sx.StateAxes({axes})"
    else:
        reason = "of what sx.vmap was bound to is shared by all batch elements"
        call = "sx.vmap(lambda module, x: module(x))(module, x)"
        advice = f"Pass the Module as an argument with an axis, {call}"
    return TransformError(
        f"The {kind_of(variable)} at {format_path(path)} {reason}, but was written with a value "
        f"that differs between them. {advice}, or write a value that is equal in all batch "
        f"elements: jax.lax.pmean(x, axis_name)."
    )


def filter_text(kind: type, path: Path) -> str:
    """Returns a filter for a type at a path, as source text."""
    if issubclass(kind, Variable) and kind is not ArrayAttribute:
        return f"sx.{kind.__name__}" if kind.__module__.startswith("shardax.") else kind.__name__
    return f"sx.PathContains({path[-1]!r})" if path else "..."
