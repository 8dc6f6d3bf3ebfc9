# SPDX-License-Identifier: Apache-2.0
"""The mesh in scope: which mesh is meant when none is given.

JAX knows three ways to put a mesh in scope: ``jax.set_mesh(mesh)``,
``jax.sharding.use_abstract_mesh(mesh)`` and the older ``with mesh:``. The first two can be asked
for; the third is hidden, yet it still is what the user's program says, and a library that overlooks
it turns constraints into no-ops without a word. It shows in the sharding that JAX gives to an array
constrained by a bare ``PartitionSpec``, which is how it is found here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardax._transforms.errors import MeshError

AnyMesh = Mesh | AbstractMesh


def resolve_mesh(mesh: AnyMesh | None = None) -> AnyMesh | None:
    """Returns the mesh given, else the one in scope, else None.

    Args:
        mesh: A mesh to use as it is, or None for the one in scope.

    Returns:
        Outside of traced code the concrete ``Mesh`` in scope where there is one. Under ``jax.jit``
        the ``AbstractMesh``, because JAX hides the devices there, and inside ``jax.shard_map``
        likewise, with its axes marked Manual. A mesh entered by ``with mesh:`` is always the
        concrete one. None if no mesh with axes is in scope.

    Raises:
        MeshError: If ``mesh`` is neither a mesh nor None.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> resolve_mesh() is None
        True
        >>> with jax.set_mesh(mesh):
        ...     resolve_mesh() == mesh
        True
    """
    if mesh is not None:
        return _check_mesh(mesh)
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return _mesh_of_with_statement()
    concrete = _mesh_of_set_mesh()
    # Inside shard_map and under use_abstract_mesh the abstract mesh says more.
    return concrete if concrete is not None and concrete.abstract_mesh == abstract else abstract


def mesh_text(sizes: Mapping[str, int] | Iterable[tuple[str, int]], separator: str = ", ") -> str:
    """Returns the sizes of mesh axes as text.

    Args:
        sizes: Sizes by name, or pairs.
        separator: What stands between two; ``","`` gives what ``--mesh`` takes.

    Example:
        >>> mesh_text({"data": 2, "model": 4})
        'data=2, model=4'
    """
    return separator.join(f"{axis}={size}" for axis, size in dict(sizes).items())


def scope_has_devices() -> bool:
    """Whether the mesh in scope has devices, inside a trace too, where JAX does not name them.

    It has if it was entered by ``jax.set_mesh``, and has not under ``use_abstract_mesh`` alone.
    """
    try:  # a bare spec is made a sharding of the devices in scope
        jax.eval_shape(lambda x: jax.device_put(x, PartitionSpec()), np.zeros((), np.float32))
    except ValueError:
        return False
    return True


def _check_mesh(mesh: Any) -> AnyMesh:
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return mesh
    raise MeshError(
        f"mesh={mesh!r} of type {type(mesh).__name__} is not a mesh. Make one of the devices at "
        "hand, for instance mesh = jax.make_mesh((2, 4), ('data', 'model')), or pass None to use "
        "the mesh in scope."
    )


def _mesh_of_set_mesh() -> Mesh | None:
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # JAX refuses to name devices while it traces
        return None
    return mesh if isinstance(mesh, Mesh) and not mesh.empty else None


def _mesh_of_with_statement() -> Mesh | None:
    """The mesh entered by ``with mesh:``; JAX offers no function that returns it."""
    with jax.ensure_compile_time_eval():
        try:
            probe = jax.lax.with_sharding_constraint(np.zeros((), np.float32), PartitionSpec())
        except RuntimeError:  # no mesh of any kind is in scope
            return None
    mesh = probe.sharding.mesh if isinstance(probe.sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None
