# SPDX-License-Identifier: Apache-2.0
"""Texts of the errors of ``shard_map``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from shardax._core.errors import ModuleError
from shardax._core.graph.paths import Path, PyTree, format_path
from shardax._transforms.errors import NoMeshError, PrefixError, TransformError

# --- specs ----------------------------------------------------------------------------------------


def not_a_spec(value: object, option: str) -> PrefixError:
    """Returns the error of an entry that is no PartitionSpec."""
    return PrefixError(
        f"{option} gives {value!r}; an entry is a PartitionSpec (None for P()), for a Module also "
        "a State of specs (sx.partition_specs(model)) or sx.StateSharding."
    )


def unconstrained_spec(spec: PartitionSpec, option: str) -> PrefixError:
    """Returns the error of a spec with an unconstrained dimension."""
    return PrefixError(
        f"{option} gives {spec}; inside sx.shard_map every dimension is split over mesh axes or "
        "whole. To leave mesh axes to the compiler, use axis_names=..."
    )


def spec_does_not_fit(entry: PyTree, value: PyTree, path: Path, option: str) -> PrefixError:
    """Returns the error of a tree of specs that is no prefix of a value."""
    return PrefixError(
        f"{option} does not fit the value at {format_path(path)}: it has {entry} where the value "
        f"is {jax.tree.structure(value)}. Give one spec for the whole value."
    )


def not_one_spec_per_parameter(
    count: int, given: Sequence[str], positional: Sequence[str]
) -> PrefixError:
    """Returns the error of ``in_specs`` that are not one per positional parameter.

    Args:
        count: The number of entries.
        given: The arguments of the call, by parameter.
        positional: The parameters that may be given by position.
    """
    entries = "1 entry" if count == 1 else f"{count} entries"
    takes = ", ".join(positional) or "no parameter by position"
    example = ", ".join(f"{name!r}: jax.P()" for name in given)
    return PrefixError(
        f"in_specs has {entries}, but the function takes {takes}, and the call gives "
        f"{', '.join(given) or 'nothing'}. Give one entry for everything, or one per parameter "
        f"that may be given by position; what can be given by name alone is then whole in every "
        f"shard. Or name them all: in_specs={{{example}}}."
    )


def unknown_mesh_axes(
    spec: PartitionSpec, option: str, axes: Sequence[str], mesh: Mesh | AbstractMesh
) -> PrefixError:
    """Returns the error of a spec that names other mesh axes than those to split over."""
    return PrefixError(
        f"{option} gives {spec}, but the mesh axes to split over here are {list(axes)} of {mesh}."
    )


def mesh_axis_named_twice(spec: PartitionSpec, option: str) -> PrefixError:
    """Returns the error of a spec that names a mesh axis twice."""
    return PrefixError(f"{option} gives {spec}, which names a mesh axis twice.")


def axis_names_is_text(axis_names: str) -> PrefixError:
    """Returns the error of one text for a set of names."""
    return PrefixError(f"axis_names={axis_names!r} is one string; give a set: {{{axis_names!r}}}.")


# --- the mesh -------------------------------------------------------------------------------------


def no_mesh() -> NoMeshError:
    """Returns the error of a call without a mesh."""
    return NoMeshError(
        "sx.shard_map needs a mesh, but none was given and none is in scope: "
        "sx.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs), or "
        "with jax.set_mesh(mesh): ..."
    )


def not_a_mesh(mesh: object) -> TransformError:
    """Returns the error of a ``mesh`` that is no mesh with axes."""
    return TransformError(
        f"mesh={mesh!r} of type {type(mesh).__name__} is not a mesh with axes. Make one, for "
        "instance jax.make_mesh((8,), ('data',)), or pass None to use the mesh in scope."
    )


def not_the_mesh_in_scope(mesh: Mesh | AbstractMesh, scope_mesh: AbstractMesh) -> TransformError:
    """Returns the error of a ``mesh`` that is not the one in scope."""
    return TransformError(
        f"sx.shard_map was given {mesh}, which differs from the mesh in scope here, {scope_mesh}. "
        "Pass the same mesh, or none to take the one in scope."
    )


def not_free_axes(axis_names: Sequence[str], free: Sequence[str]) -> TransformError:
    """Returns the error of ``axis_names`` that cannot become manual."""
    return TransformError(
        f"axis_names={axis_names} is not a part of the mesh axes {free} that can become manual "
        "here."
    )


# --- arrays that enter ----------------------------------------------------------------------------


def abstract_value(path: Path, value: jax.ShapeDtypeStruct) -> ModuleError:
    """Returns the error of a value that is a shape without numbers."""
    return ModuleError(
        f"The value at {format_path(path)} is abstract ({value.dtype}{list(value.shape)}): a shape "
        "without numbers. Give the model numbers first, sx.update(model, state), or "
        "restore a checkpoint into it; or look at shapes only with sx.eval_shape."
    )


def not_an_array(path: Path, value: object) -> TransformError:
    """Returns the error of an argument that is neither array nor Module."""
    return TransformError(
        f"The argument of sx.shard_map at {format_path(path)} is {value!r} of type "
        f"{type(value).__name__}, which is neither an array nor a Module. Bind it by "
        "functools.partial, or keep it as configuration of a Module."
    )


def too_few_dimensions(
    path: Path, shape: tuple[int, ...], spec: PartitionSpec, option: str
) -> TransformError:
    """Returns the error of an array with fewer dimensions than its spec."""
    return TransformError(
        f"{option} gives {spec} for the array at {format_path(path)}, which has shape {shape} and "
        f"so no dimension {len(spec) - 1}. Give it P() if all shards see it whole."
    )


def cannot_be_divided(
    path: Path,
    shape: tuple[int, ...],
    dimension: int,
    spec: PartitionSpec,
    option: str,
    sizes: Mapping[str, int],
) -> TransformError:
    """Returns the error of a dimension that mesh axes of these sizes cannot divide."""
    over = " and ".join(f"{axis!r} of size {size}" for axis, size in sizes.items())
    return TransformError(
        f"{option} gives {spec} for the array at {format_path(path)}, but its dimension "
        f"{dimension} of shape {shape} cannot be divided over the mesh axis {over}. Pad it to a "
        f"multiple of {math.prod(sizes.values())}, or give another spec."
    )


# --- values that leave ----------------------------------------------------------------------------


def leaving_value_has_too_few_dimensions(
    description: str, path: Path, shape: tuple[int, ...], spec: PartitionSpec
) -> TransformError:
    """Returns the error of a shard with fewer dimensions than the spec it leaves by."""
    return TransformError(
        f"sx.shard_map puts the {description} value at {format_path(path)} together by {spec}, but "
        f"in each shard it has shape {shape} and so no dimension {len(spec) - 1}. Add one, "
        "x[None], or reduce it and give P()."
    )


def result_differs(path: Path, spec: PartitionSpec, axes: Sequence[str]) -> TransformError:
    """Returns the error of a result that differs between shards where its spec does not split."""
    return TransformError(
        f"out_specs of sx.shard_map gives {spec} for the value at {format_path(path)}, but it "
        f"differs between shards over the mesh axes {_listed(axes)}. Reduce it, {_reduced(axes)} "
        "or psum, or name these axes in out_specs."
    )


def new_stream_differs(path: Path, axes: Sequence[str]) -> TransformError:
    """Returns the error of a new object that keeps a split random stream."""
    return TransformError(
        f"The new RngState {_place_of_new(path)} is of a stream that in_specs splits, so it "
        f"differs between shards over the mesh axes {_listed(axes)}, and a new object has one. "
        "Give the Rngs that it keeps the spec P() in in_specs, sx.StateSharding([(sx.RngState, "
        "P()), (..., spec)]), or make the object outside."
    )


def new_variable_differs(
    type_name: str, path: Path, spec: PartitionSpec, axes: Sequence[str]
) -> TransformError:
    """Returns the error of a new Variable that differs where its spec does not split."""
    return TransformError(
        f"The new {type_name} {_place_of_new(path)} has the spec {spec} (that of the Module it was "
        "attached to, or of its place in the result), but differs between shards over the mesh "
        f"axes {_listed(axes)}. Reduce it, {_reduced(axes)}, or give its type a spec in the entry "
        f"of that Module: sx.StateSharding([({type_name}, P({_named(axes)!r})), (..., P())])."
    )


def written_variable_differs(
    type_name: str, path: Path, spec: PartitionSpec, axes: Sequence[str]
) -> TransformError:
    """Returns the error of a written value that differs where its spec does not split."""
    return TransformError(
        f"The {type_name} at {format_path(path)} has the spec {spec} in in_specs, but was written "
        f"with a value that differs between shards over the mesh axes {_listed(axes)}. Write an "
        f"equal one, {_reduced(axes)} or psum, or name these axes in its spec."
    )


def _listed(axes: Sequence[str]) -> str:
    return ", ".join(map(repr, axes))


def _named(axes: Sequence[str]) -> str | tuple[str, ...]:
    return axes[0] if len(axes) == 1 else tuple(axes)


def _reduced(axes: Sequence[str]) -> str:
    return f"jax.lax.pmean(x, {_named(axes)!r})"


def _place_of_new(path: Path) -> str:
    return f"at {format_path(path)}" if path else "attached to what the function is bound to"
