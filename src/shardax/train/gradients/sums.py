# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over the data axes of a mesh.

The data axes are *levels*, the slowest link first. A sum goes from the last level to the first and
back: a reduce-scatter within the last, which leaves each of its n devices 1/n of an array; the
same, or an all-reduce, along the next; all-gathers in reverse. A gradient that is to stay split
along an axis is not gathered along it (ZeRO, arXiv:1910.02054).

A narrow dtype on the wire is one of what travels only. Devices exchange parts by an all-to-all, and
each adds what it received in float32, so no sum is rounded before it is complete. The bits travel
as integers, because some compilers widen narrow floats.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from shardax import State, Variable
from shardax._parallel import manual_axes
from shardax.errors import PartitionError
from shardax.extend import AnyMesh, Path, ResolvedRules, format_path, mesh_axes_of, raise_if_any
from shardax.partition import resolve_mesh
from shardax.train.gradients import errors


@dataclasses.dataclass(frozen=True)
class Region:
    """Data axes of a mesh, and its other axes."""

    mesh: AnyMesh
    over: tuple[str, ...]  # the slowest link first
    other_axes: tuple[str, ...]  # that are not Manual already

    @classmethod
    def find(cls, over: tuple[str, ...]) -> Region:
        mesh = resolve_mesh()
        if mesh is None:
            raise errors.no_mesh_of_axes(over)

        types = manual_axes.axis_types(mesh)
        free = [axis for axis, kind in types.items() if kind is not AxisType.Manual]
        wrong = [axis for axis in over if axis not in free]
        if wrong:
            raise errors.no_data_axis(over, wrong[0], mesh, free)
        return cls(mesh, over, tuple(axis for axis in free if axis not in over))

    @property
    def shard_map_mesh(self) -> Any:
        """Mesh for ``jax.shard_map``; None if there is one in scope."""
        return manual_axes.mesh_of_region(self.mesh)

    @property
    def count(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.over)

    def varying(self, tree: object) -> Any:
        """Marks equal values of devices as possibly different."""
        return jax.tree.map(lambda x: manual_axes.vary(x, self.over), tree)

    def with_auto_axes(
        self, function: Callable[..., object], outputs: object
    ) -> Callable[..., Any]:
        """Runs a function with Explicit axes as Auto, its results typed."""
        return manual_axes.with_auto_axes(function, self.mesh, outputs)


@dataclasses.dataclass(frozen=True)
class GradientPlan:
    """Layout of a gradient before and after it is reduced."""

    # mesh axes by dimension
    entering: tuple[tuple[str, ...], ...]  # of the parameter, without data axes
    leaving: tuple[tuple[str, ...], ...]  # data axes along which the gradient stays split
    final: PartitionSpec

    def spec(self, *lead: object, leaving: bool = False) -> PartitionSpec:
        """The layout with the data axes after the others, or without them."""
        parts = [
            (*entering_axes, *(leaving_axes if leaving else ()))
            for entering_axes, leaving_axes in zip(self.entering, self.leaving, strict=True)
        ]
        return PartitionSpec(*lead, *(axes or None for axes in parts))


def plan_of(path: Path, variable: Variable, region: Region, layout: Any) -> GradientPlan:
    """Plans the gradient of a parameter."""
    value = variable.value
    if not isinstance(value, jax.Array):
        raise errors.parameter_not_an_array(path, value)
    shape = value.shape

    # The parameter itself is laid out by its type over Explicit axes, else by the rules.
    rules = ResolvedRules(region.mesh)
    spec, _ = rules.spec(variable.axes, shape, path)
    typed = jax.typeof(value).sharding.spec
    entering = _by_dimension(typed if any(typed) else spec, len(shape))
    split_here = [axis for axes in entering for axis in axes if axis in region.over]
    if split_here:
        raise errors.parameter_split_over_data(path, split_here[0], region.over)
    unsummed_axes = [tuple(axis for axis in axes if axis in region.other_axes) for axes in entering]

    # The gradient is laid out as ``layout`` says, else as the parameter.
    target = layout.flat().get(path) if isinstance(layout, State) else layout
    if target is None:
        final, problems = PartitionSpec(*(axes or None for axes in unsummed_axes)), []
    elif isinstance(layout, State):
        final, problems = rules.given_spec(target, shape, f"layout at {format_path(path)}", path)
    else:
        final, problems = rules.override(target).spec(variable.axes, shape, path)
    raise_if_any(
        PartitionError,
        [str(problem) for problem in problems if problem.severity == "error"],
        "Gradients cannot be laid out so:\n  ",
        separator="\n  ",
    )

    by_dimension = _by_dimension(final, len(shape))
    leaving = [tuple(axis for axis in axes if axis in region.over) for axes in by_dimension]
    return GradientPlan(tuple(unsummed_axes), tuple(leaving), final)


