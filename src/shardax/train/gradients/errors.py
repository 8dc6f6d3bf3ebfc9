# SPDX-License-Identifier: Apache-2.0
"""Texts of errors of sums of gradients."""

from __future__ import annotations

from collections.abc import Sequence

from shardax.errors import PartitionError
from shardax.extend import AnyMesh, Path, format_path, mesh_text


def no_mesh_of_axes(over: Sequence[str]) -> PartitionError:
    """Returns the error for data axes without a mesh in scope."""
    return PartitionError(
        f"over={over} names axes of a mesh, but none is in scope. Put one in scope: "
        "with jax.set_mesh(mesh): ..."
    )


def no_data_axis(
    over: Sequence[str], wrong: str, mesh: AnyMesh, free: Sequence[str]
) -> PartitionError:
    """Returns the error for an axis that rows cannot be split over.

    Args:
        over: The axes that were given.
        wrong: The one among them.
        mesh: The mesh in scope.
        free: Axes that rows can be split over.
    """
    return PartitionError(
        f"over={over}: {wrong!r} is no axis of the mesh ({mesh_text(mesh.shape)}) that "
        f"rows can be split over here; these are {', '.join(free) or 'none'}."
    )


def parameter_not_an_array(path: Path, value: object) -> PartitionError:
    """Returns the error for a parameter that is no array."""
    return PartitionError(
        f"The parameter at {format_path(path)} is of type {type(value).__name__}, not one array. "
        "Leave it out by wrt=, or use sx.value_and_grad."
    )


def parameter_split_over_data(path: Path, axis: str, over: Sequence[str]) -> PartitionError:
    """Returns the error for a parameter that is split over a data axis."""
    return PartitionError(
        f"The parameter at {format_path(path)} is split over {axis!r}, but data-parallel devices "
        f"hold parameters whole along over={over}. Leave that axis to the compiler: "
        "name only the other data axes in over=, or use sx.value_and_grad, which gathers "
        "parameters as they are needed. To split gradients and the optimizer's state alone "
        "use layout= and overrides={sx.OptState: ...}."
    )
