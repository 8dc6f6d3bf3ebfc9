# SPDX-License-Identifier: Apache-2.0
"""The mesh in scope.

JAX knows three ways to put a mesh in scope: ``jax.set_mesh(mesh)``, ``use_abstract_mesh(mesh)`` and
the older ``with mesh:``, which shows only in the sharding of an array constrained by a bare
``PartitionSpec``; overlooking it would turn constraints into silent no-ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardax._transforms.errors import NoMeshError, TransformError

AnyMesh = Mesh | AbstractMesh


ABSTRACT = "partition_specs, shardings, abstract and check"
"""The functions of layouts that need no devices."""


def resolve_mesh(
    mesh: AnyMesh | None = None, *, for_arrays_of: str | None = None
) -> AnyMesh | None:
    """Returns the mesh given, else the one in scope, else None.

    Args:
        mesh: A mesh to use as it is, or None for the one in scope.
        for_arrays_of: The name of the function that places arrays over the mesh, for the error of
            a mesh without devices; None for a mesh that need not have any.

    Returns:
        Outside of traced code the concrete ``Mesh`` in scope if there is one. Under ``jax.jit``
        the ``AbstractMesh``, because JAX hides the devices there, and inside ``jax.shard_map``
        likewise, with its axes marked Manual. A mesh entered by ``with mesh:`` is always the
        concrete one. None if no mesh with axes is in scope.

    Raises:
        TransformError: If ``mesh`` is neither a mesh nor None; with ``for_arrays_of``, if it has no
            devices, or axes of type Manual.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> resolve_mesh() is None
        True
        >>> with jax.set_mesh(mesh):
        ...     resolve_mesh() == mesh
        True
    """
    resolved = _mesh_in_scope() if mesh is None else _checked_mesh(mesh)
    if resolved is not None and for_arrays_of is not None:
        check_devices(resolved, for_arrays_of, ABSTRACT)
    return resolved


def _checked_mesh(mesh: AnyMesh) -> AnyMesh:
    """Returns what the caller gave, or raises if it is no mesh."""
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return mesh
    raise TransformError(
        f"mesh={mesh!r} of type {type(mesh).__name__} is not a mesh. Make one, for instance "
        "jax.make_mesh((2, 4), ('data', 'model')), or pass None for the mesh in scope."
    )


def _mesh_in_scope() -> AnyMesh | None:
    """Returns the mesh in scope, or None."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return _mesh_of_with_statement()

    try:
        concrete = jax.sharding.get_mesh()
    except ValueError:  # JAX refuses to name devices during tracing
        return abstract
    # Inside shard_map and under use_abstract_mesh the abstract mesh says more.
    usable = isinstance(concrete, Mesh) and not concrete.empty
    return concrete if usable and concrete.abstract_mesh == abstract else abstract


def _mesh_of_with_statement() -> Mesh | None:
    """Returns the mesh entered by ``with mesh:``, or None."""
    with jax.ensure_compile_time_eval():
        try:
            probe = jax.lax.with_sharding_constraint(np.zeros((), np.float32), PartitionSpec())
        except RuntimeError:  # no mesh of any kind is in scope
            return None
    mesh = probe.sharding.mesh if isinstance(probe.sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def require_mesh(mesh: AnyMesh | None, function: str) -> AnyMesh:
    """Returns the mesh given, else the one in scope, which ``function`` needs."""
    scope_mesh = resolve_mesh(mesh)
    if scope_mesh is None:
        raise NoMeshError(
            f"{function} needs a mesh: none was given and none is in scope. Pass one, "
            f"{function}(..., mesh=jax.make_mesh((2, 4), ('data', 'model'))), or put one in scope: "
            "with jax.set_mesh(mesh): ..."
        )
    return scope_mesh


def check_devices(mesh: AnyMesh, function: str, abstract: str) -> Mesh:
    """Returns the mesh if arrays can be placed over it.

    Args:
        mesh: The mesh.
        function: The function that places them.
        abstract: The functions that need no devices, for the message.
    """
    if not isinstance(mesh, Mesh):
        raise TransformError(
            f"{function} cannot place arrays over {mesh}, which has no devices. Pass the mesh "
            f"itself, such as jax.make_mesh((2, 4), ('data', 'model')). An AbstractMesh serves "
            f"{abstract} only."
        )
    if AxisType.Manual in mesh.axis_types:
        raise TransformError(
            f"{function} cannot place arrays over {mesh}: axes of type Manual are for the inside "
            "of jax.shard_map. Make the mesh with axes of type Auto or Explicit."
        )
    return mesh


def scope_has_devices() -> bool:
    """Whether the mesh in scope has devices, also inside a trace."""
    # True under ``jax.set_mesh``, False under ``use_abstract_mesh`` alone.
    try:  # a bare spec is made a sharding of the devices in scope
        jax.eval_shape(lambda x: jax.device_put(x, PartitionSpec()), np.zeros((), np.float32))
    except ValueError:
        return False
    return True


def mesh_text(sizes: Mapping[str, int] | Iterable[tuple[str, int]], separator: str = ", ") -> str:
    """Returns the sizes of mesh axes as text, ``data=2, model=4``."""
    return separator.join(f"{axis}={size}" for axis, size in dict(sizes).items())