def _by_dimension(spec, ndim: int) -> tuple[tuple[str, ...], ...]:
    entries = [mesh_axes_of(entry) for entry in spec]
    return (*entries, *[()] * (ndim - len(entries)))


# --- Sums ---


def sum_over(
    x: jax.Array,
    *,
    plan: GradientPlan,
    over: tuple[str, ...],
    wire: np.dtype,
    sizes: Mapping[str, int],
    scale: Any = None,
    done: tuple[str, ...] = (),
) -> jax.Array:
    """Returns the sum over mesh axes of one array of each device.

    Args:
        x: The array.
        plan: How it is laid out.
        over: The mesh axes, the slowest link first.
        wire: Dtype of what travels.
        sizes: Sizes of mesh axes.
        scale: Factor of the sum, applied where each device has its part; None for 1.
        done: Axes that it is summed over, and split along, already.
    """
    # Dimensions in parts, one for each axis along which the result stays split, the first axis
    # outermost.
    shape: list[int] = []
    dimension_of: dict[str, int] = {}
    for size, axes in zip(x.shape, plan.leaving, strict=True):
        counts = [1 if axis in done else sizes[axis] for axis in axes]
        if not set(axes) & set(over):
            counts = [1] * len(axes)
        dimension_of |= {axis: len(shape) + i for i, axis in enumerate(axes)}
        shape += [*counts, size // math.prod(counts)]
    dtype = x.dtype
    x = x.reshape(shape)

    # From the last axis to the first. Where the result is not to stay split, any dimension that
    # can be divided is scattered, and gathered again below.
    gathers: list[tuple[str, int]] = []
    for number, axis in enumerate(reversed(over)):
        count, is_first = sizes[axis], number == len(over) - 1
        if count == 1:
            continue
        if axis in dimension_of:
            x = _scattered(x, axis, dimension_of[axis], count, wire)
            continue

        taken = dimension_of.values()
        free = [d for d in range(x.ndim) if x.shape[d] % count == 0 and d not in taken]
        if not free or (is_first and wire.itemsize >= 4):
            x = jax.lax.psum(x, axis)
            continue
        x = _scattered(x, axis, free[0], count, wire)
        gathers.append((axis, free[0]))

    if scale is not None:
        x = x * scale.astype(x.dtype)
    for axis, dimension in reversed(gathers):
        x = _gathered(x, axis, dimension, wire)

    parts = iter(x.shape)
    final = [math.prod(next(parts) for _ in range(len(axes) + 1)) for axes in plan.leaving]
    return x.reshape(final).astype(dtype)


def _scattered(x: jax.Array, axis: str, dimension: int, count: int, wire: np.dtype) -> jax.Array:
    """Sums over a mesh axis; each device has its part."""
    if wire.itemsize >= 4:
        return jax.lax.psum_scatter(x.astype(wire), axis, scatter_dimension=dimension, tiled=True)
    received = jax.lax.all_to_all(_bits(x, wire), axis, dimension, dimension, tiled=True)
    shape = (*x.shape[:dimension], count, x.shape[dimension] // count, *x.shape[dimension + 1 :])
    return _floats(received, wire).astype(jnp.float32).reshape(shape).sum(dimension)


def _gathered(x: jax.Array, axis: str, dimension: int, wire: np.dtype) -> jax.Array:
    """The parts of all devices along a mesh axis, as one."""
    if wire.itemsize >= 4:
        return jax.lax.all_gather(x, axis, axis=dimension, tiled=True)
    gathered = jax.lax.all_gather(_bits(x, wire), axis, axis=dimension, tiled=True)
    return _floats(gathered, wire).astype(x.dtype)


def _bits(x: jax.Array, wire: np.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(wire), jnp.dtype(f"uint{8 * wire.itemsize}"))


def _floats(bits: jax.Array, wire: np.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, wire)
