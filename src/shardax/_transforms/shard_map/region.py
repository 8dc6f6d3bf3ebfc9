# SPDX-License-Identifier: Apache-2.0
"""``ManualRegion``: a mesh, and the mesh axes that become *manual* in one call of ``shard_map``.

All free mesh axes become manual unless ``axis_names`` says otherwise; the compiler lays out arrays
over the others. A region checks that arrays can be split by their specs, and moves them to where
``jax.shard_map`` takes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardax._core._jax import Tracer
from shardax._core.graph.paths import Leaf, Path
from shardax._transforms.lift.engine import ARRAY_OR_NUMBER
from shardax._transforms.shard_map import errors
from shardax._transforms.shard_map.specs import axes_of, dimension_axes, without_end

AnyMesh = Mesh | AbstractMesh


class ManualRegion(NamedTuple):
    """Where one call runs."""

    mesh: AnyMesh  # the mesh; without devices where JAX hides them
    axes: tuple[str, ...]  # the mesh axes that become manual, in the order of the mesh

    @property
    def is_inner(self) -> bool:
        """Whether this is inside another ``shard_map``, over other axes."""
        return AxisType.Manual in self.mesh.axis_types

    @property
    def is_explicit(self) -> bool:
        """Whether all axes that become manual are Explicit: part of the types of arrays."""
        axis_types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return all(axis_types[axis] is AxisType.Explicit for axis in self.axes)

    def check_specs(self, specs: Iterable[PartitionSpec], option: str) -> None:
        """Raises unless specs name manual axes, each once."""
        for spec in specs:
            named = axes_of(spec)
            if not set(named) <= set(self.axes):
                raise errors.unknown_mesh_axes(spec, option, self.axes, self.mesh)
            if len(set(named)) < len(named):
                raise errors.mesh_axis_named_twice(spec, option)

    def check(self, path: Path, leaf: object, spec: PartitionSpec, option: str) -> None:
        """Raises unless a value is an array that a spec can split."""
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise errors.abstract_value(path, leaf)
        if not isinstance(leaf, ARRAY_OR_NUMBER):
            raise errors.not_an_array(path, leaf)
        self.check_shape(path, np.shape(leaf), spec, option)

    def check_shape(
        self, path: Path, shape: tuple[int, ...], spec: PartitionSpec, option: str
    ) -> None:
        """Raises unless a spec can split arrays of a shape."""
        if len(spec) > len(shape):
            raise errors.too_few_dimensions(path, shape, spec, option)
        for dimension, axes in enumerate(dimension_axes(spec)):
            sizes = {axis: self.mesh.shape[axis] for axis in axes}
            if shape[dimension] % math.prod(sizes.values()):
                raise errors.cannot_be_divided(path, shape, dimension, spec, option, sizes)

    def move(self, leaf: Leaf, spec: PartitionSpec) -> Leaf:
        """Returns an array where ``jax.shard_map`` can split it."""
        # JAX refuses arrays that are committed to other devices than the mesh's, and over Explicit
        # axes those that are not laid out by their spec already; newer versions also where other
        # axes are left to the compiler.
        if isinstance(leaf, Tracer):
            if not self.is_explicit:
                return leaf
            target = self._with_other_axes(spec, jax.typeof(leaf).sharding, leaf.shape)
            return jax.sharding.reshard(leaf, NamedSharding(self.mesh, target))

        if not isinstance(self.mesh, Mesh):
            return leaf
        current = getattr(leaf, "sharding", None)
        target = NamedSharding(self.mesh, self._with_other_axes(spec, current, np.shape(leaf)))
        if isinstance(leaf, jax.Array):
            is_on_mesh = isinstance(current, NamedSharding) and current.mesh == self.mesh
            if current == target or (is_on_mesh and not self.is_explicit):
                return leaf
        return jax.device_put(leaf, target)

    def _with_other_axes(
        self, spec: PartitionSpec, current: jax.sharding.Sharding | None, shape: Sequence[int]
    ) -> PartitionSpec:
        """Returns a spec with the axes of a layout that do not become manual, where they divide."""
        if not isinstance(current, NamedSharding):
            return spec
        if current.mesh.axis_names != self.mesh.axis_names:
            return spec

        dimensions = [*dimension_axes(spec), *[()] * len(shape)]
        for index, current_axes in enumerate(dimension_axes(current.spec)):
            others = tuple(axis for axis in current_axes if axis not in self.axes)
            axes = (*dimensions[index], *others)
            if shape[index] % math.prod(self.mesh.shape[axis] for axis in axes) == 0:
                dimensions[index] = axes
        return without_end(PartitionSpec(*(axes or None for axes in dimensions)))


def find_region(mesh: AnyMesh | None, axis_names: frozenset[str]) -> ManualRegion:
    """Returns the region of a call."""
    region_mesh = _find_mesh(mesh)
    axis_types = zip(region_mesh.axis_names, region_mesh.axis_types, strict=True)
    free = [axis for axis, axis_type in axis_types if axis_type is not AxisType.Manual]
    if not axis_names <= set(free):
        raise errors.not_free_axes(sorted(axis_names), free)
    manual = [axis for axis in free if axis in axis_names] if axis_names else free
    return ManualRegion(region_mesh, tuple(manual))


def _find_mesh(mesh: AnyMesh | None) -> AnyMesh:
    """Returns the mesh that a caller gave, or the one in scope; raises if both differ."""
    scope_mesh = jax.sharding.get_abstract_mesh()
    if mesh is None:
        if scope_mesh.empty:
            raise errors.no_mesh()
        return _with_devices(scope_mesh)

    if not isinstance(mesh, (Mesh, AbstractMesh)) or mesh.empty:
        raise errors.not_a_mesh(mesh)
    abstract_mesh = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    if scope_mesh.empty or abstract_mesh == scope_mesh:
        return mesh

    # The same mesh, seen from inside the ``shard_map`` around this call.
    is_inside = AxisType.Manual in scope_mesh.axis_types
    if is_inside and dict(scope_mesh.shape) == dict(mesh.shape):
        return scope_mesh
    raise errors.not_the_mesh_in_scope(mesh, scope_mesh)


def _with_devices(scope_mesh: AbstractMesh) -> AnyMesh:
    """Returns the mesh in scope with its devices, where JAX tells them."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # JAX refuses to name devices while it traces
        return scope_mesh
    # Inside ``shard_map`` the abstract mesh says more.
    is_same = isinstance(mesh, Mesh) and mesh.abstract_mesh == scope_mesh
    return mesh if is_same else scope_mesh
