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
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardax._transforms.errors import TransformError

AnyMesh = Mesh | AbstractMesh


def resolve_mesh(mesh: AnyMesh | None = None) -> AnyMesh | None:
    """Returns the mesh given, else the one in scope, else None.

    Args:
        mesh: A mesh to use as it is, or None for the one in scope.

    Returns:
        Outside of traced code the concrete ``Mesh`` in scope if there is one. Under ``jax.jit``
        the ``AbstractMesh``, because JAX hides the devices there, and inside ``jax.shard_map``
        likewise, with its axes marked Manual. A mesh entered by ``with mesh:`` is always the
        concrete one. None if no mesh with axes is in scope.

    Raises:
        TransformError: If ``mesh`` is neither a mesh nor None.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> resolve_mesh() is None
        True
        >>> with jax.set_mesh(mesh):
        ...     resolve_mesh() == mesh
        True
    """
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return mesh
    if mesh is not None:
        raise TransformError(
            f"mesh={mesh!r} of type {type(mesh).__name__} is not a mesh. Make one, for instance "
            "jax.make_mesh((2, 4), ('data', 'model')), or pass None for the mesh in scope."
        )
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
    with jax.ensure_compile_time_eval():
        try:
            probe = jax.lax.with_sharding_constraint(np.zeros((), np.float32), PartitionSpec())
        except RuntimeError:  # no mesh of any kind is in scope
            return None
    mesh = probe.sharding.mesh if isinstance(probe.sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def scope_has_devices() -> bool:
    """Whether the mesh in scope has devices, also inside a trace."""
    # True under ``jax.set_mesh``, False under ``use_abstract_mesh`` alone.
    try:  # a bare spec is made a sharding of the devices in scope
        jax.eval_shape(lambda x: jax.device_put(x, PartitionSpec()), np.zeros((), np.float32))
    except ValueError:
        return False
    return True


def mesh_text(sizes: Mapping[str, int] | Iterable[tuple[str, int]], separator: str = ", ") -> str:
    """Sizes of mesh axes as text, ``data=2, model=4``."""
    return separator.join(f"{axis}={size}" for axis, size in dict(sizes).items())
